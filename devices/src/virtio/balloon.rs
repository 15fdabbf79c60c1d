//! virtio-balloon: the guest gives memory back, and gets it again (VIRTIO 1.3, 5.5). Inflating,
//! deflating, statistics, and reporting of free pages.
//!
//! Pages that come are released on the host's side before the driver is told that they were used;
//! one that the guest touches again is simply there, as zeros. So nothing is done on deflation, and
//! a driver need not wait for it (MUST_TELL_HOST is not offered).
//!
//! **Page frame numbers.** They have 4 bytes (5.5.6). Windows' driver sends 8, up to 4096 bytes a
//! request, and nothing that it negotiates tells. Below 16 TiB of memory the upper halves are
//! zeros, and no guest gives page 0 away, where PCs have their real-mode vectors: so all are read
//! as 4 bytes, page 0 is skipped, and both kinds of driver are understood.
//!
//! **Queues.** The one for reports has number 4, and 3 with Linux, which does not count the queue
//! of a feature that is not there: it is the last that the driver enabled.
//!
//! Threats: the guest names any pages, as often as it likes. It can only release RAM of its own,
//! which costs it the contents. Of a request at most [`LIMIT`] bytes are looked at, and after
//! [`ROUND`] requests it is asked whether to stop, so that neither a reset nor a pause waits for
//! long. What it tells of itself is kept in a fixed number of numbers, and believed by nobody.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use vm_memory::{GuestMemoryBackend, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Chain, Identity, Queue, Signal, Virtio, next, on_pci};
use crate::balloon::{self, Report};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants};
use crate::hypervisor::Host;
use crate::pci::Address;
use crate::worker::Worker;
use host::memory::{Memory, Piece};
use host::size::Size;

/// `--device virtio-balloon,size=1G`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// Its PCI slot; the first that is free if there is none given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// Memory that the guest shall have at first, until `vmm ctl balloon` says otherwise; all of it
    /// if there is none given.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// A guest that runs out of memory takes back what it needs.
    pub deflate_on_oom: bool,
    /// The guest reports what it does not use, and the host has it until it is used.
    pub reporting: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { slot: None, size: None, deflate_on_oom: true, reporting: true }
    }
}

/// Features (5.5.3).
const STATS_VQ: u64 = 1 << 1;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const PAGE_POISON: u64 = 1 << 4;
const REPORTING: u64 = 1 << 5;

/// Queues (5.5.2): the first three have their places, the one for reports is the last.
const INFLATE: u16 = 0;
const STATISTICS: u16 = 2;
const REPORTS: u16 = 4;
const ENTRIES: u16 = 128;

/// The configuration (5.5.4): `num_pages`, `actual`, `free_page_hint_cmd_id`, `poison_val`.
const ACTUAL: Range<usize> = 4..8;
const POISON: Range<usize> = 12..16;
const CONFIG_SIZE: usize = 16;

/// What page frame numbers count, whatever the sizes of pages are.
const PAGE: u64 = 4096;
/// Bytes of page frame numbers in one request: Linux sends 1024, Windows 4096.
const LIMIT: u64 = 16 << 10;
/// Requests between two looks whether to stop.
const ROUND: usize = 16;

/// What a guest tells of its memory (5.5.6.3), by number. Linux has more than the specification.
const NAMES: [&str; 16] = [
    "swap-in",
    "swap-out",
    "major-faults",
    "minor-faults",
    "free-memory",
    "total-memory",
    "available-memory",
    "disk-caches",
    "hugetlb-allocations",
    "hugetlb-failures",
    "oom-kills",
    "allocation-stalls",
    "async-scans",
    "direct-scans",
    "async-reclaims",
    "direct-reclaims",
];
/// Bytes of one: a number and a value.
const STATISTIC: usize = 10;
/// Most of one answer.
const STATISTICS_LIMIT: u64 = 64 * STATISTIC as u64;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let shared = grants.shared().clone();
        let ram = shared.memory.ram().ok().context("a machine without memory")?;
        let ram: u64 = ram.iter().map(GuestMemoryRegion::len).sum();
        let size = self.size.map_or(ram, |size| size.0);
        ensure!(
            size <= ram,
            "size={} is more than the machine's memory, which is {}",
            Size(size),
            Size(ram)
        );
        let gauge = Arc::new(Gauge::new(ram, size)?);
        shared.balloon.register(&gauge)?;
        let mut features = STATS_VQ;
        for (wanted, feature) in
            [(self.deflate_on_oom, DEFLATE_ON_OOM), (self.reporting, REPORTING | PAGE_POISON)]
        {
            features |= if wanted { feature } else { 0 };
        }
        on_pci(Balloon { gauge, host: shared.host, features, worker: None }, self.slot, grants)
    }
}

/// What the operator, the processors' threads and the worker share.
struct Gauge {
    /// Bytes of RAM.
    ram: u64,
    /// Pages that the guest is asked to give.
    target: AtomicU32,
    /// The operator said so in this process, which counts more than what was saved in another.
    chosen: AtomicBool,
    /// Pages that it has given, by its own account.
    actual: AtomicU32,
    /// What it fills free pages with.
    poison: AtomicU32,
    /// Rung when somebody wants statistics.
    ask: Arc<EventFd>,
    told: Mutex<Told>,
    news: Condvar,
}

/// What is known while the driver runs, and what it said.
#[derive(Default)]
struct Told {
    /// There between start and stop.
    signal: Option<Arc<Signal>>,
    /// The target changed while there was nobody to tell.
    unsaid: bool,
    /// It has a queue for statistics.
    speaks: bool,
    statistics: [Option<u64>; NAMES.len()],
    heard: Option<Instant>,
}

impl Gauge {
    fn new(ram: u64, size: u64) -> anyhow::Result<Self> {
        let gauge = Self {
            ram,
            target: AtomicU32::new(0),
            chosen: AtomicBool::new(false),
            actual: AtomicU32::new(0),
            poison: AtomicU32::new(0),
            ask: Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for the balloon")?),
            told: Mutex::default(),
            news: Condvar::new(),
        };
        gauge.target.store(gauge.pages(size), Ordering::Release);
        Ok(gauge)
    }

    /// Pages to give for so many bytes to have.
    fn pages(&self, size: u64) -> u32 {
        u32::try_from(self.ram.saturating_sub(size) / PAGE).unwrap_or(u32::MAX)
    }

    /// Bytes to have when so many pages are given.
    fn size(&self, pages: &AtomicU32) -> u64 {
        self.ram.saturating_sub(u64::from(pages.load(Ordering::Acquire)) * PAGE)
    }

    fn told(&self) -> MutexGuard<'_, Told> {
        self.told.lock().expect("no device panicked")
    }

    fn aim(&self, pages: u32) {
        let before = self.target.swap(pages, Ordering::AcqRel);
        let mut told = self.told();
        if before == pages {
            return;
        }
        match &told.signal {
            Some(signal) => signal.configuration(),
            None => told.unsaid = true,
        }
    }

    /// The driver has the device from now on, or no longer.
    fn connect(&self, signal: Option<Arc<Signal>>, speaks: bool) {
        let mut told = self.told();
        if let Some(signal) = &signal
            && std::mem::take(&mut told.unsaid)
        {
            signal.configuration();
        }
        (told.signal, told.speaks) = (signal, speaks);
        self.news.notify_all();
    }

    /// Takes what the guest tells of itself.
    fn hear(&self, bytes: &[u8]) {
        let mut statistics = [None; NAMES.len()];
        for entry in bytes.chunks_exact(STATISTIC) {
            let Some((number, value)) = entry.split_first_chunk() else { continue };
            let Some(value) = value.first_chunk() else { continue };
            let number = usize::from(u16::from_le_bytes(*number));
            // All ones is what a guest says that does not know.
            let value = Some(u64::from_le_bytes(*value)).filter(|value| *value != u64::MAX);
            if let Some(place) = statistics.get_mut(number) {
                *place = value;
            }
        }
        let mut told = self.told();
        (told.statistics, told.heard) = (statistics, Some(Instant::now()));
        self.news.notify_all();
    }

    /// What a driver told is of no interest after it.
    fn forget(&self) {
        let mut told = self.told();
        (told.statistics, told.heard) = ([None; NAMES.len()], None);
    }
}

impl balloon::Balloon for Gauge {
    fn set(&self, bytes: u64) {
        self.chosen.store(true, Ordering::Release);
        self.aim(self.pages(bytes));
    }

    fn report(&self, wait: Duration) -> Report {
        let mut told = self.told();
        if told.speaks && !wait.is_zero() {
            let asked = Instant::now();
            self.ask.write(1).ok();
            let silent = |told: &mut Told| told.speaks && told.heard.is_none_or(|it| it < asked);
            let waited = self.news.wait_timeout_while(told, wait, silent);
            told = waited.expect("no device panicked").0;
        }
        let named = NAMES.into_iter().zip(told.statistics);
        Report {
            target: self.size(&self.target),
            actual: self.size(&self.actual),
            statistics: named.filter_map(|(name, value)| Some((name, value?))).collect(),
            age: told.heard.map(|heard| heard.elapsed()),
        }
    }
}

/// What of it is saved.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    target: u32,
    actual: u32,
    poison: u32,
}

struct Balloon {
    gauge: Arc<Gauge>,
    host: Arc<dyn Host>,
    features: u64,
    worker: Option<Worker<Work>>,
}

impl Virtio for Balloon {
    fn identity(&self) -> Identity {
        let queues = if self.features & REPORTING == 0 { STATISTICS } else { REPORTS } + 1;
        Identity {
            id: 5,
            name: "balloon",
            class: 0x00_ff00,
            queues: vec![ENTRIES; queues.into()],
            features: self.features,
        }
    }

    fn config(&self) -> Vec<u8> {
        let Gauge { target, actual, poison, .. } = &*self.gauge;
        let none = AtomicU32::new(0);
        let fields = [target, actual, &none, poison];
        fields.iter().flat_map(|it| it.load(Ordering::Acquire).to_le_bytes()).collect()
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        let mut bytes = [0; CONFIG_SIZE];
        bytes.copy_from_slice(&self.config());
        bytes[offset..offset + data.len()].copy_from_slice(data);
        for (place, field) in [(ACTUAL, &self.gauge.actual), (POISON, &self.gauge.poison)] {
            let field_bytes = bytes[place].try_into().expect("four bytes");
            field.store(u32::from_le_bytes(field_bytes), Ordering::Release);
        }
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        let last = queues.iter().map(Queue::number).max().unwrap_or(0);
        let purpose = |number| match number {
            INFLATE => Purpose::Inflate,
            STATISTICS if negotiated & STATS_VQ != 0 => Purpose::Statistics,
            STATISTICS.. if negotiated & REPORTING != 0 && number == last => Purpose::Reports,
            _ => Purpose::Nothing,
        };
        let purposes: Vec<_> = queues.iter().map(|queue| purpose(queue.number())).collect();
        let speaks = purposes.contains(&Purpose::Statistics);
        let signal = queues.first().map(|queue| queue.signal().clone());
        let mut bells: Vec<_> = queues.iter().map(|queue| queue.bell().clone()).collect();
        bells.push(self.gauge.ask.clone());
        let work = Work {
            queues,
            purposes,
            poisoned: negotiated & PAGE_POISON != 0,
            gauge: self.gauge.clone(),
            host: self.host.clone(),
            waiting: None,
        };
        self.worker = Some(Worker::spawn("virtio-balloon", work, bells, Work::step)?);
        self.gauge.connect(signal, speaks);
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.gauge.connect(None, false);
        self.worker.take().map(|worker| worker.stop().end()).unwrap_or_default()
    }

    fn save(&self) -> Saved {
        let [target, actual, poison] = [&self.gauge.target, &self.gauge.actual, &self.gauge.poison]
            .map(|field| field.load(Ordering::Acquire));
        Saved::of(&State { target, actual, poison })
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take()?;
        // A reset does not change what the operator wants.
        if let Some(state) = &saved
            && !self.gauge.chosen.load(Ordering::Acquire)
        {
            self.gauge.aim(state.target);
        }
        let State { actual, poison, .. } = saved.unwrap_or_default();
        self.gauge.actual.store(actual, Ordering::Release);
        self.gauge.poison.store(poison, Ordering::Release);
        self.gauge.forget();
        Ok(())
    }
}

/// What a queue is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    /// Pages come.
    Inflate,
    /// The guest tells of itself, and gets its buffer back when it is asked to do so again.
    Statistics,
    /// Pages come that the guest does not use just now.
    Reports,
    /// Pages go back; whatever it is, it is acknowledged.
    Nothing,
}

/// What the worker has.
struct Work {
    queues: Vec<Queue>,
    /// Of each queue.
    purposes: Vec<Purpose>,
    /// The guest says what it fills free pages with.
    poisoned: bool,
    gauge: Arc<Gauge>,
    host: Arc<dyn Host>,
    /// The buffer in which it told of itself last, and its queue.
    waiting: Option<(usize, Chain)>,
}

impl Work {
    fn step(&mut self, at: usize) {
        if at == self.queues.len() {
            self.ask();
            return;
        }
        for _ in 0..ROUND {
            let Some(chain) = next(&mut self.queues[at]) else {
                self.queues[at].notify();
                return;
            };
            self.take(at, chain);
        }
        self.queues[at].notify();
        // There may be more, after those who want us to stop.
        self.queues[at].bell().write(1).ok();
    }

    fn take(&mut self, at: usize, chain: Chain) {
        let queue = &mut self.queues[at];
        match self.purposes[at] {
            Purpose::Inflate => release(&*self.host, frames(queue.memory(), &chain.readable)),
            // Pages that must keep their pattern cannot be replaced by zeros.
            Purpose::Reports if self.poisoned && self.gauge.poison.load(Ordering::Acquire) != 0 => {
            }
            Purpose::Reports => {
                release(&*self.host, chain.writable.iter().map(extent).collect());
            }
            Purpose::Statistics => {
                let length = super::length(&chain.readable).min(STATISTICS_LIMIT);
                let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
                if queue.memory().gather(&chain.readable, &mut bytes).is_ok() {
                    self.gauge.hear(&bytes);
                }
                // There is one such buffer; a driver with two has one back.
                if let Some((_, old)) = self.waiting.replace((at, chain)) {
                    queue.push(old, 0);
                }
                return;
            }
            Purpose::Nothing => {}
        }
        queue.push(chain, 0);
    }

    /// Has the guest tell of itself: it gets its buffer back.
    fn ask(&mut self) {
        if let Some((at, chain)) = self.waiting.take() {
            self.queues[at].push(chain, 0);
            self.queues[at].notify();
        }
    }

    fn end(mut self) -> Vec<Queue> {
        if let Some((at, chain)) = self.waiting.take() {
            self.queues[at].undo(chain);
        }
        self.queues
    }
}

/// Gives ranges back to the host, as few and as large as they can be.
fn release(host: &dyn Host, mut ranges: Vec<Range<u64>>) {
    ranges.sort_unstable_by_key(|range| range.start);
    let mut ranges = ranges.into_iter().filter(|range| !range.is_empty());
    let Some(mut whole) = ranges.next() else { return };
    for range in ranges {
        if range.start <= whole.end {
            whole.end = whole.end.max(range.end);
        } else {
            host.release(std::mem::replace(&mut whole, range));
        }
    }
    host.release(whole);
}

/// The pages of a request, if all of it is in memory. See above for how wide their numbers are.
fn frames(memory: &Memory, pieces: &[Piece]) -> Vec<Range<u64>> {
    let length = super::length(pieces).min(LIMIT);
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    if memory.gather(pieces, &mut bytes).is_err() {
        return Vec::new();
    }
    let (numbers, _) = bytes.as_chunks();
    let numbers = numbers.iter().map(|bytes| u64::from(u32::from_le_bytes(*bytes)));
    let used = numbers.filter(|number| *number != 0);
    used.map(|number| number * PAGE..(number + 1) * PAGE).collect()
}

fn extent(piece: &Piece) -> Range<u64> {
    piece.address..piece.address.saturating_add(piece.length.into())
}

#[cfg(test)]
mod test;
