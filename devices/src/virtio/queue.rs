//! One split virtqueue (VIRTIO 1.3, 2.7) of a running device: takes available chains and returns
//! them as used.
//!
//! The `virtio-queue` crate keeps the ring's indices. Descriptors are walked here, because its
//! iterator does not distinguish a malformed chain from the end of a chain.
//!
//! Threats: the guest owns everything in the rings and may change it while it is read. An invalid
//! index, descriptor or table breaks the device until the guest resets it, and is logged once. A
//! chain that is offered twice, or that never ends, cannot make the device hold or walk more than
//! the queue's size. Addresses are checked only when they are used, by [`Memory`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use anyhow::{Context, bail, ensure};
use host::ram::GuestMemoryMmap;
use serde::{Deserialize, Serialize};
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue as Indices, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use super::signal::Signal;
use host::memory::{Memory, NoMemory, Piece, subrange};
use host::net::vhost;

/// Linux sends up to 256 pieces at once, Windows 514. The host's I/O vector holds 1024.
const MAX_PIECES: usize = 1024 + 2;
/// Limit for one table, including empty descriptors.
const MAX_TABLE_DESCRIPTORS: u32 = 4096;
const DESCRIPTOR_SIZE: u32 = 16;
/// The driver wants no interrupts. Used only if EVENT_IDX was not negotiated.
const NO_INTERRUPT: u16 = 1;

/// Setter for one of a queue's three addresses.
type SetAddress = fn(&mut Indices, GuestAddress) -> Result<(), virtio_queue::Error>;

/// Saved state of a queue: the driver's settings and both ring positions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Ring {
    pub(super) size: u16,
    pub(super) enabled: bool,
    pub(super) descriptors: u64,
    pub(super) driver: u64,
    pub(super) device: u64,
    pub(super) next_available: u16,
    pub(super) next_used: u16,
    /// Heads of the chains that were taken and not returned. They are taken again first.
    pub(super) held: Vec<u16>,
}

/// A queue of a running device. The thread that serves it owns it, and returns it when it stops.
pub struct Queue {
    pub number: u16,
    indices: Indices,
    pub memory: Memory,
    pub bell: Arc<EventFd>,
    pub signal: Arc<Signal>,
    /// Indexed by head: whether the device holds this chain.
    held: Vec<bool>,
    /// Heads of the chains that are taken again before new ones.
    again: VecDeque<u16>,
    /// Empty chains whose vectors are reused.
    spare: Vec<Chain>,
    /// Whether chains were used since the last [`Queue::notify`], and the used index at that time.
    notify_pending: bool,
    notified: u16,
    broken: bool,
}

/// A descriptor chain: one request of the driver, with space for the device's answer.
#[derive(Debug, Default)]
pub struct Chain {
    pub head: u16,
    /// Device-readable pieces.
    pub readable: Vec<Piece>,
    /// Device-writable pieces.
    pub writable: Vec<Piece>,
}

pub fn length(pieces: &[Piece]) -> u64 {
    pieces.iter().map(|piece| u64::from(piece.length)).sum()
}

/// Removes the first `length` bytes of these pieces.
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
    /// Removes and returns the first `N` readable bytes, however the driver split them. Fails also
    /// if fewer are left.
    pub fn take<const N: usize>(&mut self, memory: &Memory) -> Result<[u8; N], NoMemory> {
        let mut bytes = [0; N];
        memory.gather(&self.readable, &mut bytes)?;
        cut(&mut self.readable, u32::try_from(N).map_err(|_| NoMemory)?);
        Ok(bytes)
    }

    /// Removes the first `length` readable bytes.
    pub fn skip(&mut self, length: u32) {
        cut(&mut self.readable, length);
    }

    /// Removes and returns the first `length` writable bytes. Returns None if there are fewer.
    pub fn take_writable(&mut self, length: u32) -> Option<Vec<Piece>> {
        let room = subrange(&self.writable, 0, length.into());
        if self::length(&room) < length.into() {
            return None;
        }
        cut(&mut self.writable, length);
        Some(room)
    }

    /// Removes the last writable byte and returns its address. Most devices write their status
    /// there.
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

/// The parts of a queue that do not change from reset to reset.
pub(super) struct Endpoint {
    pub(super) number: u16,
    pub(super) max_size: u16,
    pub(super) bell: Arc<EventFd>,
    pub(super) signal: Arc<Signal>,
}

impl Queue {
    pub(super) fn new(
        endpoint: Endpoint,
        ring: &Ring,
        event_index: bool,
        memory: Memory,
    ) -> anyhow::Result<Self> {
        let Endpoint { number, max_size, bell, signal } = endpoint;
        let mut indices = Indices::new(max_size).context("a queue of our own")?;
        indices.try_set_size(ring.size).with_context(|| format!("{} entries", ring.size))?;
        let areas: [(&str, u64, SetAddress); 3] = [
            ("descriptors", ring.descriptors, Indices::try_set_desc_table_address),
            ("driver area", ring.driver, Indices::try_set_avail_ring_address),
            ("device area", ring.device, Indices::try_set_used_ring_address),
        ];
        for (area, address, set_address) in areas {
            set_address(&mut indices, GuestAddress(address))
                .with_context(|| format!("{area} at {address:#x}"))?;
        }
        indices.set_next_avail(ring.next_available);
        indices.set_next_used(ring.next_used);
        indices.set_event_idx(event_index);
        indices.set_ready(true);
        let mut held = vec![false; usize::from(ring.size)];
        for head in &ring.held {
            let slot = held.get_mut(usize::from(*head));
            *slot.with_context(|| format!("chain {head} of {}", ring.size))? = true;
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
            notify_pending: false,
            notified: ring.next_used,
            broken: false,
        })
    }

    pub(super) fn is_in_memory(&self) -> bool {
        self.memory.ram().is_ok_and(|ram| self.indices.is_valid(ram))
    }

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

    /// Takes the next available chain. Returns None on a broken queue.
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
        // Without bus mastering no chain can be taken. This is not an error.
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

    /// Returns a chain as used. The first `written` bytes of its writable part are the answer.
    pub fn push(&mut self, chain: Chain, written: u32) {
        self.push_all(std::iter::once((chain, written)));
    }

    /// Returns chains that hold one answer together. The driver sees all of them at once.
    pub fn push_all(&mut self, chains: impl IntoIterator<Item = (Chain, u32)>) {
        let (first, size) = (self.indices.next_used(), self.indices.size());
        let (mut next, ring) = (first, self.indices.used_ring());
        for (mut chain, written) in chains {
            self.held[usize::from(chain.head)] = false;
            let element = u64::from(chain.head) | u64::from(written) << 32;
            let slot = GuestAddress(ring + 4 + 8 * u64::from(next % size));
            // An element is lost if the driver took the ring's memory away.
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
            // Release: the driver sees the elements before the index that covers them.
            let published = ram.store(next.to_le(), GuestAddress(ring + 2), Ordering::Release);
            self.notify_pending |= published.is_ok();
        }
    }

    /// Returns a chain as if it had not been taken. The next [`Queue::pop`] takes it again.
    pub fn return_chain(&mut self, chain: Chain) {
        self.again.push_front(chain.head);
        drop(chain);
    }

    /// Interrupts the driver if chains were used since the last call and if the driver wants it.
    pub fn notify(&mut self) {
        if std::mem::take(&mut self.notify_pending) && self.is_awaited() {
            self.signal.used(self.number);
        }
    }

    fn is_awaited(&mut self) -> bool {
        let Ok(ram) = self.memory.ram() else { return false };
        let now = self.indices.next_used();
        let notified = std::mem::replace(&mut self.notified, now);
        // The driver must see the used index before its event index or flags are read.
        fence(Ordering::SeqCst);
        if self.indices.event_idx_enabled() {
            let event = self.indices.avail_ring() + 4 + 2 * u64::from(self.indices.size());
            let event = ram.load::<u16>(GuestAddress(event), Ordering::Relaxed);
            // VIRTIO 1.3, 2.7.10.1: whether the used index has passed the driver's event index. If
            // the ring is no longer in memory, the driver is interrupted and finds out.
            return event.map_or(true, |event| {
                let passed = now.wrapping_sub(u16::from_le(event)).wrapping_sub(1);
                passed < now.wrapping_sub(notified)
            });
        }
        let flags = ram.load::<u16>(GuestAddress(self.indices.avail_ring()), Ordering::Relaxed);
        flags.map_or(true, |flags| u16::from_le(flags) & NO_INTERRUPT == 0)
    }

    /// The guest-physical address of the device area (used ring).
    pub fn device_area(&self) -> u64 {
        self.indices.used_ring()
    }

    /// Called while this thread polls the queue.
    pub fn disable_doorbell(&mut self) {
        if let Ok(ram) = self.memory.ram() {
            self.indices.disable_notification(ram).ok();
        }
    }

    /// Returns true if the driver added chains before it saw that.
    pub fn enable_doorbell(&mut self) -> bool {
        // Nothing is taken from a broken ring, whatever its indices say.
        if self.broken {
            return false;
        }
        let Ok(ram) = self.memory.ram() else { return false };
        !self.again.is_empty() || self.indices.enable_notification(ram).unwrap_or(false)
    }

    /// Until [`Queue::take_back`], no other method may be called. Returns None if the ring is
    /// broken, or if the chains held are not the last ones taken, in their order.
    pub fn hand_to_kernel(&mut self) -> Option<vhost::Ring<'_>> {
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

    /// The kernel has processed the rings up to `position`.
    pub fn take_back(&mut self, position: vhost::Position) {
        self.indices.set_next_avail(position.available);
        self.indices.set_next_used(position.used);
        self.notified = position.used;
        self.notify_pending = false;
        // Only the kernel knows whether it announced the last chains to the driver.
        self.signal.used(self.number);
    }

    /// Breaks the device until the driver resets it. For errors that no chain can report.
    pub fn fail(&mut self, why: &str) {
        self.broken = true;
        self.signal.fail(self.number, why);
    }
}

/// Collects the pieces of the chain that starts at `chain.head`.
fn walk(ram: &GuestMemoryMmap, table: (u64, u16), chain: &mut Chain) -> anyhow::Result<()> {
    let (mut table, mut size) = (table.0, u32::from(table.1));
    let (mut at, mut left) = (u32::from(chain.head), size);
    let (mut indirect, mut total) = (false, 0_u32);
    loop {
        ensure!(at < size, "descriptor {at} of {size}");
        ensure!(left > 0, "a chain that does not end");
        left -= 1;
        let address =
            table.checked_add(u64::from(at * DESCRIPTOR_SIZE)).context("a descriptor table")?;
        let descriptor = ram.read_obj::<Descriptor>(GuestAddress(address));
        let descriptor = descriptor
            .with_context(|| format!("a descriptor at {address:#x}, outside of guest memory"))?;
        if descriptor.refers_to_indirect_table() {
            let bytes = descriptor.len();
            ensure!(!indirect, "an indirect table in an indirect table");
            ensure!(!descriptor.has_next(), "an indirect table with a successor");
            ensure!(
                bytes > 0 && bytes.is_multiple_of(DESCRIPTOR_SIZE),
                "an indirect table of {bytes} bytes"
            );
            (table, size) = (descriptor.addr().0, bytes / DESCRIPTOR_SIZE);
            // A table can hold 2^28 empty descriptors: limit how many are walked.
            (at, left, indirect) = (0, size.min(MAX_TABLE_DESCRIPTORS), true);
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
                bail!("a readable piece after a writable one");
            }
        }
        ensure!(
            chain.readable.len() + chain.writable.len() <= MAX_PIECES,
            "a chain of more than {MAX_PIECES} pieces"
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

    /// Addresses of a queue of four entries: descriptors, driver area, device area.
    const AT: [u64; 3] = [0x1000, 0x2000, 0x3000];

    /// A queue whose driver offers these heads. Each chain is one byte long.
    fn queue(offered: &[u16], ring: Ring) -> Queue {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 0x1_0000)]).unwrap();
        let memory = Memory::new(Arc::new(ram));
        for head in 0..4 {
            let bytes = [&0x8000_u64.to_le_bytes()[..], &[1, 0, 0, 0, 0, 0, 0, 0]].concat();
            memory.write(AT[0] + 16 * head, &bytes).unwrap();
        }
        for (entry, head) in (0..).zip(offered) {
            memory.write(AT[1] + 4 + 2 * entry, &head.to_le_bytes()).unwrap();
        }
        let index = u16::try_from(offered.len()).unwrap();
        memory.write(AT[1] + 2, &index.to_le_bytes()).unwrap();
        let [descriptors, driver, device] = AT;
        let ring = Ring { size: 4, enabled: true, descriptors, driver, device, ..ring };
        let interrupt = Interrupt::default();
        let signal = Arc::new(Signal::new(interrupt, "test", 1));
        let bell = Arc::new(EventFd::new(0).unwrap());
        let endpoint = Endpoint { number: 0, max_size: 4, bell, signal };
        Queue::new(endpoint, &ring, false, memory).unwrap()
    }

    #[test]
    fn rings_are_handed_to_the_kernel_at_the_first_unused_chain() {
        let mut queue = queue(&[3, 0, 1], Ring::default());
        let chains = [(); 3].map(|()| queue.pop().unwrap());
        assert!(queue.hand_to_kernel().is_none(), "chains are out");
        let [first, second, third] = chains;
        queue.push(first, 0);
        queue.return_chain(third);
        assert!(queue.hand_to_kernel().is_none(), "one is out");
        queue.return_chain(second);
        let ring = queue.hand_to_kernel().unwrap();
        assert_eq!((ring.next, ring.size, ring.device), (1, 4, AT[2]));
        queue.take_back(vhost::Position { available: 2, used: 2 });
        assert_eq!(queue.pop().unwrap().head, 1);
        assert!(queue.pop().is_none());
        let ring = queue.ring();
        assert_eq!((ring.next_available, ring.next_used, ring.held), (3, 2, vec![1]));
    }

    #[test]
    fn a_saved_ring_goes_to_the_kernel_only_if_it_is_unchanged() {
        let saved =
            |held: &[u16]| Ring { next_available: 3, held: held.to_vec(), ..Ring::default() };
        let mut same = queue(&[3, 0, 1], saved(&[0, 1]));
        assert_eq!(same.hand_to_kernel().map(|ring| ring.next), Some(1));
        for held in [&[2, 3][..], &[0, 3], &[0, 1, 2]] {
            assert!(queue(&[3, 0, 1], saved(held)).hand_to_kernel().is_none(), "{held:?}");
        }
        assert!(queue(&[3, 1, 1], saved(&[0, 1])).hand_to_kernel().is_none(), "one twice");
    }
}
