//! The layout of the tables, the steps that complete them once their addresses are known, and the
//! two ways to carry these steps out: fw_cfg's loader script, and in place for direct boot.

use anyhow::{Context, Result, ensure};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::{table, vmgenid};
use crate::Image;
use crate::file::File;

pub const SCRIPT_FILE: &str = "etc/table-loader";
/// The fw_cfg file with all tables except the RSDP.
pub const TABLES_FILE: &str = "etc/acpi/tables";
pub const RSDP_FILE: &str = "etc/acpi/rsdp";
const LOG_FILE: &str = "etc/tpm/log";
/// The size of the event log in bytes.
pub(super) const LOG_LENGTH: u32 = 64 << 10;

/// The FACS must be aligned to 64 bytes (ACPI 6.5, 5.2.10). It is the first table of the blob.
const TABLES_ALIGN: u32 = 64;
const RSDP_ALIGN: u32 = 16;
/// No table requires this, but programs that map a table profit from aligned integers.
const ALIGN: usize = 16;
/// Alignment of blobs that must not share a page with other data of the firmware.
const PAGE_ALIGN: u32 = 4096;

/// The area that the legacy search for the RSDP covers (ACPI 6.5, 5.2.5.1). Direct boot puts the
/// RSDP at its start.
const RSDP_AREA: u64 = 0xE_0000;
/// The tables of direct boot lie after the RSDP and below the SMBIOS area.
const TABLES_AREA: std::ops::Range<u64> = 0xE_0040..0xF_0000;
const _: () = assert!(TABLES_AREA.start.is_multiple_of(TABLES_ALIGN as u64));
/// Where the page with the VM Generation ID would start in direct boot. Only the ID itself is
/// written, between the RSDP and the tables.
const PAGE_AREA: u64 = RSDP_AREA;
/// The address of the VM Generation ID after direct boot.
pub const DIRECT_GENERATION_ID: u64 = PAGE_AREA + vmgenid::ID_OFFSET as u64;
const _: () = assert!(DIRECT_GENERATION_ID >= RSDP_AREA + RSDP_LENGTH as u64);
const _: () = assert!(DIRECT_GENERATION_ID + 16 <= TABLES_AREA.start);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Blob {
    Rsdp,
    Tables,
    Log,
    Page,
}

impl Blob {
    fn file(self) -> &'static str {
        match self {
            Self::Rsdp => RSDP_FILE,
            Self::Tables => TABLES_FILE,
            Self::Log => LOG_FILE,
            Self::Page => vmgenid::PAGE_FILE,
        }
    }
}

/// A field of a table that holds the address of another table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pointer {
    /// Offset of the field in its table.
    pub(super) field: usize,
    /// Width in bytes: 4 or 8.
    pub(super) size: u8,
}

/// The TPM event log, still empty: an extra file beside [`Tables::files`] for a machine with a TPM.
pub fn event_log() -> File {
    File::new(LOG_FILE, vec![0; LOG_LENGTH as usize])
}

/// A step that completes the tables once addresses are known. The loader script has a command for
/// each.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Adds the address of the tables to the field at `offset` in `blob`.
    Pointer { blob: Blob, offset: u32, size: u8 },
    /// Sets the byte at `result` so that the bytes of the range add up to 0.
    Checksum { blob: Blob, result: u32, start: u32, length: u32 },
    /// Fills in the location of the event log. Its length is at `offset` of the tables, its address
    /// follows. Without firmware no log is kept, and both fields stay empty.
    Log { offset: u32 },
    /// Adds the address of the page with the VM Generation ID to the 4-byte field at `offset`.
    Page { offset: u32 },
}

/// The Root System Description Pointer (ACPI 6.5, 5.2.5.3), 36 bytes.
#[derive(IntoBytes, Immutable)]
#[repr(C, packed)]
struct Rsdp {
    signature: [u8; 8],
    checksum: u8,
    oem_id: [u8; 6],
    revision: u8,
    rsdt: U32,
    length: U32,
    xsdt: U64,
    extended_checksum: u8,
    reserved: [u8; 3],
}

/// Offset of the checksum over the first 20 bytes, which are the RSDP of ACPI 1.0.
const RSDP_CHECKSUM: u32 = 8;
const RSDP_V1_LENGTH: u32 = 20;
const RSDP_RSDT: u32 = 16;
const RSDP_XSDT: u32 = 24;
const RSDP_EXTENDED_CHECKSUM: u32 = 32;
const RSDP_LENGTH: u32 = 36;

/// The blob of tables under construction.
#[derive(Default)]
pub(super) struct Layout {
    tables: Vec<u8>,
    steps: Vec<Step>,
    page: Vec<u8>,
}

impl Layout {
    /// Adds the FACS, which has no checksum. It must be the first table.
    pub(super) fn facs(&mut self, bytes: &[u8]) -> u32 {
        debug_assert!(self.tables.is_empty(), "only the blob's start is aligned for the FACS");
        self.tables.extend(bytes);
        0
    }

    /// Appends a table. `pointers` are its fields that already hold the blob offset of another
    /// table.
    pub(super) fn table(&mut self, bytes: &[u8], pointers: &[Pointer]) -> Result<u32> {
        self.tables.resize(self.tables.len().next_multiple_of(ALIGN), 0);
        let start = offset(self.tables.len())?;
        let length = offset(bytes.len())?;
        for pointer in pointers {
            let offset = start + offset(pointer.field)?;
            self.steps.push(Step::Pointer { blob: Blob::Tables, offset, size: pointer.size });
        }
        let result = start + table::CHECKSUM;
        self.steps.push(Step::Checksum { blob: Blob::Tables, result, start, length });
        self.tables.extend(bytes);
        offset(self.tables.len())?;
        Ok(start)
    }

    /// Appends a table that refers to the event log: `field` holds the log's length, the next field
    /// its address.
    pub(super) fn table_with_log(&mut self, bytes: &[u8], field: usize) -> Result<u32> {
        let start = self.tables.len().next_multiple_of(ALIGN);
        self.steps.push(Step::Log { offset: offset(start + field)? });
        self.table(bytes, &[])
    }

    /// Appends a table whose `field` holds the address of the page with the VM Generation ID.
    pub(super) fn table_with_page(
        &mut self,
        bytes: &[u8],
        field: usize,
        page: Vec<u8>,
    ) -> Result<u32> {
        let start = self.tables.len().next_multiple_of(ALIGN);
        self.steps.push(Step::Page { offset: offset(start + field)? });
        self.page = page;
        self.table(bytes, &[])
    }

    /// Adds the RSDT and the XSDT with pointers to `roots`, and the RSDP with pointers to both.
    pub(super) fn finish(mut self, roots: &[u32]) -> Result<Tables> {
        let narrow: Vec<u8> = roots.iter().flat_map(|at| at.to_le_bytes()).collect();
        let wide: Vec<u8> = roots.iter().flat_map(|at| u64::from(*at).to_le_bytes()).collect();
        let fields = |size: u8| -> Vec<Pointer> {
            (0..roots.len())
                .map(|i| Pointer { field: table::HEADER + i * usize::from(size), size })
                .collect()
        };
        let rsdt = self.table(&table::table(*b"RSDT", 1, &narrow)?, &fields(4))?;
        let xsdt = self.table(&table::table(*b"XSDT", 1, &wide)?, &fields(8))?;
        let rsdp = Rsdp {
            signature: *b"RSD PTR ",
            checksum: 0,
            oem_id: table::OEM_ID,
            revision: 2,
            rsdt: rsdt.into(),
            length: RSDP_LENGTH.into(),
            xsdt: u64::from(xsdt).into(),
            extended_checksum: 0,
            reserved: [0; 3],
        };
        let blob = Blob::Rsdp;
        self.steps.extend([
            Step::Pointer { blob, offset: RSDP_RSDT, size: 4 },
            Step::Pointer { blob, offset: RSDP_XSDT, size: 8 },
            Step::Checksum { blob, result: RSDP_CHECKSUM, start: 0, length: RSDP_V1_LENGTH },
            Step::Checksum { blob, result: RSDP_EXTENDED_CHECKSUM, start: 0, length: RSDP_LENGTH },
        ]);
        let rsdp = rsdp.as_bytes().to_vec();
        Ok(Tables { rsdp, tables: self.tables, page: self.page, steps: self.steps })
    }
}

/// The script and the tables use 32-bit offsets.
fn offset(value: usize) -> Result<u32> {
    u32::try_from(value).with_context(|| format!("ACPI tables of {value} bytes"))
}

/// All tables, before their addresses and checksums are filled in.
#[derive(Clone, Debug)]
pub struct Tables {
    rsdp: Vec<u8>,
    tables: Vec<u8>,
    page: Vec<u8>,
    steps: Vec<Step>,
}

impl Tables {
    /// The four fw_cfg files that depend on the tables. The fifth file is [`event_log`]. The
    /// firmware runs the script, and writes the address of the VM Generation ID to
    /// [`vmgenid::ADDRESS_FILE`].
    ///
    /// The length of the script depends only on which tables exist, not on any address. A directory
    /// that the guest read before the addresses were known therefore stays correct.
    pub fn files(&self) -> [File; 4] {
        let mut script = Vec::new();
        script.extend(allocate(Blob::Rsdp, RSDP_ALIGN, Zone::Fseg));
        script.extend(allocate(Blob::Tables, TABLES_ALIGN, Zone::High));
        if self.steps.iter().any(|step| matches!(step, Step::Log { .. })) {
            script.extend(allocate(Blob::Log, PAGE_ALIGN, Zone::High));
        }
        script.extend(allocate(Blob::Page, PAGE_ALIGN, Zone::High));
        script.extend(self.steps.iter().flat_map(|step| step.command()));
        script.extend(write_address());
        [
            File::new(TABLES_FILE, self.tables.clone()),
            File::new(RSDP_FILE, self.rsdp.clone()),
            File::new(SCRIPT_FILE, script),
            File::new(vmgenid::PAGE_FILE, self.page.clone()),
        ]
    }

    /// Returns the finished tables for a guest without firmware, and the address of the RSDP.
    ///
    /// The tables are below 1 MiB, in the area that [`crate::e820::for_direct_boot`] reserves, so
    /// that a kernel finds them even if it does not receive the address.
    pub fn image(&self) -> Result<(Image, u64)> {
        let room = TABLES_AREA.end - TABLES_AREA.start;
        ensure!(
            self.tables.len() as u64 <= room,
            "ACPI tables of {} bytes, but direct boot has room for {room}",
            self.tables.len()
        );
        let mut rsdp = self.rsdp.clone();
        let mut tables = self.tables.clone();
        for step in &self.steps {
            let bytes = if step.is_of_rsdp() { &mut rsdp } else { &mut tables };
            step.carry_out(bytes, TABLES_AREA.start);
        }
        let id = self.page[usize::from(vmgenid::ID_OFFSET)..][..16].to_vec();
        let image =
            vec![(RSDP_AREA, rsdp), (TABLES_AREA.start, tables), (DIRECT_GENERATION_ID, id)];
        Ok((image, RSDP_AREA))
    }
}

impl Step {
    fn is_of_rsdp(self) -> bool {
        match self {
            Self::Pointer { blob, .. } | Self::Checksum { blob, .. } => blob == Blob::Rsdp,
            Self::Log { .. } | Self::Page { .. } => false,
        }
    }

    /// Does the firmware's part on `bytes`, with the tables loaded at `address`.
    fn carry_out(self, bytes: &mut [u8], address: u64) {
        match self {
            Self::Pointer { offset, size, .. } => {
                let field = &mut bytes[offset as usize..][..usize::from(size)];
                let mut value = [0; 8];
                value[..field.len()].copy_from_slice(field);
                let value = u64::from_le_bytes(value) + address;
                field.copy_from_slice(&value.to_le_bytes()[..field.len()]);
            }
            Self::Checksum { result, start, length, .. } => {
                let sum = table::sum(&bytes[start as usize..][..length as usize]);
                bytes[result as usize] = bytes[result as usize].wrapping_sub(sum);
            }
            Self::Log { offset } => bytes[offset as usize..][..4 + 8].fill(0),
            Self::Page { offset } => {
                let address = u32::try_from(PAGE_AREA).expect("below 1 MiB");
                bytes[offset as usize..][..4].copy_from_slice(&address.to_le_bytes());
            }
        }
    }

    fn command(self) -> [u8; COMMAND] {
        match self {
            Self::Pointer { blob, offset, size } => add_pointer(blob, offset, size, Blob::Tables),
            Self::Log { offset } => add_pointer(Blob::Tables, offset + 4, 8, Blob::Log),
            Self::Page { offset } => add_pointer(Blob::Tables, offset, 4, Blob::Page),
            Self::Checksum { blob, result, start, length } => {
                let mut payload = name(blob).to_vec();
                payload.extend([result, start, length].iter().flat_map(|v| v.to_le_bytes()));
                command(ADD_CHECKSUM, &payload)
            }
        }
    }
}

/// The length of a command of the script in bytes.
const COMMAND: usize = 128;
const ALLOCATE: u32 = 1;
const ADD_POINTER: u32 = 2;
const ADD_CHECKSUM: u32 = 3;
const WRITE_POINTER: u32 = 4;

/// The memory zone that firmware allocates a blob in.
#[derive(Clone, Copy)]
enum Zone {
    High = 1,
    /// The area of the legacy search for the RSDP. UEFI ignores the difference.
    Fseg = 2,
}

fn allocate(blob: Blob, align: u32, zone: Zone) -> [u8; COMMAND] {
    let mut payload = name(blob).to_vec();
    payload.extend(align.to_le_bytes());
    payload.push(zone as u8);
    command(ALLOCATE, &payload)
}

fn add_pointer(blob: Blob, offset: u32, size: u8, to: Blob) -> [u8; COMMAND] {
    let mut payload = name(blob).to_vec();
    payload.extend(name(to));
    payload.extend(offset.to_le_bytes());
    payload.push(size);
    command(ADD_POINTER, &payload)
}

/// Makes the firmware write the address of the VM Generation ID to a file, so that the ID can be
/// changed later.
fn write_address() -> [u8; COMMAND] {
    let mut payload = field(vmgenid::ADDRESS_FILE).to_vec();
    payload.extend(name(Blob::Page));
    payload.extend(0u32.to_le_bytes());
    payload.extend(u32::from(vmgenid::ID_OFFSET).to_le_bytes());
    payload.push(8);
    command(WRITE_POINTER, &payload)
}

fn command(kind: u32, payload: &[u8]) -> [u8; COMMAND] {
    let mut command = [0; COMMAND];
    command[..4].copy_from_slice(&kind.to_le_bytes());
    command[4..4 + payload.len()].copy_from_slice(payload);
    command
}

fn name(blob: Blob) -> [u8; 56] {
    field(blob.file())
}

/// Encodes a file name as a field of 56 bytes, terminated by 0.
fn field(name: &str) -> [u8; 56] {
    let mut field = [0; 56];
    field[..name.len()].copy_from_slice(name.as_bytes());
    field
}
