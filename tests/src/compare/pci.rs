//! PCI functions: their configuration space, and the resources that Linux found in it.

use std::fs;
use std::path::Path;

use anyhow::{Context, ensure};

use super::Facts;
use super::fields::{self, Field, number};

/// The header of type 0 (PCI 3.0, 6.1) without the BARs.
const HEADER: &[Field] = &[
    ("vendor", 0, 2),
    ("device", 2, 2),
    ("command", 4, 2),
    ("status", 6, 2),
    ("revision", 8, 1),
    ("class", 9, 3),
    ("cache-line", 0xc, 1),
    ("latency", 0xd, 1),
    ("header", 0xe, 1),
    ("bist", 0xf, 1),
    ("cis", 0x28, 4),
    ("subsystem-vendor", 0x2c, 2),
    ("subsystem", 0x2e, 2),
    ("capabilities", 0x34, 1),
    ("interrupt-line", 0x3c, 1),
    ("interrupt-pin", 0x3d, 1),
    ("min-grant", 0x3e, 1),
    ("max-latency", 0x3f, 1),
];

const AFTER_HEADER: usize = 0x40;

/// Reads one folder for each function.
pub(super) fn read(folder: &Path, facts: &mut Facts) -> anyhow::Result<()> {
    let mut count = 0;
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).context("a name")?;
        let name = name.strip_prefix("0000:").unwrap_or(name);
        let config = fs::read(path.join("config")).with_context(|| format!("PCI {name}"))?;
        ensure!(config.len() >= 256, "PCI {name}: {} bytes", config.len());
        let resources = fs::read_to_string(path.join("resource"))?;
        function(name, &config, &resources, facts);
        count += 1;
    }
    ensure!(count > 0, "{}: no function", folder.display());
    Ok(())
}

fn function(name: &str, config: &[u8], resources: &str, facts: &mut Facts) {
    let prefix = format!("pci {name}");
    let of = |at, length| number(config, at, length).unwrap_or_default();
    let what = format!("{:04x}:{:04x} class {:06x}", of(0, 2), of(2, 2), of(9, 3));
    facts.thing(prefix.clone(), what);
    fields::read(&prefix, config, HEADER, facts);
    facts.text(format!("{prefix} bytes"), config.len().to_string());
    for at in (AFTER_HEADER..config.len()).step_by(4) {
        let value = of(at, 4);
        if value != 0 {
            facts.text(format!("{prefix} register {at:#05x}"), format!("{value:#010x}"));
        }
    }
    for (bar, line) in resources.lines().enumerate() {
        if line.split_ascii_whitespace().any(|word| !word.trim_matches(['0', 'x']).is_empty()) {
            facts.text(format!("{prefix} resource {bar}"), line);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn registers_and_resources_become_facts() {
        let mut config = [0; 256];
        config[0..4].copy_from_slice(&[0x86, 0x80, 0x18, 0x29]);
        config[0x40] = 1;
        let zero = "0x0000000000000000 0x0000000000000000 0x0000000000000000\n";
        let bar = "0x00000000c0000000 0x00000000c0000fff 0x0000000000040200\n";
        let mut facts = Facts::default();
        function("00:1f.0", &config, &format!("{zero}{bar}"), &mut facts);
        assert_eq!(facts.count("pci 00:1f.0 register"), 1);
        assert_eq!(facts.count("pci 00:1f.0 resource 1"), 1);
        assert_eq!(facts.count("pci 00:1f.0 resource"), 1);
        assert_eq!(facts.0["pci 00:1f.0 device"], super::super::Value::Text("0x2918".into()));
    }
}
