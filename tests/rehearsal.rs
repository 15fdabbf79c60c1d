//! The whole way of an installation without Windows: an install medium with the layout of
//! Microsoft's, whose Windows is a Linux with a Setup of ours. It does what Windows Setup does, in
//! its order and with its limits.
#![forbid(unsafe_code)]

#[path = "rehearsal/direct.rs"]
mod direct;
#[path = "rehearsal/medium.rs"]
mod medium;

use std::process::ExitCode;

use transom_tests::lab::Lab;
use transom_tests::suite::{Suite, Test};

const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12", "OVMF_VARS_MS_12", "OVMF_CODE_SECBOOT_12"];

fn main() -> ExitCode {
    let tests = vec![
        Test::new("setup_installs_to_nvme", || direct::installs("nvme")),
        Test::new("setup_installs_to_sata", || direct::installs("ahci-disk")).thorough(),
    ];
    let lab = Lab { mib: 4096, seconds: 1800, assets: ASSETS };
    Suite { lab, tests }.main_after(medium::make)
}
