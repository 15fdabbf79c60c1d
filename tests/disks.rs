//! Disks of every kind under Linux: data that `fio` verifies, file systems, room given back.
#![forbid(unsafe_code)]

use std::fs::{self, File};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, ensure};
use transom_tests::guest::Guest;
use transom_tests::image::qemu_img;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::say;
use transom_tests::suite::{Suite, Test};

const BOOT: Duration = Duration::from_secs(180);
/// For a command that works on a disk.
const WORK: Duration = Duration::from_secs(240);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
const ASSETS: &[&str] =
    &["BZIMAGE_12", "MODULES_12", "BZIMAGE_13", "MODULES_13", "BUSYBOX", "DISK_TOOLS", "QEMU_IMG"];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        let name = format!("linux_{release}_keeps_what_it_wrote_on_every_disk");
        tests.push(Test::new(name, move || keeps_what_it_wrote(release)));
    }
    Suite { lab: Lab { mib: 4096, seconds: 900, assets: ASSETS }, tests }.main()
}

/// Bytes of each disk.
const SIZE: u64 = 256 << 20;

/// What the file takes that a guest writes and removes.
const FILE_KIB: u64 = 20_000;

/// One disk of a guest: what it is on the host, and how the guest reaches it.
struct Disk {
    /// For messages: `virtio-blk on raw, 4 queues`.
    name: String,
    /// By which the guest finds it.
    serial: String,
    path: PathBuf,
    words: String,
    /// The file whose blocks tell what the disk takes.
    file: PathBuf,
}

/// A loop device on a file, for as long as this lives.
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

/// Every controller on every kind of image, with one and with four queues.
fn disks(folder: &Path, loops: &mut Vec<Loop>) -> anyhow::Result<Vec<Disk>> {
    let mut disks = Vec::new();
    for kind in ["virtio-blk", "nvme"] {
        for (format, queues) in [("raw", 4), ("device", 1), ("qcow2", 4)] {
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
    }
    Ok(disks)
}

/// What the guest runs on one disk. The tools are on the first disk, which is a root of its own.
const WORK_ON: &str = r#"
set -e
disk=/dev/$1
tool() { chroot /tools "$@"; }
tool fio --name=verify --filename=$disk --rw=randwrite --bsrange=512-64k --iodepth=32 \
  --ioengine=libaio --direct=1 --size=16M --verify=crc32c --verify_fatal=1 --do_verify=1 \
  --randseed=7 --verify_state_save=0 --eta=never --output=/dev/null
echo verified
tool mkfs.ext4 -q -F $disk
mkdir -p /mnt
mount -t ext4 $disk /mnt
head -c 20480000 /dev/urandom > /mnt/file
sum=$(sha256sum < /mnt/file)
umount /mnt
mount -t ext4 $disk /mnt
[ "$sum" = "$(sha256sum < /mnt/file)" ]
echo kept
"#;

/// And then, when the host has seen what it takes.
const TRIM: &str = "rm /mnt/file && sync && fstrim /mnt && umount /mnt";

/// Says the name of the disk with a serial number.
const FIND: &str = r#"
for disk in /sys/block/vd* /sys/block/nvme*; do
  for file in $disk/serial $disk/device/serial; do
    [ ! -e $file ] || [ "$(tr -d ' ' < $file)" != $1 ] || echo ${disk##*/}
  done
done
"#;

const TOOLS: &str = r"
set -e
mkdir -p /tools
mount -t ext4 -o ro /dev/$(sh /find.sh tools) /tools
for folder in dev proc sys; do mount --bind /$folder /tools/$folder; done
";

fn keeps_what_it_wrote(release: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir()?;
    let mut loops = Vec::new();
    let disks = disks(folder.path(), &mut loops)?;
    let tools = lab::asset("DISK_TOOLS")?;
    let mut guest = Guest::transom().cpus("4").memory("1G").word("--device");
    guest = guest.word(format!("virtio-blk,path={},readonly,serial=tools", tools.display()));
    for disk in &disks {
        guest = guest.word("--device").word(&disk.words);
    }
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{release}"))?);
    let modules = lab::asset(&format!("MODULES_{release}"))?;
    let linux = linux.modules(&modules, &["virtio_pci", "virtio_blk", "ext4"]);
    let linux = linux.file("work.sh", WORK_ON).file("tools.sh", TOOLS).file("find.sh", FIND);
    let mut booted = linux.boot(BOOT)?;
    booted.run("sh /tools.sh", SOON)?;
    for disk in &disks {
        let device = booted.run(&format!("sh /find.sh {}", disk.serial), SOON)?;
        work(&mut booted, disk, device.trim()).with_context(|| disk.name.clone())?;
    }
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)?;
    for disk in disks.iter().filter(|disk| disk.words.contains(".qcow2")) {
        qemu_img(&["check", "-q"], &disk.path, &[]).with_context(|| disk.name.clone())?;
    }
    Ok(())
}

fn work(booted: &mut Booted, disk: &Disk, device: &str) -> anyhow::Result<()> {
    let size = booted.run(&format!("cat /sys/block/{device}/size"), SOON)?;
    ensure!(size.trim() == (SIZE / 512).to_string(), "{device} has {size} sectors");
    let said = booted.run(&format!("sh /work.sh {device}"), WORK)?;
    ensure!(said.lines().eq(["verified", "kept"]), "{said}");
    let full = blocks(&disk.file)?;
    booted.run(TRIM, SOON)?;
    let trimmed = blocks(&disk.file)?;
    booted.run(&format!("chroot /tools blkdiscard /dev/{device}"), SOON)?;
    let empty = blocks(&disk.file)?;
    let name = &disk.name;
    say!("{name}: {full} KiB on the host, {trimmed} after fstrim, {empty} after blkdiscard");
    ensure!(full > FILE_KIB, "{full} KiB are not what was written");
    ensure!(trimmed < full - FILE_KIB * 9 / 10, "{trimmed} KiB are left of {full}");
    ensure!(empty < 1024, "{empty} KiB are left");
    Ok(())
}

/// KiB that a file takes.
fn blocks(file: &Path) -> anyhow::Result<u64> {
    let found = fs::metadata(file).with_context(|| file.display().to_string())?;
    Ok(found.blocks() / 2)
}
