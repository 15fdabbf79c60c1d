//! Plans for commands, without a transport.

use super::unit::{MAX_RANGE_BLOCKS, be32};
use super::*;
use host::disk::{Geometry, Operation};

const BLOCKS: u64 = 2048;

/// Plans a command for a new unit, after its power-on unit attention.
fn plan(geometry: &Geometry, cdb: &[u8], cdrom: bool) -> Result<Plan, Sense> {
    let profile = Profile { bus: Bus::Scsi, cdrom, removable: cdrom, serial: "a disk".into() };
    let mut conditions = Conditions::default();
    let mut unit = Unit { profile: &profile, conditions: &mut conditions, medium: Some(geometry) };
    assert_eq!(unit.plan(&[0; 16]), Err(Sense::POWER_ON));
    let mut whole = [0; 16];
    whole[..cdb.len()].copy_from_slice(cdb);
    unit.plan(&whole)
}

fn disk() -> Geometry {
    let (logical_block, physical_block) = (512, 4096);
    let size = BLOCKS * 512;
    Geometry { size, logical_block, physical_block, discard: 4096, read_only: false }
}

fn answer(cdb: &[u8]) -> Vec<u8> {
    match plan(&disk(), cdb, false) {
        Ok(Plan::Answer(data)) => data,
        other => panic!("{cdb:x?}: {other:?}"),
    }
}

/// REPORT SUPPORTED OPERATION CODES.
fn report(options: u8, code: u8, action: u8) -> [u8; 12] {
    [0xa3, 0x0c, options, code, 0, action, 0, 0, 2, 0, 0, 0]
}

#[test]
fn the_reported_commands_are_the_supported_ones() {
    let all = answer(&report(0, 0, 0));
    assert_eq!(be32(&all, 0) as usize, all.len() - 4);
    let (listed, rest) = all[4..].as_chunks::<8>();
    assert!(rest.is_empty());
    for code in 0..=255 {
        let found = listed.iter().find(|it| it[0] == code);
        let action = found.map_or(0, |it| it[3]);
        let mut cdb = [0; 16];
        (cdb[0], cdb[1]) = (code, action);
        let known = plan(&disk(), &cdb, false) != Err(Sense::INVALID_COMMAND);
        assert_eq!(known, found.is_some(), "{code:#x}");
        let one = answer(&report(3, code, action));
        assert_eq!(one[1], if known { 3 } else { 1 }, "{code:#x}");
        let Some(listed) = found else { continue };
        assert_eq!((one[3], one[4], one.len()), (listed[7], code, 4 + usize::from(listed[7])));
        let length = match code >> 5 {
            0 => 6,
            1 | 2 => 10,
            4 => 16,
            _ => 12,
        };
        assert_eq!(listed[7], length, "{code:#x}");
    }
}

#[test]
fn a_disk_that_is_stopped_is_flushed() {
    let order = |byte: u8, cdrom| plan(&disk(), &[0x1b, 0, 0, 0, byte, 0], cdrom);
    // STOP, and a power condition (STANDBY); with NO_FLUSH; START; a CD.
    for (byte, cdrom, flushes) in [
        (0, false, true),
        (0x30, false, true),
        (4, false, false),
        (1, false, false),
        (0, true, false),
    ] {
        let wanted = if flushes { Plan::Flush } else { Plan::Done };
        assert_eq!(order(byte, cdrom), Ok(wanted), "{byte:#x}");
    }
}

#[test]
fn commands_are_reported_with_and_without_service_action() {
    assert_eq!(answer(&report(1, 0x28, 0))[1], 3);
    assert_eq!(answer(&report(2, 0x9e, 0x10))[1], 3);
    assert_eq!(answer(&report(2, 0x9e, 0x12))[1], 1);
    assert_eq!(answer(&report(3, 0x28, 1))[1], 1);
    for wrong in [report(1, 0x9e, 0x10), report(2, 0x28, 0), report(4, 0, 0)] {
        assert_eq!(plan(&disk(), &wrong, false), Err(Sense::INVALID_FIELD), "{wrong:x?}");
    }
    assert_eq!(plan(&disk(), &report(0, 0, 0), true), Err(Sense::INVALID_COMMAND), "a CD");
    // A disk that does not discard does not support UNMAP.
    let plain = Geometry { discard: 0, ..disk() };
    assert_eq!(plan(&plain, &report(3, 0x42, 0), false), Ok(Plan::Answer(vec![0, 1, 0, 0])));
}

#[test]
fn an_ssd_reports_its_discard_support() {
    assert_eq!(answer(&[0x12, 1, 0xb1, 0, 255, 0])[4..6], [0, 1], "non-rotating");
    assert_eq!(answer(&[0x12, 1, 0xb2, 0, 255, 0]), [0, 0xb2, 0, 4, 0, 0xe0, 2, 0]);
    let limits = answer(&[0x12, 1, 0xb0, 0, 255, 0]);
    assert_eq!((limits.len(), limits[4]), (64, 1));
    let words = [20, 24, 28, 36, 40].map(|at| be32(&limits, at));
    assert_eq!(words, [MAX_RANGE_BLOCKS, 256, 8, 0, MAX_RANGE_BLOCKS]);
    let plain = Geometry { discard: 0, ..disk() };
    let page = plan(&plain, &[0x12, 1, 0xb2, 0, 255, 0], false);
    assert_eq!(page, Ok(Plan::Answer(vec![0, 0xb2, 0, 4, 0, 0, 0, 0])));
}

#[test]
fn write_same_supports_only_zeros() {
    let short = [0x41, 0, 0, 0, 0, 9, 0, 0, 4, 0];
    assert_eq!(plan(&disk(), &short, false), Ok(Plan::Parameters(512)));
    let mut long = [0; 16];
    (long[0], long[1], long[9], long[13]) = (0x93, 9, 9, 4);
    let zeros = |unmap| Plan::Clear(Operation::WriteZeroes { unmap }, vec![(9 * 512, 4 * 512)]);
    assert_eq!(plan(&disk(), &long, false), Ok(zeros(true)));
    let profile = Profile { bus: Bus::Usb, cdrom: false, removable: false, serial: "x".into() };
    let (mut conditions, disk) = (Conditions::default(), disk());
    let mut unit = Unit { profile: &profile, conditions: &mut conditions, medium: Some(&disk) };
    let mut cdb = [0; 16];
    cdb[..10].copy_from_slice(&short);
    assert_eq!(unit.parameters(&cdb, &[0; 512]), Ok(zeros(false)));
    assert_eq!(unit.parameters(&cdb, &[1; 512]), Err(Sense::INVALID_PARAMETER));
    for (flags, expected) in [(1, Sense::INVALID_FIELD), (0x10, Sense::INVALID_FIELD)] {
        let mut cdb = short;
        cdb[1] = flags;
        assert_eq!(plan(&disk, &cdb, false), Err(expected), "{flags:#x}");
    }
    let plain = Geometry { discard: 0, ..disk.clone() };
    assert_eq!(plan(&plain, &long, false), Err(Sense::INVALID_FIELD), "nothing is unmapped");
    let fixed = Geometry { read_only: true, discard: 0, ..disk.clone() };
    assert_eq!(plan(&fixed, &short, false), Err(Sense::WRITE_PROTECTED));
    assert_eq!(plan(&disk, &short, true), Err(Sense::INVALID_COMMAND), "a CD");
}

/// Pads a command to 16 bytes.
fn cdb(bytes: &[u8]) -> Cdb {
    let mut whole = [0; 16];
    whole[..bytes.len()].copy_from_slice(bytes);
    whole
}

/// MODE SELECT (6) of the caching page with this first byte.
fn caching(cache: u8) -> Vec<u8> {
    [&[0, 0, 0, 0, 8, 18, cache][..], &[0; 17]].concat()
}

#[test]
fn mode_select_switches_the_write_cache() {
    let profile = Profile { bus: Bus::Scsi, cdrom: false, removable: false, serial: "x".into() };
    let (mut conditions, disk) = (Conditions::default(), disk());
    let mut unit = Unit { profile: &profile, conditions: &mut conditions, medium: Some(&disk) };
    assert_eq!(unit.plan(&[0; 16]), Err(Sense::POWER_ON));
    let cache = |unit: &mut Unit<'_>, control: u8| match unit.plan(&cdb(&[
        0x1a,
        8,
        control << 6 | 8,
        0,
        255,
        0,
    ])) {
        Ok(Plan::Answer(data)) => data[4 + 2],
        other => panic!("{other:?}"),
    };
    let write = cdb(&[0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0]);
    let durable = |unit: &mut Unit<'_>, cdb: &Cdb| match unit.plan(cdb) {
        Ok(Plan::Transfer(it)) => it.durable,
        other => panic!("{other:?}"),
    };
    assert_eq!((cache(&mut unit, 0), cache(&mut unit, 1), cache(&mut unit, 2)), (4, 4, 4));
    assert!(!durable(&mut unit, &write));

    let select = cdb(&[0x15, 0x10, 0, 0, 24, 0]);
    assert_eq!(unit.plan(&select), Ok(Plan::Parameters(24)));
    assert_eq!(unit.parameters(&select, &caching(0)), Ok(Plan::Flush), "the cached writes");
    assert_eq!((cache(&mut unit, 0), cache(&mut unit, 1)), (0, 4));
    assert!(durable(&mut unit, &write));
    assert!(durable(&mut unit, &cdb(&[0x0a, 0, 0, 9, 1, 0])), "a command without FUA too");
    let read = cdb(&[0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0]);
    assert!(!durable(&mut unit, &read), "a read is never durable");
    let zeros = cdb(&[0x41, 0, 0, 0, 0, 9, 0, 0, 4, 0]);
    assert_eq!(unit.plan(&zeros), Err(Sense::INVALID_COMMAND), "it could not be durable");
    unit.conditions.reset();
    assert_eq!(unit.plan(&[0; 16]), Err(Sense::POWER_ON));
    assert!(durable(&mut unit, &write), "a unit reset keeps the setting");

    // The longer form, with a block descriptor.
    let long = cdb(&[0x55, 0x10, 0, 0, 0, 0, 0, 0, 36, 0]);
    assert_eq!(unit.plan(&long), Ok(Plan::Parameters(36)));
    let list = [&[0, 0, 0, 0, 0, 0, 0, 8][..], &[0; 8], &caching(4)[4..]].concat();
    assert_eq!(unit.parameters(&long, &list), Ok(Plan::Done));
    assert!(!durable(&mut unit, &write));
}

#[test]
fn an_invalid_mode_page_changes_nothing() {
    let profile = Profile { bus: Bus::Scsi, cdrom: false, removable: false, serial: "x".into() };
    let (mut conditions, disk) = (Conditions::default(), disk());
    let mut unit = Unit { profile: &profile, conditions: &mut conditions, medium: Some(&disk) };
    let select = cdb(&[0x15, 0x10, 0, 0, 24, 0]);
    let mut other = caching(0);
    other[20] = 1;
    let control = [&[10, 10, 0, 0][..], &[0; 8]].concat();
    let lists = [
        vec![],
        vec![0, 0, 0, 7],
        caching(1),
        caching(0)[..23].to_vec(),
        other,
        [caching(0), control].concat(),
        [&[0, 0, 0, 0, 0x3f, 18][..], &[0; 18]].concat(),
    ];
    for list in lists {
        let answer = unit.parameters(&select, &list);
        assert_eq!(answer, Err(Sense::INVALID_PARAMETER), "{list:x?}");
        assert!(!unit.conditions.write_through, "{list:x?}");
    }
    for flags in [0, 0x11] {
        let select = cdb(&[0x15, flags, 0, 0, 24, 0]);
        unit.plan(&[0; 16]).ok();
        assert_eq!(unit.plan(&select), Err(Sense::INVALID_FIELD), "{flags:#x}");
    }
}
