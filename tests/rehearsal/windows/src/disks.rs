//! Disks in the order in which Windows PE numbers them.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

const BLOCK: &str = "/sys/class/block";
/// Time without a new device after which all are there. USB disks take longest.
const QUIET: Duration = Duration::from_secs(6);

/// A block device without its partitions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Disk {
    /// The name in `/dev`.
    pub(crate) name: String,
    /// Where it is plugged, in `/sys/devices`.
    place: PathBuf,
}

impl Disk {
    fn attribute(&self, name: &str) -> String {
        let path = Path::new(BLOCK).join(&self.name).join(name);
        fs::read_to_string(path).unwrap_or_default().trim().to_owned()
    }

    pub(crate) fn path(&self) -> String {
        format!("/dev/{}", self.name)
    }

    pub(crate) fn is_cd(&self) -> bool {
        self.name.starts_with("sr")
    }

    fn is_usb(&self) -> bool {
        self.place.components().any(|part| part.as_os_str().to_string_lossy().starts_with("usb"))
    }

    pub(crate) fn is_removable(&self) -> bool {
        self.attribute("removable") == "1"
    }

    pub(crate) fn is_readonly(&self) -> bool {
        self.is_cd() || self.attribute("ro") == "1"
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.attribute("size").parse::<u64>().unwrap_or(0) * 512
    }

    /// The device of a partition.
    pub(crate) fn partition(&self, number: u32) -> String {
        let digit = self.name.ends_with(|last: char| last.is_ascii_digit());
        format!("/dev/{}{}{number}", self.name, if digit { "p" } else { "" })
    }

    pub(crate) fn has_partitions(&self) -> bool {
        Path::new(&self.partition(1)).exists()
    }
}

/// All disks and CDs that there are now: those of built-in controllers by their place, and then
/// those at USB.
pub(crate) fn present() -> anyhow::Result<Vec<Disk>> {
    let mut disks = Vec::new();
    for entry in fs::read_dir(BLOCK)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let place = fs::canonicalize(entry.path()).context(name.clone())?;
        let virtual_one = place.starts_with("/sys/devices/virtual");
        if !virtual_one && !place.join("partition").exists() {
            disks.push(Disk { name, place });
        }
    }
    disks.retain(|disk| disk.bytes() > 0);
    disks.sort_by_key(|disk| (disk.is_usb(), disk.place.clone()));
    Ok(disks)
}

/// Waits until no further disk has come for a while, and returns all.
pub(crate) fn settled() -> anyhow::Result<Vec<Disk>> {
    let mut found = present()?;
    let mut since = Instant::now();
    while since.elapsed() < QUIET {
        sleep(Duration::from_millis(200));
        let now = present()?;
        if now != found {
            (found, since) = (now, Instant::now());
        }
    }
    Ok(found)
}

/// The disks that Windows PE numbers, from 0: each keeps its number when others come.
#[derive(Default)]
pub(crate) struct Numbered(Vec<Disk>);

impl Numbered {
    /// Adds those that are new.
    pub(crate) fn update(&mut self, found: &[Disk]) {
        let new = found.iter().filter(|disk| !disk.is_cd() && !self.0.contains(disk));
        let new: Vec<_> = new.cloned().collect();
        self.0.extend(new);
    }

    pub(crate) fn get(&self, number: u32) -> anyhow::Result<&Disk> {
        let index = usize::try_from(number)?;
        ensure!(
            index < self.0.len(),
            "disk {number}: there are {}: {}",
            self.0.len(),
            self.shown()
        );
        Ok(&self.0[index])
    }

    pub(crate) fn shown(&self) -> String {
        let one = |(number, disk): (usize, &Disk)| format!("{number}={}", disk.name);
        self.0.iter().enumerate().map(one).collect::<Vec<_>>().join(" ")
    }
}
