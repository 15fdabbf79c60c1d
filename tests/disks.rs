//! Disks of every kind under Linux: data verified by `fio`, file systems, and discarded space.
#![forbid(unsafe_code)]

#[path = "disks/moves.rs"]
mod moves;

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use host::size::Size;
use transom_tests::guest::Guest;
use transom_tests::image::qemu_img;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Answer, Booted, Linux};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use vmm::control;

const BOOT: Duration = Duration::from_secs(180);
/// The limit for a command that works on a disk.
const WORK: Duration = Duration::from_secs(240);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
const ASSETS: &[&str] = &[
    "BZIMAGE_12",
    "MODULES_12",
    "BZIMAGE_13",
    "MODULES_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BOOT_CD",
    "BUSYBOX",
    "DISK_TOOLS",
    "QEMU_IMG",
];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        let name = format!("linux_{release}_detects_disk_growth");
        let test = Test::new(name, move || detects_disk_growth(release));
        tests.push(if release == "13" { test } else { test.thorough() });
    }
    // The test is about the host's side, so one kernel is enough. The suite `probe` fills volumes,
    // too, with kills.
    let name = "linux_13_waits_for_space_on_a_full_volume";
    tests.push(Test::new(name, || waits_while_a_volume_is_full("13")).thorough());
    let name = "linux_13_keeps_written_data_on_each_controller";
    tests.push(Test::new(name, || keeps_written_data("13", &FEW)));
    for release in RELEASES {
        let name = format!("linux_{release}_keeps_written_data_on_every_disk");
        tests.push(Test::new(name, move || keeps_written_data(release, &SETUPS)).thorough());
    }
    for release in RELEASES {
        let name = format!("linux_{release}_finds_disks_whose_addresses_were_exchanged");
        // The suites `hyperv` and `probe` move BARs, too, while devices work.
        tests.push(Test::new(name, move || moves::exchanges_addresses(release)).thorough());
    }
    // Linux of `doctor` reads a disk at SATA, and the suite `firmware` starts from such a CD.
    for (release, kernel, formats) in
        [("12", "GENERIC", &["raw", "qcow2"][..]), ("13", "GENERIC_13", &["qcow2"])]
    {
        let name = format!("linux_{release}_has_disks_and_a_cd_at_sata");
        tests.push(Test::new(name, move || has_sata(kernel, formats)).thorough());
    }
    Suite { lab: Lab { mib: 4096, seconds: 1200, assets: ASSETS }, tests }.main()
}

/// The size of each disk in bytes.
const SIZE: u64 = 256 << 20;

/// The blocks of the file that the guest writes and removes, in KiB.
const FILE_KIB: u64 = 10_000;

/// A disk of a guest.
struct Disk {
    /// For messages: `virtio-blk on raw with 4 queues`.
    name: String,
    /// The serial number, by which the guest finds the disk.
    serial: String,
    path: PathBuf,
    words: String,
    /// The file whose blocks show how much space the disk uses.
    file: PathBuf,
}

/// A loop device on a file. Dropping it detaches the device.
struct Loop(PathBuf);

impl Loop {
    fn on(file: &Path) -> anyhow::Result<Self> {
        let words = ["--find", "--show"];
        let output = Command::new("losetup").args(words).arg(file).output().context("losetup")?;
        ensure!(output.status.success(), "losetup: {}", String::from_utf8_lossy(&output.stderr));
        Ok(Self(String::from_utf8(output.stdout)?.trim().into()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        Command::new("losetup").arg("--detach").arg(&self.0).status().ok();
    }
}

/// A controller, a kind of image, and the number of queues.
type Setup = (&'static str, &'static str, u16);

/// Every controller on every kind of image, with one and with four queues. One case is enough for
/// SCSI's own commands.
const SETUPS: [Setup; 7] = [
    ("virtio-blk", "raw", 4),
    ("virtio-blk", "device", 1),
    ("virtio-blk", "qcow2", 4),
    ("nvme", "raw", 4),
    ("nvme", "device", 1),
    ("nvme", "qcow2", 4),
    ("virtio-scsi", "raw", 4),
];

/// Each controller, each kind of image, and one queue and four: once.
const FEW: [Setup; 3] = [SETUPS[1], SETUPS[5], SETUPS[6]];

fn disks(folder: &Path, setups: &[Setup], loops: &mut Vec<Loop>) -> anyhow::Result<Vec<Disk>> {
    let mut disks = Vec::new();
    for &(kind, format, queues) in setups {
        let file = folder.join(format!("{kind}-{queues}.{format}"));
        let mut path = file.clone();
        if format == "qcow2" {
            let size = SIZE.to_string();
            qemu_img(&["create", "-q", "-f", "qcow2"], &file, &[&size])?;
        } else {
            File::create(&file).and_then(|it| it.set_len(SIZE)).context("a disk")?;
        }
        if format == "device" {
            loops.push(Loop::on(&file)?);
            path.clone_from(&loops[loops.len() - 1].0);
        }
        let name = format!("{kind} on {format} with {queues} queues");
        let serial = format!("disk{}", disks.len());
        let words = format!("{kind},path={},queues={queues},serial={serial}", path.display());
        disks.push(Disk { name, serial, path, words, file });
    }
    Ok(disks)
}

/// The guest's script for one disk. The tools are on the first disk, which is a root file system.
const WORK_ON: &str = r#"
set -e
disk=/dev/$1
tool() { chroot /tools "$@"; }
tool fio --name=verify --filename=$disk --rw=randwrite --bsrange=512-64k --iodepth=32 \
  --ioengine=libaio --direct=1 --size=6M --verify=crc32c --verify_fatal=1 --do_verify=1 \
  --randseed=7 --verify_state_save=0 --eta=never --output=/dev/null
echo verified
tool mkfs.ext4 -q -F $disk
mkdir -p /mnt
mount -t ext4 $disk /mnt
head -c 10240000 /dev/urandom > /mnt/file
sum=$(md5sum < /mnt/file)
umount /mnt
mount -t ext4 $disk /mnt
[ "$sum" = "$(md5sum < /mnt/file)" ]
echo kept
"#;

/// Runs after the host has measured the space that the file uses.
const TRIM: &str = "rm /mnt/file && sync && fstrim /mnt && umount /mnt";

/// Prints the device name of the disk with a serial number.
const FIND: &str = r#"
for disk in /sys/block/vd* /sys/block/nvme* /sys/block/sd*; do
  for file in $disk/serial $disk/device/serial $disk/device/vpd_pg80; do
    [ ! -e $file ] || [ "$(tr -dc '!-~' < $file)" != $1 ] || echo ${disk##*/}
  done
done
"#;

const TOOLS: &str = r"
set -e
mkdir -p /tools
mount -t ext4 -o ro /dev/$(sh /find.sh tools) /tools
for folder in dev proc sys; do mount --bind /$folder /tools/$folder; done
";

/// The guest with the disk of tools, and the script that finds disks.
fn with_tools(guest: Guest, release: &str) -> anyhow::Result<Linux> {
    let names = ["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod", "ext4"];
    with_modules(guest, release, &names)
}

fn with_modules(guest: Guest, release: &str, names: &[&str]) -> anyhow::Result<Linux> {
    let tools = lab::asset("DISK_TOOLS")?;
    let guest = guest.word("--device");
    let guest = guest.word(format!("virtio-blk,path={},readonly,serial=tools", tools.display()));
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{release}"))?);
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    let linux = linux.modules(&modules, names);
    Ok(linux.file("tools.sh", TOOLS).file("find.sh", FIND))
}

/// The guest's device name of the disk with this serial number.
fn find(booted: &mut Booted, serial: &str) -> anyhow::Result<String> {
    let found = booted.run(&format!("sh /find.sh {serial}"), SOON)?;
    ensure!(found.lines().count() == 1, "{serial} is {found:?}");
    Ok(found.trim().to_owned())
}

/// Waits until a disk has this number of sectors, without rescanning it.
const WAIT: &str = r#"
for moment in $(seq 300); do
  [ "$(cat /sys/block/$1/size)" != $2 ] || exit 0
  sleep 0.1
done
cat /sys/block/$1/size
exit 1
"#;

/// Writes beyond the old end of a disk, and reads it back past the cache.
const BEYOND: &str = r#"
set -e
head -c 65536 /dev/urandom > /new
dd if=/new of=/dev/$1 bs=65536 seek=$2 conv=fsync 2> /dev/null
echo 3 > /proc/sys/vm/drop_caches
[ "$(dd if=/dev/$1 bs=65536 skip=$2 count=1 2> /dev/null | md5sum)" = "$(md5sum < /new)" ]
"#;

fn detects_disk_growth(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut guest = Guest::transom().cpus("2").word("--jail").word("on");
    let kinds = ["virtio-blk", "nvme", "virtio-scsi"];
    let path = |kind: &str| folder.path().join(kind);
    for kind in kinds {
        File::create(path(kind)).and_then(|it| it.set_len(SIZE)).context("a disk")?;
        let words = format!("{kind},path={},serial=the-{kind}", path(kind).display());
        guest = guest.word("--device").word(words);
    }
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{release}"))?);
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    let names = ["virtio_pci", "virtio_blk", "virtio_scsi", "sd_mod"];
    let linux = linux.modules(&modules, &names).file("find.sh", FIND);
    let mut booted = linux.file("wait.sh", WAIT).file("beyond.sh", BEYOND).boot(BOOT)?;
    for kind in kinds {
        let device = find(&mut booted, &format!("the-{kind}"))?;
        let seen = |booted: &mut Booted, size: u64| {
            let start = Instant::now();
            booted.run(&format!("sh /wait.sh {device} {}", size / 512), WORK)?;
            say!("{kind} has {} MiB after {:?}", size >> 20, start.elapsed());
            let beyond = size / 65536 - 1;
            booted.run(&format!("sh /beyond.sh {device} {beyond}"), SOON)
        };
        seen(&mut booted, SIZE)?;
        // First the operator gives the new size, then the file grows and the operator asks to look.
        let (name, size) = (format!("the-{kind}"), Some(Size(2 * SIZE)));
        booted.running.ask(&control::Command::Grow { name, size })?;
        seen(&mut booted, 2 * SIZE)?;
        File::options().write(true).open(path(kind))?.set_len(3 * SIZE)?;
        let name = kind.to_owned();
        booted.running.ask(&control::Command::Grow { name, size: None })?;
        seen(&mut booted, 3 * SIZE)?;
    }
    has_its_disks_alone(&booted, &path("nvme"))?;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// A second machine on the same disk fails and reports the process that uses the disk.
fn has_its_disks_alone(booted: &Booted, path: &Path) -> anyhow::Result<()> {
    let second = Command::new(lab::vmm()?).args(["run", "--disk"]).arg(path).output()?;
    let said = String::from_utf8_lossy(&second.stderr);
    let holder = format!("in use by process {} (vmm)", booted.running.pid());
    ensure!(second.status.code() == Some(1) && said.contains(&holder), "{second:?}");
    Ok(())
}

/// A volume of limited size. Dropping it unmounts the volume.
struct Volume(PathBuf);

impl Volume {
    fn new(place: &Path, mib: u64) -> anyhow::Result<Self> {
        fs::create_dir(place).with_context(|| place.display().to_string())?;
        mount(&["-t", "tmpfs", "-o", &format!("size={mib}m"), "none"], place)?;
        Ok(Self(place.to_owned()))
    }

    fn resize(&self, mib: u64) -> anyhow::Result<()> {
        mount(&["-o", &format!("remount,size={mib}m")], &self.0)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // The volume may still be busy: its machine may have been killed a moment ago.
        Command::new("umount").arg("--lazy").arg(&self.0).status().ok();
    }
}

fn mount(words: &[&str], place: &Path) -> anyhow::Result<()> {
    let output = Command::new("mount").args(words).arg(place).output().context("mount")?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "mount {words:?} {}: {complaints}", place.display());
    Ok(())
}

/// Writes more than the volume has room for, and reads it back from the disk.
const FILL: &str = r#"
set -e
chroot /tools fio --name=fill --filename=/dev/$1 --rw=randwrite --bs=64k --iodepth=16 \
  --ioengine=libaio --direct=1 --size=48M --verify=crc32c --verify_fatal=1 --do_verify=1 \
  --randseed=9 --verify_state_save=0 --eta=never --output=/dev/null
"#;

fn waits_while_a_volume_is_full(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let volume = Volume::new(&folder.path().join("volume"), 16)?;
    let mut guest = Guest::transom().cpus("2").word("--jail").word("on");
    let kinds = ["virtio-blk", "nvme"];
    for kind in kinds {
        let path = volume.0.join(kind);
        File::create(&path).and_then(|it| it.set_len(64 << 20)).context("a disk")?;
        let words = format!("{kind},path={},serial=the-{kind}", path.display());
        guest = guest.word("--device").word(words);
    }
    let mut booted = with_tools(guest, release)?.file("fill.sh", FILL).boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    for (room, kind) in (0..).zip(kinds) {
        let device = find(&mut booted, &format!("the-{kind}"))?;
        let fill = format!("sh /fill.sh {device}");
        booted.begin(&fill)?;
        becomes(&booted, "waiting for the host").with_context(|| kind.to_owned())?;
        // The state lasts while there is no room, and the guest notices nothing.
        sleep(Duration::from_secs(3));
        let state = booted.running.ask(&control::Command::Status)?["state"].clone();
        ensure!(state == "waiting for the host", "{kind}: {state}");
        // Data of the first disk stays on the volume.
        volume.resize(80 + 64 * room)?;
        let start = Instant::now();
        becomes(&booted, "running").with_context(|| kind.to_owned())?;
        say!("{kind}: the machine continues {:?} after there is room", start.elapsed());
        let Answer { output, status } = booted.finish(&fill, WORK)?;
        ensure!(status == 0, "{kind}: {fill} ended with {status}: {output}");
        let errors = booted.run("dmesg | grep -ci 'i/o error' || true", SOON)?;
        ensure!(errors.trim() == "0", "{kind}: the guest saw {errors} errors");
        // The volume is full again for the next disk.
        volume.resize(64 * (room + 1))?;
    }
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// Waits for a state of the machine.
fn becomes(booted: &Booted, wanted: &str) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        let state = booted.running.ask(&control::Command::Status)?["state"].clone();
        if state == wanted {
            return Ok(());
        }
        ensure!(start.elapsed() < WORK, "the machine is {state}, not {wanted}");
        sleep(Duration::from_millis(100));
    }
}

fn keeps_written_data(release: &str, setups: &[Setup]) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut loops = Vec::new();
    let disks = disks(folder.path(), setups, &mut loops)?;
    let mut guest = Guest::transom().cpus("4").memory("1G").word("--jail").word("on");
    for disk in &disks {
        guest = guest.word("--device").word(&disk.words);
    }
    let linux = with_tools(guest, release)?.file("work.sh", WORK_ON).file("scsi.sh", SCSI);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    for disk in &disks {
        let device = find(&mut booted, &disk.serial)?;
        work(&mut booted, disk, &device).with_context(|| disk.name.clone())?;
    }
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    for disk in disks.iter().filter(|disk| disk.words.contains(".qcow2")) {
        qemu_img(&["check", "-q"], &disk.path, &[]).with_context(|| disk.name.clone())?;
    }
    Ok(())
}

/// Linux's view of a SATA disk: queued commands, a write-back cache with FUA, not rotational; and
/// libata reports nothing unusual.
const SATA: &str = r"
set -e
cd /sys/block/$1
cat device/queue_depth queue/rotational queue/write_cache queue/fua
! dmesg | grep -E 'ata[0-9]' | grep -iE 'error|fail|exception|timeout|softreset|limiting'
";

/// Linux has a maximum of 32 queued commands, one of which it keeps for itself.
const SATA_SAYS: [&[&str]; 4] = [&["31", "32"], &["0"], &["write back"], &["0", "1"]];

/// The disk's own opinion of its health. The status of `smartctl` has a bit for each kind of error:
/// a command that failed, a wrong checksum, a failing disk.
const SMART: &str = "chroot /tools smartctl -a /dev/$1";

const SMART_SAYS: [&str; 5] = [
    "Device Model:     Transom SATA disk",
    "ATA Version is:   ACS-2",
    "SATA Version is:  SATA 3.1, 3.0 Gb/s (current: 3.0 Gb/s)",
    "SMART support is: Enabled",
    "SMART overall-health self-assessment test result: PASSED",
];

/// The CD's content, and the same after the operator has changed it.
const READ_CD: &str = "dd if=/dev/sr0 bs=2048 2> /dev/null | md5sum";

fn has_sata(kernel: &str, formats: &[&'static str]) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let setups: Vec<_> = formats.iter().map(|format| ("ahci-disk", *format, 1)).collect();
    let disks = disks(folder.path(), &setups, &mut Vec::new())?;
    let cd = lab::asset("BOOT_CD")?;
    let mut guest = Guest::transom().cpus("4").memory("1G").word("--jail").word("on");
    for disk in &disks {
        guest = guest.word("--device").word(&disk.words);
    }
    let guest = guest.word("--device").word(format!("ahci-cdrom,path={}", cd.display()));
    let names = ["virtio_pci", "virtio_blk", "ahci", "sd_mod", "sr_mod", "crc32c_generic", "ext4"];
    let linux = with_modules(guest, kernel, &names)?;
    let linux = linux.file("work.sh", WORK_ON).file("sata.sh", SATA).file("smart.sh", SMART);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    for disk in &disks {
        let device = find(&mut booted, &disk.serial)?;
        let said = booted.run(&format!("sh /sata.sh {device}"), SOON)?;
        let lines: Vec<_> = said.lines().map(str::trim).collect();
        let fits = lines.len() == SATA_SAYS.len()
            && lines.iter().zip(SATA_SAYS).all(|(line, allowed)| allowed.contains(line));
        ensure!(fits, "{said}");
        is_healthy(&mut booted, &device)?;
        work(&mut booted, disk, &device).with_context(|| disk.name.clone())?;
    }
    let before = booted.run(READ_CD, SOON)?;
    let name = || "ahci-cdrom".to_owned();
    booted.running.ask(&control::Command::Eject { name: name(), force: None })?;
    booted.running.ask(&control::Command::Insert { name: name(), path: cd, only: None })?;
    let after = booted.run(&format!("sleep 5; {READ_CD}"), SOON)?;
    ensure!(before == after, "the CD was {before}, then {after}");
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

fn is_healthy(booted: &mut Booted, device: &str) -> anyhow::Result<()> {
    let said = booted.run(&format!("sh /smart.sh {device}"), SOON)?;
    for words in SMART_SAYS {
        ensure!(said.contains(words), "no {words:?}: {said}");
    }
    let size = format!("User Capacity:    {SIZE}");
    let plain: String = said.chars().filter(|it| *it != ',').collect();
    ensure!(plain.contains(&size), "no {size:?}: {said}");
    Ok(())
}

/// Linux's view of a SCSI disk: it is not rotational, has a write-back cache with FUA, discards by
/// UNMAP and zeroes by WRITE SAME; and the kernel reports nothing unusual.
const SCSI: &str = r"
set -e
cd /sys/block/$1
cat queue/rotational queue/write_cache queue/fua device/scsi_disk/*/cache_type
cat device/scsi_disk/*/provisioning_mode device/scsi_disk/*/max_write_same_blocks
cat queue/discard_granularity device/vendor device/model
[ $(cat queue/write_zeroes_max_bytes) -gt 0 ]
! dmesg | grep -iE 'sd |scsi' | grep -iE 'error|fail|abort|not supported|assuming'
";

const SCSI_SAYS: [&str; 9] =
    ["0", "write back", "1", "write back", "unmap", "4194304", "4096", "TRANSOM", "SCSI disk"];

fn work(booted: &mut Booted, disk: &Disk, device: &str) -> anyhow::Result<()> {
    if disk.words.starts_with("virtio-scsi") {
        let said = booted.run(&format!("sh /scsi.sh {device}"), SOON)?;
        ensure!(said.lines().map(str::trim).eq(SCSI_SAYS), "{said}");
    }
    let size = booted.run(&format!("cat /sys/block/{device}/size"), SOON)?;
    ensure!(size.trim() == (SIZE / 512).to_string(), "{device} has {size} sectors");
    let said = booted.run(&format!("sh /work.sh {device}"), WORK)?;
    ensure!(said.lines().eq(["verified", "kept"]), "{said}");
    let full = blocks(&disk.file)?;
    booted.run(TRIM, SOON)?;
    let trimmed = blocks(&disk.file)?;
    // A qcow2 image frees its clusters at the next flush.
    let flush = format!("dd of=/dev/{device} count=0 conv=fsync,notrunc 2>&1 < /dev/null");
    booted.run(&format!("chroot /tools blkdiscard /dev/{device} && {flush}"), SOON)?;
    let empty = blocks(&disk.file)?;
    let name = &disk.name;
    say!("{name}: {full} KiB on the host, {trimmed} after fstrim, {empty} after blkdiscard");
    ensure!(full > FILE_KIB, "only {full} KiB on the host after writing {FILE_KIB}");
    ensure!(trimmed < full - FILE_KIB * 9 / 10, "fstrim left {trimmed} of {full} KiB");
    ensure!(empty < 1024, "blkdiscard left {empty} KiB");
    Ok(())
}

/// The space that a file uses, in KiB.
fn blocks(file: &Path) -> anyhow::Result<u64> {
    let found = fs::metadata(file).with_context(|| file.display().to_string())?;
    Ok(found.blocks() / 2)
}
