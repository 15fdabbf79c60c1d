//! The rule by which a machine is idle: a function of samples.

use std::time::{Duration, Instant};

use crate::pod::doze::Measure;

/// More work than this keeps the machine awake: the share of one processor, and bytes per second.
/// An idle Windows stays below them.
const PROCESSORS: f64 = 0.2;
const STORAGE: f64 = 256.0 * 1024.0;
const NETWORK: f64 = 4.0 * 1024.0;

/// The machine at one moment. Times and bytes are sums since its start, and `None`
/// if they are not known.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) viewers: usize,
    pub(super) connections: Option<u64>,
    /// Somebody gave a command since the last sample.
    pub(super) needed: bool,
    pub(super) installs: bool,
    pub(super) processors: Option<Duration>,
    pub(super) storage: Option<u64>,
    pub(super) network: Option<u64>,
}

pub(super) struct Rule {
    /// When something last kept the machine awake.
    since: Instant,
    last: Option<(Instant, Sample)>,
}

impl Rule {
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, last: None }
    }

    /// The machine has been idle since then.
    pub(super) fn since(&self) -> Instant {
        self.since
    }

    /// Takes a sample, and returns what it shows.
    pub(super) fn take(&mut self, now: Instant, sample: &Sample) -> Vec<Measure> {
        let last = self.last.replace((now, sample.clone()));
        let mut measures = vec![
            measure(format!("viewers {}", sample.viewers), sample.viewers > 0),
            // Its end is not seen where nothing can be measured.
            processors(last.as_ref(), now, sample),
        ];
        if let Some(count) = sample.connections {
            measures.push(measure(format!("connections {count}"), count > 0));
        }
        let rates = [
            ("disks", STORAGE, last.as_ref().map(|it| it.1.storage), sample.storage),
            ("network", NETWORK, last.as_ref().map(|it| it.1.network), sample.network),
        ];
        for (name, most, before, bytes) in rates {
            let (Some(Some(before)), Some(bytes), Some((then, _))) = (before, bytes, &last) else {
                continue;
            };
            let rate = bytes.saturating_sub(before) as f64 / seconds(*then, now);
            measures.push(measure(format!("{name} {:.1} KiB/s", rate / 1024.0), rate > most));
        }
        if sample.needed {
            measures.push(measure("a command".into(), true));
        }
        if sample.installs {
            measures.push(measure("the installation".into(), true));
        }
        if last.is_none() || measures.iter().any(|it| it.keeps_awake) {
            self.since = now;
        }
        measures
    }
}

/// Without a time the machine stays awake: its work is not known.
fn processors(last: Option<&(Instant, Sample)>, now: Instant, sample: &Sample) -> Measure {
    let used = last.and_then(|(then, before)| {
        let used = sample.processors?.saturating_sub(before.processors?);
        Some(used.as_secs_f64() / seconds(*then, now))
    });
    match used {
        Some(share) => measure(format!("processors {:.0} %", share * 100.0), share > PROCESSORS),
        None => measure("processors not measured yet".into(), true),
    }
}

fn measure(text: String, keeps_awake: bool) -> Measure {
    Measure { text, keeps_awake }
}

/// At least a millisecond, so that it can be divided by.
fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64().max(0.001)
}

#[cfg(test)]
mod test {
    use super::*;

    const STEP: Duration = Duration::from_secs(10);

    /// A machine that does nothing, after these steps.
    fn quiet(steps: u32) -> Sample {
        Sample {
            connections: Some(0),
            processors: Some(STEP * steps / 20),
            storage: Some(u64::from(steps) * 100_000),
            network: Some(u64::from(steps) * 1000),
            ..Sample::default()
        }
    }

    fn awake(measures: &[Measure]) -> Vec<&str> {
        measures.iter().filter(|it| it.keeps_awake).map(|it| it.text.as_str()).collect()
    }

    #[test]
    fn a_machine_is_idle_since_nothing_kept_it_awake() {
        let start = Instant::now();
        let mut rule = Rule::new(start);
        let first = rule.take(start + STEP, &quiet(1));
        assert_eq!(awake(&first), ["processors not measured yet"]);
        for steps in 2..10 {
            let measures = rule.take(start + STEP * steps, &quiet(steps));
            assert!(awake(&measures).is_empty(), "{measures:?}");
            assert_eq!(rule.since(), start + STEP);
        }
        let texts: Vec<_> =
            rule.take(start + STEP * 10, &quiet(10)).into_iter().map(|it| it.text).collect();
        assert_eq!(
            texts,
            [
                "viewers 0",
                "processors 5 %",
                "connections 0",
                "disks 9.8 KiB/s",
                "network 0.1 KiB/s"
            ]
        );
    }

    #[test]
    fn everything_that_needs_a_machine_keeps_it_awake() {
        let start = Instant::now();
        let more = |change: fn(&mut Sample)| {
            let mut rule = Rule::new(start);
            rule.take(start, &quiet(0));
            let mut sample = quiet(1);
            change(&mut sample);
            let measures = rule.take(start + STEP, &sample);
            assert_eq!(rule.since() == start, awake(&measures).is_empty());
            awake(&measures).join("; ")
        };
        for (change, text) in [
            ((|_| ()) as fn(&mut Sample), ""),
            (|it| it.viewers = 2, "viewers 2"),
            (|it| it.connections = Some(1), "connections 1"),
            (|it| it.connections = None, ""),
            (|it| it.needed = true, "a command"),
            (|it| it.installs = true, "the installation"),
            (|it| it.processors = Some(STEP * 35 / 100), "processors 35 %"),
            (|it| it.processors = None, "processors not measured yet"),
            (|it| it.storage = Some(10 << 20), "disks 1024.0 KiB/s"),
            (|it| it.storage = None, ""),
            (|it| it.network = Some(100 << 10), "network 10.0 KiB/s"),
            // A counter that begins anew.
            (|it| it.network = Some(0), ""),
        ] {
            assert_eq!(more(change), text);
        }
    }
}
