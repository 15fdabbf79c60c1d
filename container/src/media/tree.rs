//! Directories of a file system, and the way from its root to a file.

use anyhow::{Context as _, ensure};

use super::{Content, Image, MAX_DIRECTORY, MAX_LISTED, same_name};

/// A file or a directory.
pub struct Node {
    pub content: Content,
    pub is_directory: bool,
}

/// A file system with directories, whose entries lead to nodes.
pub trait Tree {
    /// The part of a node that is in its directory.
    type Entry;

    fn root(&self) -> Self::Entry;

    fn node(&self, image: &(impl Image + ?Sized), entry: Self::Entry) -> anyhow::Result<Node>;

    /// Passes names and entries of a directory with this content to `take` until that returns
    /// false.
    fn each(
        &self,
        directory: &[u8],
        take: impl FnMut(String, Self::Entry) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()>;

    /// The file at a path whose parts are separated by slashes. `None` if it does not exist, or is
    /// a directory.
    fn find(&self, image: &(impl Image + ?Sized), path: &str) -> anyhow::Result<Option<Content>> {
        let found = self.at(image, path)?;
        Ok(found.filter(|node| !node.is_directory).map(|node| node.content))
    }

    /// The files of a directory; none if it does not exist.
    fn list(
        &self,
        image: &(impl Image + ?Sized),
        path: &str,
    ) -> anyhow::Result<Vec<(String, Content)>> {
        let mut files = Vec::new();
        let Some(directory) = self.at(image, path)?.filter(|node| node.is_directory) else {
            return Ok(files);
        };
        let bytes = directory.content.all(image, MAX_DIRECTORY).context("a directory")?;
        let mut count = 0;
        self.each(&bytes, |name, entry| {
            count += 1;
            ensure!(count <= MAX_LISTED, "it has more than {MAX_LISTED} entries");
            let node = self.node(image, entry)?;
            files.extend((!node.is_directory).then_some((name, node.content)));
            Ok(true)
        })?;
        Ok(files)
    }

    /// The file or directory at a path.
    fn at(&self, image: &(impl Image + ?Sized), path: &str) -> anyhow::Result<Option<Node>> {
        let mut node = self.node(image, self.root())?;
        for part in path.split('/').filter(|part| !part.is_empty()) {
            if !node.is_directory {
                return Ok(None);
            }
            let bytes = node.content.all(image, MAX_DIRECTORY).context("a directory")?;
            let mut found = None;
            self.each(&bytes, |name, entry| {
                let fits = same_name(&name, part);
                found = found.take().or(fits.then_some(entry));
                Ok(!fits)
            })?;
            let Some(entry) = found else { return Ok(None) };
            node = self.node(image, entry)?;
        }
        Ok(Some(node))
    }
}
