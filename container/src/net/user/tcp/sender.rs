//! Sends data to the guest, and keeps it until it is acknowledged.
//!
//! The link to the guest is short and keeps the order. After a timeout, everything from the first
//! unacknowledged byte is sent again (go-back-N). After three duplicate acknowledgments, the
//! missing segment is sent immediately. There is no congestion window: only the guest's window
//! limits the sender, and a full link delays data without loss.

use super::super::segment::{FIN, Segment, Seq};
use super::buffer::{Buffer, Capacity, MIN_CAPACITY};

/// The number of duplicate acknowledgments that trigger a retransmission (RFC 5681, 3.2).
const DUPLICATES: u8 = 3;

#[derive(Debug)]
pub struct Sender {
    /// The first unacknowledged number (SND.UNA), where `data` begins.
    pub una: Seq,
    /// The next number to send (SND.NXT).
    pub next: Seq,
    /// The end of all data that was ever sent.
    max_sent: Seq,
    /// The end of the guest's window.
    edge: Seq,
    /// Window scale of the guest, as a shift.
    pub scale: u8,
    pub mss: usize,
    /// Unacknowledged and unsent data.
    pub data: Buffer,
    capacity: Capacity,
    /// No more data follows `data`.
    pub ended: bool,
    /// The guest has acknowledged the end.
    pub done: bool,
    duplicates: u8,
    /// The end of the data sent when the last loss was detected.
    recover: Seq,
    /// Only one segment may be in flight until the guest answers.
    careful: bool,
    /// The first unacknowledged segment must be sent again.
    again: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AckKind {
    New,
    Duplicate,
    /// It acknowledges data that was never sent.
    Invalid,
}

impl Sender {
    /// A sender whose SYN has the number `first`.
    pub fn new(first: Seq, mss: usize, capacity: Capacity) -> Self {
        Self {
            una: first,
            next: first.plus(1),
            max_sent: first.plus(1),
            edge: first.plus(1),
            scale: 0,
            mss,
            data: Buffer::default(),
            capacity,
            ended: false,
            done: false,
            duplicates: 0,
            recover: first,
            careful: false,
            again: false,
        }
    }

    /// Handles the acknowledgment of the SYN.
    pub fn open(&mut self, window: u16) {
        self.una = self.next;
        self.recover = self.next;
        self.edge = self.next.plus(usize::from(window) << self.scale);
    }

    /// The number of bytes that may be read from outside. Grows the capacity if it is full.
    pub fn space(&mut self) -> usize {
        if self.ended {
            return 0;
        }
        if self.data.len() >= self.capacity.size() {
            self.capacity.grow();
        }
        self.capacity.size().saturating_sub(self.data.len())
    }

    /// Whether the sender is empty, but has memory or more than the minimum capacity.
    pub fn is_loaded(&self) -> bool {
        self.data.is_loaded() || self.data.is_empty() && self.capacity.size() > MIN_CAPACITY
    }

    /// If the sender is empty, frees its memory and the capacity above the minimum.
    pub fn release(&mut self) {
        if self.data.is_empty() {
            self.data.release();
            self.capacity.shrink();
        }
    }

    pub fn in_flight(&self) -> bool {
        self.max_sent != self.una
    }

    /// Whether data waits for the guest's window, with nothing in flight.
    pub fn is_held_back(&self) -> bool {
        !self.in_flight() && !self.done && (self.ended || !self.data.is_empty())
    }

    /// Whether the FIN was sent.
    fn has_finished(&self) -> bool {
        self.next.since(self.una) > self.data.len()
    }

    pub fn handle(&mut self, segment: &Segment<'_>) -> AckKind {
        if segment.ack.is_after(self.max_sent) {
            return AckKind::Invalid;
        }
        if self.una.is_after(segment.ack) {
            return AckKind::Duplicate;
        }
        let edge = segment.ack.plus(usize::from(segment.window) << self.scale);
        let same = edge == self.edge;
        self.edge = edge;
        let count = segment.ack.since(self.una);
        if count == 0 {
            let repeated = same && segment.length() == 0 && self.in_flight();
            self.duplicates = if repeated { self.duplicates.saturating_add(1) } else { 0 };
            if self.duplicates == DUPLICATES && !self.recover.is_after(self.una) {
                self.recover = self.max_sent;
                self.again = true;
            }
            return AckKind::Duplicate;
        }
        // Only the FIN has a number after the last byte.
        self.done = count > self.data.len();
        self.data.take(count.min(self.data.len()));
        self.una = segment.ack;
        self.next = self.next.later(self.una);
        self.duplicates = 0;
        self.careful = false;
        // A partial acknowledgment: another segment was lost (RFC 6582).
        self.again = self.recover.is_after(self.una);
        if !self.recover.is_after(self.una) {
            self.recover = self.una;
        }
        AckKind::New
    }

    /// Handles a timeout: sends everything again, beginning with a single segment.
    pub fn go_back(&mut self) {
        self.next = self.una;
        self.recover = self.una;
        self.careful = true;
        self.again = false;
        self.duplicates = 0;
    }

    /// Sends all segments that the window allows. Returns false if the link is full.
    pub fn emit(&mut self, send: &mut dyn FnMut(Seq, u8, &[u8]) -> bool) -> bool {
        if std::mem::take(&mut self.again) {
            let size = self.mss.min(self.data.len());
            let last = size == self.data.len() && self.has_finished();
            self.again = !send(self.una, if last { FIN } else { 0 }, &self.data.bytes()[..size]);
            if self.again {
                return false;
            }
        }
        while let Some((size, fin)) = self.chunk() {
            let sent = self.next.since(self.una);
            let flags = if fin { FIN } else { 0 };
            if !send(self.next, flags, &self.data.bytes()[sent..sent + size]) {
                return false;
            }
            self.next = self.next.plus(size + usize::from(fin));
            self.max_sent = self.max_sent.later(self.next);
        }
        true
    }

    /// The size of the next segment, and whether it is the last.
    fn chunk(&self) -> Option<(usize, bool)> {
        let sent = self.next.since(self.una);
        if self.done || (self.careful && sent > 0) {
            return None;
        }
        let unsent = self.data.len().checked_sub(sent)?;
        let open = if self.edge.is_after(self.next) { self.edge.since(self.next) } else { 0 };
        // A retransmission was within the window before. If the window has shrunk, the guest drops
        // it.
        let open = if self.max_sent.is_after(self.next) { open.max(self.mss) } else { open };
        let size = unsent.min(self.mss).min(open);
        let fin = self.ended && size == unsent;
        // A segment that the window makes small waits, to avoid the silly window syndrome (RFC
        // 9293, 3.8.6.2.1).
        let silly = size < self.mss && size < unsent && sent > 0;
        (!silly && (size > 0 || fin)).then_some((size, fin))
    }
}
