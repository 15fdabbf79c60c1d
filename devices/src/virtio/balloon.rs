//! virtio-balloon: the guest lends memory to the host and takes it back (VIRTIO 1.3, 5.5). Supports
//! inflating, deflating, statistics, and free page reporting.
//!
//! Inflated pages are released on the host before the driver gets its buffer back. A page that the
//! guest touches again reads as zeros. Deflating therefore needs no work, and a driver need not
//! wait for it (MUST_TELL_HOST is not offered).
//!
//! **Page frame numbers** have 4 bytes (5.5.6). The Windows driver sends 8 bytes each, up to 4096
//! bytes for each request, and negotiates no feature that shows this. Below 16 TiB of memory the
//! upper halves are zero, and no guest gives page 0 away, because PCs have their real-mode vectors
//! there. So every number is read as 4 bytes and page 0 is skipped: this works for both kinds of
//! driver.
//!
//! **Queues.** The reporting queue has number 4. With Linux it has number 3, because Linux does not
//! count the queue of a feature that was not negotiated. It is always the last queue that the
//! driver enabled.
//!
//! Threats: the guest names any pages, as often as it likes. It can only release its own RAM, and
//! loses the contents. At most [`MAX_FRAME_BYTES`] of each request are read, and the worker checks
//! after [`BATCH`] requests whether it must stop, so resets and pauses are not delayed. Statistics
//! from the guest are stored in an array of fixed size, and nothing relies on them.

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
use crate::hypervisor::Hypervisor;
use crate::pci::Address;
use crate::worker::Worker;
use host::memory::{Memory, Piece};
use host::size::Size;

/// `--device virtio-balloon,size=1G`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// PCI slot. Defaults to the first free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// Memory that the guest has at first, until `vmm ctl balloon` changes it. Defaults to all
    /// memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<Size>,
    /// The guest may take memory back when it runs out of it.
    pub deflate_on_oom: bool,
    /// The guest reports its free pages, and the host reuses them until the guest needs them.
    pub reporting: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self { slot: None, size: None, deflate_on_oom: true, reporting: true }
    }
}

/// Feature bits (5.5.3).
const STATS_VQ: u64 = 1 << 1;
const DEFLATE_ON_OOM: u64 = 1 << 2;
const PAGE_POISON: u64 = 1 << 4;
const REPORTING: u64 = 1 << 5;

/// Queues (5.5.2). The first three have fixed numbers, the reporting queue is the last.
const INFLATE: u16 = 0;
const STATISTICS: u16 = 2;
const REPORTS: u16 = 4;
const ENTRIES: u16 = 128;

/// Fields of the configuration (5.5.4): `num_pages`, `actual`, `free_page_hint_cmd_id`,
/// `poison_val`.
const ACTUAL: Range<usize> = 4..8;
const POISON: Range<usize> = 12..16;
const CONFIG_SIZE: usize = 16;

/// Unit of page frame numbers, independent of the guest's page size.
const PAGE: u64 = 4096;
/// Limit for the page frame numbers of one request: Linux sends 1024 bytes, Windows 4096.
const MAX_FRAME_BYTES: u64 = 16 << 10;
/// Requests that the worker processes before it checks whether it must stop.
const BATCH: usize = 16;

/// Names of the guest's statistics (5.5.6.3), indexed by tag. Linux has more than the
/// specification.
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
/// Bytes of one statistic: a tag and a value.
const STATISTIC_SIZE: usize = 10;
const MAX_STATISTICS_BYTES: u64 = 64 * STATISTIC_SIZE as u64;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let shared = grants.shared().clone();
        let ram = shared.memory.ram().ok().context("a machine without memory")?;
        let ram: u64 = ram.iter().map(GuestMemoryRegion::len).sum();
        let size = self.size.map_or(ram, |size| size.0);
        ensure!(
            size <= ram,
            "size={}: the machine has only {} of memory: choose a smaller size",
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
        on_pci(
            Balloon { gauge, host: shared.hypervisor, features, worker: None },
            self.slot,
            grants,
        )
    }
}

/// State shared by the operator, the vCPU threads and the worker.
struct Gauge {
    /// Size of RAM, in bytes.
    ram: u64,
    /// Number of pages that the guest is asked to give.
    target: AtomicU32,
    /// The operator set the target in this process. A restored state does not override that.
    operator_set: AtomicBool,
    /// Number of pages that the guest has given, according to the guest.
    actual: AtomicU32,
    /// The pattern that the guest fills free pages with.
    poison: AtomicU32,
    /// Rung to request new statistics.
    ask: Arc<EventFd>,
    driver: Mutex<DriverState>,
    changed: Condvar,
}

#[derive(Default)]
struct DriverState {
    /// Some while the driver runs.
    signal: Option<Arc<Signal>>,
    /// The target changed while no driver ran.
    change_pending: bool,
    has_statistics: bool,
    statistics: [Option<u64>; NAMES.len()],
    updated: Option<Instant>,
}

impl Gauge {
    fn new(ram: u64, size: u64) -> anyhow::Result<Self> {
        let gauge = Self {
            ram,
            target: AtomicU32::new(0),
            operator_set: AtomicBool::new(false),
            actual: AtomicU32::new(0),
            poison: AtomicU32::new(0),
            ask: Arc::new(EventFd::new(EFD_NONBLOCK).context("an event for the balloon")?),
            driver: Mutex::default(),
            changed: Condvar::new(),
        };
        gauge.target.store(gauge.pages(size), Ordering::Release);
        Ok(gauge)
    }

    /// Converts the guest's memory size, in bytes, to a number of pages to give.
    fn pages(&self, size: u64) -> u32 {
        u32::try_from(self.ram.saturating_sub(size) / PAGE).unwrap_or(u32::MAX)
    }

    /// Converts a number of given pages to the guest's memory size, in bytes.
    fn size(&self, pages: &AtomicU32) -> u64 {
        self.ram.saturating_sub(u64::from(pages.load(Ordering::Acquire)) * PAGE)
    }

    fn driver(&self) -> MutexGuard<'_, DriverState> {
        self.driver.lock().expect("no device panicked")
    }

    fn set_target(&self, pages: u32) {
        let before = self.target.swap(pages, Ordering::AcqRel);
        let mut driver = self.driver();
        if before == pages {
            return;
        }
        match &driver.signal {
            Some(signal) => signal.configuration(),
            None => driver.change_pending = true,
        }
    }

    /// Called with the signal when the driver starts, and with None when it stops.
    fn connect(&self, signal: Option<Arc<Signal>>, has_statistics: bool) {
        let mut driver = self.driver();
        if let Some(signal) = &signal
            && std::mem::take(&mut driver.change_pending)
        {
            signal.configuration();
        }
        (driver.signal, driver.has_statistics) = (signal, has_statistics);
        self.changed.notify_all();
    }

    fn update_statistics(&self, bytes: &[u8]) {
        let mut statistics = [None; NAMES.len()];
        for entry in bytes.chunks_exact(STATISTIC_SIZE) {
            let Some((number, value)) = entry.split_first_chunk() else { continue };
            let Some(value) = value.first_chunk() else { continue };
            let number = usize::from(u16::from_le_bytes(*number));
            // The guest reports unknown values as all ones.
            let value = Some(u64::from_le_bytes(*value)).filter(|value| *value != u64::MAX);
            if let Some(slot) = statistics.get_mut(number) {
                *slot = value;
            }
        }
        let mut driver = self.driver();
        (driver.statistics, driver.updated) = (statistics, Some(Instant::now()));
        self.changed.notify_all();
    }

    /// Statistics of an earlier driver are dropped.
    fn clear_statistics(&self) {
        let mut driver = self.driver();
        (driver.statistics, driver.updated) = ([None; NAMES.len()], None);
    }
}

impl balloon::Balloon for Gauge {
    fn set(&self, bytes: u64) {
        self.operator_set.store(true, Ordering::Release);
        self.set_target(self.pages(bytes));
    }

    fn report(&self, wait: Duration) -> Report {
        let mut driver = self.driver();
        if driver.has_statistics && !wait.is_zero() {
            let asked = Instant::now();
            self.ask.write(1).ok();
            let silent = |driver: &mut DriverState| {
                driver.has_statistics && driver.updated.is_none_or(|it| it < asked)
            };
            let waited = self.changed.wait_timeout_while(driver, wait, silent);
            driver = waited.expect("no device panicked").0;
        }
        let named = NAMES.into_iter().zip(driver.statistics);
        Report {
            target: self.size(&self.target),
            actual: self.size(&self.actual),
            statistics: named.filter_map(|(name, value)| Some((name, value?))).collect(),
            age: driver.updated.map(|updated| updated.elapsed()),
        }
    }
}

#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct State {
    target: u32,
    actual: u32,
    poison: u32,
}

struct Balloon {
    gauge: Arc<Gauge>,
    host: Arc<dyn Hypervisor>,
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
        for (range, field) in [(ACTUAL, &self.gauge.actual), (POISON, &self.gauge.poison)] {
            let field_bytes = bytes[range].try_into().expect("four bytes");
            field.store(u32::from_le_bytes(field_bytes), Ordering::Release);
        }
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        let last = queues.iter().map(|queue| queue.number).max().unwrap_or(0);
        let purpose = |number| match number {
            INFLATE => Purpose::Inflate,
            STATISTICS if negotiated & STATS_VQ != 0 => Purpose::Statistics,
            STATISTICS.. if negotiated & REPORTING != 0 && number == last => Purpose::Reports,
            _ => Purpose::Nothing,
        };
        let purposes: Vec<_> = queues.iter().map(|queue| purpose(queue.number)).collect();
        let has_statistics = purposes.contains(&Purpose::Statistics);
        let signal = queues.first().map(|queue| queue.signal.clone());
        let mut bells: Vec<_> = queues.iter().map(|queue| queue.bell.clone()).collect();
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
        self.gauge.connect(signal, has_statistics);
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
        // A reset does not change the operator's target.
        if let Some(state) = &saved
            && !self.gauge.operator_set.load(Ordering::Acquire)
        {
            self.gauge.set_target(state.target);
        }
        let State { actual, poison, .. } = saved.unwrap_or_default();
        self.gauge.actual.store(actual, Ordering::Release);
        self.gauge.poison.store(poison, Ordering::Release);
        self.gauge.clear_statistics();
        Ok(())
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Purpose {
    Inflate,
    /// Statistics. The driver's buffer is returned to request new ones.
    Statistics,
    Reports,
    /// Deflating, and unknown queues: requests are only acknowledged.
    Nothing,
}

/// State of the worker thread.
struct Work {
    queues: Vec<Queue>,
    /// The purpose of each queue, in the same order.
    purposes: Vec<Purpose>,
    /// PAGE_POISON was negotiated: the guest reports its fill pattern.
    poisoned: bool,
    gauge: Arc<Gauge>,
    host: Arc<dyn Hypervisor>,
    /// The last statistics buffer and the index of its queue.
    waiting: Option<(usize, Chain)>,
}

impl Work {
    fn step(&mut self, at: usize) {
        if at == self.queues.len() {
            self.request_statistics();
            return;
        }
        for _ in 0..BATCH {
            let Some(chain) = next(&mut self.queues[at]) else {
                self.queues[at].notify();
                return;
            };
            self.take(at, chain);
        }
        self.queues[at].notify();
        // There may be more requests. They are served after a pending stop.
        self.queues[at].bell.write(1).ok();
    }

    fn take(&mut self, at: usize, chain: Chain) {
        let queue = &mut self.queues[at];
        match self.purposes[at] {
            Purpose::Inflate => release(&*self.host, frames(&queue.memory, &chain.readable)),
            // Pages that must keep their pattern cannot be replaced by zeros.
            Purpose::Reports if self.poisoned && self.gauge.poison.load(Ordering::Acquire) != 0 => {
            }
            Purpose::Reports => {
                release(&*self.host, chain.writable.iter().map(extent).collect());
            }
            Purpose::Statistics => {
                let length = super::length(&chain.readable).min(MAX_STATISTICS_BYTES);
                let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
                if queue.memory.gather(&chain.readable, &mut bytes).is_ok() {
                    self.gauge.update_statistics(&bytes);
                }
                // A driver should have one such buffer at a time. An older one is returned.
                if let Some((_, old)) = self.waiting.replace((at, chain)) {
                    queue.push(old, 0);
                }
                return;
            }
            Purpose::Nothing => {}
        }
        queue.push(chain, 0);
    }

    /// Requests new statistics: returns the buffer to the driver.
    fn request_statistics(&mut self) {
        if let Some((at, chain)) = self.waiting.take() {
            self.queues[at].push(chain, 0);
            self.queues[at].notify();
        }
    }

    fn end(mut self) -> Vec<Queue> {
        if let Some((at, chain)) = self.waiting.take() {
            self.queues[at].return_chain(chain);
        }
        self.queues
    }
}

/// Releases ranges to the host. Adjacent and overlapping ones are merged.
fn release(host: &dyn Hypervisor, mut ranges: Vec<Range<u64>>) {
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

/// The pages named by a request, as byte ranges. Empty if the request is not entirely in memory.
/// The comment at the top of this file explains the width of the numbers.
fn frames(memory: &Memory, pieces: &[Piece]) -> Vec<Range<u64>> {
    let length = super::length(pieces).min(MAX_FRAME_BYTES);
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
