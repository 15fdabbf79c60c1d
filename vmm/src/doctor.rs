//! `vmm doctor`: reports what this host can run and what is missing, and measures a disk and a tap.
//! With `--run`, it tries that on this host.

mod acceleration;
mod archive;
mod checks;
mod disk;
mod equipment;
mod firmware;
mod host;
mod linux;
mod machine;
mod net;
mod report;
mod tour;
mod trial;

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use kvm_ioctls::Kvm;
use serde::Serialize;

use self::machine::Limits;
pub use self::report::Report;
pub use self::tour::run;
use self::trial::Trial;
use crate::kvm::{self, CAPABILITIES, KvmSupport};
use crate::status::Status;

#[derive(Debug, Serialize)]
pub struct Findings {
    situation: KvmSupport,
    /// The situation in words, with the way out.
    says: String,
    runs: Vec<Runs>,
    capabilities: Vec<FoundCapability>,
    processors: u64,
    most_processors: u64,
    memory_free_mib: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    disk: Option<Trial>,
    #[serde(skip_serializing_if = "Option::is_none")]
    net: Option<Trial>,
}

#[derive(Clone, Debug)]
pub struct Targets {
    /// A disk, which is only read; or a folder or a new name, where a file is written.
    pub disk: Option<PathBuf>,
    /// The name of a tap.
    pub net: Option<String>,
    /// For `run`: the kernel to boot, by default that of this host.
    pub kernel: Option<PathBuf>,
    /// For `run`: the folder with the kernel's `modules.dep`, by default found by its release.
    pub modules: Option<PathBuf>,
    /// For `run`: the time for everything.
    pub limit: Duration,
}

#[derive(Debug, Serialize)]
struct Runs {
    what: &'static str,
    works: bool,
}

#[derive(Debug, Serialize)]
struct FoundCapability {
    name: &'static str,
    there: bool,
    required: bool,
    purpose: &'static str,
}

/// Examines the host, and measures the disk and the tap if they are given.
pub fn examine(targets: &Targets) -> anyhow::Result<Findings> {
    let mut findings = examine_host();
    // Without KVM there is no machine to measure with, and the table shows this.
    if findings.situation != KvmSupport::None {
        findings.disk = measure(targets.disk.as_deref(), disk::measure)?;
        findings.net = measure(targets.net.as_deref(), net::measure)?;
    }
    Ok(findings)
}

fn measure<T: ?Sized>(
    target: Option<&T>,
    how: fn(&T, Limits) -> anyhow::Result<Trial>,
) -> anyhow::Result<Option<Trial>> {
    target.map(|target| how(target, Limits::PATIENT)).transpose()
}

fn examine_host() -> Findings {
    let situation = KvmSupport::of_this_host();
    let kvm = kvm::open();
    let checked = kvm
        .as_ref()
        .map_err(ToString::to_string)
        .and_then(|kvm| kvm::check(kvm).map_err(|error| error.to_string()));
    let says = match (&checked, situation) {
        (Err(error), _) => error.clone(),
        (Ok(()), KvmSupport::Paravirtual) => kvm::PARAVIRTUAL.to_owned(),
        (Ok(()), _) => "this host has full KVM".to_owned(),
    };
    let kvm = kvm.ok();
    let full = checked.is_ok() && situation == KvmSupport::Full;
    let runs = vec![
        Runs { what: "the probe", works: checked.is_ok() },
        // Each line names what was tested, so that a capability is not taken for a promise.
        Runs {
            what: "UEFI firmware and Linux (tried on AMD SVM and Intel VMX, both emulated)",
            works: full,
        },
        Runs {
            what: "the Hyper-V interface for Windows, in KVM (Windows itself was not tried)",
            works: full && kvm.as_ref().is_some_and(kvm::has_hyperv),
        },
        Runs {
            what: "its clocks and crash reports without KVM's help (`--hyperv own`)",
            works: full && kvm.as_ref().is_some_and(kvm::allows_own_hyperv),
        },
        Runs {
            what: "firmware that needs SMM (`--smm on`)",
            works: full && kvm.as_ref().is_some_and(|kvm| kvm::smm::check(kvm).is_ok()),
        },
    ];
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let free = free.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    Findings {
        situation: if checked.is_ok() { situation } else { KvmSupport::None },
        says,
        runs,
        capabilities: capabilities(kvm.as_ref()),
        processors: std::thread::available_parallelism().map_or(1, |count| count.get() as u64),
        most_processors: kvm.as_ref().map_or(0, |kvm| kvm.get_max_vcpus() as u64),
        memory_free_mib: free.unwrap_or(0) >> 10,
        disk: None,
        net: None,
    }
}

fn capabilities(kvm: Option<&Kvm>) -> Vec<FoundCapability> {
    let found = |it: &kvm::Capability| FoundCapability {
        name: it.name,
        there: kvm.is_some_and(|kvm| it.is_there(kvm)),
        required: it.required,
        purpose: it.purpose,
    };
    CAPABILITIES.iter().map(found).collect()
}

impl Findings {
    /// The exit status: 0 if everything works that this version supports, 1 if only the probe works
    /// or a disk or tap fails, 88 if nothing works.
    pub fn status(&self) -> u8 {
        let broken = [&self.disk, &self.net].into_iter().flatten().any(|trial| !trial.works);
        let status = match self.situation {
            KvmSupport::Full if !broken => Status::Off,
            KvmSupport::Full | KvmSupport::Paravirtual => Status::Failed,
            KvmSupport::None => Status::NoKvm,
        };
        status as u8
    }

    /// Returns a table, or JSON.
    pub fn show(&self, json: bool) -> anyhow::Result<String> {
        if json {
            return Ok(serde_json::to_string_pretty(self)? + "\n");
        }
        let mut text = String::new();
        writeln!(text, "KVM: {}\n", self.says)?;
        for runs in &self.runs {
            writeln!(text, "  {} {}", if runs.works { "yes" } else { "no " }, runs.what)?;
        }
        writeln!(text, "\nCapabilities")?;
        for found in &self.capabilities {
            let there = match (found.there, found.required) {
                (true, _) => "yes",
                (false, true) => "MISSING",
                (false, false) => "no",
            };
            writeln!(text, "  {there:<8}{:<20}{}", found.name, found.purpose)?;
        }
        writeln!(
            text,
            "\nHost\n  {} processors (a machine may have {}), {} MiB of memory free",
            self.processors, self.most_processors, self.memory_free_mib
        )?;
        for (what, trial) in [("Disk", &self.disk), ("Network", &self.net)] {
            text += &trial.as_ref().map(|trial| trial.show(what)).unwrap_or_default();
        }
        Ok(text)
    }
}
