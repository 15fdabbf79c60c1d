//! The compared programs. All run the same guest: the probe with 512 MiB and one processor.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use serde_json::json;
use tempfile::TempDir;

/// The name of our program in the tables.
pub const OURS: &str = "vmm";

/// Guest memory in MiB.
pub const MEMORY: u64 = 512;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Controller {
    Virtio,
    Nvme,
}

/// A disk: a raw file and its controller.
#[derive(Clone, Copy, Debug)]
pub struct Disk<'a> {
    pub controller: Controller,
    pub path: &'a Path,
    /// Whether requests bypass the page cache.
    pub direct: bool,
}

/// The devices of a machine besides its serial port.
#[derive(Clone, Copy, Debug, Default)]
pub struct Equipment<'a> {
    pub disks: &'a [Disk<'a>],
    /// The tap of the virtio network.
    pub tap: Option<&'a str>,
    /// Whether the kernel moves the network's frames (vhost-net), if the program supports it.
    pub vhost: bool,
}

pub struct Rival {
    pub name: &'static str,
    /// A note for readers of its figures.
    pub note: &'static str,
    make: Make,
    paths: Paths,
}

type Make = fn(&Paths, &str, &Equipment<'_>) -> Result<Command>;

struct Paths {
    program: PathBuf,
    folder: PathBuf,
}

impl Paths {
    fn kernel(&self) -> String {
        self.folder.join("probe.elf").display().to_string()
    }
}

impl Rival {
    /// The command that boots the probe with its first serial port on standard output.
    pub fn command(&self, words: &str) -> Result<Command> {
        self.equipped(words, &Equipment::default())
    }

    /// Like [`Self::command`], with disks or a network in the program's fastest configuration.
    pub fn equipped(&self, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
        (self.make)(&self.paths, words, equipment)
    }

    /// Like [`Self::command`], with the program's control interface at this socket.
    pub fn controlled(&self, words: &str, control: &Path) -> Result<Command> {
        let mut command = self.command(words)?;
        let path = control.display();
        match self.name {
            OURS => command.arg("--control").arg(control),
            "cloud-hypervisor" => command.arg("--api-socket").arg(format!("path={path}")),
            "firecracker" => {
                let words: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
                command = Command::new(command.get_program());
                command.args(words.iter().filter(|word| *word != "--no-api"));
                command.arg("--api-sock").arg(control)
            }
            _ => command.arg("-qmp").arg(format!("unix:{path},server=on,wait=off")),
        };
        Ok(command)
    }

    /// Whether the program supports this controller, and bypassing the page cache if `direct`.
    pub fn has(&self, controller: Controller, direct: bool) -> bool {
        match self.name {
            "cloud-hypervisor" => controller == Controller::Virtio,
            "firecracker" => controller == Controller::Virtio && !direct,
            _ => true,
        }
    }
}

/// Name, program, note, and the function that builds the command.
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

/// Finds the installed programs, ours first, and prints which ones are missing. Skips those in
/// `but`. The path of a program is in its variable (`TRANSOM_CLOUD_HYPERVISOR`, …), in the output
/// folder of `benches/peers`, or in `PATH`.
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
        let paths = Paths { program, folder: folder.path().to_owned() };
        found.push(Rival { name, note, make: *make, paths });
    }
    Ok(found)
}

fn in_path(program: &str) -> Option<PathBuf> {
    let paths = env::var_os("PATH")?;
    env::split_paths(&paths).map(|folder| folder.join(program)).find(|path| path.is_file())
}

/// Finds a program built by `benches/peers`.
fn built(program: &str) -> Result<Option<PathBuf>> {
    let path = target()?.join("peers").join(program);
    Ok(path.is_file().then_some(path))
}

/// The target folder. A benchmark's path is `target/release/deps/BENCH`.
fn target() -> Result<PathBuf> {
    let bench = env::current_exe()?;
    Ok(bench.ancestors().nth(3).context("a benchmark in a target folder")?.to_owned())
}

fn build() -> Result<PathBuf> {
    Ok(release(&["vmm"])?.join("vmm"))
}

/// Builds these packages for release, as they ship, and returns their folder.
pub fn release(packages: &[&str]) -> Result<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&top).args(["build", "--quiet", "--release", "--bins"]);
    packages.iter().for_each(|name| _ = cargo.args(["--package", name]));
    // Packages with parts in C depend on cargo's variables for a benchmark, and would be built
    // again each time.
    for (name, _) in env::vars_os() {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_"];
        if name.to_str().is_some_and(|name| prefixes.iter().any(|it| name.starts_with(it))) {
            cargo.env_remove(name);
        }
    }
    ensure!(cargo.status().context("cargo")?.success(), "{} cannot be built", packages.join(", "));
    Ok(target()?.join("release"))
}

fn on(yes: bool) -> &'static str {
    if yes { "on" } else { "off" }
}

fn ours(paths: &Paths, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = Command::new(&paths.program);
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

/// Cloud Hypervisor uses io_uring by default, and a thread for each queue.
fn cloud_hypervisor(paths: &Paths, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = Command::new(&paths.program);
    command.args(["--kernel", &paths.kernel(), "--cmdline", words, "--cpus", "boot=1"]);
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

/// Firecracker with devices on PCI, which must be enabled, and with io_uring for disks. Its log is
/// off, because it would mix with the guest's output.
fn firecracker(paths: &Paths, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let path = paths.folder.join("firecracker.json");
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
        "boot-source": { "kernel_image_path": paths.kernel(), "boot_args": words },
        "drives": drives,
        "network-interfaces": networks.as_ref().map_or(&[][..], |it| it),
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY },
    });
    fs::write(&path, config.to_string()).context("a configuration for firecracker")?;
    let mut command = Command::new(&paths.program);
    command.args(["--no-api", "--log-path", "/dev/null", "--config-file"]).arg(path);
    if !equipment.disks.is_empty() || equipment.tap.is_some() {
        command.arg("--enable-pci");
    }
    Ok(command)
}

fn qemu(paths: &Paths, machine: &str, words: &str) -> Command {
    let mut command = Command::new(&paths.program);
    // Some KVMs report this feature but refuse writes to its MSR, which makes QEMU exit.
    let processor = "host,-arch-capabilities";
    command.args(["-M", machine, "-accel", "kvm", "-cpu", processor, "-m", &format!("{MEMORY}")]);
    command.args(["-smp", "1", "-nodefaults", "-no-user-config", "-display", "none"]);
    command.args(["-serial", "stdio", "-kernel", &paths.kernel(), "-append", words]);
    // Name the threads, to recognize the vCPU's thread.
    command.args(["-name", "bench,debug-threads=on"]);
    command
}

/// The microvm machine has no PCI, and so no disks and no network.
fn qemu_microvm(paths: &Paths, words: &str, _: &Equipment<'_>) -> Result<Command> {
    let machine = "microvm,pit=on,pic=on,rtc=on,isa-serial=on,auto-kernel-cmdline=off";
    Ok(qemu(paths, machine, words))
}

/// The q35 machine with io_uring, and a polling I/O thread for virtio disks. NVMe runs on the main
/// thread.
fn qemu_q35(paths: &Paths, words: &str, equipment: &Equipment<'_>) -> Result<Command> {
    let mut command = qemu(paths, "q35", words);
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
        let paths = Paths { program: program.into(), folder: folder.to_owned() };
        Self { name, note, make, paths }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    /// The whole configuration of a program: its arguments and its file.
    fn configuration(name: &str, equipment: &Equipment<'_>) -> String {
        let folder = tempfile::tempdir().unwrap();
        let rival = Rival::known(name, name, folder.path());
        let command = rival.equipped("then=halt", equipment).unwrap();
        let arguments = command.get_args().map(|it| it.to_str().unwrap().to_owned());
        let file = fs::read_to_string(folder.path().join("firecracker.json")).unwrap_or_default();
        arguments.chain([file]).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn every_configuration_has_the_disks_and_the_network() {
        let [one, other] = ["/one.img", "/other.img"].map(|path| Disk {
            controller: Controller::Virtio,
            path: Path::new(path),
            direct: false,
        });
        let equipment = Equipment { disks: &[one, other], tap: Some("tap7"), vhost: false };
        for name in ["vmm", "cloud-hypervisor", "firecracker", "qemu q35"] {
            let text = configuration(name, &equipment);
            for word in ["then=halt", "/one.img", "/other.img", "tap7"] {
                assert_eq!(text.matches(word).count(), 1, "{name}: {word}: {text}");
            }
        }
    }

    #[test]
    fn devices_are_configured_only_if_requested() {
        for (name, words) in [
            ("vmm", &["--device"][..]),
            ("cloud-hypervisor", &["--disk", "--net"]),
            ("firecracker", &["--enable-pci", "drive_id", "iface_id"]),
            ("qemu q35", &["-object", "-drive", "-device", "-netdev"]),
        ] {
            let text = configuration(name, &Equipment::default());
            for word in words {
                assert!(!text.contains(word), "{name}: {word}: {text}");
            }
        }
    }

    #[test]
    fn direct_mode_bypasses_the_page_cache_where_supported() {
        let disk = |controller| Disk { controller, path: Path::new("/one.img"), direct: true };
        for (name, controller, words) in [
            ("vmm", Controller::Nvme, "nvme,path=/one.img,direct=on"),
            ("cloud-hypervisor", Controller::Virtio, "path=/one.img,direct=on,"),
            ("qemu q35", Controller::Virtio, "cache=none"),
        ] {
            let text = configuration(
                name,
                &Equipment { disks: &[disk(controller)], ..Default::default() },
            );
            assert!(text.contains(words), "{name}: {text}");
        }
    }
}
