//! The whole way of an installation without Windows: an install medium with the layout of
//! Microsoft's, whose Windows is a Linux with a Setup of ours. It does what Windows Setup does, in
//! its order and with its limits.
#![forbid(unsafe_code)]

#[path = "rehearsal/cuts.rs"]
mod cuts;
#[path = "rehearsal/direct.rs"]
mod direct;
#[path = "rehearsal/download.rs"]
mod download;
#[path = "rehearsal/health.rs"]
mod health;
#[path = "rehearsal/pod.rs"]
mod pod;
#[path = "rehearsal/script.rs"]
mod script;
#[path = "rehearsal/tour.rs"]
mod tour;

use std::process::ExitCode;

use fake_microsoft::fault::Fault;
use transom_tests::lab::Lab;
use transom_tests::rehearsal::{medium, steps};
use transom_tests::suite::{Suite, Test};

use self::pod::{Case, PLAIN};
use self::script::{JOINS, SCRIPT};
use self::steps::{CLIENT, SERVER};

const ASSETS: &[&str] = &["OVMF_CODE_12", "OVMF_VARS_12"];

fn main() -> ExitCode {
    let of = |name: &str, case| Test::new(name, move || pod::installs(&case));
    let mounted = |setup, disk, drivers| Case { setup, disk, drivers, download: None, words: &[] };
    let downloaded = |setup, disk, faults| {
        let download: Option<&[Fault]> = Some(faults);
        Case { download, ..mounted(setup, disk, true) }
    };
    let script = Case { words: SCRIPT, ..mounted(CLIENT, "scsi", true) };
    let joins = Case { words: JOINS, ..mounted(SERVER, "nvme", true) };
    let plain = Case { words: &[PLAIN], ..mounted(CLIENT, "nvme", true) };
    let tests = vec![
        of("a_pod_installs_to_scsi", downloaded(CLIENT, "scsi", &[Fault::Reset(60)])),
        // The suite `cluster` has a medium that asks for a key, too.
        Test::new("the_medium_asks_for_a_key", direct::asks).thorough(),
        // `a_pod_installs_to_scsi` goes this way, and further.
        Test::new("try_shows_an_installation", tour::installs).thorough(),
        of("a_pod_installs_a_server", downloaded(SERVER, "nvme", &[])).thorough(),
        of("a_pod_installs_to_sata_without_drivers", mounted(CLIENT, "sata", false)).thorough(),
        of("a_pod_installs_to_virtio", mounted(CLIENT, "blk", true)).thorough(),
        of("a_pod_installs_without_secure_boot", plain).thorough(),
        Test::new("a_script_installs_at_the_second_start", move || {
            script::installs_at_the_second_start(&script)
        })
        .thorough(),
        of("a_script_installs_a_server_of_a_domain", joins).thorough(),
        Test::new("setup_installs_to_nvme", || direct::installs("nvme")).thorough(),
        Test::new("a_pod_that_is_ended_goes_on", cuts::of_the_first_boot).thorough(),
        Test::new("an_installed_disk_is_never_erased", cuts::of_an_installed_disk).thorough(),
    ];
    let lab = Lab { mib: 4096, seconds: 3600, assets: ASSETS };
    Suite { lab, tests }.main_after(medium::make)
}
