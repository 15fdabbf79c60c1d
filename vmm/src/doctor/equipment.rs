//! The devices of the machines that `doctor --run` starts: one of each kind that needs nothing of
//! the host. Disks are in memory.

use std::fs::File;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::FileExt as _;

use anyhow::Context;
use rustix::fs::{MemfdFlags, memfd_create};

/// Kinds of disks. Their sizes differ, by which a guest's report is matched with them.
const DISKS: [&str; 5] = ["nvme", "virtio-blk", "virtio-scsi", "ahci-disk", "usb-storage"];
/// xHCI precedes the devices at its ports.
const OTHERS: [&str; 9] = [
    "xhci",
    "edu",
    "e1000e,to=none",
    "virtio-net,to=none",
    "virtio-rng",
    "virtio-balloon",
    "virtio-serial,name=org.transom.doctor",
    "usb-keyboard",
    "usb-tablet",
];
/// Size of the first disk, and length of the beginning that a guest reads.
const MIB: u64 = 4;
pub(super) const READ: usize = 64 << 10;

pub(super) struct Disk {
    pub(super) kind: &'static str,
    pub(super) bytes: u64,
    /// FNV-1a of the first `READ` bytes.
    pub(super) hash: u64,
    file: File,
}

/// A disk of each kind, with different content.
pub(super) fn disks() -> anyhow::Result<Vec<Disk>> {
    DISKS.into_iter().zip(0..).map(|(kind, number)| Disk::new(kind, number)).collect()
}

impl Disk {
    fn new(kind: &'static str, number: u64) -> anyhow::Result<Self> {
        let (file, bytes) = (memory_file("disk")?, (MIB + number) << 20);
        file.set_len(bytes).context("a disk in memory")?;
        let content = content(number);
        file.write_all_at(&content, 0).context("a disk in memory")?;
        Ok(Self { kind, bytes, hash: hash(&content), file })
    }
}

/// A file in memory.
pub(super) fn memory_file(name: &str) -> anyhow::Result<File> {
    Ok(memfd_create(name, MemfdFlags::CLOEXEC).context("a file in memory")?.into())
}

/// The path by which another process of this user opens a file of this process.
pub(super) fn path_of(file: &File) -> String {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd())
}

/// Bytes without a partition table.
fn content(number: u64) -> Vec<u8> {
    let mut state = number + 1;
    let mut bytes = Vec::with_capacity(READ);
    while bytes.len() < READ {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        bytes.extend(state.rotate_right(29).to_le_bytes());
    }
    bytes[510] = 0;
    bytes
}

fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3)
    })
}

/// Options of `vmm run` for these disks and all other devices.
pub(super) fn options(disks: &[Disk]) -> Vec<String> {
    let disks = disks.iter().map(|disk| format!("{},path={}", disk.kind, path_of(&disk.file)));
    let all = OTHERS.into_iter().map(str::to_owned).chain(disks);
    all.flat_map(|device| ["--device".to_owned(), device]).collect()
}

/// Number of processors of a machine: two, if the host has two.
pub(super) fn processors() -> usize {
    std::thread::available_parallelism().map_or(1, |count| count.get().min(2))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn disks_differ_in_size_and_content() {
        let disks = disks().unwrap();
        for (number, disk) in disks.iter().enumerate() {
            let others = disks[..number].iter();
            assert!(others.clone().all(|other| other.bytes != disk.bytes));
            assert!(others.clone().all(|other| other.hash != disk.hash));
            assert_eq!(std::fs::metadata(path_of(&disk.file)).unwrap().len(), disk.bytes);
        }
        assert_eq!(options(&disks).len(), 2 * (DISKS.len() + OTHERS.len()));
        // A known value of FNV-1a.
        assert_eq!(hash(b"a"), 0xaf63_dc4c_8601_ec8c);
    }
}
