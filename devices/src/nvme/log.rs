//! Log pages (NVMe 1.4, 5.14). The events that refer to them are in `events.rs`.

use super::events::{CHANGED, ERROR, HEALTH};
use super::features::{Features, TEMPERATURE};
use super::health::MAX_ERRORS;
use super::identify::{FIRMWARE, Page};
use super::{Shared, io, opcodes};

/// Log pages that no event refers to.
const SUPPORTED: u8 = 0x00;
const FIRMWARE_SLOT: u8 = 0x03;
const COMMANDS: u8 = 0x05;

/// None if the page is not supported.
pub(super) fn page(shared: &Shared, features: &Features, number: u8) -> Option<Vec<u8>> {
    Some(match number {
        SUPPORTED => supported(),
        ERROR => errors(shared),
        HEALTH => health(shared, features),
        FIRMWARE_SLOT => {
            let mut page = Page::new(512);
            page.put(0, &[1]);
            page.put(8, FIRMWARE);
            page.0
        }
        CHANGED => {
            let mut page = Page::new(4096);
            if shared.health().changed {
                page.put(0, &io::NAMESPACE.to_le_bytes());
            }
            page.0
        }
        COMMANDS => commands(shared),
        _ => return None,
    })
}

fn supported() -> Vec<u8> {
    let mut page = Page::new(1024);
    for number in [SUPPORTED, ERROR, HEALTH, FIRMWARE_SLOT, CHANGED, COMMANDS] {
        page.put(4 * usize::from(number), &1_u32.to_le_bytes());
    }
    page.0
}

fn errors(shared: &Shared) -> Vec<u8> {
    let mut page = Page::new(64 * MAX_ERRORS);
    let health = shared.health();
    for (error, at) in health.mistakes.iter().zip(0_u64..) {
        let entry = 64 * usize::try_from(at).expect("at most 16");
        page.put(entry, &health.count.saturating_sub(at).to_le_bytes());
        page.put(entry + 8, &error.queue.to_le_bytes());
        page.put(entry + 10, &error.id.to_le_bytes());
        page.put(entry + 12, &(error.status.0 << 1).to_le_bytes());
        // Parameter error location: not reported.
        page.put(entry + 14, &[0xff, 0xff]);
        if error.queue > 0 {
            page.put(entry + 16, &error.block.to_le_bytes());
            page.put(entry + 24, &io::NAMESPACE.to_le_bytes());
        }
    }
    page.0
}

fn health(shared: &Shared, features: &Features) -> Vec<u8> {
    let mut page = Page::new(512);
    page.put(0, &[u8::from(features.is_too_warm_or_cold()) << 1]);
    page.put(1, &TEMPERATURE.to_le_bytes());
    // Available spare blocks and their threshold, in percent.
    page.put(3, &[100, 10]);
    let ((reads, read), (writes, written)) = (shared.reads.totals(), shared.writes.totals());
    for (at, value) in [(32, read), (48, written), (64, reads), (80, writes)] {
        page.put(at, &value.to_le_bytes());
    }
    let health = shared.health();
    page.put(112, &1_u64.to_le_bytes());
    page.put(160, &health.media.to_le_bytes());
    page.put(176, &health.count.to_le_bytes());
    page.0
}

/// Commands Supported and Effects.
fn commands(shared: &Shared) -> Vec<u8> {
    const SUPPORTED_COMMAND: u32 = 1 << 0;
    const CHANGES_BLOCKS: u32 = 1 << 1;
    let mut page = Page::new(4096);
    for opcode in opcodes::offered(shared) {
        page.put(4 * usize::from(opcode), &SUPPORTED_COMMAND.to_le_bytes());
    }
    let mut io = vec![
        (io::FLUSH, SUPPORTED_COMMAND),
        (io::READ, SUPPORTED_COMMAND),
        (io::WRITE, SUPPORTED_COMMAND | CHANGES_BLOCKS),
        (io::WRITE_ZEROES, SUPPORTED_COMMAND | CHANGES_BLOCKS),
    ];
    io.extend(shared.discards().then_some((io::DATASET, SUPPORTED_COMMAND | CHANGES_BLOCKS)));
    for (opcode, effects) in io {
        page.put(1024 + 4 * usize::from(opcode), &effects.to_le_bytes());
    }
    page.0
}

pub(super) fn clears_changes(page: u8) -> bool {
    page == CHANGED
}
