//! Writes the log to standard output without ever blocking the caller.
//!
//! A reader that stalls would block every thread that logs, signal handling included. So callers
//! put lines into a bounded queue, and a thread of its own writes them. Lines that do not fit are
//! dropped, and their number is written where they are missing.
//!
//! As a last resort, messages caused by others are also limited here. Each level has a [`Bucket`],
//! large enough for all of our own messages.

pub mod bucket;

use std::io::{self, Write};
use std::mem;
use std::os::fd::BorrowedFd;
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use serde_json::json;
use tracing::{Level, Metadata};
use tracing_subscriber::fmt::MakeWriter;

use self::bucket::{Bucket, PROGRAM};
use crate::jail;

/// In bytes.
const MAX_QUEUED: usize = 1 << 20;
/// How long the end of the process waits for readers.
const END_TIMEOUT: Duration = Duration::from_secs(2);
const MINUTE: Duration = Duration::from_secs(60);

#[derive(Clone)]
pub struct Log(Arc<Shared>);

struct Shared {
    out: BorrowedFd<'static>,
    json: bool,
    queue: Mutex<Queue>,
    changed: Condvar,
}

static GLOBAL: OnceLock<Log> = OnceLock::new();

/// The queue between callers and the writing thread.
struct Queue {
    bytes: Vec<u8>,
    /// Rate limits by level, the most severe level first.
    buckets: [Bucket; 5],
    /// Lines dropped since `bytes` was last taken.
    lost: u64,
    has_writer: bool,
    /// The thread is writing what it took from `bytes`.
    writing: bool,
}

fn index(level: Level) -> usize {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        Level::TRACE => 4,
    }
}

impl Log {
    /// The first line starts the writing thread.
    pub fn new(out: BorrowedFd<'static>, json: bool) -> Self {
        let buckets = [(); 5].map(|()| Bucket::new(PROGRAM));
        let queue =
            Queue { bytes: Vec::new(), buckets, lost: 0, has_writer: false, writing: false };
        let (queue, changed) = (Mutex::new(queue), Condvar::new());
        Self(Arc::new(Shared { out, json, queue, changed }))
    }

    pub fn make_global(&self) {
        GLOBAL.get_or_init(|| self.clone());
    }

    /// Waits until everything is written, at most 2 seconds.
    pub fn end(&self) {
        self.end_within(END_TIMEOUT);
    }

    fn end_within(&self, time: Duration) {
        self.report_dropped();
        let Shared { changed, .. } = &*self.0;
        let waits = |queue: &mut Queue| queue.writing || !queue.bytes.is_empty();
        // Lines that were not written in time are given up.
        drop(changed.wait_timeout_while(self.0.queue(), time, waits));
    }

    fn report_dropped(&self) {
        let mut queue = self.0.queue();
        if !queue.has_writer {
            return;
        }
        for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
            let count = queue.buckets[index(level)].missing();
            self.0.report_missing(&mut queue, count, level);
        }
        self.0.changed.notify_all();
    }

    fn push(&self, level: Level, line: &[u8]) {
        let mut queue = self.0.queue();
        let Some(before) = queue.buckets[index(level)].take(line.len(), Instant::now()) else {
            return;
        };
        self.0.report_missing(&mut queue, before, level);
        if !queue.has_writer {
            let shared = self.0.clone();
            let body = move || shared.serve();
            queue.has_writer = Builder::new().name("log".into()).spawn(body).is_ok();
        }
        if !queue.has_writer {
            drop(queue);
            write(self.0.out, line);
        } else if queue.lost > 0 || queue.bytes.len() + line.len() > MAX_QUEUED {
            queue.lost += 1;
        } else {
            queue.bytes.extend(line);
            self.0.changed.notify_all();
        }
    }
}

impl Shared {
    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Threads change the queue by whole lines, so it is valid even after a panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn report_missing(&self, queue: &mut Queue, count: u64, level: Level) {
        if count > 0 {
            let missing = self.line(&format!("{count} lines of {level} are left out here"));
            queue.bytes.extend(missing.as_bytes());
        }
    }

    /// The body of the writing thread.
    fn serve(&self) {
        jail::seclude();
        let mut queue = self.queue();
        loop {
            let empty = |queue: &mut Queue| queue.bytes.is_empty();
            queue = self.changed.wait_while(queue, empty).unwrap_or_else(PoisonError::into_inner);
            let (bytes, lost) = (mem::take(&mut queue.bytes), mem::take(&mut queue.lost));
            queue.writing = true;
            drop(queue);
            write(self.out, &bytes);
            if lost > 0 {
                write(self.out, self.lost_line(lost).as_bytes());
            }
            queue = self.queue();
            queue.writing = false;
            self.changed.notify_all();
        }
    }

    fn lost_line(&self, lost: u64) -> String {
        self.line(&format!("{lost} lines of the log are missing here: the reader was too slow"))
    }

    fn line(&self, text: &str) -> String {
        if self.json { object("WARN", text) } else { format!(" WARN {text}\n") }
    }
}

/// A line of the log as a JSON object.
fn object(level: &str, text: &str) -> String {
    format!("{}\n", json!({ "level": level, "fields": { "message": text } }))
}

/// Writes all bytes, unless the reader is gone.
fn write(out: BorrowedFd<'_>, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(out, bytes) {
            Ok(count) => bytes = &bytes[count.min(bytes.len())..],
            Err(Errno::INTR) => {}
            // Another process that shares the file description made it nonblocking.
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&out, PollFlags::OUT)], None).ok();
            }
            Err(_) => return,
        }
    }
}

pub struct LevelWriter<'a>(&'a Log, Level);

/// `tracing` passes each line as a whole.
impl Write for LevelWriter<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.push(self.1, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = LevelWriter<'a>;

    fn make_writer(&'a self) -> LevelWriter<'a> {
        LevelWriter(self, Level::INFO)
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> LevelWriter<'a> {
        LevelWriter(self, *about.level())
    }
}

/// A limit of lines per minute, for events that others can cause.
pub struct LineLimit {
    max: u32,
    left: u32,
    /// The start of the current minute.
    since: Option<Instant>,
}

impl LineLimit {
    pub const fn new(max: u32) -> Self {
        Self { max, left: max, since: None }
    }

    /// Returns false if the minute's lines are used up.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= MINUTE) {
            (self.since, self.left) = (Some(now), self.max);
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

/// The text in one line, without control characters, which could do anything to the terminal of its
/// reader.
pub fn printable(text: &str) -> String {
    text.replace(['\n', '\t'], " ").replace(char::is_control, "")
}

/// Writes the reason for the end of the program to standard error, as text or as a JSON object,
/// after all log lines. Waits at most 2 seconds for the reader.
pub fn write_final_error(sentence: &str) {
    let json = GLOBAL.get().is_some_and(|log| {
        log.end();
        log.0.json
    });
    let line = if json {
        object("ERROR", sentence)
    } else {
        format!("transom: {}\n", printable(sentence))
    };
    let print = |line: &str| {
        // Standard error may be closed. Then there is nothing else to do.
        io::stderr().write_all(line.as_bytes()).ok();
    };
    let (tell, told) = mpsc::channel();
    let text = line.clone();
    let body = move || {
        print(&text);
        tell.send(()).ok();
    };
    match Builder::new().name("last-word".into()).spawn(body) {
        Ok(_) => drop(told.recv_timeout(END_TIMEOUT)),
        Err(_) => print(&line),
    }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::{AsFd as _, OwnedFd};

    use super::*;

    const LEVELS: [Level; 4] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG];

    /// A log and the reading end of its pipe.
    fn log(json: bool) -> (Log, BufReader<io::PipeReader>) {
        let (reader, writer) = io::pipe().unwrap();
        let writer: &'static OwnedFd = Box::leak(Box::new(writer.into()));
        (Log::new(writer.as_fd(), json), BufReader::new(reader))
    }

    fn line(reader: &mut impl io::BufRead) -> String {
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    #[test]
    fn a_slow_reader_does_not_block_and_sees_a_gap_notice() {
        let (log, mut reader) = log(false);
        let pad = "x".repeat(1000);
        let all = 4 * MAX_QUEUED / pad.len();
        for number in 0..all {
            log.push(LEVELS[number % 4], format!("{number} {pad}\n").as_bytes());
        }
        let (mut next, mut gaps) = (0, 0);
        // Up to two gaps: the writing thread may fall behind twice.
        while next < all {
            let line = line(&mut reader);
            if let Some(said) = line.strip_prefix(" WARN ") {
                let (lost, said) = said.split_once(' ').unwrap();
                assert_eq!(said, "lines of the log are missing here: the reader was too slow");
                (next, gaps) = (next + lost.parse::<usize>().unwrap(), gaps + 1);
                continue;
            }
            assert_eq!(line, format!("{next} {pad}"));
            next += 1;
        }
        assert!(next == all && (1..=2).contains(&gaps), "{gaps} gaps, {next} lines");
        // Logging continues afterwards.
        log.push(Level::INFO, b"more\n");
        assert_eq!(line(&mut reader), "more");
        log.end();
    }

    #[test]
    fn a_flood_of_one_level_does_not_displace_other_levels() {
        let (log, reader) = log(false);
        let read = std::thread::spawn(move || {
            let lines = reader.lines().map(Result::unwrap);
            lines.take_while(|line| line != "end").map(|line| line.len()).sum::<usize>()
        });
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        for number in 0..500_000 {
            log.push(Level::TRACE, &line);
            if number % 10_000 == 0 {
                // Let the reader keep up.
                log.end_within(MINUTE);
            }
        }
        log.push(Level::INFO, b"end\n");
        log.end_within(MINUTE);
        let bytes = read.join().unwrap();
        assert!((1 << 20..6 << 20).contains(&bytes), "{bytes} bytes of 50 MB");
    }

    #[test]
    fn the_end_of_a_flood_is_logged() {
        let (log, reader) = log(false);
        let read = std::thread::spawn(move || {
            let told = reader.lines().map(Result::unwrap).find(|it| it.contains("left out"));
            told.unwrap_or_default()
        });
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        (0..50_000).for_each(|_| log.push(Level::TRACE, &line));
        // No further line of this level follows.
        log.end_within(MINUTE);
        let told = read.join().unwrap();
        assert!(told.contains("lines of TRACE are left out here"), "{told}");
    }

    #[test]
    fn log_lines_are_limited_per_minute() {
        let (mut limit, now) = (LineLimit::new(3), Instant::now());
        for minute in 0..3 {
            let lines = (0..50)
                .filter(|second| limit.take(now + minute * MINUTE + Duration::from_secs(*second)));
            assert_eq!(lines.count(), 3);
        }
    }

    #[test]
    fn the_whole_log_is_written_at_exit() {
        let (log, reader) = log(true);
        let count = 5000;
        let read = std::thread::spawn(move || reader.lines().take(count).count());
        for number in 0..count {
            log.push(Level::INFO, format!("{number}\n").as_bytes());
        }
        log.end_within(MINUTE);
        assert!(log.0.queue().bytes.is_empty() && !log.0.queue().writing);
        assert_eq!(read.join().unwrap(), count);
        let line: serde_json::Value = serde_json::from_str(&log.0.lost_line(7)).unwrap();
        assert!(line["fields"]["message"].as_str().unwrap().starts_with("7 lines"), "{line}");
    }
}
