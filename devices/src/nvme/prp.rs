//! Physical region pages: the guest memory of a command's data (NVMe 1.4, 4.3).
//!
//! Threats: pages, lists and chains of lists come from the guest. A transfer is limited by `MDTS`,
//! so the number of list entries is limited. Every list but the first starts at a page and
//! therefore describes data, so a chain that leads back to itself ends with the transfer.

use super::command::{Prp, Status};
use host::memory::{Memory, Piece};

/// The largest transfer has `1 << MDTS` pages of 4 KiB: 1 MiB.
pub(super) const MDTS: u8 = 8;
pub(super) const MAX_TRANSFER: u32 = 4096 << MDTS;

/// Number of list entries that are copied at once.
const MAX_CHUNK: usize = 64;

/// Appends the guest memory of a transfer to `pieces`. `page` is the controller's page size.
pub(super) fn pieces(
    memory: &Memory,
    page: u32,
    prp: Prp,
    length: u32,
    pieces: &mut Vec<Piece>,
) -> Result<(), Status> {
    let Prp { first, second } = prp;
    if length > MAX_TRANSFER {
        return Err(Status::INVALID_FIELD);
    }
    if first & 3 != 0 {
        return Err(Status::PRP_OFFSET);
    }
    let offset = u32::try_from(first & u64::from(page - 1)).expect("a page is 32 bits");
    let taken = length.min(page - offset);
    push(pieces, first, taken);
    let left = length - taken;
    if left == 0 {
        return Ok(());
    }
    if left <= page {
        check_aligned(second, page)?;
        push(pieces, second, left);
        return Ok(());
    }
    list(memory, page, second, left, pieces)
}

/// Follows the lists from `at` on, for `left` bytes. Only the last page may be incomplete.
fn list(
    memory: &Memory,
    page: u32,
    mut at: u64,
    mut left: u32,
    pieces: &mut Vec<Piece>,
) -> Result<(), Status> {
    if at & 7 != 0 {
        return Err(Status::PRP_OFFSET);
    }
    let mut bytes = [0; 8 * MAX_CHUNK];
    while left > 0 {
        let here = u64::from(page) - (at & u64::from(page - 1));
        let slots = usize::try_from(here / 8).unwrap_or(MAX_CHUNK);
        let needed = usize::try_from(left.div_ceil(page)).unwrap_or(MAX_CHUNK);
        let count = slots.min(needed).min(MAX_CHUNK);
        let read = &mut bytes[..8 * count];
        memory.read(at, read).map_err(|_| Status::DATA_TRANSFER)?;
        let (entries, _) = read.as_chunks::<8>();
        // The last slot of a page points to the next list if more than one entry is left.
        let chained = count == slots && needed > slots;
        at += 8 * count as u64;
        for (slot, entry) in entries.iter().enumerate() {
            let entry = u64::from_le_bytes(*entry);
            check_aligned(entry, page)?;
            if chained && slot == count - 1 {
                at = entry;
                break;
            }
            let taken = left.min(page);
            push(pieces, entry, taken);
            left -= taken;
        }
    }
    Ok(())
}

/// Checks that an entry is page aligned: only the first entry of a transfer may have an offset.
fn check_aligned(entry: u64, page: u32) -> Result<(), Status> {
    if entry & u64::from(page - 1) == 0 { Ok(()) } else { Err(Status::PRP_OFFSET) }
}

/// Adjacent pages become one piece.
fn push(pieces: &mut Vec<Piece>, address: u64, length: u32) {
    if let Some(last) = pieces.last_mut()
        && last.address.checked_add(u64::from(last.length)) == Some(address)
    {
        last.length += length;
    } else if length > 0 {
        pieces.push(Piece { address, length });
    }
}

/// For commands that the controller answers itself.
pub(super) fn copy_out(memory: &Memory, page: u32, prp: Prp, data: &[u8]) -> Result<(), Status> {
    each(memory, page, prp, data.len(), |piece, range| memory.write(piece, &data[range]))
}

pub(super) fn copy_in(memory: &Memory, page: u32, prp: Prp, data: &mut [u8]) -> Result<(), Status> {
    each(memory, page, prp, data.len(), |piece, range| memory.read(piece, &mut data[range]))
}

fn each(
    memory: &Memory,
    page: u32,
    prp: Prp,
    length: usize,
    mut copy: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), host::memory::NoMemory>,
) -> Result<(), Status> {
    let length = u32::try_from(length).map_err(|_| Status::INVALID_FIELD)?;
    let mut found = Vec::new();
    pieces(memory, page, prp, length, &mut found)?;
    let mut at = 0;
    for piece in found {
        let end = at + piece.length as usize;
        copy(piece.address, at..end).map_err(|_| Status::DATA_TRANSFER)?;
        at = end;
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use host::ram::GuestMemoryMmap;
    use vm_memory::GuestAddress;

    use super::*;

    fn memory() -> Memory {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap();
        Memory::new(Arc::new(ram))
    }

    fn write(memory: &Memory, at: u64, entries: &[u64]) {
        let bytes: Vec<u8> = entries.iter().flat_map(|entry| entry.to_le_bytes()).collect();
        memory.write(at, &bytes).unwrap();
    }

    fn walk(
        memory: &Memory,
        (first, second): (u64, u64),
        length: u32,
    ) -> Result<Vec<(u64, u32)>, Status> {
        let (prp, mut found) = (Prp { first, second }, Vec::new());
        pieces(memory, 4096, prp, length, &mut found)?;
        assert_eq!(found.iter().map(|it| it.length).sum::<u32>(), length);
        Ok(found.iter().map(|it| (it.address, it.length)).collect())
    }

    #[test]
    fn direct_pointers_cover_two_pages() {
        let memory = memory();
        assert_eq!(walk(&memory, (0x1000, 7), 512), Ok(vec![(0x1000, 512)]));
        assert_eq!(walk(&memory, (0x1ffc, 0x8000), 12), Ok(vec![(0x1ffc, 4), (0x8000, 8)]));
        assert_eq!(walk(&memory, (0x1800, 0x2000), 0x1000), Ok(vec![(0x1800, 0x1000)]));
        assert_eq!(
            walk(&memory, (0x1000, 0x3000), 0x2000),
            Ok(vec![(0x1000, 4096), (0x3000, 4096)])
        );
    }

    #[test]
    fn a_list_starts_at_any_offset_and_its_last_entry_chains() {
        let memory = memory();
        write(&memory, 0x2ff0, &[0x10_0000, 0x4000]);
        write(&memory, 0x4000, &[0x20_0000, 0x30_0000]);
        let expected = vec![(0x800, 0x800), (0x10_0000, 4096), (0x20_0000, 4096), (0x30_0000, 8)];
        assert_eq!(walk(&memory, (0x800, 0x2ff0), 0x800 + 8192 + 8), Ok(expected));
        // Two entries and two slots are left, so the last slot holds data.
        write(&memory, 0x2ff0, &[0x10_0000, 0x40_0000]);
        let expected = vec![(0x800, 0x800), (0x10_0000, 4096), (0x40_0000, 4096)];
        assert_eq!(walk(&memory, (0x800, 0x2ff0), 0x800 + 8192), Ok(expected));
    }

    #[test]
    fn a_list_may_begin_in_the_last_slot_of_a_page() {
        let memory = memory();
        write(&memory, 0x2ff8, &[0x5000]);
        write(&memory, 0x5000, &[0x10_0000, 0x20_0000]);
        let expected = vec![(0, 4096), (0x10_0000, 4096), (0x20_0000, 4096)];
        assert_eq!(walk(&memory, (0, 0x2ff8), 0x3000), Ok(expected));
    }

    #[test]
    fn the_largest_transfer_has_256_list_entries() {
        let memory = memory();
        let entries: Vec<u64> = (0..256).map(|n| 0x100_0000 + n * 0x2000).collect();
        write(&memory, 0x1000, &entries);
        assert_eq!(walk(&memory, (0x800, 0x1000), MAX_TRANSFER).unwrap().len(), 257);
        assert_eq!(walk(&memory, (0, 0x1000), MAX_TRANSFER + 512), Err(Status::INVALID_FIELD));
    }

    #[test]
    fn a_looping_chain_ends_with_the_transfer() {
        let memory = memory();
        write(&memory, 0x1ff8, &[0x2000]);
        write(&memory, 0x2000, &[0x2000; 512]);
        assert_eq!(walk(&memory, (0, 0x1ff8), MAX_TRANSFER).unwrap().len(), 256);
        // A list in the last slot of a page that points to itself is not aligned.
        write(&memory, 0x1ff8, &[0x1ff8]);
        assert_eq!(walk(&memory, (0, 0x1ff8), MAX_TRANSFER), Err(Status::PRP_OFFSET));
    }

    #[test]
    fn wrong_offsets_and_memory_outside_of_ram_are_refused() {
        let memory = memory();
        write(&memory, 0x3000, &[0x1004, 0x5000]);
        for prp in [(2, 0), (0, 0x1004), (0, 0x800)] {
            assert_eq!(walk(&memory, prp, 8192), Err(Status::PRP_OFFSET), "{prp:x?}");
        }
        assert_eq!(walk(&memory, (0, 0x3004), 0x3000), Err(Status::PRP_OFFSET));
        assert_eq!(walk(&memory, (0, 0x3000), 0x3000), Err(Status::PRP_OFFSET), "in a list");
        assert_eq!(walk(&memory, (0, 0x10_0000), 0x3000), Err(Status::DATA_TRANSFER));
        assert_eq!(walk(&memory, (0, u64::MAX - 7), 0x3000), Err(Status::DATA_TRANSFER));
    }
}
