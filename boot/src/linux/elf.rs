//! An uncompressed kernel: an ELF file, loaded at the addresses that it is linked to.

use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use linux_loader::loader::bootparam::setup_header;
use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::GuestMemoryBackend;

use super::{Entrance, Kernel, Source, check_range, read_up_to, write};
use crate::layout::Ram;

const HEADER: usize = 64;
const PROGRAM_HEADER: usize = 56;
/// Far more than any kernel has. Bounds the time that a damaged file can make us spend.
const PROGRAM_HEADERS_MAX: u64 = 256;
const NOTES_MAX: u64 = 1 << 20;

const CLASS_64: u8 = 2;
const LITTLE_ENDIAN: u8 = 1;
const MACHINE_X86_64: u64 = 62;
const PT_LOAD: u64 = 1;
const PT_NOTE: u64 = 4;

/// The type of the note that contains the PVH entry. Its owner is "Xen".
const XEN_ELFNOTE_PHYS32_ENTRY: u64 = 18;

/// Linux's limit is 2048 bytes including the 0. An ELF file has no field for it.
const COMMAND_LINE_MAX: u64 = 2047;

/// A program header.
struct Segment {
    kind: u64,
    offset: u64,
    virtual_address: u64,
    physical_address: u64,
    file_size: u64,
    memory_size: u64,
}

/// Reads `N` little-endian bytes at `at`.
fn number<const N: usize>(bytes: &[u8], at: usize) -> u64 {
    let mut number = [0; 8];
    number[..N].copy_from_slice(&bytes[at..at + N]);
    u64::from_le_bytes(number)
}

pub(super) fn load<F: Source>(
    memory: &impl GuestMemoryBackend,
    file: &mut F,
    length: u64,
    ram: Ram,
) -> Result<Kernel> {
    let mut header = [0; HEADER];
    let got = read_up_to(file, &mut header)?;
    ensure!(
        got == HEADER
            && header[4] == CLASS_64
            && header[5] == LITTLE_ENDIAN
            && number::<2>(&header, 18) == MACHINE_X86_64,
        "an ELF file that is not for x86-64"
    );
    let segments = segments(file, &header, length)?;
    // Look for the entry before checking the addresses: a host program fails both checks, and "not
    // a kernel" is the more helpful error.
    let entry = entry(file, &segments, number::<8>(&header, 24))?;
    let footprint = footprint(&segments, ram)?;
    let rip = match &entry {
        Entrance::Pvh { rip } | Entrance::Linux64 { rip, .. } => *rip,
    };
    ensure!(
        footprint.contains(&rip),
        "an ELF kernel with its entry at {rip:#x}, outside of its segments \
         ({:#x} to {:#x})",
        footprint.start,
        footprint.end
    );
    Elf::load(memory, None, file, None).context("the ELF kernel")?;
    // The loader does not clear memory beyond the file's bytes, and after a reset it is not 0.
    for segment in segments.iter().filter(|segment| segment.kind == PT_LOAD) {
        let start = segment.physical_address + segment.file_size;
        clear(memory, start..segment.physical_address + segment.memory_size)?;
    }
    Ok(Kernel { entry, footprint, command_line_max: COMMAND_LINE_MAX, initrd_last: u64::MAX })
}

/// Reads the program headers, and checks their offsets and sizes against the file.
fn segments<F: Read + Seek>(file: &mut F, header: &[u8], length: u64) -> Result<Vec<Segment>> {
    let (offset, size, count) =
        (number::<8>(header, 32), number::<2>(header, 54), number::<2>(header, 56));
    ensure!(
        size == PROGRAM_HEADER as u64
            && (1..=PROGRAM_HEADERS_MAX).contains(&count)
            && (HEADER as u64..length).contains(&offset),
        "an ELF file with {count} program headers of {size} bytes at {offset:#x}"
    );
    file.seek(SeekFrom::Start(offset)).context("program headers")?;
    let mut segments = Vec::new();
    for i in 0..count {
        let mut bytes = [0; PROGRAM_HEADER];
        file.read_exact(&mut bytes).with_context(|| format!("program header {i} of {count}"))?;
        let segment = Segment {
            kind: number::<4>(&bytes, 0),
            offset: number::<8>(&bytes, 8),
            virtual_address: number::<8>(&bytes, 16),
            physical_address: number::<8>(&bytes, 24),
            file_size: number::<8>(&bytes, 32),
            memory_size: number::<8>(&bytes, 40),
        };
        let end = segment.offset.checked_add(segment.file_size);
        ensure!(
            end.is_some_and(|end| end <= length),
            "an ELF file of {length} bytes whose segment {i} has {} bytes at {:#x}",
            segment.file_size,
            segment.offset
        );
        ensure!(
            segment.kind != PT_LOAD || segment.file_size <= segment.memory_size,
            "an ELF file whose segment {i} has {} bytes for {} bytes of memory",
            segment.file_size,
            segment.memory_size
        );
        segments.push(segment);
    }
    Ok(segments)
}

/// Checks the addresses of the segments, and returns the range that spans all of them.
fn footprint(segments: &[Segment], ram: Ram) -> Result<Range<u64>> {
    let mut all: Option<Range<u64>> = None;
    for segment in segments.iter().filter(|s| s.kind == PT_LOAD && s.memory_size > 0) {
        let start = segment.physical_address;
        let end = start.checked_add(segment.memory_size).with_context(|| {
            format!("an ELF kernel with {:#x} bytes at {start:#x}", segment.memory_size)
        })?;
        check_range("the kernel", &(start..end), ram)?;
        all = Some(all.map_or(start..end, |all| all.start.min(start)..all.end.max(end)));
    }
    all.context("an ELF file with nothing to load")
}

/// Returns the PVH entry if there is one, else the 64-bit entry of a Linux kernel.
fn entry<F: Read + Seek>(file: &mut F, segments: &[Segment], entry: u64) -> Result<Entrance> {
    for segment in segments.iter().filter(|segment| segment.kind == PT_NOTE) {
        if let Some(rip) = pvh_entry(file, segment)? {
            return Ok(Entrance::Pvh { rip });
        }
    }
    // A program is linked to the lower half of the address space, a kernel to the upper half.
    let is_kernel =
        |segment: &Segment| segment.kind == PT_LOAD && segment.virtual_address >> 63 == 1;
    if !segments.iter().any(is_kernel) {
        bail!("not a Linux kernel: an ELF file without a PVH entry");
    }
    let header = setup_header {
        boot_flag: 0xAA55,
        header: u32::from_le_bytes(*b"HdrS"),
        version: 0x020F,
        kernel_alignment: 0x0100_0000,
        ..setup_header::default()
    };
    Ok(Entrance::Linux64 { rip: entry, header: Box::new(header) })
}

/// Searches a note segment for the PVH entry. (The loader does the same, but forgets an entry that
/// it found in an earlier segment.)
fn pvh_entry<F: Read + Seek>(file: &mut F, segment: &Segment) -> Result<Option<u64>> {
    ensure!(
        segment.file_size <= NOTES_MAX,
        "an ELF file with {} bytes of notes",
        segment.file_size
    );
    file.seek(SeekFrom::Start(segment.offset)).context("notes")?;
    let mut notes = vec![0; usize::try_from(segment.file_size)?];
    file.read_exact(&mut notes).context("notes")?;
    let mut rest = notes.as_slice();
    while rest.len() >= 12 {
        let (name, value) = (number::<4>(rest, 0), number::<4>(rest, 4));
        let kind = number::<4>(rest, 8);
        let value_at = 12 + usize::try_from(name.next_multiple_of(4))?;
        let next = value_at + usize::try_from(value.next_multiple_of(4))?;
        let Some(text) = rest.get(12..value_at) else { break };
        if kind == XEN_ELFNOTE_PHYS32_ENTRY && text == b"Xen\0" {
            let entry = rest.get(value_at..value_at + 4).filter(|_| value >= 4);
            let entry = entry.context("a PVH note without an entry in it")?;
            return Ok(Some(number::<4>(entry, 0)));
        }
        let Some(after) = rest.get(next..) else { break };
        rest = after;
    }
    Ok(None)
}

/// The caller has checked `range`.
fn clear(memory: &impl GuestMemoryBackend, range: Range<u64>) -> Result<()> {
    let zeros = [0; 0x1_0000];
    let mut at = range.start;
    while at < range.end {
        let length = usize::try_from(range.end - at)?.min(zeros.len());
        write(memory, at, &zeros[..length])?;
        at += length as u64;
    }
    Ok(())
}
