//! A device that is neither on PCI nor described by a table of its own, and its ACPI resources.

use std::ops::Range;

use acpi_tables::aml::{Device, EISAName, IO, Interrupt, Memory32Fixed, Name, ResourceTemplate};
use acpi_tables::{Aml, AmlSink};
use anyhow::{Context, Result, ensure};

use super::aml::Bytes;
use super::presence::presence;
use super::tpm2::TPM;

/// The resources of one device of the machine.
///
/// A device with memory is put below `\_SB`, any other below the LPC bridge. Its name and _UID are
/// numbered among the devices with the same _HID, so they are unique. The numbers start at 1.
///
/// A keyboard controller has two nodes: PNP0303 with the ports and line 1, PNP0F13 with line 12.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Node {
    /// The `_HID`: an EISA ID (`PNP0501`) or an ACPI ID (`QEMU0002`).
    pub hid: String,
    pub ports: Vec<Range<u16>>,
    pub lines: Vec<u32>,
    pub memory: Vec<Range<u64>>,
}

/// The ACPI names of known devices, by `_HID`. The last letter is replaced by the number.
const NAMES: [(&str, &str); 8] = [
    ("PNP0103", "HPT"),
    ("PNP0303", "KBD"),
    ("PNP0501", "COM"),
    ("PNP0B00", "RTC"),
    ("PNP0F13", "MOU"),
    (TPM, "TPM"),
    ("QEMU0001", "PVP"),
    ("QEMU0002", "FWC"),
];

const OTHER: &str = "DEV";

/// `_STA`: present, enabled, shown, functioning (ACPI 6.5, 6.3.7).
const STATUS: u8 = 0x0F;
/// [`STATUS`] without "shown": no driver exists, so the guest must not ask its user for one.
const STATUS_HIDDEN: u8 = 0x0B;

/// The number of inputs of the I/O APIC.
const LINES: u32 = 24;

/// Lines below 16 that are level triggered. The MADT has overrides for them.
const LEVEL_ISA: [u32; 4] = [5, 9, 10, 11];

impl Node {
    pub(super) fn check(&self) -> Result<()> {
        let hid = &self.hid;
        ensure!(is_id(hid), "{hid:?} is neither an EISA nor an ACPI ID");
        for ports in &self.ports {
            ensure!(!ports.is_empty(), "{hid} with an empty port range at {:#x}", ports.start);
        }
        for line in &self.lines {
            ensure!(*line < LINES, "{hid} on line {line}, but the I/O APIC has only {LINES} lines");
        }
        for memory in &self.memory {
            ensure!(
                !memory.is_empty() && memory.end < 1 << 32,
                "{hid} with memory at {memory:#x?}, which is empty or not below 4 GiB"
            );
        }
        Ok(())
    }

    pub(super) fn is_on_system_bus(&self) -> bool {
        !self.memory.is_empty()
    }

    fn status(&self) -> u8 {
        if self.hid.starts_with("QEMU") { STATUS_HIDDEN } else { STATUS }
    }

    /// The memory of a TPM's physical presence interface: not a resource, but used by its methods.
    pub(super) fn presence(&self) -> Option<&Range<u64>> {
        (self.hid == TPM).then(|| self.memory.get(1)).flatten()
    }

    fn prefix(&self) -> &'static str {
        NAMES.iter().find(|(hid, _)| *hid == self.hid).map_or(OTHER, |(_, name)| name)
    }

    fn resources(&self) -> Result<Bytes> {
        let mut bytes = Vec::new();
        for ports in &self.ports {
            port_resource(ports, &mut bytes);
        }
        let presence = self.presence();
        for memory in self.memory.iter().filter(|memory| Some(*memory) != presence) {
            let base = u32::try_from(memory.start)?;
            let length = u32::try_from(memory.end - memory.start)?;
            Memory32Fixed::new(true, base, length).to_aml_bytes(&mut bytes);
        }
        // The HPET's legacy lines belong to the timer and the RTC, which claim them.
        if self.hid != "PNP0103" {
            self.lines.iter().for_each(|line| line_resource(*line, &mut bytes));
        }
        Ok(Bytes(bytes))
    }
}

/// The nodes that `take` selects, as AML devices. The numbering of names and _UIDs includes all
/// nodes.
pub(super) fn devices(nodes: &[Node], take: impl Fn(&Node) -> bool) -> Result<Bytes> {
    let mut bytes = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        if !take(node) {
            continue;
        }
        let uid = 1 + nodes[..i].iter().filter(|other| other.hid == node.hid).count();
        let prefix = node.prefix();
        let number = 1 + nodes[..i].iter().filter(|other| other.prefix() == prefix).count();
        let digit = u32::try_from(number).ok().and_then(|number| char::from_digit(number, 36));
        let digit = digit.with_context(|| format!("{number} devices {}", node.hid))?;
        let name = format!("{prefix}{}", digit.to_ascii_uppercase());
        let resources = node.resources()?;
        let methods = node.presence().map_or(Bytes(Vec::new()), presence);
        Device::new(
            name.as_str().into(),
            vec![
                &id("_HID", &node.hid),
                &Name::new("_UID".into(), &uid),
                &Name::new("_STA".into(), &node.status()),
                &Name::new("_CRS".into(), &ResourceTemplate::new(vec![&resources])),
                &methods,
            ],
        )
        .to_aml_bytes(&mut bytes);
    }
    Ok(Bytes(bytes))
}

/// `_HID` or `_CID`, encoded as an EISA ID or as a string. The caller has validated `id`.
pub(super) fn id(name: &str, id: &str) -> Name {
    if id.len() == 7 {
        Name::new(name.into(), &EISAName::new(id))
    } else {
        Name::new(name.into(), &id.to_owned())
    }
}

/// Whether `id` is a valid EISA ID (three capitals, four capital hexadecimal digits) or ACPI ID
/// (four capitals or digits, four digits) (ACPI 6.5, 6.1.5).
fn is_id(id: &str) -> bool {
    let hex = |byte: u8| byte.is_ascii_digit() || (b'A'..=b'F').contains(&byte);
    let id = id.as_bytes();
    match id.len() {
        7 => id[..3].iter().all(u8::is_ascii_uppercase) && id[3..].iter().all(|b| hex(*b)),
        8 => {
            let vendor = |byte: &u8| byte.is_ascii_uppercase() || byte.is_ascii_digit();
            id[..4].iter().all(vendor) && id[4..].iter().all(|b| hex(*b))
        }
        _ => false,
    }
}

/// I/O ports, split into runs that fit the descriptor's 8-bit length.
pub(super) fn port_resource(ports: &Range<u16>, sink: &mut dyn AmlSink) {
    let mut start = ports.start;
    while start < ports.end {
        let length = u8::try_from(ports.end - start).unwrap_or(0x80);
        IO::new(start, start, 1, length).to_aml_bytes(sink);
        start += u16::from(length);
    }
}

/// An interrupt line. ISA lines (edge triggered, active high) use the short form.
fn line_resource(line: u32, sink: &mut dyn AmlSink) {
    if line < 16 && !LEVEL_ISA.contains(&line) {
        // IRQNoFlags (ACPI 6.5, 6.4.2.1).
        sink.byte(0x22);
        sink.word(1 << line);
    } else {
        Interrupt::new(true, false, false, true, line).to_aml_bytes(sink);
    }
}
