//! What goes to the guest on one connection, until the guest has acknowledged it.
//!
//! The link to the guest is short and in order: what is not acknowledged in time is sent again from
//! there on (go-back-N), and what three acknowledgements in a row ask for at once. The guest's
//! window is all that holds data back; a full link is waited for and loses nothing.

use super::super::segment::{FIN, Segment, Seq};
use super::buffer::{Buffer, LEAST, Room};

/// Acknowledgements in a row that ask for the same (RFC 5681, 3.2).
const DUPLICATES: u8 = 3;

/// What goes to the guest.
#[derive(Debug)]
pub struct Sender {
    /// What is not acknowledged yet begins here; so do `data`.
    pub una: Seq,
    /// What is sent next.
    pub next: Seq,
    /// The end of what was ever sent.
    most: Seq,
    /// The end of the guest's window.
    edge: Seq,
    /// By how much the guest's windows are shifted.
    pub scale: u8,
    /// The most data of one segment.
    pub mss: usize,
    /// What was not acknowledged.
    pub data: Buffer,
    room: Room,
    /// Nothing follows `data`.
    pub ended: bool,
    /// And the guest has acknowledged that.
    done: bool,
    duplicates: u8,
    /// What was sent when something was found lost.
    recover: Seq,
    /// One segment only until the guest answers.
    careful: bool,
    /// The first segment goes again.
    again: bool,
}

/// What an acknowledgement was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Of something new.
    News,
    /// Of what was acknowledged before.
    Nothing,
    /// Of what was never sent.
    Nonsense,
}

impl Sender {
    /// A sender whose first byte has the number after `first`, which is that of its SYN.
    pub fn new(first: Seq, mss: usize, room: Room) -> Self {
        Self {
            una: first,
            next: first.plus(1),
            most: first.plus(1),
            edge: first.plus(1),
            scale: 0,
            mss,
            data: Buffer::default(),
            room,
            ended: false,
            done: false,
            duplicates: 0,
            recover: first,
            careful: false,
            again: false,
        }
    }

    /// The SYN was acknowledged.
    pub fn open(&mut self, window: u16) {
        self.una = self.next;
        self.recover = self.next;
        self.edge = self.next.plus(usize::from(window) << self.scale);
    }

    /// How much more may be read from outside.
    pub fn space(&mut self) -> usize {
        if self.ended {
            return 0;
        }
        if self.data.len() >= self.room.size() {
            self.room.grow();
        }
        self.room.size().saturating_sub(self.data.len())
    }

    /// Whether nothing waits, and yet there is memory for it, or room for more than a little.
    pub fn is_loaded(&self) -> bool {
        self.data.is_loaded() || self.data.is_empty() && self.room.size() > LEAST
    }

    /// Gives back memory that holds nothing, and room for more than a little.
    pub fn release(&mut self) {
        if self.data.is_empty() {
            self.data.release();
            self.room.shrink();
        }
    }

    /// Whether something was sent that is not acknowledged.
    pub fn in_flight(&self) -> bool {
        self.most != self.una
    }

    /// Whether something waits for a window.
    pub fn is_held_back(&self) -> bool {
        !self.in_flight() && !self.done && (self.ended || !self.data.is_empty())
    }

    /// Whether the FIN went out.
    fn has_finished(&self) -> bool {
        self.next.since(self.una) > self.data.len()
    }

    /// Whether all is acknowledged, and the end as well.
    pub fn is_done(&self) -> bool {
        self.done
    }

    /// An acknowledgement came.
    pub fn hear(&mut self, segment: &Segment<'_>) -> Heard {
        if segment.ack.is_after(self.most) {
            return Heard::Nonsense;
        }
        if self.una.is_after(segment.ack) {
            return Heard::Nothing;
        }
        let edge = segment.ack.plus(usize::from(segment.window) << self.scale);
        let same = edge == self.edge;
        self.edge = edge;
        let count = segment.ack.since(self.una);
        if count == 0 {
            let repeated = same && segment.length() == 0 && self.in_flight();
            self.duplicates = if repeated { self.duplicates.saturating_add(1) } else { 0 };
            if self.duplicates == DUPLICATES && !self.recover.is_after(self.una) {
                self.recover = self.most;
                self.again = true;
            }
            return Heard::Nothing;
        }
        // Only an end that was sent takes a number after the last byte.
        self.done = count > self.data.len();
        self.data.take(count.min(self.data.len()));
        self.una = segment.ack;
        self.next = self.next.later(self.una);
        self.duplicates = 0;
        self.careful = false;
        // More was lost than the one segment (RFC 6582).
        self.again = self.recover.is_after(self.una);
        if !self.recover.is_after(self.una) {
            self.recover = self.una;
        }
        Heard::News
    }

    /// Too long without an acknowledgement: all goes again, first one segment.
    pub fn go_back(&mut self) {
        self.next = self.una;
        self.recover = self.una;
        self.careful = true;
        self.again = false;
        self.duplicates = 0;
    }

    /// Sends what may be sent; false when the link is full.
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
            self.most = self.most.later(self.next);
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
        // What was sent before was within the window then: the guest drops it if that has shrunk.
        let open = if self.most.is_after(self.next) { open.max(self.mss) } else { open };
        let size = unsent.min(self.mss).min(open);
        let fin = self.ended && size == unsent;
        // A small piece of a large rest only fills windows with crumbs (RFC 9293, 3.8.6.2.1).
        let crumb = size < self.mss && size < unsent && sent > 0;
        (!crumb && (size > 0 || fin)).then_some((size, fin))
    }
}
