//! Programs of Windows that scripts of an installation run.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::{fs, os::unix::fs::symlink};

use anyhow::{Context as _, ensure};

use super::console::say;
use super::drivers::{self, Package};
use super::registry::Registry;

pub(crate) const SERVICES: &str = "HKLM\\SYSTEM\\CurrentControlSet\\Services";
pub(crate) const AGENT: &str = "QEMU-GA";
const BALLOON: &str = "BalloonService";
/// The PCI identity of the device with the agent's port.
const SERIAL: &str = "VEN_1AF4&DEV_1043";
/// The status of `sc.exe` if a service does not exist.
const NO_SERVICE: i32 = 1060;
/// Programs whose effect no later step needs: their first argument.
const ACCEPTED: [(&str, &[&str]); 6] = [
    ("powercfg.exe", &["/hibernate", "/change", "/setacvalueindex", "/setactive"]),
    ("bcdedit.exe", &["/set"]),
    ("net.exe", &["accounts"]),
    ("netsh.exe", &["advfirewall"]),
    ("cscript.exe", &["//nologo"]),
    ("w32tm.exe", &["/resync"]),
];
/// The program that the agent runs for a shutdown.
const SHUTDOWN: &str = "#!/bin/sh
echo 'windows: the agent was asked to shut down' > /dev/console
sync
umount /drive/c
poweroff -f
";

/// Where programs run.
pub(crate) struct Machine<'a> {
    /// The place of C:.
    pub(crate) drive: &'a Path,
    /// The file of a path of Windows.
    pub(crate) files: &'a dyn Fn(&str) -> PathBuf,
}

impl Machine<'_> {
    /// Runs a program, and returns its status. `None`: it is not rehearsed.
    pub(crate) fn run(
        &self,
        name: &str,
        words: &[String],
        registry: &mut Registry,
    ) -> Option<anyhow::Result<i32>> {
        let name = name.rsplit('\\').next().unwrap_or(name);
        let first = words.first().map(String::as_str).unwrap_or_default();
        let known = ACCEPTED.iter().find(|(it, _)| *it == name);
        if known.is_some_and(|(_, arguments)| arguments.contains(&first)) {
            return Some(Ok(0));
        }
        match (name, words) {
            ("reg.exe", _) => Some(registry.command(words).map(|()| 0)),
            ("sc.exe", [query, service]) if query == "query" => {
                Some(Ok(if registry.is_set(SERVICES, service) { 0 } else { NO_SERVICE }))
            }
            ("blnsvr.exe", [install]) if install == "-i" => {
                registry.set(SERVICES, BALLOON, "1");
                Some(Ok(0))
            }
            ("pnputil.exe", [install, add, inf]) if install == "-i" && add == "-a" => {
                Some(self.add_driver(inf))
            }
            ("msiexec.exe", [install, file, ..]) if install == "/i" => {
                Some(self.install(file, registry))
            }
            _ => None,
        }
    }

    fn add_driver(&self, inf: &str) -> anyhow::Result<i32> {
        let inf = (self.files)(inf);
        let packages = drivers::packages(inf.parent().context("no folder")?)?;
        ensure!(!packages.is_empty(), "no driver package");
        drivers::store(&packages, self.drive)?;
        drivers::load(&packages)?;
        Ok(0)
    }

    fn install(&self, file: &str, registry: &mut Registry) -> anyhow::Result<i32> {
        ensure!((self.files)(file).is_file(), "no such file");
        ensure!(file.to_ascii_lowercase().ends_with("qemu-ga-x86_64.msi"), "not rehearsed");
        registry.set(SERVICES, AGENT, "1");
        start_agent(&drivers::stored(self.drive)?)?;
        Ok(0)
    }
}

/// Starts the guest agent, which needs the driver of its port.
pub(crate) fn start_agent(packages: &[Package]) -> anyhow::Result<()> {
    if !drivers::served(packages)?.contains(&SERIAL) {
        say!("the guest agent has no port");
        return Ok(());
    }
    let ports = Path::new("/dev/virtio-ports");
    fs::create_dir_all(ports)?;
    for entry in fs::read_dir("/sys/class/virtio-ports")?.flatten() {
        let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
        symlink(Path::new("/dev").join(entry.file_name()), ports.join(name.trim())).ok();
    }
    fs::create_dir_all("/sbin")?;
    fs::create_dir_all("/etc")?;
    fs::write("/etc/os-release", "PRETTY_NAME=\"Windows\"\n")?;
    fs::write("/sbin/shutdown", SHUTDOWN)?;
    super::tool::busybox(&["chmod", "755", "/sbin/shutdown"])?;
    let mut agent = Command::new("/bin/qemu-ga");
    agent.args(["--statedir", "/run"]).stdin(Stdio::null());
    let mut agent = agent.spawn().context("the guest agent")?;
    thread::spawn(move || agent.wait());
    say!("the guest agent runs");
    Ok(())
}
