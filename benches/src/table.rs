//! One table: a row for each program, with its spread and how it compares to ours.

use std::fmt::Write as _;
use std::io::Write as _;

use anyhow::Result;

use crate::rival::Rival;

/// What was measured of one program, in the order of the rounds.
pub type Samples = Vec<f64>;

/// The middle one, and the ends.
#[derive(Clone, Copy, Debug)]
pub struct Spread {
    /// Half of the samples are below.
    pub median: f64,
    /// The smallest.
    pub least: f64,
    /// Nine of ten are below.
    pub ninth: f64,
    /// The largest.
    pub most: f64,
}

impl Spread {
    /// Of samples, which are some.
    ///
    /// # Panics
    ///
    /// When there are none.
    pub fn of(samples: &[f64]) -> Self {
        let mut sorted = samples.to_vec();
        sorted.sort_by(f64::total_cmp);
        let last = sorted.len() - 1;
        let [median, ninth] = [last / 2, last * 9 / 10].map(|at| sorted[at]);
        Self { median, least: sorted[0], ninth, most: sorted[last] }
    }
}

/// Measures all in turn, so many rounds: what disturbs one round disturbs all alike.
///
/// # Errors
///
/// When a measurement fails.
pub fn interleave(
    rivals: &[Rival],
    rounds: usize,
    mut measure: impl FnMut(&Rival) -> Result<f64>,
) -> Result<Vec<Samples>> {
    let mut all = vec![Samples::new(); rivals.len()];
    for round in 0..=rounds {
        for (rival, samples) in rivals.iter().zip(&mut all) {
            let sample = measure(rival).map_err(|it| it.context(rival.name))?;
            // The first round warms up caches.
            if round > 0 {
                samples.push(sample);
            }
        }
    }
    Ok(all)
}

/// The table as text; ours is the first row, and `x` says how many times ours the others are.
pub fn table(title: &str, unit: &str, rivals: &[Rival], all: &[Samples]) -> String {
    let rows: Vec<_> = rivals.iter().map(|rival| (rival.name, rival.note)).collect();
    rows_table(title, unit, &rows, all)
}

/// The same of rows that have names and notes.
pub fn rows_table(title: &str, unit: &str, rows: &[(&str, &str)], all: &[Samples]) -> String {
    let rounds = all.first().map_or(0, Vec::len);
    let mut text = format!("{title} ({unit}, {rounds} rounds in turn)\n");
    let mut line = |name: &str, cells: [String; 5], note: &str| {
        write!(text, "  {name:<18}").expect("a string takes all");
        cells.iter().for_each(|it| write!(text, "{it:>10}").expect("a string takes all"));
        writeln!(text, "  {note}").expect("a string takes all");
    };
    line("", ["median", "min", "p90", "max", "x ours"].map(str::to_owned), "");
    let ours = all.first().map_or(1.0, |samples| Spread::of(samples).median);
    for ((name, note), samples) in rows.iter().zip(all).filter(|(_, samples)| !samples.is_empty()) {
        let it = Spread::of(samples);
        let cells = [it.median, it.least, it.ninth, it.most, it.median / ours];
        // Of nothing there is no multiple.
        let text =
            |number: f64| if number.is_finite() { format!("{number:.2}") } else { "-".into() };
        line(name, cells.map(text), note);
    }
    text
}

/// Prints for whoever reads, or no longer does.
pub fn print(text: &str) {
    std::io::stdout().write_all(text.as_bytes()).ok();
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_spread_is_of_sorted_samples() {
        let it = Spread::of(&[5.0, 1.0, 3.0, 2.0, 4.0]);
        assert_eq!([it.median, it.least, it.ninth, it.most], [3.0, 1.0, 4.0, 5.0]);
    }
}
