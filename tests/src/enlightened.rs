//! The probe as a user of Hyper-V's interface: which of its checks must run, and with which result.

use std::process;

use anyhow::{Result, ensure};
use serde_json::Value;
use tempfile::TempDir;
use vmm::control::{Client, Command};

use crate::lab;
use crate::program::{self, PATIENCE, Running, connect};

/// The last output of a run of the probe.
const LAST: &str = "]}\n";
/// The line of the host's log about the crash that the probe reports at its end.
const CRASH: &str = "the guest crashed: 0x72616e736f6d0001 0x72616e736f6d0002 0x72616e736f6d0003 \
                     0x72616e736f6d0004 0x72616e736f6d0005";

const EVERYWHERE: &[&str] =
    &["hv-power-on", "hv-interface", "hv-index", "hv-clock", "hv-frequency", "hv-crash"];
const WITH_KVM: &[&str] = &[
    "hv-runtime",
    "hv-synic",
    "hv-one-shot",
    "hv-periodic",
    "hv-pending",
    "hv-direct",
    "hv-apic",
    "hv-assist",
    "hv-flush",
    "hv-ipi",
    "hv-connections",
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Kvm,
    Own,
}

impl Provider {
    /// The value of `--hyperv`.
    pub fn word(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Own => "own",
        }
    }

    /// Its name in names of tests.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Own => "ours",
        }
    }

    /// The machine's words for a Linux that uses it: KVM's own leaves are hidden.
    pub fn words(self) -> [&'static str; 4] {
        ["--hyperv", self.word(), "--features", "without=kvm"]
    }

    /// Whether it has synthetic timers in direct mode, VP assist pages, and hypercalls for TLB
    /// flushes and interrupts between processors.
    pub fn is_whole(self) -> bool {
        self == Self::Kvm
    }

    /// All checks that can work must have run and passed.
    pub fn examine(self, report: &Value) -> Result<()> {
        ensure!(report["ok"] == true && report["dropped"] == 0, "{report}");
        let found = |name: &str| {
            let all = report["findings"].as_array().into_iter().flatten();
            let mut named = all.filter(move |it| it["name"] == name);
            named.next().cloned().unwrap_or_default()
        };
        let with_kvm = WITH_KVM.iter().filter(|_| self.is_whole());
        for name in EVERYWHERE.iter().chain(with_kvm) {
            ensure!(found(name)["verdict"] == "pass", "{name}: {} in {report}", found(name));
        }
        let clock = found("hv-clock");
        ensure!(clock["by_page"] == clock["readings"], "the page is not valid: {clock}");
        Ok(())
    }
}

/// A machine whose guest uses Hyper-V's interface.
pub struct Enlightened {
    pub machine: Running,
    client: Client,
    provider: Provider,
    _folder: TempDir,
}

impl Enlightened {
    /// `words` are those of the probe.
    pub fn start(provider: Provider, processors: u32, words: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let socket = folder.path().join("control");
        let (path, count) = (socket.display().to_string(), processors.to_string());
        let mut all = vec!["run", "--control", &path, "--cpus", &count, "--cmdline", words];
        all.extend(["--hyperv", provider.word(), "--display", "none", "--memory", "256M"]);
        // The lab has cargo, but not the time to build in it.
        let program = if lab::inside() { lab::vmm()? } else { program::vmm().to_owned() };
        let machine = Running::spawn(process::Command::new(program).args(&all))?;
        let client = connect(&socket)?;
        Ok(Self { machine, client, provider, _folder: folder })
    }

    pub fn ask(&mut self, command: &Command) -> Result<Value> {
        self.client.ask(command)
    }

    /// Waits for this many runs, and examines all of them and the log.
    pub fn runs(&mut self, count: usize) -> Result<Vec<Value>> {
        self.machine.says(LAST, count)?;
        let output = self.machine.stdout.text();
        let lines = output.lines().filter(|line| line.starts_with("{\"probe\":1,"));
        let reports: Vec<Value> =
            lines.filter_map(|line| serde_json::from_str(line).ok()).collect();
        ensure!(reports.len() >= count, "{output}{}", self.machine.stderr.text());
        for report in &reports {
            self.provider.examine(report)?;
        }
        Ok(reports)
    }

    /// Ends the machine, which has reported the guest's crash.
    pub fn end(mut self) -> Result<()> {
        self.ask(&Command::Quit)?;
        let status = self.machine.wait(PATIENCE)?;
        let log = self.machine.stderr.text();
        ensure!(status == 0 && log.contains(CRASH), "status {status}: {log}");
        Ok(())
    }
}

/// The clocks agree while they run, also across a pause of the machine.
pub fn agrees_across_a_pause(provider: Provider, processors: u32) -> Result<()> {
    const PAUSE: std::time::Duration = std::time::Duration::from_secs(1);
    let mut it = Enlightened::start(provider, processors, "hyperv=4 then=halt")?;
    // The clocks are next.
    it.machine.says("hv-index", 1)?;
    it.ask(&Command::Pause)?;
    std::thread::sleep(PAUSE);
    it.ask(&Command::Resume)?;
    it.runs(1)?;
    it.end()
}

/// Each way to reset the machine gives it the registers of power-on.
pub fn is_clean_after(provider: Provider, processors: u32, reset: &str) -> Result<()> {
    let words = format!("hyperv=1 then={reset}");
    let mut it = Enlightened::start(provider, processors, &words)?;
    if reset == "halt" {
        it.runs(1)?;
        it.ask(&Command::Reset)?;
    }
    it.runs(2)?;
    it.end()
}
