//! Queues in the guest's memory, and the doorbells that say how far they were filled and emptied
//! (NVMe 1.4, 4.1; shadow doorbells 7.13).
//!
//! Threats: heads and tails are the guest's, in registers and in shadow memory; a value outside of
//! the queue is dropped and reported as an event. A full completion queue is never written to: what
//! is finished waits, and meanwhile nothing new is fetched, so that what waits is bounded.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering, fence};
use std::sync::{Arc, Mutex};

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::command::{Command, Completed, ENTRY};
use super::io;
use crate::pci::Interrupt;
use host::memory::{Memory, NoMemory};

/// Entries of an I/O queue at most (CAP.MQES + 1).
pub(super) const ENTRIES: u32 = 1024;
/// Entries of an admin queue at most: AQA has 12 bits.
pub(super) const ADMIN_ENTRIES: u32 = 4096;
/// No command is fetched from a queue while this many requests to the disk are under way for it.
/// A command counts as one, or as its ranges, of which it has at most [`io::RANGES`]. A driver may
/// have more commands: they wait in its queue.
const REQUESTS: u32 = 256;
/// Bytes of a completion.
const COMPLETION: u64 = 16;
/// Commands that are copied at once.
const BATCH: usize = 16;

/// Wakes the thread of a queue; a thread that is awake looks at its queues by itself.
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
            self.rouse();
        }
    }

    /// Also when it is not asleep: it will look once more.
    pub(super) fn rouse(&self) {
        // A bell that cannot take one more ring is rung already.
        self.event.write(1).ok();
    }

    /// Says that it will sleep: what it looks at after this cannot be missed.
    pub(super) fn doze(&self) {
        self.asleep.store(true, Ordering::SeqCst);
    }

    pub(super) fn rise(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

/// One doorbell register. There is one for every queue that could be.
#[derive(Default)]
pub(super) struct Doorbell {
    /// Entries of its queue, 0 while there is none.
    size: AtomicU32,
    value: AtomicU32,
    /// Of a completion queue: the driver's head, as far as it matters to the wire.
    level: AtomicU32,
    /// Of a completion queue: it is full, and its thread waits for the guest.
    full: AtomicBool,
    waker: Mutex<Option<Arc<Waker>>>,
}

/// Of `level`: the queue has something that the guest has not seen and wants to be told of.
const PENDING: u32 = 1 << 16;

impl Doorbell {
    /// Connects it to a queue.
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

/// Guest's mistakes with doorbells, to be reported as events.
pub(super) const INVALID_REGISTER: u8 = 1 << 0;
pub(super) const INVALID_VALUE: u8 = 1 << 1;

/// All doorbells of the controller, and the wire that depends on them.
pub(super) struct Doorbells {
    tails: Vec<Doorbell>,
    heads: Vec<Doorbell>,
    interrupt: Interrupt,
    /// INTMS and INTMC. The lock orders changes of the wire.
    mask: Mutex<u32>,
    mistakes: AtomicU8,
    /// Whom to tell of mistakes.
    pub(super) kick: Arc<EventFd>,
}

impl Doorbells {
    /// For queues from 0 to `queues`.
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

    /// The guest wrote the `number`th doorbell register.
    pub(super) fn ring(&self, number: u64, value: u32) {
        let bells = if number.is_multiple_of(2) { &self.tails } else { &self.heads };
        let queue = usize::try_from(number / 2).unwrap_or(usize::MAX);
        let Some(bell) = bells.get(queue) else { return self.mistake(INVALID_REGISTER) };
        match bell.size.load(Ordering::SeqCst) {
            0 => return self.mistake(INVALID_REGISTER),
            size if value >= size => return self.mistake(INVALID_VALUE),
            _ => bell.value.store(value, Ordering::SeqCst),
        }
        if number.is_multiple_of(2) {
            bell.wake();
            return;
        }
        if bell.full.load(Ordering::SeqCst) {
            bell.wake();
        }
        self.settle();
    }

    pub(super) fn mistake(&self, what: u8) {
        if self.mistakes.fetch_or(what, Ordering::SeqCst) & what == 0 {
            self.kick.write(1).ok();
        }
    }

    /// What went wrong since this was asked last.
    pub(super) fn take_mistakes(&self) -> u8 {
        self.mistakes.swap(0, Ordering::SeqCst)
    }

    pub(super) fn mask(&self) -> u32 {
        *self.mask.lock().expect("no device panicked")
    }

    pub(super) fn set_mask(&self, change: impl FnOnce(u32) -> u32) {
        let mut mask = self.mask.lock().expect("no device panicked");
        *mask = change(*mask);
        self.level(*mask);
    }

    /// Makes the wire what the queues say, where it is in use.
    pub(super) fn settle(&self) {
        if !self.uses_messages() {
            self.level(*self.mask.lock().expect("no device panicked"));
        }
    }

    pub(super) fn uses_messages(&self) -> bool {
        self.interrupt.msix.as_ref().is_some_and(|msix| msix.is_enabled())
    }

    /// Under the lock of the mask.
    fn level(&self, mask: u32) {
        let Some(line) = &self.interrupt.line else { return };
        let high = self.heads.iter().any(|bell| {
            let level = bell.level.load(Ordering::SeqCst);
            let (posted, vector) = (level & 0xffff, level >> 17 & 31);
            level & PENDING != 0 && posted != bell.value() && mask >> vector & 1 == 0
        });
        line.set(high);
    }

    /// For the wire, whether it is in use or not.
    fn raise(&self, queue: &Completion) {
        let vector = u32::from(queue.vector) & 31;
        self.head(queue.id).level.store(vector << 17 | PENDING | queue.tail, Ordering::SeqCst);
    }

    /// Tells the guest that a queue has something new.
    fn tell(&self, queue: &Completion) {
        if !queue.interrupts {
            return;
        }
        self.raise(queue);
        if !self.interrupt.message(queue.vector) {
            self.level(*self.mask.lock().expect("no device panicked"));
        }
    }
}

/// Where a doorbell is shadowed in the guest's memory, and where the guest reads from which value
/// on a ring is asked for.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Shadow {
    pub(super) doorbell: u64,
    pub(super) event: u64,
}

impl Shadow {
    fn read(self, memory: &Memory) -> Result<u32, NoMemory> {
        load(memory, self.doorbell)
    }

    /// Asks for a ring from `value` on. What is read after this cannot be missed.
    fn ask(self, memory: &Memory, value: u32) -> Result<(), NoMemory> {
        store(memory, self.event, value)?;
        fence(Ordering::SeqCst);
        Ok(())
    }

    fn begin(self, memory: &Memory, value: u32) -> Result<(), NoMemory> {
        store(memory, self.doorbell, value)?;
        self.ask(memory, value)
    }
}

fn load(memory: &Memory, at: u64) -> Result<u32, NoMemory> {
    memory.ram()?.load(GuestAddress(at), Ordering::Acquire).map_err(|_| NoMemory)
}

fn store(memory: &Memory, at: u64, value: u32) -> Result<(), NoMemory> {
    memory.ram()?.store(value, GuestAddress(at), Ordering::Release).map_err(|_| NoMemory)
}

/// A submission queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Submission {
    pub(super) id: u16,
    pub(super) size: u32,
    pub(super) at: u64,
    pub(super) head: u32,
    /// As last seen.
    pub(super) tail: u32,
    pub(super) shadow: Option<Shadow>,
    /// Commands that were fetched and not answered, and how many requests these are for.
    #[serde(skip)]
    pub(super) under_way: u32,
    #[serde(skip)]
    pub(super) requests: u32,
}

impl Submission {
    pub(super) fn new(id: u16, size: u32, at: u64) -> Self {
        Self { id, size, at, head: 0, tail: 0, shadow: None, under_way: 0, requests: 0 }
    }

    /// Whether it is one of a controller with `queues` queues.
    pub(super) fn is_valid(&self, queues: u16, most: u32) -> bool {
        let fits = self.id <= queues && (2..=most).contains(&self.size);
        fits && self.head < self.size && self.tail < self.size
    }

    /// Looks how far the guest filled it.
    pub(super) fn look(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
        let Some(shadow) = self.shadow else {
            self.tail = bells.tail(self.id).value();
            return Ok(());
        };
        match shadow.read(memory)? {
            tail if tail < self.size => self.tail = tail,
            _ => bells.mistake(INVALID_VALUE),
        }
        Ok(())
    }

    /// Has the guest shadow its doorbell.
    pub(super) fn follow(&mut self, memory: &Memory, shadow: Shadow) -> Result<(), NoMemory> {
        self.shadow = Some(shadow);
        shadow.begin(memory, self.tail)
    }

    /// Before sleep: the next command must ring.
    pub(super) fn ask(&self, memory: &Memory) -> Result<(), NoMemory> {
        self.shadow.map_or(Ok(()), |shadow| shadow.ask(memory, self.tail))
    }

    /// Whether there is a command that may be started.
    pub(super) fn has_more(&self) -> bool {
        self.head != self.tail && self.requests < REQUESTS
    }

    /// A command was answered, which counted as this many requests.
    pub(super) fn answered(&mut self, requests: u32) {
        // A saved request for events may be of a queue that had none under way.
        self.under_way = self.under_way.saturating_sub(1);
        self.requests = self.requests.saturating_sub(requests);
    }

    /// Fetches what it has now, up to a limit.
    pub(super) fn fetch(
        &mut self,
        memory: &Memory,
        commands: &mut Vec<Command>,
    ) -> Result<(), NoMemory> {
        let mut bytes = [0; ENTRY * BATCH];
        while self.has_more() {
            let end = if self.tail > self.head { self.tail } else { self.size };
            let room = (REQUESTS - self.requests).min(end - self.head);
            let count = usize::try_from(room).unwrap_or(BATCH).min(BATCH);
            let read = &mut bytes[..count * ENTRY];
            let offset = u64::from(self.head) * ENTRY as u64;
            memory.read(self.at.checked_add(offset).ok_or(NoMemory)?, read)?;
            for entry in read.as_chunks::<ENTRY>().0 {
                // One before it may have many ranges.
                if !self.has_more() {
                    break;
                }
                let command = Command::new(*entry);
                self.head = (self.head + 1) % self.size;
                self.under_way += 1;
                self.requests += if self.id == 0 { 1 } else { io::requests(&command) };
                commands.push(command);
            }
        }
        Ok(())
    }
}

/// A completion queue.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Completion {
    pub(super) id: u16,
    pub(super) size: u32,
    pub(super) at: u64,
    /// As last seen.
    pub(super) head: u32,
    pub(super) tail: u32,
    /// What the phase bit of the next entry will not be.
    phase: bool,
    pub(super) vector: u16,
    pub(super) interrupts: bool,
    pub(super) shadow: Option<Shadow>,
    /// What is finished and has no room.
    waiting: VecDeque<Completed>,
    /// Something was posted that the guest was not told of.
    #[serde(skip)]
    fresh: bool,
}

impl Completion {
    pub(super) fn new(id: u16, size: u32, at: u64, vector: Option<u16>) -> Self {
        let (head, tail, phase, shadow, waiting, fresh) = Default::default();
        let (interrupts, vector) = (vector.is_some(), vector.unwrap_or_default());
        Self { id, size, at, head, tail, phase, vector, interrupts, shadow, waiting, fresh }
    }

    /// Whether it is one of a controller with `queues` queues.
    pub(super) fn is_valid(&self, queues: u16, most: u32) -> bool {
        let fits = self.id <= queues && (2..=most).contains(&self.size);
        fits && self.head < self.size && self.tail < self.size
    }

    /// Something is finished that has no room.
    pub(super) fn is_full(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Writes an entry, or keeps it until there is room.
    pub(super) fn post(
        &mut self,
        done: Completed,
        bells: &Doorbells,
        memory: &Memory,
    ) -> Result<(), NoMemory> {
        self.waiting.push_back(done);
        self.drain(bells, memory)
    }

    /// Writes what has room.
    pub(super) fn drain(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
        while let Some(done) = self.waiting.front().copied() {
            let next = (self.tail + 1) % self.size;
            if next == self.head {
                self.look(bells, memory)?;
                if next == self.head {
                    break;
                }
            }
            let at = self.at.checked_add(u64::from(self.tail) * COMPLETION).ok_or(NoMemory)?;
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

    /// Looks how far the guest emptied it.
    fn look(&mut self, bells: &Doorbells, memory: &Memory) -> Result<(), NoMemory> {
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
            _ => bells.mistake(INVALID_VALUE),
        }
        Ok(())
    }

    /// Has the guest shadow its doorbell.
    pub(super) fn follow(&mut self, memory: &Memory, shadow: Shadow) -> Result<(), NoMemory> {
        self.shadow = Some(shadow);
        shadow.begin(memory, self.head)
    }

    /// Tells the guest of what was posted, once for all of it.
    pub(super) fn tell(&mut self, bells: &Doorbells) {
        if std::mem::take(&mut self.fresh) {
            bells.tell(self);
        }
    }

    /// Before sleep: true when there is room for what waits, else the guest rings when it makes
    /// some.
    pub(super) fn has_room(&mut self, bells: &Doorbells, memory: &Memory) -> bool {
        bells.head(self.id).full.store(self.is_full(), Ordering::SeqCst);
        if !self.is_full() {
            return false;
        }
        let asked = self.shadow.map_or(Ok(()), |shadow| shadow.ask(memory, self.head));
        asked.is_ok()
            && self.look(bells, memory).is_ok()
            && (self.tail + 1) % self.size != self.head
    }

    /// After a while without a thread.
    pub(super) fn resume(&self, bells: &Doorbells, waker: &Arc<Waker>) {
        bells.head(self.id).open(self.size, self.head, waker);
        if self.interrupts {
            bells.raise(self);
        }
    }

    /// For a state that is saved.
    pub(super) fn freeze(&mut self, bells: &Doorbells, memory: &Memory) {
        // Without memory its last head is as good as any.
        self.look(bells, memory).ok();
    }
}
