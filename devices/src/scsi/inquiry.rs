//! INQUIRY and the vital product data pages (SPC-4, 6.6, 7.8; SBC-3, 6.5).

use super::sense::Sense;
use super::unit::{Bus, Cdb, MAX_RANGE_BLOCKS, MAX_RANGES, Plan, Unit, answer, be16};
use host::fnv;

const VENDOR: &[u8; 8] = b"TRANSOM ";
const REVISION: &str = "1.00";
/// CMDQUE in byte 7 of the standard data: the unit supports command queuing.
const CMDQUE: u8 = 2;

pub(crate) fn plan(unit: &Unit<'_>, cdb: &Cdb) -> Result<Plan, Sense> {
    let room = be16(cdb, 3);
    if cdb[1] & 1 == 0 {
        return if cdb[2] == 0 {
            Ok(answer(standard(unit), room))
        } else {
            Err(Sense::INVALID_FIELD)
        };
    }
    let disk = !unit.profile.cdrom;
    let body = match cdb[2] {
        0x00 if disk => vec![0x00, 0x80, 0x83, 0xb0, 0xb1, 0xb2],
        0x00 => vec![0x00, 0x80, 0x83],
        0x80 => unit.profile.serial.clone().into_bytes(),
        0x83 => designators(&unit.profile.serial),
        0xb0 if disk => limits(unit),
        // Non-rotating medium.
        0xb1 if disk => [&[0, 1][..], &[0; 58]].concat(),
        // LBPU, LBPWS and LBPWS10; thin provisioning: unmapped blocks are allocated when written.
        0xb2 if disk && unit.discards() => vec![0, 0xe0, 2, 0],
        0xb2 if disk => vec![0; 4],
        _ => return Err(Sense::INVALID_FIELD),
    };
    let length = u16::try_from(body.len()).expect("ours are short").to_be_bytes();
    Ok(answer([&[kind(unit), cdb[2], length[0], length[1]][..], &body].concat(), room))
}

/// PERIPHERAL DEVICE TYPE.
fn kind(unit: &Unit<'_>) -> u8 {
    if unit.profile.cdrom { 5 } else { 0 }
}

fn standard(unit: &Unit<'_>) -> Vec<u8> {
    let removable = u8::from(unit.profile.removable) << 7;
    let (bus, queues) = match unit.profile.bus {
        Bus::Usb => ("USB", 0),
        Bus::Sata => ("SATA", 0),
        Bus::Scsi => ("SCSI", CMDQUE),
    };
    // SPC-4, response data format 2, 31 more bytes.
    let head = [kind(unit), removable, 6, 2, 31, 0, 0, queues];
    let name = if unit.profile.cdrom { "CD-ROM" } else { "disk" };
    let product = format!("{:16}{REVISION}", format!("{bus} {name}"));
    [&head[..], VENDOR, product.as_bytes()].concat()
}

/// Device identification: vendor and serial number (T10), and a number computed from the serial
/// number (NAA 3, locally assigned).
fn designators(serial: &str) -> Vec<u8> {
    let name = [VENDOR, serial.as_bytes()].concat();
    let number = fnv::hash(serial.as_bytes(), 0) & !(0xf << 60) | 3 << 60;
    let length = u8::try_from(name.len()).expect("28 characters at most");
    let mut data = vec![2, 1, 0, length];
    data.extend(name);
    data.extend([1, 3, 0, 8]);
    data.extend(number.to_be_bytes());
    data
}

/// Block limits: 60 bytes, with the fields for UNMAP and WRITE SAME set.
fn limits(unit: &Unit<'_>) -> Vec<u8> {
    let mut data = vec![0; 60];
    // WSNZ: a WRITE SAME of 0 blocks is refused.
    data[0] = 1;
    data[32..40].copy_from_slice(&u64::from(MAX_RANGE_BLOCKS).to_be_bytes());
    if let (true, Some(medium)) = (unit.discards(), unit.medium) {
        let ranges = u32::try_from(MAX_RANGES).expect("a few hundred");
        let grain = (medium.discard / medium.logical_block.max(1)).max(1);
        for (at, value) in [(16, MAX_RANGE_BLOCKS), (20, ranges), (24, grain), (28, 1 << 31)] {
            data[at..at + 4].copy_from_slice(&value.to_be_bytes());
        }
    }
    data
}
