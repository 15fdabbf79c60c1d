//! One split virtqueue (VIRTIO 1.3, 2.7) while its device runs: chains go out, and come back used.
//!
//! The ring's indices are `virtio-queue`'s; the descriptors are walked here, because what is wrong
//! with a chain must be told from the end of a chain.
//!
//! Threats: everything in the rings is the guest's, and may change while it is read. An index, a
//! descriptor or a table that cannot be breaks the device, which the guest then has to reset, and
//! is logged once. A chain that is offered twice, or that never ends, cannot make us hold or walk
//! more than the queue's size. Addresses are only checked when they are used: [`Memory`] does that.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue as Indices, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

use super::signal::Signal;
use host::memory::{Memory, NoMemory, Piece, part};
use host::net::vhost;

/// Most pieces of one chain. Linux sends 256 and Windows 514 at once; a host's vector has 1024.
const PIECES: usize = 1024 + 2;
/// Most descriptors of one table that are looked at, with those that describe nothing.
const WALK: u32 = 4096;
/// Bytes of a descriptor.
const DESCRIPTOR: u32 = 16;
/// The driver asks for no interrupts, if it did not negotiate indices for that.
const NO_INTERRUPT: u16 = 1;

/// Sets one of a queue's addresses.
type Place = fn(&mut Indices, GuestAddress) -> Result<(), virtio_queue::Error>;

/// What of a queue is saved: what the driver programmed, and how far both sides are.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) enabled: bool,
    pub(super) descriptors: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
    pub(super) next_available: u16,
    pub(super) next_used: u16,
    /// Chains that were taken and not given back: they are taken again first.
    pub(super) held: Vec<u16>,
}

/// A queue of a running device. It goes to the thread that serves it, and back when it stops.
pub struct Queue {
    number: u16,
    indices: Indices,
    memory: Memory,
    bell: Arc<EventFd>,
    signal: Arc<Signal>,
    /// One bit for each chain that is out.
    held: Vec<bool>,
    /// Chains that were out when the device was parked.
    again: VecDeque<u16>,
    /// Chains whose vectors are of use again.
    spare: Vec<Chain>,
    /// Used since the driver was told, and the index then.
    untold: bool,
    told: u16,
    broken: bool,
}

/// A request of the driver: what it gives, and where it wants the answer.
#[derive(Debug, Default)]
pub struct Chain {
    head: u16,
    /// From the driver.
    pub readable: Vec<Piece>,
    /// For the driver.
    pub writable: Vec<Piece>,
}

/// Bytes of these pieces together.
pub fn length(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}

/// Takes the first bytes of these pieces away.
fn cut(pieces: &mut Vec<Piece>, length: u32) {
    let mut left = length;
    pieces.retain_mut(|piece| {
        let cut = left.min(piece.length);
        left -= cut;
        piece.address = piece.address.wrapping_add(u64::from(cut));
        piece.length -= cut;
        piece.length > 0
    });
}

impl Chain {
    /// Which chain of the queue it is: unique among those that are out.
    pub fn head(&self) -> u16 {
        self.head
    }

    /// Takes the first `N` bytes of what the driver gives, however it cut them.
    ///
    /// # Errors
    ///
    /// When there are fewer, or they are not in memory.
    pub fn take<const N: usize>(&mut self, memory: &Memory) -> Result<[u8; N], NoMemory> {
        let mut bytes = [0; N];
        memory.gather(&self.readable, &mut bytes)?;
        cut(&mut self.readable, u32::try_from(N).map_err(|_| NoMemory)?);
        Ok(bytes)
    }

    /// Leaves out the first bytes of what the driver gives.
    pub fn skip(&mut self, length: u32) {
        cut(&mut self.readable, length);
    }

    /// Takes the first bytes of the room for the answer, if there are so many.
    pub fn take_room(&mut self, length: u32) -> Option<Vec<Piece>> {
        let room = part(&self.writable, 0, length.into());
        if self::length(&room) < length.into() {
            return None;
        }
        cut(&mut self.writable, length);
        Some(room)
    }

    /// Takes the last byte of what the driver wants: most devices put their status there.
    pub fn take_last(&mut self) -> Option<u64> {
        let last = self.writable.last_mut()?;
        last.length -= 1;
        let at = last.address.wrapping_add(u64::from(last.length));
        if last.length == 0 {
            self.writable.pop();
        }
        Some(at)
    }
}

impl Queue {
    pub(super) fn new(
        (number, most): (u16, u16),
        ring: &Ring,
        event_index: bool,
        memory: Memory,
        (bell, signal): (Arc<EventFd>, Arc<Signal>),
    ) -> anyhow::Result<Self> {
        let mut indices = Indices::new(most).context("a queue of our own")?;
        indices.try_set_size(ring.size).with_context(|| format!("{} entries", ring.size))?;
        let places: [(&str, u64, Place); 3] = [
            ("descriptors", ring.descriptors, Indices::try_set_desc_table_address),
            ("driver area", ring.driver, Indices::try_set_avail_ring_address),
            ("device area", ring.device, Indices::try_set_used_ring_address),
        ];
        for (what, address, place) in places {
            place(&mut indices, GuestAddress(address))
                .with_context(|| format!("{what} at {address:#x}"))?;
        }
        indices.set_next_avail(ring.next_available);
        indices.set_next_used(ring.next_used);
        indices.set_event_idx(event_index);
        indices.set_ready(true);
        let mut held = vec![false; usize::from(ring.size)];
        for head in &ring.held {
            let place = held.get_mut(usize::from(*head));
            *place.with_context(|| format!("chain {head} of {}", ring.size))? = true;
        }
        Ok(Self {
            number,
            indices,
            memory,
            bell,
            signal,
            held,
            again: ring.held.iter().copied().collect(),
            spare: Vec::new(),
            untold: false,
            told: ring.next_used,
            broken: false,
        })
    }

    /// Whether the three areas are memory.
    pub(super) fn is_in_memory(&self) -> bool {
        self.memory.ram().is_ok_and(|ram| self.indices.is_valid(ram))
    }

    /// What is saved of it.
    pub(super) fn ring(&self) -> Ring {
        let held = (0_u16..).zip(&self.held).filter_map(|(head, out)| out.then_some(head));
        Ring {
            size: self.indices.size(),
            enabled: true,
            descriptors: self.indices.desc_table(),
            driver: self.indices.avail_ring(),
            device: self.indices.used_ring(),
            next_available: self.indices.next_avail(),
            next_used: self.indices.next_used(),
            held: held.collect(),
        }
    }

    /// Its number in the device.
    pub fn number(&self) -> u16 {
        self.number
    }

    /// Rung by the driver when there is something to take.
    pub fn bell(&self) -> &Arc<EventFd> {
        &self.bell
    }

    /// Guest memory, for what is in the chains.
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Tells the driver of changes in the device's configuration.
    pub fn signal(&self) -> &Arc<Signal> {
        &self.signal
    }

    /// Takes the next chain, if there is one.
    pub fn pop(&mut self) -> Option<Chain> {
        if self.broken {
            return None;
        }
        let mut chain = self.spare.pop().unwrap_or_default();
        match self.next(&mut chain) {
            Ok(true) => Some(chain),
            Ok(false) => {
                self.spare.push(chain);
                None
            }
            Err(error) => {
                self.fail(&format!("{error:#}"));
                None
            }
        }
    }

    fn next(&mut self, chain: &mut Chain) -> anyhow::Result<bool> {
        // Without bus mastering nothing is done, and nothing is wrong.
        let Ok(ram) = self.memory.ram() else { return Ok(false) };
        let size = self.indices.size();
        let head = if let Some(head) = self.again.pop_front() {
            head
        } else {
            let Some(next) = self.indices.iter(ram)?.next() else { return Ok(false) };
            let head = next.head_index();
            let held = self.held.get_mut(usize::from(head));
            let held = held.with_context(|| format!("chain {head} of {size} is offered"))?;
            ensure!(!std::mem::replace(held, true), "chain {head} is offered while it is in use");
            head
        };
        chain.head = head;
        walk(ram, (self.indices.desc_table(), size), chain)?;
        Ok(true)
    }

    /// Gives a chain back, of whose writable part the first `written` bytes are the answer.
    pub fn push(&mut self, chain: Chain, written: u32) {
        self.push_all(std::iter::once((chain, written)));
    }

    /// Gives chains back that hold one answer together: the driver sees all of them, or none.
    pub fn push_all(&mut self, chains: impl IntoIterator<Item = (Chain, u32)>) {
        let (first, size) = (self.indices.next_used(), self.indices.size());
        let (mut next, ring) = (first, self.indices.used_ring());
        for (mut chain, written) in chains {
            self.held[usize::from(chain.head)] = false;
            let element = u64::from(chain.head) | u64::from(written) << 32;
            let slot = GuestAddress(ring + 4 + 8 * u64::from(next % size));
            // What cannot be written into the ring is lost on a driver that took its memory away.
            if let Ok(ram) = self.memory.ram()
                && !self.broken
                && ram.write_obj(element.to_le(), slot).is_ok()
            {
                next = next.wrapping_add(1);
            }
            chain.readable.clear();
            chain.writable.clear();
            if self.spare.len() < self.held.len() {
                self.spare.push(chain);
            }
        }
        if let Ok(ram) = self.memory.ram()
            && next != first
        {
            self.indices.set_next_used(next);
            // The elements are seen before the index that covers them.
            let published = ram.store(next.to_le(), GuestAddress(ring + 2), Ordering::Release);
            self.untold |= published.is_ok();
        }
    }

    /// Leaves a chain as if it had not been taken: it comes again first.
    pub fn undo(&mut self, chain: Chain) {
        self.again.push_front(chain.head);
        drop(chain);
    }

    /// Interrupts the driver if something was used, and if it wants to know.
    pub fn notify(&mut self) {
        if std::mem::take(&mut self.untold) && self.is_awaited() {
            self.signal.used(self.number);
        }
    }

    fn is_awaited(&mut self) -> bool {
        let Ok(ram) = self.memory.ram() else { return false };
        let now = self.indices.next_used();
        let told = std::mem::replace(&mut self.told, now);
        // What was used is seen before the driver's wish is read.
        fence(Ordering::SeqCst);
        if self.indices.event_idx_enabled() {
            let event = self.indices.avail_ring() + 4 + 2 * u64::from(self.indices.size());
            let event = ram.load::<u16>(GuestAddress(event), Ordering::Relaxed);
            // VIRTIO 1.3, 2.7.10.1: whether the index passed the one that the driver named. A ring
            // that is not memory any more: let the driver find out.
            return event.map_or(true, |event| {
                let passed = now.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
                passed < now.wrapping_sub(told)
            });
        }
        let flags = ram.load::<u16>(GuestAddress(self.indices.avail_ring()), Ordering::Relaxed);
        flags.map_or(true, |flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }

    /// Where the device area is.
    pub fn device_area(&self) -> u64 {
        self.indices.used_ring()
    }

    /// Asks the driver not to ring: we look ourselves.
    pub fn quiet(&mut self) {
        if let Ok(ram) = self.memory.ram() {
            self.indices.disable_notification(ram).ok();
        }
    }

    /// Asks the driver to ring. True when something came meanwhile, for which it did not.
    pub fn listen(&mut self) -> bool {
        // Of a broken ring nothing is taken, whatever its indices say.
        if self.broken {
            return false;
        }
        let Ok(ram) = self.memory.ram() else { return false };
        !self.again.is_empty() || self.indices.enable_notification(ram).unwrap_or(false)
    }

    /// Lends the rings to somebody else; nothing of this queue is asked until they come back. Not
    /// while chains are out other than the last ones in their order, or the ring is broken.
    pub fn lend(&mut self) -> Option<vhost::Ring<'_>> {
        let ram = self.memory.ram().ok().filter(|_| !self.broken)?;
        let (size, count) = (self.indices.size(), u16::try_from(self.again.len()).ok()?);
        let (first, mut held) = (self.indices.next_avail().wrapping_sub(count), self.held.clone());
        for step in 0..count {
            let entry = u64::from(first.wrapping_add(step) % size);
            let entry = GuestAddress(self.indices.avail_ring() + 4 + 2 * entry);
            let head = u16::from_le(ram.load(entry, Ordering::Relaxed).ok()?);
            let out = held.get_mut(usize::from(head))?;
            if !std::mem::take(out) {
                return None;
            }
        }
        if held.contains(&true) {
            return None;
        }
        self.held = held;
        self.again.clear();
        self.indices.set_next_avail(first);
        Some(vhost::Ring {
            size,
            descriptors: self.indices.desc_table(),
            driver: self.indices.avail_ring(),
            device: self.indices.used_ring(),
            next: first,
            bell: &self.bell,
        })
    }

    /// Has the rings again, this far.
    pub fn regain(&mut self, position: vhost::Position) {
        self.indices.set_next_avail(position.available);
        self.indices.set_next_used(position.used);
        self.told = position.used;
        self.untold = false;
        // Whether the driver was told of the last ones, only the other one knew.
        self.signal.used(self.number);
    }

    /// Breaks the device: the driver has to reset it. For what no chain can answer.
    pub fn fail(&mut self, why: &str) {
        self.broken = true;
        self.signal.fail(self.number, why);
    }
}

/// Collects the pieces of a chain.
fn walk(ram: &GuestMemoryMmap, table: (u64, u16), chain: &mut Chain) -> anyhow::Result<()> {
    let (mut table, mut size) = (table.0, u32::from(table.1));
    let (mut at, mut left) = (u32::from(chain.head), size);
    let (mut indirect, mut total) = (false, 0_u32);
    loop {
        ensure!(at < size, "descriptor {at} of {size}");
        ensure!(left > 0, "a chain that does not end");
        left -= 1;
        let place = table.checked_add(u64::from(at * DESCRIPTOR)).context("a descriptor table")?;
        let descriptor = ram.read_obj::<Descriptor>(GuestAddress(place));
        let descriptor = descriptor
            .with_context(|| format!("a descriptor at {place:#x}, which is no memory"))?;
        if descriptor.refers_to_indirect_table() {
            let bytes = descriptor.len();
            ensure!(!indirect, "an indirect table in an indirect table");
            ensure!(!descriptor.has_next(), "an indirect table with a successor");
            ensure!(
                bytes > 0 && bytes.is_multiple_of(DESCRIPTOR),
                "an indirect table of {bytes} bytes"
            );
            (table, size) = (descriptor.addr().0, bytes / DESCRIPTOR);
            // A table can have 2^28 descriptors without a byte: nobody is to walk those.
            (at, left, indirect) = (0, size.min(WALK), true);
            continue;
        }
        let piece = Piece { address: descriptor.addr().0, length: descriptor.len() };
        total = total.checked_add(piece.length).context("a chain of more than 4 GiB")?;
        if piece.length > 0 {
            if descriptor.is_write_only() {
                chain.writable.push(piece);
            } else if chain.writable.is_empty() {
                chain.readable.push(piece);
            } else {
                bail!("a part to read behind a part to write");
            }
        }
        ensure!(
            chain.readable.len() + chain.writable.len() <= PIECES,
            "a chain of more than {PIECES} pieces"
        );
        if !descriptor.has_next() {
            return Ok(());
        }
        at = u32::from(descriptor.next());
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::pci::Interrupt;

    /// Four entries: descriptors, the driver's area, the device's.
    const AT: [u64; 3] = [0x1000, 0x2000, 0x3000];

    /// A queue whose driver offers these heads, of one byte each.
    fn queue(offered: &[u16], ring: Ring) -> Queue {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let memory = Memory::new(Arc::new(ram));
        for head in 0..4 {
            let bytes = [&0x8000_u64.to_le_bytes()[..], &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
            memory.write(AT[0] + 16 * head, &bytes).unwrap();
        }
        for (place, head) in (0..).zip(offered) {
            memory.write(AT[1] + 4 + 2 * place, &head.to_le_bytes()).unwrap();
        }
        let index = u16::try_from(offered.len()).unwrap();
        memory.write(AT[1] + 2, &index.to_le_bytes()).unwrap();
        let [descriptors, driver, device] = AT;
        let ring = Ring { size: 4, enabled: true, descriptors, driver, device, ..ring };
        let interrupt = Interrupt { msix: None, line: None };
        let signal = Arc::new(Signal::new(interrupt, "test", 1));
        Queue::new((0, 4), &ring, false, memory, (Arc::new(EventFd::new(0).unwrap()), signal))
            .unwrap()
    }

    #[test]
    fn rings_are_lent_from_the_first_chain_on_that_was_not_used() {
        let mut queue = queue(&[3, 0, 1], Ring::default());
        let chains = [(); 3].map(|()| queue.pop().unwrap());
        assert!(queue.lend().is_none(), "chains are out");
        let [first, second, third] = chains;
        queue.push(first, 0);
        queue.undo(third);
        assert!(queue.lend().is_none(), "one is out");
        queue.undo(second);
        let lent = queue.lend().unwrap();
        assert_eq!((lent.next, lent.size, lent.device), (1, 4, AT[2]));
        queue.regain(vhost::Position { available: 2, used: 2 });
        assert_eq!(queue.pop().unwrap().head(), 1);
        assert!(queue.pop().is_none());
        let ring = queue.ring();
        assert_eq!((ring.next_available, ring.next_used, ring.held), (3, 2, vec![1]));
    }

    #[test]
    fn what_was_saved_is_lent_only_if_the_ring_still_holds_it() {
        let saved =
            |held: &[u16]| Ring { next_available: 3, held: held.to_vec(), ..Ring::default() };
        let mut same = queue(&[3, 0, 1], saved(&[0, 1]));
        assert_eq!(same.lend().map(|lent| lent.next), Some(1));
        for held in [&[2, 3][..], &[0, 3], &[0, 1, 2]] {
            assert!(queue(&[3, 0, 1], saved(held)).lend().is_none(), "{held:?}");
        }
        assert!(queue(&[3, 1, 1], saved(&[0, 1])).lend().is_none(), "one twice");
    }
}
