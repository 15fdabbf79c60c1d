//! Loads small kernel files built by the tests, valid and damaged ones.

use std::io::Cursor;

use vm_memory::GuestMemoryMmap;

use super::*;
use crate::e820;
use crate::layout::PCIEXBAR;

const MIB: u64 = 1 << 20;

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

/// A bzImage with `body` bytes after a header of 2 sectors. It runs at 16 MiB and needs 8 MiB.
fn bzimage(body: usize) -> Vec<u8> {
    let mut file = vec![0; 1024];
    file[0x1F1] = 1;
    put(&mut file, 0x1FE, &[0x55, 0xAA]);
    put(&mut file, 0x202, b"HdrS");
    put(&mut file, 0x206, &0x020Fu16.to_le_bytes());
    file[0x211] = 1;
    put(&mut file, 0x22C, &0x7FFF_FFFFu32.to_le_bytes());
    put(&mut file, 0x230, &0x20_0000u32.to_le_bytes());
    put(&mut file, 0x236, &1u16.to_le_bytes());
    put(&mut file, 0x238, &2047u32.to_le_bytes());
    put(&mut file, 0x258, &0x100_0000u64.to_le_bytes());
    put(&mut file, 0x260, &0x80_0000u32.to_le_bytes());
    file.extend((0..body).map(|i| i.to_le_bytes()[0] | 1));
    file
}

/// Encodes an ELF note.
fn note(owner: &[u8], kind: u32, value: &[u8]) -> Vec<u8> {
    let length = |bytes: &[u8]| u32::try_from(bytes.len()).unwrap().to_le_bytes();
    let mut note = [length(owner), length(value), kind.to_le_bytes()].concat();
    for part in [owner, value] {
        note.extend(part);
        note.resize(note.len().next_multiple_of(4), 0);
    }
    note
}

/// An ELF file with one segment, 0x100 bytes in the file and 0x2000 bytes in memory at 2 MiB, and
/// with notes.
fn elf(virtual_address: u64, notes: &[Vec<u8>]) -> Vec<u8> {
    let mut file = vec![0; 0x300];
    put(&mut file, 0, b"\x7FELF\x02\x01\x01");
    put(&mut file, 16, &[2, 0, 62, 0, 1, 0, 0, 0]);
    put(&mut file, 24, &0x20_0000u64.to_le_bytes());
    put(&mut file, 32, &64u64.to_le_bytes());
    put(&mut file, 52, &[64, 0, 56, 0]);
    put(&mut file, 56, &u16::try_from(1 + notes.len()).unwrap().to_le_bytes());
    let mut header = |i: usize, kind: u32, numbers: [u64; 5]| {
        put(&mut file, 64 + 56 * i, &kind.to_le_bytes());
        for (k, number) in numbers.iter().enumerate() {
            put(&mut file, 64 + 56 * i + 8 + 8 * k, &number.to_le_bytes());
        }
    };
    header(0, 1, [0x200, virtual_address, 0x20_0000, 0x100, 0x2000]);
    let mut at = 0x300;
    for (i, note) in notes.iter().enumerate() {
        header(1 + i, 4, [at, 0, 0, note.len() as u64, note.len() as u64]);
        at += note.len() as u64;
    }
    file[0x200..].fill(0x90);
    file.extend(notes.concat());
    file
}

fn pvh(entry: u32) -> Vec<u8> {
    note(b"Xen\0", 18, &entry.to_le_bytes())
}

/// The memory of a machine with `mib` MiB of RAM, full of old data.
fn memory(mib: u64) -> GuestMemoryMmap {
    let size = usize::try_from(mib * MIB).unwrap();
    let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
    memory.write_slice(&vec![0xA5; size], GuestAddress(0)).unwrap();
    memory
}

fn boot(
    mib: u64,
    kernel: &[u8],
    initrd: Option<&[u8]>,
    text: &str,
) -> (GuestMemoryMmap, Result<Start>) {
    let memory = memory(mib);
    let ram = Ram::new(mib * MIB);
    let map = e820::for_direct_boot(ram, &PCIEXBAR);
    let mut initrd = initrd.map(Cursor::new);
    let mut boot = Boot {
        kernel: &mut Cursor::new(kernel),
        initrd: initrd.as_mut(),
        command_line: text,
        ram,
        e820: &map,
        rsdp: 0xE_0000,
    };
    let start = load(&memory, &mut boot);
    (memory, start)
}

fn refusal(mib: u64, kernel: &[u8]) -> String {
    format!("{:#}", boot(mib, kernel, None, "").1.unwrap_err())
}

fn read(memory: &GuestMemoryMmap, address: u64, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    memory.read_slice(&mut bytes, GuestAddress(address)).unwrap();
    bytes
}

fn read_u64(memory: &GuestMemoryMmap, address: u64) -> u64 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

fn read_u32(memory: &GuestMemoryMmap, address: u64) -> u32 {
    memory.read_obj(GuestAddress(address)).unwrap()
}

#[test]
fn enters_a_bzimage_in_long_mode_with_a_zero_page() {
    let initrd = [7; 5000];
    let (memory, start) = boot(32, &bzimage(0x1_0000), Some(&initrd), "console=ttyS0");
    let start = start.unwrap();
    assert_eq!((start.mode, start.rip, start.rsi), (Mode::Long64, 0x10_0200, 0x7000));
    assert_eq!(read(&memory, 0x10_0000, 0x1_0000), bzimage(0x1_0000)[1024..]);

    let page = start.rsi;
    assert_eq!(read(&memory, page + 0x202, 4), b"HdrS");
    assert_eq!(read(&memory, page + 0x210, 1), [0xFF]);
    assert_eq!(read_u64(&memory, page + 0x70), 0xE_0000);
    let line = u64::from(read_u32(&memory, page + 0x228));
    assert_eq!(read(&memory, line, 14), b"console=ttyS0\0");
    // At the highest possible address, on a page boundary.
    let (at, size) = (read_u32(&memory, page + 0x218), read_u32(&memory, page + 0x21C));
    assert_eq!((u64::from(at), size), (32 * MIB - 0x2000, 5000));
    assert_eq!(read(&memory, at.into(), 5000), initrd);
    // The memory map.
    assert_eq!(read(&memory, page + 0x1E8, 1), [6]);
    let map = e820::bytes(&e820::for_direct_boot(Ram::new(32 * MIB), &PCIEXBAR));
    assert_eq!(read(&memory, page + 0x2D0, 120), map);
}

#[test]
fn identity_maps_the_first_four_gib() {
    let (memory, start) = boot(32, &bzimage(0x1000), None, "");
    let start = start.unwrap();
    for address in [0, 0x10_0200, 0x3FFF_FFFF, 0x4000_0000, 0xFEE0_0123, 0xFFFF_FFF0u64] {
        let mut table = start.cr3;
        for shift in [39, 30] {
            let entry = read_u64(&memory, table + (address >> shift & 511) * 8);
            assert_eq!(entry & 0xFFF, 0b11);
            table = entry & !0xFFF;
        }
        let entry = read_u64(&memory, table + (address >> 21 & 511) * 8);
        assert_eq!(entry & 0x1F_FFFF, 0b1000_0011);
        assert_eq!((entry & !0x1F_FFFF) | (address & 0x1F_FFFF), address);
    }
    assert_eq!(read_u64(&memory, start.cr3 + 8), 0);
    assert_eq!(read_u64(&memory, 0xA000 + 4 * 8), 0);
    let code = read_u64(&memory, start.gdt + u64::from(CODE_SELECTOR));
    assert_eq!(code, start.descriptors[2]);
    // A 64-bit code segment, not a 32-bit one.
    assert_eq!(code >> 53 & 0b11, 0b01);
}

#[test]
fn enters_a_pvh_kernel_in_protected_mode_with_a_start_info() {
    let notes = [note(b"GNU\0", 3, &[1; 20]), pvh(0x20_0010), note(b"GNU\0", 5, &[0; 16])];
    let (memory, start) = boot(32, &elf(0x20_0000, &notes), Some(&[9; 10]), "quiet");
    let start = start.unwrap();
    assert_eq!((start.mode, start.rip, start.rbx), (Mode::Protected32, 0x20_0010, 0x6000));
    assert_eq!(start.cr3, 0);
    assert_eq!(start.descriptors[2] >> 53 & 0b11, 0b10);
    // The file's bytes, then zeros.
    assert_eq!(read(&memory, 0x20_0000, 0x100), [0x90; 0x100]);
    assert_eq!(read(&memory, 0x20_0100, 0x1F00), [0; 0x1F00]);
    assert_eq!(read(&memory, 0x20_2000, 1), [0xA5]);

    let info = start.rbx;
    assert_eq!((read_u32(&memory, info), read_u32(&memory, info + 4)), (0x336E_C578, 1));
    assert_eq!(read(&memory, read_u64(&memory, info + 24), 6), b"quiet\0");
    assert_eq!(read_u64(&memory, info + 32), 0xE_0000);
    assert_eq!(read_u32(&memory, info + 12), 1);
    let module = read_u64(&memory, info + 16);
    let (at, size) = (read_u64(&memory, module), read_u64(&memory, module + 8));
    assert_eq!((at, size), (32 * MIB - 0x1000, 10));
    let (map, count) = (read_u64(&memory, info + 40), read_u32(&memory, info + 48));
    assert_eq!(count, 6);
    assert_eq!((read_u64(&memory, map), read_u64(&memory, map + 8)), (0, 0x9_FC00));
    assert_eq!(read_u32(&memory, map + 24 + 16), 2);
}

#[test]
fn enters_a_vmlinux_without_a_pvh_entry_in_long_mode() {
    let (memory, start) = boot(32, &elf(0xFFFF_FFFF_8100_0000, &[]), None, "");
    let start = start.unwrap();
    assert_eq!((start.mode, start.rip), (Mode::Long64, 0x20_0000));
    assert_eq!(read(&memory, start.rsi + 0x202, 4), b"HdrS");
    assert_eq!(read_u32(&memory, start.rsi + 0x21C), 0);
}

#[test]
fn boots_again_over_the_remains_of_a_kernel() {
    let kernel = elf(0x20_0000, &[pvh(0x20_0000)]);
    let ram = Ram::new(32 * MIB);
    let map = e820::for_direct_boot(ram, &PCIEXBAR);
    let memory = memory(32);
    let mut starts = vec![];
    let mut file = Cursor::new(&kernel);
    for _ in 0..2 {
        memory.write_slice(&vec![0xFF; 0x1F_0000], GuestAddress(0x1_0000)).unwrap();
        let (initrd, e820, rsdp) = (None, map.as_slice(), 0);
        let mut boot = Boot { kernel: &mut file, initrd, command_line: "", ram, e820, rsdp };
        starts.push((load(&memory, &mut boot).unwrap(), read(&memory, 0x20_0000, 0x2000)));
    }
    assert_eq!(starts[0], starts[1]);
}

#[test]
fn refuses_a_file_that_is_not_a_kernel() {
    let what = "not a Linux kernel: neither a bzImage nor an ELF file with a PVH entry";
    assert_eq!(refusal(32, b""), format!("{what} (0 bytes, it is empty)"));
    assert_eq!(refusal(32, b"#!/bin/sh\n"), format!("{what} (10 bytes: 23 21 2f 62)"));
    assert!(refusal(32, &vec![0; 0x10_0000]).starts_with(what));
}

#[test]
fn refuses_a_program() {
    let program = elf(0x40_0000, &[note(b"GNU\0", 3, &[1; 20])]);
    assert_eq!(refusal(32, &program), "not a Linux kernel: an ELF file without a PVH entry");
    // A program linked to 0, as programs of the host are.
    let program = elf(0, &[note(b"GNU\0", 3, &[1; 20])]);
    assert_eq!(refusal(32, &program), "not a Linux kernel: an ELF file without a PVH entry");
    let mut other = elf(0x40_0000, &[]);
    other[18] = 0xB7;
    assert_eq!(refusal(32, &other), "an ELF file that is not for x86-64");
}

#[test]
fn refuses_a_truncated_bzimage() {
    let mut kernel = bzimage(0x1000);
    put(&mut kernel, 0x1F4, &0x100u32.to_le_bytes());
    assert!(boot(32, &kernel, None, "").1.is_ok());
    kernel.truncate(kernel.len() - 16);
    let text = refusal(32, &kernel);
    assert!(text.contains("ends after 5104 bytes, but its header announces 5120"), "{text}");
}

#[test]
fn refuses_a_32_bit_bzimage() {
    let mut old = bzimage(0x1000);
    put(&mut old, 0x206, &0x020Bu16.to_le_bytes());
    assert!(refusal(32, &old).contains("without a 64-bit entry (boot protocol 2.11)"));
    let mut narrow = bzimage(0x1000);
    narrow[0x236] = 0;
    assert!(refusal(32, &narrow).contains("without a 64-bit entry"));
}

#[test]
fn refuses_a_kernel_that_does_not_fit() {
    // The kernel needs memory up to 24 MiB, although its file is small.
    let text = refusal(20, &bzimage(0x1000));
    assert!(text.contains("0x100000 to 0x1800000") && text.contains("(20480 KiB)"), "{text}");
    assert!(boot(24, &bzimage(0x1000), None, "").1.is_ok());
    assert!(refusal(24, &bzimage(24 << 20)).contains("the kernel needs memory"));
    let low = |at: u64| {
        let mut file = elf(0x20_0000, &[pvh(0x20_0000)]);
        put(&mut file, 64 + 24, &at.to_le_bytes());
        refusal(32, &file)
    };
    assert!(low(0xF_F000).contains("0xff000 to 0x101000"));
    assert!(low(32 * MIB - 0x1000).contains("the kernel needs memory"));
    assert!(low(u64::MAX - 1).contains("0xfffffffffffffffe"));
}

#[test]
fn refuses_an_initrd_that_does_not_fit() {
    let initrd = vec![1; 9 << 20];
    let text = format!("{:#}", boot(32, &bzimage(0x400), Some(&initrd), "").1.unwrap_err());
    assert_eq!(
        text,
        "the initrd of 9437184 bytes does not fit between the kernel's end at 0x1800000 and \
         0x2000000"
    );
    assert!(boot(32, &bzimage(0x400), Some(&initrd[..8 << 20]), "").1.is_ok());
    let text = format!("{:#}", boot(32, &bzimage(0x400), Some(&[]), "").1.unwrap_err());
    assert_eq!(text, "the initrd is empty");
}

#[test]
fn keeps_the_initrd_below_the_kernels_address_limit() {
    let mut kernel = bzimage(0x400);
    put(&mut kernel, 0x22C, &0x1AF_FFFFu32.to_le_bytes());
    let (memory, start) = boot(32, &kernel, Some(&[1; 4096]), "");
    assert_eq!(read_u32(&memory, start.unwrap().rsi + 0x218), 0x1AF_F000);
}

#[test]
fn refuses_a_command_line_longer_than_the_kernels_limit() {
    let longest = "x".repeat(2047);
    for kernel in [bzimage(0x400), elf(0x20_0000, &[pvh(0x20_0000)])] {
        assert!(boot(32, &kernel, None, &longest).1.is_ok());
        let text = boot(32, &kernel, None, &(longest.clone() + "x")).1.unwrap_err().to_string();
        let expected = "the command line has 2048 bytes, but this kernel supports at most 2047";
        assert_eq!(text, expected);
        let text = boot(32, &kernel, None, "a\0b").1.unwrap_err().to_string();
        assert!(text.contains(r"a\0b"), "{text}");
    }
    // A header that announces a longer command line than there is room for.
    let mut kernel = bzimage(0x400);
    put(&mut kernel, 0x238, &u32::MAX.to_le_bytes());
    assert!(boot(32, &kernel, None, &"x".repeat(0x1_0000)).1.is_err());
}

#[test]
fn refuses_damaged_elf_files() {
    let good = elf(0x20_0000, &[pvh(0x20_0000)]);
    assert!(boot(32, &good, None, "").1.is_ok());
    let damaged = |at: usize, bytes: &[u8]| {
        let mut file = good.clone();
        put(&mut file, at, bytes);
        refusal(32, &file)
    };
    assert!(damaged(56, &[0, 0]).contains("0 program headers"));
    assert!(damaged(56, &[0xFF, 0xFF]).contains("65535 program headers"));
    assert!(damaged(32, &[0xFF; 8]).contains("0xffffffffffffffff"));
    assert!(damaged(64 + 8, &[0xFF; 8]).contains("segment 0"));
    assert!(damaged(64 + 32, &0x1000u64.to_le_bytes()).contains("segment 0 has 4096 bytes"));
    assert!(damaged(64 + 40, &0xFFu64.to_le_bytes()).contains("for 255 bytes of memory"));
    assert!(damaged(64 + 56 + 32, &[0xFF; 8]).contains("segment 1"));
    let far = elf(0x20_0000, &[pvh(0x90_0000)]);
    assert!(refusal(32, &far).contains("0x900000, outside of its segments"));
    let short = elf(0x20_0000, &[note(b"Xen\0", 18, &[1, 2])]);
    assert!(refusal(32, &short).contains("PVH note"));
}

/// A damaged file either loads or fails with an error. It never causes a panic.
#[test]
fn survives_truncated_and_damaged_kernels() {
    let kernels = [bzimage(0x300), elf(0x20_0000, &[pvh(0x20_0000), note(b"Xen\0", 7, b"x")])];
    let memory = memory(32);
    let ram = Ram::new(32 * MIB);
    let map = e820::for_direct_boot(ram, &PCIEXBAR);
    let try_one = |file: &[u8]| {
        let mut kernel = Cursor::new(file);
        let (initrd, e820, rsdp) = (None, map.as_slice(), 0);
        let mut boot = Boot { kernel: &mut kernel, initrd, command_line: "", ram, e820, rsdp };
        load::<Cursor<&[u8]>>(&memory, &mut boot).is_ok()
    };
    let mut loaded = 0;
    for kernel in &kernels {
        assert!(try_one(kernel));
        for length in 0..kernel.len() {
            loaded += u32::from(try_one(&kernel[..length]));
        }
        let mut seed = 1u64;
        for _ in 0..3_000 {
            let mut file = kernel.clone();
            for _ in 0..3 {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let at = usize::try_from(seed >> 33).unwrap() % file.len();
                file[at] = [0, 0xFF, 0x7F, 0x80][usize::try_from(seed >> 20 & 3).unwrap()];
            }
            loaded += u32::from(try_one(&file));
        }
    }
    // Most damages hit bytes that do not matter.
    assert!(loaded > 1000, "{loaded}");
}
