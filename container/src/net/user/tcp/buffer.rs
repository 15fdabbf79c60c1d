//! Bytes in a row, put in at one end and taken out at the other, and how much room all of them may
//! have together.
//!
//! Each direction of a connection has a small room of its own. All other memory comes from a budget
//! that connections share: many connections have smaller windows than a few.

use std::cell::Cell;
use std::rc::Rc;

/// Bytes that the guest's own connections share.
pub const SHARED: usize = 64 << 20;
/// The room of one direction that is not part of a budget.
pub const LEAST: usize = 16 << 10;

/// What is left of the bytes that connections share.
#[derive(Clone, Debug)]
pub struct Budget(Rc<Cell<usize>>);

impl Default for Budget {
    fn default() -> Self {
        Self::new(SHARED)
    }
}

impl Budget {
    /// So many bytes to share.
    #[must_use]
    pub fn new(bytes: usize) -> Self {
        Self(Rc::new(Cell::new(bytes)))
    }
}

/// The room of one direction of one connection.
#[derive(Debug)]
pub struct Room {
    size: usize,
    most: usize,
    budget: Budget,
}

impl Room {
    /// A room of `size` bytes if the budget has them, else of [`LEAST`]. It may grow to `most`.
    #[must_use]
    pub fn new(size: usize, most: usize, budget: &Budget) -> Self {
        let mut room = Self { size: LEAST, most, budget: budget.clone() };
        room.add(size.saturating_sub(LEAST));
        room
    }

    /// The bytes that fit in now.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Doubles it, if the budget has so many bytes.
    pub fn grow(&mut self) {
        self.add(self.size.min(self.most.saturating_sub(self.size)));
    }

    fn add(&mut self, more: usize) {
        if let Some(left) = self.budget.0.get().checked_sub(more) {
            self.budget.0.set(left);
            self.size += more;
        }
    }

    /// Gives back what it has of the budget.
    pub fn shrink(&mut self) {
        let lent = std::mem::replace(&mut self.size, LEAST) - LEAST;
        self.budget.0.set(self.budget.0.get() + lent);
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        self.shrink();
    }
}

/// Bytes in a row.
#[derive(Debug, Default)]
pub struct Buffer {
    bytes: Vec<u8>,
    /// What was taken out.
    start: usize,
}

impl Buffer {
    /// All that is in it.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.start..]
    }

    /// How much is in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len() - self.start
    }

    /// Whether nothing is in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Puts something in.
    pub fn push(&mut self, bytes: &[u8]) {
        self.make_room(bytes.len());
        self.bytes.extend_from_slice(bytes);
    }

    /// Has at least `room` bytes put in at the end of what is there, by whoever knows how many.
    pub fn fill<T>(&mut self, room: usize, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        self.make_room(room);
        fill(&mut self.bytes)
    }

    /// Moves what is there to the front, before more memory is asked for.
    fn make_room(&mut self, room: usize) {
        if self.bytes.capacity() - self.bytes.len() < room {
            self.bytes.drain(..self.start);
            self.start = 0;
            self.bytes.reserve_exact(room);
        }
    }

    /// Takes bytes out.
    pub fn take(&mut self, count: usize) {
        self.start = (self.start + count).min(self.bytes.len());
        if self.start == self.bytes.len() {
            self.bytes.clear();
            self.start = 0;
        }
    }

    /// Whether it has memory, but nothing is in it.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.is_empty() && self.bytes.capacity() > 0
    }

    /// Gives memory back, if nothing is in it.
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
    fn what_comes_out_is_what_went_in_and_memory_does_not_grow() {
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
    fn all_together_get_no_more_than_there_is() {
        let budget = Budget::default();
        let mut rooms: Vec<Room> =
            (0..4000).map(|_| Room::new(1 << 16, 1 << 20, &budget)).collect();
        for _ in 0..10 {
            rooms.iter_mut().for_each(Room::grow);
        }
        let lent: usize = rooms.iter().map(|room| room.size() - LEAST).sum();
        assert!(lent <= SHARED && lent > SHARED - (1 << 20), "{lent}");
        assert!(rooms.iter().all(|room| room.size() <= 1 << 20));
        rooms[..2000].iter_mut().for_each(Room::shrink);
        assert!(rooms[..2000].iter().all(|room| room.size() == LEAST));
        rooms.clear();
        assert_eq!(budget.0.get(), SHARED);
    }
}
