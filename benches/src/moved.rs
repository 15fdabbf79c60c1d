//! Compares programs whose guest goes on in another process.

use std::path::Path;

use anyhow::Result;

use crate::rival::{Rival, rivals};
use crate::table::{Samples, measured, print, table};

const ROUNDS: usize = 10;

/// Measures all rivals in turn, but for some, and prints a table for each title and unit. `figures`
/// gets an empty folder.
pub fn compare<const N: usize>(
    titles: &[(&str, &str); N],
    but: &[&str],
    figures: impl Fn(&Rival, &Path) -> Result<[f64; N]>,
) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let all = rivals(&folder, but)?;
    let mut samples = [(); N].map(|()| vec![Samples::new(); all.len()]);
    for round in 0..=ROUNDS {
        for (number, rival) in all.iter().enumerate() {
            let mut rows: Vec<_> = samples.iter_mut().map(|table| &mut table[number]).collect();
            if rows[0].has_failed() {
                continue;
            }
            let dir = tempfile::tempdir_in(folder.path())?;
            let result = figures(rival, dir.path());
            let result = measured(rival.name, rows.iter_mut().map(|row| &mut **row), result)?;
            // The first round warms up caches.
            for (row, figure) in rows.iter_mut().zip(result.into_iter().flatten()) {
                if round > 0 {
                    row.push(figure);
                }
            }
        }
    }
    for ((title, unit), samples) in titles.iter().zip(&samples) {
        print(&format!("{}\n", table(title, unit, &all, samples)));
    }
    Ok(())
}
