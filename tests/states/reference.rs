//! The next step of the reference image on a volume, by its rules as users know them. Nothing here
//! is shared with the product.

use std::fs;
use std::path::{Path, PathBuf};

/// The next step of the reference image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Theirs {
    Boots,
    /// Installs on a disk without data, which it makes if there is none.
    Installs,
    /// Deletes an unfinished disk, and installs.
    BeginsAgain,
    BacksUp,
}

/// The step for a VERSION whose medium has this name.
pub(crate) fn step(volume: &Path, medium: &str) -> Theirs {
    let wanted = custom(volume).unwrap_or_else(|| medium.to_owned());
    let base = text(&volume.join("windows.base"));
    let has_data = disk(volume).is_some();
    let is_finished = has_data && volume.join("windows.boot").is_file();
    // A custom medium that is gone does not count once Windows is installed.
    let is_gone = is_finished && is_custom(&base) && !is_custom(&wanted);
    let is_changed = !base.is_empty() && base != wanted && !is_gone;
    match () {
        () if is_finished && is_changed => Theirs::BacksUp,
        () if is_finished => Theirs::Boots,
        () if has_data => Theirs::BeginsAgain,
        () => Theirs::Installs,
    }
}

/// The name of the medium that a user put onto the volume: it has the size.
fn custom(volume: &Path) -> Option<String> {
    let path = ["custom.iso", "boot.iso"].map(|name| volume.join(name));
    let bytes = path.iter().find_map(|path| fs::metadata(path).ok())?.len();
    Some(format!("windows.{bytes}.iso"))
}

fn is_custom(name: &str) -> bool {
    let bytes = name.strip_prefix("windows.").and_then(|rest| rest.strip_suffix(".iso"));
    bytes.is_some_and(|bytes| bytes.parse::<u64>().is_ok())
}

/// The system disk, if its first 100 KiB are not all zero.
fn disk(volume: &Path) -> Option<PathBuf> {
    let disks = ["data.img", "data.qcow2"].map(|name| volume.join(name));
    disks.into_iter().find(|path| {
        fs::read(path).is_ok_and(|bytes| bytes.iter().take(100 << 10).any(|byte| *byte != 0))
    })
}

/// How the reference image would start the disk: its controller, and the prefix of the files of
/// the firmware.
pub(crate) fn machine(volume: &Path) -> (String, String) {
    let or = |text: String, usual: &str| if text.is_empty() { usual.to_owned() } else { text };
    let bus = or(text(&volume.join("windows.type")), "scsi");
    (bus, or(text(&volume.join("windows.mode")), "windows"))
}

/// The first line of a state file, which is empty if there is none.
pub(crate) fn text(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.lines().next().unwrap_or_default().to_owned()
}
