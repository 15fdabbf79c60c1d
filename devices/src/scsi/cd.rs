//! The commands of a CD-ROM drive besides block access (MMC-5, 6): one data track, and a tray.

use super::sense::Sense;
use super::unit::{BlockTransfer, Bus, CD_BLOCK, Cdb, MediaEvent, Plan, Unit, answer, be16, be32};

/// Blocks of the largest CD, 80 minutes. A larger medium is a DVD.
const CD_BLOCKS: u64 = 80 * 60 * 75;
/// Frames before block 0.
const LEAD_IN: u32 = 150;

/// Profile numbers (5.3.1).
const CD_ROM: u16 = 0x08;
const DVD_ROM: u16 = 0x10;

/// Track number of the lead-out.
const LEAD_OUT: u8 = 0xaa;
/// ADR and CONTROL of a data track.
const DATA: u8 = 0x14;

/// Plans a command that only CD-ROM drives have. None for any other command.
pub(crate) fn plan(unit: &mut Unit<'_>, cdb: &Cdb) -> Option<Result<Plan, Sense>> {
    Some(match cdb[0] {
        0x43 => table_of_contents(unit, cdb),
        0x46 => configuration(unit, cdb),
        0x4a => events(unit, cdb),
        0x51 => disc_information(unit, cdb),
        0x52 => track_information(unit, cdb),
        0xad => structure(unit, cdb),
        // MECHANISM STATUS: ready, no changer.
        0xbd => Ok(answer(vec![0, 0, 0, 0, 0, 1, 0, 0], be16(cdb, 8))),
        0xbe => read_cd(unit, cdb),
        // SEEK, and SET CD SPEED: the speed is always the same.
        0x2b => unit.within(be32(cdb, 2).into(), 1).map(|_| Plan::Done),
        0xbb => Ok(Plan::Done),
        _ => return None,
    })
}

fn blocks(unit: &Unit<'_>) -> Result<u32, Sense> {
    let medium = unit.medium()?;
    Ok(u32::try_from(unit.profile.blocks(medium)).unwrap_or(u32::MAX))
}

/// The current profile: 0 if the tray is empty.
fn profile(unit: &Unit<'_>) -> u16 {
    match unit.medium {
        None => 0,
        Some(medium) if unit.profile.blocks(medium) > CD_BLOCKS => DVD_ROM,
        Some(_) => CD_ROM,
    }
}

/// READ TOC/PMA/ATIP: the table of contents, or the sessions.
fn table_of_contents(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let blocks = blocks(unit)?;
    let (by_time, track, room) = (cdb[1] & 2 != 0, cdb[6], be16(cdb, 7));
    // Old drives had the format in the last byte.
    let format = if cdb[2] & 0xf == 0 { cdb[9] >> 6 } else { cdb[2] & 0xf };
    let address = |block: u32| {
        if !by_time {
            return block.to_be_bytes();
        }
        let frames = block.saturating_add(LEAD_IN);
        let part = |value: u32| u8::try_from(value).unwrap_or(u8::MAX);
        [0, part(frames / 75 / 60), part(frames / 75 % 60), part(frames % 75)]
    };
    let descriptor = |track: u8, block: u32| [&[0, DATA, track, 0][..], &address(block)].concat();
    let body = match format {
        0 if track <= 1 => [descriptor(1, 0), descriptor(LEAD_OUT, blocks)].concat(),
        0 if track == LEAD_OUT => descriptor(LEAD_OUT, blocks),
        // The first track of the last session.
        1 => descriptor(1, 0),
        _ => return Err(Sense::INVALID_FIELD),
    };
    let length = u8::try_from(body.len() + 2).expect("two tracks");
    Ok(answer([&[0, length, 1, 1][..], &body].concat(), room))
}

/// GET CONFIGURATION: all features, the current ones, or one.
fn configuration(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let (which, start, room) = (cdb[1] & 3, be16(cdb, 2), be16(cdb, 7));
    let now = profile(unit);
    let (cd, dvd) = (now == CD_ROM, now == DVD_ROM);
    let interface = match unit.profile.bus {
        Bus::Scsi => 1,
        Bus::Sata => 2,
        Bus::Usb => 8,
    };
    let core = [0, 0, 0, interface, 1, 0, 0, 0];
    // Fields: number, version, whether it is current now, and its data.
    let profiles = [0, 0x10, u8::from(dvd), 0, 0, 0x08, u8::from(cd), 0];
    let features: [(u16, u8, bool, &[u8]); 7] = [
        (0x00, 0, true, &profiles),
        // Core, with the interface.
        (0x01, 2, true, &core),
        // Morphing: operator events must be polled.
        (0x02, 1, true, &[2, 0, 0, 0]),
        // Removable medium: a tray with a lock.
        (0x03, 0, true, &[0x29, 0, 0, 0]),
        (0x10, 0, cd || dvd, &[0, 0, 8, 0, 0, 16, 0, 0]),
        (0x1e, 2, cd, &[0, 0, 0, 0]),
        (0x1f, 1, dvd, &[0, 0, 0, 0]),
    ];
    let mut data = vec![0, 0, 0, 0, 0, 0];
    data.extend(now.to_be_bytes());
    for (number, version, current, body) in features {
        let wanted = match which {
            0 => usize::from(number) >= start,
            1 => usize::from(number) >= start && current,
            2 => usize::from(number) == start,
            _ => return Err(Sense::INVALID_FIELD),
        };
        if wanted {
            let [high, low] = number.to_be_bytes();
            // Features are persistent if no disc changes them.
            let persistent = u8::from(number < 0x10) << 1;
            let length = u8::try_from(body.len()).expect("ours are short");
            data.extend([high, low, version << 2 | persistent | u8::from(current), length]);
            data.extend(body);
        }
    }
    let length = u32::try_from(data.len() - 4).expect("ours are short").to_be_bytes();
    data[..4].copy_from_slice(&length);
    Ok(answer(data, room))
}

/// GET EVENT STATUS NOTIFICATION: polled media events only.
fn events(unit: &mut Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    const MEDIA: u8 = 4;
    if cdb[1] & 1 == 0 {
        return Err(Sense::INVALID_FIELD);
    }
    let room = be16(cdb, 7);
    if cdb[4] & 1 << MEDIA == 0 {
        // None of the requested event classes is supported.
        return Ok(answer(vec![0, 2, 0x80, 1 << MEDIA], room));
    }
    let present = u8::from(unit.medium.is_some()) << 1;
    let mut news = MediaEvent::None;
    if room > 4 {
        news = std::mem::take(&mut unit.conditions.news);
    }
    Ok(answer(vec![0, 6, MEDIA, 1 << MEDIA, news as u8, present, 0, 0], room))
}

fn disc_information(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    blocks(unit)?;
    if cdb[1] & 7 != 0 {
        return Err(Sense::INVALID_FIELD);
    }
    // A finished disc with one session of one track, for unrestricted use.
    let mut data = vec![0, 32, 0x0e, 1, 1, 1, 1, 0x20];
    data.resize(34, 0);
    Ok(answer(data, be16(cdb, 7)))
}

fn track_information(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let blocks = blocks(unit)?;
    let number = be32(cdb, 2);
    // The address is a block, a track number, or a session number.
    let found = match cdb[1] & 3 {
        0 => number < blocks,
        1 | 2 => number == 1,
        _ => false,
    };
    if !found {
        return Err(Sense::INVALID_FIELD);
    }
    // Track 1 of session 1: data, mode 1.
    let mut data = vec![0, 34, 1, 1, 0, 4, 1, 0];
    data.resize(24, 0);
    data.extend(blocks.to_be_bytes());
    data.resize(36, 0);
    Ok(answer(data, be16(cdb, 7)))
}

/// READ DISC STRUCTURE of a DVD: physical format, no copy protection, no manufacturer data.
fn structure(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let blocks = blocks(unit)?;
    if profile(unit) != DVD_ROM || cdb[1] & 0xf != 0 {
        return Err(Sense::INVALID_FIELD);
    }
    let mut body = vec![0; 2048];
    match cdb[7] {
        0 if cdb[6] == 0 => {
            // A DVD-ROM of 12 cm with one read-only layer, which starts at block 0x30000.
            body[..8].copy_from_slice(&[1, 0x0f, 1, 0, 0, 3, 0, 0]);
            let last = blocks.saturating_sub(1).saturating_add(0x3_0000) & 0xff_ffff;
            body[8..12].copy_from_slice(&last.to_be_bytes());
        }
        1 => body.truncate(4),
        4 => {}
        _ => return Err(Sense::INVALID_FIELD),
    }
    let length = u16::try_from(body.len() + 2).expect("a block").to_be_bytes();
    Ok(answer([&[length[0], length[1], 0, 0][..], &body].concat(), be16(cdb, 8)))
}

/// READ CD: only the user data of blocks.
fn read_cd(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let count = be32(cdb, 5) & 0xff_ffff;
    let (offset, length) = unit.within(be32(cdb, 2).into(), count.into())?;
    debug_assert_eq!(length, u64::from(count) * u64::from(CD_BLOCK));
    let kind = cdb[1] >> 2 & 7;
    if !matches!(kind, 0 | 2) || !matches!(cdb[9], 0 | 0x10) || cdb[10] != 0 {
        return Err(Sense::INVALID_FIELD);
    }
    if length == 0 || cdb[9] == 0 {
        return Ok(Plan::Done);
    }
    Ok(Plan::Transfer(BlockTransfer { write: false, durable: false, offset, length }))
}
