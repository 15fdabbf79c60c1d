//! Keyboard and tablet at USB: what a person does on the host arrives in the guest exactly, in
//! Linux of two releases and in stock firmware.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::process::ExitCode;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::guest::Guest;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi::{self, Shell};
use vmm::control::Command;

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
/// Cloud kernels have no USB.
const ASSETS: &[&str] = &[
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        let name = format!("linux_{release}_takes_keys_and_places_from_usb");
        tests.push(Test::new(name, move || takes_keys_and_places(release, "")));
    }
    let name = "linux_13_takes_keys_and_places_from_usb_with_a_wire";
    tests.push(Test::new(name, || takes_keys_and_places("13", "pci=nomsi")));
    for release in RELEASES {
        let name = format!("ovmf_{release}_takes_keys_from_usb");
        tests.push(Test::new(name, move || firmware_takes_keys(release)));
    }
    Suite { lab: Lab { mib: 3072, seconds: 900, assets: ASSETS }, tests }.main()
}

/// A machine with a keyboard and a tablet at USB.
fn guest() -> Guest {
    let devices = ["xhci", "usb-keyboard", "usb-tablet"];
    devices.iter().fold(Guest::transom(), |guest, it| guest.word("--device").word(*it))
}

/// EV_KEY and EV_ABS, and what of them is looked at.
const KEY: u16 = 1;
const RELATIVE: u16 = 2;
const ABSOLUTE: u16 = 3;
const WHEEL: u16 = 8;

/// One event of Linux': type, code, value.
type Event = (u16, u16, i32);

/// The handler (`event2`) of the input device with this name.
fn handler(booted: &mut Booted, name: &str) -> anyhow::Result<String> {
    let start = Instant::now();
    loop {
        let devices = booted.run("cat /proc/bus/input/devices", SOON)?;
        let blocks = devices.replace('\r', "");
        let block = blocks.split("\n\n").find(|it| it.contains(name));
        let words = block.and_then(|it| it.split("Handlers=").nth(1));
        let event = words.and_then(|it| it.split_whitespace().find(|it| it.starts_with("event")));
        if let Some(event) = event {
            return Ok(event.to_owned());
        }
        ensure!(start.elapsed() < SOON, "no `{name}` came: {devices}");
        sleep(Duration::from_secs(1));
    }
}

/// Writes what comes from this handler down, from now on.
fn listen(booted: &mut Booted, handler: &str) -> anyhow::Result<()> {
    let command = format!("cat /dev/input/{handler} > /{handler} 2>&1 & echo $! > /{handler}.pid");
    booted.run(&command, SOON)?;
    // The driver begins to ask its device when the file is open.
    booted.run("sleep 1", SOON).map(|_| ())
}

/// What came from this handler.
fn heard(booted: &mut Booted, handler: &str) -> anyhow::Result<Vec<Event>> {
    booted.run(&format!("sleep 1; kill $(cat /{handler}.pid)"), SOON)?;
    let text = booted.run(&format!("hexdump -v -e '24/1 \"%02x\" \"\\n\"' /{handler}"), SOON)?;
    let mut events = Vec::new();
    for line in text.lines().map(str::trim).filter(|it| !it.is_empty()) {
        let digits = line.get(32..48).with_context(|| format!("{line}: no input_event"))?;
        let byte = |at: usize| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16);
        let short = |at| anyhow::Ok(u16::from_le_bytes([byte(at)?, byte(at + 1)?]));
        let value = i32::from_le_bytes([byte(4)?, byte(5)?, byte(6)?, byte(7)?]);
        events.push((short(0)?, short(2)?, value));
    }
    Ok(events)
}

fn press(booted: &Booted, keys: &str) -> anyhow::Result<()> {
    booted.running.ask(&Command::Key { keys: keys.parse()? }).map(|_| ())
}

fn takes_keys_and_places(release: &str, words: &str) -> anyhow::Result<()> {
    let (kernel, modules) = match release {
        "12" => ("BZIMAGE_GENERIC", "MODULES_GENERIC"),
        _ => ("BZIMAGE_GENERIC_13", "MODULES_GENERIC_13"),
    };
    let linux = Linux::new(guest(), &lab::asset(kernel)?)
        .cmdline(words)
        .modules(&lab::asset(modules)?, &["xhci-pci", "usbhid", "hid-generic", "evdev"]);
    let mut booted = linux.boot(BOOT)?;
    types_and_points(&mut booted)?;
    // The driver lets go of the controller, takes it again, and finds it as it was.
    let driver = "cd /sys/bus/pci/drivers/xhci_hcd; it=$(ls -d 0000:*)";
    booted.run(&format!("{driver}; echo $it > unbind; sleep 1; echo $it > bind"), SOON)?;
    types_and_points(&mut booted)?;
    booted.run("sync", SOON)?;
    booted.running.ask(&Command::Reset)?;
    booted.ready(BOOT)?;
    types_and_points(&mut booted)?;
    let complaints = "dmesg | grep -E 'xhci|usb|hid' | grep -iE 'error|warn|fail|timeout|died|bug'";
    let complaints = booted.try_run(complaints, SOON)?.output;
    ensure!(complaints.trim().is_empty(), "the kernel complains: {complaints}");
    let rests = booted.run("grep -E 'xhci' /proc/interrupts", SOON)?;
    let messages = rests.contains("MSI");
    ensure!(messages == words.is_empty(), "interrupts with `{words}`: {rests}");
    rests_when_nothing_happens(&booted)?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn types_and_points(booted: &mut Booted) -> anyhow::Result<()> {
    let keyboard = handler(booted, "USB keyboard")?;
    let tablet = handler(booted, "USB tablet")?;
    listen(booted, &keyboard)?;
    listen(booted, &tablet)?;
    for keys in ["a", "ctrl-shift-f5", "hangul", "hanja", "pause", "rightalt-m", "print", "0x73"] {
        press(booted, keys)?;
    }
    let typed = heard(booted, &keyboard)?;
    let typed: Vec<_> = typed.iter().filter(|it| it.0 == KEY).map(|it| (it.1, it.2)).collect();
    let mut expected = Vec::new();
    // As Linux numbers them: A; left Ctrl, left Shift, F5; Hangul, Hanja, Pause; ...
    let combinations: &[&[u16]] =
        &[&[30], &[29, 42, 63], &[122], &[123], &[119], &[100, 50], &[99], &[89]];
    for keys in combinations {
        expected.extend(keys.iter().map(|key| (*key, 1)));
        expected.extend(keys.iter().rev().map(|key| (*key, 0)));
    }
    ensure!(typed == expected, "typed {typed:?}, not {expected:?}");
    points(booted, &tablet)
}

/// Left, right and middle button.
const BUTTONS: [u16; 3] = [0x110, 0x111, 0x112];

fn points(booted: &mut Booted, tablet: &str) -> anyhow::Result<()> {
    let places = [(1, 2, 0, 0), (32767, 32767, 1, 0), (12345, 6789, 6, 3), (0, 16384, 0, -2)];
    for (x, y, buttons, wheel) in places {
        let (buttons, wheel) = (Some(buttons), Some(wheel));
        booted.running.ask(&Command::Pointer { x, y, buttons, wheel })?;
        // Movements that nobody has seen become one: this guest shall see each.
        sleep(Duration::from_millis(300));
    }
    let mut state: BTreeMap<(u16, u16), i32> = BTreeMap::new();
    let (mut seen, mut notches) = (Vec::new(), Vec::new());
    for (kind, code, value) in heard(booted, tablet)? {
        match kind {
            // SYN_REPORT: what is known now is one state of the tablet.
            0 => {
                let of = |kind, code| state.get(&(kind, code)).copied().unwrap_or(0);
                let down = BUTTONS.map(|button| of(KEY, button));
                let buttons = down[0] | down[1] << 1 | down[2] << 2;
                seen.push((of(ABSOLUTE, 0), of(ABSOLUTE, 1), buttons));
            }
            RELATIVE if code == WHEEL => notches.push(value),
            _ => drop(state.insert((kind, code), value)),
        }
    }
    let expected = places.map(|(x, y, buttons, _)| (i32::from(x), i32::from(y), buttons.into()));
    // A value that did not change is not told again: the first state may miss one.
    ensure!(seen.ends_with(&expected[1..]), "the tablet was at {seen:?}, not {expected:?}");
    ensure!(notches == [3, -2], "the wheel turned {notches:?}");
    Ok(())
}

/// Clock ticks that the controller's thread has used.
fn ticks(pid: u32) -> anyhow::Result<u64> {
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let stat = fs::read_to_string(task?.path().join("stat"))?;
        if stat.contains("(xhci)") {
            let mut fields = stat.rsplit(')').next().context("a stat")?.split_whitespace();
            let user: u64 = fields.nth(11).context("utime")?.parse()?;
            return Ok(user + fields.next().context("stime")?.parse::<u64>()?);
        }
    }
    anyhow::bail!("the controller has no thread")
}

fn rests_when_nothing_happens(booted: &Booted) -> anyhow::Result<()> {
    let pid = booted.running.pid();
    let before = ticks(pid)?;
    sleep(Duration::from_secs(3));
    let used = ticks(pid)? - before;
    say!("the controller's thread used {used} ticks of 3 s without input");
    ensure!(used <= 1, "the controller's thread used {used} ticks of 3 s without input");
    Ok(())
}

fn firmware_takes_keys(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the store")?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let mut shell = Shell::start(&guest().memory("256M").firmware(code, vars), BOOT)?;
    // The driver has configured the keyboard, so that keys go there first.
    let drivers = shell.run("devices", BOOT)?;
    ensure!(drivers.contains("USB keyboard") || drivers.contains("Usb Keyboard"), "{drivers}");
    for key in "e-c-h-o-space-shift.u-s-b-1".split('-') {
        let keys = key.replace('.', "-").parse()?;
        shell.running.ask(&Command::Key { keys })?;
        sleep(Duration::from_millis(200));
    }
    shell.running.ask(&Command::Key { keys: "enter".parse()? })?;
    let said = shell.running.expect("Shell> ", SOON)?;
    ensure!(said.contains("Usb1"), "the shell heard {said:?}");
    shell.running.send("reset -s")?;
    shell.running.ends_with(0, SOON)
}
