//! The VM Generation ID (Microsoft, "Virtual Machine Generation ID"; QEMU,
//! `docs/specs/vmgenid.rst`): a table that leads to 16 bytes in memory, and the event that tells
//! the guest that they changed. They change when a machine is cloned or restored. Windows' domain
//! controllers, and the random number generators of Windows and Linux, check them.

use acpi_tables::Aml;
use acpi_tables::aml::{
    Add, Device, Equal, If, Index, Local, Method, Name, Notify, Package, Path, Return, Scope,
    Store, ZERO,
};
use anyhow::Result;

use super::aml::Bytes;
use super::table;

/// The fw_cfg file with the ID, which firmware copies into guest memory.
pub const PAGE_FILE: &str = "etc/vmgenid_guid";
/// The fw_cfg file to which firmware writes the ID's address.
pub const ADDRESS_FILE: &str = "etc/vmgenid_addr";
/// The general-purpose event that signals a change of the ID.
pub const EVENT: u8 = 5;

/// The size of the file: a page that holds nothing else.
const PAGE: usize = 4096;
/// Offset of the ID in the page. Firmware treats a file that begins like a table as one, so zeros
/// precede the ID, and they are longer than a table header.
pub(super) const ID_OFFSET: u8 = 40;

/// The AML prefix of a DWORD constant (ACPI 6.5, 20.2.3).
const DWORD_PREFIX: u8 = 0x0c;
/// Offset in the table of the page's address: after the header, NameOp, the name and the prefix.
pub(super) const ADDRESS: usize = table::HEADER + 1 + 4 + 1;

pub(super) fn page(id: [u8; 16]) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    page[usize::from(ID_OFFSET)..][..id.len()].copy_from_slice(&id);
    page
}

/// The table, with 0 as the address of the page.
pub(super) fn ssdt() -> Result<Vec<u8>> {
    // NameOp by hand: the crate would encode the zero in one byte, with no room for an address.
    let mut body = vec![0x08];
    body.extend(b"VGIA");
    body.extend([DWORD_PREFIX, 0, 0, 0, 0]);
    Scope::new("_SB_".into(), vec![&device()]).to_aml_bytes(&mut body);
    let device = Path::new("\\_SB_.VGEN");
    let notify = Notify::new(&device, &0x80u8);
    let method = Method::new("_E05".into(), 0, false, vec![&notify]);
    Scope::new("\\_GPE".into(), vec![&method]).to_aml_bytes(&mut body);
    table::table(*b"SSDT", 2, &body)
}

/// The device that guests find by its _CID and _DDN. The _HID is our own, because QEMU's
/// (`QEMUVGID`) violates a rule that iasl checks (ACPI 6.5, 6.1.5).
fn device() -> Bytes {
    let page = Path::new("VGIA");
    let (unknown, none) = (Equal::new(&page, &ZERO), Return::new(&ZERO));
    let absent = If::new(&unknown, vec![&none]);
    let present = Return::new(&0x0fu8);
    // ADDR: a package with the lower and the upper half of the address.
    let zeros = Package::new(vec![&ZERO, &ZERO]);
    let empty = Store::new(&Local(0), &zeros);
    let low = Index::new(&ZERO, &Local(0), &ZERO);
    let fill = Add::new(&low, &page, &ID_OFFSET);
    let package = Return::new(&Local(0));
    let mut bytes = Vec::new();
    Device::new(
        "VGEN".into(),
        vec![
            &Name::new("_HID".into(), &"TRSM0001"),
            &Name::new("_CID".into(), &"VM_Gen_Counter"),
            &Name::new("_DDN".into(), &"VM_Gen_Counter"),
            &Method::new("_STA".into(), 0, false, vec![&absent, &present]),
            &Method::new("ADDR".into(), 0, true, vec![&empty, &fill, &package]),
        ],
    )
    .to_aml_bytes(&mut bytes);
    Bytes(bytes)
}
