//! The result table: a row for each program, with its spread and its ratio to ours.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::{Error, Result};

use crate::rival::{OURS, Rival};

/// The maximum length of a failure's reason. Longer ones are cut off.
const MAX_REASON: usize = 100;

/// The measurements of one program in the order of the rounds, or the reason of its failure.
#[derive(Clone, Debug, Default)]
pub struct Samples {
    values: Vec<f64>,
    failure: Option<String>,
}

impl Samples {
    pub const fn new() -> Self {
        Self { values: Vec::new(), failure: None }
    }

    pub fn push(&mut self, sample: f64) {
        self.values.push(sample);
    }

    pub fn values(&self) -> &[f64] {
        &self.values
    }

    /// A program that failed is not measured again.
    pub fn has_failed(&self) -> bool {
        self.failure.is_some()
    }

    /// Records the reason of a failure, shortened to fit a row.
    fn fail(&mut self, error: &Error) {
        let reason = format!("{error:#}");
        let reason = reason.lines().next().unwrap_or_default();
        self.failure = Some(reason.chars().take(MAX_REASON).collect());
    }
}

impl From<Vec<f64>> for Samples {
    fn from(values: Vec<f64>) -> Self {
        Self { values, failure: None }
    }
}

/// Returns the measurement of the program `name`. If a rival failed, records the failure in its
/// rows and returns `None`, so that the others continue. Fails only if our own program failed: then
/// there is nothing to compare with.
pub fn measured<'a, T>(
    name: &str,
    rows: impl IntoIterator<Item = &'a mut Samples>,
    result: Result<T>,
) -> Result<Option<T>> {
    match result {
        Ok(value) => Ok(Some(value)),
        Err(error) if name == OURS => Err(error.context(OURS)),
        Err(error) => {
            rows.into_iter().for_each(|samples| samples.fail(&error));
            Ok(None)
        }
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Spread {
    pub median: f64,
    pub min: f64,
    /// The 90th percentile.
    pub p90: f64,
    pub max: f64,
}

impl Spread {
    /// Panics if there are no samples.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;
        let [median, p90] = [last / 2, last * 9 / 10].map(|at| sorted[at]);
        Self { median, min: sorted[0], p90, max: sorted[last] }
    }
}

/// Measures all programs in turn, for a number of rounds, so that a disturbance affects all of them
/// equally. Fails only if a measurement of our own program fails.
pub fn interleave(
    rivals: &[Rival],
    rounds: usize,
    mut measure: impl FnMut(&Rival) -> Result<f64>,
) -> Result<Vec<Samples>> {
    let mut all = vec![Samples::new(); rivals.len()];
    for round in 0..=rounds {
        for (rival, samples) in rivals.iter().zip(&mut all) {
            if samples.has_failed() {
                continue;
            }
            let sample = measured(rival.name, [&mut *samples], measure(rival))?;
            // The first round warms up caches.
            if let Some(sample) = sample.filter(|_| round > 0) {
                samples.push(sample);
            }
        }
    }
    Ok(all)
}

/// The table as text. Ours is the first row, and `x ours` is the ratio of a row's median to ours.
pub fn table(title: &str, unit: &str, rivals: &[Rival], all: &[Samples]) -> String {
    let rows: Vec<_> = rivals.iter().map(|rival| (rival.name, rival.note)).collect();
    rows_table(title, unit, &rows, all)
}

/// Like [`table`], for rows with names and notes. The row of a failed program has the reason.
pub fn rows_table(title: &str, unit: &str, rows: &[(&str, &str)], all: &[Samples]) -> String {
    let rounds = all.first().map_or(0, |samples| samples.values.len());
    let mut text = format!("{title} ({unit}, {rounds} rounds in turn)\n");
    let mut line = |name: &str, cells: [String; 5], note: &str| {
        write!(text, "  {name:<18}").expect("a string takes all");
        cells.iter().for_each(|it| write!(text, "{it:>10}").expect("a string takes all"));
        writeln!(text, "  {note}").expect("a string takes all");
    };
    line("", ["median", "min", "p90", "max", "x ours"].map(str::to_owned), "");
    let ours = all.first().filter(|samples| !samples.values.is_empty());
    let ours = ours.map_or(1.0, |samples| Spread::of(&samples.values).median);
    for ((name, note), samples) in rows.iter().zip(all) {
        if let Some(reason) = &samples.failure {
            line(name, [const { String::new() }; 5], &format!("failed: {reason}"));
            continue;
        }
        if samples.values.is_empty() {
            continue;
        }
        let it = Spread::of(&samples.values);
        let cells = [it.median, it.min, it.p90, it.max, it.median / ours];
        // There is no ratio to zero.
        let text =
            |number: f64| if number.is_finite() { format!("{number:.2}") } else { "-".into() };
        line(name, cells.map(text), note);
    }
    text
}

/// Prints text, and ignores a closed output.
pub fn print(text: &str) {
    std::io::stdout().write_all(text.as_bytes()).ok();
}

#[cfg(test)]
mod test {
    use anyhow::bail;

    use super::*;

    #[test]
    fn a_spread_is_computed_from_sorted_samples() {
        let it = Spread::of(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!([it.median, it.min, it.p90, it.max], [3.0, 1.0, 4.0, 5.0]);
    }

    #[test]
    fn a_failing_rival_gets_a_row_and_does_not_stop_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let names = ["vmm", "firecracker", "qemu microvm"];
        let rivals = names.map(|name| Rival::known(name, "true", folder.path()));
        let mut asked = 0;
        let samples = interleave(&rivals, 3, |rival| {
            if rival.name == "firecracker" {
                asked += 1;
                bail!("no such device\nand more");
            }
            Ok(2.0)
        });
        let text = table("start", "ms", &rivals, &samples.unwrap());
        assert_eq!(asked, 1, "it is not measured again");
        let row = |name: &str| text.lines().find(|line| line.trim_start().starts_with(name));
        assert!(row("firecracker").unwrap().ends_with("failed: no such device"), "{text}");
        assert!(row("qemu microvm").unwrap().contains("2.00"), "{text}");
    }

    #[test]
    fn a_failure_of_transom_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let rivals = [Rival::known("vmm", "true", folder.path())];
        let error = interleave(&rivals, 3, |_| bail!("no kernel")).unwrap_err();
        assert_eq!(format!("{error:#}"), "vmm: no kernel");
    }
}
