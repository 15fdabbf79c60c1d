//! Lists all files of the user's folder, and converts texts among them.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Read as _;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use rustix::fs::{Dir, OFlags};

use super::content::Content;
use super::folder::Folder;
use super::text;
use super::tree::{Item, MAX_NODES, MAX_PATH_UNITS};

/// Bytes of texts that are converted, of one file and in all. Longer files are copied as they are.
const MAX_TEXT: u64 = 1 << 20;
const MAX_TEXTS: u64 = 64 << 20;

/// Device and inode.
type FileId = (u64, u64);

/// All files and folders, with paths that begin with `prefix`.
pub(super) fn items(folder: Folder, prefix: &str) -> anyhow::Result<Vec<Item>> {
    let folder = Arc::new(folder);
    let mut walk = Walk { folder, prefix, items: Vec::new(), above: Vec::new(), texts: MAX_TEXTS };
    walk.folder(Path::new("."))?;
    Ok(walk.items)
}

struct Walk<'a> {
    folder: Arc<Folder>,
    prefix: &'a str,
    items: Vec<Item>,
    /// The present folder and those that lead to it.
    above: Vec<FileId>,
    /// Bytes of texts that may still be converted.
    texts: u64,
}

impl Walk<'_> {
    /// Recursion ends with the length of the path, and where a link leads to a folder above it.
    fn folder(&mut self, path: &Path) -> anyhow::Result<()> {
        let names = self.enter(path).with_context(|| self.folder.shown(path))?;
        for name in names {
            let path = if path == Path::new(".") { name } else { path.join(name) };
            if self.add(&path).with_context(|| self.folder.shown(&path))? {
                self.folder(&path)?;
            }
        }
        self.above.pop();
        Ok(())
    }

    /// The names in a folder, sorted. A ConfigMap's versions, which its links lead to, are no names
    /// of their own.
    fn enter(&mut self, path: &Path) -> anyhow::Result<Vec<PathBuf>> {
        let file = File::from(self.folder.beneath(path, OFlags::RDONLY | OFlags::DIRECTORY)?);
        let found = file.metadata()?;
        let id = (found.dev(), found.ino());
        ensure!(!self.above.contains(&id), "it is a link to a folder that it is in: remove it");
        self.above.push(id);
        let mut names = Vec::new();
        for entry in Dir::new(OwnedFd::from(file))? {
            let entry = entry?;
            let name = OsStr::from_bytes(entry.file_name().to_bytes());
            if !name.as_bytes().starts_with(b"..") && name != "." {
                ensure!(names.len() < MAX_NODES, "it has more than {MAX_NODES} files");
                names.push(PathBuf::from(name));
            }
        }
        names.sort();
        Ok(names)
    }

    /// Returns whether it is a folder.
    fn add(&mut self, path: &Path) -> anyhow::Result<bool> {
        let found = File::from(self.folder.beneath(path, OFlags::PATH)?).metadata()?;
        let text = path.to_str().context("its name is not UTF-8: rename it")?;
        ensure!(
            text.encode_utf16().count() <= MAX_PATH_UNITS,
            "the path has more than {MAX_PATH_UNITS} characters, which Windows does not copy: use \
             shorter names, or fewer folders in each other"
        );
        ensure!(
            self.items.len() < MAX_NODES,
            "there are more than {MAX_NODES} files and folders: put them into an archive"
        );
        let content = if found.is_dir() {
            None
        } else {
            ensure!(found.is_file(), "it is neither a file nor a folder: remove it");
            Some(self.content(path, found.len())?)
        };
        let path = format!("{}{text}", self.prefix);
        self.items.push(Item { path, content, modified: found.modified()? });
        Ok(found.is_dir())
    }

    fn content(&mut self, path: &Path, length: u64) -> anyhow::Result<Content> {
        if text::is_text(path) && length <= MAX_TEXT && length <= self.texts {
            let mut bytes = Vec::new();
            // A file that grows meanwhile is as long as it was.
            self.folder.file(path)?.take(length).read_to_end(&mut bytes)?;
            self.texts -= length;
            return Ok(Content::Bytes(text::converted(path, bytes)));
        }
        // Report now what cannot be read, not in the middle of the copy.
        self.folder.file(path)?;
        Ok(Content::Within { folder: self.folder.clone(), path: path.to_owned(), length })
    }
}
