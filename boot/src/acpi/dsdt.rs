//! The Differentiated System Description Table (DSDT) in AML: the PCI host bridge, the devices
//! behind the LPC bridge, and the processors.
//!
//! Revision 2, because integers have 64 bits from that revision on.

use acpi_tables::Aml;
use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, And, Arg, CreateDWordField, Device, Else, Equal, IO, If,
    Local, Memory32Fixed, Method, Name, NotEqual, ONE, Or, Package, PackageBuilder, Path,
    ResourceTemplate, Return, Scope, Store, Uuid, ZERO,
};
use anyhow::{Context, Result};

use super::aml::{Bytes, bytes};
use super::node::{self, id};
use super::{PM_LENGTH, Platform, S5_SLEEP_TYPE, table};
use crate::layout;

/// I/O ports of the PCI configuration mechanism. The windows of I/O space lie around them.
const PCI_CONFIG: u16 = 0xCF8;
const PCI_CONFIG_LENGTH: u8 = 8;

/// `_ADR` of the LPC bridge: slot 31, function 0.
const LPC_ADDRESS: u32 = 0x001F_0000;

const SLOTS: u8 = 32;

/// UUID of the `_OSC` feature set of a host bridge (PCI Firmware 3.3, 4.5.1).
const OSC_UUID: &str = "33DB4D5B-1FF7-401C-9657-7441C03DD766";
/// Features that the guest may take over: PME, AER and the capability structure. Neither native nor
/// SHPC hotplug exists.
const OSC_GRANTED: u8 = 0x1C;
const OSC_UNRECOGNISED_UUID: u8 = 0x04;
const OSC_UNRECOGNISED_REVISION: u8 = 0x08;
const OSC_MASKED: u8 = 0x10;

/// Returns the interrupt line wired to pin `pin` (0: INTA) of slot `slot` on bus 0.
///
/// The wiring is that of QEMU's Q35: slots 25 to 29 and 31 use PIRQ A to D in order, slot 30 uses E
/// to H in order, and all others use E to H, rotated by the slot.
pub fn intx_line(slot: u8, pin: u8) -> u32 {
    let pin = u32::from(pin % 4);
    match slot {
        25..=29 | 31 => 16 + pin,
        30 => 20 + pin,
        _ => 20 + (u32::from(slot) + pin) % 4,
    }
}

pub(super) fn dsdt(platform: &Platform) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    // The guest calls `_PIC` with 1 for APIC mode. The _PRT describes APIC mode only.
    Name::new("PICF".into(), &ZERO).to_aml_bytes(&mut body);
    Method::new("_PIC".into(), 1, false, vec![&Store::new(&Path::new("PICF"), &Arg(0))])
        .to_aml_bytes(&mut body);
    let sleep = S5_SLEEP_TYPE;
    Name::new("_S5_".into(), &Package::new(vec![&sleep, &sleep, &ZERO, &ZERO]))
        .to_aml_bytes(&mut body);
    let on_system_bus = node::devices(&platform.nodes, node::Node::is_on_system_bus)?;
    Scope::new(
        "_SB_".into(),
        vec![
            &host_bridge(platform)?,
            &pcie_reservation(platform)?,
            &cpus(platform),
            &on_system_bus,
        ],
    )
    .to_aml_bytes(&mut body);
    table::table(*b"DSDT", 2, &body)
}

/// The PCI Express host bridge, with the LPC bridge below it.
fn host_bridge(platform: &Platform) -> Result<Bytes> {
    Ok(bytes(&Device::new(
        "PCI0".into(),
        vec![
            &id("_HID", "PNP0A08"),
            &id("_CID", "PNP0A03"),
            &Name::new("_SEG".into(), &ZERO),
            &Name::new("_BBN".into(), &ZERO),
            &Name::new("_UID".into(), &ZERO),
            &windows(platform)?,
            &routing(),
            &osc(),
            &lpc(platform)?,
        ],
    )))
}

/// `_CRS` of the host bridge: the buses, ports and memory windows that it forwards to PCI.
fn windows(platform: &Platform) -> Result<Bytes> {
    let mut crs = Vec::new();
    let last_bus = u16::try_from(((platform.pcie.end - platform.pcie.start) >> 20) - 1)?;
    AddressSpace::new_bus_number(0u16, last_bus).to_aml_bytes(&mut crs);
    IO::new(PCI_CONFIG, PCI_CONFIG, 1, PCI_CONFIG_LENGTH).to_aml_bytes(&mut crs);
    AddressSpace::new_io(0u16, PCI_CONFIG - 1, None).to_aml_bytes(&mut crs);
    AddressSpace::new_io(PCI_CONFIG + u16::from(PCI_CONFIG_LENGTH), 0xFFFF, None)
        .to_aml_bytes(&mut crs);
    let vga = (&layout::VGA, AddressSpaceCacheable::Cacheable);
    let windows = platform.windows.iter().map(|w| (w, AddressSpaceCacheable::NotCacheable));
    for (window, cacheable) in [vga].into_iter().chain(windows) {
        let context = || format!("a 32-bit PCI window at {window:#x?}");
        let first = u32::try_from(window.start).with_context(context)?;
        let last = u32::try_from(window.end - 1).with_context(context)?;
        AddressSpace::new_memory(cacheable, true, first, last, None).to_aml_bytes(&mut crs);
    }
    if let Some(window) = &platform.window64 {
        let cacheable = AddressSpaceCacheable::Cacheable;
        AddressSpace::new_memory(cacheable, true, window.start, window.end - 1, None)
            .to_aml_bytes(&mut crs);
    }
    Ok(bytes(&Name::new("_CRS".into(), &ResourceTemplate::new(vec![&Bytes(crs)]))))
}

/// `_PRT`: the interrupt line of each pin of each slot. All are hardwired; there are no link
/// devices.
fn routing() -> Bytes {
    let mut table = PackageBuilder::new();
    for slot in 0..SLOTS {
        for pin in 0..4u8 {
            let address = u32::from(slot) << 16 | 0xFFFF;
            let line = intx_line(slot, pin);
            table.add_element(&Package::new(vec![&address, &pin, &ZERO, &line]));
        }
    }
    bytes(&Name::new("_PRT".into(), &table))
}

/// `_OSC`: grants the requested features that are in [`OSC_GRANTED`].
fn osc() -> Bytes {
    let (status, control) = (Path::new("CDW1"), Path::new("CDW3"));
    let field = |name: &Path, at: u8| bytes(&CreateDWordField::new(name, &Arg(3), &at));
    let refuse = |bit: u8| bytes(&Or::new(&Path::new("CDW1"), &Path::new("CDW1"), &bit));
    let ours = bytes(&Equal::new(&Arg(0), &Uuid::new(OSC_UUID)));
    bytes(&Method::new(
        "_OSC".into(),
        4,
        // Serialized: the method creates named fields, so it must not run twice at the same time.
        true,
        vec![
            &field(&status, 0),
            &If::new(
                &ours,
                vec![
                    &field(&control, 8),
                    &And::new(&Local(0), &control, &OSC_GRANTED),
                    &If::new(
                        &NotEqual::new(&Arg(1), &ONE),
                        vec![&refuse(OSC_UNRECOGNISED_REVISION)],
                    ),
                    &If::new(&NotEqual::new(&control, &Local(0)), vec![&refuse(OSC_MASKED)]),
                    &Store::new(&control, &Local(0)),
                ],
            ),
            &Else::new(vec![&refuse(OSC_UNRECOGNISED_UUID)]),
            &Return::new(&Arg(3)),
        ],
    ))
}

/// The LPC bridge, with every device that has only ports and lines.
fn lpc(platform: &Platform) -> Result<Bytes> {
    let isa = node::devices(&platform.nodes, |node| !node.is_on_system_bus())?;
    let mut ports = Vec::new();
    let end = platform.pm_base + PM_LENGTH;
    node::port_resource(&(platform.pm_base..end), &mut ports);
    let power = bytes(&Device::new(
        "PMIO".into(),
        vec![
            &id("_HID", "PNP0C02"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&Bytes(ports)])),
        ],
    ));
    Ok(bytes(&Device::new(
        "LPC_".into(),
        vec![&Name::new("_ADR".into(), &LPC_ADDRESS), &power, &isa],
    )))
}

/// Reserves PCIEXBAR, which is outside of the host bridge's windows (PCI Firmware 3.3, 4.1.2).
fn pcie_reservation(platform: &Platform) -> Result<Bytes> {
    let pcie = &platform.pcie;
    let base = u32::try_from(pcie.start);
    let length = u32::try_from(pcie.end - pcie.start)?;
    let mut memory = Vec::new();
    match base {
        Ok(base) => Memory32Fixed::new(true, base, length).to_aml_bytes(&mut memory),
        Err(_) => AddressSpace::new_memory(
            AddressSpaceCacheable::NotCacheable,
            true,
            pcie.start,
            pcie.end - 1,
            None,
        )
        .to_aml_bytes(&mut memory),
    }
    Ok(bytes(&Device::new(
        "DRAC".into(),
        vec![
            &id("_HID", "PNP0C01"),
            &Name::new("_UID".into(), &ZERO),
            &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&Bytes(memory)])),
        ],
    )))
}

/// The processors. Their _UIDs match the processor UIDs of the MADT.
fn cpus(platform: &Platform) -> Bytes {
    let mut cpus = Vec::new();
    for uid in 0..platform.cpus.len() {
        Device::new(
            format!("C{uid:03X}").as_str().into(),
            vec![&id("_HID", "ACPI0007"), &Name::new("_UID".into(), &uid)],
        )
        .to_aml_bytes(&mut cpus);
    }
    bytes(&Device::new(
        "CPUS".into(),
        vec![&id("_HID", "ACPI0010"), &id("_CID", "PNP0A05"), &Bytes(cpus)],
    ))
}
