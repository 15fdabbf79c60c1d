//! Logs (ACS-2, Annex A) and SMART (7.52).

use super::drive::{Failure, QueuedError, State};
use super::fis::Command;
use crate::scsi::Plan;

const PAGE: usize = 512;
/// Log addresses: directory, failed queued command.
const DIRECTORY: u8 = 0x00;
const QUEUED_ERROR: u8 = 0x10;

/// SMART: LBA bits 23:8 of every subcommand.
const KEY: u64 = 0xc24f;
/// SMART attribute: reported uncorrectable errors.
const UNCORRECTABLE: u8 = 187;
/// Offset of the SMART capabilities, and the capability to save attributes.
const CAPABILITY: usize = 368;
const SAVES: u8 = 1;

/// The page of a failed queued command.
fn queued_error(failed: &QueuedError) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    let [l0, l1, l2, l3, l4, l5, ..] = failed.lba.to_le_bytes();
    let [c0, c1] = failed.count.to_le_bytes();
    // NQ: the failed command was not queued.
    let tag = failed.tag.map_or(0x80, |tag| tag & 0x1f);
    let head =
        [tag, 0, failed.status, failed.error, l0, l1, l2, failed.device, l3, l4, l5, 0, c0, c1];
    page[..head.len()].copy_from_slice(&head);
    with_checksum(page)
}

/// The sum of all bytes becomes 0.
fn with_checksum(mut page: Vec<u8>) -> Vec<u8> {
    let sum = page.iter().fold(0_u8, |sum, byte| sum.wrapping_add(*byte));
    if let Some(last) = page.last_mut() {
        *last = last.wrapping_sub(sum);
    }
    page
}

/// READ LOG EXT and READ LOG DMA EXT. Every log has one page.
pub(super) fn read(state: &mut State, command: &Command) -> Result<Vec<u8>, Failure> {
    let [address, low, _, _, high, _, ..] = command.lba.to_le_bytes();
    if (low, high, command.count) != (0, 0, 1) {
        return Err(Failure::ABORTED);
    }
    match address {
        DIRECTORY => {
            let mut page = vec![0; PAGE];
            // The version, and the number of pages.
            (page[0], page[2 * usize::from(QUEUED_ERROR)]) = (1, 1);
            Ok(page)
        }
        // Reading the log ends the error.
        QUEUED_ERROR => {
            let page = state.queued_error.take().map(|it| queued_error(&it));
            Ok(page.unwrap_or_else(|| with_checksum(vec![0; PAGE])))
        }
        _ => Err(Failure::ABORTED),
    }
}

pub(super) fn smart(state: &mut State, command: &Command) -> Result<Plan, Failure> {
    // ENABLE OPERATIONS.
    const ENABLE: u8 = 0xd8;
    if command.lba >> 8 & 0xffff != KEY || !state.smart && command.feature() != ENABLE {
        return Err(Failure::ABORTED);
    }
    match command.feature() {
        0xd0 => Ok(Plan::Answer(attributes(state))),
        0xd1 => Ok(Plan::Answer(thresholds())),
        // ATTRIBUTE AUTOSAVE. RETURN STATUS: the unchanged key means that no threshold is exceeded.
        0xd2 | 0xda => Ok(Plan::Done),
        // READ LOG: only the directory, which is empty.
        0xd5 if command.lba & 0xff == 0 && command.count == 1 => {
            let mut page = vec![0; PAGE];
            page[0] = 1;
            Ok(Plan::Answer(page))
        }
        ENABLE | 0xd9 => {
            state.smart = command.feature() == ENABLE;
            Ok(Plan::Done)
        }
        _ => Err(Failure::ABORTED),
    }
}

/// SMART READ DATA: the revision, and one attribute.
fn attributes(state: &State) -> Vec<u8> {
    let mut page = vec![0; PAGE];
    let [r0, r1, r2, r3] = state.failures.to_le_bytes();
    let normal = 100 - u8::try_from(state.failures.min(99)).unwrap_or(99);
    // Flags: updated online, an event count.
    let attribute = [UNCORRECTABLE, 0x12, 0, normal, normal, r0, r1, r2, r3];
    page[0] = 0x10;
    page[2..2 + attribute.len()].copy_from_slice(&attribute);
    page[CAPABILITY] = SAVES;
    with_checksum(page)
}

/// SMART READ THRESHOLDS: the attribute never means a failure.
fn thresholds() -> Vec<u8> {
    let mut page = vec![0; PAGE];
    (page[0], page[2]) = (0x10, UNCORRECTABLE);
    with_checksum(page)
}
