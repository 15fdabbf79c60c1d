//! Contents of files: bytes, or ranges of other files, which are read when the disk is written.

use std::fs::File;
use std::io::{self, ErrorKind, Read as _};
use std::num::NonZeroU64;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context as _;
use rustix::fs::{Advice, fadvise};

use super::folder::Folder;
use crate::media::Extent;

/// Bytes that are copied at once.
const CHUNK_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub enum Content {
    Bytes(Vec<u8>),
    /// Ranges of an open file, such as those of a driver on an ISO image.
    Ranges {
        file: Arc<File>,
        extents: Vec<Extent>,
    },
    /// A file of a folder. It is opened only while it is copied: a process may not have as many
    /// open files as the folder has.
    Within {
        folder: Arc<Folder>,
        path: PathBuf,
        length: u64,
    },
}

impl Content {
    /// Makes the host read all ranges at once: a disk is slow if it is asked for one after the
    /// other.
    pub(super) fn read_ahead(&self) {
        let Self::Ranges { file, extents } = self else { return };
        for extent in extents {
            // A file system without a page cache refuses, and has no need.
            fadvise(file, extent.start, NonZeroU64::new(extent.length), Advice::WillNeed).ok();
        }
    }

    /// The first `most` bytes.
    pub(super) fn read(&self, most: u64) -> anyhow::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        match self {
            Self::Bytes(all) => all.as_slice().take(most).read_to_end(&mut bytes)?,
            Self::Ranges { file, extents } => {
                let mut left = most;
                for Extent { start, length } in extents {
                    let part = (*length).min(left);
                    let at = bytes.len();
                    bytes.resize(at + usize::try_from(part)?, 0);
                    file.read_exact_at(&mut bytes[at..], *start)?;
                    left -= part;
                }
                bytes.len()
            }
            Self::Within { folder, path, .. } => {
                folder.file(path)?.take(most).read_to_end(&mut bytes)?
            }
        };
        Ok(bytes)
    }

    pub(super) fn length(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Ranges { extents, .. } => extents.iter().map(|extent| extent.length).sum(),
            Self::Within { length, .. } => *length,
        }
    }
}

/// Copies contents to places of a file.
pub(super) struct Copier<'a> {
    to: &'a File,
    buffer: Vec<u8>,
}

impl<'a> Copier<'a> {
    pub(super) fn new(to: &'a File) -> Self {
        Self { to, buffer: vec![0; CHUNK_BYTES] }
    }

    pub(super) fn copy(&mut self, content: &Content, at: u64) -> anyhow::Result<()> {
        match content {
            Content::Bytes(bytes) => self.to.write_all_at(bytes, at)?,
            Content::Ranges { file, extents } => {
                let mut at = at;
                for extent in extents {
                    self.range(file, extent.start, at, extent.length)?;
                    at += extent.length;
                }
            }
            Content::Within { folder, path, length } => {
                let copied =
                    folder.file(path).and_then(|file| Ok(self.range(&file, 0, at, *length)?));
                copied.with_context(|| folder.shown(path))?;
            }
        }
        Ok(())
    }

    fn range(&mut self, from: &File, offset: u64, at: u64, length: u64) -> io::Result<()> {
        let mut done = 0;
        while done < length {
            let rest = usize::try_from(length - done).unwrap_or(CHUNK_BYTES);
            let chunk = &mut self.buffer[..rest.min(CHUNK_BYTES)];
            from.read_exact_at(chunk, offset + done).map_err(|error| match error.kind() {
                ErrorKind::UnexpectedEof => io::Error::new(
                    error.kind(),
                    "it became shorter while it was copied: start again when it is complete",
                ),
                _ => error,
            })?;
            self.to.write_all_at(chunk, at + done)?;
            done += chunk.len() as u64;
        }
        Ok(())
    }
}
