//! `vmm doctor --run`: the recipe. Each step has a time limit, so that a hang of a guest or a
//! device is a finding and not a hang of this command.

use std::time::{Duration, Instant};

use jiff::Timestamp;

use super::checks::{self, Checked};
use super::host::Host;
use super::machine::Limits;
use super::report::{Parts, Report, Step, Verdict};
use super::trial::Trial;
use super::{Targets, disk, examine_host, firmware, linux, net};
use crate::kvm::KvmSupport;

/// The part of the time that is for steps: the report must be there, too, when it is over.
const STEPS: f64 = 0.93;
/// Limits for one step, as parts of the time. A step is not begun with less than half of its own.
const PROBE: f64 = 0.25;
const LINUX: f64 = 0.5;
const FIRMWARE: f64 = 0.33;
const DISK: f64 = 0.25;
const NET: f64 = 0.13;

/// A step's sentence. `Skip` is for a missing condition.
enum Outcome {
    Done((bool, String)),
    Skip(String),
}

struct Tour<'a> {
    start: Instant,
    /// The time for everything.
    limit: Duration,
    steps: Vec<Step>,
    /// Shows progress: text, not always a whole line.
    tell: &'a mut dyn FnMut(&str),
}

impl Tour<'_> {
    fn step(
        &mut self,
        name: &'static str,
        part: f64,
        action: impl FnOnce(Limits) -> anyhow::Result<Outcome>,
    ) {
        (self.tell)(&format!("  {name:<18}"));
        let begun = Instant::now();
        let limit = self.limit.mul_f64(part);
        let left = self.limit.mul_f64(STEPS).saturating_sub(self.start.elapsed());
        let outcome = if left < limit / 2 {
            Ok(Outcome::Skip("no time is left: --seconds gives more".into()))
        } else {
            action(Limits::until(begun + limit.min(left)))
        };
        let (verdict, says) = match outcome {
            Ok(Outcome::Done((true, says))) => (Verdict::Passed, says),
            Ok(Outcome::Done((false, says))) => (Verdict::Failed, says),
            Ok(Outcome::Skip(says)) => (Verdict::Skipped, says),
            Err(error) => (Verdict::Failed, format!("{error:#}")),
        };
        let step = Step { name, verdict, seconds: tenths(begun.elapsed()), says };
        (self.tell)(&step.show());
        self.steps.push(step);
    }
}

fn tenths(time: Duration) -> f64 {
    (time.as_secs_f64() * 10.0).round() / 10.0
}

/// Tries everything on this host. `tell` shows progress.
pub fn run(targets: &Targets, tell: &mut dyn FnMut(&str)) -> Report {
    let mut kvm = examine_host();
    let host = Host::examine();
    let situation = kvm.situation;
    let mut tour = Tour { start: Instant::now(), limit: targets.limit, steps: Vec::new(), tell };
    let mut probes = [None, None];
    let [plain, hyperv] = &mut probes;
    tour.step("probe", PROBE, |limits| probe(plain, situation, false, limits));
    tour.step("probe on Hyper-V", PROBE, |limits| probe(hyperv, situation, true, limits));
    let mut facts = None;
    tour.step("Linux", LINUX, |limits| boot(&mut facts, situation, targets, limits));
    tour.step("firmware", FIRMWARE, |limits| start_firmware(situation, limits));
    if let Some(path) = &targets.disk {
        tour.step("disk", DISK, |limits| {
            measured(&mut kvm.disk, situation, || disk::measure(path, limits))
        });
    }
    if let Some(tap) = &targets.net {
        tour.step("network", NET, |limits| {
            measured(&mut kvm.net, situation, || net::measure(tap, limits))
        });
    }
    let Tour { start, steps, .. } = tour;
    let date = Timestamp::now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
    let seconds = tenths(start.elapsed());
    Report::new(Parts { date, steps, seconds, kvm, host, probes, linux: facts })
}

fn probe(
    to: &mut Option<Checked>,
    situation: KvmSupport,
    hyperv: bool,
    limits: Limits,
) -> anyhow::Result<Outcome> {
    if let Some(skip) = impossible(situation, hyperv) {
        return Ok(skip);
    }
    let checked = to.insert(checks::run(hyperv, limits)?);
    Ok(Outcome::Done(checked.verdict()))
}

fn boot(
    to: &mut Option<linux::Facts>,
    situation: KvmSupport,
    targets: &Targets,
    limits: Limits,
) -> anyhow::Result<Outcome> {
    if let Some(skip) = impossible(situation, true) {
        return Ok(skip);
    }
    match linux::find(targets.kernel.as_deref(), targets.modules.as_deref()) {
        Err(says) => Ok(Outcome::Skip(says)),
        Ok(kernel) => Ok(Outcome::Done(to.insert(linux::run(&kernel, limits)?).verdict())),
    }
}

fn start_firmware(situation: KvmSupport, limits: Limits) -> anyhow::Result<Outcome> {
    if let Some(skip) = impossible(situation, true) {
        return Ok(skip);
    }
    match firmware::find() {
        Err(says) => Ok(Outcome::Skip(says)),
        Ok(files) => Ok(Outcome::Done((true, firmware::run(&files, limits)?))),
    }
}

fn measured(
    to: &mut Option<Trial>,
    situation: KvmSupport,
    measure: impl FnOnce() -> anyhow::Result<Trial>,
) -> anyhow::Result<Outcome> {
    if let Some(skip) = impossible(situation, false) {
        return Ok(skip);
    }
    let trial = to.insert(measure()?);
    Ok(Outcome::Done((trial.works, trial.says.clone())))
}

/// Skips steps for which this host's KVM does not suffice.
fn impossible(situation: KvmSupport, needs_all: bool) -> Option<Outcome> {
    match situation {
        KvmSupport::None => Some(Outcome::Skip("there is no usable KVM".into())),
        KvmSupport::Paravirtual if needs_all => {
            Some(Outcome::Skip("this host's KVM only emulates kernels (no VMX or SVM)".into()))
        }
        KvmSupport::Full | KvmSupport::Paravirtual => None,
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_step_without_time_is_skipped_and_an_error_is_a_failure() {
        let mut told = String::new();
        let mut tell = |text: &str| told += text;
        let limit = Duration::from_secs(60);
        let steps = Vec::new();
        let mut tour = Tour { start: Instant::now(), limit, steps, tell: &mut tell };
        tour.step("good", NET, |limits| {
            assert!(limits.is_short());
            Ok(Outcome::Done((true, "fine".into())))
        });
        tour.step("bad", NET, |_| anyhow::bail!("hangs"));
        tour.start = Instant::now().checked_sub(limit).unwrap();
        tour.step("late", NET, |_| anyhow::bail!("was begun"));
        let found: Vec<_> = tour.steps.iter().map(|step| (step.name, step.verdict)).collect();
        let wanted =
            [("good", Verdict::Passed), ("bad", Verdict::Failed), ("late", Verdict::Skipped)];
        assert_eq!(found, wanted);
        assert!(told.contains("FAILED") && told.contains("hangs"), "{told}");
    }
}
