//! Where the tables are, what is left to fill in once their address is known, and the two ways of
//! doing that.

use anyhow::{Context, Result, ensure};
use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{Immutable, IntoBytes};

use super::{table, vmgenid};
use crate::Image;
use crate::file::File;

/// The fw_cfg file that holds the loader script.
pub const SCRIPT_FILE: &str = "etc/table-loader";
/// The fw_cfg file that holds every table.
pub const TABLES_FILE: &str = "etc/acpi/tables";
/// The fw_cfg file that holds the RSDP.
pub const RSDP_FILE: &str = "etc/acpi/rsdp";
/// The fw_cfg file that is the log of events of a machine with a TPM.
const LOG_FILE: &str = "etc/tpm/log";
/// How long that is.
pub(super) const LOG_LENGTH: u32 = 64 << 10;

/// The FACS must be on a multiple of 64 (ACPI 6.5, 5.2.10); it is the blob's first table.
const TABLES_ALIGN: u32 = 64;
const RSDP_ALIGN: u32 = 16;
/// No table needs it; but whoever maps one likes its integers aligned.
const ALIGN: usize = 16;
/// What is not shared with other things of the firmware's.
const PAGE_ALIGN: u32 = 4096;

/// Where the legacy search for the RSDP looks (ACPI 6.5, 5.2.5.1), and where we put it.
const RSDP_AREA: u64 = 0xE_0000;
/// Direct boot's tables lie behind the RSDP, below where SMBIOS has its place.
const TABLES_AREA: std::ops::Range<u64> = 0xE_0040..0xF_0000;
const _: () = assert!(TABLES_AREA.start.is_multiple_of(TABLES_ALIGN as u64));
/// Direct boot's "page" with the VM Generation ID: the ID alone has a place in it, between the RSDP
/// and the tables.
const PAGE_AREA: u64 = RSDP_AREA;
/// Where the VM Generation ID is after direct boot.
pub const DIRECT_GENERATION: u64 = PAGE_AREA + vmgenid::ID_OFFSET as u64;
const _: () = assert!(DIRECT_GENERATION >= RSDP_AREA + RSDP_LENGTH as u64);
const _: () = assert!(DIRECT_GENERATION + 16 <= TABLES_AREA.start);

/// Which of the blobs.
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

/// A field inside a table that holds another table's address.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pointer {
    /// Where in the table the field is.
    pub(super) field: usize,
    /// How wide it is: 4 or 8.
    pub(super) size: u8,
}

/// The log of events, still empty: a file beside [`Tables::files`] for a machine with a TPM.
#[must_use]
pub fn event_log() -> File {
    File::new(LOG_FILE, vec![0; LOG_LENGTH as usize])
}

/// Something to be done once addresses are known. The same things that the script can say.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// Adds the address of the tables to the field.
    Pointer { blob: Blob, offset: u32, size: u8 },
    /// Makes the sum of the range 0.
    Checksum { blob: Blob, result: u32, start: u32, length: u32 },
    /// Fills in where the log of events is: at `offset` of the tables there is its length, and then
    /// its address. Without firmware nobody keeps one, and there is none.
    Log { offset: u32 },
    /// Adds the address of the page with the VM Generation ID to the field of 4 bytes.
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

/// The checksum of the first 20 bytes, which are what ACPI 1.0 knew.
const RSDP_CHECKSUM: u32 = 8;
const RSDP_V1_LENGTH: u32 = 20;
const RSDP_RSDT: u32 = 16;
const RSDP_XSDT: u32 = 24;
const RSDP_EXTENDED_CHECKSUM: u32 = 32;
const RSDP_LENGTH: u32 = 36;

/// The blob of tables while it grows.
#[derive(Default)]
pub(super) struct Layout {
    tables: Vec<u8>,
    steps: Vec<Step>,
    page: Vec<u8>,
}

impl Layout {
    /// Puts the FACS, which has no checksum, first.
    pub(super) fn facs(&mut self, bytes: &[u8]) -> u32 {
        debug_assert!(self.tables.is_empty(), "only the blob's start is aligned for the FACS");
        self.tables.extend(bytes);
        0
    }

    /// Puts a table behind the others. `pointers` are its fields that already hold another table's
    /// place in the blob.
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

    /// The same for one that tells of the log of events: its length in `field`, then its address.
    pub(super) fn table_with_log(&mut self, bytes: &[u8], field: usize) -> Result<u32> {
        let start = self.tables.len().next_multiple_of(ALIGN);
        self.steps.push(Step::Log { offset: offset(start + field)? });
        self.table(bytes, &[])
    }

    /// The same for the one that has the address of the page with the VM Generation ID in `field`.
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

    /// Adds the RSDT and XSDT that point to `roots`, and the RSDP that points to them.
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

/// Script and tables count in 32 bits.
fn offset(value: usize) -> Result<u32> {
    u32::try_from(value).with_context(|| format!("ACPI tables of {value} bytes"))
}

/// All tables, with addresses and checksums still to be filled in.
#[derive(Clone, Debug)]
pub struct Tables {
    rsdp: Vec<u8>,
    tables: Vec<u8>,
    page: Vec<u8>,
    steps: Vec<Step>,
}

impl Tables {
    /// The four fw_cfg files that change; the fifth is [`event_log`]. The firmware carries the
    /// script out, and writes the address of the VM Generation ID into [`vmgenid::ADDRESS_FILE`].
    ///
    /// How long the script is does not depend on any address, only on which tables there are; so a
    /// directory that was read before the addresses were known stays right about it.
    #[must_use]
    pub fn files(&self) -> [File; 4] {
        let mut script = Vec::new();
        script.extend(allocate(Blob::Rsdp, RSDP_ALIGN, Zone::Fseg));
        script.extend(allocate(Blob::Tables, TABLES_ALIGN, Zone::High));
        if self.steps.iter().any(|step| matches!(step, Step::Log { .. })) {
            script.extend(allocate(Blob::Log, PAGE_ALIGN, Zone::High));
        }
        script.extend(allocate(Blob::Page, PAGE_ALIGN, Zone::High));
        script.extend(self.steps.iter().flat_map(|step| step.command()));
        script.extend(tell_address());
        [
            File::new(TABLES_FILE, self.tables.clone()),
            File::new(RSDP_FILE, self.rsdp.clone()),
            File::new(SCRIPT_FILE, script),
            File::new(vmgenid::PAGE_FILE, self.page.clone()),
        ]
    }

    /// The finished tables for a guest without firmware, and the address of the RSDP.
    ///
    /// They are below 1 MiB, in what [`crate::e820::for_direct_boot`] reserves, so that also a
    /// kernel that is not told the address finds them.
    ///
    /// # Errors
    ///
    /// Tables that are too large for that place.
    pub fn image(&self) -> Result<(Image, u64)> {
        let room = TABLES_AREA.end - TABLES_AREA.start;
        ensure!(
            self.tables.len() as u64 <= room,
            "ACPI tables of {} bytes, where direct boot has room for {room}",
            self.tables.len()
        );
        let mut rsdp = self.rsdp.clone();
        let mut tables = self.tables.clone();
        for step in &self.steps {
            let bytes = if step.is_of_rsdp() { &mut rsdp } else { &mut tables };
            step.carry_out(bytes, TABLES_AREA.start);
        }
        let id = self.page[usize::from(vmgenid::ID_OFFSET)..][..16].to_vec();
        let image = vec![(RSDP_AREA, rsdp), (TABLES_AREA.start, tables), (DIRECT_GENERATION, id)];
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

    /// Does to `bytes` what firmware does, with the tables at `address`.
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

    /// The step as the script says it.
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

/// Every command of the script is this long.
const COMMAND: usize = 128;
const ALLOCATE: u32 = 1;
const ADD_POINTER: u32 = 2;
const ADD_CHECKSUM: u32 = 3;
const WRITE_POINTER: u32 = 4;

/// Where the firmware should put a blob.
#[derive(Clone, Copy)]
enum Zone {
    High = 1,
    /// Where the legacy search for the RSDP looks. UEFI does not care.
    Fseg = 2,
}

fn allocate(blob: Blob, align: u32, zone: Zone) -> [u8; COMMAND] {
    let mut payload = name(blob).to_vec();
    payload.extend(align.to_le_bytes());
    payload.push(zone as u8);
    command(ALLOCATE, &payload)
}

/// Adds the address of a blob to a field.
fn add_pointer(blob: Blob, offset: u32, size: u8, to: Blob) -> [u8; COMMAND] {
    let mut payload = name(blob).to_vec();
    payload.extend(name(to));
    payload.extend(offset.to_le_bytes());
    payload.push(size);
    command(ADD_POINTER, &payload)
}

/// Writes the address of the VM Generation ID back into a file, so that it can be changed later.
fn tell_address() -> [u8; COMMAND] {
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

/// A file's name in a field of 56 bytes, the last of which is 0.
fn field(name: &str) -> [u8; 56] {
    let mut field = [0; 56];
    field[..name.len()].copy_from_slice(name.as_bytes());
    field
}
