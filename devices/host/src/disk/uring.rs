//! Raw disks through io_uring: one ring per channel, one system call per batch.
//!
//! The guest's memory is read and written by the kernel itself. What does not go that way (buffers
//! that direct I/O refuses, a file that was cut off, file systems without holes) goes aside, to a
//! thread that copies.
//!
//! Threats: lengths and addresses are the guest's. A request is checked against the disk, and each
//! piece against RAM, before the kernel sees it; the ring keeps RAM mapped and waits for the kernel
//! before it goes away.
#![expect(unsafe_code, reason = "the kernel is told addresses of memory that it fills later")]

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::Entry;
use io_uring::{EnterFlags, opcode, types};
use rustix::io::Errno;
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::medium::{Medium, Report, is_full};
use super::raw::{Alignment, Raw, zeroing};
use super::rings::{ENTRIES, Lent};
use super::threads::Threaded;
use super::{Channel, Done, Fault, Image, Operation, Request};
use crate::memory::Memory;

/// How many requests the kernel has at once; more wait for their turn.
const DEPTH: u16 = 256;
/// The kernel's limit of pieces in one go (`UIO_MAXIOV`).
const PIECES: usize = 1024;
/// What one system call moves at most, well within the kernel's limit of 2 GiB.
const MOST: u64 = 1 << 30;
/// Not a request: the thread aside has something.
const ASIDE: u64 = u64::MAX;
/// Not a request: the thread aside is waited for no more.
const UNWATCH: u64 = u64::MAX - 1;

const _: () = assert!(ENTRIES >= 2 * DEPTH as u32, "room for all slots and what is aside");

/// Where a request is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// The operation itself.
    Main,
    /// The flush of a durable write.
    Flush,
    /// Nothing to do but to answer.
    Answer(Result<(), Fault>),
}

/// A request that the kernel has.
struct Slot {
    request: Request,
    stage: Stage,
    /// How many bytes are done.
    done: u64,
    /// Stays where it is while the kernel reads it: the vector is not touched until then.
    vectors: Vec<libc::iovec>,
}

// SAFETY: the addresses are of RAM, which `Ring::memory` keeps mapped, and which any thread may
// tell the kernel.
unsafe impl Send for Slot {}

/// A channel to a raw disk through a ring.
pub(super) struct Ring {
    ring: Lent,
    raw: Arc<Raw>,
    report: Arc<Report>,
    memory: Memory,
    slots: Vec<Option<Slot>>,
    free: Vec<u16>,
    /// No slot is free for these.
    waiting: VecDeque<Request>,
    /// In the submission queue, not yet told to the kernel.
    queued: bool,
    aside: Aside,
}

/// What is done by copying.
#[derive(Default)]
struct Aside {
    channel: Option<Box<dyn Channel>>,
    count: usize,
    /// The ring waits for the channel's event.
    watched: bool,
    pushed: bool,
}

impl Ring {
    /// On the ring that is lent, whose registered file is the disk's.
    pub(super) fn new(ring: Lent, raw: Arc<Raw>, report: Arc<Report>, memory: &Memory) -> Self {
        Self {
            ring,
            raw,
            report,
            memory: memory.clone(),
            slots: (0..DEPTH).map(|_| None).collect(),
            free: (0..DEPTH).rev().collect(),
            waiting: VecDeque::new(),
            queued: false,
            aside: Aside::default(),
        }
    }

    fn queue(&mut self, entry: &Entry) {
        // SAFETY: what the entry points to is in a slot and in RAM, and both stay until the kernel
        // has answered: `complete` frees slots, `drop` waits, and `memory` keeps RAM.
        let pushed = unsafe { self.ring.submission().push(entry) };
        // Each slot has one entry at most, and there are twice as many.
        pushed.expect("the queue has room for all slots");
        self.queued = true;
    }

    fn begin(&mut self, request: Request) {
        let Some(number) = self.free.pop() else {
            self.waiting.push_back(request);
            return;
        };
        let stage = match self.judge(&request) {
            Some(answer) => Stage::Answer(answer),
            None => Stage::Main,
        };
        let vectors = Vec::new();
        self.slots[usize::from(number)] = Some(Slot { request, stage, done: 0, vectors });
        self.proceed(number);
    }

    /// The answer, if there is nothing to do.
    fn judge(&self, request: &Request) -> Option<Result<(), Fault>> {
        if let Err(fault) = request.check(&self.raw.geometry()) {
            return Some(Err(fault));
        }
        match request.operation {
            Operation::Flush if self.raw.lost() => {
                let error = io::Error::other("an earlier flush failed");
                Some(Err(self.report.fault(request, &error)))
            }
            Operation::Flush => self.raw.geometry().read_only.then_some(Ok(())),
            Operation::Discard if !self.raw.discards() => Some(Ok(())),
            _ => (request.length == 0).then_some(Ok(())),
        }
    }

    /// Queues what is next of a slot.
    fn proceed(&mut self, number: u16) {
        let Some(mut slot) = self.slots[usize::from(number)].take() else { return };
        let entry = match self.entry(&mut slot) {
            Ok(entry) => entry,
            Err(Elsewhere::Answer(fault)) => {
                slot.stage = Stage::Answer(Err(fault));
                opcode::Nop::new().build()
            }
            Err(Elsewhere::Aside) => return self.put_aside(number, slot),
        };
        self.slots[usize::from(number)] = Some(slot);
        self.queue(&entry.user_data(u64::from(number)));
    }

    fn entry(&self, slot: &mut Slot) -> Result<Entry, Elsewhere> {
        let fd = types::Fixed(0);
        let request = &slot.request;
        let sync = || opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build();
        let hole = |unmap| {
            let mode = i32::try_from(zeroing(unmap).bits()).unwrap_or_default();
            opcode::Fallocate::new(fd, request.length).offset(request.offset).mode(mode).build()
        };
        Ok(match (slot.stage, request.operation) {
            (Stage::Answer(_), _) => opcode::Nop::new().build(),
            (Stage::Flush, _) | (_, Operation::Flush) => sync(),
            (_, Operation::Read | Operation::Write { .. }) => return self.transfer(slot),
            (_, Operation::Discard) if self.raw.is_device() => return Err(Elsewhere::Aside),
            (_, Operation::Discard) => hole(true),
            (_, Operation::WriteZeroes { unmap }) => hole(unmap && self.raw.discards()),
        })
    }

    /// A read or a write of what is left of a request.
    fn transfer(&self, slot: &mut Slot) -> Result<Entry, Elsewhere> {
        let fd = types::Fixed(0);
        self.vectors(slot)?;
        let offset = slot.request.offset + slot.done;
        let [first, ..] = slot.vectors[..] else { return Err(Elsewhere::Answer(Fault::Refused)) };
        let (many, count) = (slot.vectors.as_ptr(), slot.vectors.len());
        let alone = (count == 1).then(|| u32::try_from(first.iov_len).ok()).flatten();
        let count = u32::try_from(count).map_err(|_| Elsewhere::Aside)?;
        let base = first.iov_base.cast::<u8>();
        Ok(match (slot.request.operation, alone) {
            (Operation::Write { durable }, alone) => {
                let at_once = durable && self.raw.direct().is_some();
                let flags = if at_once { libc::RWF_DSYNC } else { 0 };
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

    /// Where in memory the next bytes of a request are.
    fn vectors(&self, slot: &mut Slot) -> Result<(), Elsewhere> {
        let refused = Elsewhere::Answer(Fault::Refused);
        let ram = self.memory.ram().map_err(|_| refused)?;
        slot.vectors.clear();
        let (mut skip, mut room) = (slot.done, MOST);
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
            // More pieces than the kernel takes, or more bytes: the rest comes after.
            if slot.vectors.len() >= PIECES || room == 0 {
                break;
            }
        }
        slot.vectors.truncate(PIECES);
        let fits = |it: &libc::iovec, need: Alignment| {
            (it.iov_base.addr() as u64).is_multiple_of(need.memory)
                && (it.iov_len as u64).is_multiple_of(need.length)
        };
        match self.raw.direct() {
            Some(need) if !slot.vectors.iter().all(|it| fits(it, need)) => Err(Elsewhere::Aside),
            _ => Ok(()),
        }
    }

    fn put_aside(&mut self, number: u16, slot: Slot) {
        self.free.push(number);
        if self.aside.channel.is_none() {
            let image = Threaded::of(self.raw.clone(), self.report.clone(), 1);
            self.aside.channel = image.channel(&self.memory).ok();
        }
        let Some(channel) = &mut self.aside.channel else {
            let number = self.free.pop().expect("it was pushed above");
            let stage = Stage::Answer(Err(Fault::Broken));
            self.slots[usize::from(number)] = Some(Slot { stage, ..slot });
            return self.proceed(number);
        };
        channel.push(slot.request);
        self.aside.count += 1;
        self.aside.pushed = true;
        self.watch();
    }

    /// Lets the ring wake whoever waits for it when the thread aside is done with something.
    fn watch(&mut self) {
        let Some(channel) = &self.aside.channel else { return };
        if self.aside.count > 0 && !self.aside.watched {
            let event = types::Fd(channel.event().as_raw_fd());
            let readable = u32::try_from(libc::POLLIN).unwrap_or_default();
            let entry = opcode::PollAdd::new(event, readable).build().user_data(ASIDE);
            self.aside.watched = true;
            self.queue(&entry);
        }
    }

    /// What the kernel says of a slot.
    fn complete(&mut self, number: u16, result: i32, done: &mut Vec<Done>) {
        let Some(mut slot) = self.slots[usize::from(number)].take() else { return };
        match self.judge_result(&mut slot, result) {
            Ok(answer) => {
                self.free.push(number);
                let Request { tag, pieces, .. } = slot.request;
                done.push(Done { tag, result: answer, pieces });
            }
            Err(Next::Again) => {
                self.slots[usize::from(number)] = Some(slot);
                self.proceed(number);
            }
            Err(Next::Aside) => self.put_aside(number, slot),
        }
    }

    fn judge_result(&self, slot: &mut Slot, result: i32) -> Result<Result<(), Fault>, Next> {
        if let Stage::Answer(answer) = slot.stage {
            return Ok(answer);
        }
        let operation = slot.request.operation;
        let flushes = slot.stage == Stage::Flush || operation == Operation::Flush;
        let moves = matches!(operation, Operation::Read | Operation::Write { .. });
        let Ok(length) = u64::try_from(result) else {
            let error = io::Error::from_raw_os_error(-result);
            return match Errno::from_raw_os_error(-result) {
                Errno::INTR | Errno::AGAIN => Err(Next::Again),
                _ if flushes => Ok(Err(self.report.fault(&slot.request, &self.raw.lose(error)))),
                Errno::INVAL if moves && self.raw.direct().is_some() => Err(Next::Aside),
                Errno::OPNOTSUPP | Errno::INVAL if !moves => Err(Next::Aside),
                // As `Raw::discard` does.
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
            if operation == (Operation::Write { durable: true }) && self.raw.direct().is_none() {
                slot.stage = Stage::Flush;
                return Err(Next::Again);
            }
            return Ok(Ok(()));
        }
        // The file's end within a block, or nothing at all: the copying way knows what to do.
        Err(if length == 0 || !length.is_multiple_of(block) { Next::Aside } else { Next::Again })
    }

    /// Tells the kernel what is queued.
    fn enter(&mut self, wait: usize) {
        while self.queued || wait > 0 {
            match self.ring.submit_and_wait(wait) {
                Ok(_) => {
                    self.queued = !self.ring.submission().is_empty();
                    if !self.queued {
                        return;
                    }
                }
                // Completions that nobody took: the next `reap` does, and submits again.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) && wait == 0 => return,
                // The kernel is short of memory, or a signal came.
                Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::ENOMEM)) => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // Only a sandbox that takes away what `available` found.
                Err(error) => {
                    tracing::error!("io_uring does not take requests any more: {error}");
                    std::thread::sleep(Duration::from_millis(1));
                    return;
                }
            }
        }
    }

    /// Lets the kernel put down what it has for us, where it waits for being asked.
    fn poke(&mut self) {
        let submission = self.ring.submission();
        if submission.taskrun() || submission.cq_overflow() {
            drop(submission);
            let flags = EnterFlags::GETEVENTS.bits();
            // SAFETY: nothing is submitted or waited for, and there is no argument.
            let entered = unsafe { self.ring.submitter().enter::<()>(0, 0, flags, None) };
            // The next time is as good.
            entered.ok();
        }
    }
}

/// Why there is no entry for a request.
#[derive(Clone, Copy)]
enum Elsewhere {
    Answer(Fault),
    Aside,
}

/// What follows on an answer of the kernel that is not the end.
enum Next {
    Again,
    Aside,
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
        if let (true, Some(channel)) = (self.aside.pushed, &mut self.aside.channel) {
            channel.submit();
            self.aside.pushed = false;
        }
        self.enter(0);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        self.poke();
        loop {
            // One at a time, because each may queue another.
            let Some(entry) = self.ring.completion().next() else { break };
            match u16::try_from(entry.user_data()) {
                Ok(number) if number < DEPTH => self.complete(number, entry.result(), done),
                _ => self.aside.watched = false,
            }
        }
        if !self.aside.watched
            && self.aside.count > 0
            && let Some(channel) = &mut self.aside.channel
        {
            let before = done.len();
            channel.reap(done);
            self.aside.count -= done.len() - before;
            self.watch();
        }
        // What goes aside leaves a slot, too.
        while !self.free.is_empty()
            && let Some(next) = self.waiting.pop_front()
        {
            self.begin(next);
        }
        self.submit();
    }

    fn event(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring's descriptor is open as long as the ring, which is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }

    fn withdraw(&mut self) -> Vec<Request> {
        self.waiting.drain(..).collect()
    }
}

impl Drop for Ring {
    /// The kernel still writes to memory for what it has: that is waited for, and not gone on with.
    /// The next channel finds the ring empty.
    fn drop(&mut self) {
        self.aside.channel = None;
        let mut others = 0;
        if self.aside.watched {
            self.queue(&opcode::PollRemove::new(ASIDE).build().user_data(UNWATCH));
            others = 2;
        }
        while others > 0 || self.slots.iter().any(Option::is_some) {
            self.enter(1);
            while let Some(entry) = self.ring.completion().next() {
                let number = usize::try_from(entry.user_data()).unwrap_or(usize::MAX);
                match self.slots.get_mut(number) {
                    Some(slot) => *slot = None,
                    None => others -= 1,
                }
            }
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs::{self, File};
    use std::path::Path;
    use std::ptr;

    use super::super::driver::{Driver, PATIENCE, piece};
    use super::super::rehearsal::sparse;
    use super::super::rings::Rings;
    use super::super::{Config, Direct, open};
    use super::*;

    fn rings(path: &Path, count: u16) -> io::Result<Arc<Rings>> {
        Rings::new(&File::options().read(true).write(true).open(path)?, count).map(Arc::new)
    }

    fn disk(direct: Direct) -> Option<(tempfile::TempDir, Arc<dyn Image>)> {
        let folder = tempfile::tempdir().unwrap();
        let path = sparse(&folder, "disk", 8 << 20);
        if let Err(reason) = rings(&path, 1) {
            let test = std::thread::current().name().unwrap_or_default().to_owned();
            skip::not_run(&test, &reason.to_string());
            return None;
        }
        let pattern: Vec<u8> = (0..8_u32 << 20).map(|it| (it / 512).to_le_bytes()[0]).collect();
        fs::write(&path, pattern).unwrap();
        let image = open(&Config { direct, ..Config::new(path) }, None).unwrap();
        Some((folder, image))
    }

    #[test]
    fn carries_more_requests_and_more_pieces_than_the_kernel_takes_at_once() {
        for direct in [Direct::Auto, Direct::Off] {
            let Some((_folder, image)) = disk(direct) else { return };
            let mut driver = Driver::new(&image);
            let count = usize::from(DEPTH) * 3;
            for number in 0..count as u64 {
                let place = (number * 512, 512);
                driver.push(Operation::Read, place, &[piece(number * 512, 512)]);
            }
            driver.channel.submit();
            assert!(driver.wait(count).iter().all(|it| it.result == Ok(())));
            let pieces: Vec<_> = (0..4000).map(|it| piece((4 << 20) + it * 1024, 512)).collect();
            driver.ask(Operation::Read, (512, 4000 * 512), &pieces).unwrap();
            for (number, it) in (1_u32..).zip(&pieces) {
                let mut read = [0; 512];
                driver.memory.read(it.address, &mut read).unwrap();
                assert_eq!(read, [number.to_le_bytes()[0]; 512], "{direct:?} {number}");
            }
        }
    }

    #[test]
    fn goes_on_with_what_waits_when_all_before_it_goes_aside() {
        let Some((folder, image)) = disk(Direct::Off) else { return };
        let mut driver = Driver::new(&image);
        let count = usize::from(DEPTH) * 3;
        // The kernel reads nothing of a file that was cut off.
        File::options().write(true).open(folder.path().join("disk")).unwrap().set_len(0).unwrap();
        for number in 0..count as u64 {
            driver.push(Operation::Read, (number * 512, 512), &[piece(number * 512, 512)]);
        }
        driver.channel.submit();
        let mut tags: Vec<u64> = driver.wait(count).iter().map(|it| it.tag).collect();
        tags.sort_unstable();
        tags.dedup();
        assert_eq!(tags.len(), count);
    }

    #[test]
    fn refuses_memory_that_is_not_there_and_touches_none() {
        for direct in [Direct::Auto, Direct::Off] {
            let Some((_folder, image)) = disk(direct) else { return };
            let mut driver = Driver::new(&image);
            let end = 16 << 20;
            for pieces in [
                vec![piece(end, 4096)],
                vec![piece(end - 512, 4096)],
                vec![piece(u64::MAX - 100, 4096)],
                vec![piece(0, 2048), piece(end, 2048)],
            ] {
                let answer = driver.ask(Operation::Read, (8192, 4096), &pieces);
                assert_eq!(answer, Err(Fault::Refused), "{pieces:?}");
                let write = Operation::Write { durable: false };
                assert_eq!(driver.ask(write, (8192, 4096), &pieces), Err(Fault::Refused));
            }
            // Across two regions of RAM is well.
            let pieces = [piece((8 << 20) - 2048, 4096)];
            driver.ask(Operation::Read, (8192, 4096), &pieces).unwrap();
            assert_eq!(driver.read(8192, 512).unwrap(), vec![16; 512]);
        }
    }

    #[test]
    fn answers_nothing_to_do_at_once() {
        let Some((_folder, image)) = disk(Direct::Off) else { return };
        let mut driver = Driver::new(&image);
        driver.ask(Operation::Read, (0, 0), &[]).unwrap();
        driver.ask(Operation::Discard, (512, 0), &[]).unwrap();
        driver.ask(Operation::Write { durable: true }, (0, 0), &[]).unwrap();
    }

    #[test]
    fn waits_for_the_kernel_when_it_is_dropped_with_requests_under_way() {
        for direct in [Direct::Auto, Direct::Off] {
            let Some((_folder, image)) = disk(direct) else { return };
            for round in 0..20 {
                let mut driver = Driver::new(&image);
                for number in 0..300 {
                    let skew = if round % 2 == 0 { 0 } else { 4 };
                    let pieces = [piece(number * 8192 + skew, 4096)];
                    driver.push(Operation::Read, (number * 4096, 4096), &pieces);
                }
                driver.channel.submit();
                let memory = driver.memory.clone();
                drop(driver);
                let before: Vec<u64> = sums(&memory);
                std::thread::sleep(Duration::from_millis(2));
                assert_eq!(before, sums(&memory), "memory changed after the channel was gone");
            }
        }
    }

    fn sums(memory: &Memory) -> Vec<u64> {
        let sum = |address| {
            let mut bytes = [0; 8192];
            memory.read(address, &mut bytes).unwrap();
            bytes.iter().map(|it| u64::from(*it)).sum()
        };
        (0..300).map(|number| sum(number * 8192)).collect()
    }

    #[test]
    fn its_event_is_quiet_while_there_is_nothing() {
        let Some((_folder, image)) = disk(Direct::Auto) else { return };
        let mut driver = Driver::new(&image);
        driver.write(0, &[1; 4096]).unwrap();
        driver.ask(Operation::Read, (0, 4096), &[piece(4, 4096)]).unwrap();
        driver.flush().unwrap();
        let event = driver.channel.event();
        let mut fds = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
        let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 20_000_000 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&soon)), Ok(0));
        assert!(PATIENCE > Duration::ZERO);
    }

    #[test]
    fn a_ring_does_what_a_disk_does_and_opens_no_socket() {
        let Some((folder, _image)) = disk(Direct::Off) else { return };
        let path = folder.path().join("disk");
        let other = File::open(&path).unwrap();
        let mut ring = rings(&path, 1).unwrap().lend(&other).unwrap();
        let (inet, stream) = (libc::AF_INET, libc::SOCK_STREAM);
        let peer = libc::sockaddr_un { sun_family: 1, sun_path: [0; 108] };
        let (peer, length) = ((&raw const peer).cast(), 2);
        let file = types::Fixed(0);
        for (entry, answer) in [
            (opcode::Nop::new().build(), 0),
            (opcode::Fsync::new(file).build(), 0),
            (opcode::Socket::new(inet, stream, 0).build(), -libc::EACCES),
            (opcode::Connect::new(file, peer, length).build(), -libc::EACCES),
            (opcode::Accept::new(file, ptr::null_mut(), ptr::null_mut()).build(), -libc::EACCES),
            (opcode::Send::new(file, ptr::null(), 0).build(), -libc::EACCES),
            (opcode::Close::new(file).build(), -libc::EACCES),
            (opcode::OpenAt::new(types::Fd(-1), c"/".as_ptr()).build(), -libc::EACCES),
        ] {
            // SAFETY: what an entry points to outlives the answer, which is waited for.
            unsafe { ring.submission().push(&entry) }.unwrap();
            ring.submit_and_wait(1).unwrap();
            let said = ring.completion().next().unwrap().result();
            assert_eq!(said, answer, "{entry:?}");
        }
        // And nobody gives it other files, or takes the restrictions back.
        let refused = ring.submitter().register_files_update(0, &[0]).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EACCES));
        let again = ring.submitter().register_restrictions(&mut []).unwrap_err();
        assert_eq!(again.raw_os_error(), Some(libc::EACCES));
    }

    #[test]
    fn the_next_channel_finds_its_ring_empty_whatever_the_last_one_left() {
        let Some((_folder, image)) = disk(Direct::Auto) else { return };
        for round in 0..50 {
            let mut driver = Driver::new(&image);
            // Some go aside, which is waited for through the ring.
            for number in 0..8 {
                driver.push(Operation::Read, (0, 4096), &[piece(number * 8192 + 4, 4096)]);
            }
            if round % 2 == 0 {
                driver.channel.submit();
            }
            drop(driver);
            let mut next = Driver::new(&image);
            next.write(512 * round, &[3; 512]).unwrap();
            assert_eq!(next.read(512 * round, 512).unwrap(), vec![3; 512]);
        }
    }

    #[test]
    fn more_channels_than_there_are_rings_are_as_good() {
        let Some((_folder, image)) = disk(Direct::Off) else { return };
        let mut drivers: Vec<_> = (0..10).map(|_| Driver::new(&image)).collect();
        for (number, driver) in (0..).zip(&mut drivers) {
            driver.write(number * 512, &[7; 512]).unwrap();
        }
        assert_eq!(drivers[0].read(0, 512).unwrap(), vec![7; 512]);
    }
}
