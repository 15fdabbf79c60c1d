//! Direct boot: loads a Linux kernel into memory without firmware.
//!
//! The file's format selects the protocol. A bzImage starts at its 64-bit entry with a zero page
//! (Linux, `Documentation/arch/x86/boot.rst`). An ELF file starts at its PVH entry with a start
//! info (Xen, `docs/misc/pvh.pandoc`). A vmlinux without a PVH entry starts at its 64-bit entry,
//! like a bzImage.
//!
//! The files come from the user and are not trusted: this module checks every offset, size and
//! address in them before it uses the value.
//!
//! The caller must program the chip set as firmware would: RAM from 0xC0000 to 1 MiB, PCIEXBAR at
//! [`crate::layout::PCIEXBAR`], the power management block at the address in the ACPI tables, and
//! SCI_EN set, because there is no SMI command that sets it.
//!
//! | address | content |
//! |---|---|
//! | 0x500 | GDT |
//! | 0x6000 | PVH start info, its module list and its memory map |
//! | 0x7000 | zero page |
//! | 0x9000 | page tables that map the first 4 GiB to themselves |
//! | 0x20000 | command line |
//! | 1 MiB | bzImage |
//! | as linked | ELF |
//! | top of low RAM | initrd |

mod bzimage;
mod elf;
mod params;
mod start;

use std::fmt::Write as _;
use std::io::{Read, Seek, SeekFrom};
use std::ops::Range;

use anyhow::{Context, Result, bail, ensure};
use linux_loader::loader::bootparam::setup_header;
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend, ReadVolatile};

pub use self::start::{CODE_SELECTOR, DATA_SELECTOR, GDT_ENTRIES, Mode, Start, TASK_SELECTOR};
use crate::Image;
use crate::e820::{Entry, LEGACY_END};
use crate::layout::Ram;

const PAGE: u64 = 0x1000;

const START_INFO: u64 = 0x6000;
const ZERO_PAGE: u64 = 0x7000;
const COMMAND_LINE: u64 = 0x2_0000;
/// A longer command line would reach the legacy area. All kernels have a much lower limit.
const COMMAND_LINE_MAX: u64 = 0x1_0000;

/// The lowest address of a kernel. Our own structures are below.
const KERNEL_MIN: u64 = LEGACY_END;

/// A file, or a cursor over bytes.
pub trait Source: Read + ReadVolatile + Seek {}

impl<T: Read + ReadVolatile + Seek> Source for T {}

/// The files to boot, and the machine's data that the boot protocol passes to the kernel.
#[derive(Debug)]
pub struct Boot<'a, F> {
    pub kernel: &'a mut F,
    pub initrd: Option<&'a mut F>,
    pub command_line: &'a str,
    /// The guest's RAM. The `memory` given to [`load`] must contain all of it.
    pub ram: Ram,
    /// The memory map; see [`crate::e820::for_direct_boot`].
    pub e820: &'a [Entry],
    /// The address of the RSDP. See [`crate::acpi::Tables::image`].
    pub rsdp: u64,
}

struct Kernel {
    entry: Entrance,
    /// All memory that the kernel uses before it reads the memory map.
    footprint: Range<u64>,
    /// The maximum length of the command line in bytes, without the 0 at its end.
    command_line_max: u64,
    /// The highest address that the initrd may occupy.
    initrd_last: u64,
}

/// The boot protocol, and the address of the kernel's first instruction.
enum Entrance {
    Linux64 { rip: u64, header: Box<setup_header> },
    Pvh { rip: u64 },
}

/// A range of memory. Empty if the length is 0.
#[derive(Clone, Copy, Default)]
struct Extent {
    address: u64,
    length: u64,
}

/// Writes the kernel, the initrd, the command line and the boot protocol's data into `memory`.
///
/// Returns the register values of the first processor. Call this again after a reset, because a
/// running kernel overwrites this memory.
pub fn load<F: Source>(memory: &impl GuestMemoryBackend, boot: &mut Boot<'_, F>) -> Result<Start> {
    let kernel = load_kernel(memory, boot)?;
    let command_line = load_command_line(memory, boot.command_line, kernel.command_line_max)?;
    let initrd = match &mut boot.initrd {
        Some(file) => load_initrd(memory, *file, &kernel, boot.ram)?,
        None => Extent::default(),
    };
    let info = params::BootInfo { command_line, initrd, e820: boot.e820, rsdp: boot.rsdp };
    let start = match kernel.entry {
        Entrance::Linux64 { rip, header } => {
            write(memory, ZERO_PAGE, &params::zero_page(&header, &info)?)?;
            Start::long64(rip, ZERO_PAGE)
        }
        Entrance::Pvh { rip } => {
            let start_info = params::start_info(&info, START_INFO)?;
            ensure!(
                start_info.len() as u64 <= ZERO_PAGE - START_INFO,
                "a memory map of {} entries does not fit into the start info",
                boot.e820.len()
            );
            write(memory, START_INFO, &start_info)?;
            Start::protected32(rip, START_INFO)
        }
    };
    write_image(memory, &start.image())?;
    Ok(start)
}

/// Fails if a run is not completely in guest RAM.
pub fn write_image(memory: &impl GuestMemoryBackend, image: &Image) -> Result<()> {
    image.iter().try_for_each(|(address, bytes)| write(memory, *address, bytes))
}

fn write(memory: &impl GuestMemoryBackend, address: u64, bytes: &[u8]) -> Result<()> {
    memory
        .write_slice(bytes, GuestAddress(address))
        .with_context(|| format!("{} bytes at {address:#x}, outside of RAM", bytes.len()))
}

fn load_kernel<F: Source>(
    memory: &impl GuestMemoryBackend,
    boot: &mut Boot<'_, F>,
) -> Result<Kernel> {
    let length = boot.kernel.seek(SeekFrom::End(0)).context("length of the kernel")?;
    let mut head = [0; 0x206];
    let got = read_up_to(boot.kernel, &mut head).context("start of the kernel")?;
    if head.starts_with(b"\x7FELF") {
        elf::load(memory, boot.kernel, length, boot.ram)
    } else if head[0x202..] == *b"HdrS" {
        bzimage::load(memory, boot.kernel, length, boot.ram)
    } else {
        let mut shown = String::new();
        for byte in &head[..got.min(4)] {
            // Writing to a string cannot fail.
            write!(shown, " {byte:02x}")?;
        }
        let starts = if got == 0 { ", it is empty".to_owned() } else { format!(":{shown}") };
        bail!(
            "not a Linux kernel: neither a bzImage nor an ELF file with a PVH entry \
             ({length} bytes{starts})"
        )
    }
}

/// Reads from the file's start until `buffer` is full or the file ends.
fn read_up_to<F: Read + Seek>(file: &mut F, buffer: &mut [u8]) -> Result<usize> {
    file.rewind()?;
    let limit = u64::try_from(buffer.len())?;
    let mut bytes = Vec::with_capacity(buffer.len());
    file.by_ref().take(limit).read_to_end(&mut bytes)?;
    buffer[..bytes.len()].copy_from_slice(&bytes);
    Ok(bytes.len())
}

fn load_command_line(
    memory: &impl GuestMemoryBackend,
    text: &str,
    max_length: u64,
) -> Result<Extent> {
    ensure!(!text.contains('\0'), "the command line {text:?} contains a zero byte");
    let length = u64::try_from(text.len())?;
    let max_length = max_length.min(COMMAND_LINE_MAX - 1);
    ensure!(
        length <= max_length,
        "the command line has {length} bytes, but this kernel supports at most {max_length}"
    );
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    write(memory, COMMAND_LINE, &bytes)?;
    Ok(Extent { address: COMMAND_LINE, length })
}

/// Loads the initrd to the highest possible address, out of the kernel's way.
fn load_initrd<F: Source>(
    memory: &impl GuestMemoryBackend,
    file: &mut F,
    kernel: &Kernel,
    ram: Ram,
) -> Result<Extent> {
    let length = file.seek(SeekFrom::End(0)).context("length of the initrd")?;
    ensure!(length > 0, "the initrd is empty");
    file.rewind().context("start of the initrd")?;
    let top = ram.low.min(kernel.initrd_last.saturating_add(1));
    let address = top.checked_sub(length).map(|address| address / PAGE * PAGE);
    let address =
        address.filter(|address| *address >= kernel.footprint.end).with_context(|| {
            format!(
                "the initrd of {length} bytes does not fit between the kernel's end at {:#x} and \
             {top:#x}",
                kernel.footprint.end
            )
        })?;
    memory
        .read_exact_volatile_from(GuestAddress(address), file, usize::try_from(length)?)
        .with_context(|| format!("the initrd, {length} bytes to {address:#x}"))?;
    Ok(Extent { address, length })
}

/// Checks that the kernel's `range` is in low RAM and above our own structures.
fn check_range(what: &str, range: &Range<u64>, ram: Ram) -> Result<()> {
    ensure!(
        range.start >= KERNEL_MIN && range.end <= ram.low,
        "{what} needs memory from {:#x} to {:#x} ({} KiB), but low RAM is {KERNEL_MIN:#x} to \
         {:#x} ({} KiB)",
        range.start,
        range.end,
        (range.end - range.start).div_ceil(1024),
        ram.low,
        ram.low / 1024
    );
    Ok(())
}

#[cfg(test)]
mod test;
