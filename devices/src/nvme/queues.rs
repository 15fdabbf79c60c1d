//! Queues in guest memory, and the doorbells with their head and tail values (NVMe 1.4, 4.1; shadow
//! doorbells 7.13).
//!
//! Threats: heads and tails come from the guest, in registers and in shadow memory. A value outside
//! of the queue is ignored and reported as an event. A full completion queue is never overwritten:
//! completions wait, and no command is fetched meanwhile, so the number of waiting ones is bounded.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::command::{Command, Completed, ENTRY_SIZE};
use super::io;
use crate::pci::Interrupt;
use host::memory::{Memory, NoMemory};

/// Maximum entries of an I/O queue (CAP.MQES + 1).
pub(super) const MAX_ENTRIES: u32 = 1024;
/// Maximum entries of an admin queue: AQA has 12 bits.
pub(super) const MAX_ADMIN_ENTRIES: u32 = 4096;
/// No command is fetched from a queue while it has this many requests to the disk in flight. A
/// command counts as one request, or as its number of ranges, which is at most
/// [`io::MAX_RANGES`]. Further commands of the driver wait in its queue.
const MAX_REQUESTS: u32 = 256;
const COMPLETION_SIZE: u64 = 16;
/// Maximum number of commands that are copied at once.
const BATCH: usize = 16;

/// Wakes the thread of a queue. A thread that is awake checks its queues by itself.
pub(super) struct Waker {
    pub(super) event: Arc<EventFd>,
    asleep: AtomicBool,
}

impl Waker {
    pub(super) fn new(event: Arc<EventFd>) -> Self {
        Self { event, asleep: AtomicBool::new(false) }
    }

    pub(super) fn wake(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            self.wake_always();
        }
    }

    /// Wakes the thread even if it is awake: it checks its queues once more.
    pub(super) fn wake_always(&self) {
        // If the event's counter is full, it has rung already.
        self.event.write(1).ok();
    }

    /// Called before sleep. Work that arrives after this wakes the thread.
    pub(super) fn prepare_sleep(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub(super) fn cancel_sleep(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// One doorbell register. Every possible queue has one, whether it exists or not.
#[derive(Default)]
pub(super) struct Doorbell {
    /// Entries of the queue, or 0 if it does not exist.
    size: AtomicU32,
    value: AtomicU32,
    /// For a completion queue: the part of its state that controls the interrupt line.
    level: AtomicU32,
    /// For a completion queue: it is full, and its thread waits for the guest.
    full: AtomicBool,
    waker: Mutex<Option<Arc<Waker>>>,
}

/// Bit of `level`: the queue has completions that need an interrupt.
const PENDING: u32 = 1 << 16;

impl Doorbell {
    pub(super) fn open(&self, size: u32, value: u32, waker: &Arc<Waker>) {
        *self.waker.lock().expect("no device panicked") = Some(waker.clone());
        self.value.store(value, Ordering::SeqCst);
        self.level.store(0, Ordering::SeqCst);
        self.full.store(false, Ordering::SeqCst);
        self.size.store(size, Ordering::SeqCst);
    }

    pub(super) fn close(&self) {
        self.size.store(0, Ordering::SeqCst);
        self.level.store(0, Ordering::SeqCst);
        *self.waker.lock().expect("no device panicked") = None;
    }

    pub(super) fn value(&self) -> u32 {
        self.value.load(Ordering::SeqCst)
    }

    fn wake(&self) {
        if let Some(waker) = &*self.waker.lock().expect("no device panicked") {
            waker.wake();
        }
    }
}

/// Doorbell mistakes of the guest, reported as events.
pub(super) const INVALID_REGISTER: u8 = 1 << 0;
pub(super) const INVALID_VALUE: u8 = 1 << 1;

pub(super) struct Doorbells {
    tails: Vec<Doorbell>,
    heads: Vec<Doorbell>,
    interrupt: Interrupt,
    /// INTMS and INTMC. The interrupt line changes only under this lock.
    mask: Mutex<u32>,
    mistakes: AtomicU8,
    /// Wakes the controller's thread, which reports mistakes.
    pub(super) kick: Arc<EventFd>,
}

impl Doorbells {
    /// Creates the doorbells of the queues from 0 to `queues`.
    pub(super) fn new(queues: u16, interrupt: Interrupt) -> anyhow::Result<Self> {
        let bells = || (0..=queues).map(|_| Doorbell::default()).collect();
        let kick = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        let (mask, mistakes) = Default::default();
        Ok(Self { tails: bells(), heads: bells(), interrupt, mask, mistakes, kick })
    }

    pub(super) fn tail(&self, queue: u16) -> &Doorbell {
        &self.tails[usize::from(queue)]
    }

    pub(super) fn head(&self, queue: u16) -> &Doorbell {
        &self.heads[usize::from(queue)]
    }

    pub(super) fn ring(&self, number: u64, value: u32) {
        let bells = if number.is_multiple_of(2) { &self.tails } else { &self.heads };
        let queue = usize::try_from(number / 2).unwrap_or(usize::MAX);
        let Some(bell) = bells.get(queue) else { return self.report_guest_error(INVALID_REGISTER) };
        match bell.size.load(Ordering::SeqCst) {
            0 => return self.report_guest_error(INVALID_REGISTER),
            size if value >= size => return self.report_guest_error(INVALID_VALUE),
            _ => bell.value.store(value, Ordering::SeqCst),
        }
        if number.is_multiple_of(2) {
            bell.wake();
            return;
        }
        if bell.full.load(Ordering::SeqCst) {
            bell.wake();
        }
        self.update_line();
    }

    pub(super) fn report_guest_error(&self, error: u8) {
        if self.mistakes.fetch_or(error, Ordering::SeqCst) & error == 0 {
            self.kick.write(1).ok();
        }
    }

    pub(super) fn take_guest_errors(&self) -> u8 {
        self.mistakes.swap(0, Ordering::SeqCst)
    }

    pub(super) fn mask(&self) -> u32 {
        *self.mask.lock().expect("no device panicked")
    }

    pub(super) fn set_mask(&self, change: impl FnOnce(u32) -> u32) {
        let mut mask = self.mask.lock().expect("no device panicked");
        *mask = change(*mask);
        self.set_line(*mask);
    }

    /// Updates the interrupt line, unless MSI-X is in use.
    pub(super) fn update_line(&self) {
        if !self.uses_messages() {
            self.set_line(*self.mask.lock().expect("no device panicked"));
        }
    }

    pub(super) fn uses_messages(&self) -> bool {
        self.interrupt.msix.as_ref().is_some_and(|msix| msix.is_enabled())
    }

    /// Called with the lock of `mask` held.
    fn set_line(&self, mask: u32) {
        let Some(line) = &self.interrupt.line else { return };
        let high = self.heads.iter().any(|bell| {
            let level = bell.level.load(Ordering::SeqCst);
            let (posted, vector) = (level & 0xffff, level >> 17 & 31);
            level & PENDING != 0 && posted != bell.value() && mask >> vector & 1 == 0
        });
        line.set(high);
    }

    /// Updates the state for the interrupt line, even while MSI-X is in use.
    fn raise(&self, queue: &CompletionQueue) {
        let vector = u32::from(queue.vector) & 31;
        self.head(queue.id).level.store(vector << 17 | PENDING | queue.tail, Ordering::SeqCst);
    }

    fn notify(&self, queue: &CompletionQueue) {
        if !queue.interrupts {
            return;
        }
        self.raise(queue);
        if !self.interrupt.message(queue.vector) {
            self.set_line(*self.mask.lock().expect("no device panicked"));
        }
    }
}

/// Guest addresses of a shadow doorbell and of its event index. The guest rings when its doorbell
/// passes the event index.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Shadow {
    pub(super) doorbell: u64,
    pub(super) event: u64,
}

impl Shadow {
    fn read(self, memory: &Memory) -> Result<u32, NoMemory> {
        load(memory, self.doorbell)
    }

    /// Asks for a ring from `value` on. Values that are read after this cannot be missed.
    fn request_ring(self, memory: &Memory, value: u32) -> Result<(), NoMemory> {
        store(memory, self.event, value)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn init(self, memory: &Memory, value: u32) -> Result<(), NoMemory> {
        store(memory, self.doorbell, value)?;
        self.request_ring(memory, value)
    }
}

fn load(memory: &Memory, at: u64) -> Result<u32, NoMemory> {
    memory.ram()?.load(GuestAddress(at), Ordering::Acquire).map_err(|_| NoMemory)
}

fn store(memory: &Memory, at: u64, value: u32) -> Result<(), NoMemory> {
    memory.ram()?.store(value, GuestAddress(at), Ordering::Release).map_err(|_| NoMemory)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SubmissionQueue {
    pub(super) id: u16,
    pub(super) size: u32,
    pub(super) at: u64,
    pub(super) head: u32,
    /// The last known tail.
    pub(super) tail: u32,
    pub(super) shadow: Option<Shadow>,
    /// Commands fetched and not answered, and the number of requests they count for.
    #[serde(skip)]
    pub(super) in_flight: u32,
    #[serde(skip)]
    pub(super) requests: u32,
}

impl SubmissionQueue {
    pub(super) fn new(id: u16, size: u32, at: u64) -> Self {
        Self { id, size, at, head: 0, tail: 0, shadow: None, in_flight: 0, requests: 0 }
    }

    pub(super) fn is_valid(&self, queues: u16, max_size: u32) -> bool {
        let fits = self.id <= queues && (2..=max_size).contains(&self.size);
        fits && self.head < self.size && self.tail < self.size
    }

    /// Reads the tail from the doorbell, or from its shadow.
    pub(super) fn read_tail(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
        let Some(shadow) = self.shadow else {
            self.tail = bells.tail(self.id).value();
            return Ok(());
        };
        match shadow.read(memory)? {
            tail if tail < self.size => self.tail = tail,
            _ => bells.report_guest_error(INVALID_VALUE),
        }
        Ok(())
    }

    pub(super) fn set_shadow(&mut self, memory: &Memory, shadow: Shadow) -> Result<(), NoMemory> {
        self.shadow = Some(shadow);
        shadow.init(memory, self.tail)
    }

    /// Called before sleep: asks for a ring with the next command.
    pub(super) fn request_ring(&self, memory: &Memory) -> Result<(), NoMemory> {
        self.shadow.map_or(Ok(()), |shadow| shadow.request_ring(memory, self.tail))
    }

    /// Whether there is a command that may be started.
    pub(super) fn has_more(&self) -> bool {
        self.head != self.tail && self.requests < MAX_REQUESTS
    }

    /// Called when a command that counted as `requests` requests is answered.
    pub(super) fn answered(&mut self, requests: u32) {
        // A restored event request is not counted in `in_flight`.
        self.in_flight = self.in_flight.saturating_sub(1);
        self.requests = self.requests.saturating_sub(requests);
    }

    pub(super) fn fetch(
        &mut self,
        memory: &Memory,
        commands: &mut Vec<Command>,
    ) -> Result<(), NoMemory> {
        let mut bytes = [0; ENTRY_SIZE * BATCH];
        while self.has_more() {
            let end = if self.tail > self.head { self.tail } else { self.size };
            let room = (MAX_REQUESTS - self.requests).min(end - self.head);
            let count = usize::try_from(room).unwrap_or(BATCH).min(BATCH);
            let read = &mut bytes[..count * ENTRY_SIZE];
            let offset = u64::from(self.head) * ENTRY_SIZE as u64;
            memory.read(self.at.checked_add(offset).ok_or(NoMemory)?, read)?;
            for entry in read.as_chunks::<ENTRY_SIZE>().0 {
                // An earlier command of this batch may have many ranges.
                if !self.has_more() {
                    break;
                }
                let command = Command::new(*entry);
                self.head = (self.head + 1) % self.size;
                self.in_flight += 1;
                self.requests += if self.id == 0 { 1 } else { io::requests(&command) };
                commands.push(command);
            }
        }
        Ok(())
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct CompletionQueue {
    pub(super) id: u16,
    pub(super) size: u32,
    pub(super) at: u64,
    /// The last known head.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// Inverse of the phase bit of the next entry.
    phase: bool,
    pub(super) vector: u16,
    pub(super) interrupts: bool,
    pub(super) shadow: Option<Shadow>,
    waiting: VecDeque<Completed>,
    /// Completions were posted since the last notification.
    #[serde(skip)]
    fresh: bool,
}

impl CompletionQueue {
    pub(super) fn new(id: u16, size: u32, at: u64, vector: Option<u16>) -> Self {
        let (head, tail, phase, shadow, waiting, fresh) = Default::default();
        let (interrupts, vector) = (vector.is_some(), vector.unwrap_or_default());
        Self { id, size, at, head, tail, phase, vector, interrupts, shadow, waiting, fresh }
    }

    pub(super) fn is_valid(&self, queues: u16, max_size: u32) -> bool {
        let fits = self.id <= queues && (2..=max_size).contains(&self.size);
        fits && self.head < self.size && self.tail < self.size
    }

    /// Whether completions wait for a free entry.
    pub(super) fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes a completion, or stores it until an entry is free.
    pub(super) fn post(
        &mut self,
        done: Completed,
        bells: &Doorbells,
        memory: &Memory,
    ) -> Result<(), NoMemory> {
        self.waiting.push_back(done);
        self.drain(bells, memory)
    }

    pub(super) fn drain(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
        while let Some(done) = self.waiting.front().copied() {
            let next = (self.tail + 1) % self.size;
            if next == self.head {
                self.read_head(bells, memory)?;
                if next == self.head {
                    break;
                }
            }
            let at = self.at.checked_add(u64::from(self.tail) * COMPLETION_SIZE).ok_or(NoMemory)?;
            let (bytes, last) = done.bytes(!self.phase);
            memory.write(at, &bytes)?;
            store(memory, at + 12, last)?;
            self.waiting.pop_front();
            self.tail = next;
            self.phase ^= next == 0;
            self.fresh = true;
        }
        Ok(())
    }

    fn read_head(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
        let bell = bells.head(self.id);
        let Some(shadow) = self.shadow else {
            self.head = bell.value();
            return Ok(());
        };
        match shadow.read(memory)? {
            head if head < self.size => {
                self.head = head;
                bell.value.store(head, Ordering::SeqCst);
            }
            _ => bells.report_guest_error(INVALID_VALUE),
        }
        Ok(())
    }

    pub(super) fn set_shadow(&mut self, memory: &Memory, shadow: Shadow) -> Result<(), NoMemory> {
        self.shadow = Some(shadow);
        shadow.init(memory, self.head)
    }

    /// Interrupts the guest once for all completions since the last call.
    pub(super) fn notify(&mut self, bells: &Doorbells) {
        if std::mem::take(&mut self.fresh) {
            bells.notify(self);
        }
    }

    /// Called before sleep. Returns true if waiting completions have room now. Otherwise the guest
    /// rings when it frees entries.
    pub(super) fn has_room(&mut self, bells: &Doorbells, memory: &Memory) -> bool {
        bells.head(self.id).full.store(self.is_full(), Ordering::SeqCst);
        if !self.is_full() {
            return false;
        }
        let asked = self.shadow.map_or(Ok(()), |shadow| shadow.request_ring(memory, self.head));
        asked.is_ok()
            && self.read_head(bells, memory).is_ok()
            && (self.tail + 1) % self.size != self.head
    }

    /// Connects the doorbell again after a pause.
    pub(super) fn resume(&self, bells: &Doorbells, waker: &Arc<Waker>) {
        bells.head(self.id).open(self.size, self.head, waker);
        if self.interrupts {
            bells.raise(self);
        }
    }

    /// Called before the queue is saved.
    pub(super) fn update_head(&mut self, bells: &Doorbells, memory: &Memory) {
        // If the shadow doorbell cannot be read, the last known head is used.
        self.read_head(bells, memory).ok();
    }
}
