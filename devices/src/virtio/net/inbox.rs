//! The receiving half of a queue pair: collects the driver's buffers and puts frames into them
//! (VIRTIO 1.3, 5.1.6.4).

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::Ordering;

use super::Nic;
use super::control::{Address, Filter};
use crate::virtio::{Chain, Queue};
use host::memory::{NoMemory, Piece};
use host::net::{HEADER_LENGTH, MAX_FRAME, length, read_pieces, write_pieces};

/// Maximum number of pieces that one frame is received into.
const MAX_PIECES: usize = 1000;
/// Room for a usual frame, and for one that the host did not segment.
const SMALL: usize = HEADER_LENGTH + 2048;
const LARGE: usize = HEADER_LENGTH + MAX_FRAME;
/// Number of frames for which large ones are expected after a large one.
const EXPECT_LARGE: u32 = 64;
/// Offset of `num_buffers` in the header: the number of buffers that hold the frame.
const NUM_BUFFERS: usize = 10;
/// Maximum number of unusable buffers in a row, before the thread checks its orders.
const MAX_UNUSABLE: usize = 1024;

#[derive(Clone, Copy, Debug)]
pub(super) struct ReceiveFeatures {
    /// A frame may span several buffers (MRG_RXBUF).
    pub(super) merge: bool,
    /// The driver accepts frames whose checksum is not computed yet (GUEST_CSUM).
    pub(super) checksum: bool,
    /// The driver filters by VLAN (CTRL_VLAN).
    pub(super) by_vlan: bool,
}

/// The driver's buffers, and a frame that does not fit into them yet.
pub(super) struct Inbox {
    /// Buffers that were taken and hold no frame yet, and the pieces of all of them.
    buffers: VecDeque<Chain>,
    pieces: Vec<Piece>,
    room: usize,
    /// The part of a frame that did not fit into the buffers.
    rest: Vec<u8>,
    /// The buffers of the current frame, each with its number of bytes.
    filled: Vec<(Chain, u32)>,
    /// The range of `rest` that still needs buffers. It is the end of the current frame.
    late: Range<usize>,
    /// Number of frames until small ones are expected again.
    large: u32,
    /// The driver has no buffers left in the queue, and rings when it adds some.
    pub(super) starved: bool,
    /// Copies of the driver's settings, and the number of commands they reflect.
    filter: Filter,
    mac: Address,
    settings_version: Option<u32>,
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
            starved: false,
            filter: Filter::default(),
            mac: Address::default(),
            settings_version: None,
        }
    }

    pub(super) fn discard_buffer(&mut self) -> &mut [u8] {
        &mut self.rest
    }

    /// The destination of the next frame: guest memory first, then a buffer for the excess.
    pub(super) fn destination(&mut self) -> (&[Piece], &mut [u8]) {
        (&self.pieces, &mut self.rest)
    }

    /// Returns unused buffers to the queue, the last one first, so that they are taken again in
    /// order.
    pub(super) fn return_buffers(&mut self, queue: &mut Queue) {
        self.buffers.drain(..).rev().for_each(|chain| queue.return_chain(chain));
        self.filled.drain(..).rev().for_each(|(chain, _)| queue.return_chain(chain));
        *self = Self::with(std::mem::take(&mut self.rest));
    }

    pub(super) fn update_filter(&mut self, nic: &Nic) {
        let commands = nic.commands.load(Ordering::Acquire);
        if self.settings_version != Some(commands) {
            self.settings_version = Some(commands);
            (self.filter, self.mac) = nic.filter();
        }
    }

    /// The next buffer. If the queue is empty, sets `starved` and asks the driver to ring.
    fn next(&mut self, queue: &mut Queue) -> Option<Chain> {
        loop {
            let chain = queue.pop();
            if chain.is_some() {
                if std::mem::take(&mut self.starved) {
                    queue.disable_doorbell();
                }
                return chain;
            }
            if !queue.enable_doorbell() {
                self.starved = true;
                return None;
            }
        }
    }

    /// Takes buffers for one frame. Returns false if the queue is empty.
    pub(super) fn gather(&mut self, queue: &mut Queue, merge: bool) -> bool {
        if !self.complete(queue) {
            return false;
        }
        let needed = match (merge, self.large) {
            (false, _) => 1,
            (true, 0) => SMALL,
            (true, _) => LARGE,
        };
        for _ in 0..MAX_UNUSABLE {
            if self.room >= needed || self.pieces.len() >= MAX_PIECES {
                break;
            }
            // With some buffers at hand, ask for the doorbell only when those are used up.
            let next = if self.buffers.is_empty() { self.next(queue) } else { queue.pop() };
            let Some(chain) = next else { break };
            let room = length(&chain.writable);
            if room < HEADER_LENGTH {
                queue.push(chain, 0);
                continue;
            }
            self.room = self.room.saturating_add(room);
            self.pieces.extend(&chain.writable);
            self.buffers.push_back(chain);
        }
        !self.buffers.is_empty()
    }

    /// Returns all buffers empty, because they are outside of guest memory.
    pub(super) fn refuse(&mut self, queue: &mut Queue) {
        queue.push_all(self.filled.drain(..).map(|(chain, _)| (chain, 0)));
        queue.push_all(self.buffers.drain(..).map(|chain| (chain, 0)));
        self.pieces.clear();
        self.room = 0;
        self.late = 0..0;
    }

    /// Hands a received frame of `whole` bytes to the driver if its filter accepts it.
    pub(super) fn deliver(&mut self, queue: &mut Queue, whole: usize, features: ReceiveFeatures) {
        let fits = whole <= self.room;
        // Hardware also drops frames that are longer than its buffers.
        if whole < HEADER_LENGTH
            || whole - self.room.min(whole) > self.rest.len()
            || !fits && !features.merge
        {
            return;
        }
        self.large = if whole > SMALL { EXPECT_LARGE } else { self.large.saturating_sub(1) };
        match self.is_wanted(queue, features) {
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

    /// Applies the filter to a frame, and clears the header's flags if GUEST_CSUM was not
    /// negotiated.
    fn is_wanted(&self, queue: &Queue, features: ReceiveFeatures) -> Result<bool, NoMemory> {
        let (memory, mut head) = (&queue.memory, [0; 16]);
        let there = read_pieces(memory, &self.pieces, HEADER_LENGTH, &mut head)?;
        for (to, from) in head[there..].iter_mut().zip(&self.rest) {
            *to = *from;
        }
        if !features.checksum {
            write_pieces(memory, &self.pieces, 0, &[0])?;
        }
        Ok(self.filter.accepts(&head, self.mac, features.by_vlan))
    }

    /// Puts the end of a frame into further buffers, then returns all of its buffers as used.
    /// Returns false if there are too few.
    fn complete(&mut self, queue: &mut Queue) -> bool {
        for _ in 0..MAX_UNUSABLE {
            if self.late.is_empty() {
                break;
            }
            let Some(chain) = self.next(queue) else { return false };
            let rest = &self.rest[self.late.clone()];
            match write_pieces(&queue.memory, &chain.writable, 0, rest) {
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
            // The guest may have taken this memory away. Then the driver finds its own header
            // there.
            write_pieces(&queue.memory, &first.writable, NUM_BUFFERS, &count).ok();
            queue.push_all(self.filled.drain(..));
        }
        self.late.is_empty()
    }
}
