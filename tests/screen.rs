//! The screen, as guests draw it and as a viewer sees it: stock firmware in the size that the
//! monitor prefers, and Linux with its own driver.
#![forbid(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::Linux;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};
use vmm::control::Command;
use vmm::screenshot::{self, Picture};

/// Long enough for firmware, and for a kernel with many drivers, in a lab on a busy machine.
const BOOT: Duration = Duration::from_secs(240);
/// For a command, or the end of a process.
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
        let name = format!("ovmf_{release}_shows_its_shell_in_{size}");
        Test::new(name, move || shows_its_shell(release, size))
    };
    let mut tests = vec![
        Test::new("linux_draws_with_its_own_driver", linux_draws),
        shell("12", "1728x1117"),
        shell("13", "1920x1080"),
    ];
    if lab::everything() {
        tests.extend([
            shell("12", "1920x1080"),
            shell("13", "1728x1117"),
            shell("13", "4096x2160"),
        ]);
    }
    Suite { lab: Lab { mib: 2048, seconds: 900, assets: ASSETS }, tests }.main()
}

/// The picture that is shown, and in a file for people what is in it.
fn picture(running: &Running, name: &str) -> anyhow::Result<(Picture, Vec<u8>)> {
    let (picture, pixels) = running.screenshot()?;
    let file = lab::shared()?.join(format!("{name}.png"));
    screenshot::write(picture, pixels.clone(), &file)?;
    Ok((picture, pixels))
}

/// Waits until the screen does not change any more.
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
    bail!("{name}: the screen changes all the time")
}

fn colours(pixels: &[u8]) -> impl Iterator<Item = [u8; 3]> {
    let (pixels, _) = pixels.as_chunks::<4>();
    pixels.iter().map(|[blue, green, red, _]| [*blue, *green, *red])
}

fn shows_its_shell(release: &str, size: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let guest = Guest::transom().memory("256M").firmware(code, vars).display(size);
    let mut shell = Shell::start(&guest, BOOT)?;
    let status = shell.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == size, "not {size}: {status}");
    let name = format!("ovmf-{release}-{size}");
    let (first, before) = settled(&shell.running, &name)?;
    ensure!(format!("{}x{}", first.width, first.height) == size, "{size}: {first:?}");
    // Letters on black, and not many of them.
    let lit = colours(&before).filter(|it| *it != [0; 3]).count();
    let all = before.len() / 4;
    ensure!((all / 4000..all / 3).contains(&lit), "{lit} of {all} pixels are lit");
    let used: BTreeSet<_> = colours(&before).collect();
    ensure!(used.len() > 2, "text in colours, not {used:?}");
    shell.run("echo seen on the screen", SOON)?;
    let (_, after) = settled(&shell.running, &name)?;
    ensure!(before != after, "what was typed is not on the screen");
    shell.run("cls", SOON)?;
    let (_, clear) = settled(&shell.running, &name)?;
    let left = colours(&clear).filter(|it| *it != [0; 3]).count();
    ensure!(left < lit, "{left} of {lit} pixels are left by `cls`");
    say!("{size}: {lit} of {all} pixels lit, {} colours; {left} after `cls`", used.len());
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}

/// The driver's name was another before Linux 5.17; what it makes is `/dev/fb0`.
fn linux_draws() -> anyhow::Result<()> {
    let guest = Guest::transom().display("1728x1116");
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_GENERIC")?)
        .modules(&lab::asset("MODULES_GENERIC")?, &["bochs"])
        // The console takes the screen at once, shows no cursor, and gets no words.
        .cmdline("fbcon=nodefer vt.global_cursor_default=0");
    let mut booted = linux.boot(BOOT)?;
    let said = booted.run("cat /sys/class/graphics/fb0/name /sys/class/drm/*/modes", SOON)?;
    ensure!(said.contains("bochs"), "another driver has the display: {said}");
    for mode in ["1728x1116", "2560x1440", "1280x800", "640x480"] {
        ensure!(said.lines().any(|line| line == mode), "{mode} is not offered: {said}");
    }
    let first = said.lines().nth(1).context("no modes")?;
    ensure!(first == "1728x1116", "{first} is preferred: {said}");
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == "1728x1116", "{status}");
    // Bytes that we know, and that look like nothing else.
    booted.run("cat /bin/busybox > /dev/fb0", SOON)?;
    let (_, pixels) = settled(&booted.running, "linux-fb0")?;
    let program = fs::read(lab::asset("BUSYBOX")?)?;
    let wanted: Vec<_> = colours(&program).collect();
    ensure!(wanted.len() > 100_000, "too short: {}", wanted.len());
    let differ = colours(&pixels).zip(&wanted).filter(|(is, wanted)| is != *wanted).count();
    ensure!(differ == 0, "{differ} of {} pixels differ", wanted.len());
    say!("{} pixels are as the guest wrote them", wanted.len());
    // The driver switches the screen off through VGA's registers.
    booted.run("echo 4 > /sys/class/graphics/fb0/blank", SOON)?;
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"].is_null(), "blanked: {status}");
    let error = booted.running.screenshot().err().context("a picture of nothing")?;
    ensure!(format!("{error:#}").contains("the display is off"), "{error:#}");
    booted.run("echo 0 > /sys/class/graphics/fb0/blank", SOON)?;
    let status = booted.running.ask(&Command::Status)?;
    ensure!(status["display"]["mode"] == "1728x1116", "back: {status}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}
