//! Machines that go on instead of booting: a suspended one, or a clone of that of the base.

use std::path::{Path, PathBuf};

use vmm::control::snapshot;

use crate::disks::{FoundDisk, below, original};
use crate::kept;
use crate::migration::Running;
use crate::settings::NetworkKind;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::settle::Sizes;
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::suspended;

/// Why machines do not go on whose memory is not encrypted although there is a key, and the ways
/// out.
const TRUST_VOLUME: &str = "it is not encrypted, so others may have changed it: if you trust the \
                            volume, start the machine once without SNAPSHOT_KEY_FILE and with \
                            SHUTDOWN=Y";
const TRUST_BASE: &str = "it is not encrypted, so others may have changed it: take the snapshot \
                          again with SNAPSHOT_KEY_FILE, or, if you trust the volume, start \
                          without it";

/// A machine that does not boot, but goes on in memory that was saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GoesOn {
    /// It is suspended on the volume.
    Suspended,
    /// It runs in another pod, and moves here.
    Arriving,
    /// It is a clone of the machine whose memory is in this folder.
    Clone(PathBuf),
}

impl GoesOn {
    /// Fails with this obstacle, if it is one for such a machine. `folder` is that of the suspended
    /// machine.
    pub(super) fn check(&self, obstacle: &str, folder: &Path) -> anyhow::Result<()> {
        match self {
            Self::Suspended => Err(suspended::failure(folder, obstacle)),
            Self::Arriving => {
                let sentence = format!(
                    "the machine of the other pod does not fit here: {obstacle}. Give both pods \
                     the same settings"
                );
                Err(Failure::new(Status::State, sentence))
            }
            // It has checks of its own.
            Self::Clone(_) => Ok(()),
        }
    }
}

/// The machine of another pod that moves here. It keeps what its guest knows.
pub(super) fn arrive(
    input: &mut ParsedEnvironment,
    sizes: &mut Sizes,
    running: &Running,
    root: &Path,
) -> GoesOn {
    let known = (running.processors, running.memory);
    input.warnings.extend(suspended::keep_sizes(sizes, known, "the machine of the other pod"));
    keep_network(input, root);
    GoesOn::Arriving
}

/// The guest keeps the address that it has in user mode.
fn keep_network(input: &mut ParsedEnvironment, root: &Path) {
    let volume = below(root, &input.settings.storage.folder);
    kept::recall_address(input, &volume);
    let network = &mut input.settings.network;
    if network.kept.is_some() && !network.dhcp && !input.names.contains("NETWORK") {
        // It was in user mode, which its guest still has.
        network.kind = NetworkKind::User;
    }
}

/// Whether the machine goes on. It keeps what its guest knows: its sizes, and its address.
pub(super) fn find(
    input: &mut ParsedEnvironment,
    sizes: &mut Sizes,
    source: &Source,
    disk: &Option<FoundDisk>,
    root: &Path,
) -> anyhow::Result<Option<GoesOn>> {
    // A missing key is an error now, not after hours of a download.
    suspended::secret(&input.settings, root)?;
    let folder = suspended::folder(&input.settings, root);
    if let Some(machine) = suspended::find(&folder)? {
        if let Some(why) = suspended::refuses_key(&machine, &input.settings, TRUST_VOLUME) {
            return Err(suspended::failure(&folder, why));
        }
        let known = (machine.processors, machine.memory);
        let note = suspended::keep_sizes(sizes, known, "the suspended machine");
        input.warnings.extend(note);
        keep_network(input, root);
        return Ok(Some(GoesOn::Suspended));
    }
    let disk = disk.as_ref().filter(|_| matches!(source, Source::Disk(_)));
    let Some(disk) = disk.map(|found| &found.disk) else { return Ok(None) };
    let Some(memory) = original::memory(&input.settings, root, disk)? else { return Ok(None) };
    let failure = |why: &str| original::memory_failure(&memory, why);
    let below = disk.base();
    if let (true, true, Some(base)) = (input.settings.disk.ephemeral, disk.path.exists(), &below) {
        return Err(original::unused(base, &disk.path));
    }
    let network = &mut input.settings.network;
    if network.kind == NetworkKind::Nat {
        // The guest knows addresses that the tap does not let through.
        let set = input.names.contains("NETWORK");
        if set {
            return Err(failure("NETWORK=nat is not possible for such machines: set NETWORK=user"));
        }
        network.kind = NetworkKind::User;
    }
    if network.dhcp {
        return Err(failure("with DHCP=Y, all such machines would have the same address outside"));
    }
    if input.settings.machine.clear {
        return Err(failure("CLEAR=Y resets its firmware"));
    }
    if below.as_ref().is_some_and(original::is_over) {
        return Err(failure("its disk is itself over another base"));
    }
    let machine = snapshot::find(&memory).map_err(|error| failure(&format!("{error:#}")))?;
    let machine = machine.ok_or_else(|| failure("its machine went on after the snapshot"))?;
    if let Some(why) = suspended::refuses_key(&machine, &input.settings, TRUST_BASE) {
        return Err(failure(why));
    }
    let known = (machine.processors, machine.memory);
    input.warnings.extend(suspended::keep_sizes(sizes, known, "the machine of BASE"));
    // The guest knows the size of its disk.
    sizes.disk = below.and_then(|below| below.length()).unwrap_or(0);
    kept::recall_address(input, memory.parent().unwrap_or(&memory));
    let network = &input.settings.network;
    if network.kind == NetworkKind::User && network.kept.is_none() && !input.names.contains("IP") {
        return Err(failure(
            "no address of its guest is there: take the snapshot in a machine with NETWORK=user \
             and with this APP, or set IP to the address that the guest has",
        ));
    }
    Ok(Some(GoesOn::Clone(memory)))
}
