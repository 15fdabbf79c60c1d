//! `memory=KEY=NUMBER,…`: writes pages of memory again and again, and verifies that each has what
//! was written last. A machine that is moved or saved meanwhile must lose no write.
use crate::Session;
use crate::cpu::Cpu;
use crate::io::{read_memory, tsc, write_memory};
use crate::memory::{Room, numbers};
use crate::random::Random;
use crate::report::Finding;
use crate::start::{Start, Words, number};

const PAGE: u64 = 4096;
/// Offsets in a page of the words that are written and verified.
const WORDS: [u64; 3] = [0, 2040, 4088];
/// Pages between two looks at the time.
const STEP: u64 = 16;

struct Job {
    span: u64,
    /// Pages per second. 0: as many as possible.
    rate: u64,
    milliseconds: u64,
    seed: u64,
}

impl Job {
    fn parse(words: &str) -> Option<Self> {
        let mut job = Self { span: 16 << 20, rate: 0, milliseconds: 1000, seed: 1 };
        for word in words.split(',') {
            let (key, value) = word.split_once('=')?;
            let field = match key {
                "span" => &mut job.span,
                "rate" => &mut job.rate,
                "milliseconds" => &mut job.milliseconds,
                "seed" => &mut job.seed,
                _ => return None,
            };
            *field = number(value)?;
        }
        (job.span >= PAGE).then_some(job)
    }
}

/// Executes all `memory=` words in order.
pub(crate) fn run(session: &mut Session, start: &Start, cpu: &Cpu, words: Words) {
    for word in words.all("memory") {
        let mut room = Room::find(start);
        let loaded = Job::parse(word).and_then(|job| load(&job, cpu, &mut room));
        session.add(loaded.unwrap_or_else(|| {
            Finding::check("memory-load", false).text("wants", "KEY=NUMBER,... and enough memory")
        }));
    }
}

/// `fill=MIB`: writes to all pages of that much memory. Each then differs from the others.
pub(crate) fn fill(session: &mut Session, start: &Start, words: Words) {
    let Some(mib) = words.get("fill").and_then(number) else { return };
    let length = mib.saturating_mul(1 << 20);
    let memory = Room::find(start).take(length);
    if let Some(memory) = memory {
        let pages = (0..length).step_by(PAGE as usize);
        pages.for_each(|at| write_memory(memory + at, 8, content(at, 1, 1)));
    }
    session.add(Finding::check("fill", memory.is_some()).number("mib", mib));
}

/// The words of a page after its write of this number.
fn content(page: u64, writes: u64, seed: u64) -> u64 {
    (page ^ seed << 32).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ writes
}

fn load(job: &Job, cpu: &Cpu, room: &mut Room) -> Option<Finding> {
    let pages = job.span / PAGE;
    let counts = numbers(room.take(pages * 8)?, pages);
    let memory = room.take(pages * PAGE)?;
    let (mut written, mut errors, mut first) = (0, 0, 0);
    let mut verify = |page: u64, writes: u64| {
        let at = memory + page * PAGE;
        // Before its first write, a page has zeros.
        let wanted = if writes == 0 { 0 } else { content(page, writes, job.seed) };
        for word in WORDS {
            if read_memory(at + word, 8) != wanted {
                first = if errors == 0 { at + word } else { first };
                errors += 1;
            }
        }
    };
    let mut random = Random::new(job.seed);
    let start = tsc();
    let (mut before, mut longest) = (start, 0);
    loop {
        for _ in 0..STEP {
            let page = random.next() % pages;
            let count = &mut counts[page as usize];
            verify(page, *count);
            *count += 1;
            let value = content(page, *count, job.seed);
            WORDS.iter().for_each(|word| write_memory(memory + page * PAGE + word, 8, value));
        }
        written += STEP;
        // A pause of the machine may be in the wait, too.
        let due = match job.rate {
            0 => 0,
            rate => cpu.counts(written * 1_000_000 / rate),
        };
        let mut now = tsc();
        loop {
            longest = u64::max(longest, now.wrapping_sub(before));
            before = now;
            if now.wrapping_sub(start) >= due {
                break;
            }
            core::hint::spin_loop();
            now = tsc();
        }
        if cpu.nanoseconds(now.wrapping_sub(start)) / 1_000_000 >= job.milliseconds {
            break;
        }
    }
    (0..pages).for_each(|page| verify(page, counts[page as usize]));
    let seconds = u64::max(cpu.nanoseconds(tsc().wrapping_sub(start)) / 1_000_000, 1);
    Some(
        Finding::check("memory-load", errors == 0 && written > 0)
            .number("pages", written)
            .number("errors", errors)
            .hex("first_error", first)
            .number("pages_per_second", written * 1000 / seconds)
            .number("longest_us", cpu.nanoseconds(longest) / 1000),
    )
}
