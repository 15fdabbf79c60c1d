//! The screen as guests draw it and viewers see it: stock firmware in the monitor's preferred size,
//! and Linux with its own driver.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::patience::Patience;
use transom_tests::say;
use transom_tests::sight::{Font, Sight, last};
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};
use vmm::control::Command;
use vmm::screenshot::{self, Picture};

/// Long enough for firmware, and for a kernel with many drivers, in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(240);
/// The limit for a command, or the end of a process.
const SOON: Duration = Duration::from_secs(60);

const ASSETS: &[&str] = &[
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BUSYBOX",
];

fn main() -> ExitCode {
    let shell = |release: &'static str, size: &'static str| {
        let name = size.replace(",adapter=", "_on_");
        let name = format!("ovmf_{release}_shows_its_shell_in_{name}");
        Test::new(name, move || shows_its_shell(release, size))
    };
    let tests = vec![
        Test::new("linux_draws_with_its_own_driver", linux_draws),
        // The suites `desktop` and `loader` show firmware on the display.
        shell("13", "1728x1117").thorough(),
        shell("13", "1366x768,adapter=virtio"),
        shell("12", "1366x768,adapter=virtio").thorough(),
        shell("12", "1920x1080").thorough(),
        shell("12", "1728x1117").thorough(),
        shell("13", "1920x1080").thorough(),
        Test::new("ovmf_has_larger_modes_than_it_prefers", has_larger_modes).thorough(),
    ];
    Suite { lab: Lab { mib: 2048, seconds: 900, assets: ASSETS }, tests }.main()
}

/// Takes a screenshot, and saves it for people.
fn picture(running: &Running, name: &str) -> anyhow::Result<(Picture, Vec<u8>)> {
    let (picture, pixels) = running.screenshot()?;
    let file = lab::shared()?.join(format!("{name}.png"));
    screenshot::write(picture, pixels.clone(), &file)?;
    Ok((picture, pixels))
}

/// Waits until the screen no longer changes.
fn settled(running: &Running, name: &str) -> anyhow::Result<(Picture, Vec<u8>)> {
    let start = Instant::now();
    let mut before = picture(running, name)?;
    while start.elapsed() < SOON {
        sleep(Duration::from_secs(2));
        let now = picture(running, name)?;
        if now == before {
            return Ok(now);
        }
        before = now;
    }
    bail!("{name}: the screen keeps changing")
}

/// The blue, green and red of each pixel.
fn colors(pixels: &[u8]) -> impl Iterator<Item = [u8; 3]> {
    let (pixels, _) = pixels.as_chunks::<4>();
    pixels.iter().map(|[blue, green, red, _]| [*blue, *green, *red])
}

fn shows_its_shell(release: &str, size: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let guest = Guest::transom().memory("256M").firmware(code, vars).display(size);
    let mut shell = Shell::start(&guest, BOOT)?;
    let size = size.split(',').next().unwrap_or(size);
    is_used_in(&mut shell, release, size)
}

/// Firmware prefers a mode of the first EDID block, which cannot describe more than 4095 pixels.
/// Larger modes are in its list, for users of its setup screen, which sets this variable.
fn has_larger_modes() -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset("OVMF_VARS_13")?, folder.path())?;
    let code = lab::asset("OVMF_CODE_13")?;
    let guest = Guest::transom().memory("256M").firmware(code, vars).display("4096x2160");
    let mut shell = Shell::start(&guest, BOOT)?;
    let status = shell.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == "3840x2160", "{status}");
    let variable = "PlatformConfig -guid 7235c51c-0c80-4cab-87ac-3b084a6304b1 -bs -nv";
    let said = shell.run(&format!("setvar {variable} =0010000070080000"), SOON)?;
    shell.running.send("reset")?;
    shell.prompt(BOOT).context(said)?;
    is_used_in(&mut shell, "13", "4096x2160")
}

/// Checks that the shell shows typed text, and switches the machine off.
fn is_used_in(shell: &mut Shell, release: &str, size: &str) -> anyhow::Result<()> {
    let status = shell.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == size, "not {size}: {status}");
    let name = format!("ovmf-{release}-{size}");
    let (first, before) = settled(&shell.running, &name)?;
    ensure!(format!("{}x{}", first.width, first.height) == size, "{size}: {first:?}");
    // Letters on black cover a small part of the screen.
    let lit = colors(&before).filter(|it| *it != [0; 3]).count();
    let all = before.len() / 4;
    ensure!((all / 4000..all / 3).contains(&lit), "{lit} of {all} pixels are lit");
    let used: BTreeSet<_> = colors(&before).collect();
    ensure!(used.len() > 2, "more than two colors expected, not {used:?}");
    shell.run("echo seen on the screen", SOON)?;
    let (_, after) = settled(&shell.running, &name)?;
    ensure!(before != after, "the typed text is not on the screen");
    shell.run("cls", SOON)?;
    let (_, clear) = settled(&shell.running, &name)?;
    let left = colors(&clear).filter(|it| *it != [0; 3]).count();
    ensure!(left < lit, "`cls` left {left} of {lit} pixels");
    say!("{size}: {lit} of {all} pixels lit, {} colors; {left} after `cls`", used.len());
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// The driver had another name before Linux 5.17. It makes `/dev/fb0`.
fn linux_draws() -> anyhow::Result<()> {
    let guest = Guest::transom().display("1728x1116");
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_GENERIC")?)
        .modules(&lab::asset("MODULES_GENERIC")?, &["bochs"])
        .program(MODETEST)?
        // The console takes the screen at once, without a cursor, and kernel messages do not go
        // there.
        .cmdline("fbcon=nodefer vt.global_cursor_default=0");
    let mut booted = linux.boot(BOOT)?;
    let said = booted.run("cat /sys/class/graphics/fb0/name /sys/class/drm/*/modes", SOON)?;
    ensure!(said.contains("bochs"), "the display has another driver: {said}");
    for mode in ["1728x1116", "2560x1440", "1280x800", "640x480"] {
        ensure!(said.lines().any(|line| line == mode), "{mode} is not offered: {said}");
    }
    let first = said.lines().nth(1).context("no modes")?;
    ensure!(first == "1728x1116", "{first} is preferred: {said}");
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == "1728x1116", "{status}");
    // Known bytes that do not resemble anything else.
    booted.run("cat /bin/busybox > /dev/fb0", SOON)?;
    let (_, pixels) = settled(&booted.running, "linux-fb0")?;
    let program = fs::read(lab::asset("BUSYBOX")?)?;
    let wanted: Vec<_> = colors(&program).collect();
    ensure!(wanted.len() > 100_000, "too short: {}", wanted.len());
    let differ = colors(&pixels).zip(&wanted).filter(|(is, wanted)| is != *wanted).count();
    ensure!(differ == 0, "{differ} of {} pixels differ", wanted.len());
    say!("{} pixels match the guest's data", wanted.len());
    changes_mode(&mut booted)?;
    // The driver switches the screen off through VGA's registers.
    booted.run("echo 4 > /sys/class/graphics/fb0/blank", SOON)?;
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"].is_null(), "blanked: {status}");
    let error = booted.running.screenshot().err().context("a screenshot of a blanked display")?;
    ensure!(format!("{error:#}").contains("the display is off"), "{error:#}");
    booted.run("echo 0 > /sys/class/graphics/fb0/blank", SOON)?;
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == "1728x1116", "back: {status}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Part of libdrm. It shows a test picture in any mode until its input is closed.
const MODETEST: &str = "/usr/bin/modetest";

/// A program switches the screen to another mode, and back to the console, which then shows the
/// earlier text and new lines.
fn changes_mode(booted: &mut Booted) -> anyhow::Result<()> {
    let mut font = Font::of_linux();
    let first = "abcdefghijklmnopqrstuvwxyz .-0123456789";
    // Starts in the upper left corner of an empty screen.
    booted.run(&format!("printf '\\033[2J\\033[H{first}\\n' > /dev/tty0"), SOON)?;
    let sight = sight(&booted.running, "linux-console")?;
    let rows = font.rows(&sight);
    font.learn(&rows[0], first)?;
    let (kept, _) = last(&rows)?;
    ensure!(kept == 0, "unexpected text on the console, in row {kept}");
    let list = booted.run("modetest -M bochs-drm -c", SOON)?;
    let connected = list.lines().find(|line| line.contains("\tconnected\t"));
    let id = connected.and_then(|line| line.split_whitespace().next()).context(list.clone())?;
    for mode in ["1280x800", "640x480", "1920x1080"] {
        let command = format!("mkfifo /{mode}; modetest -M bochs-drm -s {id}:{mode} < /{mode} &");
        booted.run(&format!("{{ {command} }} > /said 2>&1; sleep 1000 > /{mode} &"), SOON)?;
        shows(booted, mode)?;
        let (_, pixels) = settled(&booted.running, &format!("linux-{mode}"))?;
        // The first color bar of the test picture is gray, the last one is blue.
        let line: Vec<_> = colors(&pixels).take(width(mode)?).collect();
        let bars = line.chunk_by(|one, other| one == other).count();
        ensure!(bars == 7 && line[0] == [192; 3], "{bars} bars in {mode}: {:?}", line[0]);
        ensure!(line.last() == Some(&[192, 0, 0]), "{:?} at the end of {mode}", line.last());
        booted.run(&format!("uname -r > /dev/tty0; echo {mode} > /dev/tty0"), SOON)?;
        booted.run("killall modetest sleep", SOON)?;
        shows(booted, "1728x1116")?;
    }
    let release = booted.run("uname -r", SOON)?;
    let release = release.trim();
    let wanted = [first, release, "1280x800", release, "640x480", release, "1920x1080"];
    let sight = self::sight(&booted.running, "linux-console-again")?;
    let text = font.read(&sight);
    ensure!(text.iter().zip(wanted).all(|(is, wanted)| is == wanted), "{wanted:?} became {text:?}");
    say!("after three other modes the console reads {:?}", &text[..wanted.len()]);
    Ok(())
}

fn width(mode: &str) -> anyhow::Result<usize> {
    Ok(mode.split_once('x').context("a mode")?.0.parse()?)
}

/// The picture once it no longer changes.
fn sight(running: &Running, name: &str) -> anyhow::Result<Sight> {
    let (picture, pixels) = settled(running, name)?;
    Sight::new(picture, pixels)
}

/// Waits until the display has this mode.
fn shows(booted: &Booted, mode: &str) -> anyhow::Result<()> {
    let mut patience = Patience::new(SOON);
    loop {
        let status = booted.running.ask(&Command::Status)?;
        if status["display"]["mode"] == mode {
            return Ok(());
        }
        let next = patience.until_next_look();
        ensure!(!next.is_zero(), "not {mode}: {status}");
        sleep(next);
    }
}
