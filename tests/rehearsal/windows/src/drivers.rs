//! Drivers that Windows does not have. An INF file says for which device it is, and only then the
//! kernel's own driver for that device is loaded.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

use super::console::say;
use super::{files, tool};

const DEVICES: &str = "/sys/bus/pci/devices";
/// Place of the drivers of an installed Windows.
const STORE: &str = "Windows/System32/DriverStore/FileRepository";
/// Devices whose drivers are rehearsed: PCI identity, and the kernel's module. A built-in driver
/// has none, and is used only by those who ask for it.
const KNOWN: [(&str, Option<&str>); 5] = [
    ("VEN_1AF4&DEV_1041", Some("virtio_net")),
    ("VEN_1AF4&DEV_1042", Some("virtio_blk")),
    ("VEN_1AF4&DEV_1043", None),
    ("VEN_1AF4&DEV_1045", Some("virtio_balloon")),
    ("VEN_1AF4&DEV_1048", Some("virtio_scsi")),
];
/// The modules that the boot loader loads.
const BOOT: [&str; 2] = ["virtio_blk", "virtio_scsi"];

/// A driver package.
#[derive(Debug)]
pub(crate) struct Package {
    inf: PathBuf,
    /// The identities of devices in it, in upper case.
    devices: Vec<String>,
}

/// Loads the driver of one INF file.
pub(crate) fn load_one(inf: &Path) -> anyhow::Result<()> {
    let package = read(inf).with_context(|| inf.display().to_string())?;
    load(&[package])
}

/// Reads all packages below a folder. A package without its catalog or its driver is not loaded.
pub(crate) fn packages(folder: &Path) -> anyhow::Result<Vec<Package>> {
    let is_inf = |path: &PathBuf| path.extension().is_some_and(|it| it.eq_ignore_ascii_case("inf"));
    let mut found = Vec::new();
    for inf in files::all(folder)?.into_iter().filter(is_inf) {
        let package = read(&inf).with_context(|| inf.display().to_string());
        match package {
            Ok(package) => found.push(package),
            Err(error) => say!("driver not loaded: {error:#}"),
        }
    }
    Ok(found)
}

fn read(inf: &Path) -> anyhow::Result<Package> {
    let text = files::text(inf)?;
    let folder = inf.parent().context("no folder")?;
    let lines = text.lines().map(|line| line.split(';').next().unwrap_or_default().trim());
    let lines: Vec<_> = lines.collect();
    let has = |key: &str| {
        let mut pairs = lines.iter().filter_map(|line| line.split_once('='));
        pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case(key)).map(|(_, value)| value.trim())
    };
    let signature = has("Signature").context("no [Version] with a signature")?;
    ensure!(signature.to_ascii_lowercase().contains("$windows nt$"), "Signature={signature}");
    let catalog = has("CatalogFile").context("no catalog, which has the signature")?;
    ensure!(files::below(folder, catalog).exists(), "{catalog}: no such file");
    let sources = lines.iter().skip_while(|line| !line.eq_ignore_ascii_case("[SourceDisksFiles]"));
    for line in sources.skip(1).take_while(|line| !line.starts_with('[')) {
        let name = line.split('=').next().unwrap_or_default().trim();
        ensure!(name.is_empty() || files::below(folder, name).exists(), "{name}: no such file");
    }
    let upper = text.to_ascii_uppercase();
    let devices = upper.split("PCI\\").skip(1).map(|rest| {
        let end = rest.find(|it: char| !it.is_ascii_alphanumeric() && it != '_' && it != '&');
        rest[..end.unwrap_or(rest.len())].to_owned()
    });
    Ok(Package { inf: inf.to_owned(), devices: devices.collect() })
}

impl Package {
    fn fits(&self, device: &str) -> bool {
        self.devices.iter().any(|it| it == device || it.starts_with(&format!("{device}&")))
    }
}

/// The identities of the devices of this machine.
fn plugged() -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(DEVICES)? {
        let path = entry?.path();
        let [vendor, device] = ["vendor", "device"].map(|name| {
            let text = fs::read_to_string(path.join(name)).unwrap_or_default();
            text.trim().trim_start_matches("0x").to_ascii_uppercase()
        });
        found.push(format!("VEN_{vendor}&DEV_{device}"));
    }
    Ok(found)
}

/// The identities for which there are a device and a package.
pub(crate) fn served(packages: &[Package]) -> anyhow::Result<Vec<&'static str>> {
    let plugged = plugged()?;
    let known = KNOWN.iter().map(|(device, _)| *device);
    let serves = |device: &&str| {
        plugged.iter().any(|it| it == device) && packages.iter().any(|it| it.fits(device))
    };
    Ok(known.filter(serves).collect())
}

/// Loads drivers for the devices of this machine.
pub(crate) fn load(packages: &[Package]) -> anyhow::Result<()> {
    for device in served(packages)? {
        let module = KNOWN.iter().find(|(it, _)| *it == device).and_then(|(_, module)| *module);
        say!("driver for {device} loaded");
        if let Some(module) = module {
            insert(module)?;
        }
    }
    Ok(())
}

/// The kernel's names of the drivers that the boot loader has to load on this machine.
pub(crate) fn of_boot(packages: &[Package]) -> anyhow::Result<Vec<&'static str>> {
    let served = served(packages)?;
    let modules = KNOWN.iter().filter(|(device, _)| served.contains(device));
    Ok(modules.filter_map(|(_, module)| *module).filter(|it| BOOT.contains(it)).collect())
}

/// Loads one of the kernel's modules, unless it is there.
pub(crate) fn insert(module: &str) -> anyhow::Result<()> {
    if Path::new("/sys/module").join(module).exists() {
        return Ok(());
    }
    let path = format!("/drivers/{module}.ko");
    ensure!(Path::new(&path).exists(), "{module}: no such driver");
    tool::busybox(&["insmod", &path]).map(drop)
}

/// Adds the packages to the drivers of an installed Windows.
pub(crate) fn store(packages: &[Package], windows: &Path) -> anyhow::Result<()> {
    for package in packages {
        let name = package.inf.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        let folder = package.inf.parent().context("no folder")?;
        files::copy(folder, &windows.join(STORE).join(format!("{name}_amd64")))?;
    }
    say!("{} driver packages in the store", packages.len());
    Ok(())
}

pub(crate) fn stored(windows: &Path) -> anyhow::Result<Vec<Package>> {
    packages(&windows.join(STORE))
}

#[cfg(test)]
mod test {
    use super::*;

    const INF: &str = "[Version]\r\nSignature=\"$Windows NT$\"\r\n\
        CatalogFile = viostor.cat ; signed\r\n\
        [SourceDisksFiles]\r\nviostor.sys = 1,,\r\n[Models.NTamd64]\r\n\
        %Name% = Install, PCI\\VEN_1AF4&DEV_1042&SUBSYS_11001AF4&REV_01\r\n";

    #[test]
    fn packages_are_whole_and_name_their_devices() {
        let folder = tempfile::tempdir().unwrap();
        let put = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
        let wide: Vec<u8> = ['\u{feff}']
            .into_iter()
            .chain(INF.chars())
            .flat_map(|it| (it as u16).to_le_bytes())
            .collect();
        put("viostor.inf", &wide);
        put("VIOSTOR.CAT", b"");
        assert!(packages(folder.path()).unwrap().is_empty(), "it has no driver");
        put("viostor.sys", b"");
        let found = packages(folder.path()).unwrap();
        assert!(found[0].fits("VEN_1AF4&DEV_1042") && !found[0].fits("VEN_1AF4&DEV_104"));
        put("viostor.inf", INF.replace("NT$", "95$").as_bytes());
        assert!(packages(folder.path()).unwrap().is_empty(), "it is for another Windows");
    }
}
