//! The ACPI tables of a machine, in the two forms that guests accept.
//!
//! The tables are laid out once, in two blobs: the RSDP, and all others. A list of steps completes
//! them: pointers to add and checksums to compute. For firmware the steps become the loader script
//! of QEMU's fw_cfg. For direct boot this module carries them out.
//!
//! The machine is a full-hardware ACPI machine (PM1 block, PM timer, SCI on line 9), because guests
//! know that path best. There is no S3 and no S4. The power button is the fixed one.

mod aml;
mod dsdt;
mod facs;
mod fadt;
mod hpet;
mod madt;
mod mcfg;
mod node;
mod presence;
mod script;
mod table;
mod tpm2;
pub mod vmgenid;
mod waet;

use std::ops::Range;

use anyhow::{Result, ensure};

pub use self::dsdt::intx_line;
pub use self::node::Node;
pub use self::presence::presence_file;
use self::script::Layout;
pub use self::script::{
    DIRECT_GENERATION_ID, RSDP_FILE, SCRIPT_FILE, TABLES_FILE, Tables, event_log,
};
pub use self::tpm2::TPM;

/// The interrupt line of the system control interrupt.
pub const SCI: u8 = 9;

/// The sleep type in `_S5` that turns the machine off.
///
/// Firmware uses this number too, and does not read it from the tables.
pub const S5_SLEEP_TYPE: u8 = 0;

/// The length of the power management block in bytes.
const PM_LENGTH: u16 = 0x80;

/// Larger than any hypervisor's limit. The sizes of the tables are checked against it.
const CPUS_MAX: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cpu {
    pub apic_id: u32,
}

/// The machine that the tables describe.
///
/// Under firmware, `pcie` is the guest's setting of PCIEXBAR, so build the tables only when the
/// firmware asks for them. The guest may set an invalid PCIEXBAR. An error from [`tables`] is then
/// the guest's mistake and not the machine's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Platform {
    /// All processors. The index of a processor is its ACPI processor UID.
    pub cpus: Vec<Cpu>,
    /// PCIEXBAR: the range of PCI configuration space, 1 MiB for each bus.
    pub pcie: Range<u64>,
    /// The windows for 32-bit BARs.
    pub windows: Vec<Range<u64>>,
    /// The window for 64-bit BARs.
    pub window64: Option<Range<u64>>,
    pub pm_base: u16,
    /// Devices that are neither on PCI nor described by a table of their own.
    pub nodes: Vec<Node>,
    /// The VM Generation ID, in memory order.
    pub generation_id: [u8; 16],
}

impl Platform {
    fn node(&self, hid: &str) -> Option<&Node> {
        self.nodes.iter().find(|node| node.hid == hid)
    }

    fn check(&self) -> Result<()> {
        ensure!(!self.cpus.is_empty(), "a machine without a processor");
        ensure!(self.cpus.len() <= CPUS_MAX, "{} processors: at most {CPUS_MAX}", self.cpus.len());
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
            "a power management block at port {:#x}: the address is unaligned or too high",
            self.pm_base
        );
        for window in &self.windows {
            ensure!(
                !window.is_empty() && window.end <= 1 << 32,
                "a 32-bit PCI window at {window:#x?}: it is empty or above 4 GiB"
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

/// Fails if the tables cannot express `platform`, or if a guest would reject the result.
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
    if let Some(bytes) = tpm2::tpm2(platform)? {
        roots.push(layout.table_with_log(&bytes, tpm2::LOG)?);
    }
    let page = vmgenid::page(platform.generation_id);
    roots.push(layout.table_with_page(&vmgenid::ssdt()?, vmgenid::ADDRESS, page)?);
    layout.finish(&roots)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::layout::{self, Ram};

    fn platform(cpus: u32) -> Platform {
        let ram = Ram::new(1 << 30);
        Platform {
            cpus: (0..cpus).map(|apic_id| Cpu { apic_id }).collect(),
            pcie: layout::PCIEXBAR,
            windows: layout::pci_windows(ram, &layout::PCIEXBAR),
            window64: layout::pci_window64(ram, 40),
            pm_base: 0x600,
            nodes: vec![],
            generation_id: [7; 16],
        }
    }

    fn node(hid: &str) -> Node {
        Node { hid: hid.into(), ports: vec![0x3F8..0x400; 1], ..Node::default() }
    }

    /// Returns the error of [`tables`] for a platform changed by `change`.
    fn refusal(change: impl Fn(&mut Platform)) -> String {
        let mut platform = platform(2);
        change(&mut platform);
        tables(&platform).unwrap_err().to_string()
    }

    fn blob(platform: &Platform) -> Vec<u8> {
        tables(platform).unwrap().files()[0].bytes.clone()
    }

    fn count(haystack: &[u8], needle: &[u8]) -> usize {
        haystack.windows(needle.len()).filter(|window| *window == needle).count()
    }

    fn find<'a>(blob: &'a [u8], signature: &[u8; 4]) -> &'a [u8] {
        let at = blob.windows(4).position(|window| window == signature).unwrap();
        let length = u32::from_le_bytes(blob[at + 4..at + 8].try_into().unwrap());
        &blob[at..at + length as usize]
    }

    #[test]
    fn wires_interrupt_pins_like_q35() {
        let lines = |slot| [0, 1, 2, 3].map(|pin| intx_line(slot, pin));
        assert_eq!(lines(0), [20, 21, 22, 23]);
        assert_eq!(lines(1), [21, 22, 23, 20]);
        assert_eq!(lines(24), [20, 21, 22, 23]);
        assert_eq!(lines(25), [16, 17, 18, 19]);
        assert_eq!(lines(30), [20, 21, 22, 23]);
        assert_eq!(lines(31), [16, 17, 18, 19]);
    }

    #[test]
    fn numbers_devices_of_a_kind() {
        let mut platform = platform(1);
        platform.nodes = vec![node("PNP0501"), node("PNP0501"), node("ABCD0001"), node("PNP0501")];
        let blob = blob(&platform);
        for (name, times) in [("COM1", 1), ("COM2", 1), ("COM3", 1), ("COM4", 0), ("DEV1", 1)] {
            assert_eq!(count(&blob, name.as_bytes()), times, "{name}");
        }
    }

    #[test]
    fn the_fadt_announces_the_keyboard_controller_and_the_clock() {
        let boot_arch = |platform: &Platform| find(&blob(platform), b"FACP")[109];
        let mut platform = platform(1);
        assert_eq!(boot_arch(&platform), 1 << 5 | 1 << 2, "VGA is absent always");
        platform.nodes = vec![node("PNP0B00"), node("PNP0303")];
        assert_eq!(boot_arch(&platform), 1 << 1 | 1 << 2);
    }

    #[test]
    fn uses_x2apic_entries_only_from_255_on() {
        let madt = |platform: &Platform| find(&blob(platform), b"APIC").to_vec();
        let narrow = madt(&platform(255));
        assert_eq!((narrow[8], narrow.len()), (1, 44 + 255 * 8 + 12 + 5 * 10 + 6));
        assert_eq!(madt(&platform(256))[8], 3);
        let wide = madt(&platform(300));
        let entry = |id: u32| [u32::from_le_bytes([9, 16, 0, 0]), id, 1, id];
        let x2apic: Vec<_> = (255..300).flat_map(entry).flat_map(u32::to_le_bytes).collect();
        assert_eq!(count(&wide, &x2apic), 1);
        // Few processors with sparse IDs.
        let mut sparse = platform(2);
        sparse.cpus[1].apic_id = 256;
        assert_eq!(count(&madt(&sparse), &[9, 16, 0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0]), 1);
    }

    #[test]
    fn has_room_for_a_thousand_processors_in_direct_boot() {
        assert!(tables(&platform(1024)).unwrap().image().is_ok());
        let error = tables(&platform(4096)).unwrap().image().unwrap_err().to_string();
        assert!(error.contains("but direct boot has room for 65472"), "{error}");
    }

    #[test]
    fn refuses_platforms_that_acpi_cannot_describe() {
        assert!(refusal(|p| p.cpus.clear()).contains("without a processor"));
        assert!(refusal(|p| p.cpus.resize(4097, Cpu { apic_id: 1 })).contains("4097"));
        assert!(refusal(|p| p.cpus[1].apic_id = 0).contains("APIC ID 0"));
        assert!(refusal(|p| p.pcie = 0..0).contains("PCIEXBAR"));
        assert!(refusal(|p| p.pcie = 0xE000_1000..0xE010_1000).contains("PCIEXBAR"));
        assert!(refusal(|p| p.pcie = 0xC000_0000..0xE000_0000).contains("PCIEXBAR"));
        assert!(refusal(|p| p.pcie = 0xD000_0000..0xE000_0000).contains("overlap"));
        assert!(refusal(|p| p.windows[0].start = 1 << 33).contains("0x200000000"));
        assert!(refusal(|p| p.window64 = Some(0xFE00_0000..1 << 40)).contains("overlap"));
        assert!(refusal(|p| p.pm_base = 0xCF8).contains("0xcf8"));
        assert!(refusal(|p| p.pm_base = 0xFFFF).contains("0xffff"));
    }

    #[test]
    fn refuses_invalid_device_nodes() {
        for hid in ["", "PNP", "pnp0501", "PNP05G1", "ABC00001x", "é00000"] {
            assert!(refusal(|p| p.nodes = vec![node(hid)]).contains("neither an EISA"), "{hid}");
        }
        let changed = |change: fn(&mut Node)| {
            refusal(|p| {
                p.nodes = vec![node("PNP0501")];
                change(&mut p.nodes[0]);
            })
        };
        assert!(changed(|n| n.lines = vec![24]).contains("line 24"));
        assert!(changed(|n| n.ports = vec![0x80..0x80; 1]).contains("an empty port range at 0x80"));
        assert!(changed(|n| n.memory = vec![0..1 << 33; 1]).contains("not below 4 GiB"));
        assert!(refusal(|p| p.nodes = vec![node("PNP0501"); 36]).contains("36 devices"));
        for hid in ["PNP0103", TPM] {
            assert!(refusal(|p| p.nodes = vec![node(hid)]).contains("without memory"), "{hid}");
        }
    }
}
