//! The balloon. While the host is short of memory, the guest is asked to give up some of its
//! memory. It gets it back later.
//!
//! The amount is a function of readings: a controller with a proportional and an integral part
//! follows the share of memory in use, of the host and of the pod's control group. With a guest
//! that has no driver this has no effect.

use std::path::{Path, PathBuf};
use std::time::Duration;

use host::size::Size;
use tokio::task::JoinHandle;
use tokio::time::sleep;
use vmm::control::Command;

use super::machine_client;
use crate::settings::balloon::{Balloon as Settings, Debug, MinimumMemory};
use crate::settings::host::MemoryLoad;
use crate::settings::value::{MIB, Value as _};

/// Free memory to leave in a control group: beyond its limit the kernel kills the machine.
const MARGIN: u64 = 128 * MIB;

/// The controller, a function of the readings so far.
#[derive(Clone, Debug)]
struct Controller {
    settings: Settings,
    /// Bytes of the machine without a balloon, and the minimum for its guest.
    memory: u64,
    minimum: u64,
    /// The integral: percent above the threshold, times seconds.
    sum: f64,
    /// Bytes that the guest currently has.
    target: u64,
}

impl Controller {
    fn new(settings: &Settings, memory: u64) -> Self {
        let minimum = match settings.minimum {
            MinimumMemory::Percent(share) => part(memory, share),
            MinimumMemory::Bytes(size) => size.0,
        };
        let minimum = minimum.min(memory);
        Self { settings: settings.clone(), memory, minimum, sum: 0.0, target: memory }
    }

    /// Returns the new amount for the guest if it should change.
    fn step(&mut self, load: &MemoryLoad) -> Option<u64> {
        let (used, total) = narrowest(load);
        let pressure = load.pressure.unwrap_or(0.0);
        let max = self.memory - self.minimum;
        let settings = &self.settings;
        let hasty = used >= settings.threshold_hard.0 || pressure >= settings.pressure_max.0;
        // Memory pressure counts even before the share in use is high.
        let waits = pressure > settings.pressure.0;
        let over = used - settings.threshold.0;
        let over = if waits { over.max(pressure - settings.pressure.0) } else { over };
        let taken = if hasty {
            max
        } else {
            let seconds = f64::from(settings.interval.0);
            let (kp, ki) = (settings.proportional.0, settings.integral.0);
            // Bounded, so that the sum does not take long to shrink again.
            let full = percent(max, total);
            let bound = if ki > 0.0 { full / ki } else { 0.0 };
            self.sum = (self.sum + over * seconds).clamp(0.0, bound);
            part(total, (kp * over + ki * self.sum).clamp(0.0, full)).min(max)
        };
        let wanted = (self.memory - taken) / MIB * MIB;
        // Return nothing to the guest while other processes wait for memory.
        let wanted = if waits { wanted.min(self.target) } else { wanted };
        let wanted = wanted.clamp(self.minimum, self.memory);
        let end = wanted == self.memory || wanted == self.minimum;
        let far = wanted.abs_diff(self.target) >= settings.hysteresis.0;
        (wanted != self.target && (far || end)).then_some(wanted)
    }
}

/// Percent in use, of the host or of the control group, whichever is shorter of memory; and its
/// size.
fn narrowest(load: &MemoryLoad) -> (f64, u64) {
    let host = (percent(load.total.saturating_sub(load.free), load.total), load.total);
    let group = load.group.map(|(limit, free)| {
        let used = limit.saturating_sub(free).saturating_add(MARGIN);
        (percent(used, limit), limit)
    });
    group.filter(|group| group.0 > host.0).unwrap_or(host)
}

fn percent(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 * 100.0 / whole as f64 }
}

fn part(whole: u64, percent: f64) -> u64 {
    let thousandths =
        Duration::try_from_secs_f64(percent.max(0.0)).map_or(u128::MAX, |it| it.as_millis());
    let part = u128::from(whole).saturating_mul(thousandths) / 100_000;
    u64::try_from(part).unwrap_or(u64::MAX)
}

/// Controls the balloon of a running machine until this is dropped.
pub struct Balloon {
    task: JoinHandle<()>,
    control: PathBuf,
    memory: u64,
}

impl Balloon {
    pub fn start(settings: &Settings, memory: u64, control: &Path) -> Option<Self> {
        let controller = settings.on.then(|| Controller::new(settings, memory))?;
        let task = tokio::spawn(control_loop(controller, control.to_owned()));
        Some(Self { task, control: control.to_owned(), memory })
    }

    /// The guest needs all its memory to shut down.
    pub fn give_back(self) {
        self.task.abort();
        let (control, memory) = (self.control.clone(), self.memory);
        tokio::spawn(async move { ask(&control, memory).await });
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn control_loop(mut controller: Controller, control: PathBuf) {
    let pause = Duration::from_secs(u64::from(controller.settings.interval.0));
    let debug = controller.settings.debug;
    loop {
        sleep(pause).await;
        let Some(load) = MemoryLoad::read(Path::new("/")) else { continue };
        let wanted = controller.step(&load);
        if matches!(debug, Debug::All | Debug::Controller) {
            let (used, _) = narrowest(&load);
            let (sum, target) = (controller.sum, Size(wanted.unwrap_or(controller.target)).show());
            tracing::info!("balloon: {used:.1}% used, sum {sum:.1}, the guest has {target}");
        }
        let Some(wanted) = wanted else { continue };
        let done = ask(&control, wanted).await;
        if matches!(debug, Debug::All | Debug::Asked) {
            tracing::info!("balloon: {} asked for: {done:?}", Size(wanted).show());
        }
        if done.is_ok() {
            controller.target = wanted;
        }
    }
}

/// Sets the guest's memory.
async fn ask(control: &Path, bytes: u64) -> anyhow::Result<()> {
    let words = ["balloon".to_owned(), format!("{}M", bytes / MIB)];
    machine_client::ask(control, Command::read(&words)?).await.map(drop)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::environment::{Environment, read};

    const GIB: u64 = 1 << 30;

    /// A controller for 4 GiB with the reference image's settings.
    fn usual() -> Controller {
        let settings = read(&Environment::new()).unwrap().settings.balloon;
        Controller::new(&settings, 4 * GIB)
    }

    /// A host of nearly 16 GiB with this share in use.
    fn host(used: u64) -> MemoryLoad {
        let total = 100 * 160 * MIB;
        MemoryLoad { total, free: total / 100 * (100 - used), ..MemoryLoad::default() }
    }

    /// Takes a reading and applies the result.
    fn go(controller: &mut Controller, load: &MemoryLoad) -> u64 {
        controller.target = controller.step(load).unwrap_or(controller.target);
        controller.target
    }

    #[test]
    fn takes_no_memory_while_the_host_has_room() {
        let mut controller = usual();
        for used in [0, 50, 79, 80] {
            assert_eq!(controller.step(&host(used)), None, "{used}");
        }
        assert!(controller.sum < 0.001, "{}", controller.sum);
    }

    #[test]
    fn takes_more_memory_under_lasting_pressure_and_returns_it() {
        let mut controller = usual();
        let first = go(&mut controller, &host(85));
        assert!(first < 4 * GIB && first > 3 * GIB, "{first}");
        let second = go(&mut controller, &host(85));
        assert!(second < first, "{second}");
        for _ in 0..100 {
            go(&mut controller, &host(85));
        }
        assert_eq!(controller.target, controller.minimum);
        // The sum is bounded by the guest's memory, so the controller reacts at once.
        assert!(go(&mut controller, &host(70)) > controller.minimum);
        for _ in 0..20 {
            go(&mut controller, &host(60));
        }
        assert_eq!((controller.target, controller.sum), (4 * GIB, 0.0));
    }

    #[test]
    fn takes_all_above_the_hard_limits_down_to_the_minimum() {
        let mut controller = usual();
        assert_eq!(go(&mut controller, &host(90)), controller.minimum);
        assert_eq!(controller.minimum, part(4 * GIB, 33.0));
        let mut controller = usual();
        let load = MemoryLoad { pressure: Some(50.0), ..host(10) };
        assert_eq!(go(&mut controller, &load), controller.minimum);
    }

    #[test]
    fn memory_pressure_counts_like_memory_use() {
        let mut controller = usual();
        let load = MemoryLoad { pressure: Some(20.0), ..host(60) };
        let taken = go(&mut controller, &load);
        assert!(taken < 4 * GIB, "{taken}");
        // Nothing is returned while the pressure lasts.
        let load = MemoryLoad { pressure: Some(10.5), ..host(10) };
        assert_eq!(go(&mut controller, &load), taken);
        assert!(go(&mut controller, &host(10)) > taken);
    }

    #[test]
    fn small_changes_are_skipped_except_at_the_limits() {
        let mut controller = usual();
        controller.settings.integral.0 = 0.0;
        // Half of 1 % of nearly 16 GiB is less than 128 MiB.
        assert_eq!(controller.step(&host(81)), None);
        assert!(go(&mut controller, &host(82)) < 4 * GIB);
        assert_eq!(go(&mut controller, &host(80)), 4 * GIB);
    }

    #[test]
    fn a_control_group_limit_is_kept_with_a_margin() {
        let mut controller = usual();
        let group = |free| MemoryLoad { group: Some((5 * GIB, free)), ..host(10) };
        assert_eq!(controller.step(&group(2 * GIB)), None);
        assert_eq!(go(&mut controller, &group(128 * MIB)), controller.minimum);
        let none = MemoryLoad::default();
        assert_eq!(usual().step(&none), None);
    }

    #[test]
    fn a_minimum_of_all_memory_disables_the_balloon() {
        let mut settings = usual().settings;
        settings.minimum = MinimumMemory::Bytes(Size(8 * GIB));
        let mut controller = Controller::new(&settings, 4 * GIB);
        assert_eq!(controller.step(&host(99)), None);
    }
}
