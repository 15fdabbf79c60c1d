//! The guest's lines: `fact NAME: VALUE`, `wrong: ...` for what no machine may have, `time ...` for
//! the clock, `table SIGNATURE NUMBER HEX` for a part of an ACPI table, and `note ...` for people.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, ensure};
use transom_tests::guest::Machine;
use transom_tests::lab;

/// The kinds of facts that each machine has.
pub(crate) const KINDS: [&str; 13] = [
    "acpi",
    "attributes",
    "capsules",
    "clock",
    "configuration",
    "exit",
    "file",
    "list",
    "memory",
    "random",
    "screen",
    "tpm",
    "variable",
];
/// The clock's reading and ours may differ so much: one of them is read in whole seconds.
const SLACK: Duration = Duration::from_secs(5);

/// Tables that are equal on all machines but for their headers, which have this length.
const EQUAL_TABLES: [&str; 3] = ["APIC1", "MCFG1", "WAET1"];
const HEADER: usize = 36;

#[derive(Debug, Default)]
pub(crate) struct Report {
    pub(crate) facts: Vec<(String, String)>,
    wrong: Vec<String>,
    times: Vec<String>,
    /// ACPI tables by signature and number, such as `SSDT1`.
    pub(crate) tables: BTreeMap<String, Vec<u8>>,
}

impl Report {
    /// Where the report of one machine with the firmware of one release stays.
    pub(crate) fn path(machine: Machine, release: &str) -> anyhow::Result<PathBuf> {
        let name = format!("loader-{machine:?}-{release}.txt").to_lowercase();
        Ok(lab::shared()?.join(name))
    }

    /// The report that an earlier test has kept.
    pub(crate) fn kept(machine: Machine, release: &str) -> anyhow::Result<Self> {
        let path = Self::path(machine, release)?;
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        Self::read(&text)
    }

    pub(crate) fn read(text: &str) -> anyhow::Result<Self> {
        let mut report = Self::default();
        for line in text.lines().map(str::trim) {
            if let Some(fact) = line.strip_prefix("fact ") {
                let (name, value) = fact.split_once(": ").with_context(|| line.to_owned())?;
                report.facts.push((name.to_owned(), value.to_owned()));
            } else if line.starts_with("wrong: ") {
                report.wrong.push(line.to_owned());
            } else if let Some(time) = line.strip_prefix("time ") {
                report.times.push(time.to_owned());
            } else if let Some(part) = line.strip_prefix("table ") {
                let (name, hex) = part.rsplit_once(' ').with_context(|| line.to_owned())?;
                let bytes = bytes(hex).with_context(|| line.to_owned())?;
                report.tables.entry(name.replace(' ', "")).or_default().extend(bytes);
            }
        }
        Ok(report)
    }

    /// The content of tables that have neither addresses nor names of the machine.
    pub(crate) fn contents(&self) -> anyhow::Result<Vec<(String, String)>> {
        let content = |name: &&str| {
            let bytes = self.tables.get(*name).and_then(|table| table.get(HEADER..));
            let bytes = bytes.with_context(|| format!("no table {name}"))?;
            Ok((format!("acpi content of {name}"), format!("{bytes:02x?}")))
        };
        EQUAL_TABLES.iter().map(content).collect()
    }

    /// Fails if the guest saw what no machine may have.
    pub(crate) fn is_right(&self) -> anyhow::Result<()> {
        ensure!(self.wrong.is_empty(), "the guest says:\n{}", self.wrong.join("\n"));
        Ok(())
    }

    /// Fails if the guest's clock was not between these times.
    pub(crate) fn clock(&self, start: SystemTime, end: SystemTime) -> anyhow::Result<()> {
        ensure!(!self.times.is_empty(), "the guest did not read its clock");
        for text in &self.times {
            let time = seconds(text).with_context(|| format!("no time: {text}"))?;
            let time = UNIX_EPOCH + Duration::from_secs(time);
            let right = (start - SLACK..end + SLACK).contains(&time);
            ensure!(right, "the guest's clock says {text} between {start:?} and {end:?}");
        }
        Ok(())
    }
}

fn bytes(hex: &str) -> Option<Vec<u8>> {
    let byte = |at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Seconds since 1970 of `2026-11-24 4:12:33`.
fn seconds(text: &str) -> Option<u64> {
    let numbers: Option<Vec<u64>> =
        text.split(['-', ' ', ':']).map(|number| number.parse().ok()).collect();
    let &[year, month, day, hour, minute, second] = numbers?.as_slice() else { return None };
    let in_range = (1970..3000).contains(&year)
        && (1..=12).contains(&month)
        && (1..=31).contains(&day)
        && hour < 24
        && minute < 60
        && second < 60;
    if !in_range {
        return None;
    }
    // Years that begin in March, so that the leap day is their last.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days = 365 * year + year / 4 - year / 100 + year / 400 + (153 * month + 2) / 5 + day - 1;
    let days = days.checked_sub(719_468)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}
