//! Receives data from the guest, and keeps it until it is written to the outside.

use super::super::segment::{FIN, MAX_SCALE, Segment, Seq};
use super::buffer::{Buffer, Capacity};

/// The maximum number of segments out of order, which are searched linearly.
const MAX_OUT_OF_ORDER: usize = 256;
/// Memory of such a segment besides its data, in bytes.
const OUT_OF_ORDER_OVERHEAD: usize = 128;
/// The maximum number of pending duplicate acknowledgments. Three make the guest retransmit.
const MAX_DUPLICATE_ACKS: u8 = 3;

#[derive(Debug)]
struct OutOfOrder {
    seq: Seq,
    data: Vec<u8>,
    last: bool,
}

#[derive(Debug)]
pub struct Receiver {
    /// The next expected number (RCV.NXT).
    pub next: Seq,
    /// The end of the advertised window, which never moves back.
    edge: Seq,
    /// Our window scale, as a shift.
    pub scale: u8,
    /// Data in order that was not written to the outside yet.
    pub data: Buffer,
    capacity: Capacity,
    /// Bytes received since the capacity last grew.
    received: usize,
    out_of_order: Vec<OutOfOrder>,
    /// No more data follows `data`.
    pub ended: bool,
    pub ack_pending: bool,
    /// The number of duplicate acknowledgments that must be sent, to report missing data (RFC 5681,
    /// 3.2).
    pub duplicate_acks: u8,
    mss: usize,
}

impl Receiver {
    pub fn new(next: Seq, mss: usize, capacity: Capacity) -> Self {
        Self {
            next,
            edge: next,
            scale: 0,
            data: Buffer::default(),
            capacity,
            received: 0,
            out_of_order: Vec::new(),
            ended: false,
            ack_pending: false,
            duplicate_acks: 0,
            mss,
        }
    }

    /// Sets the guest's first number after its SYN.
    pub fn set_first(&mut self, next: Seq) {
        (self.next, self.edge) = (next, next);
    }

    /// The smallest window scale with which a window of `max` bytes can be advertised.
    pub fn best_scale(max: usize) -> u8 {
        (0..MAX_SCALE).find(|shift| usize::from(u16::MAX) << shift >= max).unwrap_or(MAX_SCALE)
    }

    /// Whether a number is within the window (RFC 9293, 3.10.7.4).
    pub fn expects(&self, seq: Seq) -> bool {
        !self.next.is_after(seq) && !seq.is_after(self.edge)
    }

    /// Takes the data of a segment, or stores it if it came out of order.
    pub fn handle(&mut self, segment: &Segment<'_>) {
        if segment.length() == 0 {
            // A probe has a number before the next one, and needs an answer.
            self.ack_pending |= segment.seq != self.next;
            return;
        }
        self.ack_pending = true;
        if self.ended {
            return;
        }
        if segment.seq.is_after(self.next) {
            self.store_out_of_order(segment);
            return;
        }
        self.append(segment.seq, segment.data, segment.has(FIN));
        while let Some(at) = self.out_of_order.iter().position(|it| !it.seq.is_after(self.next)) {
            let OutOfOrder { seq, data, last } = self.out_of_order.swap_remove(at);
            self.append(seq, &data, last);
        }
        if self.out_of_order.is_empty() {
            self.duplicate_acks = 0;
        }
    }

    /// Appends the new part of these bytes, whose first number is at most `next`.
    fn append(&mut self, seq: Seq, data: &[u8], last: bool) {
        let fresh = data.get(self.next.since(seq)..).filter(|_| !self.ended);
        let Some(fresh) = fresh else { return };
        let taken = fresh.len().min(self.edge.since(self.next));
        self.data.push(&fresh[..taken]);
        self.next = self.next.plus(taken);
        self.received += taken;
        if last && taken == fresh.len() {
            self.next = self.next.plus(1);
            self.ended = true;
            self.out_of_order.clear();
        }
    }

    /// Stores a segment that came out of order, if it is within the window. The capacity is
    /// sufficient, unless such segments overlap.
    fn store_out_of_order(&mut self, segment: &Segment<'_>) {
        self.duplicate_acks = self.duplicate_acks.saturating_add(1).min(MAX_DUPLICATE_ACKS);
        let end = segment.seq.plus(segment.data.len());
        let held = self.held() + OUT_OF_ORDER_OVERHEAD + segment.data.len();
        let fits = held <= self.capacity.size() && self.out_of_order.len() < MAX_OUT_OF_ORDER;
        let known = self.out_of_order.iter().any(|it| it.seq == segment.seq);
        if fits && !known && !end.is_after(self.edge) {
            let (data, last) = (segment.data.to_vec(), segment.has(FIN));
            self.out_of_order.push(OutOfOrder { seq: segment.seq, data, last });
        }
    }

    /// The number of stored bytes, in order and out of order.
    pub fn held(&self) -> usize {
        let out_of_order: usize =
            self.out_of_order.iter().map(|it| OUT_OF_ORDER_OVERHEAD + it.data.len()).sum();
        self.data.len() + out_of_order
    }

    /// Removes bytes that were written to the outside, and may open the window.
    pub fn take(&mut self, count: usize) {
        self.data.take(count);
        if self.received >= self.capacity.size() {
            self.received = 0;
            self.capacity.grow();
        }
        // Small window updates are avoided (RFC 9293, 3.8.6.2.2).
        let advertised = if self.ended { 0 } else { self.edge.since(self.next) };
        let more = self.space().saturating_sub(advertised);
        self.ack_pending |= !self.ended && more >= (self.capacity.size() / 2).min(2 * self.mss);
    }

    fn space(&self) -> usize {
        self.capacity.size().saturating_sub(self.data.len())
    }

    /// The window to advertise now, unscaled in a SYN.
    pub fn window(&mut self, syn: bool) -> u16 {
        let scale = if syn { 0 } else { self.scale };
        if self.ended {
            return u16::try_from(self.space() >> scale).unwrap_or(u16::MAX);
        }
        let advertised = self.edge.since(self.next);
        let open = u16::try_from(self.space().max(advertised) >> scale).unwrap_or(u16::MAX);
        self.edge = self.edge.later(self.next.plus(usize::from(open) << scale));
        open
    }
}
