//! File systems with a drive letter: CDs, sticks, and the disk where Windows is.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};

use super::disks::Disk;
use super::tool;

/// The place of the drive with Windows.
pub(crate) const C: &str = "/drive/c";
/// The place of the system partition, which has no letter.
pub(crate) const SYSTEM: &str = "/drive/system";

/// The kinds of removable drives, in the order in which Windows looks for answer files on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    RemovableWritable,
    RemovableReadOnly,
}

#[derive(Debug)]
pub(crate) struct Drive {
    pub(crate) kind: Kind,
    pub(crate) is_cd: bool,
    /// Where it is mounted.
    pub(crate) root: PathBuf,
}

/// Mounts all that is removable, in the order of drive letters.
pub(crate) fn removable(disks: &[Disk]) -> anyhow::Result<Vec<Drive>> {
    let mut drives = Vec::new();
    for disk in disks.iter().filter(|disk| disk.is_removable() || disk.is_cd()) {
        let root = PathBuf::from(format!("/drive/{}", disk.name));
        let device =
            if disk.has_partitions() && !disk.is_cd() { disk.partition(1) } else { disk.path() };
        let kind = match disk.is_readonly() {
            true => Kind::RemovableReadOnly,
            false => Kind::RemovableWritable,
        };
        let systems: &[&str] = if disk.is_cd() { &["udf"] } else { &["vfat"] };
        let mounted = systems.iter().any(|it| mount(&device, &root, it, "ro").is_ok());
        if mounted {
            drives.push(Drive { kind, is_cd: disk.is_cd(), root });
        }
    }
    Ok(drives)
}

pub(crate) fn mount(device: &str, to: &Path, system: &str, how: &str) -> anyhow::Result<()> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    let to = to.display().to_string();
    tool::busybox(&["mount", "-t", system, "-o", how, device, &to]).map(drop)
}

/// Writes everything to the disk and starts the machine again.
pub(crate) fn restart() -> anyhow::Result<()> {
    end("reboot")
}

pub(crate) fn power_off() -> anyhow::Result<()> {
    end("poweroff")
}

fn end(how: &str) -> anyhow::Result<()> {
    tool::busybox(&["sync"])?;
    let mounts = fs::read_to_string("/proc/mounts").unwrap_or_default();
    let places = mounts.lines().filter_map(|line| line.split_whitespace().nth(1));
    let drives: Vec<_> = places.filter(|place| place.starts_with("/drive/")).collect();
    for drive in drives.into_iter().rev() {
        // A file on it may be open.
        tool::busybox(&["umount", drive]).ok();
    }
    tool::busybox(&[how, "-f"])?;
    bail!("{how} came back")
}
