//! Describes the machine for its firmware and its guest: turns the resources that devices were
//! granted into ACPI and SMBIOS tables.

use std::ops::Range;
use std::str::FromStr as _;
use std::sync::Arc;

use anyhow::Context;
use boot::acpi::{Cpu, Node, Platform};
use boot::layout::{self, Ram};
use boot::smbios::{Processors, Smbios};
use devices::board::Board;
use devices::bus::Window;
use devices::device::Kind;
use devices::grants::Claim;
use host::uuid::Uuid;

use super::{Generation, Plan};

/// The content of the ACPI and SMBIOS tables. The guest can move windows, so ACPI's part is
/// computed each time.
pub struct Description {
    pub ram: Ram,
    pub smbios: Smbios,
    physical_bits: u8,
    apic_ids: Vec<u32>,
    nodes: Vec<Node>,
    ecam: Arc<Window>,
    pm: Arc<Window>,
    generation: Arc<Generation>,
}

/// PMBASE while it is not programmed: the address at which stock firmware puts it.
const PM_BASE: u64 = 0x600;

impl Description {
    pub(super) fn new(plan: &Plan, board: &Board) -> anyhow::Result<Self> {
        Ok(Self {
            ram: plan.ram,
            smbios: smbios(plan)?,
            physical_bits: plan.model.physical_bits(),
            apic_ids: plan.apic_ids.clone(),
            nodes: nodes(board),
            ecam: window(board, "host-bridge", Kind::Memory)?,
            pm: window(board, "lpc", Kind::Port)?,
            generation: plan.generation.clone(),
        })
    }

    /// Fails if the guest has moved a window to an address that no table can describe.
    pub(super) fn platform(&self) -> anyhow::Result<Platform> {
        let pcie = self.ecam.at().map_or(layout::PCIEXBAR, |at| at..at + self.ecam.size);
        Ok(Platform {
            cpus: self.apic_ids.iter().map(|apic_id| Cpu { apic_id: *apic_id }).collect(),
            windows: layout::pci_windows(self.ram, &pcie),
            window64: layout::pci_window64(self.ram, self.physical_bits),
            pcie,
            pm_base: u16::try_from(self.pm.at().unwrap_or(PM_BASE)).context("PMBASE")?,
            nodes: self.nodes.clone(),
            generation_id: self.generation.bytes(),
        })
    }

    /// The address ranges for 32-bit and 64-bit BARs before any is placed.
    pub(super) fn bar_windows(&self) -> (Range<u64>, Option<Range<u64>>) {
        let windows = layout::pci_windows(self.ram, &layout::PCIEXBAR);
        let largest = windows.into_iter().max_by_key(|window| window.end - window.start);
        (largest.unwrap_or(0..0), layout::pci_window64(self.ram, self.physical_bits))
    }
}

fn window(board: &Board, device: &str, kind: Kind) -> anyhow::Result<Arc<Window>> {
    let claims = board.claims().find(|it| it.0 == device).map_or(&[][..], |it| it.1);
    let window = claims.iter().find_map(|claim| match claim {
        Claim::Window(window) if window.kind == kind => Some(window.clone()),
        _ => None,
    });
    window.with_context(|| format!("a machine without `{device}`"))
}

/// The ACPI nodes: all devices that have one, with their granted resources.
pub(super) fn nodes(board: &Board) -> Vec<Node> {
    let mut nodes = Vec::new();
    for (_, claims) in board.claims() {
        for (hid, granted) in Claim::nodes(claims) {
            let mut node = Node { hid: hid.to_owned(), ..Node::default() };
            for claim in granted {
                match claim {
                    Claim::Fixed(Kind::Port, range) => node.ports.extend(ports(range)),
                    Claim::Fixed(Kind::Memory, range) => node.memory.push(range.clone()),
                    Claim::Line(gsi) => node.lines.push(*gsi),
                    _ => {}
                }
            }
            nodes.push(node);
        }
    }
    nodes
}

fn ports(range: &Range<u64>) -> Option<Range<u16>> {
    Some(u16::try_from(range.start).ok()?..u16::try_from(range.end).ok()?)
}

pub(super) fn smbios(plan: &Plan) -> anyhow::Result<Smbios> {
    let config = &plan.config.smbios;
    let cpus = plan.config.cpus;
    let (vendor, model) = plan.model.names();
    Ok(Smbios {
        manufacturer: config.manufacturer.clone(),
        product: config.product.clone(),
        version: config.version.clone(),
        serial: config.serial.clone(),
        uuid: Uuid::from_str(&config.uuid)?.0,
        processors: Processors {
            sockets: u16::try_from(cpus.sockets)?,
            cores: u16::try_from(cpus.cores)?,
            threads: u16::try_from(cpus.threads)?,
            vendor,
            model,
            signature: plan.model.signature(),
        },
        memory: plan.ram.ranges(),
    })
}

#[cfg(test)]
mod test {
    use devices::pci::Address;

    #[test]
    fn interrupt_pins_match_the_acpi_routing() {
        for device in 0..32 {
            for pin in 0..4 {
                let wired = Address::new(device, 0).gsi(pin);
                assert_eq!(wired, boot::acpi::intx_line(device, pin), "{device:#x} pin {pin}");
            }
        }
    }
}
