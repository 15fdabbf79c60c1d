//! `vmm inspect`: the machine that `run` would build, as a table or as JSON.

use std::fmt::Write as _;
use std::sync::Arc;

use boot::acpi;
use devices::board::Board;
use devices::device::Claim;
use devices::memory::Memory;
use devices::testutil::FakeHost;
use serde_json::{Value, json};
use vm_memory::{GuestAddress, GuestMemoryMmap};

use crate::config::Config;
use crate::kvm;
use crate::machine::Plan;

/// Builds the machine on a host that is not there, and tells of it.
///
/// # Errors
///
/// When `run` would not build it either.
pub fn show(config: Config, json: bool) -> anyhow::Result<String> {
    let plan = Plan::new(config, &kvm::open()?)?;
    // The layout is real, and nobody touches what it costs nothing to map.
    let ranges: Vec<_> = plan.ram.ranges().into_iter().map(region).collect::<Result<_, _>>()?;
    let memory = Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&ranges)?));
    let mut board = Board::new(memory, Arc::new(FakeHost::default()), Arc::new(|_| {}));
    let description = plan.furnish(&mut board)?;
    let platform = description.get().expect("it was furnished").platform()?;
    let facts = json!({
        "config": plan.config,
        "memory": memory_map(&plan),
        "processors": plan.apic_ids.iter().enumerate()
            .map(|(index, apic_id)| json!({"index": index, "apic-id": apic_id}))
            .collect::<Vec<_>>(),
        "pci": functions(&board),
        "claims": claims(&board),
        "acpi": acpi_facts(&platform)?,
    });
    if json { Ok(format!("{facts:#}\n")) } else { Ok(table(&facts)) }
}

fn region(range: std::ops::Range<u64>) -> anyhow::Result<(GuestAddress, usize)> {
    Ok((GuestAddress(range.start), usize::try_from(range.end - range.start)?))
}

fn hex(value: u64) -> String {
    format!("{value:#x}")
}

fn memory_map(plan: &Plan) -> Vec<Value> {
    let map = boot::e820::for_firmware(plan.ram);
    let entry = |entry: &boot::e820::Entry| {
        json!({
            "start": hex(entry.base),
            "end": hex(entry.base + (entry.length - 1)),
            "kind": format!("{:?}", entry.kind).to_lowercase(),
        })
    };
    map.iter().map(entry).collect()
}

fn functions(board: &Board) -> Vec<Value> {
    let mut functions = Vec::new();
    for (name, claims) in board.claims() {
        for claim in claims {
            if let Claim::Pci(at, id) = claim {
                let id = id.to_string();
                functions.push(json!({"slot": at.to_string(), "device": name, "id": id}));
            }
        }
    }
    functions.sort_by_key(|function| function["slot"].as_str().map(str::to_owned));
    functions
}

fn claims(board: &Board) -> Vec<Value> {
    let device = |(name, claims): (&str, &[Claim])| {
        let claims: Vec<_> = claims.iter().map(ToString::to_string).collect();
        json!({"device": name, "claims": claims})
    };
    board.claims().map(device).collect()
}

fn acpi_facts(platform: &acpi::Platform) -> anyhow::Result<Value> {
    let range = |range: &std::ops::Range<u64>| format!("{:#x}-{:#x}", range.start, range.end - 1);
    let nodes = platform.nodes.iter().map(|node| {
        let ports =
            node.ports.iter().map(|ports| format!("{:#x}-{:#x}", ports.start, ports.end - 1));
        json!({
            "hid": node.hid,
            "ports": ports.collect::<Vec<_>>(),
            "lines": node.lines,
            "memory": node.memory.iter().map(range).collect::<Vec<_>>(),
        })
    });
    let files = acpi::tables(platform)?.files();
    let files = files.iter().map(|file| json!({"name": file.name, "bytes": file.bytes.len()}));
    Ok(json!({
        "ecam": range(&platform.pcie),
        "pci-windows": platform.windows.iter().map(range).collect::<Vec<_>>(),
        "pci-window-64": platform.window64.as_ref().map(range),
        "pm-base": hex(platform.pm_base.into()),
        "devices": nodes.collect::<Vec<_>>(),
        "files": files.collect::<Vec<_>>(),
    }))
}

/// The facts for people: each part a heading, each entry a line.
fn table(facts: &Value) -> String {
    let mut text = String::new();
    let object = facts.as_object().into_iter().flatten();
    for (part, value) in object {
        writeln!(text, "{part}").expect("a string takes all");
        match value {
            Value::Array(rows) => rows.iter().for_each(|row| line(&mut text, row)),
            Value::Object(fields) => {
                for (key, value) in fields {
                    writeln!(text, "  {key}: {}", words(value)).expect("a string takes all");
                }
            }
            other => line(&mut text, other),
        }
        text.push('\n');
    }
    text
}

fn line(text: &mut String, row: &Value) {
    let cells = row.as_object().into_iter().flatten();
    let cells: Vec<_> = cells.map(|(key, value)| format!("{key} {}", words(value))).collect();
    writeln!(text, "  {}", cells.join("  ")).expect("a string takes all");
}

fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(words).collect::<Vec<_>>().join(", "),
        Value::Object(fields) => {
            let field = |(key, value): (&String, &Value)| format!("{key}={}", words(value));
            fields.iter().map(field).collect::<Vec<_>>().join(" ")
        }
        other => other.to_string(),
    }
}
