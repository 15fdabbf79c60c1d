//! The receiving half of a pair of queues: from the driver's buffers to a frame in them (VIRTIO
//! 1.3, 5.1.6.4).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Nic;
use super::control::{Address, Filter};
use crate::virtio::{Chain, Queue};
use host::memory::{NoMemory, Piece};
use host::net::{FRAME, HEADER, get, length, put};

/// Most pieces of buffers that a frame is received into.
const PIECES: usize = 1000;
/// Room for a frame as most are, and for one that the host did not cut.
const SMALL: usize = HEADER + 2048;
const LARGE: usize = HEADER + FRAME;
/// For how many frames large ones are expected after one of them.
const EXPECT: u32 = 64;
/// Where a header says into how many buffers its frame went.
const NUM_BUFFERS: usize = 10;
/// Buffers that are of no use, before the thread looks at its orders.
const JUNK: usize = 1024;

/// What the driver and the device negotiated about received frames.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// A frame may go into more than one buffer.
    pub(super) merge: bool,
    /// The driver accepts frames whose checksum is not computed yet.
    pub(super) checksum: bool,
    /// The driver names the VLANs whose frames it wants.
    pub(super) by_vlan: bool,
}

/// Buffers, and a frame that does not fit into them yet.
pub(super) struct Inbox {
    /// Buffers that were taken and not used, and the pieces of all.
    buffers: VecDeque<Chain>,
    pieces: Vec<Piece>,
    room: usize,
    /// What did not fit into them.
    rest: Vec<u8>,
    /// Buffers of a frame, and how much of it is in each.
    filled: Vec<(Chain, u32)>,
    /// What of `rest` is the end of that frame, and waits for more buffers.
    late: Range<usize>,
    /// Frames until small ones are expected again.
    large: u32,
    /// The driver has to ring: it gave no buffers.
    hungry: bool,
    /// The driver's words, as this pair has heard them.
    filter: Filter,
    mac: Address,
    heard: Option<u32>,
}

impl Inbox {
    pub(super) fn new() -> Self {
        Self::with(vec![0; LARGE])
    }

    fn with(rest: Vec<u8>) -> Self {
        Self {
            buffers: VecDeque::new(),
            pieces: Vec::new(),
            room: 0,
            rest,
            filled: Vec::new(),
            late: 0..0,
            large: 0,
            hungry: false,
            filter: Filter::default(),
            mac: Address::default(),
            heard: None,
        }
    }

    /// Whether nothing can be received until the driver gives buffers, for which it rings.
    pub(super) fn is_hungry(&self) -> bool {
        self.hungry
    }

    /// A place for what nobody wants.
    pub(super) fn rest(&mut self) -> &mut [u8] {
        &mut self.rest
    }

    /// Where the next frame goes: the driver's memory, and what does not fit there.
    pub(super) fn place(&mut self) -> (&[Piece], &mut [u8]) {
        (&self.pieces, &mut self.rest)
    }

    /// Gives buffers back untouched, the last one first, so that they come again in order.
    pub(super) fn undo(&mut self, queue: &mut Queue) {
        self.buffers.drain(..).rev().for_each(|chain| queue.undo(chain));
        self.filled.drain(..).rev().for_each(|(chain, _)| queue.undo(chain));
        *self = Self::with(std::mem::take(&mut self.rest));
    }

    /// Learns what the driver said since.
    pub(super) fn hear(&mut self, nic: &Nic) {
        let said = nic.said.load(Ordering::Acquire);
        if self.heard != Some(said) {
            self.heard = Some(said);
            (self.filter, self.mac) = nic.filter();
        }
    }

    /// The next buffer; none, and hungry, when the driver gave no more.
    fn next(&mut self, queue: &mut Queue) -> Option<Chain> {
        loop {
            let chain = queue.pop();
            if chain.is_some() {
                if std::mem::take(&mut self.hungry) {
                    queue.quiet();
                }
                return chain;
            }
            if !queue.listen() {
                self.hungry = true;
                return None;
            }
        }
    }

    /// Takes buffers for one frame; false when there are none.
    pub(super) fn gather(&mut self, queue: &mut Queue, merge: bool) -> bool {
        if !self.complete(queue) {
            return false;
        }
        let wish = match (merge, self.large) {
            (false, _) => 1,
            (true, 0) => SMALL,
            (true, _) => LARGE,
        };
        for _ in 0..JUNK {
            if self.room >= wish || self.pieces.len() >= PIECES {
                break;
            }
            // With some in hand it is enough to look again when those are used up.
            let next = if self.buffers.is_empty() { self.next(queue) } else { queue.pop() };
            let Some(chain) = next else { break };
            let room = length(&chain.writable);
            if room < HEADER {
                queue.push(chain, 0);
                continue;
            }
            self.room = self.room.saturating_add(room);
            self.pieces.extend(&chain.writable);
            self.buffers.push_back(chain);
        }
        !self.buffers.is_empty()
    }

    /// Gives all buffers back empty: they are no memory.
    pub(super) fn refuse(&mut self, queue: &mut Queue) {
        queue.push_all(self.filled.drain(..).map(|(chain, _)| (chain, 0)));
        queue.push_all(self.buffers.drain(..).map(|chain| (chain, 0)));
        self.pieces.clear();
        self.room = 0;
        self.late = 0..0;
    }

    /// Gives the driver a frame that was received, if it wants it.
    pub(super) fn deliver(&mut self, queue: &mut Queue, whole: usize, terms: Terms) {
        let fits = whole <= self.room;
        // Hardware drops what is longer than its buffers, too.
        if whole < HEADER || whole - self.room.min(whole) > self.rest.len() || !fits && !terms.merge
        {
            return;
        }
        self.large = if whole > SMALL { EXPECT } else { self.large.saturating_sub(1) };
        match self.is_wanted(queue, terms) {
            Ok(true) => {}
            Ok(false) => return,
            Err(NoMemory) => return self.refuse(queue),
        }
        let (mut left, mut pieces) = (whole, 0);
        while left > 0
            && let Some(chain) = self.buffers.pop_front()
        {
            let room = length(&chain.writable);
            let now = left.min(room);
            (left, self.room) = (left - now, self.room - room);
            pieces += chain.writable.len();
            self.filled.push((chain, u32::try_from(now).unwrap_or(u32::MAX)));
        }
        self.pieces.drain(..pieces);
        self.late = 0..left;
        self.complete(queue);
    }

    /// Looks at a frame's beginning, and makes its header one that was agreed on.
    fn is_wanted(&self, queue: &Queue, terms: Terms) -> Result<bool, NoMemory> {
        let (memory, mut head) = (queue.memory(), [0; 16]);
        let there = get(memory, &self.pieces, HEADER, &mut head)?;
        for (to, from) in head[there..].iter_mut().zip(&self.rest) {
            *to = *from;
        }
        if !terms.checksum {
            put(memory, &self.pieces, 0, &[0])?;
        }
        Ok(self.filter.wants(&head, self.mac, terms.by_vlan))
    }

    /// Puts the end of a frame into buffers, and gives the driver the whole; false while there are
    /// too few.
    fn complete(&mut self, queue: &mut Queue) -> bool {
        for _ in 0..JUNK {
            if self.late.is_empty() {
                break;
            }
            let Some(chain) = self.next(queue) else { return false };
            let rest = &self.rest[self.late.clone()];
            match put(queue.memory(), &chain.writable, 0, rest) {
                Ok(0) => queue.push(chain, 0),
                Ok(count) => {
                    self.late.start += count;
                    self.filled.push((chain, u32::try_from(count).unwrap_or(u32::MAX)));
                }
                Err(NoMemory) => {
                    queue.push(chain, 0);
                    self.refuse(queue);
                }
            }
        }
        if self.late.is_empty()
            && let Some((first, _)) = self.filled.first()
        {
            let count = u16::try_from(self.filled.len()).unwrap_or(u16::MAX).to_le_bytes();
            // What was memory a moment ago; if not, the driver finds its own header there.
            put(queue.memory(), &first.writable, NUM_BUFFERS, &count).ok();
            queue.push_all(self.filled.drain(..));
        }
        self.late.is_empty()
    }
}
