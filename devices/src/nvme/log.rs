//! Log pages, and the events that send the guest to them (NVMe 1.4, 5.2 and 5.14).

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::{Deserialize, Serialize};

use super::command::Status;
use super::features::Features;
use super::identify::{FIRMWARE, Page};
use super::{Shared, admin, io};

/// Entries of the error log.
pub(super) const ERRORS: usize = 16;
/// Kelvin: no host's disk knows better, and it is a comfortable one.
pub(super) const TEMPERATURE: u16 = 313;

/// Log pages.
const SUPPORTED: u8 = 0x00;
const ERROR: u8 = 0x01;
const HEALTH: u8 = 0x02;
const FIRMWARE_SLOT: u8 = 0x03;
const CHANGED: u8 = 0x04;
const COMMANDS: u8 = 0x05;

/// Reads or writes since power-on.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Counter {
    commands: AtomicU64,
    bytes: AtomicU64,
}

impl Counter {
    pub(super) fn count(&self, bytes: u64) {
        self.commands.fetch_add(1, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Commands, and thousands of 512 bytes, begun ones too.
    fn totals(&self) -> (u64, u64) {
        let bytes = self.bytes.load(Ordering::Relaxed);
        (self.commands.load(Ordering::Relaxed), bytes.div_ceil(512 * 1000))
    }

    /// As it was saved.
    pub(super) fn set(&self, saved: &Self) {
        self.commands.store(saved.commands.load(Ordering::Relaxed), Ordering::Relaxed);
        self.bytes.store(saved.bytes.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(super) fn copy(&self) -> Self {
        let copy = Self::default();
        copy.set(self);
        copy
    }
}

/// A command that failed.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Mistake {
    pub(super) queue: u16,
    pub(super) id: u16,
    pub(super) status: Status,
    pub(super) block: u64,
}

/// What failed since power-on, and what changed.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Health {
    /// The newest first, at most `ERRORS`.
    mistakes: VecDeque<Mistake>,
    /// All there were.
    count: u64,
    /// What the disk could not do.
    media: u64,
    /// The guest was not told that the namespace changed.
    pub(super) changed: bool,
}

impl Health {
    pub(super) fn note(&mut self, mistake: Mistake) {
        self.mistakes.truncate(ERRORS - 1);
        self.mistakes.push_front(mistake);
        self.count += 1;
        // Status code type 2: media and data integrity.
        self.media += u64::from(mistake.status.0 >> 8 & 7 == 2);
    }

    /// A saved one may be anything.
    pub(super) fn is_valid(&self) -> bool {
        self.mistakes.len() <= ERRORS && self.count < u64::MAX / 2 && self.media <= self.count
    }
}

/// A page of this number, if there is one.
pub(super) fn page(shared: &Shared, features: &Features, number: u8) -> Option<Vec<u8>> {
    Some(match number {
        SUPPORTED => supported(),
        ERROR => errors(shared),
        HEALTH => health(shared, features),
        FIRMWARE_SLOT => {
            let mut page = Page::new(512);
            page.put(0, &[1]);
            page.put(8, FIRMWARE);
            page.take()
        }
        CHANGED => {
            let mut page = Page::new(4096);
            if shared.health().changed {
                page.put(0, &io::NAMESPACE.to_le_bytes());
            }
            page.take()
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
    page.take()
}

fn errors(shared: &Shared) -> Vec<u8> {
    let mut page = Page::new(64 * ERRORS);
    let health = shared.health();
    for (mistake, at) in health.mistakes.iter().zip(0_u64..) {
        let entry = 64 * usize::try_from(at).expect("at most 16");
        page.put(entry, &(health.count - at).to_le_bytes());
        page.put(entry + 8, &mistake.queue.to_le_bytes());
        page.put(entry + 10, &mistake.id.to_le_bytes());
        page.put(entry + 12, &(mistake.status.0 << 1).to_le_bytes());
        // Which byte of the command was wrong is not said.
        page.put(entry + 14, &[0xff, 0xff]);
        if mistake.queue > 0 {
            page.put(entry + 16, &mistake.block.to_le_bytes());
            page.put(entry + 24, &io::NAMESPACE.to_le_bytes());
        }
    }
    page.take()
}

fn health(shared: &Shared, features: &Features) -> Vec<u8> {
    let mut page = Page::new(512);
    page.put(0, &[u8::from(features.is_too_warm_or_cold()) << 1]);
    page.put(1, &TEMPERATURE.to_le_bytes());
    // Spare blocks that are left, and when there are few of them.
    page.put(3, &[100, 10]);
    let ((reads, read), (writes, written)) = (shared.reads.totals(), shared.writes.totals());
    for (at, value) in [(32, read), (48, written), (64, reads), (80, writes)] {
        page.put(at, &value.to_le_bytes());
    }
    let health = shared.health();
    page.put(112, &1_u64.to_le_bytes());
    page.put(160, &health.media.to_le_bytes());
    page.put(176, &health.count.to_le_bytes());
    page.take()
}

/// Commands Supported and Effects: what there is, and what changes blocks.
fn commands(shared: &Shared) -> Vec<u8> {
    const IS: u32 = 1 << 0;
    const CHANGES_BLOCKS: u32 = 1 << 1;
    let mut page = Page::new(4096);
    for opcode in admin::opcodes(shared) {
        page.put(4 * usize::from(opcode), &IS.to_le_bytes());
    }
    let mut io = vec![
        (io::FLUSH, IS),
        (io::READ, IS),
        (io::WRITE, IS | CHANGES_BLOCKS),
        (io::WRITE_ZEROES, IS | CHANGES_BLOCKS),
    ];
    io.extend(shared.discards().then_some((io::DATASET, IS | CHANGES_BLOCKS)));
    for (opcode, effects) in io {
        page.put(1024 + 4 * usize::from(opcode), &effects.to_le_bytes());
    }
    page.take()
}

/// Something that the guest wants to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Event {
    /// Its type: 0 to 2.
    kind: u8,
    information: u8,
    page: u8,
}

impl Event {
    pub(super) const INVALID_REGISTER: Self = Self { kind: 0, information: 0, page: ERROR };
    pub(super) const INVALID_VALUE: Self = Self { kind: 0, information: 1, page: ERROR };
    pub(super) const TEMPERATURE: Self = Self { kind: 1, information: 1, page: HEALTH };
    pub(super) const NAMESPACE: Self = Self { kind: 2, information: 0, page: CHANGED };

    /// Dword 0 of the completion.
    pub(super) fn result(self) -> u32 {
        u32::from_le_bytes([self.kind, self.information, self.page, 0])
    }
}

/// Requests for events, and events without request.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Events {
    requests: VecDeque<u16>,
    waiting: VecDeque<Event>,
    /// Types that wait until their log page was read, by bit.
    masked: u8,
}

/// Requests that are kept: AERL + 1.
pub(super) const REQUESTS: usize = 4;

impl Events {
    /// Keeps a request.
    pub(super) fn request(&mut self, id: u16) -> Result<(), Status> {
        if self.requests.len() >= REQUESTS {
            return Err(Status::EVENT_LIMIT);
        }
        self.requests.push_back(id);
        Ok(())
    }

    /// Takes a request back.
    pub(super) fn abort(&mut self, id: u16) -> bool {
        let at = self.requests.iter().position(|it| *it == id);
        at.is_some_and(|at| self.requests.remove(at).is_some())
    }

    pub(super) fn raise(&mut self, event: Event) {
        if !self.waiting.contains(&event) {
            self.waiting.push_back(event);
        }
    }

    /// The guest read a page, and wants to know of more.
    pub(super) fn unmask(&mut self, page: u8) {
        match page {
            ERROR => self.masked &= !(1 << 0),
            HEALTH => self.masked &= !(1 << 1),
            CHANGED => self.masked &= !(1 << 2),
            _ => {}
        }
    }

    /// A request and the event that answers it.
    pub(super) fn next(&mut self) -> Option<(u16, Event)> {
        let at = self.waiting.iter().position(|it| self.masked >> it.kind & 1 == 0)?;
        let request = self.requests.pop_front()?;
        let event = self.waiting.remove(at)?;
        self.masked |= 1 << event.kind;
        Some((request, event))
    }

    /// A saved one may be anything.
    pub(super) fn is_valid(&self) -> bool {
        let known = |event: &Event| event.kind < 3;
        self.requests.len() <= REQUESTS && self.waiting.len() <= 8 && self.waiting.iter().all(known)
    }
}

/// Whether a page tells what changed, so that reading it clears that.
pub(super) fn tells_changes(page: u8) -> bool {
    page == CHANGED
}
