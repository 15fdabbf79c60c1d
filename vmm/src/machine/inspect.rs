//! `vmm inspect`: the machine that `run` would build, as a table or as JSON.

use std::fmt::Write as _;
use std::sync::Arc;

use boot::acpi;
use devices::board::Board;
use devices::grants::Claim;
use devices::hypervisor::fake::FakeHypervisor;
use host::memory::Memory;
use host::ram::GuestMemoryMmap;
use serde_json::{Value, json};
use vm_memory::GuestAddress;

use super::Plan;
use super::saved::layout;
use crate::config::Config;
use crate::kvm;

/// Builds the machine on a fake host, and describes it as a table or as JSON. Fails if `run` could
/// not build the machine either.
pub fn show(config: Config, json: bool) -> anyhow::Result<String> {
    let plan = Plan::new(config, &kvm::open()?)?.dry();
    // The real layout: mapping memory that is never touched costs nothing.
    let ranges: Vec<_> = plan.regions().into_iter().map(region).collect::<Result<_, _>>()?;
    let memory = Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&ranges)?));
    let mut board = Board::new(memory, Arc::new(FakeHypervisor::default()), Arc::new(|_| {}));
    let description = plan.add_devices(&mut board)?;
    let platform = description.get().expect("`add_devices` sets it").platform()?;
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
    let device = |(name, claims)| json!({"device": name, "claims": claims});
    layout(board).into_iter().map(device).collect()
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

/// The facts as text: sections with a heading and columns.
fn table(facts: &Value) -> String {
    let mut text = String::new();
    part(&mut text, "Memory", &facts["memory"], &["start", "end", "kind"]);
    part(&mut text, "Processors", &facts["processors"], &["index", "apic-id"]);
    part(&mut text, "PCI", &facts["pci"], &["slot", "id", "device"]);
    writeln!(text, "Configuration\n  {}\n", facts["config"]).expect("a string takes all");
    text.push_str("Claims\n");
    for device in facts["claims"].as_array().into_iter().flatten() {
        let claims = device["claims"].as_array().into_iter().flatten();
        let mut claims: Vec<_> = claims.map(words).collect();
        if claims.is_empty() {
            // USB devices, for example, claim nothing of the board.
            claims.push("nothing of the board".into());
        }
        for claim in claims {
            let device = words(&device["device"]);
            writeln!(text, "  {device:<14}{claim}").expect("a string takes all");
        }
    }
    let acpi = &facts["acpi"];
    text.push('\n');
    part(&mut text, "ACPI devices", &acpi["devices"], &["hid", "ports", "lines", "memory"]);
    part(&mut text, "ACPI files", &acpi["files"], &["name", "bytes"]);
    text.push_str("ACPI windows\n");
    for key in ["ecam", "pci-windows", "pci-window-64", "pm-base"] {
        writeln!(text, "  {key:<14}{}", words(&acpi[key])).expect("a string takes all");
    }
    text
}

/// Appends a heading and its rows. Each column is as wide as its widest cell.
fn part(text: &mut String, heading: &str, rows: &Value, columns: &[&str]) {
    writeln!(text, "{heading}").expect("a string takes all");
    let rows = rows.as_array().into_iter().flatten();
    let rows: Vec<Vec<String>> =
        rows.map(|row| columns.iter().map(|column| words(&row[column])).collect()).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].len()).max().unwrap_or(0);
    for row in &rows {
        let cell = |(column, cell): (usize, &String)| format!("  {cell:<0$}", width(column));
        let line: String = row.iter().enumerate().map(cell).collect();
        writeln!(text, "{}", line.trim_end()).expect("a string takes all");
    }
    text.push('\n');
}

fn words(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(words).collect::<Vec<_>>().join(", "),
        Value::Null => "none".into(),
        other => other.to_string(),
    }
}
