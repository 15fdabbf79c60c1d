//! The description of the machine that guests read (SMBIOS 3.0, DSP0134).
//!
//! We use version 3.0 with its 64-bit anchor, not 2.8 with the 32-bit one, although firmware
//! accepts both: only 3.0 supports more than 255 threads in a processor, and tables larger than 64
//! KiB. UEFI guests, Windows among them, find the tables through the firmware's configuration
//! table. Windows misses the 64-bit anchor only under a legacy BIOS, which we do not provide, and
//! UEFI firmware publishes the 32-bit anchor as well.

use std::ops::Range;

use anyhow::{Context, Result, ensure};

use crate::Image;
use crate::file::File;

pub const ANCHOR_FILE: &str = "etc/smbios/smbios-anchor";
pub const TABLES_FILE: &str = "etc/smbios/smbios-tables";

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
/// The maximum size that a memory module reports, in bytes.
const MODULE_MAX: u64 = 16 << 30;

/// The area in which guests without UEFI search for the anchor, at multiples of 16 (5.2.2).
const AREA: Range<u64> = 0xF_0000..0x10_0000;
const ANCHOR_LENGTH: u8 = 24;

const NO_CACHE: u16 = 0xFFFF;
const NO_ERROR_INFORMATION: u16 = 0xFFFE;

// The handles of each type, numbered as in QEMU's virtual machines.
const BIOS: u16 = 0x0000;
const SYSTEM: u16 = 0x0100;
const CHASSIS: u16 = 0x0300;
const PROCESSOR: u16 = 0x0400;
const MEMORY_ARRAY: u16 = 0x1000;
const MEMORY_DEVICE: u16 = 0x1100;
const MAPPED_ADDRESS: u16 = 0x1300;
const BOOT_INFORMATION: u16 = 0x2000;
const END: u16 = 0x7F00;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Smbios {
    pub manufacturer: String,
    pub product: String,
    pub version: String,
    /// The serial number. May be empty.
    pub serial: String,
    /// The UUID, in the byte order of its text form.
    pub uuid: [u8; 16],
    pub processors: Processors,
    /// The RAM, as guest-physical ranges.
    pub memory: Vec<Range<u64>>,
}

/// The machine's processors. All are identical.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Processors {
    pub sockets: u16,
    /// The number of cores in each package.
    pub cores: u16,
    /// The number of threads in each core.
    pub threads: u16,
    /// The manufacturer: the vendor string of CPUID.
    pub vendor: String,
    /// The brand string of CPUID.
    pub model: String,
    /// CPUID leaf 1: EAX in the low half, EDX in the high half.
    pub signature: u64,
}

impl Smbios {
    /// The two fw_cfg files. The firmware adds the structure of type 0, which describes the
    /// firmware.
    pub fn files(&self) -> Result<[File; 2]> {
        let tables = self.structures(false)?;
        let anchor = anchor(&tables, 0)?;
        Ok([File::new(ANCHOR_FILE, anchor), File::new(TABLES_FILE, tables)])
    }

    /// The finished tables at the address where a guest without firmware looks for them. They
    /// include our own structure of type 0.
    pub fn image(&self) -> Result<Image> {
        let tables = self.structures(true)?;
        let address = AREA.start + u64::from(ANCHOR_LENGTH).next_multiple_of(16);
        let room = AREA.end - address;
        ensure!(
            tables.len() as u64 <= room,
            "SMBIOS structures of {} bytes, but direct boot has room for {room}",
            tables.len()
        );
        Ok(vec![(AREA.start, anchor(&tables, address)?), (address, tables)])
    }

    fn structures(&self, bios: bool) -> Result<Vec<u8>> {
        let mut tables = Vec::new();
        if bios {
            bios_information().end(&mut tables)?;
        }
        self.system().end(&mut tables)?;
        self.chassis().end(&mut tables)?;
        for socket in 0..self.processors.sockets {
            self.processors.structure(socket)?.end(&mut tables)?;
        }
        self.memory(&mut tables)?;
        // No errors at the last start.
        Structure::new(32, BOOT_INFORMATION).zeros(6).byte(0).end(&mut tables)?;
        Structure::new(127, END).end(&mut tables)?;
        Ok(tables)
    }

    /// Type 1 (7.2).
    fn system(&self) -> Structure {
        // The first three fields of a UUID are little-endian.
        let mut uuid = self.uuid;
        uuid[..4].reverse();
        uuid[4..6].reverse();
        uuid[6..8].reverse();
        Structure::new(1, SYSTEM)
            .string(&self.manufacturer)
            .string(&self.product)
            .string(&self.version)
            .string(&self.serial)
            .bytes(&uuid)
            // Started by the power switch, no SKU, no family.
            .bytes(&[6, 0, 0])
    }

    /// Type 3 (7.4).
    fn chassis(&self) -> Structure {
        Structure::new(3, CHASSIS)
            .string(&self.manufacturer)
            // "Other".
            .byte(1)
            .string(&self.version)
            .string(&self.serial)
            .byte(0)
            // All states are safe, security is unknown.
            .bytes(&[3, 3, 3, 2])
            // OEM information, no height, no power cords, no contents, no SKU.
            .zeros(4 + 5)
    }

    /// Types 16, 17 and 19 (7.17, 7.18, 7.20).
    fn memory(&self, tables: &mut Vec<u8>) -> Result<()> {
        let mut total = 0u64;
        for range in &self.memory {
            ensure!(!range.is_empty(), "an empty range of RAM at {:#x}", range.start);
            total = total.checked_add(range.end - range.start).context("RAM beyond 64 bits")?;
        }
        let modules = u16::try_from(total.div_ceil(MODULE_MAX))
            .with_context(|| format!("{} MiB of memory: too much for SMBIOS", total / MIB))?;
        memory_array(total, modules).end(tables)?;
        for module in 0..modules {
            let size = (total - u64::from(module) * MODULE_MAX).min(MODULE_MAX);
            memory_device(module, size).end(tables)?;
        }
        for (i, range) in (0u16..).zip(&self.memory) {
            mapped_address(i, range).end(tables)?;
        }
        Ok(())
    }
}

/// Type 0 (7.1), for direct boot.
fn bios_information() -> Structure {
    Structure::new(0, BIOS)
        .string("Transom")
        .string("direct boot")
        .word(0)
        // If the date is later than 2020, Linux expects the RTC's alarm as an ACPI wake-up event
        // instead of on line 8, and this machine does not have that event.
        .string("04/01/2014")
        .byte(0)
        // No characteristics except that this is a virtual machine.
        .bytes(&(1u64 << 3).to_le_bytes())
        .bytes(&[0, 1 << 4])
        // Release 0.0, no embedded controller.
        .bytes(&[0, 0, 0xFF, 0xFF])
}

impl Processors {
    /// Type 4 (7.5).
    fn structure(&self, socket: u16) -> Result<Structure> {
        let threads = self.cores.checked_mul(self.threads).with_context(|| {
            format!(
                "{} cores of {} threads in a socket: too many for SMBIOS",
                self.cores, self.threads
            )
        })?;
        ensure!(threads > 0, "a processor with {} cores of {} threads", self.cores, self.threads);
        let handle = PROCESSOR
            .checked_add(socket)
            .filter(|handle| *handle < MEMORY_ARRAY)
            .with_context(|| format!("{} sockets: too many for SMBIOS", self.sockets))?;
        // 255 in the byte field means that the word field has the number.
        let byte = |count: u16| u8::try_from(count).unwrap_or(0xFF);
        let multi = |count: u16, bit: u16| if count > 1 { 1 << bit } else { 0 };
        let characteristics = 1 << 2 | multi(self.cores, 3) | multi(self.threads, 4);
        Ok(Structure::new(4, handle)
            .string(&format!("CPU {socket}"))
            // A central processor of the family "Other".
            .bytes(&[3, 1])
            .string(&self.vendor)
            .bytes(&self.signature.to_le_bytes())
            .string(&self.model)
            // Voltage, clock, and speeds are unknown.
            .zeros(1 + 2 + 2 + 2)
            // Present and enabled, in a socket of the type "Other".
            .bytes(&[0x41, 1])
            .word(NO_CACHE)
            .word(NO_CACHE)
            .word(NO_CACHE)
            .bytes(&[0, 0, 0])
            .bytes(&[byte(self.cores), byte(self.cores), byte(threads)])
            .word(characteristics)
            .word(1)
            .word(self.cores)
            .word(self.cores)
            .word(threads))
    }
}

/// Type 16: one array of all modules.
fn memory_array(total: u64, modules: u16) -> Structure {
    let kib = total / KIB;
    // From 2 TiB on, only the last field has the size.
    let (short, long) = match u32::try_from(kib) {
        Ok(kib) if kib < 0x8000_0000 => (kib, 0),
        _ => (0x8000_0000, total),
    };
    Structure::new(16, MEMORY_ARRAY)
        // Location "Other", used as system memory, with multi-bit error correction.
        .bytes(&[1, 3, 6])
        .dword(short)
        .word(NO_ERROR_INFORMATION)
        .word(modules)
        .qword(long)
}

/// Type 17: one module of at most [`MODULE_MAX`].
fn memory_device(module: u16, size: u64) -> Structure {
    // In MiB, or in KiB if the top bit is set. 16 GiB is far below the maximum in MiB.
    let size = match u16::try_from(size / MIB).unwrap_or(0x7FFE) {
        0 => 0x8000 | u16::try_from(size / KIB).unwrap_or(0),
        mib => mib,
    };
    Structure::new(17, MEMORY_DEVICE.saturating_add(module))
        .word(MEMORY_ARRAY)
        .word(NO_ERROR_INFORMATION)
        // Widths unknown.
        .word(0xFFFF)
        .word(0xFFFF)
        .word(size)
        // A DIMM that does not belong to a set.
        .bytes(&[9, 0])
        .string(&format!("DIMM {module}"))
        .byte(0)
        // Type RAM, detail "Other", speed unknown.
        .byte(7)
        .word(1 << 1)
        .word(0)
        .string("Transom")
        // No serial number, no asset tag, no part number, no rank.
        .zeros(4)
        // No extended size, clock and voltages unknown.
        .zeros(4 + 2 + 6)
}

/// Type 19: the addresses of a part of the array.
fn mapped_address(i: u16, range: &Range<u64>) -> Structure {
    let start = u32::try_from(range.start / KIB);
    let end = u32::try_from((range.end - 1) / KIB);
    let (start, end, wide) = match (start, end) {
        (Ok(start), Ok(end)) if end < u32::MAX => (start, end, 0..0),
        _ => (u32::MAX, u32::MAX, range.start..range.end - 1),
    };
    Structure::new(19, MAPPED_ADDRESS.saturating_add(i))
        .dword(start)
        .dword(end)
        .word(MEMORY_ARRAY)
        // One module wide.
        .byte(1)
        .qword(wide.start)
        .qword(wide.end)
}

/// A structure under construction: the formatted area, and the strings that follow it (6.1).
struct Structure {
    formatted: Vec<u8>,
    strings: Vec<String>,
}

impl Structure {
    fn new(kind: u8, handle: u16) -> Self {
        Self { formatted: vec![kind, 0], strings: Vec::new() }.word(handle)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.formatted.extend(bytes);
        self
    }

    fn zeros(self, count: usize) -> Self {
        self.bytes(&vec![0; count])
    }

    fn byte(self, value: u8) -> Self {
        self.bytes(&[value])
    }

    fn word(self, value: u16) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn dword(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn qword(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    /// Appends the number of a string. It is 0 if `text` is empty: an empty string has no other
    /// encoding.
    fn string(mut self, text: &str) -> Self {
        if text.is_empty() {
            return self.byte(0);
        }
        self.strings.push(text.to_owned());
        let number = u8::try_from(self.strings.len()).unwrap_or(0);
        self.byte(number)
    }

    fn end(mut self, tables: &mut Vec<u8>) -> Result<()> {
        let length = self.formatted.len();
        self.formatted[1] = u8::try_from(length).with_context(|| {
            format!("an SMBIOS structure of type {} with {length} bytes", self.formatted[0])
        })?;
        tables.extend(self.formatted);
        for text in &self.strings {
            ensure!(
                text.len() <= 255 && !text.bytes().any(|byte| byte < b' ' || byte == 0x7F),
                "{text:?} cannot be an SMBIOS string: use at most 255 bytes and no control \
                 characters"
            );
            tables.extend(text.as_bytes());
            tables.push(0);
        }
        if self.strings.is_empty() {
            tables.push(0);
        }
        tables.push(0);
        Ok(())
    }
}

/// The 64-bit entry point (5.2.2).
fn anchor(tables: &[u8], address: u64) -> Result<Vec<u8>> {
    let length = u32::try_from(tables.len())
        .with_context(|| format!("SMBIOS structures of {} bytes", tables.len()))?;
    let mut anchor = b"_SM3_\0".to_vec();
    // Version 3.0, revision 0 of the document, revision 1 of the entry point.
    anchor.extend([ANCHOR_LENGTH, 3, 0, 0, 1, 0]);
    anchor.extend(length.to_le_bytes());
    anchor.extend(address.to_le_bytes());
    anchor[5] = anchor.iter().fold(0, |sum: u8, byte| sum.wrapping_sub(*byte));
    Ok(anchor)
}

#[cfg(test)]
mod test {
    use super::*;

    fn machine() -> Smbios {
        let processors = Processors { sockets: 1, cores: 4, threads: 2, ..Processors::default() };
        Smbios { processors, memory: vec![0..2 << 30, 4 << 30..7 << 30], ..Smbios::default() }
    }

    /// The formatted areas of the structures of one type.
    fn structures(machine: &Smbios, kind: u8) -> Vec<Vec<u8>> {
        let tables = machine.files().unwrap()[1].bytes.clone();
        let mut rest = tables.as_slice();
        let mut found = vec![];
        while !rest.is_empty() {
            let (area, strings) = rest.split_at(rest[1].into());
            if area[0] == kind {
                found.push(area.to_vec());
            }
            let end = strings.windows(2).position(|pair| pair == [0, 0]).unwrap();
            rest = &strings[end + 2..];
        }
        found
    }

    #[test]
    fn writes_a_uuid_with_its_first_fields_swapped() {
        let mut machine = machine();
        machine.uuid = *b"\x00\x11\x22\x33\x44\x55\x66\x77\x88\x99\xAA\xBB\xCC\xDD\xEE\xFF";
        assert_eq!(
            structures(&machine, 1)[0][8..24],
            *b"\x33\x22\x11\x00\x55\x44\x77\x66\x88\x99\xAA\xBB\xCC\xDD\xEE\xFF"
        );
    }

    #[test]
    fn counts_cores_and_threads_of_each_socket() {
        let mut machine = machine();
        machine.processors.sockets = 2;
        let processors = structures(&machine, 4);
        assert_eq!(processors.len(), 2);
        assert_eq!(processors[0][0x23..0x26], [4, 4, 8]);
        assert_eq!(processors[1][0x2A..0x30], [4, 0, 4, 0, 8, 0]);
        machine.processors.cores = 300;
        let processor = &structures(&machine, 4)[0];
        assert_eq!(processor[0x23..0x26], [255, 255, 255]);
        assert_eq!(processor[0x2A..0x30], [0x2C, 1, 0x2C, 1, 0x58, 2]);
    }

    #[test]
    fn splits_memory_into_modules() {
        for (total, sizes) in [
            (256 * MIB, vec![256]),
            (16 << 30, vec![16384]),
            (40 << 30, vec![16384, 16384, 8192]),
            (512 * KIB, vec![0x8000 | 512]),
        ] {
            let mut machine = machine();
            machine.memory = vec![0..total; 1];
            let modules = structures(&machine, 17);
            let sizes_reported = modules.iter().map(|m| u16::from_le_bytes([m[0x0C], m[0x0D]]));
            assert_eq!(sizes_reported.collect::<Vec<_>>(), sizes);
            let array = &structures(&machine, 16)[0];
            assert_eq!(u16::from_le_bytes([array[0x0D], array[0x0E]]) as usize, sizes.len());
            assert_eq!(array[7..11], u32::try_from(total / KIB).unwrap().to_le_bytes());
        }
    }

    #[test]
    fn maps_every_range_of_memory() {
        let mut machine = machine();
        machine.memory.push(1 << 50..(1 << 50) + MIB);
        let mapped = structures(&machine, 19);
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().unwrap());
        assert_eq!((number(&mapped[0][4..8]), number(&mapped[0][8..12])), (0, 0x1F_FFFF));
        assert_eq!((number(&mapped[1][4..8]), number(&mapped[1][8..12])), (0x40_0000, 0x6F_FFFF));
        assert_eq!(mapped[2][4..12], [0xFF; 8]);
        assert_eq!(mapped[2][15..23], (1u64 << 50).to_le_bytes());
        assert_eq!(mapped[2][23..31], ((1u64 << 50) + MIB - 1).to_le_bytes());
    }

    #[test]
    fn has_a_type_0_only_without_firmware() {
        assert!(structures(&machine(), 0).is_empty());
        let image = machine().image().unwrap();
        assert_eq!((image[0].0, image[1].0), (0xF_0000, 0xF_0020));
        assert_eq!(image[0].1[16..24], 0xF_0020u64.to_le_bytes());
        assert_eq!(image[1].1[..2], [0, 0x18]);
    }

    #[test]
    fn refuses_values_without_an_smbios_encoding() {
        let refusal = |change: fn(&mut Smbios)| {
            let mut machine = machine();
            change(&mut machine);
            machine.files().unwrap_err().to_string()
        };
        assert!(refusal(|m| m.serial = "a\0b".into()).contains("SMBIOS string"));
        assert!(refusal(|m| m.product = "x".repeat(256)).contains("SMBIOS string"));
        assert!(refusal(|m| m.processors.threads = 0).contains("4 cores of 0 threads"));
        assert!(refusal(|m| m.processors.cores = 40000).contains("40000 cores"));
        assert!(refusal(|m| m.processors.sockets = 4000).contains("4000 sockets"));
        assert!(refusal(|m| m.memory = vec![5..5; 1]).contains("empty range of RAM"));
        assert!(refusal(|m| m.memory = vec![0..u64::MAX; 2]).contains("64 bits"));
    }
}
