//! Windows' drivers for an unattended installation: the ISO image that has them, and the controller
//! of the disks without it.

use std::path::{Path, PathBuf};

use anyhow::Context as _;

use crate::answer::release::Release;
use crate::disks::{self, below};
use crate::download::drivers::Remote;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::translate::{Adapter, Bus};
use crate::settings::value::{Value as _, quote};
use crate::settings::version::without_secrets;
use crate::settings::words::DriversFrom;
use crate::settings::{NetworkKind, Settings};
use crate::setup_disk::drivers::Drivers;
use crate::setup_disk::iso;
use crate::state::name;
use crate::status::{Failure, Status};

/// The version whose viostor damages page files (virtio-win/kvm-guest-drivers-windows, issue 1614).
const DAMAGING: [u64; 3] = [0, 1, 285];
/// The driver of virtio-net.
const NETKVM: &str = "NetKVM";

/// The ISO image with the drivers: that of DRIVERS, or a mounted one, or one on the volume. `None`
/// if there is none, or if that of DRIVERS has to be downloaded first.
pub fn local(settings: &Settings, root: &Path) -> anyhow::Result<Option<PathBuf>> {
    let volume = below(root, &settings.storage.folder);
    match &settings.media.drivers {
        Some(DriversFrom::Url(url)) => {
            let path = volume.join(name::of_drivers(url));
            Ok(path.is_file().then_some(path))
        }
        Some(named @ DriversFrom::Path(path)) => {
            let path = below(root, path);
            if !path.is_file() {
                let shown = named.show();
                let sentence =
                    format!("DRIVERS={shown}: there is no such file: mount virtio-win's ISO");
                return Err(Failure::new(Status::Missing, sentence));
            }
            Ok(Some(path))
        }
        Some(DriversFrom::Nowhere) | None => {
            let fixed = [root, &volume].map(|folder| folder.join("drivers.iso"));
            Ok(fixed.into_iter().find(|path| path.is_file()).or_else(|| newest(&volume)))
        }
    }
}

/// The newest `virtio-win*.iso` in a folder, and the damaging one only if there is no other.
fn newest(folder: &Path) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?.flatten();
    let versions = entries.filter_map(|entry| {
        let name = entry.file_name().to_str()?.to_ascii_lowercase();
        let fits = name.starts_with(name::DRIVERS) && name.ends_with(".iso");
        let rank = (!is_damaging(&name), numbers(&name));
        (fits && entry.path().is_file()).then(|| (rank, name, entry.path()))
    });
    versions.max().map(|(_, _, path)| path)
}

/// Whether this is the name of the version with the damaging driver.
fn is_damaging(name: &str) -> bool {
    numbers(name).windows(DAMAGING.len()).any(|version| version == DAMAGING)
}

/// The sentence about a driver that damages data on disks at this controller. The ISO image is
/// known by its name, or by its label if it is mounted under another.
pub(super) fn damage(bundle: Option<&Path>, remote: Option<&Remote>, bus: Bus) -> Option<String> {
    let (path, names) = match (bundle, remote) {
        (Some(path), _) => {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let label = iso::label(path).unwrap_or_default();
            (quote(&path.to_string_lossy()), vec![name, label])
        }
        (None, Some(remote)) => {
            (quote(&without_secrets(&remote.url)), vec![name::of_drivers(&remote.url)])
        }
        (None, None) => return None,
    };
    let damages = bus == Bus::Blk && names.iter().any(|name| is_damaging(name));
    damages.then(|| {
        format!(
            "{path}: its driver for DISK_TYPE=blk damages the page file of Windows: take \
             virtio-win 0.1.271, or another DISK_TYPE"
        )
    })
}

/// The numbers in a name, so that 0.1.271 is after 0.1.9.
fn numbers(name: &str) -> Vec<u64> {
    let parts = name.split(|letter: char| !letter.is_ascii_digit());
    parts.filter(|part| !part.is_empty()).map(|it| it.parse().unwrap_or(u64::MAX)).collect()
}

/// Whether the system disk has nothing that could need its controller.
pub fn is_new_disk(settings: &Settings, root: &Path) -> bool {
    let found = disks::find(0, settings, root).ok().flatten();
    found.is_none_or(|found| !found.disk.is_written())
}

/// The drivers of a bundle for a release; none without a bundle.
pub fn read(bundle: Option<&Path>, release: Release) -> anyhow::Result<Drivers> {
    match bundle {
        Some(path) => Drivers::of(&iso::bundle(path)?, release.drivers())
            .with_context(|| path.display().to_string()),
        None => Ok(Drivers::none()),
    }
}

/// The controller of the disks when Windows' drivers lack `missing`. A new disk gets one that
/// Windows knows.
///
/// # Errors
///
/// If DISK_TYPE asks for another.
pub fn controller(
    input: &ParsedEnvironment,
    missing: &[&str],
    is_new: bool,
) -> anyhow::Result<Bus> {
    let settings = &input.settings;
    let bus = settings.disk.controller.value;
    if !is_new || settings.disk.disable {
        return Ok(bus);
    }
    let needed = match bus {
        Bus::Usb => {
            let sentence = "DISK_TYPE=usb: Windows Setup installs to no USB disk: leave it out";
            return Err(Failure::new(Status::Disk, sentence.to_owned()));
        }
        Bus::Scsi => "vioscsi",
        Bus::Blk => "viostor",
        Bus::Auto | Bus::Nvme | Bus::Ahci | Bus::None => return Ok(bus),
    };
    if !missing.contains(&needed) {
        return Ok(bus);
    }
    if input.names.contains("DISK_TYPE") {
        let out = match settings.media.drivers {
            Some(DriversFrom::Nowhere) => "or leave DRIVERS=N or DISK_TYPE out",
            _ => "or leave DISK_TYPE out",
        };
        let mount = "mount virtio-win's ISO as /drivers.iso";
        let shown = bus.show();
        let sentence = format!(
            "DISK_TYPE={shown}: Windows Setup needs a signed driver {needed} for this disk"
        );
        return Err(Failure::new(Status::Disk, format!("{sentence}: {mount}, {out}")));
    }
    Ok(Bus::Nvme)
}

/// The model of the network card when Windows' drivers lack `missing`. A new system gets one that
/// Windows knows, unless ADAPTER is set.
pub fn adapter(input: &ParsedEnvironment, missing: &[&str], is_new: bool) -> Adapter {
    let lacks = is_new && missing.contains(&NETKVM) && !input.names.contains("ADAPTER");
    if lacks { Adapter::E1000e } else { input.settings.network.adapter.value }
}

/// The sentence about drivers that a new system lacks. `bus` is the controller without them.
pub(super) fn lack(input: &ParsedEnvironment, missing: &[&str], bus: Bus) -> Option<String> {
    let settings = &input.settings;
    let is_moved = bus != settings.disk.controller.value;
    let disk = is_moved.then(|| format!("the new disk is DISK_TYPE={}", bus.show()));
    let has_card = settings.network.kind != NetworkKind::None;
    let before = settings.network.adapter.value;
    let network = match adapter(input, missing, true) {
        _ if !has_card || !missing.contains(&NETKVM) => None,
        Adapter::Virtio => Some("Windows has no network until you install NetKVM".to_owned()),
        now => (now != before).then(|| format!("the network card is ADAPTER={}", now.show())),
    };
    let what: Vec<_> = disk.into_iter().chain(network).collect();
    let what = what.join(", and ");
    let mount = "mount virtio-win's ISO as /drivers.iso before the installation";
    let out = match settings.media.drivers {
        Some(DriversFrom::Nowhere) => "leave DRIVERS=N out",
        _ => "set DRIVERS to its URL",
    };
    (!what.is_empty())
        .then(|| format!("drivers that this Windows takes are missing: {what}: {mount}, or {out}"))
}
