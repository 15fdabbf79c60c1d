//! Other people's systems, unchanged from Debian's packages, as witnesses: GRUB, Linux 7.2,
//! memtest86+, Xen with two domains, and iPXE. With `TRANSOM_TESTS=all`, they also run on
//! QEMU's q35, and every difference between what they find is intended, for the reason in
//! `witnesses/expected.txt`.
#![forbid(unsafe_code)]

#[path = "witnesses/menu.rs"]
mod menu;
#[path = "witnesses/netboot.rs"]
mod netboot;

use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use transom_tests::guest::{Guest, Machine};
use transom_tests::lab::{self, Lab};
use transom_tests::network::in_namespace;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;

use netboot::Loads::{self, ByHttp, ByTftp};

/// The limit for a start of firmware and a system, in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(300);
/// The limit for a command, or the end of a process.
const SOON: Duration = Duration::from_secs(60);

const ASSETS: &[&str] = &[
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "WITNESS_DISK",
    "IPXE",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "QEMU",
];

/// QEMU's options for a machine like ours: without SMM, HPET, S3 and S4.
const QEMU_MACHINE: &str = "smm=off,graphics=off,vmport=off,hpet=off";
const QEMU_GLOBALS: [&str; 2] = ["ICH9-LPC.disable_s3=1", "ICH9-LPC.disable_s4=1"];

fn main() -> ExitCode {
    let (ours, qemu) = (Machine::Transom, Machine::Qemu);
    let test = |name: &str, body: fn() -> anyhow::Result<()>| Test::new(name, body);
    let boot = |name: &str, (machine, kernel, loads): (Machine, &'static str, Loads)| {
        Test::new(name, move || in_namespace(move || netboot::starts_linux(machine, kernel, loads)))
    };
    let tests = vec![
        // By default GRUB starts Linux in the suite `cluster`, and the suite `linux` has Linux 7.2.
        test("grub_starts_linux_7_2", || menu::starts_linux(Machine::Transom).map(drop)).thorough(),
        test("grub_and_linux_7_2_find_what_they_find_on_qemu", menu::differences).thorough(),
        test("memtest86_passes", || menu::tests_memory(Machine::Transom).map(drop)).thorough(),
        test("memtest86_finds_the_memory_that_it_finds_on_qemu", menu::same_memory).thorough(),
        test("xen_starts_two_domains", || menu::starts_xen(Machine::Transom)).thorough(),
        test("xen_starts_two_domains_on_qemu", || menu::starts_xen(Machine::Qemu)).thorough(),
        // Linux drives both cards in the suite `guest_network`.
        boot("ipxe_fetches_linux_13_through_both_cards", (ours, "GENERIC_13", ByTftp)).thorough(),
        boot("ipxe_fetches_linux_12_through_both_cards", (ours, "GENERIC", ByTftp)).thorough(),
        boot("firmware_fetches_ipxe_by_http", (ours, "GENERIC_13", ByHttp)).thorough(),
        boot("firmware_fetches_ipxe_by_http_on_qemu", (qemu, "GENERIC_13", ByHttp)).thorough(),
        boot("ipxe_fetches_linux_13_on_qemu", (qemu, "GENERIC_13", ByTftp)).thorough(),
    ];
    let seconds = if lab::everything() { 3600 } else { 900 };
    Suite { lab: Lab { mib: 6144, seconds, assets: ASSETS }, tests }.main()
}

/// A guest with firmware and these words; its variables are in a folder that must outlive it.
fn guest(machine: Machine, folder: &Path) -> anyhow::Result<Guest> {
    let vars = uefi::store(&lab::asset("OVMF_VARS_13")?, folder)?;
    let guest = Guest::on(machine).cpus("2,sockets=1,cores=2,threads=1");
    let guest = guest.firmware(lab::asset("OVMF_CODE_13")?, vars);
    Ok(if machine == Machine::Qemu {
        let guest = guest.word("-M").word(QEMU_MACHINE);
        QEMU_GLOBALS.iter().fold(guest, |guest, global| guest.word("-global").word(*global))
    } else {
        guest
    })
}
