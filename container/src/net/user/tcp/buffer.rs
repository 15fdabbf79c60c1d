//! Byte queues, and a limit of their total memory.
//!
//! Each direction of a connection has a small capacity of its own. All other memory comes from a
//! budget that connections share: the more connections, the smaller their windows.

use std::cell::Cell;
use std::rc::Rc;

/// The budget of the guest's own connections, in bytes.
pub const SHARED: usize = 64 << 20;
/// The minimum capacity of one direction, in bytes. It is not part of a budget.
pub const MIN_CAPACITY: usize = 16 << 10;

/// The rest of the bytes that connections share.
#[derive(Clone, Debug)]
pub struct Budget(Rc<Cell<usize>>);

impl Default for Budget {
    fn default() -> Self {
        Self::new(SHARED)
    }
}

impl Budget {
    pub fn new(bytes: usize) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }
}

#[derive(Debug)]
pub struct Capacity {
    size: usize,
    max: usize,
    budget: Budget,
}

impl Capacity {
    /// A capacity of `size` bytes if the budget has them, else of [`MIN_CAPACITY`]. It may grow to
    /// `max`.
    pub fn new(size: usize, max: usize, budget: &Budget) -> Self {
        let mut capacity = Self { size: MIN_CAPACITY, max, budget: budget.clone() };
        capacity.add(size.saturating_sub(MIN_CAPACITY));
        capacity
    }

    pub fn size(&self) -> usize {
        self.size
    }

    /// Doubles the capacity, up to its maximum, if the budget has the bytes.
    pub fn grow(&mut self) {
        self.add(self.size.min(self.max.saturating_sub(self.size)));
    }

    fn add(&mut self, more: usize) {
        if let Some(rest) = self.budget.0.get().checked_sub(more) {
            self.budget.0.set(rest);
            self.size += more;
        }
    }

    /// Returns the bytes above [`MIN_CAPACITY`] to the budget.
    pub fn shrink(&mut self) {
        let shared = std::mem::replace(&mut self.size, MIN_CAPACITY) - MIN_CAPACITY;
        self.budget.0.set(self.budget.0.get() + shared);
    }
}

impl Drop for Capacity {
    fn drop(&mut self) {
        self.shrink();
    }
}

#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    /// The number of bytes at the front that were removed.
    start: usize,
}

impl Buffer {
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.make_room(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    /// Appends bytes by a function. The vector has at least `spare` bytes of spare capacity.
    pub fn fill<T>(&mut self, spare: usize, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        self.make_room(spare);
        fill(&mut self.bytes)
    }

    /// Makes spare capacity: moves the bytes to the front, and allocates memory if needed.
    fn make_room(&mut self, spare: usize) {
        if self.bytes.capacity() - self.bytes.len() < spare {
            self.bytes.drain(..self.start);
            self.start = 0;
            self.bytes.reserve_exact(spare);
        }
    }

    pub fn take(&mut self, count: usize) {
        self.start = (self.start + count).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Whether the queue is empty but has memory.
    pub fn is_loaded(&self) -> bool {
        self.is_empty() && self.bytes.capacity() > 0
    }

    /// Frees the memory of an empty queue.
    pub fn release(&mut self) {
        if self.is_empty() {
            *self = Self::default();
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_buffer_returns_its_input_and_does_not_grow() {
        let mut buffer = Buffer::default();
        let (mut put, mut got) = (0_u8, 0_u8);
        for round in 0..1000_u16 {
            let count = u8::try_from(round % 97).unwrap();
            let bytes: Vec<u8> = (0..count).map(|it| put.wrapping_add(it)).collect();
            put = put.wrapping_add(count);
            buffer.push(&bytes);
            while buffer.len() > 200 {
                assert_eq!(buffer.bytes()[0], got);
                buffer.take(1);
                got = got.wrapping_add(1);
            }
        }
        assert!(buffer.bytes.capacity() < 1000, "{}", buffer.bytes.capacity());
        buffer.take(usize::MAX >> 1);
        assert!(buffer.is_empty());
        buffer.release();
        assert_eq!(buffer.bytes.capacity(), 0);
    }

    #[test]
    fn all_buffers_together_stay_within_the_budget() {
        let budget = Budget::default();
        let mut capacities: Vec<Capacity> =
            (0..4000).map(|_| Capacity::new(1 << 16, 1 << 20, &budget)).collect();
        for _ in 0..10 {
            capacities.iter_mut().for_each(Capacity::grow);
        }
        let shared: usize = capacities.iter().map(|capacity| capacity.size() - MIN_CAPACITY).sum();
        assert!(shared <= SHARED && shared > SHARED - (1 << 20), "{shared}");
        assert!(capacities.iter().all(|capacity| capacity.size() <= 1 << 20));
        capacities[..2000].iter_mut().for_each(Capacity::shrink);
        assert!(capacities[..2000].iter().all(|capacity| capacity.size() == MIN_CAPACITY));
        capacities.clear();
        assert_eq!(budget.0.get(), SHARED);
    }
}
