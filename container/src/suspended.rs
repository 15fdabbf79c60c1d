//! The suspended machine on the volume, as the plan finds it.

use std::path::{Path, PathBuf};

use vmm::config::Config;
use vmm::control::snapshot;

use crate::disks::below;
use crate::settings::Settings;
use crate::settings::settle::Sizes;

/// The folder for a suspended machine. `root` contains the file systems.
pub fn folder(settings: &Settings, root: &Path) -> PathBuf {
    let storage = below(root, &settings.storage.folder);
    storage.join(format!("{}.suspended", settings.pod.process()))
}

/// The configuration of the machine that is suspended. Nothing also if it is damaged: its start
/// says so.
pub fn find(settings: &Settings, root: &Path) -> Option<Config> {
    snapshot::config(&folder(settings, root)).ok().flatten()
}

/// Gives the machine the sizes that its guest knows. Others would have to wait until it has shut
/// down. Returns a note if they have to.
pub fn keep_sizes(sizes: &mut Sizes, machine: &Config) -> Option<String> {
    let (processors, memory) = (machine.cpus.count, machine.memory.size);
    let same = sizes.processors == processors && sizes.memory >> 20 == memory.0 >> 20;
    (sizes.processors, sizes.memory) = (processors, memory.0);
    (!same).then(|| {
        format!(
            "the suspended machine continues with CPU_CORES={processors} and RAM_SIZE={memory}: other \
             values take effect when its guest has been shut down"
        )
    })
}
