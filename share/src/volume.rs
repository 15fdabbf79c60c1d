//! QUERY_INFO of volumes ([MS-FSCC] 2.5).

use crate::server::Share;
use crate::status::{Answer, Status};
use crate::wire::{Put, size32, utf16};

mod class {
    pub(super) const VOLUME: u8 = 1;
    pub(super) const SIZE: u8 = 3;
    pub(super) const DEVICE: u8 = 4;
    pub(super) const ATTRIBUTE: u8 = 5;
    pub(super) const FULL_SIZE: u8 = 7;
    pub(super) const SECTOR_SIZE: u8 = 11;
}

/// The sector size that is reported. Clusters are blocks of the host.
const SECTOR: u64 = 512;
/// Names keep their case, are Unicode, and files may be sparse.
const ATTRIBUTES: u32 = 0x2 | 0x4 | 0x40;
const READ_ONLY_VOLUME: u32 = 0x8_0000;
/// Programs look for it: only NTFS is expected to have large files.
const FILE_SYSTEM: &str = "NTFS";

pub fn query(share: &Share, class: u8) -> Answer<(usize, Vec<u8>)> {
    let mut out = Vec::new();
    let fixed = match class {
        class::VOLUME => {
            let label = utf16(&share.name);
            out.put64(0).put32(share.folder.serial()).put32(size32(label.len())).put16(0);
            out.put(&label);
            24
        }
        class::SIZE => {
            let (total, _, available, cluster) = blocks(share)?;
            out.put64(total).put64(available).put32(cluster).put32(512);
            24
        }
        class::FULL_SIZE => {
            let (total, free, available, cluster) = blocks(share)?;
            out.put64(total).put64(available).put64(free).put32(cluster).put32(512);
            32
        }
        // A disk, mounted.
        class::DEVICE => out.put32(7).put32(0x20).len(),
        class::ATTRIBUTE => {
            let name = utf16(FILE_SYSTEM);
            let attributes =
                if share.read_only { ATTRIBUTES | READ_ONLY_VOLUME } else { ATTRIBUTES };
            out.put32(attributes).put32(255).put32(size32(name.len())).put(&name);
            16
        }
        class::SECTOR_SIZE => {
            out.put32(512).put32(4096).put32(4096).put32(4096).put32(3).put32(0).put32(0);
            28
        }
        _ => return Err(Status::INVALID_INFO_CLASS),
    };
    Ok((fixed, out))
}

/// Clusters: all, free, free for us; and sectors of a cluster.
fn blocks(share: &Share) -> Answer<(u64, u64, u64, u32)> {
    let volume = share.folder.volume()?;
    let cluster = u32::try_from(volume.f_frsize / SECTOR).unwrap_or(8).max(1);
    Ok((volume.f_blocks, volume.f_bfree, volume.f_bavail, cluster))
}
