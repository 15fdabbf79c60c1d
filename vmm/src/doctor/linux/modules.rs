//! The kernel's modules for the devices of our machines, in the order in which they can be loaded.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Component, Path, PathBuf};

use anyhow::{Context, ensure};

/// Drivers, without those they need. A kernel has some of them built in.
const NAMES: [&str; 16] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    "virtio_scsi",
    "virtio_console",
    "virtio_balloon",
    "virtio_rng",
    "nvme",
    "ahci",
    "sd_mod",
    "e1000e",
    "xhci_pci",
    "usb_storage",
    "usbhid",
    "hid_generic",
    "evdev",
];
/// Limit for the files together: they are part of the guest's memory.
const MAX_BYTES: u64 = 96 << 20;

/// Name and content of each module.
pub(super) fn read(folder: Option<&Path>) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let Some(folder) = folder else { return Ok(Vec::new()) };
    let list = folder.join("modules.dep");
    let text = fs::read_to_string(&list).with_context(|| list.display().to_string())?;
    let mut left = MAX_BYTES;
    let mut modules = Vec::new();
    for path in order(&text) {
        let path = folder.join(path);
        let size = fs::metadata(&path).with_context(|| path.display().to_string())?.len();
        let enough = left.checked_sub(size);
        ensure!(enough.is_some(), "{}: the modules exceed {MAX_BYTES} bytes", path.display());
        left = enough.unwrap_or(0);
        let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
        modules.push((name(&path), bytes));
    }
    Ok(modules)
}

/// `nvme_core` for `kernel/drivers/nvme/host/nvme-core.ko.xz`.
fn name(path: &Path) -> String {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.split(".ko").next().unwrap_or_default().replace('-', "_")
}

/// Paths of the modules in `NAMES`, each after those that it needs. A line of `modules.dep` is
/// `MODULE: NEEDED...`, and has all needed modules, the first to load last.
fn order(list: &str) -> Vec<PathBuf> {
    let lines: BTreeMap<_, _> = list
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(path, needed)| (name(Path::new(path)), (path, needed)))
        .collect();
    let (mut known, mut paths) = (BTreeSet::new(), Vec::new());
    for (path, needed) in NAMES.iter().filter_map(|&name| lines.get(name)) {
        for path in needed.split_ascii_whitespace().rev().chain([*path]) {
            let path = Path::new(path);
            let inside = path.components().all(|part| matches!(part, Component::Normal(_)));
            if inside && known.insert(path.to_owned()) {
                paths.push(path.to_owned());
            }
        }
    }
    paths
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn needed_modules_come_first_and_once() {
        let list = "k/nvme-core.ko.xz: k/t10-pi.ko.xz k/crc64.ko.xz\n\
                    k/nvme.ko.xz: k/nvme-core.ko.xz k/t10-pi.ko.xz k/crc64.ko.xz\n\
                    k/sd_mod.ko: k/t10-pi.ko.xz ../../etc/shadow\n\
                    k/other.ko:\n";
        let paths: Vec<_> = order(list).iter().map(|path| name(path)).collect();
        assert_eq!(paths, ["crc64", "t10_pi", "nvme_core", "nvme", "sd_mod"]);
    }

    #[test]
    fn a_missing_module_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("modules.dep"), "kernel/nvme.ko:\n").unwrap();
        let error = format!("{:#}", read(Some(folder.path())).unwrap_err());
        assert!(error.contains("kernel/nvme.ko"), "{error}");
        fs::create_dir(folder.path().join("kernel")).unwrap();
        fs::write(folder.path().join("kernel/nvme.ko"), "bytes").unwrap();
        let modules = read(Some(folder.path())).unwrap();
        assert_eq!(modules, [("nvme".to_owned(), b"bytes".to_vec())]);
        assert!(read(None).unwrap().is_empty());
    }
}
