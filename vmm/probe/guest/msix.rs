//! MSI-X and MSI (PCI Local Bus 3.0, 6.8): routes the first vector of a function to this processor.
use crate::config::Function;
use crate::cpu::Cpu;
use crate::entry::DEVICE_VECTOR;
use crate::io::{read32, write32};
use crate::paging::map_device;
use crate::timer::LOCAL_APIC;

const MSI: u8 = 0x05;
const MSI_ENABLE: u32 = 1 << 16;
/// The capability has an address of 64 bits.
const MSI_WIDE: u32 = 1 << 23;
const MSIX: u8 = 0x11;
const MSIX_ENABLE: u32 = 1 << 31;
/// The ID register of the local APIC.
const APIC_ID: u64 = 0x20;

/// The table's offset in its BAR.
fn offset(table: u32) -> u64 {
    u64::from(table & !7)
}

/// Enables MSI-X. Returns false if the function does not support it. The local APIC must be
/// enabled.
pub(crate) fn switch_on(function: Function, cpu: &Cpu) -> bool {
    let Some(msix) = function.capability(MSIX) else { return false };
    let table = function.read(msix + 4);
    let table = function.memory(table as u8 & 7).and_then(|bar| bar.checked_add(offset(table)));
    let Some(entry) = table.and_then(|address| map_device(address, 16, cpu)) else { return false };
    for (field, value) in [(0, target()), (4, 0), (8, DEVICE_VECTOR.into()), (12, 0)] {
        write32(entry + field, value);
    }
    function.write(msix, function.read(msix) & 0x3fff_ffff | MSIX_ENABLE);
    true
}

/// The address of messages to this processor.
fn target() -> u32 {
    LOCAL_APIC as u32 | read32(LOCAL_APIC + APIC_ID) >> 24 << 12
}

/// Enables MSI, with one message. Returns false if the function does not support it with an address
/// of 64 bits. The local APIC must be enabled.
pub(crate) fn switch_on_msi(function: Function) -> bool {
    let Some(msi) = function.capability(MSI) else { return false };
    let control = function.read(msi);
    if control & MSI_WIDE == 0 {
        return false;
    }
    function.write(msi + 4, target());
    function.write(msi + 8, 0);
    function.write(msi + 12, DEVICE_VECTOR.into());
    function.write(msi, control & 0xff8f_ffff | MSI_ENABLE);
    true
}
