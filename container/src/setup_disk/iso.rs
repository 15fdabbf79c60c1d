//! The ISO image of virtio-win as a bundle of drivers. It is read in place.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::SystemTime;

use anyhow::Context as _;

use super::content::Content;
use super::drivers::{Bundle, BundleFile};
use crate::media::{self, FileSystem, Opened};

/// The volume identifier in the primary volume descriptor (ECMA-119 8.4.7).
const LABEL_AT: u64 = 16 * media::SECTOR + 40;
const LABEL_LENGTH: usize = 32;

pub struct Iso {
    image: Opened,
    files: FileSystem,
    /// Time of all its files.
    modified: SystemTime,
}

/// The bundle in an ISO image.
///
/// # Errors
///
/// If the file cannot be read, or is not an ISO image.
pub fn bundle(path: &Path) -> anyhow::Result<Iso> {
    Iso::open(path).with_context(|| path.display().to_string())
}

/// The name of the volume in an ISO image, as its maker gave it.
pub fn label(path: &Path) -> Option<String> {
    let mut name = [0; LABEL_LENGTH];
    File::open(path).ok()?.read_exact_at(&mut name, LABEL_AT).ok()?;
    Some(String::from_utf8_lossy(&name).trim_end().to_owned())
}

impl Iso {
    fn open(path: &Path) -> anyhow::Result<Self> {
        let image = Opened::open(path)?;
        let files =
            FileSystem::open(&image)?.context("it is not an ISO image: download it again")?;
        let modified = image.file().metadata()?.modified()?;
        Ok(Self { image, files, modified })
    }
}

impl Bundle for Iso {
    fn files(&self, folder: &str) -> anyhow::Result<Vec<BundleFile>> {
        let listed = self.files.list(&self.image, folder)?;
        let file = |(name, content): (String, media::Content)| {
            content.check(&self.image).with_context(|| format!("{folder}/{name}"))?;
            let (file, extents) = (self.image.file().clone(), content.extents().to_vec());
            let content = Content::Ranges { file, extents };
            Ok(BundleFile { name, content, modified: self.modified })
        };
        listed.into_iter().map(file).collect()
    }
}
