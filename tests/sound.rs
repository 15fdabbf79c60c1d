//! Sound: Linux' driver for HDA plays and records every sample, and an idle card costs nothing.
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use transom_tests::guest::Guest;
use transom_tests::idle;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;
use transom_tests::sound::{FORMAT, FRAME_BYTES, full_volume, links, number, signal};
use transom_tests::suite::{Suite, Test};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);

/// Debian's cloud kernels have no sound.
const ASSETS: &[&str] = &[
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "SOUND_TOOLS",
];
/// The codec's driver precedes the controller's, which looks for it.
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "snd-hda-codec-generic",
    "snd-hda-intel",
];

/// Two seconds.
const FRAMES: u32 = 96_000;
/// Tries on a host that is too busy for its guest, which the guest's program reports.
const TRIES: usize = 4;

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for (release, kernel, wire) in [("13", "_13", false), ("12", "", true)] {
        let interrupts = if wire { "a_wire" } else { "messages" };
        let name = format!("linux_{release}_plays_and_records_with_{interrupts}");
        let test = Test::new(name, move || plays_and_records(kernel, wire));
        tests.push(if release == "13" { test } else { test.thorough() });
    }
    Suite { lab: Lab { mib: 3072, seconds: 900, assets: ASSETS }, tests }.main()
}

fn plays_and_records(kernel: &str, wire: bool) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the files")?;
    let at = |name: &str| folder.path().join(name);
    let (played, recorded) = (at("played"), at("recorded"));
    fs::write(&played, signal(0..FRAMES))?;
    fs::write(&recorded, vec![0; FRAMES as usize * FRAME_BYTES])?;
    fs::write(at("microphone"), signal(0..60 * 48_000))?;
    let card = format!(
        "hda,speaker={},microphone={}",
        at("speaker").display(),
        at("microphone").display()
    );
    let disk = |path: &Path, how: &str| format!("virtio-blk,path={}{how}", path.display());
    let disks = [
        disk(&lab::asset("SOUND_TOOLS")?, ",readonly,serial=tools"),
        disk(&played, ",readonly,serial=played"),
        disk(&recorded, ",serial=recorded"),
    ];
    let devices = disks.iter().chain([&card]);
    let guest = devices.fold(Guest::transom(), |it, word| it.word("--device").word(word));
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_GENERIC{kernel}"))?);
    let modules = lab::asset(&format!("MODULES_GENERIC{kernel}"))?;
    let words = if wire { "pci=nomsi" } else { "" };
    let linux = linux
        .cmdline(words)
        .modules(&modules, MODULES)
        .file("tools.sh", &links(&["tools", "played", "recorded"]));
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    let cards = booted.run("cat /proc/asound/cards", SOON)?;
    ensure!(cards.contains("HDA Intel"), "the driver found no card: {cards}");
    let interrupts = booted.run("grep snd_hda /proc/interrupts", SOON)?;
    ensure!(interrupts.contains("MSI") != wire, "other interrupts than intended: {interrupts}");
    full_volume(&mut booted, SOON)?;
    plays(&mut booted, &at("speaker"))?;
    let part = idle::wait_until_idle(booted.running.pid(), "hda", 0.000_1)?;
    say!("the idle card uses {part:.6} of a processor");
    records(&mut booted, &recorded)
}

fn plays(booted: &mut Booted, speaker: &Path) -> anyhow::Result<()> {
    let wanted = signal(0..FRAMES);
    for _ in 0..TRIES {
        let before = fs::read(speaker)?.len();
        let command = format!("chroot /tools aplay -D hw:0,0 {FORMAT} - < /played.disk 2>&1");
        let said = booted.run(&command, SOON)?;
        if said.contains("underrun") {
            say!("the guest was too slow: {said}");
            continue;
        }
        let heard = fs::read(speaker)?.split_off(before);
        let start = heard.iter().position(|it| *it != 0).context("only silence was heard")?;
        let signal = &heard[start / FRAME_BYTES * FRAME_BYTES..];
        let same = signal.iter().zip(&wanted).take_while(|(one, two)| one == two).count();
        ensure!(same == wanted.len(), "the sound differs at byte {same} of {}", wanted.len());
        return Ok(());
    }
    bail!("{TRIES} tries, each with a guest that was too slow")
}

fn records(booted: &mut Booted, recorded: &Path) -> anyhow::Result<()> {
    for _ in 0..TRIES {
        let command = format!("arecord -D hw:0,0 {FORMAT} -d 2 2>&1 > /recorded.disk && sync");
        let said = booted.run(&format!("chroot /tools {command}"), SOON)?;
        if said.contains("overrun") {
            say!("the guest was too slow: {said}");
            continue;
        }
        let recorded = fs::read(recorded)?;
        let (frames, _) = recorded.as_chunks::<FRAME_BYTES>();
        let first = number(frames[0]).filter(|first| *first < 59 * 48_000);
        let first = first.with_context(|| format!("the record begins with {:?}", frames[0]))?;
        let wanted = signal(first..first + FRAMES);
        let same = recorded.iter().zip(&wanted).take_while(|(one, two)| one == two).count();
        ensure!(same == wanted.len(), "the record differs at byte {same} of {}", wanted.len());
        return Ok(());
    }
    bail!("{TRIES} tries, each with a guest that was too slow")
}
