//! The source's side of a migration: sends memory while the machine runs.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use super::pages::Contents;
use super::stream::{Message, Reader, Writer};
use crate::kvm::vm::Vm;
use crate::snapshot::memory::Limit;

/// How long the other end may be silent, or take nothing.
const PATIENCE: Duration = Duration::from_secs(30);
/// The part of the allowed pause, in percent, in which the rest of memory is sent. In the other
/// part the machine stops, and is built at the other end.
const SENDING: u32 = 60;
/// A round that leaves more than this part of the round before, in percent, slows the processors.
const PROGRESS: u64 = 70;
/// The steps in which processors are slowed, and the most, in percent of time that they stand.
const SLOWER: u64 = 15;
const SLOWEST: u64 = 90;
/// The time in which processors stand once.
const CYCLE: Duration = Duration::from_millis(50);
/// Rounds with the slowest processors, after which the migration fails.
const LAST_ROUNDS: u32 = 20;

/// The numbers of a migration that the operator sees.
#[derive(Default)]
pub struct Progress {
    sent: AtomicU64,
    left: AtomicU64,
    rounds: AtomicU64,
    /// How slow the processors are.
    slowed: AtomicU64,
    ended: AtomicBool,
}

impl Progress {
    pub fn show(&self) -> Value {
        let read = |it: &AtomicU64| it.load(Ordering::Relaxed);
        json!({
            "sent_bytes": read(&self.sent),
            "left_bytes": read(&self.left),
            "rounds": read(&self.rounds),
            "slowed_percent": read(&self.slowed),
        })
    }
}

/// Stops the processors for this time. Returns false if the machine is gone.
pub type Brake = Box<dyn Fn(Duration) -> bool + Send>;

pub struct Departure {
    to: Writer<UnixStream>,
    from: Reader<UnixStream>,
    vm: Arc<Vm>,
    contents: Contents,
    /// The files of the disks.
    files: Vec<Arc<File>>,
    pause: Duration,
    limit: Limit,
    progress: Arc<Progress>,
}

/// The limits that the operator sets.
#[derive(Clone, Copy)]
pub struct Limits {
    pub pause: Duration,
    pub within: Option<u16>,
}

impl Departure {
    /// The machine must be parked, and records its writes.
    pub fn new(
        stream: OwnedFd,
        vm: Arc<Vm>,
        (contents, files): (Contents, Vec<Arc<File>>),
        limits: Limits,
    ) -> anyhow::Result<Self> {
        let stream = UnixStream::from(stream);
        stream.set_read_timeout(Some(PATIENCE)).context("the stream")?;
        stream.set_write_timeout(Some(PATIENCE)).context("the stream")?;
        stream.set_nonblocking(false).context("the stream")?;
        let from = stream.try_clone().context("the stream")?;
        let (to, from) = (Writer::new(stream)?, Reader::new(from));
        let (pause, limit) = (limits.pause, Limit::new(limits.within));
        Ok(Self { to, from, vm, contents, files, pause, limit, progress: Arc::default() })
    }

    pub fn progress(&self) -> Arc<Progress> {
        self.progress.clone()
    }

    /// Sends memory until the rest can be sent within the allowed pause.
    pub fn prepare(&mut self, hello: &[u8], brake: Brake) -> anyhow::Result<()> {
        let progress = self.progress.clone();
        let slower = move || slow(&progress, &brake);
        Builder::new().name("brake".into()).spawn(slower).context("a thread for the brake")?;
        let prepared = self.rounds(hello);
        self.progress.ended.store(true, Ordering::Relaxed);
        prepared
    }

    fn rounds(&mut self, hello: &[u8]) -> anyhow::Result<()> {
        self.to.send(&Message::Hello(hello))?;
        self.answer().context("the other end refuses the machine")?;
        let mut start = Instant::now();
        self.contents.send_all(&mut self.to)?;
        self.write_back();
        let (mut sent, mut before, mut slowest) = (0, u64::MAX, 0);
        loop {
            self.to.send(&Message::Sync)?;
            self.answer()?;
            self.limit.check().context("the migration")?;
            let rate = (self.contents.sent - sent) as f64 / start.elapsed().as_secs_f64();
            self.vm.collect_writes()?;
            let left = self.contents.written();
            self.progress.count(self.contents.sent, left);
            let allowed = (self.pause * SENDING / 100).as_secs_f64() * rate;
            tracing::debug!(left, rate, "migration: a round has ended");
            if left as f64 <= allowed {
                return Ok(());
            }
            slowest += u32::from(self.progress.slow(left > before / 100 * PROGRESS));
            ensure!(
                slowest < LAST_ROUNDS,
                "the guest writes {left} bytes while the connection transfers {rate:.0} bytes in a \
                 second: allow a longer pause (`pause {}`), or use a faster network",
                self.pause.as_millis() * 4
            );
            // A short round tells little about the rate: the next one adds to it.
            if self.contents.sent - sent > MEASURED {
                (sent, start) = (self.contents.sent, Instant::now());
            }
            before = left;
            self.write_back();
            self.contents.send_written(&mut self.to)?;
        }
    }

    /// Makes most of what the guest has written to disks durable, so that little is left for the
    /// pause. An error shows itself then.
    fn write_back(&self) {
        self.files.iter().for_each(|file| {
            file.sync_data().ok();
        });
    }

    /// Sends the rest of memory, of a machine that stands still, and its state. The other end has
    /// all that it needs then.
    pub fn finish(&mut self) -> anyhow::Result<()> {
        self.vm.collect_writes()?;
        self.contents.send_written(&mut self.to)
    }

    pub fn send_state(&mut self, state: &[u8]) -> anyhow::Result<()> {
        self.to.send(&Message::State(state))
    }

    /// Waits for the other end's answer.
    pub fn answer(&mut self) -> anyhow::Result<()> {
        let Message::Answer(bytes) = self.from.receive()? else {
            bail!("the other end does not answer: the stream is damaged");
        };
        let answer: Value = serde_json::from_slice(bytes).context("an answer that is no JSON")?;
        match answer["error"].as_str() {
            Some(error) => Err(Refused(error.chars().take(2000).collect()).into()),
            None => Ok(()),
        }
    }

    /// Lets the machine run at the other end.
    pub fn let_go(&mut self) -> anyhow::Result<()> {
        self.to.send(&Message::Go)
    }

    pub fn sent(&self) -> u64 {
        self.contents.sent
    }
}

/// The other end's error: it has not run the machine, and will not.
#[derive(Debug)]
pub struct Refused(String);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refused {}

/// Bytes after which the rate is measured anew.
const MEASURED: u64 = 32 << 20;

impl Progress {
    fn count(&self, sent: u64, left: u64) {
        self.sent.store(sent, Ordering::Relaxed);
        self.left.store(left, Ordering::Relaxed);
        self.rounds.fetch_add(1, Ordering::Relaxed);
    }

    /// Slows the processors if the rounds do not get shorter. Returns whether they are as slow as
    /// they get.
    fn slow(&self, slower: bool) -> bool {
        let now = self.slowed.load(Ordering::Relaxed);
        let next = if slower { (now + SLOWER).min(SLOWEST) } else { now };
        self.slowed.store(next, Ordering::Relaxed);
        next == SLOWEST
    }
}

/// Stops the processors for a part of each cycle, until the migration ends.
fn slow(progress: &Progress, brake: &Brake) {
    while !progress.ended.load(Ordering::Relaxed) {
        let percent = u32::try_from(progress.slowed.load(Ordering::Relaxed)).unwrap_or(0);
        if percent > 0 && !brake(CYCLE * percent / 100) {
            return;
        }
        sleep(CYCLE);
    }
}
