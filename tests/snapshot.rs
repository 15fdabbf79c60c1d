//! Machines are saved or moved at random moments and go on in other processes: Linux under load,
//! and UEFI firmware, with system-management mode too.
#![forbid(unsafe_code)]

#[path = "snapshot/level.rs"]
mod level;
#[path = "snapshot/load.rs"]
mod load;
#[path = "snapshot/menus.rs"]
mod menus;
#[path = "snapshot/network.rs"]
mod network;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::network::in_namespace;
use transom_tests::program::memory_kib;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::tpm::Swtpm;
use transom_tests::uefi::{self, Shell};
use vmm::control::snapshot::save;
use vmm::control::{Client, Command, Then};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);
/// The exit status of a machine that has moved.
const MOVED: i32 = 79;
/// Clones that run at the same time, and with `TRANSOM_TESTS=all`; and the time that they may take.
const CLONES: [usize; 2] = [5, 50];
const TOGETHER: Duration = Duration::from_secs(60);
/// No process has the machine for this long, so that a clock that goes on meanwhile is noticed.
const AWAY: Duration = Duration::from_secs(1);

const ASSETS: &[&str] = &[
    "BZIMAGE_13",
    "MODULES_13",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "OVMF_CODE_SECBOOT_13",
    "BOOT_CD",
    "BUSYBOX",
    "SOUND_TOOLS",
    "WITNESS_DISK",
];
fn main() -> ExitCode {
    let linux = |name: &str, kernel: &'static str| {
        Test::new(name, move || in_namespace(move || load::linux_goes_on(kernel)))
    };
    let connection = |name: &str, card: &'static str| {
        Test::new(name, move || in_namespace(move || network::keeps_a_connection(card)))
    };
    let firmware = |name: &str, smm| Test::new(name, move || firmware_goes_on(smm));
    let tests = vec![
        // The next one does the same with more of the machine.
        firmware("firmware_goes_on_from_snapshots_while_it_boots", false).thorough(),
        firmware("firmware_with_smm_goes_on_from_snapshots", true),
        linux("linux_13_goes_on_from_snapshots_under_load", "_GENERIC_13"),
        Test::new("linux_13_goes_on_many_times", linux_goes_on_many_times),
        Test::new(
            "a_machine_of_a_level_goes_on_where_the_processor_has_as_much",
            level::goes_on_where_the_processor_has_as_much,
        ),
        // The suite `probe` moves machines to other processes, and cuts the connection.
        connection("linux_13_keeps_a_connection_over_moves_to_other_hosts", "virtio-net")
            .thorough(),
        // A unit test of the card finds its announcement.
        connection("linux_13_keeps_a_connection_of_intels_card", "e1000e").thorough(),
        linux("linux_12_goes_on_from_snapshots_under_load", "_GENERIC").thorough(),
        Test::new("grub_goes_on_and_starts_linux", menus::grub_goes_on).thorough(),
        Test::new("the_setup_screen_of_firmware_goes_on", menus::setup_screen_goes_on).thorough(),
    ];
    Suite { lab: Lab { mib: 3072, seconds: 900, assets: ASSETS }, tests }.main()
}

/// Saves a machine, waits for its end, and continues in another process, with this TPM.
fn moved(
    mut running: Running,
    folder: &Path,
    how: &str,
    tpm: Option<&Swtpm>,
) -> anyhow::Result<Running> {
    let dir = folder.join("snapshot");
    fs::remove_dir_all(&dir).ok();
    let saved = saves(&mut running, &dir)?;
    sleep(AWAY);
    let start = Instant::now();
    let restored = Guest::restored(format!("{}{how}", dir.display()));
    let restored = with(restored, tpm).start()?;
    answers(&restored, start)?;
    say!("saved in {saved:?}, restored{how} in {:?}", start.elapsed());
    Ok(restored)
}

/// Saves a machine, whose process ends then. Returns the time to save.
fn saves(running: &mut Running, dir: &Path) -> anyhow::Result<Duration> {
    let start = Instant::now();
    save(&mut Client::connect(running.control())?, dir, Then::Quit, None)?;
    let saved = start.elapsed();
    running.ends_with(0, SOON)?;
    Ok(saved)
}

fn with(guest: Guest, tpm: Option<&Swtpm>) -> Guest {
    match tpm {
        Some(tpm) => guest.tpm(&tpm.path()),
        None => guest,
    }
}

/// It answers as soon as it runs.
fn answers(running: &Running, start: Instant) -> anyhow::Result<()> {
    while running.resets().is_err() {
        ensure!(start.elapsed() < SOON, "it does not run: {}", running.stderr());
        sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Moves a running machine to another process, with this TPM.
fn migrated(running: Running, folder: &Path, tpm: Option<&Swtpm>) -> anyhow::Result<Running> {
    let socket = folder.join("incoming");
    fs::remove_file(&socket).ok();
    let there = with(Guest::arriving(&socket), tpm).start()?;
    migrated_to(running, there, socket)
}

/// Moves a running machine to a process that waits for it, through a socket.
fn migrated_to(mut running: Running, there: Running, socket: PathBuf) -> anyhow::Result<Running> {
    let start = Instant::now();
    let stream = loop {
        match UnixStream::connect(&socket) {
            Ok(stream) => break stream,
            Err(error) => ensure!(start.elapsed() < SOON, "{error}: {}", there.stderr()),
        }
        sleep(Duration::from_millis(5));
    };
    // A lab is an emulator, whose processors build a machine slowly.
    let command = Command::Migrate { to: socket, pause: Some(3000), within: None };
    let answer = Client::connect(running.control())?.ask_with(&command, &[stream.as_fd()]);
    let answer = answer.with_context(|| format!("{}{}", running.stderr(), there.stderr()))?;
    running.ends_with(MOVED, SOON)?;
    answers(&there, start)?;
    say!("migrated: {answer}");
    Ok(there)
}

/// Firmware is saved while it boots, several times, and in its shell.
fn firmware_goes_on(smm: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder")?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_13")?, folder.path())?;
    let code = lab::asset(if smm { "OVMF_CODE_SECBOOT_13" } else { "OVMF_CODE_13" })?;
    let mut guest = Guest::transom().cpus("2").memory("256M").firmware(code, vars.clone());
    if smm {
        // Its shell is on a CD, because it has none.
        let cd = format!("ahci-cdrom,path={}", lab::asset("BOOT_CD")?.display());
        guest = guest.word("--smm").word("on").word("--device").word(cd);
    }
    let mut running = guest.start()?;
    let rounds = if lab::everything() { 5 } else { 2 };
    for round in 0..rounds {
        sleep(Duration::from_millis(900));
        running = match round % 2 {
            0 => migrated(running, folder.path(), None)?,
            _ => moved(running, folder.path(), "", None)?,
        };
    }
    let mut shell = Shell { running };
    if shell.prompt(Duration::from_secs(20)).is_err() {
        // An earlier process has printed the prompt.
        shell.running.send("")?;
        shell.prompt(BOOT)?;
    }
    let version = shell.run("ver", SOON)?;
    ensure!(version.contains("UEFI Interactive Shell"), "not a shell: {version}");
    let own = folder.path().join("own");
    let how = format!(",clone={}", own.display());
    let before = fs::read(&vars)?;
    shell.running = moved(shell.running, folder.path(), &how, None)?;
    // The store takes a variable, and the machine is reset with it.
    shell.run("setvar transom -guid 12345678-1234-1234-1234-123456789abc -nv -bs =0x19", SOON)?;
    shell.running.send("reset")?;
    shell.prompt(BOOT)?;
    let found = shell.run("setvar transom -guid 12345678-1234-1234-1234-123456789abc", SOON)?;
    ensure!(found.contains("19"), "the variable: {found}");
    ensure!(fs::read(own.join("vars.fd"))? != before, "the clone keeps nothing");
    ensure!(fs::read(&vars)? == before, "the clone has changed the variables of the other one");
    Ok(())
}

/// Clones of a running Linux: each has its own random numbers and writes to its own disk.
fn linux_goes_on_many_times() -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder")?;
    let disk = folder.path().join("disk");
    File::create(&disk)?.set_len(128 << 20)?;
    let guest = Guest::transom().memory("256M");
    let guest = guest.word("--device").word(format!("virtio-blk,path={}", disk.display()));
    // This kernel has a driver for the VM Generation ID.
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_13")?);
    let linux = linux.modules(&lab::asset("MODULES_13")?, &["virtio_pci", "virtio_blk"]);
    let Booted { mut running } = linux.boot(BOOT)?;
    let dir = folder.path().join("snapshot");
    saves(&mut running, &dir)?;
    let count = CLONES[usize::from(lab::everything())];
    let start = Instant::now();
    let clone = |number: usize| {
        let own = folder.path().join(number.to_string());
        Guest::restored(format!("{},check=off,clone={}", dir.display(), own.display())).start()
    };
    let all = (0..count).map(clone).collect::<anyhow::Result<Vec<_>>>()?;
    let mut all: Vec<_> = all.into_iter().map(|running| Booted { running }).collect();
    let mut numbers = BTreeSet::new();
    for booted in &mut all {
        // Until it has noticed, it has the numbers of the others.
        let noticed = "until dmesg | grep -q 'virtual machine fork'; do usleep 50000; done";
        let number = booted.run(&format!("{noticed}; cat /proc/sys/kernel/random/uuid"), SOON)?;
        numbers.insert(number.trim().to_owned());
    }
    let time = start.elapsed();
    let mut own = 0;
    for (number, booted) in all.iter_mut().enumerate() {
        own += memory_kib(booted.running.pid(), "Private_Dirty")?;
        booted.run(&format!("echo clone {number} | dd of=/dev/vda conv=fsync,notrunc"), SOON)?;
    }
    for (number, booted) in all.iter_mut().enumerate() {
        let read = booted.run("echo 3 > /proc/sys/vm/drop_caches; head -n 1 /dev/vda", SOON)?;
        ensure!(read.trim() == format!("clone {number}"), "{number}: {read}");
    }
    say!("{count} clones answer after {time:?}, with {} KiB each", own / count as u64);
    ensure!(numbers.len() == count, "the same random numbers: {numbers:?}");
    ensure!(time < TOGETHER, "{time:?}");
    ensure!(fs::read(&disk)?.iter().all(|byte| *byte == 0), "a clone wrote to the other's disk");
    Ok(())
}
