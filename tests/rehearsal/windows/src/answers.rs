//! The answer file: where Windows looks for it, and what it says (Microsoft: Windows Setup
//! Automation Overview, implicit answer file search order).

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

use super::console::say;
use super::drives::{Drive, Kind};
use super::xml::Element;
use super::{files, schema, xml};

/// The name in the pass windowsPE.
const NAME: &str = "Autounattend.xml";
/// Where an installed Windows keeps it for later passes.
const KEPT: &str = "Windows/Panther/unattend.xml";

pub(crate) struct Answers {
    path: PathBuf,
    root: Element,
}

/// The first answer file in Setup's order: removable drives that can be written, those that cannot,
/// and the folder with the sources. The registry and a cached file come before that, and a new
/// Windows PE has neither.
pub(crate) fn find(drives: &[Drive]) -> anyhow::Result<Option<Answers>> {
    let mut places = Vec::new();
    for kind in [Kind::RemovableWritable, Kind::RemovableReadOnly] {
        places.extend(drives.iter().filter(|it| it.kind == kind).map(|it| it.root.clone()));
    }
    places.extend(drives.iter().filter(|it| it.is_cd).map(|it| it.root.join("sources")));
    let found = places.iter().map(|place| files::below(place, NAME)).find(|path| path.is_file());
    found.map(|path| read(&path)).transpose()
}

/// The answer file that Setup kept.
pub(crate) fn kept(windows: &Path) -> anyhow::Result<Answers> {
    read(&windows.join(KEPT))
}

pub(crate) fn read(path: &Path) -> anyhow::Result<Answers> {
    let read = || -> anyhow::Result<Element> {
        let root = xml::read(path)?;
        schema::check(&root)?;
        Ok(root)
    };
    let root = read().with_context(|| path.display().to_string())?;
    say!("answers are in {}", path.display());
    Ok(Answers { path: path.to_owned(), root })
}

impl Answers {
    /// A component in a pass.
    pub(crate) fn component(&self, pass: &str, name: &str) -> Option<&Element> {
        let settings = self.root.children.iter().find(|it| it.attribute("pass") == Some(pass))?;
        settings.children.iter().find(|it| it.attribute("name") == Some(name))
    }

    /// A value of a component.
    pub(crate) fn value(&self, pass: &str, name: &str, path: &str) -> Option<&str> {
        self.component(pass, name).and_then(|component| component.value(path))
    }

    /// The commands of a component, in their order.
    pub(crate) fn commands(&self, pass: &str, name: &str) -> anyhow::Result<Vec<String>> {
        let list = self.component(pass, name).and_then(|it| it.at("RunSynchronous"));
        commands(list, "Path")
    }

    /// The folder of the file: the configuration set.
    pub(crate) fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new("/"))
    }

    /// Keeps the file for later passes.
    pub(crate) fn keep(&self, windows: &Path) -> anyhow::Result<()> {
        let to = windows.join(KEPT);
        fs::copy(&self.path, &to).map(drop).with_context(|| to.display().to_string())
    }
}

/// The commands in the children of a list, by their numbers.
pub(crate) fn commands(list: Option<&Element>, field: &str) -> anyhow::Result<Vec<String>> {
    let mut found = Vec::new();
    for item in list.into_iter().flat_map(|list| &list.children) {
        let command = item.value(field).with_context(|| format!("{}: no {field}", item.name))?;
        found.push((item.number("Order")?, command.to_owned()));
    }
    found.sort();
    Ok(found.into_iter().map(|(_, command)| command).collect())
}
