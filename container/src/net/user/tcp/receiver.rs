//! What comes from the guest on one connection, until the outside has taken it.

use super::super::segment::{FIN, MAX_SCALE, Segment, Seq};
use super::buffer::{Buffer, Room};

/// What comes from the guest.
#[derive(Debug)]
pub struct Receiver {
    /// What comes next.
    pub next: Seq,
    /// The end of what the guest may send: a promise that is kept.
    edge: Seq,
    /// By how much our windows are shifted.
    pub scale: u8,
    /// What was not taken.
    pub data: Buffer,
    room: Room,
    /// How much came since there last was more room.
    came: usize,
    /// Nothing follows `data`.
    pub ended: bool,
    /// The guest is to be told something.
    pub owes: bool,
    /// The most data of a segment.
    mss: usize,
}

impl Receiver {
    /// A receiver of what follows this number.
    pub fn new(next: Seq, mss: usize, room: Room) -> Self {
        Self {
            next,
            edge: next,
            scale: 0,
            data: Buffer::default(),
            room,
            came: 0,
            ended: false,
            owes: false,
            mss,
        }
    }

    /// The guest's side begins with this number.
    pub fn begin(&mut self, next: Seq) {
        (self.next, self.edge) = (next, next);
    }

    /// A shift with which the largest window can be told.
    pub fn best_scale(most: usize) -> u8 {
        (0..MAX_SCALE).find(|shift| usize::from(u16::MAX) << shift >= most).unwrap_or(MAX_SCALE)
    }

    /// Whether a number is where data may come (RFC 9293, 3.10.7.4).
    pub fn expects(&self, seq: Seq) -> bool {
        !self.next.is_after(seq) && !seq.is_after(self.edge)
    }

    /// Takes what is next of a segment. What follows a gap comes again.
    pub fn hear(&mut self, segment: &Segment<'_>) {
        if segment.length() == 0 {
            // A probe is before what is next; whoever sends it wants an answer.
            self.owes |= segment.seq != self.next;
            return;
        }
        self.owes = true;
        if segment.seq.is_after(self.next) || self.ended {
            return;
        }
        let Some(fresh) = segment.data.get(self.next.since(segment.seq)..) else { return };
        let taken = fresh.len().min(self.edge.since(self.next));
        self.data.push(&fresh[..taken]);
        self.next = self.next.plus(taken);
        self.came += taken;
        if segment.has(FIN) && taken == fresh.len() {
            self.next = self.next.plus(1);
            self.ended = true;
        }
    }

    /// The outside took so much.
    pub fn take(&mut self, count: usize) {
        self.data.take(count);
        if self.came >= self.room.size() {
            self.came = 0;
            self.room.grow();
        }
        // RFC 9293, 3.8.6.2.2: no crumbs of a window.
        let told = if self.ended { 0 } else { self.edge.since(self.next) };
        let more = self.space().saturating_sub(told);
        self.owes |= !self.ended && more >= (self.room.size() / 2).min(2 * self.mss);
    }

    fn space(&self) -> usize {
        self.room.size().saturating_sub(self.data.len())
    }

    /// The window as it is told now, unshifted in a SYN.
    pub fn window(&mut self, syn: bool) -> u16 {
        let scale = if syn { 0 } else { self.scale };
        if self.ended {
            return u16::try_from(self.space() >> scale).unwrap_or(u16::MAX);
        }
        let told = self.edge.since(self.next);
        let open = u16::try_from(self.space().max(told) >> scale).unwrap_or(u16::MAX);
        self.edge = self.edge.later(self.next.plus(usize::from(open) << scale));
        open
    }
}
