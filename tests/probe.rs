//! The probe, started by `vmm run` on this host's own KVM: that a machine runs, resets, pauses and
//! ends as it is told, that devices work with the kernel's help, that no access breaks it, that
//! disks keep what they were given, that frames come back as they went, and that its screen can be
//! looked at.
#![forbid(unsafe_code)]

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
#[path = "probe/jail.rs"]
mod jail;
#[path = "probe/life.rs"]
mod life;
#[path = "probe/machine.rs"]
mod machine;
#[path = "probe/net.rs"]
mod net;
#[path = "probe/page.rs"]
mod page;
#[path = "probe/screen.rs"]
mod screen;
#[path = "probe/volume.rs"]
mod volume;

use transom_tests::program::not_run;
use vmm::kvm::Situation;

/// Whether a guest can run here; says so if not.
fn runs_here(test: &str) -> bool {
    let here = Situation::of_this_host() != Situation::None;
    if !here {
        not_run(test, "there is no usable /dev/kvm");
    }
    here
}
