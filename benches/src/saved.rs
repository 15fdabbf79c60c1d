//! Machines that are saved, and go on in other processes: each program by its own means.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Result, bail};
use serde_json::json;
use vmm::control::{self, Client, Then, snapshot};

use crate::http;
use crate::machine::Machine;
use crate::qmp::Monitor;
use crate::rival::{OURS, Rival};

const PATIENCE: Duration = Duration::from_secs(60);

/// A program with the words for its guest.
pub struct Saver<'a> {
    pub rival: &'a Rival,
    pub words: &'a str,
    /// The folder of the snapshot, which is made.
    pub folder: PathBuf,
}

impl Saver<'_> {
    /// Boots the guest, and waits for its report.
    pub fn boot(&self, control: &Path) -> Result<Machine> {
        let mut machine = Machine::start(&mut self.rival.controlled(self.words, control)?)?;
        machine.report()?;
        Ok(machine)
    }

    /// Saves the machine, durably. Its process ends, or may be killed.
    pub fn save(&self, control: &Path) -> Result<()> {
        let folder = &self.folder;
        let [state, memory] = self.files();
        match self.rival.name {
            OURS => {
                let mut client = Client::connect_timeout(control, PATIENCE)?;
                // It makes the folder, and its snapshot is durable.
                return snapshot::save(&mut client, folder, Then::Quit, None).map(drop);
            }
            "cloud-hypervisor" => {
                fs::create_dir(folder)?;
                let to = json!({ "destination_url": self.address() });
                http::ask(control, "PUT", "/api/v1/vm.pause", None)?;
                http::ask(control, "PUT", "/api/v1/vm.snapshot", Some(&to))?;
            }
            "firecracker" => {
                fs::create_dir(folder)?;
                let to = json!({ "snapshot_path": state, "mem_file_path": memory });
                http::ask(control, "PATCH", "/vm", Some(&json!({ "state": "Paused" })))?;
                http::ask(control, "PUT", "/snapshot/create", Some(&to))?;
            }
            _ => {
                fs::create_dir(folder)?;
                let mut monitor = Monitor::connect(control)?;
                // Without these, it writes 32 MiB/s so that a guest can run on meanwhile, and again
                // what that has written. A guest that was stopped before would stay so when it is
                // restored.
                let limits = json!({ "max-bandwidth": 1_u64 << 40, "downtime-limit": 2_000_000 });
                monitor.ask("migrate-set-parameters", &limits)?;
                monitor.migrate(&format!("exec:cat > {}", memory.display()))?;
            }
        }
        for entry in fs::read_dir(folder)? {
            File::open(entry?.path())?.sync_all()?;
        }
        File::open(folder)?.sync_all()?;
        Ok(())
    }

    /// Starts another process, in which the guest goes on. Ours has the words `how` besides.
    pub fn restore(&self, control: &Path, how: &str) -> Result<Machine> {
        let [state, memory] = self.files();
        let mut command = Command::new(self.rival.command(self.words)?.get_program());
        match self.rival.name {
            OURS => {
                command.env("VMM_LOG", "off").args(["run", "--restore"]);
                command.arg(format!("{}{how}", self.folder.display()));
                Machine::start(command.arg("--control").arg(control))
            }
            "cloud-hypervisor" => {
                command.arg("--api-socket").arg(format!("path={}", control.display()));
                let from = format!("source_url={},resume=on", self.address());
                let lazily = format!("{from},memory_restore_mode=ondemand");
                Machine::start(command.arg("--restore").arg(lazily))
            }
            "firecracker" => {
                command.args(["--log-path", "/dev/null", "--api-sock"]).arg(control);
                let machine = Machine::start(&mut command)?;
                let memory = json!({ "backend_type": "File", "backend_path": memory });
                let from =
                    json!({ "snapshot_path": state, "mem_backend": memory, "resume_vm": true });
                http::ask(control, "PUT", "/snapshot/load", Some(&from))?;
                Ok(machine)
            }
            _ => {
                let mut command = self.rival.controlled(self.words, control)?;
                let from = format!("exec:cat {}", memory.display());
                Machine::start(command.args(["-incoming", &from]))
            }
        }
    }

    /// Whether the guest of a restored machine runs.
    pub fn runs(&self, control: &Path) -> Result<bool> {
        let state = match self.rival.name {
            OURS => {
                let mut client = Client::connect_timeout(control, PATIENCE)?;
                client.ask(&control::Command::Status)?["state"] == "running"
            }
            "cloud-hypervisor" => {
                http::ask(control, "GET", "/api/v1/vm.info", None)?["state"] == "Running"
            }
            "firecracker" => http::ask(control, "GET", "/", None)?["state"] == "Running",
            "qemu q35" | "qemu microvm" => {
                Monitor::connect(control)?.ask("query-status", &json!({}))?["status"] == "running"
            }
            other => bail!("{other} is not known"),
        };
        Ok(state)
    }

    /// Those of Firecracker; the second one is QEMU's, too.
    fn files(&self) -> [PathBuf; 2] {
        ["state", "memory"].map(|name| self.folder.join(name))
    }

    fn address(&self) -> String {
        format!("file://{}", self.folder.display())
    }
}
