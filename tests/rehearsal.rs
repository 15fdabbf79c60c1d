//! The whole way of an installation without Windows: an install medium with the layout of
//! Microsoft's, whose Windows is a Linux with a Setup of ours. It does what Windows Setup does, in
//! its order and with its limits.
#![forbid(unsafe_code)]

#[path = "rehearsal/direct.rs"]
mod direct;
#[path = "rehearsal/medium.rs"]
mod medium;
#[path = "rehearsal/pod.rs"]
mod pod;
#[path = "rehearsal/steps.rs"]
mod steps;
#[path = "rehearsal/tour.rs"]
mod tour;

use std::process::ExitCode;

use transom_tests::lab::Lab;
use transom_tests::suite::{Suite, Test};

use self::pod::{Case, PLAIN};
use self::steps::{CLIENT, SERVER};

const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12"];

fn main() -> ExitCode {
    let of = |name: &str, setup, disk, drivers, words| {
        let case = Case { setup, disk, drivers, words };
        Test::new(name, move || pod::installs(&case))
    };
    let tests = vec![
        of("a_pod_installs_to_scsi", CLIENT, "scsi", true, &[]).thorough(),
        of("a_pod_installs_to_sata_without_drivers", CLIENT, "sata", false, &[]).thorough(),
        of("a_pod_installs_a_server", SERVER, "nvme", true, &[]).thorough(),
        Test::new("the_medium_asks_for_a_key", direct::asks),
        Test::new("try_shows_an_installation", tour::installs),
        of("a_pod_installs_to_virtio", CLIENT, "blk", true, &[]).thorough(),
        of("a_pod_installs_without_secure_boot", CLIENT, "nvme", true, &[PLAIN]).thorough(),
        Test::new("setup_installs_to_nvme", || direct::installs("nvme")).thorough(),
    ];
    let lab = Lab { mib: 4096, seconds: 1800, assets: ASSETS };
    Suite { lab, tests }.main_after(medium::make)
}
