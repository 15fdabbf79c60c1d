//! The state of the first processor at its first instruction: the registers that both protocols
//! require, and the tables that the registers point to.

use crate::Image;

/// The number of entries in the GDT, of 8 bytes each.
pub const GDT_ENTRIES: usize = 6;
/// Linux requires this selector.
pub const CODE_SELECTOR: u16 = 0x10;
/// For DS, ES and SS. Linux requires this selector.
pub const DATA_SELECTOR: u16 = 0x18;
/// Nothing uses the task state segment, but a processor must have one.
pub const TASK_SELECTOR: u16 = 0x20;

const GDT: u64 = 0x500;
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xA000;
/// One page directory for each GiB.
const DIRECTORIES: u64 = 0xB000;
const MAPPED_GIB: u64 = 4;

const PRESENT_WRITABLE: u64 = 0b11;
/// In an entry of a page directory: maps a page of 2 MiB.
const LARGE: u64 = 1 << 7;

// Flat segments from 0 to 4 GiB, present, ring 0, accessed.
const CODE64: u64 = 0x00AF_9B00_0000_FFFF;
const CODE32: u64 = 0x00CF_9B00_0000_FFFF;
const DATA: u64 = 0x00CF_9300_0000_FFFF;
/// A busy 32-bit or 64-bit task state segment at 0 with the minimum length.
const TASK: u64 = 0x0000_8B00_0000_0067;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Protection on, paging off, flat 32-bit segments: CR0 is PE (and ET), CR4 and EFER are 0.
    Protected32,
    /// Long mode, with the page tables at CR3: CR0 is PE and PG (and ET), CR4 is PAE, EFER is LME
    /// and LMA.
    Long64,
}

/// The register values of the first processor. Registers without a field are 0, except that RFLAGS
/// is 2: interrupts are off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    pub mode: Mode,
    pub rip: u64,
    /// PVH: the address of the start info.
    pub rbx: u64,
    /// Linux: the address of the zero page.
    pub rsi: u64,
    /// The address of the page tables, or 0.
    pub cr3: u64,
    /// GDTR's base. Its limit is `GDT_ENTRIES * 8 - 1`. IDTR has base 0 and limit 0.
    pub gdt: u64,
    /// The content of the GDT, for loading the segment registers.
    pub descriptors: [u64; GDT_ENTRIES],
}

impl Start {
    /// The state at Linux's 64-bit entry.
    pub(super) fn long64(rip: u64, zero_page: u64) -> Self {
        let descriptors = [0, 0, CODE64, DATA, TASK, 0];
        let mode = Mode::Long64;
        Self { mode, rip, rbx: 0, rsi: zero_page, cr3: PML4, gdt: GDT, descriptors }
    }

    /// The state at a PVH entry.
    pub(super) fn protected32(rip: u64, start_info: u64) -> Self {
        let descriptors = [0, 0, CODE32, DATA, TASK, 0];
        let mode = Mode::Protected32;
        Self { mode, rip, rbx: start_info, rsi: 0, cr3: 0, gdt: GDT, descriptors }
    }

    /// The tables that the registers point to: the GDT, and in long mode the page tables.
    pub fn image(&self) -> Image {
        let mut image = vec![(self.gdt, bytes(self.descriptors))];
        if self.cr3 != 0 {
            let tables = (0..MAPPED_GIB).map(|i| (DIRECTORIES + i * 0x1000) | PRESENT_WRITABLE);
            let pages = (0..MAPPED_GIB * 512).map(|i| (i << 21) | PRESENT_WRITABLE | LARGE);
            let mut top = bytes([PDPT | PRESENT_WRITABLE]);
            top.resize(0x1000, 0);
            let mut next = bytes(tables);
            next.resize(0x1000, 0);
            image.extend([(PML4, top), (PDPT, next), (DIRECTORIES, bytes(pages))]);
        }
        image
    }
}

fn bytes(numbers: impl IntoIterator<Item = u64>) -> Vec<u8> {
    numbers.into_iter().flat_map(u64::to_le_bytes).collect()
}
