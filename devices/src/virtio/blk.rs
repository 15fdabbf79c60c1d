//! virtio-blk: a disk with several queues (VIRTIO 1.3, 5.2).
//!
//! Each queue has its own thread and its own channel to the image. One pass takes all requests that
//! the driver offered, submits them with one call, and reports the finished ones with one
//! interrupt.
//!
//! Threats: sector, length and segments come from the guest. They are checked against the image
//! here and in the channel. An invalid request is answered with an error, and a request without
//! space for its status breaks the device. The size of the queue limits the requests in flight.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use serde::{Deserialize, Serialize};

use super::{Chain, Identity, Queue, Signal, Virtio, on_pci, open_disk};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::poller::{Poller, Serve};
use host::disk::{Channel, Completion, Drive, Expected, Fault, Operation, Request, wait};
use host::memory::{Memory, Piece};

/// `--device virtio-blk,path=disk.img`: a disk. Fast, but Windows needs a driver for it.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Config(pub host::disk::Config);

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let disk = self.0;
        let drive = open_disk(&disk, grants)?;
        on_pci(Blk::new(drive, disk.queues())?, disk.slot, grants)
    }

    fn fill_defaults(&mut self, processors: u16) {
        self.0.set_default_queues(processors);
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Image(&self.0.path)
    }

    fn detach_host_side(&mut self) {
        self.0.file = Expected::Nothing;
    }
}

/// Unit of the driver's sectors, whatever the disk's block size is.
const SECTOR: u64 = 512;
/// Entries of a queue, and the maximum number of data pieces of one request, which also needs a
/// header and a status. Windows derives its longest transfer from this: about 1 MiB.
const QUEUE_SIZE: u16 = 256;
const SEGMENTS: u32 = 254;
pub const MAX_QUEUES: u16 = 64;

/// Feature bits (5.2.3).
const SEG_MAX: u64 = 1 << 2;
const READ_ONLY: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const FLUSH: u64 = 1 << 9;
const TOPOLOGY: u64 = 1 << 10;
const CONFIG_WCE: u64 = 1 << 11;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// Offset of the only field that a driver writes: write-back (1) or write-through (0).
const WRITEBACK: usize = 32;

/// Request types (5.2.6).
const TYPE_IN: u32 = 0;
const TYPE_OUT: u32 = 1;
const TYPE_FLUSH: u32 = 4;
const TYPE_GET_ID: u32 = 8;
const TYPE_DISCARD: u32 = 11;
const TYPE_WRITE_ZEROES: u32 = 13;
/// Length of the answer to GET_ID.
const ID_SIZE: usize = 20;
/// Length of one range to discard or to zero, maximum numbers of ranges in a request, and maximum
/// number of sectors in a range.
const RANGE_SIZE: usize = 16;
const MAX_DISCARD_RANGES: u32 = 16;
const MAX_ZERO_RANGES: u32 = 1;
const MAX_RANGE_SECTORS: u32 = 1 << 22;
/// Flag of a range: its space may be released.
const UNMAP: u32 = 1;

/// Values of the status byte.
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;

pub struct Blk {
    drive: Arc<Drive>,
    queues: u16,
    serial: [u8; ID_SIZE],
    /// Whether writes may stay in caches until a flush.
    writeback: Arc<AtomicBool>,
    pollers: Vec<Poller<Server>>,
    /// Size of the disk that the driver last knew, in bytes.
    known: u64,
}

impl Blk {
    /// `queues` is 1 to 64. The serial number is cut to 20 bytes.
    pub fn new(drive: Arc<Drive>, queues: u16) -> anyhow::Result<Self> {
        ensure!(
            (1..=MAX_QUEUES).contains(&queues),
            "queues={queues}: a disk has 1 to {MAX_QUEUES} queues"
        );
        let mut id = [0; ID_SIZE];
        for (to, from) in id.iter_mut().zip(drive.serial.bytes()) {
            *to = from;
        }
        let writeback = Arc::new(AtomicBool::new(true));
        let known = drive.geometry().size;
        Ok(Self { drive, queues, serial: id, writeback, pollers: Vec::new(), known })
    }

    /// Notifies the driver whenever the disk grows. Also notifies it now if the disk grew while the
    /// device was stopped.
    fn watch(&self, signal: &Arc<Signal>) {
        let driver = signal.clone();
        self.drive.watch(Some(Box::new(move || driver.configuration())));
        if self.drive.geometry().size != self.known {
            signal.configuration();
        }
    }
}

/// Saved state besides the queues.
#[derive(Serialize, Deserialize)]
struct State {
    writeback: bool,
    /// The size that the driver knows, in bytes.
    size: u64,
}

impl Virtio for Blk {
    fn identity(&self) -> Identity {
        let geometry = self.drive.geometry();
        let mut features = SEG_MAX | BLK_SIZE | FLUSH | TOPOLOGY | CONFIG_WCE | MQ;
        if geometry.read_only {
            features |= READ_ONLY;
        } else {
            features |= WRITE_ZEROES;
            if geometry.discard > 0 {
                features |= DISCARD;
            }
        }
        let queues = vec![QUEUE_SIZE; usize::from(self.queues)];
        Identity { id: 2, name: "virtio-blk", class: 0x01_0000, queues, features }
    }

    fn config(&self) -> Vec<u8> {
        let geometry = self.drive.geometry();
        let mut bytes = [0; 60];
        let mut put = |at: usize, value: u64, width: usize| {
            bytes[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        };
        let blocks = geometry.physical_block / geometry.logical_block.max(1);
        // Windows trims only if an alignment is reported, and panics if a limit is 0.
        let discard = u64::from(geometry.discard.max(geometry.logical_block)) / SECTOR;
        put(0, geometry.size / SECTOR, 8);
        put(12, SEGMENTS.into(), 4);
        put(20, geometry.logical_block.into(), 4);
        put(24, blocks.max(1).ilog2().into(), 1);
        put(26, blocks.max(1).into(), 2);
        put(28, 0, 4);
        put(WRITEBACK, self.writeback.load(Ordering::Acquire).into(), 1);
        put(34, self.queues.into(), 2);
        put(36, MAX_RANGE_SECTORS.into(), 4);
        put(40, MAX_DISCARD_RANGES.into(), 4);
        put(44, discard, 4);
        put(48, MAX_RANGE_SECTORS.into(), 4);
        put(52, MAX_ZERO_RANGES.into(), 4);
        put(56, (geometry.discard > 0).into(), 1);
        bytes.to_vec()
    }

    fn write_config(&mut self, offset: usize, data: &[u8]) {
        if let (WRITEBACK, [value]) = (offset, data) {
            self.writeback.store(*value & 1 != 0, Ordering::Release);
        }
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        // A driver that cannot flush needs durable writes (VIRTIO 1.2, 5.2.5.2).
        if negotiated & FLUSH == 0 {
            self.writeback.store(false, Ordering::Release);
        }
        if let Some(queue) = queues.first() {
            self.watch(&queue.signal);
        }
        for queue in queues {
            let name = format!("disk-{}", queue.number);
            let channel = self.drive.image.channel(&queue.memory)?;
            let server = Server {
                channel,
                writeback: self.writeback.clone(),
                serial: self.serial,
                jobs: std::iter::repeat_with(|| None).take(QUEUE_SIZE.into()).collect(),
                in_flight: 0,
                done: Vec::new(),
                queue,
            };
            self.pollers.push(Poller::spawn(&name, server)?);
        }
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.drive.watch(None);
        self.known = self.drive.geometry().size;
        let servers = self.pollers.drain(..).map(Poller::stop);
        servers.map(Server::finish).collect()
    }

    fn save(&self) -> Saved {
        let writeback = self.writeback.load(Ordering::Acquire);
        Saved::of(&State { writeback, size: self.known })
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let saved: Option<State> = saved.take()?;
        let writeback = saved.as_ref().is_none_or(|state| state.writeback);
        self.writeback.store(writeback, Ordering::Release);
        // A driver that starts reads the size by itself.
        self.known = saved.map_or_else(|| self.drive.geometry().size, |state| state.size);
        Ok(())
    }
}

struct Job {
    chain: Chain,
    /// Guest address of the status byte.
    status: u64,
    /// Channel requests that are not finished yet.
    parts: u16,
    /// A flush follows, because the driver chose write-through.
    flush: bool,
    /// Bytes reported as written, without the status byte.
    written: u32,
    answer: u8,
}

/// State of the thread that serves one queue.
struct Server {
    queue: Queue,
    channel: Box<dyn Channel>,
    writeback: Arc<AtomicBool>,
    serial: [u8; ID_SIZE],
    /// Requests in flight, indexed by the head of their chain.
    jobs: Vec<Option<Job>>,
    in_flight: usize,
    done: Vec<Completion>,
}

enum Plan {
    Ask(Vec<Request>),
    /// An immediate answer: status, and number of bytes written before it.
    Answer(u8, u32),
}

impl Server {
    /// Returns whether the driver offered any requests.
    fn take(&mut self) -> bool {
        let mut any = false;
        while let Some(mut chain) = self.queue.pop() {
            any = true;
            let header = chain.take::<16>(&self.queue.memory);
            let (Ok(header), Some(status)) = (header, chain.take_last()) else {
                self.queue.return_chain(chain);
                self.queue.fail("a request without a header, or without room for its status");
                return any;
            };
            self.begin(chain, header, status);
        }
        any
    }

    fn begin(&mut self, mut chain: Chain, header: [u8; 16], status: u64) {
        let [a, b, c, d, _, _, _, _, sector @ ..] = header;
        let (kind, sector) = (u32::from_le_bytes([a, b, c, d]), u64::from_le_bytes(sector));
        let head = usize::from(chain.head);
        let plan = self.plan(kind, sector, &mut chain);
        let mut job = Job { chain, status, parts: 0, flush: false, written: 0, answer: OK };
        self.in_flight += 1;
        match plan {
            Plan::Ask(requests) if !requests.is_empty() => {
                job.parts = u16::try_from(requests.len()).unwrap_or(u16::MAX);
                let writeback = self.writeback.load(Ordering::Acquire);
                job.flush = matches!(kind, TYPE_DISCARD | TYPE_WRITE_ZEROES) && !writeback;
                if kind == TYPE_IN {
                    job.written = u32::try_from(requests[0].length).unwrap_or(0);
                }
                self.jobs[head] = Some(job);
                requests.into_iter().for_each(|request| self.channel.push(request));
            }
            Plan::Ask(_) => self.end(job),
            Plan::Answer(answer, written) => self.end(Job { answer, written, ..job }),
        }
    }

    /// Decides how to serve a request, without side effects on the image.
    fn plan(&self, kind: u32, sector: u64, chain: &mut Chain) -> Plan {
        let tag = u64::from(chain.head);
        let offset = sector.saturating_mul(SECTOR);
        let ask = |operation, pieces: &mut Vec<Piece>| {
            let pieces = std::mem::take(pieces);
            let length = super::length(&pieces);
            Plan::Ask(vec![Request { tag, operation, offset, length, pieces }])
        };
        match kind {
            TYPE_IN => ask(Operation::Read, &mut chain.writable),
            TYPE_OUT => {
                let durable = !self.writeback.load(Ordering::Acquire);
                ask(Operation::Write { durable }, &mut chain.readable)
            }
            TYPE_FLUSH => Plan::Ask(vec![request(tag, Operation::Flush, (0, 0))]),
            TYPE_GET_ID => self.identify(chain),
            TYPE_DISCARD => ranges(&self.queue.memory, chain, Operation::Discard),
            TYPE_WRITE_ZEROES => {
                ranges(&self.queue.memory, chain, Operation::WriteZeroes { unmap: false })
            }
            _ => Plan::Answer(UNSUPPORTED, 0),
        }
    }

    fn identify(&self, chain: &Chain) -> Plan {
        let room = usize::try_from(super::length(&chain.writable)).unwrap_or(ID_SIZE).min(ID_SIZE);
        match self.queue.memory.scatter(&chain.writable, &self.serial[..room]) {
            Ok(()) => Plan::Answer(OK, u32::try_from(room).unwrap_or(0)),
            Err(_) => Plan::Answer(IO_ERROR, 0),
        }
    }

    /// Returns whether the channel had finished any requests.
    fn answer(&mut self) -> bool {
        let mut done = std::mem::take(&mut self.done);
        self.channel.reap(&mut done);
        let any = !done.is_empty();
        for one in done.drain(..) {
            let head = usize::try_from(one.tag & 0xffff).unwrap_or(usize::MAX);
            // The tags come from this file, so each has its job.
            let Some(job) = self.jobs.get_mut(head).and_then(Option::as_mut) else { continue };
            if let Err(fault) = one.result {
                job.answer = match fault {
                    Fault::Unsupported => UNSUPPORTED,
                    Fault::Refused | Fault::Broken | Fault::Full => IO_ERROR,
                };
            }
            job.parts -= 1;
            if job.parts > 0 {
                continue;
            }
            if std::mem::take(&mut job.flush) && job.answer == OK {
                job.parts = 1;
                self.channel.push(request(one.tag & 0xffff, Operation::Flush, (0, 0)));
            } else if let Some(mut job) = self.jobs[head].take() {
                // Reuses the vector for the next chain.
                job.chain.readable = one.pieces;
                self.end(job);
            }
        }
        self.done = done;
        any
    }

    fn end(&mut self, job: Job) {
        self.in_flight -= 1;
        let written = if job.answer == OK { job.written } else { 0 };
        // A status address outside of memory is ignored: only the guest misses the status.
        self.queue.memory.write(job.status, &[job.answer]).ok();
        self.queue.push(job.chain, written + 1);
    }

    /// Waits for requests in flight. Requests that the channel has not started stay in the queue.
    fn finish(mut self) -> Queue {
        while self.in_flight > 0 {
            // Repeated on each pass: a request in flight may start to wait for space.
            self.withdraw();
            self.channel.submit();
            if self.in_flight > 0 && !self.answer() {
                wait(self.channel.as_ref());
            }
        }
        self.queue.notify();
        self.queue
    }

    fn withdraw(&mut self) {
        for request in self.channel.withdraw() {
            let head = usize::try_from(request.tag & 0xffff).unwrap_or(usize::MAX);
            if let Some(job) = self.jobs.get_mut(head).and_then(Option::take) {
                self.in_flight -= 1;
                self.queue.return_chain(job.chain);
            }
        }
    }
}

fn request(tag: u64, operation: Operation, (offset, length): (u64, u64)) -> Request {
    Request { tag, operation, offset, length, pieces: Vec::new() }
}

/// Plans a discard or write-zeroes request: one channel request for each range.
fn ranges(memory: &Memory, chain: &mut Chain, operation: Operation) -> Plan {
    let length = super::length(&chain.readable);
    let max_ranges =
        if operation == Operation::Discard { MAX_DISCARD_RANGES } else { MAX_ZERO_RANGES };
    let count = length / RANGE_SIZE as u64;
    if count == 0 || !length.is_multiple_of(RANGE_SIZE as u64) || count > max_ranges.into() {
        return Plan::Answer(IO_ERROR, 0);
    }
    let mut requests = Vec::new();
    for part in 0..count {
        let Ok(range) = chain.take::<RANGE_SIZE>(memory) else { return Plan::Answer(IO_ERROR, 0) };
        let [s0, s1, s2, s3, s4, s5, s6, s7, n0, n1, n2, n3, flags @ ..] = range;
        let sector = u64::from_le_bytes([s0, s1, s2, s3, s4, s5, s6, s7]);
        let (sectors, flags) = (u32::from_le_bytes([n0, n1, n2, n3]), u32::from_le_bytes(flags));
        let operation = match operation {
            // Unknown flags must be refused (5.2.6.2).
            Operation::Discard if flags != 0 => return Plan::Answer(UNSUPPORTED, 0),
            Operation::WriteZeroes { .. } if flags & !UNMAP != 0 => {
                return Plan::Answer(UNSUPPORTED, 0);
            }
            Operation::WriteZeroes { .. } => Operation::WriteZeroes { unmap: flags & UNMAP != 0 },
            other => other,
        };
        if sectors > MAX_RANGE_SECTORS {
            return Plan::Answer(IO_ERROR, 0);
        }
        let tag = u64::from(chain.head) | part << 16;
        let offset = sector.saturating_mul(SECTOR);
        requests.push(request(tag, operation, (offset, u64::from(sectors) * SECTOR)));
    }
    Plan::Ask(requests)
}

impl Serve for Server {
    fn serve(&mut self) -> bool {
        let taken = self.take();
        if taken {
            self.channel.submit();
        }
        let answered = self.answer();
        if answered {
            // Submits the flushes that follow finished requests.
            self.channel.submit();
        }
        self.queue.notify();
        taken || answered
    }

    fn has_single_request(&self) -> bool {
        self.in_flight == 1
    }

    fn enable_doorbells(&mut self) -> bool {
        self.queue.enable_doorbell()
    }

    fn disable_doorbells(&mut self) {
        self.queue.disable_doorbell();
    }

    fn events(&self) -> Vec<RawFd> {
        vec![self.queue.bell.as_raw_fd(), self.channel.event().as_raw_fd()]
    }

    fn clear_events(&mut self) {
        self.queue.bell.read().ok();
    }
}

#[cfg(test)]
mod test;
