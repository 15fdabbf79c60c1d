//! Runs a trial: starts the probe in a machine of its own, which uses a device of this host, and
//! reads its report.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use serde::Serialize;
use serde_json::Value;

use super::machine::{Limits, Machine, last_error};

/// Marks the last line that the probe prints before it begins.
const BEGINS: &str = " speed ";

#[derive(Debug, Serialize)]
pub(super) struct Trial {
    /// The disk or tap.
    pub(super) name: String,
    pub(super) says: String,
    /// Whether all parts passed.
    pub(super) works: bool,
    pub(super) parts: Vec<Part>,
}

#[derive(Debug, Serialize)]
pub(super) struct Part {
    /// `read`, `write`, `verify`, `send` or `arp`.
    does: String,
    pub(super) works: bool,
    /// Bytes of a block or a frame.
    size: u64,
    /// Requests in flight.
    depth: u64,
    count: u64,
    per_second: f64,
    mib_per_second: f64,
    /// Latency in microseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    median_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_us: Option<f64>,
    /// Processor time of the host for each request, without the guest's processors.
    processor_us: f64,
    /// Bytes that were compared with the written data.
    #[serde(skip_serializing_if = "Option::is_none")]
    verified_bytes: Option<u64>,
}

impl Trial {
    pub(super) fn show(&self, what: &str) -> String {
        let parts: String = self.parts.iter().map(Part::show).collect();
        format!("\n{what} {}: {}\n{parts}", self.name, self.says)
    }
}

impl Part {
    pub(super) fn is_answered(&self) -> bool {
        self.count > 0
    }

    fn show(&self) -> String {
        let mut text = format!(
            "  {:<7}{:>7} bytes, depth {:>3}: {:>9.0}/s, {:>7.1} MiB/s",
            self.does, self.size, self.depth, self.per_second, self.mib_per_second
        );
        if let Some((median, p99)) = self.median_us.zip(self.p99_us) {
            text += &format!(", latency {median:.1} us, 99 % within {p99:.1} us");
        }
        text += &format!(", processor {:.1} us each", self.processor_us);
        if let Some(bytes) = self.verified_bytes.filter(|_| self.works) {
            text += &format!(", {bytes} bytes verified");
        }
        let verdict = if self.works { "" } else { ": FAILED" };
        text + verdict + "\n"
    }

    fn of(finding: &Value, processor: Duration) -> Option<Self> {
        let number = |key: &str| finding[key].as_u64();
        let does = finding["mode"].as_str()?.to_owned();
        let size = number("block").or(number("size")).unwrap_or(0);
        let answered = number("requests").or(number("received").filter(|_| does != "send"));
        let count = answered.or(number("sent")).unwrap_or(0);
        let seconds = number("microseconds").unwrap_or(0).max(1) as f64 / 1e6;
        let latency = |key| {
            let known = number(key).filter(|nanoseconds| *nanoseconds > 0);
            known.map(|nanoseconds| tenths(nanoseconds as f64 / 1e3))
        };
        let each = count.max(1) as f64;
        Some(Self {
            works: finding["verdict"] == "pass",
            size,
            depth: number("depth").unwrap_or(0),
            count,
            per_second: tenths(count as f64 / seconds),
            mib_per_second: tenths((count * size) as f64 / seconds / f64::from(1 << 20)),
            median_us: latency("median_ns"),
            p99_us: latency("p99_ns"),
            processor_us: tenths(processor.as_secs_f64() * 1e6 / each),
            verified_bytes: (does == "verify").then_some(count * size),
            does,
        })
    }
}

fn tenths(number: f64) -> f64 {
    (number * 10.0).round() / 10.0
}

pub(super) struct Outcome {
    pub(super) parts: Vec<Part>,
    pub(super) log: String,
}

/// Runs the probe with this device and these command-line words, and returns the findings called
/// `name`.
pub(super) fn run(
    device: &str,
    name: &str,
    words: &[String],
    limits: Limits,
) -> anyhow::Result<Outcome> {
    let words = format!("checks=none {} then=poweroff", words.join(" "));
    let options = ["--memory", "128M", "--device", device, "--cmdline", &words];
    let mut machine = Machine::start(&options.map(str::to_owned), limits)?;
    let mut times = Vec::new();
    let mut report = None;
    let mark = format!("  {name} ");
    while let Some(line) = machine.next_line()? {
        if line.contains(BEGINS) || line.contains(&mark) {
            times.push(machine.processor());
        }
        if line.starts_with("{\"probe\"") {
            report = Some(serde_json::from_str::<Value>(&line).context("the probe's report")?);
        }
    }
    let (_, log) = machine.end()?;
    let Some(report) = report else { bail!(last_error(&log)) };
    let findings = report["findings"].as_array().into_iter().flatten();
    let mine = findings.filter(|finding| finding["name"] == name);
    let used = times.windows(2).map(|pair| pair[1].saturating_sub(pair[0]));
    let parts: Vec<_> = mine.zip(used).filter_map(|(it, used)| Part::of(it, used)).collect();
    ensure!(!parts.is_empty(), "the probe cannot drive {device}: {report}");
    Ok(Outcome { parts, log })
}

#[cfg(test)]
mod test {
    use serde_json::json;

    use super::*;

    #[test]
    fn results_are_shown_in_readable_units() {
        let finding = json!({
            "name": "disk", "verdict": "pass", "mode": "verify", "block": 4096, "depth": 32,
            "requests": 2048, "microseconds": 500_000, "median_ns": 80_123, "p99_ns": 95_000,
        });
        let part = Part::of(&finding, Duration::from_micros(4096)).unwrap();
        assert_eq!((part.per_second, part.mib_per_second), (4096.0, 16.0));
        assert_eq!((part.median_us, part.processor_us), (Some(80.1), 2.0));
        assert_eq!(part.verified_bytes, Some(8 << 20));
        assert!(part.show().contains("8388608 bytes verified"), "{}", part.show());
        let bad = Part { works: false, ..part };
        assert!(bad.show().ends_with(": FAILED\n") && !bad.show().contains("verified"));
    }

    #[test]
    fn frames_that_were_only_sent_show_no_latency() {
        let finding = json!({
            "name": "net", "verdict": "pass", "mode": "send", "size": 1514, "depth": 256,
            "sent": 1000, "received": 0, "microseconds": 1000, "median_ns": 0, "p99_ns": 0,
        });
        let part = Part::of(&finding, Duration::ZERO).unwrap();
        assert_eq!((part.count, part.median_us), (1000, None));
        assert!(!part.show().contains("latency"), "{}", part.show());
    }
}
