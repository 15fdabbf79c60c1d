//! Runs the probe with all its checks and a device of each kind, and reads its report.

use anyhow::{Context, bail};
use serde::Serialize;
use serde_json::Value;

use super::acceleration::Costs;
use super::equipment;
use super::machine::{Limits, Machine, last_error};

/// The probe's report, and the exit costs in it.
#[derive(Debug, Serialize)]
pub(super) struct Checked {
    /// As the probe prints it (vmm/probe/guest/README.md).
    pub(super) report: Value,
    pub(super) exits: Vec<Exit>,
}

/// Cost of an exit from the guest, or of a wake-up, in nanoseconds.
#[derive(Debug, Serialize)]
pub(super) struct Exit {
    name: &'static str,
    min_ns: u64,
    median_ns: u64,
}

/// Name in the report, the probe's finding, its fields, and the meaning.
const EXITS: [(&str, &str, [&str; 2], &str); 6] = [
    ("cpuid", "exit-cpuid", ["min_ns", "median_ns"], "CPUID: to KVM and back"),
    ("port", "exit-port", ["min_ns", "median_ns"], "port: to this program and back"),
    ("mmio", "exit-mmio", ["min_ns", "median_ns"], "device memory: to this program and back"),
    ("eoi", "exit-eoi", ["min_ns", "median_ns"], "end of interrupt at the local APIC"),
    ("doorbell", "edu", ["min_ns", "median_ns"], "doorbell to interrupt, while the guest runs"),
    ("wake", "edu", ["wake_min_ns", "wake_median_ns"], "doorbell to interrupt, while it halts"),
];

/// Runs the probe, with or without Hyper-V's interface as Windows uses it.
pub(super) fn run(hyperv: bool, limits: Limits) -> anyhow::Result<Checked> {
    let disks = equipment::disks()?;
    let mut options = equipment::options(&disks);
    let (interface, checks) = if hyperv { ("on", "hyperv=1 ") } else { ("off", "") };
    let disk = "span=1M,depth=8,wait=interrupt";
    let words = format!(
        "{checks}bench=exits disk=write,{disk} disk=verify,{disk} net=send,count=1000 then=poweroff"
    );
    let processors = equipment::processors().to_string();
    options.extend(["--cpus", &processors, "--memory", "256M"].map(str::to_owned));
    options.extend(["--hyperv", interface, "--cmdline", &words].map(str::to_owned));
    let mut machine = Machine::start(&options, limits)?;
    let mut report = None;
    while let Some(line) = machine.next_line()? {
        if line.starts_with("{\"probe\"") {
            report = Some(serde_json::from_str::<Value>(&line).context("the probe's report")?);
        }
    }
    let (status, log) = machine.end()?;
    let Some(report) = report else { bail!(last_error(&log)) };
    if !status.success() {
        bail!("the machine ended with {status}: {}", last_error(&log));
    }
    let exits = exits(&report);
    Ok(Checked { report, exits })
}

fn find<'a>(report: &'a Value, name: &str) -> Option<&'a Value> {
    report["findings"].as_array()?.iter().find(|finding| finding["name"] == name)
}

fn exits(report: &Value) -> Vec<Exit> {
    let exit = |(name, finding, [min, median], _): (_, &str, [&str; 2], _)| {
        let finding = find(report, finding)?;
        let [min_ns, median_ns] = [finding[min].as_u64()?, finding[median].as_u64()?];
        Some(Exit { name, min_ns, median_ns })
    };
    EXITS.into_iter().filter_map(exit).collect()
}

impl Checked {
    /// The verdict of a person: whether all checks passed, and which did not.
    pub(super) fn verdict(&self) -> (bool, String) {
        for (key, what) in [("exception", "an exception"), ("panic", "a panic")] {
            if let Some(found) = self.report.get(key) {
                return (false, format!("{what} of the guest: {found}"));
            }
        }
        let all = self.report["findings"].as_array().map_or(&[][..], Vec::as_slice);
        let named = |verdict: &str| {
            let some = all.iter().filter(move |finding| finding["verdict"] == verdict);
            some.filter_map(|finding| finding["name"].as_str()).collect::<Vec<_>>()
        };
        let (failed, passed) = (named("fail"), named("pass").len());
        if failed.is_empty() && self.report["ok"] == true {
            return (true, format!("{passed} checks passed"));
        }
        let count = failed.len();
        (false, format!("{count} checks failed, {passed} passed: {}", failed.join(", ")))
    }

    pub(super) fn costs(&self) -> Option<Costs> {
        let median = |name| Some(self.exits.iter().find(|exit| exit.name == name)?.median_ns);
        Some(Costs { eoi_ns: median("eoi")?, cpuid_ns: median("cpuid")? })
    }
}

/// The lines of the report for people: costs without and with Hyper-V's interface.
pub(super) fn show_exits(plain: Option<&Checked>, hyperv: Option<&Checked>) -> String {
    let cost = |checked: Option<&Checked>, name| {
        let exit = checked.and_then(|it| it.exits.iter().find(|exit| exit.name == name));
        exit.map_or_else(|| "-".into(), |exit| format!("{:.2}", exit.median_ns as f64 / 1e3))
    };
    let mut text = String::from("\nExits (median in us)\n      plain  Hyper-V\n");
    for (name, .., meaning) in EXITS {
        let [plain, hyperv] = [plain, hyperv].map(|checked| cost(checked, name));
        text += &format!("  {plain:>9}{hyperv:>9}  {meaning}\n");
    }
    text
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    fn checked(report: Value) -> Checked {
        let exits = exits(&report);
        Checked { report, exits }
    }

    #[test]
    fn a_failed_check_is_named() {
        let findings = json!([
            { "name": "tsc", "verdict": "pass" }, { "name": "timer", "verdict": "fail" },
            { "name": "cpu", "verdict": "info" },
        ]);
        let found = checked(json!({ "probe": 1, "ok": false, "findings": findings }));
        assert_eq!(found.verdict(), (false, "1 checks failed, 1 passed: timer".into()));
        let found = checked(json!({ "probe": 1, "ok": false, "exception": { "vector": 13 } }));
        assert_eq!(found.verdict(), (false, "an exception of the guest: {\"vector\":13}".into()));
    }

    #[test]
    fn costs_of_exits_are_shown_in_microseconds() {
        let findings = json!([
            { "name": "exit-cpuid", "verdict": "info", "min_ns": 900, "median_ns": 1234 },
            { "name": "exit-eoi", "verdict": "info", "min_ns": 20, "median_ns": 31 },
        ]);
        let found = checked(json!({ "probe": 1, "ok": true, "findings": findings }));
        let costs = found.costs().unwrap();
        assert_eq!((costs.eoi_ns, costs.cpuid_ns), (31, 1234));
        let text = show_exits(Some(&found), None);
        assert!(text.contains("1.23        -  CPUID") && text.contains("0.03"), "{text}");
    }
}
