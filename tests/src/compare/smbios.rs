//! SMBIOS (DSP0134): the anchor, and the structures by type and field.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use super::Facts;
use super::fields::{self, Field, number, word};

/// The length of a field that has the number of a string.
const TEXT: usize = 0;

/// Other types are compared byte by byte.
const TYPES: &[(u8, &str, &[Field])] = &[
    (0, "bios", &[("vendor", 4, TEXT), ("version", 5, TEXT), ("segment", 6, 2), ("date", 8, TEXT)]),
    (
        1,
        "system",
        &[
            ("manufacturer", 4, TEXT),
            ("product", 5, TEXT),
            ("version", 6, TEXT),
            ("serial", 7, TEXT),
            ("uuid", 8, 16),
            ("wake-up", 24, 1),
            ("sku", 25, TEXT),
            ("family", 26, TEXT),
        ],
    ),
    (
        3,
        "chassis",
        &[
            ("manufacturer", 4, TEXT),
            ("type", 5, 1),
            ("version", 6, TEXT),
            ("serial", 7, TEXT),
            ("asset-tag", 8, TEXT),
            ("states", 9, 4),
            ("oem", 13, 4),
            ("height", 17, 1),
            ("cords", 18, 1),
            ("elements", 19, 2),
        ],
    ),
    (
        4,
        "processor",
        &[
            ("socket", 4, TEXT),
            ("type", 5, 1),
            ("family", 6, 1),
            ("manufacturer", 7, TEXT),
            ("id", 8, 8),
            ("version", 16, TEXT),
            ("voltage", 17, 1),
            ("external-clock", 18, 2),
            ("max-speed", 20, 2),
            ("current-speed", 22, 2),
            ("status", 24, 1),
            ("upgrade", 25, 1),
            ("caches", 26, 6),
            ("serial", 32, TEXT),
            ("asset-tag", 33, TEXT),
            ("part", 34, TEXT),
            ("counts", 35, 3),
            ("characteristics", 38, 2),
            ("family-2", 40, 2),
            ("counts-2", 42, 6),
        ],
    ),
    (
        17,
        "memory-device",
        &[
            ("array", 4, 2),
            ("error-handle", 6, 2),
            ("widths", 8, 4),
            ("size", 12, 2),
            ("form-factor", 14, 1),
            ("set", 15, 1),
            ("locator", 16, TEXT),
            ("bank", 17, TEXT),
            ("type", 18, 1),
            ("detail", 19, 2),
            ("speed", 21, 2),
            ("manufacturer", 23, TEXT),
            ("serial", 24, TEXT),
            ("asset-tag", 25, TEXT),
            ("part", 26, TEXT),
            ("attributes", 27, 1),
            ("extended-size", 28, 4),
            ("configured-speed", 32, 2),
            ("voltages", 34, 6),
        ],
    ),
];

/// Reads the anchor and the structures from the kernel's files.
pub(super) fn read(folder: &Path, facts: &mut Facts) -> anyhow::Result<()> {
    let anchor = fs::read(folder.join("smbios_entry_point")).context("the SMBIOS anchor")?;
    anchor_facts(&anchor, facts)?;
    let tables = fs::read(folder.join("DMI")).context("the SMBIOS structures")?;
    structures(&tables, facts)
}

fn anchor_facts(anchor: &[u8], facts: &mut Facts) -> anyhow::Result<()> {
    ensure!(anchor.starts_with(b"_SM") && anchor.len() > 8, "no SMBIOS anchor: {anchor:02x?}");
    // The anchor of SMBIOS 2 is one letter shorter, and so its version is one byte earlier.
    let (name, version) =
        if anchor.starts_with(b"_SM3_") { (&anchor[..5], 7) } else { (&anchor[..4], 6) };
    let text = format!("{} {}.{}", word(name), anchor[version], anchor[version + 1]);
    facts.text("smbios anchor", text);
    Ok(())
}

fn structures(mut tables: &[u8], facts: &mut Facts) -> anyhow::Result<()> {
    let mut counts = [0; 256];
    while let [kind, length, ..] = *tables {
        let length = usize::from(length);
        ensure!(length >= 4 && length <= tables.len(), "an SMBIOS structure of {length} bytes");
        let (formatted, rest) = tables.split_at(length);
        let end = rest.windows(2).position(|pair| pair == [0, 0]);
        let end = end.context("SMBIOS strings: no terminator")?;
        let strings: Vec<_> = rest[..end].split(|&byte| byte == 0).map(word).collect();
        structure(formatted, &strings, counts[usize::from(kind)], facts);
        counts[usize::from(kind)] += 1;
        if kind == 127 {
            return Ok(());
        }
        tables = &rest[end + 2..];
    }
    Ok(())
}

fn structure(formatted: &[u8], strings: &[String], index: u32, facts: &mut Facts) {
    let kind = formatted[0];
    let known = TYPES.iter().find(|it| it.0 == kind);
    let name = known.map_or(String::new(), |it| format!(" {}", it.1));
    let prefix = format!("smbios type {kind}{name} #{index}");
    facts.thing(prefix.clone(), "there");
    fields::read(&prefix, formatted, &[("length", 1, 1), ("handle", 2, 2)], facts);
    let Some((.., named)) = known else {
        for (at, byte) in formatted.iter().enumerate().skip(4) {
            facts.text(format!("{prefix} byte {at:#04x}"), format!("{byte:#04x}"));
        }
        for (number, text) in (1..).zip(strings).filter(|it| !it.1.is_empty()) {
            facts.text(format!("{prefix} text {number}"), format!("\"{text}\""));
        }
        return;
    };
    let (texts, numbers): (Vec<Field>, Vec<Field>) = named.iter().partition(|it| it.2 == TEXT);
    fields::read(&prefix, formatted, &numbers, facts);
    for (name, at, _) in texts {
        let Some(number) = number(formatted, at, 1) else { continue };
        let text = (1..).zip(strings).find(|it| it.0 == number);
        let text = text.map_or_else(|| "none".into(), |(_, text)| format!("\"{text}\""));
        facts.text(format!("{prefix} {name}"), text);
    }
}

#[cfg(test)]
mod test {
    use super::super::Value;
    use super::*;

    #[test]
    fn string_numbers_are_resolved() {
        let mut tables = vec![1, 27, 0, 1, 1, 2, 0, 0];
        tables.resize(27, 0);
        tables.extend(b"Maker\0Box\0\0");
        tables.extend([32, 5, 0, 0x20, 7, 0, 0]);
        tables.extend([127, 4, 0, 0x7f, 0, 0]);
        let mut facts = Facts::default();
        structures(&tables, &mut facts).unwrap();
        let text = |text: &str| Value::Text(text.into());
        assert_eq!(facts.0["smbios type 1 system #0 manufacturer"], text("\"Maker\""));
        assert_eq!(facts.0["smbios type 1 system #0 product"], text("\"Box\""));
        assert_eq!(facts.0["smbios type 1 system #0 serial"], text("none"));
        assert_eq!(facts.0["smbios type 32 #0 byte 0x04"], text("0x07"));
    }

    #[test]
    fn refuses_invalid_structures() {
        assert!(structures(&[1, 2, 0, 0, 0, 0], &mut Facts::default()).is_err());
        assert!(structures(&[1, 200, 0, 0, 0, 0], &mut Facts::default()).is_err());
        assert!(structures(&[1, 4, 0, 0, 7], &mut Facts::default()).is_err());
    }

    #[test]
    fn the_anchor_holds_the_smbios_version() {
        let mut facts = Facts::default();
        anchor_facts(&[b'_', b'S', b'M', b'3', b'_', 0, 24, 3, 0, 0], &mut facts).unwrap();
        assert_eq!(facts.0["smbios anchor"], Value::Text("_SM3_ 3.0".into()));
        assert!(anchor_facts(b"nothing", &mut facts).is_err());
    }
}
