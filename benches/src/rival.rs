//! The programs that are compared, each with the same guest: the probe, 512 MiB, one processor.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

/// What the tables call ours.
pub const OURS: &str = "vmm";

/// MiB of guest memory.
pub const MEMORY: u64 = 512;

/// A controller of disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    /// virtio-blk
    Virtio,
    /// NVMe
    Nvme,
}

/// A disk: a raw file, with its controller, in the page cache or around it.
#[derive(Clone, Copy, Debug)]
pub struct Disk<'a> {
    /// What the guest sees.
    pub controller: Controller,
    /// Its file.
    pub path: &'a Path,
    /// Around the page cache.
    pub direct: bool,
}

/// What a machine has beyond its processor, its memory and its serial port.
#[derive(Clone, Copy, Debug, Default)]
pub struct Equipment<'a> {
    /// Its disks.
    pub disks: &'a [Disk<'a>],
    /// The tap that its virtio network is on.
    pub tap: Option<&'a str>,
    /// The kernel moves the network's frames, where the program can have it so.
    pub vhost: bool,
}

/// A program, and how it starts the probe with these words.
pub struct Rival {
    /// What the table calls it.
    pub name: &'static str,
    /// What one should know of it when one reads its figures.
    pub note: &'static str,
    make: Make,
    places: Places,
}

type Make = fn(&Places, &str, &Equipment<'_>) -> Result<Command>;

struct Places {
    program: PathBuf,
    folder: PathBuf,
}

impl Places {
    fn kernel(&self) -> String {
        self.folder.join("probe.elf").display().to_string()
    }
}

impl Rival {
    /// The command that boots the probe with its first serial port on standard output.
    ///
    /// # Errors
    ///
    /// When a file that it needs cannot be written.
    pub fn command(&self, words: &str) -> Result<Command> {
        self.equipped(words, &Equipment::default())
    }

    /// The same with disks or a network, each in the best way that the program has.
    ///
    /// # Errors
    ///
    /// When a file that it needs cannot be written.
    pub fn equipped(&self, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
        (self.make)(&self.places, words, equipment)
    }

    /// Whether it has such a controller, and a way around the page cache if that is wanted.
    pub fn has(&self, controller: Controller, direct: bool) -> bool {
        match self.name {
            "cloud-hypervisor" => controller == Controller::Virtio,
            "firecracker" => controller == Controller::Virtio && !direct,
            _ => true,
        }
    }
}

/// Name, program, note, and how it is started.
type Known = (&'static str, &'static str, &'static str, Make);

const KNOWN: &[Known] = &[
    (OURS, "vmm", "", ours),
    ("cloud-hypervisor", "cloud-hypervisor", "", cloud_hypervisor),
    ("firecracker", "firecracker", "", firecracker),
    ("qemu microvm", "qemu-system-x86_64", "qboot", qemu_microvm),
    (
        "qemu q35",
        "qemu-system-x86_64",
        "SeaBIOS first, which a paravirtual-only KVM emulates",
        qemu_q35,
    ),
];

/// The programs that are here, ours first; says which are not. `but` leaves some out. A program is
/// where its variable says (`TRANSOM_CLOUD_HYPERVISOR`, …), where `benches/peers` has put it, or
/// else in `PATH`.
///
/// # Errors
///
/// When ours cannot be built.
pub fn rivals(folder: &TempDir, but: &[&str]) -> Result<Vec<Rival>> {
    fs::write(folder.path().join("probe.elf"), probe::IMAGE).context("the probe")?;
    let mut found = Vec::new();
    for (name, program, note, make) in KNOWN {
        if but.contains(name) {
            continue;
        }
        let variable = format!("TRANSOM_{}", program.to_uppercase().replace('-', "_"));
        let found_program = match env::var_os(&variable) {
            Some(path) => Some(PathBuf::from(path)),
            None if *program == "vmm" => Some(build()?),
            None => built(program)?.or_else(|| in_path(program)),
        };
        let Some(program) = found_program else {
            eprintln!(
                "not compared: {name}: set {variable}, build it (benches/peers) or install it"
            );
            continue;
        };
        let places = Places { program, folder: folder.path().to_owned() };
        found.push(Rival { name, note, make: *make, places });
    }
    Ok(found)
}

fn in_path(program: &str) -> Option<PathBuf> {
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// The program that `benches/peers` has built.
fn built(program: &str) -> Result<Option<PathBuf>> {
    let path = target()?.join("peers").join(program);
    Ok(path.is_file().then_some(path))
}

/// The target folder: a benchmark is `target/release/deps/BENCH`.
fn target() -> Result<PathBuf> {
    let bench = env::current_exe()?;
    Ok(bench.ancestors().nth(3).context("a benchmark in a target folder")?.to_owned())
}

fn build() -> Result<PathBuf> {
    Ok(release(&["vmm"])?.join("vmm"))
}

/// What ships is what is measured: where the release build of these packages is.
///
/// # Errors
///
/// When they cannot be built.
pub fn release(packages: &[&str]) -> Result<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&top).args(["build", "--quiet", "--release", "--bins"]);
    packages.iter().for_each(|name| _ = cargo.args(["--package", name]));
    // Packages whose parts are in C look at what cargo tells of a benchmark, and would be built
    // anew each time.
    for (name, _) in env::vars_os() {
        let told = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| told.iter().any(|it| name.starts_with(it))) {
            cargo.env_remove(name);
        }
    }
    ensure!(cargo.status().context("cargo")?.success(), "{} cannot be built", packages.join(", "));
    Ok(target()?.join("release"))
}

fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

fn ours(places: &Places, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = Command::new(&places.program);
    command.args(["run", "--memory", &format!("{MEMORY}M"), "--cmdline", words]);
    command.env("VMM_LOG", "off");
    for Disk { controller, path, direct } in equipment.disks {
        let kind = if *controller == Controller::Nvme { "nvme" } else { "virtio-blk" };
        let device = format!("{kind},path={},direct={}", path.display(), on(*direct));
        command.args(["--device", &device]);
    }
    if let Some(tap) = equipment.tap {
        command.args(["--device", &format!("virtio-net,to=tap:{tap}")]);
    }
    Ok(command)
}

/// io_uring is what it takes by itself, and a thread for each queue.
fn cloud_hypervisor(places: &Places, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = Command::new(&places.program);
    command.args(["--kernel", &places.kernel(), "--cmdline", words, "--cpus", "boot=1"]);
    let memory = format!("size={MEMORY}M,thp=on");
    command.args(["--memory", &memory, "--serial", "tty", "--console", "off"]);
    if !equipment.disks.is_empty() {
        command.arg("--disk");
    }
    for Disk { path, direct, .. } in equipment.disks {
        let (path, direct) = (path.display(), on(*direct));
        command.arg(format!("path={path},direct={direct},num_queues=1,image_type=raw"));
    }
    if let Some(tap) = equipment.tap {
        command.args(["--net", &format!("tap={tap}")]);
    }
    Ok(command)
}

/// Its devices are on PCI where it is told so, and its disks are io_uring's. Its log would come
/// between the words of the guest.
fn firecracker(places: &Places, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let path = places.folder.join("firecracker.json");
    let drive = |(number, disk): (usize, &Disk<'_>)| {
        json!({
            "drive_id": format!("disk{number}"),
            "path_on_host": disk.path,
            "is_root_device": false,
            "is_read_only": false,
            "cache_type": "Writeback",
            "io_engine": "Async",
        })
    };
    let drives: Vec<_> = equipment.disks.iter().enumerate().map(drive).collect();
    let networks = equipment.tap.map(|tap| [json!({ "iface_id": "net", "host_dev_name": tap })]);
    let config = json!({
        "boot-source": { "kernel_image_path": places.kernel(), "boot_args": words },
        "drives": drives,
        "network-interfaces": networks.as_ref().map_or(&[][..], |it| it),
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY },
    });
    fs::write(&path, config.to_string()).context("a configuration for firecracker")?;
    let mut command = Command::new(&places.program);
    command.args(["--no-api", "--log-path", "/dev/null", "--config-file"]).arg(path);
    if !equipment.disks.is_empty() || equipment.tap.is_some() {
        command.arg("--enable-pci");
    }
    Ok(command)
}

fn qemu(places: &Places, machine: &str, words: &str) -> Command {
    let mut command = Command::new(&places.program);
    // Some KVMs offer this feature and refuse to write its MSR, which ends QEMU.
    let processor = "host,-arch-capabilities";
    command.args(["-M", machine, "-accel", "kvm", "-cpu", processor, "-m", &format!("{MEMORY}")]);
    command.args(["-smp", "1", "-nodefaults", "-no-user-config", "-display", "none"]);
    command.args(["-serial", "stdio", "-kernel", &places.kernel(), "-append", words]);
    // Threads have names, by which the guest's processor is known.
    command.args(["-name", "bench,debug-threads=on"]);
    command
}

/// It has no PCI, and so none of what is asked for.
fn qemu_microvm(places: &Places, words: &str, _: &Equipment<'_>) -> Result<Command> {
    let machine = "microvm,pit=on,pic=on,rtc=on,isa-serial=on,auto-kernel-cmdline=off";
    Ok(qemu(places, machine, words))
}

/// io_uring, and a thread of its own that polls, where it can have one: NVMe is the main thread's.
fn qemu_q35(places: &Places, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = qemu(places, "q35", words);
    if equipment.disks.iter().any(|disk| disk.controller == Controller::Virtio) {
        command.args(["-object", "iothread,id=io"]);
    }
    for (number, Disk { controller, path, direct }) in equipment.disks.iter().enumerate() {
        let cache = if *direct { "none" } else { "writeback" };
        let file = path.display();
        let drive =
            format!("if=none,id=disk{number},format=raw,aio=io_uring,cache={cache},file={file}");
        let device = match controller {
            Controller::Nvme => format!("nvme,serial=bench,drive=disk{number}"),
            Controller::Virtio => format!("virtio-blk-pci,drive=disk{number},iothread=io"),
        };
        command.args(["-drive", &drive, "-device", &device]);
    }
    if let Some(tap) = equipment.tap {
        let vhost = on(equipment.vhost);
        let tap = format!("tap,id=net,ifname={tap},script=no,downscript=no,vhost={vhost}");
        command.args(["-netdev", &tap, "-device", "virtio-net-pci,netdev=net,romfile="]);
    }
    Ok(command)
}

#[cfg(test)]
impl Rival {
    /// The rival of this name, started by another program.
    pub(crate) fn known(name: &str, program: &str, folder: &Path) -> Self {
        let (name, _, note, make) = *KNOWN.iter().find(|it| it.0 == name).expect("a known rival");
        let places = Places { program: program.into(), folder: folder.to_owned() };
        Self { name, note, make, places }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// All that a program is told, in its arguments and in its file.
    fn told(name: &str, equipment: &Equipment<'_>) -> String {
        let folder = tempfile::tempdir().unwrap();
        let rival = Rival::known(name, name, folder.path());
        let command = rival.equipped("then=halt", equipment).unwrap();
        let arguments = command.get_args().map(|it| it.to_str().unwrap().to_owned());
        let file = fs::read_to_string(folder.path().join("firecracker.json")).unwrap_or_default();
        arguments.chain([file]).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_program_with_devices_is_told_of_its_disks_and_its_network() {
        let [one, other] = ["/one.img", "/other.img"].map(|path| Disk {
            controller: Controller::Virtio,
            path: Path::new(path),
            direct: false,
        });
        let equipment = Equipment { disks: &[one, other], tap: Some("tap7"), vhost: false };
        for name in ["vmm", "cloud-hypervisor", "firecracker", "qemu q35"] {
            let told = told(name, &equipment);
            for word in ["then=halt", "/one.img", "/other.img", "tap7"] {
                assert_eq!(told.matches(word).count(), 1, "{name}: {word}: {told}");
            }
        }
    }

    #[test]
    fn devices_are_asked_for_only_where_they_are_wanted() {
        for (name, words) in [
            ("vmm", &["--device"][..]),
            ("cloud-hypervisor", &["--disk", "--net"]),
            ("firecracker", &["--enable-pci", "drive_id", "iface_id"]),
            ("qemu q35", &["-object", "-drive", "-device", "-netdev"]),
        ] {
            let told = told(name, &Equipment::default());
            for word in words {
                assert!(!told.contains(word), "{name}: {word}: {told}");
            }
        }
    }

    #[test]
    fn the_page_cache_is_left_out_by_all_who_can() {
        let disk = |controller| Disk { controller, path: Path::new("/one.img"), direct: true };
        for (name, controller, words) in [
            ("vmm", Controller::Nvme, "nvme,path=/one.img,direct=on"),
            ("cloud-hypervisor", Controller::Virtio, "path=/one.img,direct=on,"),
            ("qemu q35", Controller::Virtio, "cache=none"),
        ] {
            let told = told(name, &Equipment { disks: &[disk(controller)], ..Default::default() });
            assert!(told.contains(words), "{name}: {told}");
        }
    }
}
