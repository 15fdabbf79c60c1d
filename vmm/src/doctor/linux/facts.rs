//! The lines that our program in Linux prints (vmm/probe/init/main.rs), and what is wrong in them.

use std::collections::BTreeSet;
use std::time::Instant;

use serde::Serialize;

use crate::doctor::equipment::{self, READ};
use crate::doctor::host::{short, wrapped};

/// Begins each of our lines among those of the kernel.
const MARK: &str = "transom: ";
/// Limit for each list, whatever the guest prints.
const MAX_ITEMS: usize = 200;
const SECTOR: u64 = 512;
/// Functions for which Linux has no driver of its own, or none that we load: the host bridge, the
/// LPC bridge, the `edu` device, the display.
const WITHOUT_DRIVER: [&str; 4] = ["8086:29c0", "8086:2918", "1234:11e8", "1234:1111"];
/// The driver of each kind of disk, and whether its disks also need `sd_mod`.
const DRIVERS: [(&str, &str, bool); 5] = [
    ("nvme", "nvme", false),
    ("virtio-blk", "virtio_blk", false),
    ("virtio-scsi", "virtio_scsi", true),
    ("ahci-disk", "ahci", true),
    ("usb-storage", "usb-storage", true),
];

#[derive(Debug, Default, Serialize)]
pub(in crate::doctor) struct Facts {
    release: String,
    /// Time from the kernel's start to our program.
    boot_seconds: f64,
    /// Online processors, as Linux lists them: `0-1`.
    processors: String,
    memory_mib: u64,
    clock: String,
    clocks: Vec<String>,
    rng: String,
    /// Time of the host in which a second passed in the guest.
    second_took: Option<f64>,
    devices: Vec<Device>,
    disks: Vec<Disk>,
    /// Errors in the kernel's log.
    errors: Vec<String>,
    /// Modules that the kernel refused, with the error number.
    refused_modules: Vec<String>,
    /// Sentences; empty if everything works.
    problems: Vec<String>,
    #[serde(skip)]
    reading: Reading,
}

#[derive(Debug, Default)]
struct Reading {
    /// Names of the modules in the initial RAM disk.
    modules: Vec<String>,
    started: bool,
    slept: Option<Instant>,
    complete: bool,
    disks: Vec<Found>,
}

/// A disk as the guest reports it.
#[derive(Debug)]
struct Found {
    name: String,
    bytes: u64,
    read: usize,
    hash: u64,
}

#[derive(Debug, Serialize)]
struct Device {
    bus: String,
    /// Vendor and device; of a USB interface, class, subclass and protocol.
    id: String,
    driver: Option<String>,
}

#[derive(Debug, Serialize)]
struct Disk {
    kind: &'static str,
    result: DiskResult,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum DiskResult {
    /// The guest read the right bytes.
    Read,
    Wrong,
    /// The driver runs, but found no disk.
    Missing,
    /// The kernel has no driver, or its module was not there.
    NoDriver,
}

impl Facts {
    pub(super) fn new(modules: Vec<String>) -> Self {
        Self { reading: Reading { modules, ..Reading::default() }, ..Self::default() }
    }

    pub(super) fn is_started(&self) -> bool {
        self.reading.started
    }

    pub(super) fn is_complete(&self) -> bool {
        self.reading.complete
    }

    /// Reads a line that arrived at `now`. Returns false for lines of the kernel.
    pub(super) fn read(&mut self, line: &str, now: Instant) -> bool {
        let Some((key, value)) = line.strip_prefix(MARK).and_then(|it| it.split_once(' ')) else {
            self.reading.complete |= line == "transom: end";
            return line.starts_with(MARK);
        };
        self.reading.started = true;
        let mut words = value.split_ascii_whitespace();
        match (key, value) {
            ("uptime", _) => self.boot_seconds = number(words.next()),
            ("release", _) => self.release = short(value),
            ("processors", _) => self.processors = short(value),
            ("memory", _) => self.memory_mib = number::<u64>(words.nth(1)) >> 10,
            ("clock", _) => self.clock = short(value),
            ("clocks", _) => self.clocks = words.take(MAX_ITEMS).map(short).collect(),
            ("rng", _) => self.rng = short(value),
            ("device", _) if self.devices.len() < MAX_ITEMS => {
                self.devices.extend(Device::read(value));
            }
            ("disk", _) if self.reading.disks.len() < MAX_ITEMS => {
                self.reading.disks.extend(Found::read(value));
            }
            ("error", _) if self.errors.len() < MAX_ITEMS => self.errors.push(short(value)),
            ("module", _) => self.refuse_module(number(words.next()), words.nth(1)),
            ("sleep", "begins") => self.reading.slept = Some(now),
            ("sleep", "ends") => {
                let slept = self.reading.slept.map(|start| (now - start).as_secs_f64());
                self.second_took = slept.map(|seconds| (seconds * 1e3).round() / 1e3);
            }
            _ => {}
        }
        true
    }

    fn refuse_module(&mut self, number: usize, error: Option<&str>) {
        // EEXIST: the kernel has it built in.
        if let Some(name) = self.reading.modules.get(number).filter(|_| error != Some("17"))
            && self.refused_modules.len() < MAX_ITEMS
        {
            self.refused_modules.push(format!("{name}: error {}", short(error.unwrap_or("?"))));
        }
    }

    /// Compares with the machine: these disks, and this number of processors.
    pub(super) fn judge(&mut self, disks: &[equipment::Disk], processors: usize) {
        let count = count(&self.processors);
        if count != processors {
            self.problems.push(format!("{count} of {processors} processors are online"));
        }
        // A busy host makes the second longer, and nothing makes it shorter.
        if let Some(seconds) = self.second_took.filter(|seconds| *seconds < 0.9) {
            self.problems.push(format!("the guest's clock is fast: its second took {seconds} s"));
        }
        for disk in disks {
            let result = self.result_of(disk);
            let problem = match result {
                DiskResult::Wrong => "the guest read wrong bytes",
                DiskResult::Missing => "the driver found no disk",
                DiskResult::Read | DiskResult::NoDriver => "",
            };
            if !problem.is_empty() {
                self.problems.push(format!("{}: {problem}", disk.kind));
            }
            self.disks.push(Disk { kind: disk.kind, result });
        }
    }

    fn result_of(&self, disk: &equipment::Disk) -> DiskResult {
        let found = &self.reading.disks;
        if let Some(found) = found.iter().find(|found| found.bytes == disk.bytes) {
            let right = (found.read, found.hash) == (READ, disk.hash);
            return if right { DiskResult::Read } else { DiskResult::Wrong };
        }
        let known = DRIVERS.iter().find(|(kind, ..)| *kind == disk.kind);
        let bound = known.is_some_and(|(_, driver, scsi)| {
            let has_sd = found.iter().any(|found| found.name.starts_with("sd"));
            self.is_bound(driver) && (has_sd || !scsi)
        });
        if bound { DiskResult::Missing } else { DiskResult::NoDriver }
    }

    fn is_bound(&self, driver: &str) -> bool {
        self.devices.iter().any(|device| device.driver.as_deref() == Some(driver))
    }

    /// Whether everything works, and a sentence.
    pub(in crate::doctor) fn verdict(&self) -> (bool, String) {
        if !self.problems.is_empty() {
            return (false, format!("{}: {}", self.release, self.problems.join("; ")));
        }
        let read = self.disks.iter().filter(|disk| disk.result == DiskResult::Read).count();
        let Self { release, boot_seconds, clock, disks, .. } = self;
        let sentence = format!(
            "{release} booted in {boot_seconds} s, read {read} of {} disks, clock {clock}, powered \
             off",
            disks.len()
        );
        (true, sentence)
    }

    /// The lines of the report for people.
    pub(in crate::doctor) fn show(&self) -> String {
        let drivers: BTreeSet<_> =
            self.devices.iter().filter_map(|device| device.driver.as_deref()).collect();
        let drivers: Vec<_> = drivers.into_iter().collect();
        let lacking = self.devices.iter().filter(|device| {
            device.driver.is_none() && !WITHOUT_DRIVER.contains(&device.id.as_str())
        });
        let lacking: Vec<_> = lacking.map(|it| format!("{} {}", it.bus, it.id)).collect();
        let second = self.second_took.map_or_else(|| "-".into(), |it| format!("{it:.3} s"));
        let mut text = format!(
            "\nLinux {}\n  {} processors, {} MiB, clock {} of {}; a second of it took {second}\n",
            self.release,
            count(&self.processors),
            self.memory_mib,
            self.clock,
            self.clocks.join(", "),
        );
        text += &wrapped(&format!("drivers: {}", drivers.join(" ")));
        for (what, list) in [
            ("devices without a driver", &lacking),
            ("modules that it refused", &self.refused_modules),
        ] {
            if !list.is_empty() {
                text += &wrapped(&format!("{what}: {}", list.join(", ")));
            }
        }
        for disk in self.disks.iter().filter(|disk| disk.result == DiskResult::NoDriver) {
            text += &format!("  {}: not read, because the kernel has no driver\n", disk.kind);
        }
        for error in &self.errors {
            text += &format!("  error in its log: {error}\n");
        }
        text
    }
}

impl Device {
    /// `pci 0000:00:02.0 0x1b36 0x0010 0x010802 nvme`
    fn read(text: &str) -> Option<Self> {
        let words: Vec<_> = text.split_ascii_whitespace().map(short).collect();
        let [bus, _, first, second, third, driver] = &words[..] else { return None };
        let digits = |text: &String| text.trim_start_matches("0x").to_owned();
        let [first, second, third] = [first, second, third].map(digits);
        let id = match bus.as_str() {
            "usb" => format!("{first}:{second}:{third}"),
            _ => format!("{first}:{second}"),
        };
        let driver = (driver != "-").then(|| driver.clone());
        Some(Self { bus: bus.clone(), id, driver })
    }
}

impl Found {
    /// `nvme0n1 8192 65536 af63dc4c8601ec8c`: name, sectors, bytes read, hash.
    fn read(text: &str) -> Option<Self> {
        let words: Vec<_> = text.split_ascii_whitespace().collect();
        let [name, sectors, read, hash] = words[..] else { return None };
        let bytes = sectors.parse::<u64>().ok()?.checked_mul(SECTOR)?;
        let hash = u64::from_str_radix(hash, 16).ok()?;
        Some(Self { name: short(name), bytes, read: read.parse().ok()?, hash })
    }
}

fn number<T: std::str::FromStr + Default>(word: Option<&str>) -> T {
    word.and_then(|word| word.parse().ok()).unwrap_or_default()
}

/// The number of elements of a list such as `0-3,5`.
fn count(list: &str) -> usize {
    let ranges = list.split(',').map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let [first, last] = [first, last].map(|it| it.trim().parse::<u32>().ok());
        first
            .zip(last)
            .map_or(0, |(first, last)| (u64::from(last) + 1).saturating_sub(first.into()))
    });
    usize::try_from(ranges.fold(0, u64::saturating_add)).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod test {
    use std::time::Duration;

    use super::*;

    /// The lines of a guest that found these disks.
    fn facts(disks: &[String], second: Duration) -> Facts {
        let mut facts = Facts::new(vec!["nvme_core".into(), "nvme".into()]);
        let now = Instant::now();
        for line in [
            "transom: uptime 2.50 1.10",
            "transom: release 6.1.0-9",
            "transom: module 0 error 17",
            "transom: module 1 error 8",
            "transom: processors 0-1",
            "transom: memory MemTotal:   500000 kB",
            "transom: clock tsc",
            "transom: clocks tsc acpi_pm",
            "transom: device pci 0000:00:02.0 0x1b36 0x0010 0x010802 nvme",
            "transom: device pci 0000:00:03.0 0x1af4 0x1041 0x020000 -",
            "transom: device usb 1-1:1.0 03 01 01 usbhid",
            "transom: error something",
            "transom: sleep begins",
        ] {
            assert!(facts.read(line, now), "{line}");
        }
        for disk in disks {
            assert!(facts.read(&format!("transom: disk {disk}"), now));
        }
        assert!(!facts.read("[    0.5] a line of the kernel", now) && !facts.is_complete());
        facts.read("transom: sleep ends", now + second);
        assert!(facts.read("transom: end", now) && facts.is_complete());
        facts
    }

    #[test]
    fn lines_become_facts() {
        let disks = equipment::disks().unwrap();
        let found = disks.iter().zip(["nvme0n1", "vda", "sda", "sdb", "sdc"]);
        let found: Vec<_> = found
            .map(|(disk, name)| format!("{name} {} {READ} {:016x}", disk.bytes / SECTOR, disk.hash))
            .collect();
        let mut facts = facts(&found, Duration::from_millis(1020));
        facts.judge(&disks, 2);
        assert_eq!((facts.boot_seconds, facts.memory_mib), (2.5, 488));
        assert_eq!(facts.refused_modules, ["nvme: error 8"]);
        assert_eq!(facts.second_took, Some(1.02));
        let ids: Vec<_> = facts.devices.iter().map(|it| it.id.as_str()).collect();
        assert_eq!(ids, ["1b36:0010", "1af4:1041", "03:01:01"]);
        let (works, says) = facts.verdict();
        assert!(works && says.contains("read 5 of 5 disks"), "{says}");
        let text = facts.show();
        assert!(text.contains("drivers: nvme usbhid"), "{text}");
        assert!(text.contains("without a driver: pci 1af4:1041"), "{text}");
    }

    #[test]
    fn each_fault_is_a_problem() {
        let disks = equipment::disks().unwrap();
        let wrong = format!("vda {} {READ} {:016x}", disks[1].bytes / SECTOR, disks[1].hash ^ 1);
        let mut facts = facts(&[wrong], Duration::from_millis(400));
        facts.judge(&disks, 4);
        let (works, says) = facts.verdict();
        assert!(!works);
        for problem in [
            "2 of 4 processors",
            "its second took 0.4 s",
            "nvme: the driver found no disk",
            "virtio-blk: the guest read wrong bytes",
        ] {
            assert!(says.contains(problem), "{problem}: {says}");
        }
        assert_eq!(facts.problems.len(), 4, "{says}");
        assert_eq!(facts.disks[3].result, DiskResult::NoDriver);
    }

    #[test]
    fn a_guest_that_prints_forever_fills_no_memory() {
        let mut facts = Facts::new(Vec::new());
        for _ in 0..10 * MAX_ITEMS {
            facts.read("transom: error x", Instant::now());
            facts.read("transom: device pci a b c d e", Instant::now());
            facts.read("transom: disk a 1 2 3", Instant::now());
            facts.read("transom: module 0 error 1", Instant::now());
        }
        let Facts { errors, devices, reading, .. } = &facts;
        assert_eq!([errors.len(), devices.len(), reading.disks.len()], [MAX_ITEMS; 3]);
        assert_eq!(facts.refused_modules.len(), 0);
        assert_eq!(count("0-4294967295,0-4294967295"), 1 << 33);
    }
}
