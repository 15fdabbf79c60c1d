//! Compares two machines, as the same guest saw them, fact by fact.
//!
//! A fact has a name that says what it is about (`acpi FACP flags`, `pci 00:1f.0 revision`) and a
//! value. Each difference is one line that stays the same from run to run, so that a list of
//! expected differences can be kept, each with its reason.

pub mod expected;

mod acpi;
mod asl;
mod cpuid;
mod dsdt;
mod fields;
mod memory;
mod pci;
mod smbios;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

pub use self::acpi::compile;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Value {
    Text(String),
    /// A thing and its description. If the other machine lacks the thing, this line is the only one
    /// about it: facts whose names begin with the thing's name are left out.
    Thing(String),
    /// A number from each processor.
    Numbers(Vec<u32>),
    /// A register from each processor; each bit has a meaning of its own.
    Bits(Vec<u32>),
}

#[derive(Default)]
pub struct Facts(BTreeMap<String, Value>);

impl Facts {
    /// Reads the files that a guest saved: the folders `acpi`, `cpuid`, `pci`, `smbios`, and
    /// `dmesg`.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let mut facts = Self::default();
        acpi::read(&folder.join("acpi"), &mut facts)?;
        cpuid::read(&folder.join("cpuid"), &mut facts)?;
        pci::read(&folder.join("pci"), &mut facts)?;
        smbios::read(&folder.join("smbios"), &mut facts)?;
        memory::read(&fs::read_to_string(folder.join("dmesg")).context("dmesg")?, &mut facts)?;
        Ok(facts)
    }

    /// Facts that a guest printed. Fails if it printed two values of one.
    pub fn of(all: impl IntoIterator<Item = (String, String)>) -> anyhow::Result<Self> {
        let mut facts = Self::default();
        for (name, value) in all {
            let value = Value::Text(value);
            let before = facts.0.insert(name.clone(), value.clone());
            ensure!(before.is_none_or(|it| it == value), "{name} has two values");
        }
        Ok(facts)
    }

    fn text(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), Value::Text(value.into()));
    }

    fn thing(&mut self, name: impl Into<String>, value: impl Into<String>) {
        self.0.insert(name.into(), Value::Thing(value.into()));
    }

    /// Whether a fact belongs to a thing that only this machine has.
    fn is_of_own_thing(&self, name: &str, other: &Self) -> bool {
        let ends = name.match_indices(' ').map(|(at, _)| &name[..at]);
        let things = ends.filter(|it| matches!(self.0.get(*it), Some(Value::Thing(_))));
        things.into_iter().any(|it| !other.0.contains_key(it))
    }

    /// The facts that only this machine has.
    fn own<'a>(&'a self, other: &'a Self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        let own = self.0.iter().filter(|(name, _)| !other.0.contains_key(*name));
        own.filter(|(name, _)| !self.is_of_own_thing(name, other))
    }

    pub fn count(&self, prefix: &str) -> usize {
        self.0.keys().filter(|name| name.starts_with(prefix)).count()
    }
}

/// Returns one line for each difference, sorted.
pub fn differences(qemu: &Facts, transom: &Facts) -> Vec<String> {
    let mut lines = Vec::new();
    for (name, value) in &qemu.0 {
        if let Some(other) = transom.0.get(name).filter(|other| *other != value) {
            lines.push(format!("{name}: {}", both(value, other)));
        }
    }
    let own = |(name, value), who| format!("{name}: only {who}: {}", one(value));
    lines.extend(qemu.own(transom).map(|fact| own(fact, "qemu")));
    lines.extend(transom.own(qemu).map(|fact| own(fact, "transom")));
    lines.sort_unstable();
    lines
}

fn one(value: &Value) -> String {
    match value {
        Value::Text(text) | Value::Thing(text) => text.clone(),
        Value::Numbers(each) | Value::Bits(each) => {
            per_processor(each.iter().map(|number| format!("{number:#010x}")).collect())
        }
    }
}

fn both(qemu: &Value, transom: &Value) -> String {
    match (qemu, transom) {
        (Value::Bits(qemu), Value::Bits(transom)) => {
            per_processor(qemu.iter().zip(transom).map(|(a, b)| bits(*a, *b)).collect())
        }
        (Value::Numbers(qemu), Value::Numbers(transom)) => {
            let pair = |(a, b): (&u32, &u32)| format!("qemu {a:#010x}, transom {b:#010x}");
            per_processor(qemu.iter().zip(transom).map(pair).collect())
        }
        _ => format!("qemu {}, transom {}", one(qemu), one(transom)),
    }
}

/// One text if all processors agree, otherwise one for each processor.
fn per_processor(each: Vec<String>) -> String {
    if each.windows(2).all(|pair| pair[0] == pair[1]) {
        return each.into_iter().next().unwrap_or_default();
    }
    let each = each.iter().enumerate().map(|(cpu, text)| format!("cpu {cpu}: {text}"));
    each.collect::<Vec<_>>().join("; ")
}

fn bits(qemu: u32, transom: u32) -> String {
    let mut text = String::new();
    for (who, only) in [("qemu", qemu & !transom), ("transom", transom & !qemu)] {
        if only == 0 {
            continue;
        }
        let separator = if text.is_empty() { "" } else { "; " };
        write!(text, "{separator}only {who}: bit").expect("a String takes everything");
        for bit in (0..u32::BITS).filter(|bit| only >> bit & 1 == 1) {
            write!(text, " {bit}").expect("a String takes everything");
        }
    }
    if text.is_empty() { "the same".into() } else { text }
}

#[cfg(test)]
mod test {
    use super::*;

    fn facts(all: &[(&str, Value)]) -> Facts {
        Facts(all.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect())
    }

    fn text(text: &str) -> Value {
        Value::Text(text.into())
    }

    #[test]
    fn equal_facts_give_no_difference() {
        let one = facts(&[("a", text("1")), ("b", Value::Bits(vec![1, 2]))]);
        assert_eq!(differences(&one, &one), [""; 0]);
    }

    #[test]
    fn each_difference_is_a_line() {
        let qemu = facts(&[("a", text("1")), ("b", text("1"))]);
        let transom = facts(&[("a", text("2")), ("c", text("3"))]);
        let lines = ["a: qemu 1, transom 2", "b: only qemu: 1", "c: only transom: 3"];
        assert_eq!(differences(&qemu, &transom), lines);
    }

    #[test]
    fn a_missing_item_is_one_line() {
        let qemu = facts(&[("a 1", Value::Thing("x".into())), ("a 1 b", text("1"))]);
        let transom = facts(&[("a 12", text("2"))]);
        assert_eq!(differences(&qemu, &transom), ["a 12: only transom: 2", "a 1: only qemu: x"]);
        let other = facts(&[("a 1", Value::Thing("x".into()))]);
        assert_eq!(differences(&qemu, &other), ["a 1 b: only qemu: 1"]);
    }

    #[test]
    fn differing_bits_are_listed() {
        let qemu = facts(&[("r", Value::Bits(vec![0b0110, 0b0110]))]);
        let transom = facts(&[("r", Value::Bits(vec![0b0011, 0b0011]))]);
        assert_eq!(differences(&qemu, &transom), ["r: only qemu: bit 2; only transom: bit 0"]);
    }

    #[test]
    fn processors_are_listed_separately_when_they_differ() {
        let qemu = facts(&[("r", Value::Numbers(vec![0, 1]))]);
        let transom = facts(&[("r", Value::Numbers(vec![0, 2]))]);
        let line = "r: cpu 0: qemu 0x00000000, transom 0x00000000; \
                    cpu 1: qemu 0x00000001, transom 0x00000002";
        assert_eq!(differences(&qemu, &transom), [line]);
    }
}
