//! The first processor at its first instruction: what both protocols demand of its registers, and
//! the tables that those point to.

use crate::Image;

/// How many entries of 8 bytes the GDT has.
pub const GDT_ENTRIES: usize = 6;
/// The code segment; Linux wants this number.
pub const CODE_SELECTOR: u16 = 0x10;
/// The segment of DS, ES and SS; Linux wants this number.
pub const DATA_SELECTOR: u16 = 0x18;
/// The task state segment: of no use to anyone, but a processor must have one.
pub const TASK_SELECTOR: u16 = 0x20;

const GDT: u64 = 0x500;
const PML4: u64 = 0x9000;
const PDPT: u64 = 0xA000;
/// One page directory for each GiB.
const DIRECTORIES: u64 = 0xB000;
const MAPPED_GIB: u64 = 4;

const PRESENT_WRITABLE: u64 = 0b11;
/// In a page directory: a page of 2 MiB.
const LARGE: u64 = 1 << 7;

/// Flat segments from 0 to 4 GiB, present, ring 0, accessed.
const CODE64: u64 = 0x00AF_9B00_0000_FFFF;
const CODE32: u64 = 0x00CF_9B00_0000_FFFF;
const DATA: u64 = 0x00CF_9300_0000_FFFF;
/// A busy 32-bit or 64-bit task state at 0 with the shortest length.
const TASK: u64 = 0x0000_8B00_0000_0067;

/// In which mode the processor starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Protection on, paging off, flat 32-bit segments: CR0 is PE (and ET), CR4 and EFER are 0.
    Protected32,
    /// Long mode, with the page tables at CR3: CR0 is PE and PG (and ET), CR4 is PAE, EFER is LME
    /// and LMA.
    Long64,
}

/// What the first processor's registers need. Registers that are not named are 0; RFLAGS is 2, so
/// interrupts are off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// The processor's mode.
    pub mode: Mode,
    /// The first instruction.
    pub rip: u64,
    /// PVH: the start info.
    pub rbx: u64,
    /// Linux: the zero page.
    pub rsi: u64,
    /// The page tables, or 0.
    pub cr3: u64,
    /// GDTR's base; its limit is `GDT_ENTRIES * 8 - 1`. IDTR is base 0, limit 0.
    pub gdt: u64,
    /// What is there, so that segment registers can be loaded from it.
    pub descriptors: [u64; GDT_ENTRIES],
}

impl Start {
    /// At Linux's 64-bit entry.
    pub(super) fn long64(rip: u64, zero_page: u64) -> Self {
        let descriptors = [0, 0, CODE64, DATA, TASK, 0];
        let mode = Mode::Long64;
        Self { mode, rip, rbx: 0, rsi: zero_page, cr3: PML4, gdt: GDT, descriptors }
    }

    /// At a PVH entry.
    pub(super) fn protected32(rip: u64, start_info: u64) -> Self {
        let descriptors = [0, 0, CODE32, DATA, TASK, 0];
        let mode = Mode::Protected32;
        Self { mode, rip, rbx: start_info, rsi: 0, cr3: 0, gdt: GDT, descriptors }
    }

    /// What the registers point to: the GDT, and in long mode the page tables.
    #[must_use]
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
