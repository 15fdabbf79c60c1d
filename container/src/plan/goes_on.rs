//! Machines that go on instead of booting: a suspended one, or a clone of that of the base.

use std::path::{Path, PathBuf};

use vmm::control::snapshot;

use crate::disks::{FoundDisk, below, original};
use crate::kept;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::settle::Sizes;
use crate::source::Source;
use crate::suspended;

/// Whether a machine is suspended on the volume; or the folder with the memory of the machine of
/// which this one is a clone. It keeps what its guest knows: its sizes, and its address.
pub(super) fn find(
    input: &mut ParsedEnvironment,
    sizes: &mut Sizes,
    source: &Source,
    disk: &Option<FoundDisk>,
    root: &Path,
) -> anyhow::Result<(bool, Option<PathBuf>)> {
    if let Some(machine) = suspended::find(&suspended::folder(&input.settings, root))? {
        let note = suspended::keep_sizes(sizes, &machine, "the suspended machine");
        input.warnings.extend(note);
        let volume = below(root, &input.settings.storage.folder);
        kept::recall_address(input, &volume);
        return Ok((true, None));
    }
    let disk = disk.as_ref().filter(|_| matches!(source, Source::Disk(_)));
    let memory = disk.and_then(|found| original::memory(&input.settings, root, &found.disk));
    let Some(memory) = memory else { return Ok((false, None)) };
    let failure = |why: &str| original::memory_failure(&memory, why);
    if input.settings.network.dhcp {
        return Err(failure("with DHCP=Y, all such machines would have the same address outside"));
    }
    if input.settings.machine.clear {
        return Err(failure("CLEAR=Y resets its firmware"));
    }
    let machine = snapshot::find(&memory).map_err(|error| failure(&format!("{error:#}")))?;
    let note = machine.and_then(|it| suspended::keep_sizes(sizes, &it, "the machine of BASE"));
    input.warnings.extend(note);
    // Its disk has the size of that below.
    sizes.disk = 0;
    kept::recall_address(input, memory.parent().unwrap_or(&memory));
    Ok((false, Some(memory)))
}
