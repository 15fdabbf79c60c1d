//! Disks for tests, as Windows Setup leaves them.

/// Offsets of the GPT's header and entries, and of the EFI system partition.
pub const HEADER: usize = 512;
const ENTRIES: usize = 1024;
const ENTRIES_LENGTH: usize = 128 * 128;
const PARTITION: usize = 1 << 20;
/// Sectors of the FAT before its root directory: 32 reserved ones, and two tables of 4.
const ROOT: usize = PARTITION + 40 * 512;
const LENGTH: usize = 4 << 20;

/// The EFI system partition of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Esp {
    /// There are no partitions.
    None,
    /// It is not formatted.
    Unformatted,
    /// It has only what Windows makes on every volume.
    Empty,
    /// It has a boot loader.
    Files,
}

/// A disk with a GPT.
pub fn disk(esp: Esp) -> Vec<u8> {
    let mut disk = vec![0; LENGTH];
    // Boot code, and the partition that protects the GPT.
    disk[0] = 0x33;
    disk[446 + 4] = 0xee;
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);
    let mut put = |at: usize, bytes: &[u8]| disk[at..at + bytes.len()].copy_from_slice(bytes);
    put(HEADER, b"EFI PART\0\0\x01\0\x5c\0\0\0");
    put(HEADER + 24, &1_u64.to_le_bytes());
    put(HEADER + 72, &2_u64.to_le_bytes());
    put(HEADER + 80, &[128, 0, 0, 0, 128, 0, 0, 0]);
    if esp != Esp::None {
        let efi = 0xc12a_7328_f81f_11d2_ba4b_00a0_c93e_c93b_u128;
        let data = 0xebd0_a0a2_b9e5_4433_87c0_68b6_b726_99c7_u128;
        for (number, (kind, first)) in [(efi, 2048_u64), (data, 4096)].into_iter().enumerate() {
            let mut kind = kind.to_be_bytes();
            kind[..4].reverse();
            kind[4..6].reverse();
            kind[6..8].reverse();
            put(ENTRIES + number * 128, &kind);
            put(ENTRIES + number * 128 + 32, &first.to_le_bytes());
        }
    }
    if matches!(esp, Esp::Empty | Esp::Files) {
        put(PARTITION + 11, &[0, 2, 1, 32, 0, 2]);
        put(PARTITION + 36, &4_u32.to_le_bytes());
        put(PARTITION + 44, &2_u32.to_le_bytes());
        put(PARTITION + 510, &[0x55, 0xaa]);
        put(ROOT, b"SYSTEM     \x08");
        put(ROOT + 32, b"SYSTEM~1   \x16");
        put(ROOT + 64, b"\xe5FI        \x10");
    }
    if esp == Esp::Files {
        put(ROOT + 96, b"EFI        \x10");
    }
    seal(&mut disk);
    disk
}

/// Makes the checksums of the GPT valid.
pub fn seal(disk: &mut [u8]) {
    let entries = crc32fast::hash(&disk[ENTRIES..ENTRIES + ENTRIES_LENGTH]);
    disk[HEADER + 88..HEADER + 92].copy_from_slice(&entries.to_le_bytes());
    disk[HEADER + 16..HEADER + 20].fill(0);
    let header = crc32fast::hash(&disk[HEADER..HEADER + 92]);
    disk[HEADER + 16..HEADER + 20].copy_from_slice(&header.to_le_bytes());
}
