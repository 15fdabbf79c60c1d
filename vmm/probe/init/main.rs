//! The first process of the small Linux of `vmm doctor --run`: loads the modules of its initial RAM
//! disk, prints the devices and clocks that the kernel found on the console, and powers off.
//!
//! Each line begins with `transom: `; vmm/src/doctor/linux/facts.rs reads them. The program needs
//! no library and no file but `/m/0`, `/m/1` and so on, which are modules in the order to load.
#![no_std]
#![no_main]

#[path = "../guest/intrinsics.rs"]
mod intrinsics;
mod system;

use core::panic::PanicInfo;

use system::{File, first_line, link_name, load_module, mount, power_off, say, sleep};

/// Length of the beginning of each disk that is read.
const READ: usize = 64 << 10;
/// Drivers find devices some time after they are loaded: after no change for this long they are
/// complete. The driver of USB disks waits for a second. The limit is for machines where something
/// changes all the time.
const QUIET_MS: u64 = 1300;
const MAX_SETTLE_MS: u64 = 5000;
const STEP_MS: u64 = 100;
/// Messages of the kernel, and their maximum level: errors.
const MAX_MESSAGES: usize = 10;
const ERROR: u8 = 3;

#[unsafe(no_mangle)]
extern "C" fn init_main() -> ! {
    mount("proc", "/proc");
    mount("sysfs", "/sys");
    mount("devtmpfs", "/dev");
    say(format_args!("uptime {}", first_line(format_args!("/proc/uptime")).as_str()));
    say(format_args!(
        "release {}",
        first_line(format_args!("/proc/sys/kernel/osrelease")).as_str()
    ));
    load_modules();
    // The other side measures the time between these two lines.
    say(format_args!("sleep begins"));
    sleep(1000);
    say(format_args!("sleep ends"));
    settle();
    report_system();
    for bus in ["pci", "virtio", "usb"] {
        report_bus(bus);
    }
    report_disks();
    report_errors();
    say(format_args!("end"));
    power_off();
    say(format_args!("no power-off"));
    loop {
        sleep(1000);
    }
}

fn load_modules() {
    let mut number = 0;
    while let Some(file) = File::open(format_args!("/m/{number}")) {
        let error = load_module(&file);
        if error != 0 {
            say(format_args!("module {number} error {error}"));
        }
        number += 1;
    }
}

/// Waits until the number of devices stays the same.
fn settle() {
    let (mut known, mut quiet, mut waited) = (0, 0, 0);
    while quiet < QUIET_MS && waited < MAX_SETTLE_MS {
        sleep(STEP_MS);
        waited += STEP_MS;
        let now = count("/sys/block") + count("/sys/bus/usb/devices") + count("/sys/class/net");
        quiet = if now == known { quiet + STEP_MS } else { 0 };
        known = now;
    }
}

fn count(folder: &str) -> usize {
    let mut count = 0;
    if let Some(folder) = File::open(format_args!("{folder}")) {
        folder.names(|_| count += 1);
    }
    count
}

fn report_system() {
    const CLOCKS: &str = "/sys/devices/system/clocksource/clocksource0";
    for (name, path) in [
        ("processors", "/sys/devices/system/cpu/online"),
        ("memory", "/proc/meminfo"),
        ("rng", "/sys/class/misc/hw_random/rng_current"),
    ] {
        say(format_args!("{name} {}", first_line(format_args!("{path}")).as_str()));
    }
    for (name, file) in [("clock", "current_clocksource"), ("clocks", "available_clocksource")] {
        say(format_args!("{name} {}", first_line(format_args!("{CLOCKS}/{file}")).as_str()));
    }
}

/// Prints each device of a bus: name, IDs, driver.
fn report_bus(bus: &str) {
    let folder = "/sys/bus";
    let Some(devices) = File::open(format_args!("{folder}/{bus}/devices")) else { return };
    let files = match bus {
        "pci" => ["vendor", "device", "class"],
        "virtio" => ["vendor", "device", "status"],
        _ => ["bInterfaceClass", "bInterfaceSubClass", "bInterfaceProtocol"],
    };
    devices.names(|name| {
        let file = |file| first_line(format_args!("{folder}/{bus}/devices/{name}/{file}"));
        let [first, second, third] = files.map(file);
        let driver = link_name(format_args!("{folder}/{bus}/devices/{name}/driver"));
        // USB devices have interfaces, and only these have drivers of their own.
        if !first.as_str().is_empty() {
            let ids = format_args!("{} {} {}", first.as_str(), second.as_str(), third.as_str());
            say(format_args!("device {bus} {name} {ids} {}", driver.as_str()));
        }
    });
}

/// Reads the beginning of each disk, and prints its size in sectors and a hash of the beginning.
fn report_disks() {
    let Some(disks) = File::open(format_args!("/sys/block")) else { return };
    disks.names(|name| {
        if name.starts_with("loop") || name.starts_with("ram") {
            return;
        }
        let size = first_line(format_args!("/sys/block/{name}/size"));
        let (read, hash) = File::open(format_args!("/dev/{name}")).map_or((0, 0), |it| hash(&it));
        say(format_args!("disk {name} {} {read} {hash:016x}", size.as_str()));
    });
}

/// The number of bytes that could be read, and their hash (FNV-1a).
fn hash(file: &File) -> (usize, u64) {
    let (mut bytes, mut read, mut hash) = ([0; 4096], 0, 0xcbf2_9ce4_8422_2325_u64);
    while read < READ {
        let got = file.read(&mut bytes);
        if got == 0 {
            break;
        }
        read += got;
        for byte in &bytes[..got] {
            hash = (hash ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
    (read, hash)
}

/// Prints the first errors in the kernel's log. Each read returns one record, which begins with its
/// level, as in `3,120,53,-;text`.
fn report_errors() {
    let Some(log) = File::open(format_args!("/dev/kmsg")) else { return };
    let (mut record, mut told) = ([0; 1024], 0);
    loop {
        let got = log.read(&mut record);
        if got == 0 || told == MAX_MESSAGES {
            return;
        }
        let text = str::from_utf8(&record[..got]).unwrap_or_default();
        let Some((fields, text)) = text.split_once(';') else { continue };
        let level = fields.split(',').next().and_then(|it| it.parse::<u32>().ok());
        if level.is_some_and(|level| level & 7 <= u32::from(ERROR)) {
            say(format_args!("error {}", text.lines().next().unwrap_or_default()));
            told += 1;
        }
    }
}

#[panic_handler]
fn panic(info: &PanicInfo) -> ! {
    let line = info.location().map_or(0, |location| location.line());
    say(format_args!("panic in line {line}"));
    loop {
        sleep(1000);
    }
}
