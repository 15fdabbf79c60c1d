//! MODE SENSE and MODE SELECT (SPC-4, 6.9, 6.11, 7.5; SBC-3, 6.4; MMC-5, 7). A guest can change
//! only one mode: a disk's write cache (WCE of the caching page).
//!
//! Threats: a parameter list has at most 64 KiB, and only that one bit of it is stored.

use super::sense::Sense;
use super::unit::{Cdb, Plan, Unit, answer};

/// Mode pages.
const RECOVERY: u8 = 0x01;
const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const CAPABILITIES: u8 = 0x2a;
const ALL: u8 = 0x3f;

/// Bits in the header for a disk: write-protected, FUA supported.
const WRITE_PROTECTED: u8 = 0x80;
const DPOFUA: u8 = 0x10;

/// Caching page: writes are durable only after a flush.
const WCE: u8 = 4;

/// Speed of a 50x CD-ROM drive, in kilobytes per second.
const SPEED: [u8; 2] = [0x22, 0x60];

pub(crate) fn plan(unit: &Unit<'_>, cdb: &Cdb, room: usize, long: bool) -> Result<Plan, Sense> {
    let (control, page) = (cdb[2] >> 6, cdb[2] & 0x3f);
    if control == 3 {
        return Err(Sense::NOT_SAVED);
    }
    let known: &[u8] =
        if unit.profile.cdrom { &[RECOVERY, CAPABILITIES] } else { &[RECOVERY, CACHING, CONTROL] };
    if page != ALL && !known.contains(&page) || !matches!(cdb[3], 0 | 0xff) {
        return Err(Sense::INVALID_FIELD);
    }
    let mut pages = Vec::new();
    for it in known.iter().filter(|it| page == ALL || **it == page) {
        let body = if control == 1 { changeable(unit, *it) } else { body(unit, *it) };
        pages.extend([*it, u8::try_from(body.len()).expect("ours are short")]);
        pages.extend(body);
    }
    let blocks = if cdb[1] & 8 == 0 { descriptor(unit) } else { Vec::new() };
    let length = pages.len() + blocks.len();
    let state = state(unit);
    let count = u8::try_from(blocks.len()).expect("one descriptor");
    let head = if long {
        let [high, low] = u16::try_from(length + 6).expect("ours are short").to_be_bytes();
        vec![high, low, 0, state, 0, 0, 0, count]
    } else {
        vec![u8::try_from(length + 3).expect("ours are short"), 0, state, count]
    };
    Ok(answer([head, blocks, pages].concat(), room))
}

/// Mask of the bits in a page's body that a guest can change.
fn changeable(unit: &Unit<'_>, page: u8) -> Vec<u8> {
    let mut mask = vec![0; body(unit, page).len()];
    if page == CACHING {
        mask[0] = WCE;
    }
    mask
}

/// MODE SELECT: plans to receive the parameter list.
pub(crate) fn select(cdb: &Cdb, length: usize) -> Result<Plan, Sense> {
    let (format, save) = (cdb[1] & 0x10 != 0, cdb[1] & 1 != 0);
    // Only pages in standard format, without saving them beyond power-off.
    if !format || save {
        return Err(Sense::INVALID_FIELD);
    }
    Ok(if length == 0 { Plan::Done } else { Plan::Parameters(length) })
}

/// Applies the parameter list of MODE SELECT, completely or not at all.
pub(crate) fn apply(unit: &mut Unit<'_>, long: bool, data: &[u8]) -> Result<Plan, Sense> {
    let (head, blocks) = if long { (8, 6..8) } else { (4, 3..4) };
    let blocks = data.get(blocks).ok_or(Sense::INVALID_PARAMETER)?;
    let blocks = blocks.iter().fold(0, |sum, byte| sum << 8 | usize::from(*byte));
    if !matches!(blocks, 0 | 8) {
        return Err(Sense::INVALID_PARAMETER);
    }
    let mut rest = data.get(head + blocks..).ok_or(Sense::INVALID_PARAMETER)?;
    let mut write_through = unit.conditions.write_through;
    while let Some((page, body)) = next_page(unit, &mut rest)? {
        if page == CACHING {
            write_through = body[0] & WCE == 0;
        }
    }
    let cache_ends = write_through && !unit.conditions.write_through;
    unit.conditions.write_through = write_through;
    // The cache is flushed before it is disabled (SBC-3, 6.4.5).
    Ok(if cache_ends { Plan::Flush } else { Plan::Done })
}

/// Removes the next page from a parameter list. Bits that cannot change must have their current
/// value.
fn next_page<'a>(unit: &Unit<'_>, rest: &mut &'a [u8]) -> Result<Option<(u8, &'a [u8])>, Sense> {
    let [page, length, ..] = **rest else {
        return if rest.is_empty() { Ok(None) } else { Err(Sense::INVALID_PARAMETER) };
    };
    if ![RECOVERY, CACHING, CONTROL].contains(&page) {
        return Err(Sense::INVALID_PARAMETER);
    }
    let now = body(unit, page);
    let end = 2 + usize::from(length);
    let new = rest.get(2..end).filter(|new| new.len() == now.len());
    let new = new.ok_or(Sense::INVALID_PARAMETER)?;
    let mask = changeable(unit, page);
    let same = new.iter().zip(&now).zip(mask).all(|((new, now), mask)| (new ^ now) & !mask == 0);
    *rest = &rest[end..];
    same.then_some(Some((page, new))).ok_or(Sense::INVALID_PARAMETER)
}

/// DEVICE-SPECIFIC PARAMETER. It is 0 for CDs.
fn state(unit: &Unit<'_>) -> u8 {
    match unit.medium {
        _ if unit.profile.cdrom => 0,
        Some(medium) if medium.read_only => WRITE_PROTECTED | DPOFUA,
        _ => DPOFUA,
    }
}

/// Block descriptor: number and size of blocks. CDs have none.
fn descriptor(unit: &Unit<'_>) -> Vec<u8> {
    let Some(medium) = unit.medium.filter(|_| !unit.profile.cdrom) else { return Vec::new() };
    let count = u32::try_from(unit.profile.blocks(medium)).unwrap_or(u32::MAX);
    [count.to_be_bytes(), medium.logical_block.to_be_bytes()].concat()
}

fn body(unit: &Unit<'_>, page: u8) -> Vec<u8> {
    match page {
        RECOVERY if unit.profile.cdrom => vec![0; 6],
        RECOVERY => vec![0; 10],
        CACHING => {
            let cache = if unit.conditions.write_through { 0 } else { WCE };
            [&[cache][..], &[0; 17]].concat()
        }
        // Unrestricted reordering: commands in flight together finish in any order.
        CONTROL => [&[0, 0x10][..], &[0; 8]].concat(),
        // Reads CDs, CD-Rs, DVDs, multisession discs. Tray with a lock. Bit 1 is its state.
        _ => {
            let lock = u8::from(unit.conditions.prevented) << 1;
            let [high, low] = SPEED;
            let mut body = vec![0x3b, 0, 0x70, 0, 0x29 | lock, 0, high, low];
            // Two volumes, no buffer, the speed again.
            body.extend([0, 2, 0, 0, high, low]);
            body.resize(20, 0);
            body
        }
    }
}
