//! A volume with real files, and pods on it whose machine is a script: it keeps its configuration,
//! and plays the guest.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context as _, Result, ensure};
use container::media::testutil::{self, Layout, install_cd, windows_11};
use devices::registry;
use fake_microsoft::{FakeMicrosoft, Site};
use serde_json::Value;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use transom_tests::place::Place;
use transom_tests::program::{PATIENCE, Running, said, vmm};

/// Disks of 64 MiB: with Windows, with one whose set-up was interrupted before it had a boot
/// loader, at two points, with Windows for a BIOS, with Linux, and with somebody's data.
const DISKS: &str = r#"
disk() {
  truncate -s 64M "$1"
  sfdisk --quiet "$1"
}
gpt() {
  printf 'label: gpt\nstart=2048,size=73728,type=uefi\n'
  printf 'size=2048,type=E3C9E316-0B5C-4DB8-817D-F92DF00215AE\n'
  printf 'type=%s\n' "$1"
}
basic=EBD0A0A2-B9E5-4433-87C0-68B6B72699C7
gpt "$basic" | disk divided
printf '\353\122\220NTFS    ' | dd of=divided bs=512 seek=77824 conv=notrunc status=none
cp --sparse=always divided begun
mkfs.vfat -F 32 --offset 2048 begun 36864 > /dev/null
cp --sparse=always begun installed
mmd -i installed@@1M ::EFI ::EFI/Microsoft ::EFI/Microsoft/Boot
echo loader | mcopy -i installed@@1M - ::EFI/Microsoft/Boot/bootmgfw.efi
gpt linux | disk linux
mkfs.vfat -F 32 --offset 2048 linux 36864 > /dev/null
mmd -i linux@@1M ::EFI ::EFI/debian
printf 'label: dos\nstart=2048,type=7,bootable\n' | disk bios
printf 'label: gpt\nstart=2048,type=%s\n' "$basic" | disk data
printf '\353\122\220NTFS    ' | dd of=data bs=512 seek=2048 conv=notrunc status=none
truncate -s 64M blank
"#;

/// The machine. It does what the guest of a test does, and switches itself off. Its host has no KVM
/// for `doctor`.
const MACHINE: &str = "#!/bin/sh
[ $1 = run ] || exit 1
cat > FOLDER/machine.json
cd /mnt
. FOLDER/guest
";
/// A processor with virtualization in its flags, so that the steps before the machine's start work
/// on any host.
const VIRTUALIZES: &str = "sed 's/^flags.*/& vmx/' /proc/cpuinfo > /run/cpuinfo; \
    mount --bind /run/cpuinfo /proc/cpuinfo; ";

/// The line of a firmware that boots a disk, and time for the pod to see it.
pub(crate) const BOOTS: &str = r#"echo 'BdsDxe: starting Boot0004 "Windows Boot Manager" from HD(1)'
for i in $(seq 600); do
  [ -e windows.boot ] && break
  sleep 0.1
done
"#;

/// Disks and media for volumes.
pub(crate) struct Files(TempDir);

impl Files {
    pub(crate) fn make() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        said(Command::new("sh").args(["-e", "-c", DISKS]).current_dir(folder.path()))?;
        for (name, cd) in [
            ("win11.iso", install_cd(Layout::Bridge, &windows_11(9))),
            ("win32.iso", install_cd(Layout::Bridge, &windows_11(0))),
            ("arm.iso", install_cd(Layout::Bridge, &windows_11(12))),
            ("linux.iso", testutil::cd(Layout::Iso, &[("live/vmlinuz", vec![1; 4096])])),
        ] {
            fs::write(folder.path().join(name), cd)?;
        }
        Ok(Self(folder))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }
}

/// A host with a volume.
pub(crate) struct World<'a> {
    pub(crate) place: Place,
    files: &'a Files,
    machine: TempDir,
}

impl<'a> World<'a> {
    pub(crate) fn new(files: &'a Files) -> Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("states{}", COUNT.fetch_add(1, Ordering::Relaxed));
        let world = Self { place: Place::new(&name)?, files, machine: tempfile::tempdir()? };
        let script = MACHINE.replace("FOLDER", &world.machine.path().display().to_string());
        fs::write(world.script(), script)?;
        fs::set_permissions(world.script(), PermissionsExt::from_mode(0o755))?;
        world.guest("")?;
        Ok(world)
    }

    fn script(&self) -> PathBuf {
        self.machine.path().join("vmm")
    }

    /// Sets what the guest does from now on, in the folder of the volume.
    pub(crate) fn guest(&self, script: &str) -> Result<()> {
        let script = script.replace("$D", &self.files.0.path().display().to_string());
        fs::write(self.machine.path().join("guest"), script)?;
        Ok(())
    }

    pub(crate) fn volume(&self) -> PathBuf {
        self.place.storage()
    }

    /// Changes the volume by a script in its folder. `$D` has disks and media.
    pub(crate) fn run(&self, script: &str) -> Result<()> {
        let mut shell = Command::new("sh");
        shell.args(["-e", "-c", script]).current_dir(self.volume());
        said(shell.env("D", self.files.0.path())).map(drop).with_context(|| script.to_owned())
    }

    /// Starts a pod. A shell runs `first` before.
    pub(crate) fn start(&self, first: &str, words: &[(&str, &str)]) -> Result<Running> {
        let (script, program) = (self.script(), vmm());
        let (script, program) = (script.display(), program.display());
        let folder = self.files.0.path().display();
        let first =
            format!("{VIRTUALIZES}mount --bind {script} {program}; export D={folder}; {first}");
        // Without a network, nobody waits for the download of drivers.
        let usual = [
            ("NETWORK", "none"),
            ("DRIVERS", "N"),
            ("DISK_SIZE", "64M"),
            ("DISK_MINIMUM", "1M"),
            ("WEB", "N"),
        ];
        fs::remove_file(self.machine.path().join("machine.json")).ok();
        self.place.start(&first, &[&usual[..], words].concat())
    }

    /// A server with certificates of an authority that nobody knows, as a proxy at this port.
    pub(crate) fn microsoft(&self, port: u16) -> Result<Runtime> {
        let site = Site::new(&self.files.path("win11.iso"), vec![])?;
        let folder = self.machine.path().to_owned();
        let bind = ([127, 0, 0, 1], port).into();
        self.place.within(move || {
            let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
            let started = runtime.block_on(FakeMicrosoft::start(bind, &folder, site));
            started.map(|_| runtime).map_err(std::io::Error::other)
        })
    }

    /// Runs a pod until its machine is off. Returns its log.
    pub(crate) fn boot(&self, words: &[(&str, &str)]) -> Result<String> {
        let mut pod = self.start("", words)?;
        let status = pod.wait(PATIENCE)?;
        let log = pod.stdout.text() + &pod.stderr.text();
        ensure!(status == 0, "{words:?}: {status}: {log}");
        Ok(log)
    }

    /// The machine that the last pod started, in a line; `None` if there was none.
    pub(crate) fn machine(&self) -> Result<Option<String>> {
        let Ok(text) = fs::read_to_string(self.machine.path().join("machine.json")) else {
            return Ok(None);
        };
        Ok(Some(describe(&serde_json::from_str(&text)?, &self.volume())))
    }

    /// Whether a file on the volume has the same content as one of the disks.
    pub(crate) fn is(&self, name: &str, disk: &str) -> bool {
        let [ours, theirs] = [self.volume().join(name), self.files.path(disk)].map(fs::read);
        matches!((ours, theirs), (Ok(ours), Ok(theirs)) if ours.starts_with(&theirs))
    }

    /// Names of the files on the volume, sorted.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let entries = fs::read_dir(self.volume())?.collect::<Result<Vec<_>, _>>()?;
        let mut names: Vec<_> =
            entries.iter().map(|it| it.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        Ok(names)
    }
}

/// Runs a test for each row, some at a time.
pub(crate) fn each<T: Sync>(rows: &[T], test: impl Fn(&T) -> Result<()> + Sync) -> Result<()> {
    const THREADS: usize = 4;
    let (next, test) = (AtomicUsize::new(0), &test);
    let work = || {
        while let Some(row) = rows.get(next.fetch_add(1, Ordering::Relaxed)) {
            test(row)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(work)).collect();
        let joined = threads.into_iter().map(|thread| match thread.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        joined.collect()
    })
}

/// Drives in boot order with their files, then those that do not boot, the network card, and the
/// firmware's variables.
fn describe(config: &Value, volume: &Path) -> String {
    let order: Vec<_> = config["boot"].as_array().into_iter().flatten().collect();
    let devices = || config["device"].as_array().into_iter().flatten();
    let mut drives = Vec::new();
    for (at, device) in devices().enumerate() {
        let kind = device["kind"].as_str().unwrap_or_default();
        let number = devices().take(at + 1).filter(|other| other["kind"] == kind).count();
        let name = registry::name(kind, number);
        let Some(path) = device["path"].as_str() else { continue };
        let shown = if path.starts_with("/proc/") { "set-up" } else { file_name(path) };
        let place = order.iter().position(|it| **it == *name);
        drives.push((place.unwrap_or(usize::MAX), format!("{kind} {shown}")));
    }
    drives.sort_by_key(|(place, _)| *place);
    let booted = drives.iter().filter(|(place, _)| *place < usize::MAX).count();
    let of = |drives: &[(usize, String)]| -> Vec<String> {
        drives.iter().map(|(_, drive)| drive.clone()).collect()
    };
    let mut text = of(&drives[..booted]).join(" > ");
    for drive in of(&drives[booted..]) {
        write!(text, " + {drive}").expect("a string takes all");
    }
    let card = |device: &&Value| ["virtio-net", "e1000e"].iter().any(|it| device["kind"] == *it);
    if let Some(card) = devices().find(card) {
        write!(text, " + {}", card["mac"].as_str().unwrap_or_default()).expect("a string");
    }
    let vars = config["vars"].as_str().map_or("none", file_name);
    let is_kept = fs::read(volume.join(vars)).is_ok_and(|it| it[4096..].starts_with(b"mine"));
    write!(text, " | {}{vars}", if is_kept { "" } else { "new " }).expect("a string takes all");
    let tpm = if config["tpm"].is_null() { "" } else { " TPM" };
    text + tpm
}

fn file_name(path: &str) -> &str {
    Path::new(path).file_name().and_then(OsStr::to_str).unwrap_or(path)
}
