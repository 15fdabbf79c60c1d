//! ACPI tables: fixed ones by their fields, those with AML as `iasl` disassembles them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};

use super::fields::{self, Field, bytes, hex, number, show, word};
use super::{Facts, asl, dsdt};

/// The header of all tables but the FACS.
const HEADER: usize = 36;

/// FADT (ACPI 6.5, 5.2.9). Pointers are listed below, because only their presence is compared.
const FADT: &[Field] = &[
    ("length", 4, 4),
    ("model", 44, 1),
    ("preferred-profile", 45, 1),
    ("sci", 46, 2),
    ("smi-command", 48, 4),
    ("acpi-enable", 52, 1),
    ("acpi-disable", 53, 1),
    ("s4bios", 54, 1),
    ("pstate-control", 55, 1),
    ("pm1a-event", 56, 4),
    ("pm1b-event", 60, 4),
    ("pm1a-control", 64, 4),
    ("pm1b-control", 68, 4),
    ("pm2-control", 72, 4),
    ("pm-timer", 76, 4),
    ("gpe0", 80, 4),
    ("gpe1", 84, 4),
    ("lengths", 88, 7),
    ("cstate-control", 95, 1),
    ("c2-latency", 96, 2),
    ("c3-latency", 98, 2),
    ("flush", 100, 4),
    ("duty", 104, 2),
    ("day-alarm", 106, 1),
    ("month-alarm", 107, 1),
    ("century", 108, 1),
    ("boot-architecture", 109, 2),
    ("flags", 112, 4),
    ("reset-register", 116, 12),
    ("reset-value", 128, 1),
    ("arm-boot-architecture", 129, 2),
    ("minor-revision", 131, 1),
    ("x-pm1a-event", 148, 12),
    ("x-pm1b-event", 160, 12),
    ("x-pm1a-control", 172, 12),
    ("x-pm1b-control", 184, 12),
    ("x-pm2-control", 196, 12),
    ("x-pm-timer", 208, 12),
    ("x-gpe0", 220, 12),
    ("x-gpe1", 232, 12),
];
const FADT_POINTERS: [Field; 4] =
    [("facs", 36, 4), ("dsdt", 40, 4), ("x-facs", 132, 8), ("x-dsdt", 140, 8)];

const FACS: &[Field] =
    &[("length", 4, 4), ("hardware-signature", 8, 4), ("flags", 20, 4), ("version", 32, 1)];

const HPET: &[Field] =
    &[("id", 36, 4), ("address", 40, 12), ("number", 52, 1), ("tick", 53, 2), ("page", 55, 1)];

/// Reads a folder with one file per table, with the kernel's names.
pub(super) fn read(folder: &Path, facts: &mut Facts) -> anyhow::Result<()> {
    for path in tables(folder)? {
        let name = path.file_name().and_then(|name| name.to_str()).context("a table's name")?;
        let all = fs::read(&path).with_context(|| format!("table {name}"))?;
        table(name, &all, facts);
        if ["DSDT", "SSDT"].iter().any(|signature| name.starts_with(signature)) {
            let terms = asl::parse(&disassembled(&path)?).with_context(|| name.to_owned())?;
            dsdt::read(name, &terms, facts);
        }
    }
    Ok(())
}

/// Returns the tables sorted by name.
fn tables(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| folder.display().to_string())?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut paths = paths.collect::<anyhow::Result<Vec<_>>>()?;
    paths.retain(|path| path.extension().is_none());
    paths.sort_unstable();
    ensure!(!paths.is_empty(), "{}: no table", folder.display());
    Ok(paths)
}

fn table(name: &str, all: &[u8], facts: &mut Facts) {
    let prefix = format!("acpi {name}");
    if name == "FACS" {
        return fields::read(&prefix, all, FACS, facts);
    }
    header(&prefix, all, facts);
    match name {
        "FACP" => {
            fields::read(&prefix, all, FADT, facts);
            for (name, at, length) in FADT_POINTERS {
                let there = number(all, at, length).is_some_and(|address| address != 0);
                facts.text(format!("{prefix} {name}"), if there { "there" } else { "0" });
            }
        }
        "APIC" => madt(&prefix, all, facts),
        "MCFG" => {
            for (index, entry) in all.get(44..).unwrap_or(&[]).chunks(16).enumerate() {
                facts.text(format!("{prefix} entry {index}"), hex(entry));
            }
        }
        "HPET" => fields::read(&prefix, all, HPET, facts),
        "DSDT" | "SSDT" => {}
        _ => facts.text(format!("{prefix} content"), hex(all.get(HEADER..).unwrap_or(&[]))),
    }
}

/// Leaves out length and checksum, which follow from the content.
fn header(prefix: &str, all: &[u8], facts: &mut Facts) {
    const TEXTS: [Field; 3] = [("oem", 10, 6), ("oem-table", 16, 8), ("creator", 28, 4)];
    let numbers = [("revision", 8, 1), ("oem-revision", 24, 4), ("creator-revision", 32, 4)];
    fields::read(prefix, all, &numbers, facts);
    for (name, at, length) in TEXTS {
        let text = bytes(all, at, length).map(word).unwrap_or_default();
        facts.text(format!("{prefix} {name}"), text);
    }
}

/// Interrupt controllers, numbered within their type.
fn madt(prefix: &str, all: &[u8], facts: &mut Facts) {
    fields::read(prefix, all, &[("local-apic", 36, 4), ("flags", 40, 4)], facts);
    let mut at = 44;
    let mut counts = [0; 256];
    while let Some(&[kind, length]) = bytes(all, at, 2) {
        let (kind, length) = (usize::from(kind), usize::from(length).max(2));
        let content = show(all, at + 2, length - 2).unwrap_or_else(|| "cut off".into());
        facts.text(format!("{prefix} type {kind} #{}", counts[kind]), content);
        counts[kind] += 1;
        at += length;
    }
}

/// The output of `iasl -d` for a table.
fn disassembled(table: &Path) -> anyhow::Result<String> {
    let work = tempfile::tempdir().context("a folder for iasl")?;
    let copy = work.path().join("table.aml");
    fs::copy(table, &copy).with_context(|| table.display().to_string())?;
    iasl(&["-d"], &copy)?;
    fs::read_to_string(copy.with_extension("dsl")).context("the output of iasl")
}

/// Disassembles every table and compiles it again; a warning of `iasl` is an error. Returns the
/// number of tables.
pub fn compile(folder: &Path) -> anyhow::Result<usize> {
    let tables = tables(folder)?;
    for table in &tables {
        let name = table.file_name().unwrap_or_default().display();
        let work = tempfile::tempdir().context("a folder for iasl")?;
        let listing = work.path().join("table.dsl");
        let apart = disassembled(table).with_context(|| format!("iasl -d {name}"))?;
        fs::write(&listing, apart)?;
        let said = iasl(&[], &listing).with_context(|| format!("iasl {name}"))?;
        let clean = said.contains("0 Errors, 0 Warnings") || said.contains("Table Input:");
        ensure!(clean && !said.contains("Warning  "), "iasl {name}: {said}");
    }
    Ok(tables.len())
}

fn iasl(words: &[&str], file: &Path) -> anyhow::Result<String> {
    let output = Command::new("iasl").args(words).arg(file).output();
    let output = output.context("iasl (Debian package acpica-tools)")?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    ensure!(output.status.success(), "{}: {said}", output.status);
    Ok(said)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn interrupt_controllers_are_counted_by_type() {
        let mut all = vec![0; 44];
        all.extend([0, 8, 0, 0, 1, 0, 0, 0, 0, 8, 1, 1, 1, 0, 0, 0, 1, 12, 0, 0]);
        all.extend([0; 8]);
        let mut facts = Facts::default();
        madt("acpi APIC", &all, &mut facts);
        assert_eq!(facts.count("acpi APIC type 0"), 2);
        assert_eq!(facts.count("acpi APIC type 1"), 1);
    }

    #[test]
    fn a_pointer_is_reported_as_present_or_absent() {
        let mut all = vec![0; 244];
        all[132] = 1;
        let mut facts = Facts::default();
        table("FACP", &all, &mut facts);
        let text = |text: &str| super::super::Value::Text(text.into());
        assert_eq!(facts.0["acpi FACP x-facs"], text("there"));
        assert_eq!(facts.0["acpi FACP facs"], text("0"));
    }

    #[test]
    fn a_truncated_table_does_not_panic() {
        for length in 0..60 {
            for name in ["FACP", "APIC", "MCFG", "HPET", "WAET", "FACS", "DSDT"] {
                table(name, &vec![3; length], &mut Facts::default());
            }
        }
    }
}
