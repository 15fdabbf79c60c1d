//! Records for tests of crash consistency: `disk=record` writes them for ever and says which ones
//! it was told are durable, `disk=recall` finds out whether they are there.
//!
//! Record N is one block: N and the seed tell its place, and each byte of it. Each of its sectors
//! begins with N, and the rest depends on it. Places come again, so that old is overwritten by new.
//! Of a record that nobody called durable each sector may be old or new. After a crash the records
//! after the last durable one are written again, equal to what they were.
use core::fmt::Write;

use crate::Session;
use crate::disk::{Drive, Job, Operation, Request};
use crate::io::{in8, out8, read64, write64};
use crate::memory::{Room, fill, numbers};
use crate::random::{STEP, mix};
use crate::report::Finding;

const SECTOR: u64 = 512;
/// How far writing may be ahead of what is durable.
const WINDOW: u64 = 1024;
/// The debug console: one exit for a byte, and no waiting.
const DEBUG_CONSOLE: u16 = 0x402;
const PRESENT: u8 = 0xe9;

/// What a record is.
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

    /// Where it is, in blocks.
    fn place(&self, record: u64) -> u64 {
        mix(self.base ^ record.wrapping_mul(STEP)) % self.places
    }

    /// A word of a sector; the first one is the record's number.
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

    /// The record that a sector holds, 0 for none; `Err` if it holds neither.
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

/// Tells the host, as fast as it can be told.
struct Teller<'a> {
    session: &'a mut Session,
    fast: bool,
}

impl Write for Teller<'_> {
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
    /// What will be durable when the flush that is under way is done.
    flushing: Option<u64>,
    /// The records under way, by their requests' numbers; 0 is none.
    under_way: [u64; crate::disk::DEPTH],
}

impl Writing<'_, '_> {
    /// Starts what may be started.
    fn start(&mut self, every: u64) {
        let mut put = false;
        // A flush in the midst of writes is the interesting one: it covers those before it alone.
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
            self.under_way[tag] = self.next;
            self.next += 1;
            put = true;
        }
        if put {
            self.drive.ring();
        }
    }

    /// Two writes of one place at once would end in any order.
    fn is_busy(&self, place: u64) -> bool {
        self.under_way.iter().any(|&record| record != 0 && self.records.place(record) == place)
    }

    /// The last record up to which all are written.
    fn written(&self) -> u64 {
        let under_way = self.under_way.iter().filter(|&&record| record != 0);
        under_way.min().copied().unwrap_or(self.next) - 1
    }

    /// Waits for something to be done; true if more is durable for it.
    fn finish(&mut self, through: bool) -> Option<bool> {
        let (tag, request) = self.drive.wait()?;
        let before = self.durable;
        if request.operation == Operation::Flush {
            self.durable = self.flushing.take().unwrap_or(before);
        } else {
            self.under_way[tag] = 0;
            if through {
                self.durable = self.written();
            }
        }
        self.drive.release(tag);
        Some(self.durable > before)
    }
}

/// Writes until it is killed, or until something goes wrong.
pub(crate) fn write(session: &mut Session, drive: &mut Drive, job: &Job) -> Finding {
    let (through, durable) = (job.through != 0, job.durable);
    let records = Records::new(job);
    let fast = in8(DEBUG_CONSOLE) == PRESENT;
    let mut teller = Teller { session, fast };
    let mut it = Writing {
        drive,
        records,
        next: durable + 1,
        durable,
        flushing: None,
        under_way: [0; crate::disk::DEPTH],
    };
    loop {
        it.start(if through { u64::MAX >> 1 } else { job.every });
        let Some(more) = it.finish(through) else { break };
        if it.drive.errors > 0 {
            break;
        }
        if more {
            writeln!(teller, "{}", it.durable).ok();
        }
    }
    let (durable, next) = (it.durable, it.next);
    Finding::check("disk", false)
        .number("errors", drive.errors)
        .number("durable", durable)
        .number("next", next)
}

/// What is wrong with the sectors of a disk.
#[derive(Default)]
struct Losses {
    sectors: u64,
    first_bad: u64,
    expected: u64,
    found: u64,
    /// The newest record that was seen.
    newest: u64,
}

/// Reads every place: its newest durable record, or one after that which is not durable yet.
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

/// Shows every block with its place; false if the disk does not answer.
fn read_all(drive: &mut Drive, records: &Records, mut show: impl FnMut(u64, u64)) -> bool {
    let mut next = 0;
    loop {
        while next < records.places
            && let Some((tag, address)) = drive.free()
        {
            let (offset, length) = (next * records.block, records.block as u32);
            // What was there before must not pass for what was read.
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
