//! The suspended machine on the volume, as the plan finds it.

use std::path::{Path, PathBuf};

use ::host::size::Size;
use vmm::control::snapshot::{self, Header};

use crate::disks::below;
use crate::settings::Settings;
use crate::settings::settle::Sizes;
use crate::status::{Failure, Status};

/// The folder for a suspended machine. `root` contains the file systems.
pub fn folder(settings: &Settings, root: &Path) -> PathBuf {
    let storage = below(root, &settings.storage.folder);
    storage.join(format!("{}.suspended", settings.pod.process()))
}

/// The machine that is suspended.
///
/// # Errors
///
/// If that is unknown, or if it is damaged: it must not be lost.
pub fn find(folder: &Path) -> anyhow::Result<Option<Header>> {
    snapshot::find(folder).map_err(|error| failure(folder, &format!("{error:#}")))
}

/// Gives a machine that goes on the sizes that its guest knows. Others would have to wait until it
/// has shut down. Returns a note if they have to.
pub fn keep_sizes(sizes: &mut Sizes, machine: &Header, name: &str) -> Option<String> {
    let (processors, memory) = (machine.processors, machine.memory);
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
