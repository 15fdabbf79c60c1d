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
const FRAME_BYTES: usize = 4;
/// The format of the card, without a file header.
const FORMAT: &str = "-t raw -f S16_LE -r 48000 -c 2";
/// Tries on a host that is too busy for its guest, which the guest's program reports.
const TRIES: usize = 4;

/// Links the disks by their serial numbers, because their drivers may find them in any order and
/// after a while.
const TOOLS: &str = r"
set -e
for name in tools played recorded; do
  while [ ! -e /$name.disk ]; do
    for disk in /sys/block/vd*; do
      [ ! -e $disk/serial ] || [ $(tr -dc '!-~' < $disk/serial) != $name ] ||
        ln -sf /dev/${disk##*/} /$name.disk
    done
    sleep 0.1
  done
done
mkdir -p /tools
mount -t ext4 -o ro /tools.disk /tools
for folder in dev proc sys; do mount --bind /$folder /tools/$folder; done
";

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

/// Frames with their number, of which none is silent.
fn signal(numbers: std::ops::Range<u32>) -> Vec<u8> {
    numbers.flat_map(|it| (it + 0x0001_0001).to_le_bytes()).collect()
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
    let linux = linux.cmdline(words).modules(&modules, MODULES).file("tools.sh", TOOLS);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    let cards = booted.run("cat /proc/asound/cards", SOON)?;
    ensure!(cards.contains("HDA Intel"), "the driver found no card: {cards}");
    let interrupts = booted.run("grep snd_hda /proc/interrupts", SOON)?;
    ensure!(interrupts.contains("MSI") != wire, "other interrupts than intended: {interrupts}");
    // Full volume changes no sample.
    tool(&mut booted, "amixer -q -c 0 sset Master 100% unmute")?;
    tool(&mut booted, "amixer -q -c 0 sset Capture 100% cap")?;
    plays(&mut booted, &at("speaker"))?;
    let part = idle::wait_until_idle(booted.running.pid(), "hda", 0.000_1)?;
    say!("the idle card uses {part:.6} of a processor");
    records(&mut booted, &recorded)
}

/// Runs a program of the tools, and returns what it prints.
fn tool(booted: &mut Booted, command: &str) -> anyhow::Result<String> {
    booted.run(&format!("chroot /tools {command} 2>&1"), SOON)
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
        let first = u32::from_le_bytes(frames[0]).wrapping_sub(0x0001_0001);
        ensure!(first < 59 * 48_000, "the record begins with {first:#x}");
        let wanted = signal(first..first + FRAMES);
        let same = recorded.iter().zip(&wanted).take_while(|(one, two)| one == two).count();
        ensure!(same == wanted.len(), "the record differs at byte {same} of {}", wanted.len());
        return Ok(());
    }
    bail!("{TRIES} tries, each with a guest that was too slow")
}
