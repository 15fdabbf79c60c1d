//! The programs that are compared, each with the same guest: the probe, 512 MiB, one processor.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

/// MiB of guest memory.
pub const MEMORY: u64 = 512;

/// A program, and how it starts the probe with these words.
pub struct Rival {
    /// What the table calls it.
    pub name: &'static str,
    /// What one should know of it when one reads its figures.
    pub note: &'static str,
    make: fn(&Places, &str) -> Result<Command>,
    places: Places,
}

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
        (self.make)(&self.places, words)
    }
}

/// Name, program, note, and how it is started.
type Known = (&'static str, &'static str, &'static str, fn(&Places, &str) -> Result<Command>);

const KNOWN: &[Known] = &[
    ("vmm", "vmm", "", ours),
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
/// where its variable says (`TRANSOM_CLOUD_HYPERVISOR`, …), or else in `PATH`.
///
/// # Errors
///
/// When ours cannot be built.
pub fn rivals(folder: &TempDir, but: &[&str]) -> Result<Vec<Rival>> {
    fs::write(folder.path().join("probe.elf"), vmm::probe::IMAGE).context("the probe")?;
    let mut found = Vec::new();
    for (name, program, note, make) in KNOWN {
        if but.contains(name) {
            continue;
        }
        let variable = format!("TRANSOM_{}", program.to_uppercase().replace('-', "_"));
        let found_program = match env::var_os(&variable) {
            Some(path) => Some(PathBuf::from(path)),
            None if *program == "vmm" => Some(build()?),
            None => in_path(program),
        };
        let Some(program) = found_program else {
            eprintln!("not compared: {name} is neither in {variable} nor in PATH");
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

/// What ships is what is measured: the release build.
fn build() -> Result<PathBuf> {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut cargo = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.current_dir(&top).args(["build", "--quiet", "--release", "--package", "vmm"]);
    ensure!(cargo.status().context("cargo")?.success(), "vmm cannot be built");
    // target/release/deps/BENCH
    let bench = env::current_exe()?;
    let target = bench.ancestors().nth(3).context("a benchmark in a target folder")?;
    Ok(target.join("release/vmm"))
}

fn ours(places: &Places, words: &str) -> Result<Command> {
    let mut command = Command::new(&places.program);
    command.args(["run", "--memory", &format!("{MEMORY}M"), "--cmdline", words]);
    command.env("VMM_LOG", "off");
    Ok(command)
}

fn cloud_hypervisor(places: &Places, words: &str) -> Result<Command> {
    let mut command = Command::new(&places.program);
    command.args(["--kernel", &places.kernel(), "--cmdline", words, "--cpus", "boot=1"]);
    let memory = format!("size={MEMORY}M,thp=on");
    command.args(["--memory", &memory, "--serial", "tty", "--console", "off"]);
    Ok(command)
}

fn firecracker(places: &Places, words: &str) -> Result<Command> {
    let path = places.folder.join("firecracker.json");
    let config = serde_json::json!({
        "boot-source": { "kernel_image_path": places.kernel(), "boot_args": words },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": MEMORY },
    });
    fs::write(&path, config.to_string()).context("a configuration for firecracker")?;
    let mut command = Command::new(&places.program);
    command.args(["--no-api", "--config-file"]).arg(path);
    Ok(command)
}

fn qemu(places: &Places, machine: &str, words: &str) -> Command {
    let mut command = Command::new(&places.program);
    command.args(["-M", machine, "-accel", "kvm", "-cpu", "host", "-m", &format!("{MEMORY}")]);
    command.args(["-smp", "1", "-nodefaults", "-no-user-config", "-display", "none"]);
    command.args(["-serial", "stdio", "-kernel", &places.kernel(), "-append", words]);
    command
}

fn qemu_microvm(places: &Places, words: &str) -> Result<Command> {
    Ok(qemu(places, "microvm,pit=on,pic=on,rtc=on,isa-serial=on,auto-kernel-cmdline=off", words))
}

fn qemu_q35(places: &Places, words: &str) -> Result<Command> {
    Ok(qemu(places, "q35", words))
}
