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

use std::process::ExitCode;

use transom_tests::lab::Lab;
use transom_tests::suite::{Suite, Test};

use self::pod::Case;

const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12"];

fn main() -> ExitCode {
    let pod = |disk, drivers| {
        let case = Case { disk, drivers, words: &[] };
        let with = if drivers { "with" } else { "without" };
        let name = format!("a_pod_installs_to_{disk}_{with}_drivers");
        Test::new(name, move || pod::installs(&case))
    };
    let tests = vec![
        pod("scsi", true),
        pod("blk", true).thorough(),
        pod("nvme", true).thorough(),
        pod("nvme", false).thorough(),
        pod("sata", false).thorough(),
        Test::new("setup_installs_to_nvme", || direct::installs("nvme")).thorough(),
    ];
    let lab = Lab { mib: 4096, seconds: 1800, assets: ASSETS };
    Suite { lab, tests }.main_after(medium::make)
}
