//! The boot parameters of the kernel: the zero page of Linux's own protocol, or PVH's start info.

use anyhow::{Context, Result, ensure};
use linux_loader::loader::bootparam::{boot_e820_entry, boot_params, setup_header};
use linux_loader::loader::elf::start_info::{
    XEN_HVM_START_MAGIC_VALUE, hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use vm_memory::ByteValued;

use super::Extent;
use crate::e820::Entry;

/// The type of a boot loader that has no assigned number.
const LOADER_UNDEFINED: u8 = 0xFF;

/// The parameters that both protocols have.
pub(super) struct BootInfo<'a> {
    pub(super) command_line: Extent,
    pub(super) initrd: Extent,
    pub(super) e820: &'a [Entry],
    pub(super) rsdp: u64,
}

/// The zero page: the kernel's own header with our fields filled in.
pub(super) fn zero_page(header: &setup_header, info: &BootInfo<'_>) -> Result<Vec<u8>> {
    let mut header = *header;
    header.type_of_loader = LOADER_UNDEFINED;
    header.cmd_line_ptr = u32::try_from(info.command_line.address)?;
    header.cmdline_size = u32::try_from(info.command_line.length)?;
    header.ramdisk_image = u32::try_from(info.initrd.address)?;
    header.ramdisk_size = u32::try_from(info.initrd.length)?;
    let mut params =
        boot_params { hdr: header, acpi_rsdp_addr: info.rsdp, ..boot_params::default() };
    let mut table = params.e820_table;
    ensure!(
        info.e820.len() <= table.len(),
        "a memory map of {} entries: the zero page has room for {}",
        info.e820.len(),
        table.len()
    );
    for (slot, entry) in table.iter_mut().zip(info.e820) {
        *slot =
            boot_e820_entry { addr: entry.base, size: entry.length, r#type: entry.kind.number() };
    }
    params.e820_table = table;
    params.e820_entries = u8::try_from(info.e820.len())?;
    Ok(params.as_slice().to_vec())
}

/// The start info and the tables it points to, for the address `at`.
pub(super) fn start_info(info: &BootInfo<'_>, at: u64) -> Result<Vec<u8>> {
    let modules_at = at + size_of::<hvm_start_info>() as u64;
    let map_at = modules_at + size_of::<hvm_modlist_entry>() as u64;
    let has_initrd = info.initrd.length > 0;
    let start_info = hvm_start_info {
        magic: XEN_HVM_START_MAGIC_VALUE,
        // Version 1 has a memory map.
        version: 1,
        nr_modules: u32::from(has_initrd),
        modlist_paddr: if has_initrd { modules_at } else { 0 },
        cmdline_paddr: info.command_line.address,
        rsdp_paddr: info.rsdp,
        memmap_paddr: map_at,
        memmap_entries: u32::try_from(info.e820.len()).context("entries of the memory map")?,
        ..hvm_start_info::default()
    };
    let module = hvm_modlist_entry {
        paddr: info.initrd.address,
        size: info.initrd.length,
        ..hvm_modlist_entry::default()
    };
    let mut bytes = start_info.as_slice().to_vec();
    bytes.extend(module.as_slice());
    for entry in info.e820 {
        let entry = hvm_memmap_table_entry {
            addr: entry.base,
            size: entry.length,
            type_: entry.kind.number(),
            reserved: 0,
        };
        bytes.extend(entry.as_slice());
    }
    Ok(bytes)
}
