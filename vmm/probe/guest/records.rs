//! Records for tests of crash consistency. `disk=record` writes records forever, and prints up to
//! which one the disk has reported them as durable. `disk=recall` checks that these are on the
//! disk.
//!
//! A record is one block. Its number N and the seed determine its place and each of its bytes: each
//! sector begins with N, and the rest depends on N. Places repeat, so that new records overwrite
//! old ones. Each sector of a record that was not reported as durable may be old or new. After a
//! crash, the records after the last durable one are written again with the same content.
use core::fmt::Write;

use crate::Session;
use crate::disk::{Drive, Job, Operation, Request};
use crate::io::{in8, out8, read64, write64};
use crate::memory::{Room, fill, numbers};
use crate::random::{STEP, mix};
use crate::report::Finding;

const SECTOR: u64 = 512;
/// Maximum number of records that are written but not yet durable.
const WINDOW: u64 = 1024;
/// The debug console: one exit per byte, without waiting.
const DEBUG_CONSOLE: u16 = 0x402;
const PRESENT: u8 = 0xe9;

struct Records {
    base: u64,
    block: u64,
    places: u64,
}

impl Records {
    fn new(job: &Job) -> Self {
        let base = mix(job.seed.wrapping_add(STEP));
        Self { base, block: job.block, places: job.places() }
    }

    /// The place of a record, in blocks.
    fn place(&self, record: u64) -> u64 {
        mix(self.base ^ record.wrapping_mul(STEP)) % self.places
    }

    /// A word of a sector. The first word is the number of the record.
    fn word(&self, record: u64, at: u64) -> u64 {
        if at % SECTOR == 0 {
            return record;
        }
        mix(self.base.wrapping_add(record.wrapping_mul(STEP)) ^ at << 40)
    }

    fn write(&self, record: u64, address: u64) {
        for at in (0..self.block).step_by(8) {
            write64(address + at, self.word(record, at));
        }
    }

    /// The number of the record that a sector holds, 0 for none. `Err` if the sector is corrupt.
    fn read(&self, place: u64, address: u64, sector: u64) -> Result<u64, u64> {
        let record = read64(address + sector);
        let mut words = (sector..sector + SECTOR).step_by(8);
        let right = if record == 0 {
            words.all(|at| read64(address + at) == 0)
        } else {
            let same = words.all(|at| read64(address + at) == self.word(record, at));
            same && self.place(record) == place
        };
        if right { Ok(record) } else { Err(record) }
    }
}

/// Prints the durable records as fast as possible: on the debug console if there is one.
struct Printer<'a> {
    session: &'a mut Session,
    fast: bool,
}

impl Write for Printer<'_> {
    fn write_str(&mut self, text: &str) -> core::fmt::Result {
        if !self.fast {
            return self.session.console.write_str(text);
        }
        text.bytes().for_each(|byte| out8(DEBUG_CONSOLE, byte));
        Ok(())
    }
}

/// A run of `disk=record`.
struct Writing<'a, 'b> {
    drive: &'a mut Drive<'b>,
    records: Records,
    next: u64,
    durable: u64,
    /// The record up to which all are durable when the pending flush is done.
    flushing: Option<u64>,
    /// The records in flight, by the tags of their requests; 0 for none.
    in_flight: [u64; crate::disk::DEPTH],
}

impl Writing<'_, '_> {
    fn start(&mut self, every: u64) {
        let mut put = false;
        // Flush while writes are in flight, which is the interesting case: the flush covers only
        // writes that completed before it.
        let written = self.written();
        if self.flushing.is_none()
            && written >= self.durable + every
            && let Some((tag, _)) = self.drive.free()
        {
            self.flushing = Some(written);
            self.drive.put(tag, Request::FLUSH);
            put = true;
        }
        while self.next <= self.durable + WINDOW && !self.is_busy(self.records.place(self.next)) {
            let Some((tag, address)) = self.drive.free() else { break };
            self.records.write(self.next, address);
            let offset = self.records.place(self.next) * self.records.block;
            let length = self.records.block as u32;
            let request = Request { operation: Operation::Write, offset, address, length };
            self.drive.put(tag, request);
            self.in_flight[tag] = self.next;
            self.next += 1;
            put = true;
        }
        if put {
            self.drive.ring();
        }
    }

    /// Whether a write to this place is in flight. Two at once could complete in any order.
    fn is_busy(&self, place: u64) -> bool {
        self.in_flight.iter().any(|&record| record != 0 && self.records.place(record) == place)
    }

    /// The last record up to which all are written.
    fn written(&self) -> u64 {
        let in_flight = self.in_flight.iter().filter(|&&record| record != 0);
        in_flight.min().copied().unwrap_or(self.next) - 1
    }

    /// Waits for a request to complete. Returns whether more records are durable than before.
    fn finish(&mut self, through: bool) -> Option<bool> {
        let (tag, request) = self.drive.wait()?;
        let before = self.durable;
        if request.operation == Operation::Flush {
            self.durable = self.flushing.take().unwrap_or(before);
        } else {
            self.in_flight[tag] = 0;
            if through {
                self.durable = self.written();
            }
        }
        self.drive.release(tag);
        Some(self.durable > before)
    }
}

/// Writes until the machine is killed, or until an error occurs.
pub(crate) fn write(session: &mut Session, drive: &mut Drive, job: &Job) -> Finding {
    let (through, durable) = (job.through != 0, job.durable);
    let records = Records::new(job);
    let fast = in8(DEBUG_CONSOLE) == PRESENT;
    let mut printer = Printer { session, fast };
    let mut it = Writing {
        drive,
        records,
        next: durable + 1,
        durable,
        flushing: None,
        in_flight: [0; crate::disk::DEPTH],
    };
    loop {
        it.start(if through { u64::MAX >> 1 } else { job.every });
        let Some(more) = it.finish(through) else { break };
        if it.drive.errors > 0 {
            break;
        }
        if more {
            writeln!(printer, "{}", it.durable).ok();
        }
    }
    let (durable, next) = (it.durable, it.next);
    Finding::check("disk", false)
        .number("errors", drive.errors)
        .number("durable", durable)
        .number("next", next)
}

/// The errors of `disk=recall`.
#[derive(Default)]
struct Losses {
    sectors: u64,
    first_bad: u64,
    expected: u64,
    found: u64,
    newest: u64,
}

/// Reads every place. It must hold its newest durable record, or a later one that is not durable
/// yet.
pub(crate) fn check(drive: &mut Drive, job: &Job, room: &mut Room) -> Finding {
    let records = Records::new(job);
    let Some(table) = room.take(records.places * 8) else {
        return Finding::check("disk", false).text("wants", "more memory");
    };
    let last = numbers(table, records.places);
    for record in 1..=job.durable {
        last[records.place(record) as usize] = record;
    }
    let mut losses = Losses::default();
    let whole = read_all(drive, &records, |place, address| {
        let expected = last[place as usize];
        for sector in (0..records.block).step_by(SECTOR as usize) {
            let found = records.read(place, address, sector);
            let limit = job.durable + WINDOW;
            losses.newest = losses.newest.max(found.unwrap_or(0));
            if found.is_ok_and(|it| it == expected || it > job.durable && it <= limit) {
                continue;
            }
            if losses.sectors == 0 {
                losses.first_bad = place * records.block + sector;
                losses.expected = expected;
                losses.found = found.unwrap_or_else(|it| it);
            }
            losses.sectors += 1;
        }
    });
    Finding::check("disk", whole && drive.errors == 0 && losses.sectors == 0)
        .number("durable", job.durable)
        .number("newest", losses.newest)
        .number("requests", drive.answered)
        .number("errors", drive.errors)
        .number("mismatches", losses.sectors)
        .hex("first_bad", losses.first_bad)
        .number("expected", losses.expected)
        .number("found", losses.found)
}

/// Reads all blocks and passes each with its place to `show`. Returns false if the disk does not
/// answer.
fn read_all(drive: &mut Drive, records: &Records, mut show: impl FnMut(u64, u64)) -> bool {
    let mut next = 0;
    loop {
        while next < records.places
            && let Some((tag, address)) = drive.free()
        {
            let (offset, length) = (next * records.block, records.block as u32);
            // Overwrite the buffer, so that old data cannot pass as data that was read.
            fill(address, records.block, 0x5a);
            drive.put(tag, Request { operation: Operation::Read, offset, address, length });
            next += 1;
        }
        drive.ring();
        if drive.is_idle() {
            return true;
        }
        let Some((tag, request)) = drive.wait() else { return false };
        show(request.offset / records.block, request.address);
        drive.release(tag);
    }
}
