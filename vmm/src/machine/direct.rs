//! Starts a kernel without firmware: prepares the machine as firmware would, then loads the kernel.

use std::fs::File;
use std::io::{Cursor, Read, Seek};
use std::sync::{Arc, OnceLock};

use anyhow::Context;
use boot::linux::{self, Boot, Mode, Start};
use boot::{acpi, e820, layout};
use devices::bus::Spaces;
use host::ram::GuestMemoryMmap;
use kvm_bindings::{kvm_regs, kvm_segment, kvm_sregs};
use vm_memory::ReadVolatile;

use super::bars;
use super::description::Description;
use crate::kvm::vcpu::Vcpu;

pub(super) struct Direct {
    kernel: Kernel,
    command_line: String,
    description: Arc<OnceLock<Description>>,
}

enum Kernel {
    Image(&'static [u8]),
    Files { name: String, kernel: File, initrd: Option<File> },
}

/// IA32_MTRR_DEF_TYPE: enabled, everything write-back. The host's page tables decide anyway, but
/// Linux complains about a machine whose RAM is uncached.
const MTRR_DEF_TYPE: (u32, u64) = (0x2ff, 0x806);

/// CR0: protection enable, extension type, paging.
const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
/// EFER: long mode enabled, and active.
const EFER_LONG: u64 = 1 << 8 | 1 << 10;

impl Direct {
    /// A kernel that is part of this program.
    pub(super) fn image(
        image: &'static [u8],
        command_line: String,
        description: Arc<OnceLock<Description>>,
    ) -> Self {
        Self { kernel: Kernel::Image(image), command_line, description }
    }

    /// A kernel file and an optional initial RAM disk. `name` appears in error messages.
    pub(super) fn files(
        name: String,
        kernel: File,
        initrd: Option<File>,
        command_line: String,
        description: Arc<OnceLock<Description>>,
    ) -> Self {
        Self { kernel: Kernel::Files { name, kernel, initrd }, command_line, description }
    }

    /// Prepares memory, devices and the first processor for the kernel.
    pub(super) fn start(
        &mut self,
        memory: &GuestMemoryMmap,
        spaces: &Spaces,
        first: &Vcpu,
    ) -> anyhow::Result<()> {
        let description = self.description.get().context("the machine is not built yet")?;
        let (low, high) = description.bar_windows();
        bars::set_up(spaces, low, high);
        linux::write_image(memory, &description.smbios.image()?)?;
        let (tables, rsdp) = acpi::tables(&description.platform()?)?.image()?;
        linux::write_image(memory, &tables)?;
        let e820 = e820::for_direct_boot(description.ram, &layout::PCIEXBAR);
        let loader = Loader { command_line: &self.command_line, ram: description.ram, e820, rsdp };
        let start = match &mut self.kernel {
            Kernel::Image(image) => loader.load(memory, &mut Cursor::new(*image), None)?,
            Kernel::Files { name, kernel, initrd } => loader
                .load(memory, kernel, initrd.as_mut())
                .with_context(|| format!("--kernel {name}"))?,
        };
        first.enter(|regs, sregs| enter(&start, regs, sregs), &[MTRR_DEF_TYPE])
    }
}

struct Loader<'a> {
    command_line: &'a str,
    ram: layout::Ram,
    e820: Vec<e820::Entry>,
    rsdp: u64,
}

impl Loader<'_> {
    fn load<F: Read + ReadVolatile + Seek>(
        &self,
        memory: &GuestMemoryMmap,
        kernel: &mut F,
        mut initrd: Option<&mut F>,
    ) -> anyhow::Result<Start> {
        kernel.rewind()?;
        if let Some(initrd) = &mut initrd {
            initrd.rewind()?;
        }
        let Self { command_line, ram, e820, rsdp } = self;
        let (ram, rsdp) = (*ram, *rsdp);
        linux::load(memory, &mut Boot { kernel, initrd, command_line, ram, e820, rsdp })
    }
}

fn enter(start: &Start, regs: &mut kvm_regs, sregs: &mut kvm_sregs) {
    *regs = kvm_regs { rip: start.rip, rbx: start.rbx, rsi: start.rsi, ..Default::default() };
    regs.rflags = 2;
    sregs.cr0 = CR0_PE | CR0_ET;
    if start.mode == Mode::Long64 {
        sregs.cr0 |= CR0_PG;
        sregs.cr4 = CR4_PAE;
        sregs.efer = EFER_LONG;
    }
    sregs.cr3 = start.cr3;
    sregs.gdt.base = start.gdt;
    sregs.gdt.limit = u16::try_from(linux::GDT_ENTRIES * 8 - 1).expect("a small table");
    sregs.idt.base = 0;
    sregs.idt.limit = 0;
    sregs.cs = segment(start, linux::CODE_SELECTOR);
    sregs.tr = segment(start, linux::TASK_SELECTOR);
    let data = segment(start, linux::DATA_SELECTOR);
    for register in [&mut sregs.ds, &mut sregs.es, &mut sregs.fs, &mut sregs.gs, &mut sregs.ss] {
        *register = data;
    }
}

/// The segment register after the selector was loaded from the GDT (Intel SDM 3A, 3.4.5).
fn segment(start: &Start, selector: u16) -> kvm_segment {
    let entry = start.descriptors[usize::from(selector / 8)];
    let bits =
        |shift: u32, mask: u64| u32::try_from(entry >> shift & mask).expect("masks of 32 bits");
    let byte = |shift: u32, mask: u64| bits(shift, mask).to_le_bytes()[0];
    let limit = bits(0, 0xffff) | bits(48, 0xf) << 16;
    let large = byte(55, 1);
    kvm_segment {
        base: u64::from(bits(16, 0xff_ffff) | bits(56, 0xff) << 24),
        limit: if large == 1 { limit << 12 | 0xfff } else { limit },
        selector,
        type_: byte(40, 0xf),
        s: byte(44, 1),
        dpl: byte(45, 3),
        present: byte(47, 1),
        avl: byte(52, 1),
        l: byte(53, 1),
        db: byte(54, 1),
        g: large,
        ..Default::default()
    }
}
