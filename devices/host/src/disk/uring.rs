//! Raw disks through io_uring: one ring per channel, one system call per batch.
//!
//! The kernel reads and writes the guest's memory itself. Requests that cannot go through the ring
//! (buffers that are not aligned for direct I/O, a truncated file, file systems without holes) go
//! to a fallback: a thread that copies.
//!
//! Threats: the guest chooses lengths and addresses. Before the kernel sees a request, it is
//! checked against the disk, and each of its pieces against RAM. The ring keeps RAM mapped, and is
//! not dropped before the kernel has finished.
#![expect(unsafe_code, reason = "the kernel gets addresses of memory that it fills later")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::{EnterFlags, opcode, types};
use rustix::io::Errno;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::direct::Alignment;
use super::medium::{Medium, Report, is_full};
use super::raw::{Raw, zeroing};
use super::rings::{ENTRIES, Lease};
use super::threads::Threaded;
use super::{Channel, Completion, Fault, Image, Operation, Request};
use crate::memory::Memory;

/// Maximum number of requests in the kernel. Further ones wait.
const DEPTH: u16 = 256;
/// The kernel's limit of vectors per request (`UIO_MAXIOV`).
const MAX_PIECES: usize = 1024;
/// Maximum bytes per system call, well within the kernel's limit of 2 GiB.
const MAX_TRANSFER: u64 = 1 << 30;
/// User data of the poll entry: the fallback has completed something.
const FALLBACK_READY: u64 = u64::MAX;
/// User data of the entry that cancels the poll.
const FALLBACK_CANCELED: u64 = u64::MAX - 1;

const _: () = assert!(ENTRIES >= 2 * DEPTH as u32, "room for all slots and the poll entries");

/// A request that is in the kernel.
struct Slot {
    request: Request,
    /// If it is known. A no-op delivers it.
    answer: Option<Result<(), Fault>>,
    /// Bytes that are done.
    done: u64,
    /// The kernel reads the vectors until it answers, so they are not changed before.
    vectors: Vec<libc::iovec>,
}

// SAFETY: the addresses are in RAM, which `Ring::memory` keeps mapped, and any thread may pass them
// to the kernel.
unsafe impl Send for Slot {}

pub(super) struct Ring {
    ring: Lease,
    raw: Arc<Raw>,
    report: Arc<Report>,
    memory: Memory,
    slots: Vec<Option<Slot>>,
    free: Vec<u16>,
    /// Requests that wait for a free slot.
    waiting: VecDeque<Request>,
    /// The submission queue has entries that are not submitted yet.
    queued: bool,
    fallback: Fallback,
}

/// The channel of the copying thread, created when it is first needed.
#[derive(Default)]
struct Fallback {
    channel: Option<Box<dyn Channel>>,
    count: usize,
    /// The ring polls the channel's event.
    watched: bool,
    pushed: bool,
}

impl Ring {
    /// Uses a leased ring, whose registered file is the disk's.
    pub(super) fn new(ring: Lease, raw: Arc<Raw>, report: Arc<Report>, memory: &Memory) -> Self {
        Self {
            ring,
            raw,
            report,
            memory: memory.clone(),
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            waiting: VecDeque::new(),
            queued: false,
            fallback: Fallback::default(),
        }
    }

    fn queue(&mut self, entry: &Entry) {
        // SAFETY: the entry points into a slot and into RAM. Both stay until the kernel has
        // answered: `complete` frees slots, `drop` waits, and `memory` keeps RAM mapped.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // Each slot has at most one entry, and the queue has room for twice as many.
        pushed.expect("the queue has room for all slots");
        self.queued = true;
    }

    fn begin(&mut self, request: Request) {
        let Some(number) = self.free.pop() else {
            self.waiting.push_back(request);
            return;
        };
        let answer = self.immediate_answer(&request);
        let vectors = Vec::new();
        self.slots[usize::from(number)] = Some(Slot { request, answer, done: 0, vectors });
        self.proceed(number);
    }

    /// The answer to a request that needs no operation: an invalid or an empty one.
    fn immediate_answer(&self, request: &Request) -> Option<Result<(), Fault>> {
        if let Err(fault) = request.check(&self.raw.geometry()) {
            return Some(Err(fault));
        }
        match request.operation {
            Operation::Flush if self.raw.has_failed_flush() => {
                let error = io::Error::other("an earlier flush failed");
                Some(Err(self.report.fault(request, &error)))
            }
            Operation::Flush => self.raw.geometry().read_only.then_some(Ok(())),
            Operation::Discard if !self.raw.discards() => Some(Ok(())),
            _ => (request.length == 0).then_some(Ok(())),
        }
    }

    /// Queues the next step of a slot.
    fn proceed(&mut self, number: u16) {
        let Some(mut slot) = self.slots[usize::from(number)].take() else { return };
        let entry = match self.entry(&mut slot) {
            Ok(entry) => entry,
            Err(NoEntry::Answer(fault)) => {
                slot.answer = Some(Err(fault));
                opcode::Nop::new().build()
            }
            Err(NoEntry::Fallback) => return self.fall_back(number, slot),
        };
        self.slots[usize::from(number)] = Some(slot);
        self.queue(&entry.user_data(u64::from(number)));
    }

    fn entry(&self, slot: &mut Slot) -> Result<Entry, NoEntry> {
        let fd = types::Fixed(0);
        let request = &slot.request;
        let hole = |unmap| {
            let mode = i32::try_from(zeroing(unmap).bits()).unwrap_or_default();
            opcode::Fallocate::new(fd, request.length).offset(request.offset).mode(mode).build()
        };
        Ok(match request.operation {
            _ if slot.answer.is_some() => opcode::Nop::new().build(),
            // `Raw` flushes the page cache once at a time: only one of several simultaneous flushes
            // gets the error that data was lost.
            Operation::Flush | Operation::Write { durable: true } if self.raw.direct.is_none() => {
                return Err(NoEntry::Fallback);
            }
            Operation::Flush => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
            Operation::Read if self.raw.is_refused() => return Err(NoEntry::Fallback),
            Operation::Read | Operation::Write { .. } => return self.transfer(slot),
            Operation::Discard if self.raw.device => return Err(NoEntry::Fallback),
            Operation::Discard => hole(true),
            Operation::WriteZeroes { unmap } => hole(unmap && self.raw.discards()),
        })
    }

    /// A read or write of the rest of a request.
    fn transfer(&self, slot: &mut Slot) -> Result<Entry, NoEntry> {
        let fd = types::Fixed(0);
        self.vectors(slot)?;
        let offset = slot.request.offset + slot.done;
        let [first, ..] = slot.vectors[..] else { return Err(NoEntry::Answer(Fault::Refused)) };
        let (many, count) = (slot.vectors.as_ptr(), slot.vectors.len());
        let alone = (count == 1).then(|| u32::try_from(first.iov_len).ok()).flatten();
        let count = u32::try_from(count).map_err(|_| NoEntry::Fallback)?;
        let base = first.iov_base.cast::<u8>();
        Ok(match (slot.request.operation, alone) {
            (Operation::Write { durable }, alone) => {
                let flags = if durable { libc::RWF_DSYNC } else { 0 };
                match alone {
                    Some(length) => {
                        opcode::Write::new(fd, base, length).offset(offset).rw_flags(flags).build()
                    }
                    None => {
                        opcode::Writev::new(fd, many, count).offset(offset).rw_flags(flags).build()
                    }
                }
            }
            (_, Some(length)) => opcode::Read::new(fd, base, length).offset(offset).build(),
            (_, None) => opcode::Readv::new(fd, many, count).offset(offset).build(),
        })
    }

    /// Sets the slot's vectors to the guest memory of the request's remaining bytes.
    fn vectors(&self, slot: &mut Slot) -> Result<(), NoEntry> {
        let refused = NoEntry::Answer(Fault::Refused);
        let ram = self.memory.ram().map_err(|_| refused)?;
        slot.vectors.clear();
        let (mut skip, mut room) = (slot.done, MAX_TRANSFER);
        for piece in &slot.request.pieces {
            let length = u64::from(piece.length);
            if skip >= length {
                skip -= length;
                continue;
            }
            let address = piece.address.checked_add(skip).ok_or(refused)?;
            let length = usize::try_from((length - skip).min(room)).map_err(|_| refused)?;
            skip = 0;
            for slice in ram.get_slices(GuestAddress(address), length) {
                let slice = slice.map_err(|_| refused)?;
                let base = slice.ptr_guard_mut().as_ptr().cast();
                slot.vectors.push(libc::iovec { iov_base: base, iov_len: slice.len() });
            }
            room -= length as u64;
            // The request exceeds the kernel's limits, so the rest follows later.
            if slot.vectors.len() >= MAX_PIECES || room == 0 {
                break;
            }
        }
        slot.vectors.truncate(MAX_PIECES);
        let fits = |it: &libc::iovec, need: Alignment| {
            (it.iov_base.addr() as u64).is_multiple_of(need.memory)
                && (it.iov_len as u64).is_multiple_of(need.length)
        };
        match self.raw.direct {
            Some(need) if !slot.vectors.iter().all(|it| fits(it, need)) => Err(NoEntry::Fallback),
            _ => Ok(()),
        }
    }

    fn fall_back(&mut self, number: u16, slot: Slot) {
        self.free.push(number);
        if self.fallback.channel.is_none() {
            let image = Threaded::with_report(self.raw.clone(), self.report.clone(), 1);
            self.fallback.channel = image.channel(&self.memory).ok();
        }
        let Some(channel) = &mut self.fallback.channel else {
            let number = self.free.pop().expect("it was pushed above");
            let answer = Some(Err(Fault::Broken));
            self.slots[usize::from(number)] = Some(Slot { answer, ..slot });
            return self.proceed(number);
        };
        channel.push(slot.request);
        self.fallback.count += 1;
        self.fallback.pushed = true;
        self.watch();
    }

    /// Polls the fallback's event through the ring, so that its completions make the ring readable.
    fn watch(&mut self) {
        let Some(channel) = &self.fallback.channel else { return };
        if self.fallback.count > 0 && !self.fallback.watched {
            let event = types::Fd(channel.event().as_raw_fd());
            let readable = u32::try_from(libc::POLLIN).unwrap_or_default();
            let entry = opcode::PollAdd::new(event, readable).build().user_data(FALLBACK_READY);
            self.fallback.watched = true;
            self.queue(&entry);
        }
    }

    fn complete(&mut self, number: u16, result: i32, done: &mut Vec<Completion>) {
        let Some(mut slot) = self.slots[usize::from(number)].take() else { return };
        match self.check_result(&mut slot, result) {
            Ok(answer) => {
                self.free.push(number);
                mark(&self.memory, &slot.request);
                let Request { tag, pieces, .. } = slot.request;
                done.push(Completion { tag, result: answer, pieces });
            }
            Err(Next::Retry) => {
                self.slots[usize::from(number)] = Some(slot);
                self.proceed(number);
            }
            Err(Next::Fallback) => self.fall_back(number, slot),
        }
    }

    fn check_result(&self, slot: &mut Slot, result: i32) -> Result<Result<(), Fault>, Next> {
        if let Some(answer) = slot.answer {
            return Ok(answer);
        }
        let operation = slot.request.operation;
        let flushes = operation == Operation::Flush;
        let moves = matches!(operation, Operation::Read | Operation::Write { .. });
        let Ok(length) = u64::try_from(result) else {
            let error = io::Error::from_raw_os_error(-result);
            return match Errno::from_raw_os_error(-result) {
                Errno::INTR | Errno::AGAIN | Errno::CANCELED => Err(Next::Retry),
                // The range is in RAM. The kernel tries a read of the page cache again in the
                // thread that began it, and that thread has ended meanwhile.
                Errno::FAULT if moves => Err(Next::Fallback),
                _ if flushes => {
                    Ok(Err(self.report.fault(&slot.request, &self.raw.flush_failed(error))))
                }
                Errno::INVAL if moves && self.raw.direct.is_some() => Err(Next::Fallback),
                Errno::OPNOTSUPP | Errno::INVAL if !moves => Err(Next::Fallback),
                // As in `Raw::discard`.
                _ if operation == Operation::Discard && is_full(&error) => Ok(Ok(())),
                _ => Ok(Err(self.report.fault(&slot.request, &error))),
            };
        };
        if flushes || !moves {
            return Ok(Ok(()));
        }
        slot.done += length;
        let block = u64::from(self.raw.geometry().logical_block);
        if slot.done >= slot.request.length {
            return Ok(Ok(()));
        }
        // The file ended within a block, or nothing was transferred. The fallback handles both.
        Err(if length == 0 || !length.is_multiple_of(block) { Next::Fallback } else { Next::Retry })
    }

    fn enter(&mut self, wait: usize) {
        while self.queued || wait > 0 {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => {
                    self.queued = !self.ring.submission().is_empty();
                    if !self.queued {
                        return;
                    }
                }
                // The completion queue is full. The next `reap` empties it and submits again.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && wait == 0 => return,
                // The kernel is short of memory.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Only a sandbox that removes system calls later can cause this.
                Err(error) => {
                    tracing::error!("io_uring no longer accepts requests: {error}");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    /// Makes the kernel post completions that it has deferred.
    fn run_deferred(&mut self) {
        let submission = self.ring.submission();
        if submission.taskrun() || submission.cq_overflow() {
            drop(submission);
            let flags = EnterFlags::GETEVENTS.bits();
            // SAFETY: the call submits nothing, waits for nothing and has no argument.
            let entered = unsafe { self.ring.submitter().enter::<()>(0, 0, flags, None) };
            // If it fails, the next call does it.
            entered.ok();
        }
    }
}

#[derive(Clone, Copy)]
enum NoEntry {
    Answer(Fault),
    Fallback,
}

/// The next step after an answer that does not complete the request.
enum Next {
    Retry,
    Fallback,
}

impl Channel for Ring {
    fn push(&mut self, request: Request) {
        if self.waiting.is_empty() {
            self.begin(request);
        } else {
            self.waiting.push_back(request);
        }
    }

    fn submit(&mut self) {
        if let (true, Some(channel)) = (self.fallback.pushed, &mut self.fallback.channel) {
            channel.submit();
            self.fallback.pushed = false;
        }
        self.enter(0);
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.run_deferred();
        loop {
            // One at a time, because each may queue another entry.
            let Some(entry) = self.ring.completion().next() else { break };
            match u16::try_from(entry.user_data()) {
                Ok(number) if number < DEPTH => self.complete(number, entry.result(), done),
                _ => self.fallback.watched = false,
            }
        }
        if !self.fallback.watched
            && self.fallback.count > 0
            && let Some(channel) = &mut self.fallback.channel
        {
            let before = done.len();
            channel.reap(done);
            self.fallback.count -= done.len() - before;
            self.watch();
        }
        // Requests that went to the fallback left their slots free, too.
        while !self.free.is_empty()
            && let Some(next) = self.waiting.pop_front()
        {
            self.begin(next);
        }
        self.submit();
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor stays open as long as the ring, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    fn withdraw(&mut self) -> Vec<Request> {
        self.waiting.drain(..).collect()
    }
}

/// Records the memory that the kernel wrote for a read.
fn mark(memory: &Memory, request: &Request) {
    if request.operation == Operation::Read {
        memory.wrote(&request.pieces);
    }
}

impl Drop for Ring {
    /// Waits for the kernel, which still writes to memory for requests in flight, but starts no
    /// further steps of them. The next channel finds the ring empty.
    fn drop(&mut self) {
        self.fallback.channel = None;
        let mut others = 0;
        if self.fallback.watched {
            self.queue(
                &opcode::PollRemove::new(FALLBACK_READY).build().user_data(FALLBACK_CANCELED),
            );
            others = 2;
        }
        while others > 0 || self.slots.iter().any(Option::is_some) {
            self.enter(1);
            while let Some(entry) = self.ring.completion().next() {
                let number = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
                match self.slots.get_mut(number).map(Option::take) {
                    Some(slot) => slot.iter().for_each(|it| mark(&self.memory, &it.request)),
                    None => others -= 1,
                }
            }
        }
    }
}

#[cfg(test)]
mod test;
