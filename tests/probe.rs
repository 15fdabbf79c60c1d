//! Runs the probe with `vmm run` on this host's own KVM. A machine runs, resets, pauses and ends as
//! ordered; devices work with the kernel's help; no access breaks the machine; disks keep their
//! data; frames come back unchanged; and the screen can be viewed.
#![forbid(unsafe_code)]

#[path = "probe/checks.rs"]
mod checks;
#[path = "probe/clones.rs"]
mod clones;
#[path = "probe/crash.rs"]
mod crash;
#[path = "probe/devices.rs"]
mod devices;
#[path = "probe/disk.rs"]
mod disk;
#[path = "probe/display.rs"]
mod display;
#[path = "probe/doctor.rs"]
mod doctor;
#[path = "probe/doors.rs"]
mod doors;
#[path = "probe/hyperv.rs"]
mod hyperv;
#[path = "probe/jail.rs"]
mod jail;
#[path = "probe/kills.rs"]
mod kills;
#[path = "probe/life.rs"]
mod life;
#[path = "probe/machine.rs"]
mod machine;
#[path = "probe/migration.rs"]
mod migration;
#[path = "probe/moves.rs"]
mod moves;
#[path = "probe/net.rs"]
mod net;
#[path = "probe/page.rs"]
mod page;
#[path = "probe/screen.rs"]
mod screen;
#[path = "probe/sleep.rs"]
mod sleep;
#[path = "probe/snapshot.rs"]
mod snapshot;
#[path = "probe/volume.rs"]
mod volume;

use transom_tests::lab;
use transom_tests::program::not_run;
use vmm::kvm::KvmSupport;

/// Whether a guest can run on this host. Reports the test as skipped otherwise.
fn runs_here(test: &str) -> bool {
    let here = KvmSupport::of_this_host() != KvmSupport::None;
    if !here {
        not_run(test, "there is no usable /dev/kvm");
    }
    here
}

/// The first two of these cases, which cover most of the others, or all with `TRANSOM_TESTS=all`.
fn due<T>(cases: &[T]) -> &[T] {
    if lab::everything() { cases } else { &cases[..2] }
}
