//! MODE SENSE (SPC-4, 6.11, 7.5; SBC-3, 6.4; MMC-5, 7): what can be read of modes. None can be
//! changed.

use super::sense::Sense;
use super::unit::{Cdb, Plan, Unit, answer};

/// Pages.
const RECOVERY: u8 = 0x01;
const CACHING: u8 = 0x08;
const CONTROL: u8 = 0x0a;
const CAPABILITIES: u8 = 0x2a;
const ALL: u8 = 0x3f;

/// Of a disk's header: it cannot be written; it knows FUA.
const WRITE_PROTECTED: u8 = 0x80;
const DPOFUA: u8 = 0x10;

/// Kilobytes per second that a CD of 50 times the first one's speed gives.
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
        let mut body = body(unit, *it);
        if control == 1 {
            // What can be changed: nothing.
            body.fill(0);
        }
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

/// DEVICE-SPECIFIC PARAMETER, which a CD has none of.
fn state(unit: &Unit<'_>) -> u8 {
    match unit.medium {
        _ if unit.profile.cdrom => 0,
        Some(medium) if medium.read_only => WRITE_PROTECTED | DPOFUA,
        _ => DPOFUA,
    }
}

/// How many blocks there are, and how long they are; a CD tells that elsewhere.
fn descriptor(unit: &Unit<'_>) -> Vec<u8> {
    let Some(medium) = unit.medium.filter(|_| !unit.profile.cdrom) else { return Vec::new() };
    let count = u32::try_from(unit.profile.blocks(medium)).unwrap_or(u32::MAX);
    [count.to_be_bytes(), medium.logical_block.to_be_bytes()].concat()
}

fn body(unit: &Unit<'_>, page: u8) -> Vec<u8> {
    match page {
        RECOVERY if unit.profile.cdrom => vec![0; 6],
        RECOVERY => vec![0; 10],
        // WCE: what is written lasts when it is flushed.
        CACHING => [&[4][..], &[0; 17]].concat(),
        // What is under way together is done in any order.
        CONTROL => [&[0, 0x10][..], &[0; 8]].concat(),
        // What is read: CDs, CD-Rs, DVDs in several sessions; a tray with a lock, which holds now.
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
