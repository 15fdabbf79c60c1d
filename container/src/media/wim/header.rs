//! The header of a WIM or ESD file, and the headers of its resources ("Windows Imaging File
//! Format", Microsoft 2007).

use anyhow::{Context as _, ensure};

use crate::media::{field, u64_at};

pub(crate) const MAGIC: &[u8; 8] = b"MSWIM\0\0\0";
pub(crate) const BYTES: usize = 208;
/// Offsets in the header: its own length and the version, the flags, the length of chunks, the
/// GUID, the number of this part and the number of parts, and the number of images.
pub(crate) const LENGTH: usize = 8;
pub(crate) const FLAGS: usize = 16;
pub(crate) const CHUNK: usize = 20;
pub(crate) const GUID: usize = 24;
pub(crate) const PARTS: usize = 40;
pub(crate) const IMAGES: usize = 44;
/// Offsets of resource headers: blob table, XML data, the metadata of the image that boots (with
/// its number behind it), and checksums of the file.
pub(crate) const BLOBS: usize = 48;
pub(crate) const XML: usize = 72;
pub(crate) const BOOT: usize = 96;
pub(crate) const INTEGRITY: usize = 124;

/// Flags of a resource.
pub(crate) mod flag {
    pub(crate) const METADATA: u8 = 2;
    pub(crate) const COMPRESSED: u8 = 4;
    pub(crate) const SPANNED: u8 = 8;
    pub(crate) const SOLID: u8 = 16;
}

/// The header of a resource (`RESHDR_DISK_SHORT`).
#[derive(Clone, Copy, Debug)]
pub(crate) struct Resource {
    /// Bytes in the file.
    pub packed: u64,
    pub flags: u8,
    pub offset: u64,
    /// Bytes of the content.
    pub length: u64,
}

impl Resource {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn read(bytes: &[u8], at: usize) -> anyhow::Result<Self> {
        // 56 bits of length, and 8 of flags.
        let (word, [flags]) = (u64_at(bytes, at)?, field(bytes, at + 7)?);
        let (offset, length) = (u64_at(bytes, at + 8)?, u64_at(bytes, at + 16)?);
        Ok(Self { packed: word & !(0xff << 56), flags, offset, length })
    }

    pub(crate) fn write(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&self.packed.to_le_bytes());
        bytes[7] = self.flags;
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.length.to_le_bytes());
        bytes
    }

    pub(crate) fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }
}

/// The text of XML data: UTF-16LE, with or without its byte order mark.
pub(crate) fn text(bytes: &[u8]) -> anyhow::Result<String> {
    ensure!(bytes.len().is_multiple_of(2), "XML data of {} bytes is not UTF-16", bytes.len());
    let units = bytes.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
    let text: Result<String, _> = char::decode_utf16(units).collect();
    text.ok().context("XML data is not UTF-16")
}
