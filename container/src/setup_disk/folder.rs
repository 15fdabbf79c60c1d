//! Files of a folder that the user gives. Links are followed, because a ConfigMap consists of them,
//! but never out of the folder.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, openat, openat2};
use rustix::io::Errno;

use crate::settings::value::quote;

#[derive(Debug)]
pub struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

impl Folder {
    pub(super) fn open(path: &Path) -> anyhow::Result<Self> {
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = openat(CWD, path, flags, Mode::empty());
        let fd = fd.with_context(|| path.display().to_string())?;
        Ok(Self { fd, path: path.to_owned() })
    }

    /// The path of an entry, for errors.
    pub(super) fn shown(&self, path: &Path) -> String {
        quote(&self.path.join(path).to_string_lossy())
    }

    pub(super) fn file(&self, path: &Path) -> anyhow::Result<File> {
        let file =
            File::from(self.beneath(path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?);
        ensure!(file.metadata()?.is_file(), "it was replaced while it was copied: start again");
        Ok(file)
    }

    pub(super) fn beneath(&self, path: &Path, flags: OFlags) -> anyhow::Result<OwnedFd> {
        let inside = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
        let opened = openat2(&self.fd, path, flags | OFlags::CLOEXEC, Mode::empty(), inside);
        opened.map_err(|error| match error {
            Errno::XDEV => anyhow::anyhow!("it is a link out of the folder: copy the file there"),
            Errno::NOENT => anyhow::anyhow!("it is a link to nothing: remove it"),
            Errno::LOOP => anyhow::anyhow!("it is a link to itself: remove it"),
            _ => error.into(),
        })
    }
}

/// The first of these folders that exists.
pub(super) fn find(places: &[PathBuf]) -> anyhow::Result<Option<PathBuf>> {
    for place in places {
        match fs::metadata(place) {
            Ok(found) if found.is_dir() => return Ok(Some(place.clone())),
            Ok(_) => bail!("{} is not a folder: mount a folder there", place.display()),
            // The volume itself is checked elsewhere.
            Err(error)
                if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {}
            Err(error) => bail!("{}: {error}", place.display()),
        }
    }
    Ok(None)
}

/// Checks that a folder on the volume is no link out of it: others write to the volume, and the
/// pod's own files, such as tokens of a cluster, are none of the guest's.
pub(super) fn check_inside(volume: &Path, folder: &Path) -> anyhow::Result<()> {
    let Ok(path) = folder.strip_prefix(volume) else { return Ok(()) };
    let opened = Folder::open(volume)?.beneath(path, OFlags::PATH | OFlags::DIRECTORY);
    let out = "mount the folder as /oem instead";
    opened.map(drop).with_context(|| format!("{}: {out}", folder.display()))
}
