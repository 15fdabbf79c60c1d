//! UEFI's memory map, as Linux prints it with `efi=debug`.

use anyhow::{Context, ensure};

use super::Facts;

/// Types that are free for an operating system. The ranges that firmware and kernel use temporarily
/// are no property of the machine.
const USABLE: [&str; 5] = ["Conventional", "Loader Code", "Loader Data", "Boot Code", "Boot Data"];

/// A range; `last` is inclusive. `what` has the type and the attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    first: u64,
    last: u64,
    what: String,
}

pub(super) fn read(messages: &str, facts: &mut Facts) -> anyhow::Result<()> {
    let ranges = merged(map(messages)?);
    ensure!(!ranges.is_empty(), "no memory map in the kernel's messages");
    for Range { first, last, what } in ranges {
        facts.text(format!("memory {first:#014x}-{last:#014x}"), what);
    }
    Ok(())
}

/// The first map. The kernel later prints the ranges again that it keeps.
fn map(messages: &str) -> anyhow::Result<Vec<Range>> {
    let mut ranges = Vec::new();
    for line in messages.lines() {
        let Some((_, entry)) = line.split_once("efi: mem") else { continue };
        let Some((number, entry)) = entry.split_once(": [") else { continue };
        let number: usize = number.parse().with_context(|| line.to_owned())?;
        if number != ranges.len() {
            break;
        }
        ranges.push(range(entry).with_context(|| line.to_owned())?);
    }
    ranges.sort_unstable_by_key(|range| range.first);
    Ok(ranges)
}

/// `Conventional|   |…|WB|WT|WC|UC] range=[0x…-0x…] (1MB)`
fn range(entry: &str) -> Option<Range> {
    let (kind, entry) = entry.split_once('|')?;
    let (attributes, entry) = entry.split_once("] range=[")?;
    let (first, last) = entry.split_once(']')?.0.split_once('-')?;
    let number = |text: &str| u64::from_str_radix(text.strip_prefix("0x")?, 16).ok();
    let kind = if USABLE.contains(&kind.trim()) { "usable" } else { kind.trim() };
    let attributes: Vec<_> =
        attributes.split('|').map(str::trim).filter(|it| !it.is_empty()).collect();
    let what = format!("{kind} {}", attributes.join("|"));
    Some(Range { first: number(first)?, last: number(last)?, what })
}

/// Merges adjacent ranges of the same type.
fn merged(ranges: Vec<Range>) -> Vec<Range> {
    let mut all: Vec<Range> = Vec::new();
    for range in ranges {
        match all.last_mut() {
            Some(before)
                if before.what == range.what && before.last.checked_add(1) == Some(range.first) =>
            {
                before.last = range.last;
            }
            _ => all.push(range),
        }
    }
    all
}

#[cfg(test)]
mod test {
    use super::*;

    const MESSAGES: &str = "\
[ 0.0] efi: EFI v2.70 by EDK II
[ 0.0] efi: mem00: [Boot Code   |   |  |WB|UC] range=[0x0000000000000000-0x0000000000000fff] (0MB)
[ 0.0] efi: mem01: [Conventional|   |  |WB|UC] range=[0x0000000000001000-0x000000000009ffff] (0MB)
[ 0.0] efi: mem02: [Runtime Data|RUN|  |WB|UC] range=[0x00000000000a0000-0x00000000000affff] (0MB)
[ 0.1] efi: mem42: [Boot Data   |   |  |WB|UC] range=[0x00000000000b0000-0x00000000000b0fff] (0MB)
";

    #[test]
    fn usable_memory_is_merged_into_one_range() {
        let mut facts = Facts::default();
        read(MESSAGES, &mut facts).unwrap();
        let names: Vec<_> = facts.0.keys().map(String::as_str).collect();
        assert_eq!(
            names,
            ["memory 0x000000000000-0x00000009ffff", "memory 0x0000000a0000-0x0000000affff"]
        );
        let value = super::super::Value::Text("Runtime Data RUN|WB|UC".into());
        assert_eq!(facts.0[names[1]], value);
    }

    #[test]
    fn refuses_messages_without_a_map() {
        assert!(read("[    0.0] Linux version 6.1\n", &mut Facts::default()).is_err());
    }
}
