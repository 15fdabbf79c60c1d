//! What comes from the guest on one connection, until the outside has taken it.

use super::super::segment::{FIN, MAX_SCALE, Segment, Seq};
use super::buffer::{Buffer, Room};

/// How many segments may come early: each is searched for.
const EARLY: usize = 256;
/// Memory that a segment takes besides its data.
const HEAD: usize = 128;
/// How often the guest is told in a row what is missing: thrice is a reason to send it again.
const REPEATS: u8 = 3;

/// A segment that came early.
#[derive(Debug)]
struct Early {
    seq: Seq,
    data: Vec<u8>,
    last: bool,
}

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
    /// What came before it was its turn.
    early: Vec<Early>,
    /// Nothing follows `data`.
    pub ended: bool,
    /// The guest is to be told something.
    pub owes: bool,
    /// And so many times more, so that it sees what is missing (RFC 5681, 3.2).
    pub repeats: u8,
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
            early: Vec::new(),
            ended: false,
            owes: false,
            repeats: 0,
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

    /// Takes what is next of a segment, and keeps what follows a gap.
    pub fn hear(&mut self, segment: &Segment<'_>) {
        if segment.length() == 0 {
            // A probe is before what is next; whoever sends it wants an answer.
            self.owes |= segment.seq != self.next;
            return;
        }
        self.owes = true;
        if self.ended {
            return;
        }
        if segment.seq.is_after(self.next) {
            self.keep(segment);
            return;
        }
        self.append(segment.seq, segment.data, segment.has(FIN));
        while let Some(at) = self.early.iter().position(|it| !it.seq.is_after(self.next)) {
            let Early { seq, data, last } = self.early.swap_remove(at);
            self.append(seq, &data, last);
        }
        if self.early.is_empty() {
            self.repeats = 0;
        }
    }

    /// Takes what is new of these bytes, whose first is not after the next.
    fn append(&mut self, seq: Seq, data: &[u8], last: bool) {
        let fresh = data.get(self.next.since(seq)..).filter(|_| !self.ended);
        let Some(fresh) = fresh else { return };
        let taken = fresh.len().min(self.edge.since(self.next));
        self.data.push(&fresh[..taken]);
        self.next = self.next.plus(taken);
        self.came += taken;
        if last && taken == fresh.len() {
            self.next = self.next.plus(1);
            self.ended = true;
            self.early.clear();
        }
    }

    /// Keeps what came early, if it is within the window. It fits into what of the window is not in
    /// order yet, unless its parts overlap.
    fn keep(&mut self, segment: &Segment<'_>) {
        self.repeats = self.repeats.saturating_add(1).min(REPEATS);
        let end = segment.seq.plus(segment.data.len());
        let held = self.held() + HEAD + segment.data.len();
        let fits = held <= self.room.size() && self.early.len() < EARLY;
        let known = self.early.iter().any(|it| it.seq == segment.seq);
        if fits && !known && !end.is_after(self.edge) {
            let (data, last) = (segment.data.to_vec(), segment.has(FIN));
            self.early.push(Early { seq: segment.seq, data, last });
        }
    }

    /// The bytes that it holds, in order and early.
    pub fn held(&self) -> usize {
        let early: usize = self.early.iter().map(|it| HEAD + it.data.len()).sum();
        self.data.len() + early
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
