//! Makes the CD of an upgrade image on the volume. Until it is whole and on the disk, its name ends
//! with `.part`; then the upgrade image is removed.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use super::fault::Fault;
use super::meter::Meter;
use super::transfer::{check_room, no_room, part};
use crate::esd::Plan;
use crate::esd::archive::Archive;
use crate::story::Story;
use crate::{files, medium};

/// Makes the CD `path` of the upgrade image. One that is damaged is removed.
pub(super) fn make(upgrade: &Path, path: &Path, name: &str, story: &Story) -> Result<(), Fault> {
    let made = write(upgrade, path, name, story);
    match &made {
        Err(Fault::Host(_)) => {}
        Err(_) => {
            fs::remove_file(part(path)).ok();
            fs::remove_file(upgrade).ok();
        }
        Ok(()) => {
            fs::rename(part(path), path)?;
            files::sync_folder(path);
            fs::remove_file(upgrade)?;
        }
    }
    made
}

fn write(upgrade: &Path, path: &Path, name: &str, story: &Story) -> Result<(), Fault> {
    let damaged = |error: anyhow::Error| match error.downcast_ref::<io::Error>() {
        Some(error) => no_room(path, error),
        None => Fault::last(format!("{}: {error:#}: it is removed", upgrade.display())),
    };
    let plan = Archive::open(upgrade).and_then(Plan::new).map_err(damaged)?;
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(false);
    let file = files::open_itself(&part(path), file)?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        let sentence = format!("{}: another pod makes this file", part(path).display());
        return Err(Fault::host(sentence));
    }
    file.set_len(0)?;
    check_room(path, &file, plan.max_length().map_err(damaged)?)?;
    let meter = RefCell::new(Meter::of(story, format!("Making the CD of {name}…")));
    plan.write(&file, &|done, of| meter.borrow_mut().update(done, of)).map_err(damaged)?;
    file.sync_all()?;
    Ok(medium::check(&part(path))?)
}
