//! `DiskConfiguration`: partitions and file systems of the system disk.

use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::console::say;
use super::disks::{self, Disk, Numbered};
use super::tool;
use super::xml::Element;

/// GPT partition types.
pub(crate) const RESERVED: &str = "E3C9E316-0B5C-4DB8-817D-F92DF00215AE";
pub(crate) const BASIC: &str = "EBD0A0A2-B9E5-4433-87C0-68B6B72699C7";
/// Windows, with room for itself.
pub(crate) const MIN_MIB: u64 = 100;

/// The disk where Windows goes, and the numbers of its partitions.
#[derive(Debug)]
pub(crate) struct Target {
    pub(crate) disk: Disk,
    pub(crate) windows: u32,
    pub(crate) system: u32,
}

/// Obeys the disk configuration, and finds the partition for Windows in it.
pub(crate) fn prepare(setup: &Element, disks: &Numbered) -> anyhow::Result<Target> {
    let configuration = setup.at("DiskConfiguration/Disk");
    let configuration = configuration.context("Setup asks where to install Windows")?;
    let number = configuration.number("DiskID")?;
    let disk = disks.get(number)?;
    ensure!(!disk.is_removable(), "disk {number} is removable: Windows is not installed there");
    ensure!(!disk.is_readonly(), "disk {number} cannot be written");
    let to = setup.at("ImageInstall/OSImage/InstallTo").context("no InstallTo")?;
    ensure!(to.number("DiskID")? == number, "InstallTo names a disk that is not configured");
    ensure!(
        configuration.is("WillWipeDisk") || !disk.has_partitions(),
        "disk {number} has partitions, and is not wiped"
    );
    let list = configuration.at("CreatePartitions").context("no partitions")?;
    let kinds = create(disk, list)?;
    let system = kinds.iter().position(|kind| kind == "EFI").context("no system partition")?;
    let system = u32::try_from(system)? + 1;
    let windows = to.number("PartitionID")?;
    let kind = usize::try_from(windows)?.checked_sub(1).and_then(|at| kinds.get(at));
    ensure!(
        kind.is_some_and(|kind| kind == "Primary"),
        "Windows goes to partition {windows}: {kind:?}"
    );
    let modify = configuration.at("ModifyPartitions").into_iter().flat_map(|it| &it.children);
    let mut formatted = Vec::new();
    for change in modify {
        formatted.extend(format(disk, change)?);
    }
    ensure!(formatted.contains(&(windows, "NTFS".into())), "partition {windows} is not NTFS");
    ensure!(formatted.contains(&(system, "FAT32".into())), "partition {system} is not FAT32");
    say!("disk {number} has {} partitions", kinds.len());
    Ok(Target { disk: disk.clone(), windows, system })
}

/// Creates the partitions, and returns their kinds.
fn create(disk: &Disk, list: &Element) -> anyhow::Result<Vec<String>> {
    let (script, kinds) = layout(list, disk.bytes() >> 20)?;
    let arguments = ["--quiet", "--wipe", "always", "--wipe-partitions", "always"];
    tool::run_with("/bin/sfdisk", &[&arguments[..], &[&disk.path()]].concat(), &script)?;
    Ok(kinds)
}

/// The partitions of a disk with this many MiB, as `sfdisk` reads them, and their kinds.
fn layout(list: &Element, mib: u64) -> anyhow::Result<(String, Vec<String>)> {
    let mut ordered = Vec::new();
    for item in &list.children {
        ordered.push((item.number("Order")?, item));
    }
    ordered.sort_by_key(|(order, _)| *order);
    // The tables have a MiB at each end.
    let (mut kinds, mut left) = (Vec::new(), mib.saturating_sub(2));
    let mut script = "label: gpt\n".to_owned();
    for (order, item) in &ordered {
        let kind = item.value("Type").context("no Type")?;
        let extend = item.is("Extend");
        ensure!(extend != item.at("Size").is_some(), "partition {order}: one of Size and Extend");
        let last = ordered.last().map(|(order, _)| order) == Some(order);
        ensure!(last || !extend, "partition {order}: only the last extends");
        let mib = if extend { left } else { item.number("Size")?.into() };
        ensure!(mib <= left, "partition {order} has {mib} MiB, and {left} are left");
        ensure!(kind != "Primary" || mib >= MIN_MIB, "partition {order} has {mib} MiB");
        left -= mib;
        let word = match kind {
            "EFI" => "uefi",
            "MSR" => RESERVED,
            _ => BASIC,
        };
        let size = if extend { String::new() } else { format!("size={mib}MiB, ") };
        script.push_str(&format!("{size}type={word}\n"));
        kinds.push(kind.to_owned());
    }
    Ok((script, kinds))
}

/// Formats a partition, and returns its number and file system.
fn format(disk: &Disk, change: &Element) -> anyhow::Result<Option<(u32, String)>> {
    let number = change.number("PartitionID")?;
    let device = disk.partition(number);
    appears(&device)?;
    let label = change.value("Label").unwrap_or("New Volume");
    let Some(system) = change.value("Format") else { return Ok(None) };
    make(system, label, &device)?;
    Ok(Some((number, system.to_owned())))
}

/// Makes a file system.
pub(crate) fn make(system: &str, label: &str, device: &str) -> anyhow::Result<()> {
    let made = match system {
        "FAT32" => tool::run("/bin/mkfs.fat", &["-F", "32", "-n", label, device]),
        "NTFS" => tool::run("/bin/mkntfs", &["-Q", "-F", "-q", "-L", label, device]),
        other => bail!("{other}: no such file system"),
    };
    made.map(drop)
}

/// The size of a partition in MiB.
pub(crate) fn mib(device: &str) -> anyhow::Result<u64> {
    let name = device.trim_start_matches("/dev/");
    let sectors = fs::read_to_string(format!("/sys/class/block/{name}/size"));
    let sectors: u64 = sectors.with_context(|| device.to_owned())?.trim().parse()?;
    Ok(sectors >> 11)
}

pub(crate) fn appears(device: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    while !Path::new(device).exists() {
        ensure!(start.elapsed() < Duration::from_secs(30), "{device} does not appear");
        sleep(Duration::from_millis(100));
    }
    Ok(())
}

impl Target {
    /// The name of the partition of Windows that stays when disks move.
    pub(crate) fn name(&self) -> anyhow::Result<String> {
        name_of(&self.disk, self.windows)
    }
}

fn name_of(disk: &Disk, partition: u32) -> anyhow::Result<String> {
    tool::run("/bin/sfdisk", &["--part-uuid", &disk.path(), &partition.to_string()])
}

/// Waits for the partition with this name, and returns its disk and its number.
pub(crate) fn appears_by_name(name: &str) -> anyhow::Result<(Disk, u32)> {
    let start = Instant::now();
    loop {
        if let Some(found) = find(&disks::present()?, name) {
            return Ok(found);
        }
        ensure!(start.elapsed() < Duration::from_secs(30), "0x7B INACCESSIBLE_BOOT_DEVICE");
        sleep(Duration::from_millis(200));
    }
}

/// The disk and the number of the partition with this name.
fn find(disks: &[Disk], name: &str) -> Option<(Disk, u32)> {
    let all = disks.iter().flat_map(|disk| (1..=8).map(move |number| (disk, number)));
    let mut there = all.filter(|(disk, number)| Path::new(&disk.partition(*number)).exists());
    let found = there.find(|(disk, number)| name_of(disk, *number).is_ok_and(|it| it == name));
    found.map(|(disk, number)| (disk.clone(), number))
}

#[cfg(test)]
mod test {
    use super::super::xml::parse;
    use super::*;

    fn made(partitions: &[(&str, &str)], mib: u64) -> anyhow::Result<String> {
        let one = |(order, (kind, size)): (usize, &(&str, &str))| {
            format!("<P><Order>{order}</Order><Type>{kind}</Type>{size}</P>")
        };
        let all: String = partitions.iter().enumerate().map(one).collect();
        layout(&parse(&format!("<L>{all}</L>"))?, mib).map(|(script, _)| script)
    }

    #[test]
    fn partitions_fit_the_disk() {
        let rest = "<Extend>true</Extend>";
        let parts = [("EFI", "<Size>128</Size>"), ("MSR", "<Size>16</Size>"), ("Primary", rest)];
        let script = format!(
            "label: gpt\nsize=128MiB, type=uefi\nsize=16MiB, type={RESERVED}\n\
                              type={BASIC}\n"
        );
        assert_eq!(made(&parts, 1024).unwrap(), script);
        let fails = |parts: &[(&str, &str)], mib, why: &str| {
            let error = made(parts, mib).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        };
        fails(&parts, 200, "has 54 MiB");
        fails(&parts, 100, "and 98 are left");
        fails(&[parts[2], parts[0]], 1024, "only the last");
        fails(&[("EFI", "")], 1024, "one of Size and Extend");
    }
}
