//! Kernel files with arbitrary headers, notes and segments.

use std::io::Cursor;

use boot::layout::{self, Ram};
use boot::linux::{self, Boot};
use host::testutil::noise::Noise;
use vm_memory::{GuestAddress, GuestMemoryMmap};

const SIZE: u64 = 64 << 20;
const SIZE_OF_MAPPING: usize = 64 << 20;

pub(crate) fn load(data: &[u8]) {
    let ranges = [(GuestAddress(0), SIZE_OF_MAPPING)];
    let memory: GuestMemoryMmap = GuestMemoryMmap::from_ranges(&ranges).expect("memory");
    let ram = Ram::new(SIZE);
    let e820 = boot::e820::for_direct_boot(ram, &layout::PCIEXBAR);
    let (mut kernel, command_line) = (Cursor::new(data), "console=ttyS0");
    let (kernel, e820) = (&mut kernel, &e820);
    let mut boot = Boot { kernel, initrd: None, command_line, ram, e820, rsdp: 0 };
    linux::load(&memory, &mut boot).ok();
}

/// A bzImage or an ELF file with mostly valid fields.
pub(crate) fn make(noise: &mut Noise) -> Vec<u8> {
    let mut file = vec![0; 0x1000];
    let small =
        |noise: &mut Noise| noise.choose(&[0_u64, 1, 0x40, 0x200, 0x1000, 0x10_0000, u64::MAX]);
    if noise.below(2) == 0 {
        // Documentation/arch/x86/boot.rst: setup_sects, boot_flag, jump, header, version.
        file[0x1f1] = noise.choose(&[0, 1, 4, 255]);
        file[0x1fe..0x202].copy_from_slice(&[0x55, 0xaa, 0xeb, 0x66]);
        file[0x202..0x206].copy_from_slice(b"HdrS");
        file[0x206..0x208].copy_from_slice(&[15, 2]);
        file[0x211] = noise.choose(&[1, 0, 0x81]);
        file[0x236] = noise.choose(&[1, 3, 0]);
        for at in [0x1f4, 0x214, 0x22c, 0x230, 0x238, 0x258, 0x260] {
            let value = small(noise).to_le_bytes();
            file[at..at + 4].copy_from_slice(&value[..4]);
        }
    } else {
        // ELF-64, an executable for x86-64; program headers and notes.
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[16..20].copy_from_slice(&[noise.choose(&[2, 3]), 0, 62, 0]);
        file[20] = 1;
        file[24..32].copy_from_slice(&small(noise).to_le_bytes());
        file[32..40].copy_from_slice(&noise.choose(&[64_u64, 0x1000, u64::MAX]).to_le_bytes());
        file[52..54].copy_from_slice(&[64, 0]);
        file[54..56].copy_from_slice(&[56, 0]);
        let count = noise.choose(&[1, 2, 3, 255]);
        file[56] = count;
        for header in 0..usize::from(count.min(3)) {
            let at = 64 + 56 * header;
            file[at] = noise.choose(&[1, 1, 4, 0]);
            for field in 1..7 {
                let value = small(noise).to_le_bytes();
                file[at + 8 * field..at + 8 * field + 8].copy_from_slice(&value);
            }
        }
        file[0x200..0x210].copy_from_slice(b"\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0");
    }
    file
}
