//! Selects images of an archive: their part of the XML data, and the archive without the others.

use std::fmt::Write as _;
use std::ops::Range;

use anyhow::{Context as _, ensure};

use super::archive::{Archive, ENTRY_BYTES};
use crate::media::wim::header::{self, Resource, flag};

/// Offset of the flags in an entry of the blob table.
const ENTRY_FLAGS: usize = 7;

/// XML data of some images, numbered anew.
pub(super) struct Images(String);

impl Images {
    /// Selects images of XML data, counted from 0.
    pub(super) fn of(xml: &str, images: Range<usize>) -> anyhow::Result<Self> {
        let all: Vec<&str> = xml.split("<IMAGE ").skip(1).collect();
        let wanted = all.get(images).context("images without XML data")?;
        let mut new = String::new();
        for (number, image) in (1..).zip(wanted) {
            let (image, _) = image.split_once("</IMAGE>").context("an image without its end")?;
            let (_, rest) = image.split_once('>').context("an image without its number")?;
            write!(new, "<IMAGE INDEX=\"{number}\">{rest}</IMAGE>")?;
        }
        Ok(Self(new))
    }

    /// XML data of an archive that has this length without it. UTF-16, with a byte order mark.
    pub(super) fn xml(&self, length: u64) -> Vec<u8> {
        let text = format!("\u{feff}<WIM><TOTALBYTES>{length}</TOTALBYTES>{}</WIM>", self.0);
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }
}

/// The header and the end of an archive without its first images. Between them is the archive's
/// own content.
pub(super) struct Rest {
    pub header: [u8; header::BYTES],
    pub end: Vec<u8>,
}

/// Makes the archive without its first images. Their blobs stay, since solid resources have blobs
/// of all images.
pub(super) fn without_first(archive: &Archive, count: usize) -> anyhow::Result<Rest> {
    let images = archive.images();
    ensure!(count < images, "no image but the first {count}");
    let mut skipped = 0;
    let is_kept = |entry: &&[u8]| {
        let is_image = entry[ENTRY_FLAGS] & flag::METADATA != 0;
        skipped += usize::from(is_image && skipped < count + 1);
        !is_image || skipped > count
    };
    let entries = archive.table.chunks_exact(ENTRY_BYTES).filter(is_kept);
    let table = entries.collect::<Vec<_>>().concat();
    let xml = Images::of(&archive.xml, count..images)?.xml(archive.length() + table.len() as u64);
    let at = |offset: u64, bytes: &[u8]| {
        let length = bytes.len() as u64;
        Resource { packed: length, flags: flag::METADATA, offset, length }.write()
    };
    let start = archive.length();
    let mut header = archive.header;
    let mut put = |at: usize, bytes: &[u8]| header[at..at + bytes.len()].copy_from_slice(bytes);
    put(header::IMAGES, &u32::try_from(images - count)?.to_le_bytes());
    put(header::BLOBS, &at(start, &table));
    put(header::XML, &at(start + table.len() as u64, &xml));
    put(header::BOOT, &[0; Resource::BYTES + 4]);
    put(header::INTEGRITY, &[0; Resource::BYTES]);
    Ok(Rest { header, end: [table, xml].concat() })
}
