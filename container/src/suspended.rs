//! The suspended machine on the volume, as the plan finds it.

use std::fs;
use std::path::{Path, PathBuf};

use ::host::size::Size;
use anyhow::ensure;
use vmm::control::snapshot::{self, Header, Secret};

use crate::disks::below;
use crate::settings::Settings;
use crate::settings::settle::Sizes;
use crate::settings::value::KeyFile;
use crate::status::{Failure, Status};

/// The end of the name of the folder on the volume.
pub const FOLDER: &str = "suspended";

/// The folder for a suspended machine. `root` contains the file systems.
pub fn folder(settings: &Settings, root: &Path) -> PathBuf {
    let storage = below(root, &settings.storage.folder);
    storage.join(format!("{}.{FOLDER}", settings.pod.process()))
}

/// The machine that is suspended.
///
/// # Errors
///
/// If that is unknown, or if it is damaged: it must not be lost.
pub fn find(folder: &Path) -> anyhow::Result<Option<Header>> {
    snapshot::find(folder).map_err(|error| failure(folder, &format!("{error:#}")))
}

/// Why the machine cannot go on with this key, or without one. `plain` is the reason if there is a
/// key, but memory is not encrypted.
pub fn refuses_key(
    machine: &Header,
    settings: &Settings,
    plain: &'static str,
) -> Option<&'static str> {
    match (machine.is_encrypted(), settings.pod.snapshot_key.is_some()) {
        (true, false) => Some("it is encrypted: set SNAPSHOT_KEY_FILE to the file of its key"),
        (false, true) => Some(plain),
        (true, true) | (false, false) => None,
    }
}

/// Gives a machine that goes on the sizes that its guest knows. Others would have to wait until it
/// has shut down. Returns a note if they have to.
pub fn keep_sizes(
    sizes: &mut Sizes,
    (processors, memory): (u32, u64),
    name: &str,
) -> Option<String> {
    let same = sizes.processors == processors && sizes.memory >> 20 == memory >> 20;
    (sizes.processors, sizes.memory) = (processors, memory);
    (!same).then(|| {
        format!(
            "{name} continues with CPU_CORES={processors} and RAM_SIZE={}: other values take \
             effect when its guest has been shut down",
            Size(memory)
        )
    })
}

/// The error about a suspended machine that cannot continue.
pub fn failure(folder: &Path, why: &str) -> anyhow::Error {
    let sentence = format!(
        "a suspended machine cannot continue: {why}. Start it with the image and the settings that \
         it had; or remove {}, and the guest starts from its disk, as after a power cut",
        folder.display()
    );
    Failure::new(Status::State, sentence)
}

/// The key for memory that is saved on the volume, if there is one. `root` contains the file
/// systems.
pub fn secret(settings: &Settings, root: &Path) -> anyhow::Result<Option<Secret>> {
    let Some(KeyFile(path)) = &settings.pod.snapshot_key else { return Ok(None) };
    let path = below(root, path);
    let opened = fs::metadata(&path).map_err(Into::into).and_then(|found| {
        // A pipe would be empty at the second time.
        ensure!(found.is_file(), "it is not a file");
        Secret::open(&path)
    });
    let opened = opened.map_err(|error| {
        // Not the path, which may be the secret itself.
        let error = error.root_cause();
        let sentence =
            format!("SNAPSHOT_KEY_FILE: {error}: mount the key there, and let this user read it");
        Failure::new(Status::Usage, sentence)
    });
    opened.map(Some)
}
