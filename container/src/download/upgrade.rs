//! Makes the CD of an upgrade image on the volume. Until it is whole and on the disk, its name ends
//! with `.part`, and a note as that of a download is beside it; then the upgrade image is removed.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use super::fault::Fault;
use super::meter::Meter;
use super::sidecar::{Identity, Sidecar};
use super::transfer::{check_room, forget, no_room, note, part};
use crate::esd::Plan;
use crate::esd::archive::Archive;
use crate::story::Story;
use crate::{files, medium};

/// Makes the CD `path` of the upgrade image, which stays if it is damaged.
pub(super) fn make(upgrade: &Path, path: &Path, name: &str, story: &Story) -> Result<(), Fault> {
    let made = write(upgrade, path, name, story);
    match &made {
        Err(Fault::Host(_)) => {}
        Err(_) => forget(path),
        Ok(()) => {
            fs::rename(part(path), path)?;
            forget(path);
            files::sync_folder(path)?;
            // One that is mounted there stays.
            if let Err(error) = fs::remove_file(upgrade) {
                tracing::warn!("{} cannot be removed: {error}", upgrade.display());
            }
        }
    }
    made
}

fn write(upgrade: &Path, path: &Path, name: &str, story: &Story) -> Result<(), Fault> {
    let damaged = |error: anyhow::Error| match error.downcast_ref::<io::Error>() {
        Some(error) => no_room(path, error),
        None => Fault::last(format!("{}: {error:#}: delete it", upgrade.display())),
    };
    let plan = Archive::open(upgrade).and_then(Plan::new).map_err(damaged)?;
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false);
    let file = files::open_itself(&part(path), file)?;
    if !files::try_lock(&file).unwrap_or(true) {
        let sentence = format!("{}: another pod makes this file", part(path).display());
        return Err(Fault::host(sentence));
    }
    file.set_len(0)?;
    // A start with another VERSION removes what is left of this one.
    Sidecar::new(&Identity::default(), &[]).write(&note(path))?;
    check_room(path, &file, plan.max_length().map_err(damaged)?)?;
    let meter = RefCell::new(Meter::of(story, format!("Making the CD of {name}…")));
    plan.write(&file, &|done, of| meter.borrow_mut().update(done, of)).map_err(damaged)?;
    file.sync_all()?;
    Ok(medium::check(&part(path))?)
}
