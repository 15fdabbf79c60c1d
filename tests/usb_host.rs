//! USB devices of the host in a Linux guest. The lab's QEMU gives its host a stick, a serial
//! adapter, a sound card and a tablet, with the drivers of the lab's kernel at them.
#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{self, Child, ExitCode, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);
/// The number of times that a device is attached and detached, and with `TRANSOM_TESTS=all`.
const ROUNDS: [usize; 2] = [30, 100];
/// Seconds of sound, and with `TRANSOM_TESTS=all`.
const SECONDS: [u32; 2] = [6, 60];
/// The first number in the sound.
const FIRST_LINE: u32 = 1_000_000;
/// The sound's samples at the end that QEMU may not have written yet: a tenth of a second.
const TAIL: usize = 48_000 / 10 * 4;
/// Tries on a host that is too busy for its emulator.
const TRIES: usize = 4;
/// The environment variable with the file of the lab's sound card.
const PLAYED: &str = "TRANSOM_LAB_SOUND";
/// Bytes for the serial adapter. QEMU stands still while more than this waits in its pipes.
const BYTES: u32 = 48 << 10;
/// The serial adapter at each end.
const TTY: &str = "/dev/ttyUSB0";
/// The guest may take this many times as long for these bytes as the lab's own driver. It takes 5
/// to 7 times as long, because the lab emulates its processor: one or two seconds for what 1 Mbit/s
/// carries in half a second.
const TIMES: u32 = 10;

const ASSETS: &[&str] = &["BZIMAGE_GENERIC_13", "MODULES_GENERIC_13", "BUSYBOX", "SOUND_TOOLS"];
const MODULES: &[&str] = &[
    "virtio_pci",
    "virtio_blk",
    "snd-usb-audio",
    "xhci-pci",
    "usb-storage",
    "sd_mod",
    "crc32c_generic",
    "ext4",
    "ftdi_sio",
    "usbhid",
    "hid-generic",
    "evdev",
];

/// Options of the lab's devices.
const STICK: &str = "vendorid=0x46f4,productid=0x0001";
const SERIAL: &str = "vendorid=0x0403,productid=0x6001";
const SOUND: &str = "vendorid=0x46f4,productid=0x0002";
const TABLET: &str = "vendorid=0x0627,productid=0x0001";

fn main() -> ExitCode {
    let tests = vec![
        Test::new("a_pod_attaches_devices_that_come_and_go", attaches_in_a_pod),
        Test::new("linux_uses_devices_of_the_host", uses_devices),
    ];
    Suite { lab: Lab { mib: 3072, seconds: 600, assets: ASSETS }, tests }.main_with_usb()
}

fn uses_devices() -> anyhow::Result<()> {
    prepare_host()?;
    let mut watch = Instant::now();
    let mut report = |what: &str| {
        say!("{what}: {:.1} s", watch.elapsed().as_secs_f64());
        watch = Instant::now();
    };
    let by_host = there_and_back(&mut shell)?;
    report("serial adapter at the host");
    let serial = format!("usb-host,{SERIAL}");
    // The strictest jail: the machine can open no device itself.
    let tools = format!("virtio-blk,readonly,path={}", lab::asset("SOUND_TOOLS")?.display());
    let words = ["--jail", "on", "--device", "xhci", "--device", &serial, "--device", &tools];
    let guest = words.iter().fold(Guest::transom(), |it, word| it.word(*word));
    let kernel = lab::asset("BZIMAGE_GENERIC_13")?;
    let modules = lab::asset("MODULES_GENERIC_13")?;
    let mut booted = Linux::new(guest, &kernel).modules(&modules, MODULES).boot(BOOT)?;
    report("boot");
    sends_and_receives(&mut booted, by_host)?;
    report("serial adapter");
    let passed = formats_a_stick(&mut booted)?;
    report("stick");
    plays_sound(&mut booted)?;
    report("sound");
    // Before a tablet is pulled while the guest still asks for its descriptors.
    logs_no_errors(&mut booted)?;
    attaches_and_detaches(&mut booted)?;
    report("attached and detached");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    drop(passed);
    // The host's driver has the adapter again.
    wait_for("ttyUSB0 at the host", || Path::new(TTY).exists())
}

/// The pod opens the devices, and its machine has no other.
fn attaches_in_a_pod() -> anyhow::Result<()> {
    prepare_host()?;
    let folder = tempfile::tempdir().context("a folder for the pod")?;
    let transom = lab::vmm()?.with_file_name("transom");
    let mut pod = process::Command::new(&transom);
    pod.arg("pod").env_clear().env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin").envs([
        ("VERSION", "probe"),
        ("NETWORK", "N"),
        ("RAM_SIZE", "256M"),
        ("ARGUMENTS", &format!("-device usb-host,{STICK}")),
    ]);
    pod.env("STORAGE", folder.path()).stdin(Stdio::null());
    let pod = Pod(pod.spawn().context("transom pod")?);
    let usb = |words: &[&str]| {
        let mut command = process::Command::new(&transom);
        let output = command.arg("usb").args(words).output().context("transom usb")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "transom usb {}: {errors}", words.join(" "));
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let is = |name: &str, device: &str| {
        let row = format!("{name:<12} {device}");
        usb(&[]).is_ok_and(|list| list.lines().any(|line| line.starts_with(&row)))
    };
    wait_for("the stick in the pod", || is("usb-host", STICK))?;
    ensure!(usb(&["attach", TABLET])? == "usb-host.2\n");
    ensure!(usb(&["attach", TABLET]).is_err_and(|it| it.to_string().contains("already")));
    ensure!(usb(&["attach", "hostport=1"]).is_err_and(|it| it.to_string().contains("hostbus=")));
    let open = shell("ls -l /proc/$(pgrep -x vmm)/fd | grep -c /dev/bus/usb")?;
    ensure!(open.trim() == "2", "the machine has {open} devices");
    // Pulled and plugged in again. QEMU's ports of USB 2 do not notice that they have power again.
    let port = port_of("46f4:0001")?;
    fs::write(port.join("disable"), "1").context("the port")?;
    wait_for("the stick is pulled", || is("-", &format!("{STICK}  not plugged in")))?;
    fs::write(port.join("disable"), "0").context("the port")?;
    wait_for("the stick comes back", || is("usb-host", STICK))?;
    usb(&["detach", STICK])?;
    usb(&["detach", "usb-host.2"])?;
    ensure!(is("-", STICK) && is("-", TABLET), "{}", usb(&[])?);
    drop(pod);
    wait_for("the host has the stick again", || Path::new("/dev/sda").exists())
}

/// Dropping it ends the pod.
struct Pod(Child);

impl Drop for Pod {
    fn drop(&mut self) {
        kill_process(Pid::from_child(&self.0), Signal::TERM).ok();
        self.0.wait().ok();
    }
}

/// Loads the host's drivers, which then use the devices.
fn prepare_host() -> anyhow::Result<()> {
    for module in ["xhci_pci", "usb_storage", "sd_mod", "ftdi_sio", "usbhid"] {
        shell(&format!("modprobe {module}"))?;
    }
    wait_for("the host's devices", || {
        ["/dev/sda", TTY].iter().all(|path| Path::new(path).exists())
            && shell("grep -q 'QEMU USB Tablet' /sys/bus/usb/devices/*/product").is_ok()
    })?;
    let listed = process::Command::new(lab::vmm()?).arg("usb").output().context("vmm usb")?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for name in [STICK, SERIAL, TABLET, "hostbus=", "QEMU USB HARDDRIVE"] {
        ensure!(listed.contains(name), "`vmm usb` has no {name}: {listed}");
    }
    ensure!(!listed.contains("Hub"), "`vmm usb` lists a hub: {listed}");
    Ok(())
}

/// Data at 1 Mbit/s comes back from the adapter complete and in time.
fn sends_and_receives(booted: &mut Booted, by_host: Duration) -> anyhow::Result<()> {
    ensure!(!Path::new(TTY).exists(), "the host's driver still has the adapter");
    booted.run(&waits(&format!("test -c {TTY}")), SOON)?;
    let by_guest = there_and_back(&mut |script| booted.run(script, SOON))?;
    say!("{BYTES} bytes there and back: {by_guest:?} in the guest, {by_host:?} at the host");
    ensure!(by_guest < TIMES * by_host, "{by_guest:?} in the guest, {by_host:?} at the host");
    Ok(())
}

/// The fastest of some transfers through the adapter, which sends back its input.
fn there_and_back(run: &mut dyn FnMut(&str) -> anyhow::Result<String>) -> anyhow::Result<Duration> {
    run(&format!("stty -F {TTY} 1000000 raw -echo"))?;
    let speed = run(&format!("stty -F {TTY} speed"))?;
    ensure!(speed.trim() == "1000000", "the adapter's speed is {speed}");
    run(&format!("head -c {BYTES} /dev/urandom > /tmp/data"))?;
    // The reader opens the adapter first: when nobody has it open, the driver discards its input.
    let both = format!("{{ cat /tmp/data > {TTY} & head -c {BYTES}; }} < {TTY} > /tmp/back");
    let send = format!("{both}; wait; cmp /tmp/data /tmp/back");
    let mut fastest = SOON;
    for _ in 0..4 {
        let start = Instant::now();
        run(&send).context("data of the serial adapter")?;
        fastest = fastest.min(start.elapsed());
    }
    Ok(fastest)
}

/// The guest formats a stick that `vmm usb` attaches, also after it was pulled and plugged in. The
/// host reads its files afterwards.
fn formats_a_stick(booted: &mut Booted) -> anyhow::Result<HostUsb> {
    let port = port_of("46f4:0001")?;
    let passed = HostUsb::start(&booted.running, STICK)?;
    let there = waits("test -b /dev/sda");
    booted.run(&there, SOON).context("the stick in the guest")?;
    ensure!(!Path::new("/dev/sda").exists(), "the host's driver still has the stick");
    let size = booted.run("blockdev --getsize64 /dev/sda", SOON)?;
    ensure!(size.trim() == "67108864", "the stick has {size}");
    booted
        .run("head -c 8388608 /dev/urandom > /file; sha256sum /file | cut -c 1-64 > /sum", SOON)?;
    booted.run("mke2fs -F /dev/sda && mkdir -p /mnt && mount /dev/sda /mnt", SOON)?;
    booted.run("cp /file /mnt/file && umount /mnt", SOON)?;
    let read = "mount -o ro /dev/sda /mnt && sha256sum /mnt/file && umount /mnt";
    let sum = booted.run(&format!("echo 3 > /proc/sys/vm/drop_caches; cat /sum; {read}"), SOON)?;
    let sums: Vec<&str> = sum.split_whitespace().collect();
    ensure!(sums.len() > 1 && sums[0] == sums[1], "the stick's file: {sum}");
    let sum = sums[0].to_owned();
    // Pulled, and plugged in again.
    fs::write(port.join("disable"), "1").context("the port")?;
    booted.run(&waits("! test -b /dev/sda"), SOON).context("the stick is pulled")?;
    fs::write(port.join("disable"), "0").context("the port")?;
    booted.run(&there, SOON).context("the stick comes back")?;
    let again = booted.run(read, SOON)?;
    ensure!(again.contains(&sum), "the stick's file after a replug: {again}");
    // The host has it again, with the file that the guest wrote.
    passed.stop()?;
    booted.run(&waits("! test -b /dev/sda"), SOON).context("the stick is detached")?;
    wait_for("the stick at the host", || Path::new("/dev/sda").exists())?;
    let host = shell(
        "mkdir -p /tmp/stick; mount -o ro /dev/sda /tmp/stick && \
                      sha256sum /tmp/stick/file; umount /tmp/stick",
    )?;
    ensure!(host.contains(&sum), "the stick's file at the host: {host}");
    HostUsb::start(&booted.running, STICK)
}

/// Sound that the guest plays reaches the host's card without a gap.
fn plays_sound(booted: &mut Booted) -> anyhow::Result<()> {
    let seconds = SECONDS[usize::from(lab::everything())];
    let name = ctl(booted, &["attach", &format!("usb-host,{SOUND}")])?;
    ensure!(name.contains("usb-host"), "attached: {name}");
    booted.run("mkdir -p /tools && mount -o ro /dev/vda /tools", SOON)?;
    booted.run("for it in dev proc sys; do mount --bind /$it /tools/$it; done", SOON)?;
    booted.run(&waits("grep -q USB-Audio /proc/asound/cards"), SOON).context("the sound card")?;
    // Full volume changes no sample.
    let controls = "chroot /tools amixer -c 0 scontrols | cut -d \"'\" -f 2";
    let set = "chroot /tools amixer -q -c 0 sset \"$it\" 100% unmute || exit 1";
    booted.run(&format!("{controls} | while read -r it; do {set}; done 2>&1"), SOON)?;
    // Lines of eight bytes are two frames, and no sample is silent.
    let last = FIRST_LINE + 48_000 / 2 * seconds - 1;
    booted.run(&format!("seq {FIRST_LINE} {last} > /sound.raw"), SOON)?;
    let wanted: String = (FIRST_LINE..=last).map(|it| format!("{it}\n")).collect();
    let wanted = wanted.into_bytes();
    let mut before = played()?.len();
    let mut longest = 0;
    for _ in 0..TRIES {
        let command = "aplay -D hw:0,0 -t raw -f S16_LE -r 48000 -c 2 --buffer-time=400000 -";
        let command = format!("chroot /tools {command} < /sound.raw 2>&1");
        let said = booted.run(&command, SOON + Duration::from_secs(seconds.into()))?;
        sleep(Duration::from_secs(1));
        let all = played()?;
        let heard = all.get(before..).unwrap_or_default();
        before = all.len();
        let start = heard.iter().position(|it| *it != 0).context("only silence was played")?;
        let sound = &heard[start..];
        let same = sound.iter().zip(&wanted).take_while(|(one, two)| one == two).count();
        longest = longest.max(same);
        if same + TAIL >= wanted.len() {
            say!("{seconds} seconds of sound without a gap");
            return ctl(booted, &["detach", "usb-host.3"]).map(|_| ());
        }
        let next = sound.get(same..).unwrap_or_default();
        let next = next.get(..32.min(next.len())).unwrap_or_default();
        say!("a gap after {same} of {} bytes: {next:?}; aplay: {said}", wanted.len());
    }
    bail!("sound with a gap after {longest} of {} bytes", wanted.len())
}

/// The samples that the lab's sound card has played until now.
fn played() -> anyhow::Result<Vec<u8>> {
    // The file is on another machine, which changes it.
    shell("echo 3 > /proc/sys/vm/drop_caches")?;
    let path = std::env::var(PLAYED).context(PLAYED)?;
    let bytes = fs::read(&path).context(path)?;
    Ok(bytes.get(44..).unwrap_or_default().to_vec())
}

/// A device comes and goes many times, and leaves nothing behind.
fn attaches_and_detaches(booted: &mut Booted) -> anyhow::Result<()> {
    let device = format!("usb-host,{TABLET}");
    let found = "grep -lq 'QEMU USB Tablet' /sys/bus/usb/devices/*/product";
    let round = |booted: &mut Booted, waits_for_guest: bool| {
        let attached = ctl(booted, &["attach", &device])?;
        ensure!(attached.contains("usb-host"), "attached: {attached}");
        if waits_for_guest {
            booted.run(&waits(found), SOON).context("the tablet")?;
        }
        ctl(booted, &["detach", "usb-host.3"]).map(|_| ())
    };
    round(booted, true)?;
    let before = held(&booted.running)?;
    for _ in 0..ROUNDS[usize::from(lab::everything())] {
        round(booted, false)?;
    }
    // The thread of the last command's connection may still be about to end, then and now.
    wait_for(&format!("no more threads, descriptors and devices than {before:?}"), || {
        held(&booted.running).is_ok_and(|(threads, files, usb)| {
            threads <= before.0 && files <= before.1 && usb <= before.2
        })
    })?;
    round(booted, true).context("after all rounds")
}

/// The numbers of threads, of descriptors, and of open USB devices of the machine.
fn held(running: &Running) -> anyhow::Result<(usize, usize, usize)> {
    let start = Instant::now();
    loop {
        let folder = PathBuf::from(format!("/proc/{}", running.pid()));
        let files = fs::read_dir(folder.join("fd")).context("descriptors")?.flatten();
        let files: Vec<_> = files.filter_map(|it| fs::read_link(it.path()).ok()).collect();
        let usb = files.iter().filter(|it| it.starts_with("/dev/bus/usb")).count();
        let threads = fs::read_dir(folder.join("task")).context("threads")?.count();
        // A device that was just detached is closed by the controller's thread.
        if usb <= 2 || start.elapsed() > SOON {
            return Ok((threads, files.len(), usb));
        }
        sleep(Duration::from_millis(20));
    }
}

fn logs_no_errors(booted: &mut Booted) -> anyhow::Result<()> {
    let words = "errors?|warning|fail(ed|ure)?|time(d out|out)|died|bug|not responding";
    // The stick was pulled.
    let pulled = "Synchronize Cache|disconnect";
    let complaints = format!(
        "dmesg | grep -E 'usb|xhci|hid|sd |ftdi' | grep -vE '{pulled}' | grep -iwE '{words}'"
    );
    let complaints = booted.try_run(&complaints, SOON)?.output;
    ensure!(complaints.trim().is_empty(), "the kernel complains: {complaints}");
    Ok(())
}

/// A shell command that waits until another one succeeds.
fn waits(condition: &str) -> String {
    format!("n=0; until {condition}; do n=$((n+1)); [ $n -lt 300 ] || exit 1; usleep 100000; done")
}

fn wait_for(what: &str, condition: impl Fn() -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    while !condition() {
        ensure!(start.elapsed() < SOON, "{what}: not within {SOON:?}");
        sleep(Duration::from_millis(50));
    }
    Ok(())
}

/// Runs a shell command in the lab's host, for at most `SOON`.
fn shell(command: &str) -> anyhow::Result<String> {
    let limit = SOON.as_secs().to_string();
    let mut limited = process::Command::new("timeout");
    let output = limited.args([&limit, "sh", "-c", command]).output().context("timeout")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command}: {} {errors}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The folder of the root port of a device, given as VENDOR:PRODUCT.
fn port_of(device: &str) -> anyhow::Result<PathBuf> {
    for entry in fs::read_dir("/sys/bus/usb/devices")?.flatten() {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        if format!("{}:{}", read("idVendor").trim(), read("idProduct").trim()) == device {
            return fs::canonicalize(entry.path().join("port")).context("the port of a device");
        }
    }
    bail!("{device}: the host has none")
}

fn ctl(booted: &Booted, words: &[&str]) -> anyhow::Result<String> {
    let mut command = process::Command::new(lab::vmm()?);
    let output = command.args(["ctl", "--control"]).arg(booted.running.control()).args(words);
    let output = output.output().context("vmm ctl")?;
    let errors = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "vmm ctl {}: {errors}", words.join(" "));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `vmm usb`, which attaches a device whenever it is plugged in.
struct HostUsb(Child);

impl HostUsb {
    fn start(running: &Running, device: &str) -> anyhow::Result<Self> {
        let mut command = process::Command::new(lab::vmm()?);
        command.args(["usb", "--control"]).arg(running.control()).arg(device);
        Ok(Self(command.stdin(Stdio::null()).spawn().context("vmm usb")?))
    }

    /// Detaches the device.
    fn stop(mut self) -> anyhow::Result<()> {
        let id = Pid::from_child(&self.0);
        kill_process(id, Signal::TERM).context("vmm usb")?;
        let status = self.0.wait().context("vmm usb")?;
        ensure!(status.success(), "vmm usb ended with {status}");
        Ok(())
    }
}

impl Drop for HostUsb {
    fn drop(&mut self) {
        // It ends by itself with the machine.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}
