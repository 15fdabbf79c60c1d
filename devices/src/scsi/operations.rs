//! REPORT SUPPORTED OPERATION CODES (SPC-4, 6.35): the commands that a disk supports, and the bits
//! of them that it evaluates.

use super::sense::Sense;
use super::unit::{Cdb, Plan, Unit, answer, be16, be32};

/// Operation code, service action if any, and the usage bits of the other bytes.
type Command = (u8, Option<u8>, &'static [u8]);

const UNMAP: u8 = 0x42;

/// Commands of a disk.
const COMMANDS: &[Command] = &[
    (0x00, None, &[0, 0, 0, 0, 0]),
    (0x03, None, &[1, 0, 0, 0xff, 0]),
    (0x08, None, &[0x1f, 0xff, 0xff, 0xff, 0]),
    (0x0a, None, &[0x1f, 0xff, 0xff, 0xff, 0]),
    (0x12, None, &[1, 0xff, 0xff, 0xff, 0]),
    (0x15, None, &[0x11, 0, 0, 0xff, 0]),
    (0x1a, None, &[8, 0xff, 0xff, 0xff, 0]),
    (0x1b, None, &[0, 0, 0, 0xf7, 0]),
    (0x1e, None, &[0, 0, 0, 1, 0]),
    (0x23, None, &[0, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    (0x25, None, &[0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (0x28, None, &[0xe8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]),
    (0x2a, None, &[0xe8, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]),
    (0x2f, None, &[6, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]),
    (0x35, None, &[0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (0x41, None, &[0xff, 0xff, 0xff, 0xff, 0xff, 0, 0xff, 0xff, 0]),
    (UNMAP, None, &[1, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    (0x55, None, &[0x11, 0, 0, 0, 0, 0, 0xff, 0xff, 0]),
    (0x5a, None, &[8, 0xff, 0xff, 0, 0, 0, 0xff, 0xff, 0]),
    (0x88, None, &[0xe8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0x8a, None, &[0xe8, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0x8f, None, &[6, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0x91, None, &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    (0x93, None, &[0xff, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0x9e, Some(0x10), &[0x1f, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0]),
    (0xa0, None, &[0, 0, 0, 0, 0, 255, 255, 255, 255, 0, 0]),
    (0xa3, Some(0x0c), &[0x1f, 7, 0xff, 0xff, 0xff, 255, 255, 255, 255, 0, 0]),
    (0xa8, None, &[0xe8, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0xaa, None, &[0xe8, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
    (0xaf, None, &[6, 255, 255, 255, 255, 255, 255, 255, 255, 0, 0]),
];

pub(crate) fn plan(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let room = usize::try_from(be32(cdb, 6)).unwrap_or(usize::MAX);
    let (code, action) = (cdb[3], be16(cdb, 4));
    let known = |it: &&Command| it.0 != UNMAP || unit.discards();
    let found = COMMANDS.iter().filter(known).find(|it| it.0 == code);
    let own = found.and_then(|it| it.1);
    let same = usize::from(own.unwrap_or(0)) == action;
    Ok(match (cdb[2] & 7, found) {
        (0, _) => answer(all(COMMANDS.iter().filter(known)), room),
        // The service action is missing, or the command has none.
        (1, Some(_)) if own.is_some() => return Err(Sense::INVALID_FIELD),
        (2, Some(_)) if own.is_none() => return Err(Sense::INVALID_FIELD),
        (1, Some(it)) => answer(one(it), room),
        (2 | 3, Some(it)) if same => answer(one(it), room),
        // Not supported.
        (1..=3, _) => answer(vec![0, 1, 0, 0], room),
        _ => return Err(Sense::INVALID_FIELD),
    })
}

fn one((code, _, bits): &Command) -> Vec<u8> {
    let length = u8::try_from(bits.len() + 1).expect("16 bytes at most");
    [&[0, 3, 0, length, *code][..], bits].concat()
}

fn all<'a>(commands: impl Iterator<Item = &'a Command>) -> Vec<u8> {
    let mut data = vec![0; 4];
    for (code, action, bits) in commands {
        let length = u8::try_from(bits.len() + 1).expect("16 bytes at most");
        let (number, has) = (action.unwrap_or(0), u8::from(action.is_some()));
        data.extend([*code, 0, 0, number, 0, has, 0, length]);
    }
    let length = u32::try_from(data.len() - 4).expect("a few commands").to_be_bytes();
    data[..4].copy_from_slice(&length);
    data
}
