//! USB. The guest gets a person's input at keyboard and tablet exactly; disks and CDs have their
//! content; and the guest follows hot plug and media changes. Runs Linux of two releases, and stock
//! firmware that boots from a CD.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{self, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::evdev::{Event, EventRecorder, TOOLS, presses, states, wait_until};
use transom_tests::guest::{Guest, Running};
use transom_tests::idle;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use transom_tests::uefi;
use vmm::control::{Command, Force};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);

/// Debian's cloud kernels have no USB.
const ASSETS: &[&str] = &[
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "USB_TOOLS",
    "OVMF_CODE_12",
    "OVMF_VARS_12",
    "OVMF_CODE_13",
    "OVMF_VARS_13",
    "BOOT_CD",
];
const MODULES: &[&str] = &[
    "xhci-pci",
    "usbhid",
    "hid-generic",
    "evdev",
    "input-leds",
    "usb-storage",
    "sd_mod",
    "sr_mod",
    "crc32c_generic",
    "ext4",
    "isofs",
    "vfat",
    "nls_cp437",
    "nls_ascii",
];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for (release, speed, wire) in
        [("13", "super", false), ("12", "high", true), ("12", "super", false), ("13", "high", true)]
    {
        let interrupts = if wire { "a_wire" } else { "messages" };
        let name = format!("linux_{release}_uses_usb_devices_at_{speed}_speed_with_{interrupts}");
        let guest = LinuxGuest { release, speed, wire };
        let test = Test::new(name, move || guest.uses_usb_devices());
        // The suite `guest_network` has an interrupt line, and `usb_host` other speeds.
        tests.push(if tests.is_empty() { test } else { test.thorough() });
    }
    for release in ["12", "13"] {
        let name = format!("ovmf_{release}_boots_from_a_usb_cd_and_receives_keys");
        let test = Test::new(name, move || boots_from_a_cd(release));
        tests.push(if release == "13" { test } else { test.thorough() });
    }
    Suite { lab: Lab { mib: 3072, seconds: 1200, assets: ASSETS }, tests }.main()
}

/// A Linux guest with a keyboard, a tablet, a disk and a CD.
#[derive(Clone, Copy)]
struct LinuxGuest {
    release: &'static str,
    /// The speed of the disk and the CD.
    speed: &'static str,
    /// Whether the controller uses a line instead of messages for interrupts.
    wire: bool,
}

impl LinuxGuest {
    fn boot(self, folder: &TempDir) -> anyhow::Result<Booted> {
        let suffix = if self.release == "12" { "" } else { "_13" };
        let kernel = lab::asset(&format!("BZIMAGE_GENERIC{suffix}"))?;
        let modules = lab::asset(&format!("MODULES_GENERIC{suffix}"))?;
        let storage = |asset: &str| {
            let path = lab::asset(asset)?;
            anyhow::Ok(format!("usb-storage,path={},speed={}", path.display(), self.speed))
        };
        let disk = format!("{},readonly", storage("USB_TOOLS")?);
        let devices = ["xhci", "usb-keyboard", "usb-tablet", &disk, &storage("BOOT_CD")?];
        let guest = devices
            .iter()
            .fold(Guest::transom().display("1024x768"), |it, word| it.word("--device").word(*word));
        let guest = guest.word("--vnc").word(format!("unix:{}", viewers(folder).display()));
        let words = if self.wire { "pci=nomsi" } else { "" };
        Linux::new(guest, &kernel).cmdline(words).modules(&modules, MODULES).boot(BOOT)
    }

    fn uses_usb_devices(self) -> anyhow::Result<()> {
        let folder = tempfile::tempdir().context("a folder for the disk images")?;
        let mut booted = self.boot(&folder)?;
        let mut watch = StopWatch::new();
        self.reads_a_disk_and_a_cd(&mut booted)?;
        watch.report("disk and CD");
        types_and_points(&mut booted)?;
        watch.report("keys and positions");
        writes_a_text_and_lights_up(&mut booted)?;
        watch.report("text and lights");
        if self.is_thorough() {
            self.runs_thorough_checks(&mut booted, &folder, &mut watch)?;
        }
        self.logs_no_errors(&mut booted)?;
        rests_when_nothing_happens(&booted)?;
        pastes_at_both(&mut booted, &viewers(&folder))?;
        watch.report("long texts");
        booted.running.send("poweroff -f")?;
        booted.running.ends_with(0, SOON)
    }

    /// Checks of the host's side run in one guest, unless all tests run.
    fn is_thorough(self) -> bool {
        lab::everything() || !self.wire
    }

    fn runs_thorough_checks(
        self,
        booted: &mut Booted,
        folder: &TempDir,
        watch: &mut StopWatch,
    ) -> anyhow::Result<()> {
        Self::checks_descriptors(booted)?;
        lets_go(booted, &viewers(folder))?;
        watch.report("a disconnected viewer");
        follows_a_stick(booted, folder.path())?;
        watch.report("a stick");
        follows_a_cd(booted, folder.path())?;
        watch.report("other CDs");
        wakes_up(booted)?;
        // The driver releases the controller and takes it again; all devices come back.
        booted.run(&format!("umount {TOOLS}/dev {TOOLS}/proc {TOOLS}/sys {TOOLS}"), SOON)?;
        let driver = "cd /sys/bus/pci/drivers/xhci_hcd; it=$(ls -d 0000:*)";
        booted.run(&format!("{driver}; echo $it > unbind; echo $it > bind"), SOON)?;
        self.reads_a_disk_and_a_cd(booted)?;
        types_and_points(booted)?;
        watch.report("the driver again");
        // By default the suite `conformance` resets the controller with all devices.
        if !lab::everything() {
            return Ok(());
        }
        self.logs_no_errors(booted)?;
        booted.running.ask(&Command::Reset)?;
        booted.ready(BOOT)?;
        self.reads_a_disk_and_a_cd(booted)?;
        types_and_points(booted)?;
        watch.report("everything after the reset");
        Ok(())
    }

    /// Checks the content of the disk, whose programs run, and of the CD.
    fn reads_a_disk_and_a_cd(self, booted: &mut Booted) -> anyhow::Result<()> {
        wait_until(booted, "test -b /dev/sda && test -b /dev/sr0")?;
        let link = if self.speed == "high" { "480" } else { "5000" };
        for name in ["USB disk", "USB CD-ROM"] {
            let found = format!("$(dirname $(grep -l '{name}' /sys/bus/usb/devices/*/product))");
            let speed = booted.run(&format!("cat {found}/speed"), SOON)?;
            ensure!(speed.trim() == link, "{name} at {speed}");
        }
        let size = booted.run("blockdev --getss /dev/sda; blockdev --getss /dev/sr0", SOON)?;
        let sizes: Vec<_> = size.split_whitespace().collect();
        ensure!(sizes == ["512", "2048"], "sectors: {size}");
        for (device, asset) in [("/dev/sda", "USB_TOOLS"), ("/dev/sr0", "BOOT_CD")] {
            ensure!(seen(booted, device)? == sum(&lab::asset(asset)?)?, "{asset} differs");
        }
        booted.run(&format!("mkdir -p {TOOLS} /cd && mount -o ro /dev/sda {TOOLS}"), SOON)?;
        let inner = ["dev", "proc", "sys"].map(|it| format!("mount --bind /{it} {TOOLS}/{it}"));
        booted.run(&inner.join(" && "), SOON)?;
        let text = booted.run("mount /dev/sr0 /cd && cat /cd/read.me && umount /cd", SOON)?;
        ensure!(text.contains("This is on the CD."), "the CD has {text}");
        Ok(())
    }

    /// `lsusb` reads all descriptors, and Linux parses the report descriptors.
    fn checks_descriptors(booted: &mut Booted) -> anyhow::Result<()> {
        booted.run(&format!("chroot {TOOLS} lsusb -v > /lsusb 2> /lsusb.errors"), SOON)?;
        for name in ["USB keyboard", "USB tablet", "USB disk", "USB CD-ROM"] {
            booted.run(&format!("grep -E 'iProduct .* {name}' /lsusb"), SOON)?;
        }
        let words = "warning|mismatch|junk|unrecognized|invalid|bad ";
        let doubts = booted.try_run(&format!("grep -iE '{words}' /lsusb"), SOON)?.output;
        ensure!(doubts.trim().is_empty(), "lsusb warns: {doubts}");
        // lsusb asks each device for a debug descriptor, which none has.
        let errors = "grep -v 'debug descriptor' /lsusb.errors";
        let errors = booted.try_run(errors, SOON)?.output;
        ensure!(errors.trim().is_empty(), "lsusb complains: {errors}");
        booted.run("mount -t debugfs debugfs /sys/kernel/debug", SOON)?;
        let reports = booted.run("cat /sys/kernel/debug/hid/*/rdesc | grep -c '^  INPUT'", SOON)?;
        ensure!(reports.trim() == "4", "keyboard, media keys, sleep, tablet: {reports}");
        Ok(())
    }

    fn logs_no_errors(self, booted: &mut Booted) -> anyhow::Result<()> {
        let words = "errors?|warning|fail(ed|ure)?|time(d out|out)|died|bug|not responding";
        // The cache of a stick cannot be flushed after the stick is pulled out.
        let complaints = format!(
            "dmesg | grep -E 'usb|xhci|hid|sd |sr ' | grep -v 'Synchronize Cache' | \
             grep -iwE '{words}'"
        );
        let complaints = booted.try_run(&complaints, SOON)?.output;
        ensure!(complaints.trim().is_empty(), "the kernel complains: {complaints}");
        let rests = booted.run("grep xhci /proc/interrupts", SOON)?;
        ensure!(rests.contains("MSI") != self.wire, "interrupts: {rests}");
        Ok(())
    }
}

fn viewers(folder: &TempDir) -> PathBuf {
    folder.path().join("vnc")
}

struct StopWatch(Instant);

impl StopWatch {
    fn new() -> Self {
        Self(Instant::now())
    }

    fn report(&mut self, what: &str) {
        say!("{what}: {:.1} s", self.0.elapsed().as_secs_f64());
        self.0 = Instant::now();
    }
}

/// The checksum of a file's first 4 MiB, computed like in the guest.
fn sum(path: &Path) -> anyhow::Result<String> {
    let part = format!("head -c 4194304 '{}' | sha256sum", path.display());
    let sum = process::Command::new("sh").args(["-c", &part]).output().context("sha256sum")?;
    let text = String::from_utf8_lossy(&sum.stdout).into_owned();
    text.split_whitespace().next().map(str::to_owned).context("no output of sha256sum")
}

/// The guest's checksum of the same part of a device.
fn seen(booted: &mut Booted, device: &str) -> anyhow::Result<String> {
    let part = format!("head -c 4194304 {device} | sha256sum");
    let text = booted.run(&format!("echo 3 > /proc/sys/vm/drop_caches; {part}"), SOON)?;
    text.split_whitespace().next().map(str::to_owned).context("the guest has no checksum")
}

fn press(booted: &Booted, keys: &str) -> anyhow::Result<()> {
    booted.running.ask(&Command::Key { keys: keys.parse()? }).map(|_| ())
}

const KEYBOARD: &str = "Transom USB keyboard";
const MEDIA: &str = "Transom USB keyboard Consumer Control";
const SYSTEM: &str = "Transom USB keyboard System Control";
const TABLET: &str = "Transom USB tablet";

/// Keys that are pressed together, and their codes in Linux.
type Strokes = [(&'static str, &'static [u16])];
/// The last key is F24, which no other line has.
const KEYS: &Strokes = &[
    ("a", &[30]),
    ("ctrl-shift-f5", &[29, 42, 63]),
    ("hangul", &[122]),
    ("hanja", &[123]),
    ("pause", &[119]),
    ("rightalt-m", &[100, 50]),
    ("print", &[99]),
    ("0x73", &[89]),
    ("0x76", &[194]),
];
/// The last key is the calculator.
const MEDIA_KEYS: &Strokes = &[
    ("mute", &[113]),
    ("volumedown", &[114]),
    ("volumeup", &[115]),
    ("play", &[164]),
    ("stop", &[166]),
    ("previous", &[165]),
    ("next", &[163]),
    ("0xe021", &[140]),
];
const SYSTEM_KEYS: &Strokes = &[("sleep", &[142])];

/// Checks that exactly these keys went down and up in this order.
fn ensure_typed(events: &[Event], strokes: &Strokes) -> anyhow::Result<()> {
    let typed: Vec<_> = presses(events).collect();
    let mut expected = Vec::new();
    for (_, keys) in strokes {
        expected.extend(keys.iter().map(|key| (*key, 1)));
        expected.extend(keys.iter().rev().map(|key| (*key, 0)));
    }
    ensure!(typed == expected, "typed {typed:?}, not {expected:?}");
    Ok(())
}

fn types_and_points(booted: &mut Booted) -> anyhow::Result<()> {
    for (name, strokes) in [(KEYBOARD, KEYS), (MEDIA, MEDIA_KEYS), (SYSTEM, SYSTEM_KEYS)] {
        let recorder = EventRecorder::new(booted, name)?;
        let up = |few: &Strokes| format!("code {} .*value 0", few[few.len() - 1].1[0]);
        // Linux queues more events than these for a slow reader.
        for few in strokes.chunks(4) {
            few.iter().try_for_each(|(keys, _)| press(booted, keys))?;
            recorder.wait_for(booted, &up(few))?;
        }
        ensure_typed(&recorder.finish(booted, &up(strokes))?, strokes).context(name)?;
    }
    points(booted)
}

fn points(booted: &mut Booted) -> anyhow::Result<()> {
    let recorder = EventRecorder::new(booted, TABLET)?;
    // Moves that were not read yet are merged. They have different buttons, so that none is.
    let places = [
        (1, 2, 0, 0),
        (32767, 32767, 1, 0),
        (12345, 6789, 6, 3),
        (3, 16384, 24, -2),
        (20000, 16385, 0, 0),
    ];
    for (x, y, buttons, wheel) in places {
        let (buttons, wheel) = (Some(buttons), Some(wheel));
        booted.running.ask(&Command::Pointer { x, y, buttons, wheel })?;
    }
    let (seen, notches) = states(recorder.finish(booted, "code 0 (ABS_X), value 20000")?);
    let expected = places.map(|(x, y, buttons, _)| (i32::from(x), i32::from(y), buttons));
    ensure!(seen.ends_with(&expected), "the tablet was at {seen:?}, not {expected:?}");
    ensure!(notches == [3, -2], "the wheel turned {notches:?}");
    Ok(())
}

const TEXT: &str =
    "Sphinx of black quartz, judge my vow! 0123456789 @#$%^&*()_+-={}[]|\\:;\"'<>?/~`";

/// Waits until the Caps Lock light is on or off.
fn capitals(running: &Running, lit: bool) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let status = running.ask(&Command::Status)?;
        if status["lights"]["caps"] == lit {
            return Ok(());
        }
        ensure!(start.elapsed() < SOON, "the Caps Lock light is not {lit}: {status}");
        sleep(Duration::from_millis(100));
    }
}

/// A text arrives unchanged at Linux's console, with Caps Lock on or off.
fn writes_a_text_and_lights_up(booted: &mut Booted) -> anyhow::Result<()> {
    booted.run("cat < /dev/tty1 > /typed & echo $! > /typed.pid", SOON)?;
    wait_until(booted, "ls -l /proc/$(cat /typed.pid)/fd | grep -q /dev/tty1")?;
    capitals(&booted.running, false)?;
    booted.running.ask(&Command::Type { text: format!("{TEXT}\n") })?;
    press(booted, "capslock")?;
    capitals(&booted.running, true)?;
    booted.running.ask(&Command::Type { text: format!("{TEXT}\nx") })?;
    press(booted, "y")?;
    press(booted, "shift-z")?;
    press(booted, "capslock")?;
    capitals(&booted.running, false)?;
    booted.running.ask(&Command::Type { text: "End\n".into() })?;
    wait_until(booted, "grep -q End /typed")?;
    let typed = booted.run("kill $(cat /typed.pid); cat /typed", SOON)?;
    let lines: Vec<_> = typed.lines().map(|it| it.trim_end_matches('\r')).collect();
    ensure!(lines == [TEXT, TEXT, "xYzEnd"], "typed {lines:?}");
    Ok(())
}

/// The number of lines, 2,000 characters in all, that a viewer pastes in one write.
const LINES: usize = 50;

/// A viewer's text arrives complete at Linux's console, however slowly Linux reads.
fn pastes(booted: &mut Booted, socket: &Path) -> anyhow::Result<()> {
    booted.run("cat < /dev/tty1 > /pasted & echo $! > /pasted.pid", SOON)?;
    wait_until(booted, "ls -l /proc/$(cat /pasted.pid)/fd | grep -q /dev/tty1")?;
    let lines: Vec<_> =
        (0..LINES).map(|line| format!("{line:02} sphinx of black quartz judge my vow")).collect();
    let text = format!("{}\n", lines.join("\n"));
    let keys = text.chars().flat_map(|it| {
        let symbol = if it == '\n' { 0xff0d } else { u32::from(it) }.to_be_bytes();
        [1, 0].map(|down| [[4, down, 0, 0], symbol].concat()).concat()
    });
    let mut viewer = viewer(socket)?;
    viewer.write_all(&keys.collect::<Vec<u8>>())?;
    wait_until(booted, &format!("grep -q '^{}' /pasted", &lines[LINES - 1][..3]))?;
    let pasted = booted.run("kill $(cat /pasted.pid); cat /pasted", SOON)?;
    let pasted: Vec<_> = pasted.lines().map(|it| it.trim_end_matches('\r')).collect();
    ensure!(pasted == lines, "pasted {pasted:#?}");
    Ok(())
}

/// Pastes at both keyboards: when the USB keyboard is pulled, keys go to the PS/2 keyboard.
fn pastes_at_both(booted: &mut Booted, socket: &Path) -> anyhow::Result<()> {
    pastes(booted, socket).context("at USB")?;
    let status = booted.running.ask(&Command::Status)?;
    let mut names = status["usb"].as_array().context("USB devices")?.iter().flat_map(Value::as_str);
    let name = names.find(|it| it.contains("keyboard")).with_context(|| status.to_string())?;
    let name = name.to_owned();
    booted.running.ask(&Command::Detach { name })?;
    pastes(booted, socket).context("at PS/2")
}

fn viewer(socket: &Path) -> anyhow::Result<UnixStream> {
    let mut viewer = UnixStream::connect(socket).context("a viewer")?;
    viewer.set_read_timeout(Some(SOON))?;
    let read = |count: usize, viewer: &mut UnixStream| {
        let mut bytes = vec![0; count];
        viewer.read_exact(&mut bytes).context("the server's message").map(|()| bytes)
    };
    let version = read(12, &mut viewer)?;
    viewer.write_all(&version)?;
    let kinds = usize::from(read(1, &mut viewer)?[0]);
    ensure!(read(kinds, &mut viewer)? == [1], "the socket must not ask for a password");
    // Security type None; shared.
    viewer.write_all(&[1])?;
    ensure!(read(4, &mut viewer)? == [0; 4], "the server refuses");
    viewer.write_all(&[1])?;
    read(24, &mut viewer)?;
    Ok(viewer)
}

/// A viewer presses keys and disconnects; they are released.
fn lets_go(booted: &mut Booted, socket: &Path) -> anyhow::Result<()> {
    let keyboard = EventRecorder::new(booted, KEYBOARD)?;
    let tablet = EventRecorder::new(booted, TABLET)?;
    let mut viewer = viewer(socket)?;
    // Control_L and Shift_R go down; Delete goes down and up; the left button goes down.
    for (down, symbol) in [(1, 0xffe3_u32), (1, 0xffe2), (1, 0xffff), (0, 0xffff)] {
        let [a, b, c, d] = symbol.to_be_bytes();
        viewer.write_all(&[4, down, 0, 0, a, b, c, d])?;
    }
    viewer.write_all(&[5, 1, 0, 10, 0, 20])?;
    drop(viewer);
    let events = keyboard.finish(booted, "code 54 .*value 0")?;
    let mut keys: BTreeMap<u16, Vec<i32>> = BTreeMap::new();
    for (code, value) in presses(&events) {
        keys.entry(code).or_default().push(value);
    }
    let expected = [29, 54, 111].map(|key| (key, vec![1, 0]));
    ensure!(keys == BTreeMap::from(expected), "keys went {keys:?}");
    let (seen, _) = states(tablet.finish(booted, "code 272 .*value 0")?);
    let buttons: Vec<_> = seen.iter().map(|it| it.2).collect();
    ensure!(buttons.ends_with(&[1, 0]), "the button: {seen:?}");
    Ok(())
}

/// A tablet that Linux has suspended resumes when a program opens it.
fn wakes_up(booted: &mut Booted) -> anyhow::Result<()> {
    let place = "$(dirname $(grep -l 'USB tablet' /sys/bus/usb/devices/*/product))/power";
    let auto = format!("echo 0 > {place}/autosuspend_delay_ms; echo auto > {place}/control");
    booted.run(&auto, SOON)?;
    wait_until(booted, &format!("grep -q suspended {place}/runtime_status"))?;
    points(booted)
}

/// The state of a drive, from `status`.
fn drive(running: &Running, name: &str) -> anyhow::Result<Value> {
    let status = running.ask(&Command::Status)?;
    let drives = status["drives"].as_array().context("no drives")?;
    let found = drives.iter().find(|it| it["name"] == name);
    found.cloned().with_context(|| format!("no drive {name}: {status}"))
}

fn becomes_empty(running: &Running, name: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    while !drive(running, name)?["medium"].is_null() {
        ensure!(start.elapsed() < SOON, "{}", drive(running, name)?);
        sleep(Duration::from_millis(100));
    }
    Ok(())
}

/// The removable disk of the guest, if it has one.
const STICK: &str = "/dev/$(cd /sys/block; for it in sd*; do \
                     grep -q 1 $it/removable && echo $it; done; true)";

/// A USB stick with a file system. Data that Linux writes is in the file, and is still there when
/// the stick is plugged in again.
fn follows_a_stick(booted: &mut Booted, folder: &Path) -> anyhow::Result<()> {
    // Linux waits a second by default for a disk to spin up.
    booted.run("echo 0 > /sys/module/usb_storage/parameters/delay_use", SOON)?;
    let path = folder.join("stick.img");
    fs::File::create(&path)?.set_len(8 << 20)?;
    booted.run("mkdir -p /stick", SOON)?;
    for (round, speed) in ["super", "high", "super"].into_iter().enumerate() {
        let device = format!("usb-storage,path={},removable,speed={speed}", path.display());
        let answer = booted.running.ask(&Command::Attach { device, only: None })?;
        let name = answer["name"].as_str().context("a name")?.to_owned();
        wait_until(booted, &format!("test -b {STICK}"))?;
        if round == 0 {
            booted.run(&format!("mkdosfs {STICK} > /dev/null 2>&1"), SOON)?;
        }
        booted.run(&format!("mount -t vfat {STICK} /stick"), SOON)?;
        let files = booted.run("cat /stick/* 2> /dev/null; true", SOON)?;
        ensure!(files.lines().count() == round, "the files of {round} rounds: {files}");
        booted.run(&format!("echo written at {speed} speed > /stick/{round}"), SOON)?;
        booted.run("umount /stick", SOON)?;
        let bytes = fs::read(&path)?;
        let text = format!("written at {speed} speed\n").into_bytes();
        ensure!(bytes.windows(text.len()).any(|it| it == text), "no text of {speed} in the file");
        if round == 1 {
            booted.run(&format!("chroot {TOOLS} eject {STICK}"), SOON)?;
            becomes_empty(&booted.running, &name)?;
            let insert = Command::Insert { name: name.clone(), path: path.clone(), only: None };
            booted.running.ask(&insert)?;
            wait_until(booted, &format!("mount -t vfat {STICK} /stick"))?;
            booted.run("cat /stick/1 && umount /stick", SOON)?;
        }
        booted.running.ask(&Command::Detach { name })?;
        wait_until(booted, &format!("! test -b {STICK}"))?;
    }
    Ok(())
}

/// A file whose sectors are all different.
fn image(folder: &Path, name: &str, mib: usize) -> anyhow::Result<PathBuf> {
    let path = folder.join(name);
    let words = (0..mib << 18).map(|it| u32::try_from(it).unwrap_or(0).wrapping_mul(0x9e37_79b1));
    let bytes: Vec<u8> = words.flat_map(u32::to_le_bytes).collect();
    fs::write(&path, bytes).with_context(|| path.display().to_string())?;
    Ok(path)
}

/// The CD is in the second drive.
const CD: &str = "usb-storage.2";

/// The operator and the guest eject CDs, and other CDs are inserted.
fn follows_a_cd(booted: &mut Booted, folder: &Path) -> anyhow::Result<()> {
    let name = || CD.to_owned();
    let first = lab::asset("BOOT_CD")?;
    let read = "dd if=/dev/sr0 of=/dev/null bs=2048 count=1";
    for (path, guest) in [(image(folder, "other.iso", 3)?, false), (first, true)] {
        if guest {
            booted.run(&format!("chroot {TOOLS} eject /dev/sr0"), SOON)?;
            becomes_empty(&booted.running, CD)?;
        } else {
            booted.running.ask(&Command::Eject { name: name(), force: None })?;
        }
        wait_until(booted, &format!("! {read}"))?;
        booted.running.ask(&Command::Insert { name: name(), path: path.clone(), only: None })?;
        wait_until(booted, read)?;
        ensure!(seen(booted, "/dev/sr0")? == sum(&path)?, "{} differs", path.display());
    }
    // A program that has the CD open locks the drive.
    booted.run("(exec 3< /dev/sr0; sleep 1000) & echo $! > /holder", SOON)?;
    wait_until(booted, "ls -l /proc/$(cat /holder)/fd | grep -q /dev/sr0")?;
    ensure!(drive(&booted.running, CD)?["locked"] == true, "the drive must be locked");
    let held = booted.running.ask(&Command::Eject { name: name(), force: None });
    ensure!(held.is_err(), "a locked CD was ejected");
    booted.running.ask(&Command::Eject { name: name(), force: Some(Force::Force) })?;
    becomes_empty(&booted.running, CD)?;
    booted.run("kill $(cat /holder)", SOON)?;
    let path = lab::asset("BOOT_CD")?;
    booted.running.ask(&Command::Insert { name: name(), path, only: None })?;
    wait_until(booted, read)
}

/// The thread only wakes when Linux polls for media changes, every two seconds.
fn rests_when_nothing_happens(booted: &Booted) -> anyhow::Result<()> {
    let part = idle::wait_until_idle(booted.running.pid(), "xhci", 0.01)?;
    say!("the controller's thread uses {:.2} % of a processor without input", part * 100.0);
    Ok(())
}

/// The CD's shell gets the keys of the USB keyboard, through the firmware's driver.
fn boots_from_a_cd(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder for the store")?;
    let vars = uefi::store(&lab::asset(&format!("OVMF_VARS_{release}"))?, folder.path())?;
    let code = lab::asset(&format!("OVMF_CODE_{release}"))?;
    let cd = format!("usb-storage,path={},cdrom", lab::asset("BOOT_CD")?.display());
    let guest = Guest::transom().memory("256M").firmware(code, vars);
    let devices = ["xhci", "usb-keyboard", "usb-tablet", &cd];
    let guest = devices.iter().fold(guest, |guest, it| guest.word("--device").word(*it));
    let mut running = guest.start()?;
    running.expect("started from the CD", BOOT)?;
    running.expect("> ", SOON)?;
    // Keys go to the keyboard that has lights, which is the one that a driver has configured.
    capitals(&running, false)?;
    running.ask(&Command::Type { text: "echo \"Typed at USB: {@}\"\n".into() })?;
    running.expect("Typed at USB: {@}\n", SOON)?;
    running.ask(&Command::Key { keys: "capslock".parse()? })?;
    capitals(&running, true)?;
    running.ask(&Command::Type { text: "echo \"cAPS lOCK\"\n".into() })?;
    running.expect("cAPS lOCK\n", SOON)?;
    running.ask(&Command::Key { keys: "capslock".parse()? })?;
    capitals(&running, false)?;
    running.ask(&Command::Type { text: "reset -s\n".into() })?;
    running.ends_with(0, SOON)
}
