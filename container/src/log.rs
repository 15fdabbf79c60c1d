//! The log, for whoever reads standard output: nobody here waits for them.
//!
//! A reader that stalls would stop whoever says something, signals included, so that a thread of
//! its own writes what others leave. What finds no room is left out, and how much that was is said
//! where it is missing.
//!
//! Whatever others make us say is bounded, as a last resort even here: each level has a
//! [`Bucket`], which none of our own messages empties.

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

/// Bytes that wait for a reader.
const MOST: usize = 1 << 20;
/// So long readers have at the end.
const LAST: Duration = Duration::from_secs(2);
const MINUTE: Duration = Duration::from_secs(60);

/// See the module.
#[derive(Clone)]
pub struct Log(Arc<Shared>);

struct Shared {
    out: BorrowedFd<'static>,
    /// Lines are objects.
    json: bool,
    left: Mutex<Left>,
    changed: Condvar,
}

/// The log of this process.
static OWN: OnceLock<Log> = OnceLock::new();

/// What was left to be written.
struct Left {
    bytes: Vec<u8>,
    /// Lines that may come, by their level: the first is the gravest.
    buckets: [Bucket; 5],
    /// Lines that found no room after these bytes.
    lost: u64,
    /// There is a thread that writes.
    served: bool,
    /// It writes what was left before.
    busy: bool,
}

/// The place of a level among the buckets.
fn place(level: Level) -> usize {
    match level {
        Level::ERROR => 0,
        Level::WARN => 1,
        Level::INFO => 2,
        Level::DEBUG => 3,
        Level::TRACE => 4,
    }
}

impl Log {
    /// To be written there, in lines of text or of JSON. The first line starts the thread.
    pub fn new(out: BorrowedFd<'static>, json: bool) -> Self {
        let buckets = [(); 5].map(|()| Bucket::new(PROGRAM));
        let left = Left { bytes: Vec::new(), buckets, lost: 0, served: false, busy: false };
        let (left, changed) = (Mutex::new(left), Condvar::new());
        Self(Arc::new(Shared { out, json, left, changed }))
    }

    /// From now on this is the log of this process.
    pub fn own(&self) {
        OWN.get_or_init(|| self.clone());
    }

    /// Waits until all is written; if nobody reads, not for long.
    pub fn end(&self) {
        self.end_within(LAST);
    }

    fn end_within(&self, time: Duration) {
        self.tell_missing();
        let Shared { changed, .. } = &*self.0;
        let waits = |left: &mut Left| left.busy || !left.bytes.is_empty();
        // What was not written by now is not wanted.
        drop(changed.wait_timeout_while(self.0.left(), time, waits));
    }

    /// Says of each level how many lines were left out and not told of yet.
    fn tell_missing(&self) {
        let mut left = self.0.left();
        if !left.served {
            return;
        }
        for level in [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE] {
            let count = left.buckets[place(level)].missing();
            self.0.left_out(&mut left, count, level);
        }
        self.0.changed.notify_all();
    }

    fn leave(&self, level: Level, line: &[u8]) {
        let mut left = self.0.left();
        let Some(before) = left.buckets[place(level)].take(line.len(), Instant::now()) else {
            return;
        };
        self.0.left_out(&mut left, before, level);
        if !left.served {
            let shared = self.0.clone();
            let body = move || shared.serve();
            left.served = Builder::new().name("log".into()).spawn(body).is_ok();
        }
        if !left.served {
            drop(left);
            write(self.0.out, line);
        } else if left.lost > 0 || left.bytes.len() + line.len() > MOST {
            left.lost += 1;
        } else {
            left.bytes.extend(line);
            self.0.changed.notify_all();
        }
    }
}

impl Shared {
    fn left(&self) -> MutexGuard<'_, Left> {
        // What a thread that panicked left is lines, and whole ones.
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says how many lines of a level were left out, if there were some.
    fn left_out(&self, left: &mut Left, count: u64, level: Level) {
        if count > 0 {
            let missing = self.line(&format!("{count} lines of {level} are left out here"));
            left.bytes.extend(missing.as_bytes());
        }
    }

    /// Writes whatever is left, for ever.
    fn serve(&self) {
        jail::seclude();
        let mut left = self.left();
        loop {
            let empty = |left: &mut Left| left.bytes.is_empty();
            left = self.changed.wait_while(left, empty).unwrap_or_else(PoisonError::into_inner);
            let (bytes, lost) = (mem::take(&mut left.bytes), mem::take(&mut left.lost));
            left.busy = true;
            drop(left);
            write(self.out, &bytes);
            if lost > 0 {
                write(self.out, self.missing(lost).as_bytes());
            }
            left = self.left();
            left.busy = false;
            self.changed.notify_all();
        }
    }

    /// A line in the place of so many.
    fn missing(&self, lost: u64) -> String {
        self.line(&format!("{lost} lines of the log are missing here: nobody read it"))
    }

    fn line(&self, text: &str) -> String {
        if self.json { object("WARN", text) } else { format!(" WARN {text}\n") }
    }
}

/// A line for programs.
fn object(level: &str, text: &str) -> String {
    format!("{}\n", json!({ "level": level, "fields": { "message": text } }))
}

/// Writes all of it, unless nobody will ever read it.
fn write(out: BorrowedFd<'_>, mut bytes: &[u8]) {
    while !bytes.is_empty() {
        match rustix::io::write(out, bytes) {
            Ok(count) => bytes = &bytes[count.min(bytes.len())..],
            Err(Errno::INTR) => {}
            // Somebody else who has it wants it so.
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::new(&out, PollFlags::OUT)], None).ok();
            }
            Err(_) => return,
        }
    }
}

/// Writes lines of one level.
pub struct Leveled<'a>(&'a Log, Level);

/// A line comes as a whole.
impl Write for Leveled<'_> {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        self.0.leave(self.1, line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Leveled<'a>;

    fn make_writer(&'a self) -> Leveled<'a> {
        Leveled(self, Level::INFO)
    }

    fn make_writer_for(&'a self, about: &Metadata<'_>) -> Leveled<'a> {
        Leveled(self, *about.level())
    }
}

/// So many lines in a minute, where others choose how many there are.
pub struct Few {
    most: u32,
    left: u32,
    /// When the present minute began.
    since: Option<Instant>,
}

impl Few {
    /// None were said yet.
    pub const fn new(most: u32) -> Self {
        Self { most, left: most, since: None }
    }

    /// Whether one more may be said now.
    pub fn take(&mut self, now: Instant) -> bool {
        if self.since.is_none_or(|since| now.duration_since(since) >= MINUTE) {
            (self.since, self.left) = (Some(now), self.most);
        }
        let may = self.left > 0;
        self.left -= u32::from(may);
        may
    }
}

/// Says why the program ends, on standard error, in text or an object of JSON, after all that was
/// logged; if nobody reads there, not for long.
pub fn last_word(sentence: &str) {
    let json = OWN.get().is_some_and(|log| {
        log.end();
        log.0.json
    });
    let line = if json { object("ERROR", sentence) } else { format!("transom: {sentence}\n") };
    let say = |line: &str| {
        // It may be closed, and then nobody wants to know.
        io::stderr().write_all(line.as_bytes()).ok();
    };
    let (tell, told) = mpsc::channel();
    let text = line.clone();
    let body = move || {
        say(&text);
        tell.send(()).ok();
    };
    match Builder::new().name("last-word".into()).spawn(body) {
        Ok(_) => drop(told.recv_timeout(LAST)),
        Err(_) => say(&line),
    }
}

#[cfg(test)]
mod test {
    use std::io::{BufRead as _, BufReader};
    use std::os::fd::{AsFd as _, OwnedFd};

    use super::*;

    const LEVELS: [Level; 4] = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG];

    /// A log, and its reader.
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
    fn nobody_waits_for_a_reader_who_is_told_what_is_missing() {
        let (log, mut reader) = log(false);
        let pad = "x".repeat(1000);
        let all = 4 * MOST / pad.len();
        for number in 0..all {
            log.leave(LEVELS[number % 4], format!("{number} {pad}\n").as_bytes());
        }
        let (mut next, mut gaps) = (0, 0);
        // There are two gaps where the thread that writes came late.
        while next < all {
            let line = line(&mut reader);
            if let Some(said) = line.strip_prefix(" WARN ") {
                let (lost, said) = said.split_once(' ').unwrap();
                assert_eq!(said, "lines of the log are missing here: nobody read it");
                (next, gaps) = (next + lost.parse::<usize>().unwrap(), gaps + 1);
                continue;
            }
            assert_eq!(line, format!("{next} {pad}"));
            next += 1;
        }
        assert!(next == all && (1..=2).contains(&gaps), "{gaps} gaps, {next} lines");
        // And it goes on.
        log.leave(Level::INFO, b"more\n");
        assert_eq!(line(&mut reader), "more");
        log.end();
    }

    #[test]
    fn a_flood_of_one_level_leaves_the_others_their_room() {
        let (log, reader) = log(false);
        let read = std::thread::spawn(move || {
            let lines = reader.lines().map(Result::unwrap);
            lines.take_while(|line| line != "end").map(|line| line.len()).sum::<usize>()
        });
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        for number in 0..500_000 {
            log.leave(Level::TRACE, &line);
            if number % 10_000 == 0 {
                // The reader keeps up.
                log.end_within(MINUTE);
            }
        }
        log.leave(Level::INFO, b"end\n");
        log.end_within(MINUTE);
        let bytes = read.join().unwrap();
        assert!((1 << 20..6 << 20).contains(&bytes), "{bytes} bytes of 50 MB");
    }

    #[test]
    fn the_end_of_a_flood_is_told_of() {
        let (log, reader) = log(false);
        let read = std::thread::spawn(move || {
            let told = reader.lines().map(Result::unwrap).find(|it| it.contains("left out"));
            told.unwrap_or_default()
        });
        let line = [b"x".repeat(99), b"\n".to_vec()].concat();
        (0..50_000).for_each(|_| log.leave(Level::TRACE, &line));
        // Nothing more comes of this level.
        log.end_within(MINUTE);
        let told = read.join().unwrap();
        assert!(told.contains("lines of TRACE are left out here"), "{told}");
    }

    #[test]
    fn a_minute_has_its_lines_and_the_next_one_others() {
        let (mut few, now) = (Few::new(3), Instant::now());
        for minute in 0..3 {
            let said = (0..50)
                .filter(|second| few.take(now + minute * MINUTE + Duration::from_secs(*second)));
            assert_eq!(said.count(), 3);
        }
    }

    #[test]
    fn all_is_written_at_the_end() {
        let (log, reader) = log(true);
        let count = 5000;
        let read = std::thread::spawn(move || reader.lines().take(count).count());
        for number in 0..count {
            log.leave(Level::INFO, format!("{number}\n").as_bytes());
        }
        log.end_within(MINUTE);
        assert!(log.0.left().bytes.is_empty() && !log.0.left().busy);
        assert_eq!(read.join().unwrap(), count);
        let line: serde_json::Value = serde_json::from_str(&log.0.missing(7)).unwrap();
        assert!(line["fields"]["message"].as_str().unwrap().starts_with("7 lines"), "{line}");
    }
}
