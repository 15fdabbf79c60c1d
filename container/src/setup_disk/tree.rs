//! The files and folders of the set-up disk, as Windows sees them: names differ in more than case.

use std::collections::HashMap;
use std::time::SystemTime;

use anyhow::{bail, ensure};

use super::content::Content;
use super::names;
use crate::settings::value::quote;

/// Files and folders in all.
pub(super) const MAX_NODES: usize = 32_768;
/// Characters of a path: Windows copies to paths of at most 260, of which the drive and the folder
/// of the installation take some.
pub(super) const MAX_PATH_UNITS: usize = 240;

/// The root in [`Tree`].
pub(super) const ROOT: usize = 0;

/// A file or a folder, by its path from the root of the disk, with `/` between names.
#[derive(Debug)]
pub struct Item {
    pub path: String,
    /// `None` for a folder. The folders of files need no item.
    pub content: Option<Content>,
    pub modified: SystemTime,
}

#[derive(Debug)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) parent: usize,
    pub(super) children: Vec<usize>,
    /// `None` for a folder.
    pub(super) content: Option<Content>,
    pub(super) modified: SystemTime,
}

/// All files and folders. A folder stands before what it has.
#[derive(Debug)]
pub(super) struct Tree(pub(super) Vec<Node>);

impl Tree {
    pub(super) fn of(items: Vec<Item>) -> anyhow::Result<Self> {
        let root = Node {
            name: String::new(),
            parent: ROOT,
            children: Vec::new(),
            content: None,
            modified: SystemTime::UNIX_EPOCH,
        };
        let mut builder = Builder { nodes: vec![root], found: HashMap::new() };
        for item in items {
            builder.add(item)?;
        }
        Ok(Self(builder.nodes))
    }
}

struct Builder {
    nodes: Vec<Node>,
    /// The number of a node, by its parent and its folded name.
    found: HashMap<(usize, String), usize>,
}

impl Builder {
    fn add(&mut self, item: Item) -> anyhow::Result<()> {
        let Item { path, content, modified } = item;
        let shown = quote(&path);
        ensure!(
            path.encode_utf16().count() <= MAX_PATH_UNITS,
            "{shown}: the path has more than {MAX_PATH_UNITS} characters, which Windows does not \
             copy: use shorter names, or fewer folders in each other"
        );
        let mut names: Vec<&str> = path.split('/').collect();
        let file = content.as_ref().and_then(|_| names.pop());
        let mut at = ROOT;
        for folder in names {
            at = self.child(at, folder, &shown, modified)?;
        }
        let Some(name) = file else { return Ok(()) };
        if let Some(other) = self.found.get(&(at, names::folded(name))) {
            return Err(self.twice(*other, &shown));
        }
        let new = self.insert(at, name, &shown, modified)?;
        self.nodes[new].content = content;
        Ok(())
    }

    /// The folder of this name, which is made if it is not there.
    fn child(
        &mut self,
        parent: usize,
        name: &str,
        shown: &str,
        modified: SystemTime,
    ) -> anyhow::Result<usize> {
        let Some(found) = self.found.get(&(parent, names::folded(name))).copied() else {
            return self.insert(parent, name, shown, modified);
        };
        let node = &self.nodes[found];
        if node.content.is_some() || node.name != name {
            return Err(self.twice(found, shown));
        }
        Ok(found)
    }

    fn insert(
        &mut self,
        parent: usize,
        name: &str,
        shown: &str,
        modified: SystemTime,
    ) -> anyhow::Result<usize> {
        if let Some(fault) = names::fault(name) {
            bail!("{shown}: {} {fault}, which Windows cannot have: rename it", quote(name));
        }
        let new = self.nodes.len();
        ensure!(
            new <= MAX_NODES,
            "{shown}: there are more than {MAX_NODES} files and folders: put them into an archive"
        );
        self.found.insert((parent, names::folded(name)), new);
        self.nodes[parent].children.push(new);
        let name = name.to_owned();
        self.nodes.push(Node { name, parent, children: Vec::new(), content: None, modified });
        Ok(new)
    }

    fn twice(&self, other: usize, shown: &str) -> anyhow::Error {
        let other = quote(&self.nodes[other].name);
        anyhow::anyhow!(
            "{shown}: {other} is in the same place, and names that differ only in case are one \
             name in Windows: rename one of them"
        )
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn tree(paths: &[&str]) -> Result<Vec<String>, String> {
        let item = |path: &&str| {
            let (path, content) = match path.strip_suffix('/') {
                Some(folder) => (folder, None),
                None => (*path, Some(Content::Bytes(Vec::new()))),
            };
            Item { path: path.to_owned(), content, modified: SystemTime::UNIX_EPOCH }
        };
        match Tree::of(paths.iter().map(item).collect()) {
            Ok(Tree(nodes)) => Ok(nodes.into_iter().skip(1).map(|node| node.name).collect()),
            Err(error) => Err(format!("{error:#}")),
        }
    }

    #[test]
    fn folders_are_made_for_their_files() {
        let made = tree(&["a/b/c.txt", "a/d", "a/b/e", "f/", "a/", "F/g"].map(|it| it));
        assert!(made.unwrap_err().starts_with("F/g: f is in the same place"));
        let made = tree(&["a/b/c.txt", "a/d", "a/b/e", "f/", "a/"]).unwrap();
        assert_eq!(made, ["a", "b", "c.txt", "d", "e", "f"]);
    }

    #[test]
    fn what_windows_cannot_have_is_one_sentence() {
        let long = format!("{}/x", "y".repeat(239));
        for (paths, what) in [
            (&["a/Setup.exe", "a/setup.EXE"][..], "a/setup.EXE: Setup.exe is in the same place"),
            (&["a", "a/b"], "a/b: a is in the same place"),
            (&["a/b", "a"], "a: a is in the same place"),
            (&["x/a:b"], "the characters"),
            (&["x/../b"], ".. is not a name"),
            (&["/x"], "is not a name"),
            (&["x//y"], "is not a name"),
            (&["x/con.txt"], "con.txt has the name of a device"),
            (&[&long], "more than 240 characters"),
        ] {
            let said = tree(paths).unwrap_err();
            assert!(said.contains(what) && !said.contains('\n'), "{paths:?}: {said}");
        }
        let many: Vec<String> = (0..=MAX_NODES).map(|at| format!("{at}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(tree(&many).unwrap_err().contains("more than 32768 files and folders"));
        assert!(tree(&many[1..]).is_ok());
    }
}
