//! Drivers of virtio-win for the set-up disk: the folder of each for a release of Windows, and the
//! place where Windows' setup looks for it.

use std::time::SystemTime;

use anyhow::Context as _;

use super::content::Content;
use super::tree::Item;

/// Windows' setup loads drivers from here, and adds them to the installed Windows.
const LOADED: &str = "$WinPEDriver$";
/// Windows' setup copies this folder to C:\Windows\Drivers, for the script at its end.
const COPIED: &str = "$OEM$/$$/Drivers";

/// Drivers of devices that this machine has, or the reference image's. The display's is not among
/// them, because it disturbs Windows' setup.
const DRIVERS: [&str; 10] = [
    "viostor",
    "vioscsi",
    "NetKVM",
    "Balloon",
    "vioserial",
    "viorng",
    "vioinput",
    "viofs",
    "viomem",
    "pvpanic",
];
/// Installed by the script: driver, and the files that it needs; none for all.
const INSTALLED_LAST: [(&str, &[&str]); 2] = [("viogpudo", &[]), ("Balloon", &["blnsvr.exe"])];
/// The guest agent's folder, which is the same for all releases, and its installer.
const AGENT: (&str, &str) = ("guest-agent", "qemu-ga-x86_64.msi");
const ARCHITECTURE: &str = "amd64";
/// Symbols for debuggers, which are most of a bundle.
const SYMBOLS: &str = ".pdb";

/// Older releases whose drivers fit too, the best first. Bundles are older than some releases, and
/// not every driver has a folder for each.
const OLDER: [(&str, &[&str]); 8] = [
    ("w8.1", &["w8"]),
    ("w10", &[]),
    ("w11", &["w10"]),
    ("2k12R2", &["2k12"]),
    ("2k16", &["w10"]),
    ("2k19", &["2k16", "w10"]),
    ("2k22", &["2k19", "2k16", "w10"]),
    ("2k25", &["2k22", "2k19", "2k16", "w11", "w10"]),
];

/// Releases for which most bundles have drivers with a signature for tests, which Setup refuses.
const OLD: [&str; 2] = ["w8.1", "2k12R2"];
/// End of the name of the file with a driver's signature, and the signer in it if that is for all.
const CATALOG: &str = ".cat";
const SIGNER: &[u8] = b"Microsoft Windows Hardware Compatibility";

/// Maximum bytes of a catalog that is read: real ones have about 12 KB.
const MAX_CATALOG: u64 = 1 << 20;

/// An ISO image or archive with the folders of virtio-win.
pub trait Bundle {
    /// The files of a folder, which are none if there is no such folder. The path has slashes;
    /// names differ in more than case.
    fn files(&self, folder: &str) -> anyhow::Result<Vec<BundleFile>>;
}

pub struct BundleFile {
    pub name: String,
    pub content: Content,
    pub modified: SystemTime,
}

/// The drivers for a release.
pub struct Drivers {
    pub items: Vec<Item>,
    /// Drivers that the bundle does not have for this release, or only with a signature for tests.
    pub missing: Vec<&'static str>,
}

impl Drivers {
    /// Without a bundle.
    pub fn none() -> Self {
        Self { items: Vec::new(), missing: DRIVERS.to_vec() }
    }

    /// `release` is the name of its folders, such as `w11` or `2k25`.
    pub fn of(bundle: &dyn Bundle, release: &str) -> anyhow::Result<Self> {
        let mut drivers = Self { items: Vec::new(), missing: Vec::new() };
        for driver in DRIVERS {
            let files = find(bundle, driver, release)?;
            if files.is_empty() {
                drivers.missing.push(driver);
            }
            drivers.add(LOADED, driver, files, &[]);
        }
        for (driver, wanted) in INSTALLED_LAST {
            drivers.add(COPIED, driver, find(bundle, driver, release)?, wanted);
        }
        let (agent, installer) = AGENT;
        drivers.add(COPIED, agent, bundle.files(agent)?, &[installer]);
        Ok(drivers)
    }

    /// Adds these files, or only those that are wanted if there are any.
    fn add(&mut self, place: &str, driver: &str, files: Vec<BundleFile>, wanted: &[&str]) {
        let is_wanted =
            |name: &str| wanted.is_empty() || wanted.iter().any(|it| it.eq_ignore_ascii_case(name));
        for BundleFile { name, content, modified } in files {
            if is_wanted(&name) && !name.to_ascii_lowercase().ends_with(SYMBOLS) {
                let path = format!("{place}/{driver}/{name}");
                self.items.push(Item { path, content: Some(content), modified });
            }
        }
    }
}

/// Whether Windows takes the driver with these files.
fn is_signed(release: &str, files: &[BundleFile]) -> anyhow::Result<bool> {
    if !OLD.contains(&release) {
        return Ok(true);
    }
    let is_catalog = |file: &&BundleFile| file.name.to_ascii_lowercase().ends_with(CATALOG);
    for catalog in files.iter().filter(is_catalog) {
        let bytes = catalog.content.read(MAX_CATALOG).with_context(|| catalog.name.clone())?;
        if bytes.windows(SIGNER.len()).any(|it| it == SIGNER) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// The files of a driver for a release, or for the next older one that there is.
fn find(bundle: &dyn Bundle, driver: &str, release: &str) -> anyhow::Result<Vec<BundleFile>> {
    let older = OLDER.iter().find(|(name, _)| *name == release).map_or(&[][..], |(_, older)| older);
    for folder in [release].iter().chain(older) {
        let files = bundle.files(&format!("{driver}/{folder}/{ARCHITECTURE}"))?;
        if !files.is_empty() && is_signed(release, &files)? {
            return Ok(files);
        }
    }
    Ok(Vec::new())
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::answer::release::Release;

    /// The files of a bundle, by their paths.
    struct Listed(&'static [&'static str]);

    impl Bundle for Listed {
        fn files(&self, folder: &str) -> anyhow::Result<Vec<BundleFile>> {
            let names = self.0.iter().filter_map(|path| {
                let (above, name) = path.rsplit_once('/')?;
                (above == folder).then(|| name.to_owned())
            });
            let file = |name| BundleFile {
                name,
                content: Content::Bytes(Vec::new()),
                modified: SystemTime::UNIX_EPOCH,
            };
            Ok(names.map(file).collect())
        }
    }

    fn paths(release: &str) -> (Vec<String>, Vec<&'static str>) {
        let bundle = Listed(&[
            "viostor/w10/amd64/viostor.sys",
            "viostor/w10/amd64/viostor.pdb",
            "viostor/w11/amd64/viostor.inf",
            "viostor/w11/x86/viostor.sys",
            "vioscsi/2k16/amd64/vioscsi.inf",
            "Balloon/w10/amd64/balloon.inf",
            "Balloon/w10/amd64/blnsvr.exe",
            "viogpudo/w10/amd64/viogpudo.inf",
            "guest-agent/qemu-ga-i386.msi",
            "guest-agent/qemu-ga-x86_64.msi",
        ]);
        let drivers = Drivers::of(&bundle, release).unwrap();
        (drivers.items.into_iter().map(|item| item.path).collect(), drivers.missing)
    }

    #[test]
    fn each_release_gets_its_drivers_or_older_ones() {
        let same = [
            "$WinPEDriver$/Balloon/balloon.inf",
            "$WinPEDriver$/Balloon/blnsvr.exe",
            "$OEM$/$$/Drivers/viogpudo/viogpudo.inf",
            "$OEM$/$$/Drivers/Balloon/blnsvr.exe",
            "$OEM$/$$/Drivers/guest-agent/qemu-ga-x86_64.msi",
        ];
        let (found, missing) = paths("w11");
        assert_eq!(found, [&["$WinPEDriver$/viostor/viostor.inf"][..], &same].concat());
        assert_eq!(missing[0], "vioscsi");
        let (found, missing) = paths("2k25");
        let own = ["$WinPEDriver$/viostor/viostor.inf", "$WinPEDriver$/vioscsi/vioscsi.inf"];
        assert_eq!(found, [&own[..], &same].concat());
        assert_eq!(
            missing,
            ["NetKVM", "vioserial", "viorng", "vioinput", "viofs", "viomem", "pvpanic"]
        );
        let (found, missing) = paths("2k12R2");
        assert_eq!((found, missing.len()), (vec![same[4].to_owned()], DRIVERS.len()));
    }

    /// Releases that a bundle has folders for, as the table of its makers has them (`filemap.py` of
    /// virtio-win-pkg-scripts), for drivers of 64-bit Windows from 8.1 on.
    const FOLDERS: [(&str, &[&str]); 11] = [
        ("viostor", ALL),
        ("vioscsi", ALL),
        ("NetKVM", ALL),
        ("Balloon", ALL),
        ("vioserial", ALL),
        ("viorng", ALL),
        ("vioinput", ALL),
        ("viofs", ALL),
        ("viomem", NEW),
        ("pvpanic", ALL),
        ("viogpudo", ALL),
    ];
    const ALL: &[&str] = &["w8.1", "2k12R2", "w10", "2k16", "2k19", "2k22", "w11", "2k25"];
    const NEW: &[&str] = &["w10", "2k16", "2k19", "2k22", "w11", "2k25"];

    /// A bundle with all folders of the table, whose files name their folder, and whose drivers for
    /// old releases are signed, too, or not.
    struct Real {
        signed: bool,
    }

    impl Bundle for Real {
        fn files(&self, folder: &str) -> anyhow::Result<Vec<BundleFile>> {
            let names: &[&str] = match folder.split('/').collect::<Vec<_>>()[..] {
                ["guest-agent"] => &["qemu-ga-i386.msi", "qemu-ga-x86_64.msi"],
                [driver, release, "amd64"] => {
                    let there = FOLDERS.iter().any(|it| it.0 == driver && it.1.contains(&release));
                    if there { &FILES } else { &[] }
                }
                _ => &[],
            };
            let signer = if self.signed { SIGNER } else { b"Test" };
            let file = |name: &&str| BundleFile {
                name: (*name).to_owned(),
                content: Content::Bytes([signer, folder.as_bytes()].concat()),
                modified: SystemTime::UNIX_EPOCH,
            };
            Ok(names.iter().map(file).collect())
        }
    }

    const FILES: [&str; 3] = ["blnsvr.exe", "x.CAT", "x.sys"];

    #[test]
    fn old_releases_get_no_drivers_with_a_signature_for_tests() {
        for release in OLD {
            let Drivers { items, missing } = Drivers::of(&Real { signed: false }, release).unwrap();
            let paths: Vec<_> = items.iter().map(|item| &*item.path).collect();
            assert_eq!(paths, ["$OEM$/$$/Drivers/guest-agent/qemu-ga-x86_64.msi"]);
            assert_eq!(missing, DRIVERS);
        }
        let Drivers { missing, .. } = Drivers::of(&Real { signed: false }, "w10").unwrap();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn each_windows_gets_the_folders_of_its_release() {
        for (release, folder) in [
            (Release::Windows81, "w8.1"),
            (Release::Windows10, "w10"),
            (Release::Windows11, "w11"),
            (Release::Server2012R2, "2k12R2"),
            (Release::Server2016, "2k16"),
            (Release::Server2019, "2k19"),
            (Release::HyperV2019, "2k19"),
            (Release::Server2022, "2k22"),
            (Release::Server2025, "2k25"),
        ] {
            let Drivers { items, missing } =
                Drivers::of(&Real { signed: true }, release.drivers()).unwrap();
            let is_old = matches!(release, Release::Windows81 | Release::Server2012R2);
            assert_eq!(missing, if is_old { &["viomem"][..] } else { &[] }, "{release:?}");
            let mut found: Vec<_> = items.iter().map(|item| item.path.clone()).collect();
            let loaded = DRIVERS.iter().filter(|driver| !missing.contains(driver));
            let loaded = loaded
                .flat_map(|driver| FILES.map(|name| format!("$WinPEDriver$/{driver}/{name}")));
            let mut wanted: Vec<_> = loaded.collect();
            let last = FILES.map(|name| format!("viogpudo/{name}"));
            let last = last.into_iter().chain(["Balloon/blnsvr.exe".into()]);
            wanted.extend(last.map(|path| format!("$OEM$/$$/Drivers/{path}")));
            wanted.push("$OEM$/$$/Drivers/guest-agent/qemu-ga-x86_64.msi".into());
            found.sort();
            wanted.sort();
            assert_eq!(found, wanted, "{release:?}");
            for item in items.iter().filter(|item| !item.path.contains("guest-agent")) {
                let Some(Content::Bytes(from)) = &item.content else { panic!("{}", item.path) };
                let from = String::from_utf8_lossy(from);
                assert!(from.ends_with(&format!("/{folder}/amd64")), "{}: {from}", item.path);
            }
        }
    }
}
