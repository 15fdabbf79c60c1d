//! Reads Windows media in place: finds files of a CD as ranges of its image, and the editions in
//! the WIM among them. Nothing is unpacked, and only directories and headers are read.
//!
//! Threats: an image on the volume may be anything. Every number in it is checked against the
//! length of the image, every structure has a maximum length, and every chain a maximum number of
//! links.

pub mod el_torito;
pub mod iso9660;
pub mod noprompt;
#[cfg(test)]
mod test;
pub mod testutil;
pub mod tree;
pub mod udf;
pub mod wim;
pub mod windows;
pub mod xml;

use std::fs::File;
use std::io::{Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail, ensure};

use self::tree::Tree as _;
use crate::files;

/// Bytes of a sector of a CD or DVD.
pub const SECTOR: u64 = 2048;
pub(crate) const SECTOR_BYTES: usize = 2048;
/// Maximum bytes of a directory. The largest of Microsoft's media has less than 100 KiB.
const MAX_DIRECTORY: u64 = 2 << 20;
/// Maximum number of extents of a file.
const MAX_EXTENTS: usize = 4096;
/// Maximum number of files in a listed directory.
const MAX_LISTED: usize = 4096;

/// Something that is read at offsets: an image, or its bytes.
pub trait Image {
    fn length(&self) -> u64;
    /// Fills the buffer. Fails beyond the end.
    fn read(&self, buffer: &mut [u8], offset: u64) -> anyhow::Result<()>;
}

/// An image in a file or on a block device.
pub struct Opened {
    file: Arc<File>,
    length: u64,
}

impl Opened {
    pub fn open(path: &Path) -> anyhow::Result<Self> {
        let of = || path.display().to_string();
        let mut file = files::open(path, File::options().read(true)).with_context(of)?;
        let length = file.seek(SeekFrom::End(0)).with_context(of)?;
        Ok(Self { file: Arc::new(file), length })
    }

    pub fn file(&self) -> &Arc<File> {
        &self.file
    }
}

impl Image for Opened {
    fn length(&self) -> u64 {
        self.length
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> anyhow::Result<()> {
        within(self.length, offset, buffer.len())?;
        Ok(self.file.read_exact_at(buffer, offset)?)
    }
}

impl Image for [u8] {
    fn length(&self) -> u64 {
        self.len() as u64
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> anyhow::Result<()> {
        within(self.length(), offset, buffer.len())?;
        let start = usize::try_from(offset)?;
        buffer.copy_from_slice(&self[start..start + buffer.len()]);
        Ok(())
    }
}

/// The image ends before something that belongs to it.
#[derive(Debug)]
pub struct Truncated {
    /// Bytes that the image has, and at least needs.
    pub length: u64,
    pub needed: u64,
}

impl std::fmt::Display for Truncated {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the image has {} bytes, and needs at least {}", self.length, self.needed)
    }
}

impl std::error::Error for Truncated {}

/// Checks that a range ends within `length` bytes.
fn within(length: u64, offset: u64, count: usize) -> anyhow::Result<()> {
    let needed = offset.checked_add(count as u64).context("an offset beyond all files")?;
    if needed > length {
        return Err(Truncated { length, needed }.into());
    }
    Ok(())
}

/// A range of the image, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    pub start: u64,
    pub length: u64,
}

/// The content of a file as ranges of the image, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Content {
    extents: Vec<Extent>,
    length: u64,
}

impl Content {
    /// All of an image that is a file itself, such as an ESD.
    pub fn of(image: &(impl Image + ?Sized)) -> anyhow::Result<Self> {
        let mut content = Self::default();
        content.push(Extent { start: 0, length: image.length() })?;
        Ok(content)
    }

    pub fn length(&self) -> u64 {
        self.length
    }

    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The only extent of a file that has just one.
    pub fn whole(&self) -> Option<Extent> {
        match self.extents[..] {
            [one] => Some(one),
            _ => None,
        }
    }

    /// Appends a range. A range that follows the previous one is joined to it.
    fn push(&mut self, next: Extent) -> anyhow::Result<()> {
        if next.length == 0 {
            return Ok(());
        }
        let end = next.start.checked_add(next.length).context("an extent beyond all files")?;
        let total = self.length.checked_add(next.length).context("a file longer than all files")?;
        ensure!(end <= i64::MAX.unsigned_abs(), "an extent beyond all files");
        self.length = total;
        match self.extents.last_mut() {
            Some(last) if last.start + last.length == next.start => last.length += next.length,
            _ => self.extents.push(next),
        }
        ensure!(self.extents.len() <= MAX_EXTENTS, "a file of more than {MAX_EXTENTS} extents");
        Ok(())
    }

    /// Cuts the padding at the end of the last extent.
    fn truncate(&mut self, length: u64) -> anyhow::Result<()> {
        ensure!(
            length <= self.length,
            "a file of {length} bytes has only {} bytes of extents",
            self.length
        );
        let mut rest = length;
        self.extents.retain_mut(|extent| {
            extent.length = extent.length.min(rest);
            rest -= extent.length;
            extent.length > 0
        });
        self.length = length;
        Ok(())
    }

    /// Checks that the image contains all of the file.
    pub fn check(&self, image: &(impl Image + ?Sized)) -> anyhow::Result<()> {
        let end = self.extents.iter().map(|extent| extent.start + extent.length).max();
        within(image.length(), end.unwrap_or(0), 0)
    }

    /// Reads from an offset in the file. Fails beyond its end.
    pub fn read(
        &self,
        image: &(impl Image + ?Sized),
        buffer: &mut [u8],
        offset: u64,
    ) -> anyhow::Result<()> {
        let (mut skip, mut done) = (offset, 0);
        for extent in &self.extents {
            if skip >= extent.length {
                skip -= extent.length;
                continue;
            }
            let room = usize::try_from(extent.length - skip).unwrap_or(usize::MAX);
            let count = room.min(buffer.len() - done);
            image.read(&mut buffer[done..done + count], extent.start + skip)?;
            (skip, done) = (0, done + count);
        }
        if done < buffer.len() {
            bail!("a file of {} bytes is read at {offset}", self.length);
        }
        Ok(())
    }

    /// All bytes of a file that has at most `limit`.
    fn all(&self, image: &(impl Image + ?Sized), limit: u64) -> anyhow::Result<Vec<u8>> {
        ensure!(self.length <= limit, "{} bytes are more than {limit}", self.length);
        self.check(image)?;
        let mut bytes = vec![0; usize::try_from(self.length)?];
        self.read(image, &mut bytes, 0)?;
        Ok(bytes)
    }
}

/// The file system of a CD.
pub enum FileSystem {
    Udf(udf::Volume),
    Iso(iso9660::Volume),
}

impl FileSystem {
    /// The file system that has the files. UDF comes first: on Microsoft's media, ISO 9660 has only
    /// a text that says so.
    pub fn open(image: &(impl Image + ?Sized)) -> anyhow::Result<Option<Self>> {
        if let Some(volume) = udf::Volume::open(image)? {
            return Ok(Some(Self::Udf(volume)));
        }
        Ok(iso9660::Volume::open(image)?.map(Self::Iso))
    }

    /// The file at a path whose parts are separated by slashes. Case is ignored.
    pub fn find(
        &self,
        image: &(impl Image + ?Sized),
        path: &str,
    ) -> anyhow::Result<Option<Content>> {
        let found = match self {
            Self::Udf(volume) => volume.find(image, path),
            Self::Iso(volume) => volume.find(image, path),
        };
        found.with_context(|| path.to_owned())
    }

    /// The files of a directory, without its directories; none if it does not exist. Names are as
    /// the image has them: they may be anything.
    pub fn list(
        &self,
        image: &(impl Image + ?Sized),
        path: &str,
    ) -> anyhow::Result<Vec<(String, Content)>> {
        let found = match self {
            Self::Udf(volume) => volume.list(image, path),
            Self::Iso(volume) => volume.list(image, path),
        };
        found.with_context(|| path.to_owned())
    }
}

/// One sector; `None` beyond the end of the image.
fn sector(
    image: &(impl Image + ?Sized),
    number: u64,
) -> anyhow::Result<Option<[u8; SECTOR_BYTES]>> {
    let offset = number.checked_mul(SECTOR).context("a sector beyond all files")?;
    if offset.checked_add(SECTOR).is_none_or(|end| end > image.length()) {
        return Ok(None);
    }
    let mut bytes = [0; SECTOR_BYTES];
    image.read(&mut bytes, offset)?;
    Ok(Some(bytes))
}

/// The bytes of a field. Fields beyond the end of their structure are an error.
pub fn field<const N: usize>(bytes: &[u8], at: usize) -> anyhow::Result<[u8; N]> {
    let part = at.checked_add(N).and_then(|end| bytes.get(at..end));
    Ok(part
        .with_context(|| format!("a structure of {} bytes is too short", bytes.len()))?
        .try_into()?)
}

pub fn u16_at(bytes: &[u8], at: usize) -> anyhow::Result<u16> {
    field(bytes, at).map(u16::from_le_bytes)
}

pub fn u32_at(bytes: &[u8], at: usize) -> anyhow::Result<u32> {
    field(bytes, at).map(u32::from_le_bytes)
}

pub fn u64_at(bytes: &[u8], at: usize) -> anyhow::Result<u64> {
    field(bytes, at).map(u64::from_le_bytes)
}

fn same_name(name: &str, wanted: &str) -> bool {
    name.eq_ignore_ascii_case(wanted)
}
