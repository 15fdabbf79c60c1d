//! Kernel files: headers, notes and segments that say anything.
#![no_main]

use std::io::Cursor;

use boot::layout::{self, Ram};
use boot::linux::{self, Boot};
use libfuzzer_sys::fuzz_target;
use vm_memory::{GuestAddress, GuestMemoryMmap};

const SIZE: u64 = 64 << 20;

fuzz_target!(|data: &[u8]| {
    let ranges = [(GuestAddress(0), SIZE as usize)];
    let memory = GuestMemoryMmap::from_ranges(&ranges).expect("memory");
    let ram = Ram::new(SIZE);
    let e820 = boot::e820::for_direct_boot(ram, &layout::PCIEXBAR);
    let mut kernel = Cursor::new(data);
    let (command_line, initrd) = ("console=ttyS0", None);
    let kernel = &mut kernel;
    linux::load(&memory, &mut Boot { kernel, initrd, command_line, ram, e820: &e820, rsdp: 0 }).ok();
});
