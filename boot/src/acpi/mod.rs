//! The ACPI tables, from one description of the machine, in the two forms that guests take.
//!
//! The tables are laid out once, in two blobs (the RSDP, and all else) with the steps that make them
//! whole: pointers to add, checksums to compute. For firmware the steps become the loader script of
//! QEMU's fw_cfg; for direct boot they are carried out here.
//!
//! The machine is a full-hardware ACPI one (PM1 block, PM timer, SCI on line 9), since that is the
//! path that guests know best. No S3, no S4; the power button is the fixed one.

mod dsdt;
mod facs;
mod fadt;
mod hpet;
mod madt;
mod mcfg;
mod node;
mod script;
mod table;
mod waet;

use std::ops::Range;

use anyhow::{Result, ensure};

pub use self::dsdt::intx_line;
pub use self::node::Node;
use self::script::Layout;
pub use self::script::{RSDP_FILE, SCRIPT_FILE, TABLES_FILE, Tables};

/// The line of the system control interrupt.
pub const SCI: u8 = 9;

/// What `_S5` says: the sleep type that turns the machine off.
///
/// Firmware turns off with this number too, and does not read it anywhere.
pub const S5_SLEEP_TYPE: u8 = 0;

/// The length of the power management block.
const PM_LENGTH: u16 = 0x80;

/// More processors than any hypervisor takes; what they need in the tables is checked with it.
const CPUS_MAX: usize = 4096;

/// One processor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    /// Its local APIC's ID.
    pub apic_id: u32,
}

/// What the tables describe.
///
/// Under firmware, `pcie` is what the guest has programmed into PCIEXBAR, so the tables are to be
/// built when the firmware asks for them and not before.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// Every processor. A processor's place here is its ACPI processor UID.
    pub cpus: Vec<Cpu>,
    /// PCIEXBAR: the configuration space of as many buses as it has MiB.
    pub pcie: Range<u64>,
    /// Where 32-bit BARs may be.
    pub windows: Vec<Range<u64>>,
    /// Where 64-bit BARs may be.
    pub window64: Option<Range<u64>>,
    /// The I/O base of the power management block.
    pub pm_base: u16,
    /// What is neither PCI nor described by a table of its own.
    pub nodes: Vec<Node>,
}

impl Platform {
    fn node(&self, hid: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.hid == hid)
    }

    fn check(&self) -> Result<()> {
        ensure!(!self.cpus.is_empty(), "a machine without a processor");
        ensure!(self.cpus.len() <= CPUS_MAX, "{} processors are too many", self.cpus.len());
        let mut ids: Vec<_> = self.cpus.iter().map(|cpu| cpu.apic_id).collect();
        ids.sort_unstable();
        for pair in ids.windows(2) {
            ensure!(pair[0] != pair[1], "two processors with APIC ID {}", pair[0]);
        }
        let bus = 1 << 20;
        ensure!(
            !self.pcie.is_empty()
                && self.pcie.start.is_multiple_of(bus)
                && self.pcie.end.is_multiple_of(bus)
                && self.pcie.end - self.pcie.start <= 256 * bus,
            "PCIEXBAR at {:#x?}, which is not 1 to 256 aligned buses of 1 MiB",
            self.pcie
        );
        ensure!(
            self.pm_base.is_multiple_of(PM_LENGTH) && self.pm_base < 0xCF8 - PM_LENGTH,
            "a power management block at port {:#x}",
            self.pm_base
        );
        for window in &self.windows {
            ensure!(
                !window.is_empty() && window.end <= 1 << 32,
                "a 32-bit PCI window at {window:#x?}"
            );
        }
        let mut ranges: Vec<_> = self.windows.iter().chain(&self.window64).collect();
        ranges.push(&self.pcie);
        ranges.sort_unstable_by_key(|range| range.start);
        for pair in ranges.windows(2) {
            ensure!(
                pair[0].end <= pair[1].start,
                "PCI address ranges that overlap: {:#x?} and {:#x?}",
                pair[0],
                pair[1]
            );
        }
        self.nodes.iter().try_for_each(Node::check)
    }
}

/// Lays out every table of `platform`.
///
/// # Errors
///
/// A description that no table can hold, or that would make a guest refuse the tables.
pub fn tables(platform: &Platform) -> Result<Tables> {
    platform.check()?;
    let mut layout = Layout::default();
    let facs = layout.facs(&facs::facs());
    let dsdt = layout.table(&dsdt::dsdt(platform)?, &[])?;
    let (bytes, pointers) = fadt::fadt(platform, facs, dsdt);
    let mut roots = vec![layout.table(&bytes, &pointers)?];
    let mut others = vec![madt::madt(platform)?, mcfg::mcfg(platform)?, waet::waet()?];
    others.extend(hpet::hpet(platform)?);
    for bytes in others {
        roots.push(layout.table(&bytes, &[])?);
    }
    layout.finish(&roots)
}
