//! The source's side of a migration: sends memory while the machine runs.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde_json::Value;

use super::pages::{Outgoing, Progress};
use super::stream::{Message, Reader, Writer};
use crate::kvm::vm::Vm;
use crate::snapshot::memory::Limit;

/// How long the other end may be silent, or take nothing.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);
/// The same while the machine stands still, and the limit for the rest of its memory.
const HAND_OVER_SECONDS: u16 = 10;
/// The part of the allowed pause, in percent, in which the rest of memory is sent. In the other
/// part the machine stops, and is built at the other end, which takes tens of milliseconds.
const SENDING_PERCENT: u32 = 60;
/// If a round leaves more than this part of the round before, in percent, the next would not be
/// much shorter: the processors are slowed.
const PROGRESS_PERCENT: u64 = 70;
/// The steps in which processors are slowed, and the most.
const THROTTLE_STEP: u64 = 15;
const MAX_THROTTLE: u64 = 99;
/// In each cycle, slowed processors stand for a part of this time. On a busy host, to stop and to
/// start them takes milliseconds, in which the guest writes. So the slowest processors have a cycle
/// as long as the allowed pause, within limits.
const CYCLE: Duration = Duration::from_millis(50);
const MAX_CYCLE: Duration = Duration::from_millis(300);
/// How long the end of the last round may be overlooked.
const STEP: Duration = Duration::from_millis(5);
/// Rounds with the slowest processors, after which the migration fails.
const LAST_ROUNDS: u32 = 20;
/// Bytes after which the rate is measured anew. The time of fewer tells little.
const MEASURED: u64 = 32 << 20;

/// Asks the main thread to stop the processors. Returns false if the machine is gone.
pub type Brake = Box<dyn Fn(Slow) -> bool + Send>;

/// How long the processors are to stand. The next one is asked for when this one is dropped.
pub struct Slow {
    time: Duration,
    done: Arc<AtomicBool>,
    ended: Arc<AtomicBool>,
}

impl Slow {
    /// Waits for this time, or until memory has been sent.
    pub fn wait(&self) {
        let start = Instant::now();
        while !self.ended.load(Ordering::Relaxed) {
            let left = self.time.saturating_sub(start.elapsed());
            if left.is_zero() {
                return;
            }
            sleep(left.min(STEP));
        }
    }
}

impl Drop for Slow {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
    }
}

pub struct Departure {
    stream: UnixStream,
    to: Writer<UnixStream>,
    from: Reader<UnixStream>,
    vm: Arc<Vm>,
    memory: Outgoing,
    /// The files of the disks.
    files: Vec<Arc<File>>,
    pause: Duration,
    /// The migration has ended.
    ended: Arc<AtomicBool>,
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
        (mut memory, files): (Outgoing, Vec<Arc<File>>),
        limits: Limits,
    ) -> anyhow::Result<Self> {
        let stream = UnixStream::from(stream);
        stream.set_read_timeout(Some(ANSWER_TIMEOUT)).context("the stream")?;
        stream.set_write_timeout(Some(ANSWER_TIMEOUT)).context("the stream")?;
        stream.set_nonblocking(false).context("the stream")?;
        let [to, from] = [stream.try_clone(), stream.try_clone()];
        let (to, from) = (to.context("the stream")?, from.context("the stream")?);
        let (to, from) = (Writer::new(to)?, Reader::new(from));
        memory.meter.limit = Limit::new(limits.within);
        Ok(Self { stream, to, from, vm, memory, files, pause: limits.pause, ended: Arc::default() })
    }

    pub fn progress(&self) -> Arc<Progress> {
        self.memory.meter.progress.clone()
    }

    /// Sends memory until the rest can be sent within the allowed pause.
    pub fn prepare(&mut self, hello: &[u8], brake: Brake) -> anyhow::Result<()> {
        let (progress, ended) = (self.progress(), self.ended.clone());
        let longest = self.pause.clamp(CYCLE, MAX_CYCLE);
        let body = move || throttle(&progress, &ended, longest, &brake);
        Builder::new().name("throttle".into()).spawn(body).context("a thread")?;
        let prepared = self.rounds(hello);
        self.ended.store(true, Ordering::Relaxed);
        prepared
    }

    fn rounds(&mut self, hello: &[u8]) -> anyhow::Result<()> {
        self.to.send(&Message::Hello(hello))?;
        self.answer().context("the other end does not take the machine")?;
        let mut start = Instant::now();
        self.memory.send_all(&mut self.to)?;
        let (mut moved, mut before, mut last_rounds) = (0, u64::MAX, 0);
        loop {
            self.write_back();
            self.to.send(&Message::Sync)?;
            self.answer()?;
            let rate = (self.memory.meter.moved - moved) as f64 / start.elapsed().as_secs_f64();
            self.vm.collect_writes()?;
            let left = self.memory.written();
            let progress = self.progress();
            progress.left.store(left, Ordering::Relaxed);
            progress.rounds.fetch_add(1, Ordering::Relaxed);
            let allowed = (self.pause * SENDING_PERCENT / 100).as_secs_f64() * rate;
            tracing::debug!(left, rate, "migration: a round has ended");
            if left as f64 <= allowed {
                return Ok(());
            }
            let slower = left > before / 100 * PROGRESS_PERCENT;
            last_rounds += u32::from(progress.slow_down(slower));
            ensure!(
                last_rounds < LAST_ROUNDS,
                "the guest writes {left} bytes while {rate:.0} bytes are sent in a second: allow \
                 a pause of {:.0} ms, or use a faster connection",
                left as f64 / rate.max(1.0) * 1e3 * 100.0 / f64::from(SENDING_PERCENT) + 1.0
            );
            if self.memory.meter.moved - moved > MEASURED {
                (moved, start) = (self.memory.meter.moved, Instant::now());
            }
            before = left;
            self.memory.send_written(&mut self.to)?;
        }
    }

    /// Makes most of what the guest has written to disks durable, so that little is left for the
    /// pause. If this fails, the machine's own flush, on another open file, fails as well.
    fn write_back(&self) {
        self.files.iter().for_each(|file| {
            file.sync_data().ok();
        });
    }

    /// Sends the rest of the memory of a machine that stands still, which must not take long.
    pub fn send_rest(&mut self) -> anyhow::Result<()> {
        self.memory.meter.limit = Limit::new(Some(HAND_OVER_SECONDS));
        let timeout = Some(Duration::from_secs(HAND_OVER_SECONDS.into()));
        self.stream.set_read_timeout(timeout).context("the stream")?;
        self.stream.set_write_timeout(timeout).context("the stream")?;
        self.vm.collect_writes()?;
        self.memory.send_written(&mut self.to)
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
        self.memory.meter.sent
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

impl Progress {
    /// Slows the processors, if they are to be slower. Returns whether they are as slow as they
    /// get.
    fn slow_down(&self, slower: bool) -> bool {
        let now = self.throttle.load(Ordering::Relaxed);
        let next = if slower { (now + THROTTLE_STEP).min(MAX_THROTTLE) } else { now };
        self.throttle.store(next, Ordering::Relaxed);
        next == MAX_THROTTLE
    }
}

/// Stops the processors for a part of each cycle, until the migration ends.
fn throttle(progress: &Progress, ended: &Arc<AtomicBool>, longest: Duration, brake: &Brake) {
    let done = Arc::new(AtomicBool::new(true));
    while !ended.load(Ordering::Relaxed) {
        let percent = progress.throttle.load(Ordering::Relaxed);
        let cycle = if percent == MAX_THROTTLE { longest } else { CYCLE };
        // If the main thread is late, requests must not pile up.
        if percent > 0 && done.swap(false, Ordering::Relaxed) {
            let time = cycle * u32::try_from(percent).unwrap_or(0) / 100;
            let slow = Slow { time, done: done.clone(), ended: ended.clone() };
            if !brake(slow) {
                return;
            }
        }
        sleep(cycle);
    }
}
