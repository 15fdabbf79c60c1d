//! The report of `doctor --run`, as JSON and as text. `report.schema.json` in this folder is its
//! schema: a change that readers notice raises the number.

use serde::Serialize;

use super::Findings;
use super::acceleration::Acceleration;
use super::checks::{self, Checked};
use super::host::Host;
use super::linux::Facts;
use crate::kvm::KvmSupport;
use crate::status::Status;

/// Version of the format.
const SCHEMA: u32 = 1;

#[derive(Debug, Serialize)]
pub struct Report {
    schema: u32,
    /// Date and time in UTC, as in RFC 3339.
    pub(super) date: String,
    pub(super) program: Program,
    /// 0 if everything works, 1 if something failed, 88 without KVM: the exit status.
    status: u8,
    pub(super) steps: Vec<Step>,
    /// The answer of `vmm doctor`, with the measurements of disk and tap.
    pub(super) kvm: Findings,
    pub(super) host: Host,
    pub(super) interrupts: Acceleration,
    pub(super) probe: Option<Checked>,
    pub(super) probe_with_hyperv: Option<Checked>,
    pub(super) linux: Option<Facts>,
    /// Duration of all steps.
    pub(super) seconds: f64,
}

#[derive(Debug, Serialize)]
pub(super) struct Program {
    version: &'static str,
    /// The commit that it was built from, if the build knew it.
    #[serde(skip_serializing_if = "Option::is_none")]
    commit: Option<&'static str>,
}

impl Program {
    pub(super) const THIS: Self =
        Self { version: env!("CARGO_PKG_VERSION"), commit: option_env!("TRANSOM_COMMIT") };
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Verdict {
    Passed,
    Failed,
    /// A condition of the step is missing, and `says` names it.
    Skipped,
}

#[derive(Debug, Serialize)]
pub(super) struct Step {
    pub(super) name: &'static str,
    pub(super) verdict: Verdict,
    pub(super) seconds: f64,
    pub(super) says: String,
}

impl Step {
    /// Verdict, time and sentence; the name precedes them.
    pub(super) fn show(&self) -> String {
        let verdict = match self.verdict {
            Verdict::Passed => "passed",
            Verdict::Failed => "FAILED",
            Verdict::Skipped => "skipped",
        };
        format!("{verdict:<8}{:>5.1} s  {}\n", self.seconds, self.says)
    }
}

/// The parts of a report, before its verdict.
pub(super) struct Parts {
    pub(super) date: String,
    pub(super) steps: Vec<Step>,
    pub(super) seconds: f64,
    pub(super) kvm: Findings,
    pub(super) host: Host,
    pub(super) probes: [Option<Checked>; 2],
    pub(super) linux: Option<Facts>,
}

impl Report {
    pub(super) fn new(parts: Parts) -> Self {
        let Parts { date, steps, seconds, kvm, host, probes, linux } = parts;
        let [plain, hyperv] = &probes;
        let costs = |checked: &Option<Checked>| checked.as_ref().and_then(Checked::costs);
        let interrupts = Acceleration::of(&host, costs(plain), costs(hyperv));
        let failed = steps.iter().any(|step| step.verdict == Verdict::Failed);
        let status = if failed && kvm.situation != KvmSupport::None {
            Status::Failed as u8
        } else {
            kvm.status()
        };
        let [probe, probe_with_hyperv] = probes;
        Self {
            schema: SCHEMA,
            date,
            program: Program::THIS,
            status,
            steps,
            kvm,
            host,
            interrupts,
            probe,
            probe_with_hyperv,
            linux,
            seconds,
        }
    }

    /// The exit status.
    pub fn status(&self) -> u8 {
        self.status
    }

    pub fn json(&self) -> anyhow::Result<String> {
        Ok(serde_json::to_string_pretty(self)? + "\n")
    }

    /// All sections for people, after the lines of the steps.
    pub fn text(&self) -> anyhow::Result<String> {
        let Program { version, commit } = &self.program;
        let commit = commit.map(|commit| format!(" ({commit})")).unwrap_or_default();
        let mut text = format!("\nReport of {}, vmm {version}{commit}\n\n", self.date);
        text += &self.kvm.show(false)?;
        text += &self.host.show();
        text += &format!("\nInterrupts\n{}", super::host::wrapped(&self.interrupts.says));
        if self.probe.is_some() || self.probe_with_hyperv.is_some() {
            let (plain, hyperv) = (self.probe.as_ref(), self.probe_with_hyperv.as_ref());
            text += &checks::show_exits(plain, hyperv);
        }
        text += &self.linux.as_ref().map(Facts::show).unwrap_or_default();
        text += &format!("\nVerdict after {:.0} s: {}\n", self.seconds, self.verdict());
        Ok(text)
    }

    fn verdict(&self) -> String {
        let named = |verdict: Verdict| {
            let steps = self.steps.iter().filter(move |step| step.verdict == verdict);
            steps.map(|step| step.name).collect::<Vec<_>>().join(", ")
        };
        let (failed, skipped) = (named(Verdict::Failed), named(Verdict::Skipped));
        let skipped = if skipped.is_empty() { skipped } else { format!(" (skipped: {skipped})") };
        match (self.kvm.situation, failed.as_str()) {
            (KvmSupport::None, _) => "this host has no usable KVM".into(),
            (KvmSupport::Paravirtual, "") => format!("the probe alone can run here{skipped}"),
            (_, "") => format!("everything that was tried works{skipped}"),
            (_, failed) => format!("FAILED: {failed}{skipped}"),
        }
    }
}
