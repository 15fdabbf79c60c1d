//! Our end of a TCP connection with the guest (RFC 9293): segments in, segments out, and the bytes
//! of both directions. It has no sockets: `connection` carries the bytes to the outside.
//!
//! Threats: the guest sends any segment at any time. Segments outside of the window are answered as
//! the RFC requires, and the window is bounded: see `buffer`.

pub mod buffer;
pub mod receiver;
pub mod sender;

use std::time::{Duration, Instant};

use self::buffer::{Budget, Capacity};
use self::receiver::Receiver;
use self::sender::{AckKind, Sender};
use super::segment::{ACK, MAX_SCALE, PSH, RST, SYN, Segment, Seq};

/// Initial capacity of each direction in bytes, if the budget has it.
const INITIAL_CAPACITY: usize = 64 << 10;
/// The maximum capacity of each direction, in bytes.
const MAX_CAPACITY: usize = 1 << 20;
/// The first retransmission timeout. It is short, because the guest is near.
const RETRY: Duration = Duration::from_millis(250);
/// The maximum retransmission timeout. The guest may be paused for a while.
const MAX_RETRY: Duration = Duration::from_secs(30);
/// The maximum number of retransmissions: some minutes in total.
const MAX_TRIES: u32 = 14;
/// The maximum number of retransmissions of a SYN: half a minute in total, because the peer waits.
const MAX_SYN_TRIES: u32 = 6;
/// The idle time after which the guest is probed. It may have been reset and lost the connection.
const KEEPALIVE: Duration = Duration::from_secs(300);
/// The maximum segment size without an option (RFC 9293, 3.7.1).
const DEFAULT_MSS: usize = 536;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// The guest has sent a SYN. The outside is not connected yet.
    Connecting,
    /// We send a SYN to the guest.
    SynSent,
    /// We send a SYN with an acknowledgment of the guest's SYN.
    SynReceived,
    Established,
    Closed,
}

#[derive(Clone, Debug)]
pub struct Parameters {
    /// Our port, and the guest's.
    pub ports: (u16, u16),
    /// Our initial sequence number.
    pub first: Seq,
    /// The maximum segment size of the link, in bytes.
    pub mss: u16,
    pub budget: Budget,
    pub now: Instant,
}

#[derive(Debug)]
pub struct Tcp {
    ports: (u16, u16),
    mss: u16,
    pub state: State,
    sender: Sender,
    receiver: Receiver,
    /// A SYN must be sent.
    syn: bool,
    /// A probe must be sent, to learn whether the guest is alive, and its window.
    probe: bool,
    /// A probe was sent and is not answered yet.
    probed: bool,
    /// The next timeout.
    due: Option<Instant>,
    tries: u32,
    /// The time of the guest's last segment.
    last_segment: Instant,
    /// A reset that must be sent.
    reset: Option<Segment<'static>>,
}

impl Tcp {
    fn new(start: &Parameters, state: State) -> Self {
        // The window must have room for several segments of the maximum size.
        let mss = usize::from(start.mss);
        let size = (4 * mss).clamp(INITIAL_CAPACITY, 4 * INITIAL_CAPACITY);
        let capacity = || Capacity::new(size, MAX_CAPACITY, &start.budget);
        Self {
            ports: start.ports,
            mss: start.mss,
            state,
            sender: Sender::new(start.first, mss.min(DEFAULT_MSS), capacity()),
            receiver: Receiver::new(Seq(0), mss, capacity()),
            syn: false,
            probe: false,
            probed: false,
            due: None,
            tries: 0,
            last_segment: start.now,
            reset: None,
        }
    }

    /// A connection that the guest opens with this SYN.
    pub fn from_guest(start: &Parameters, segment: &Segment<'_>) -> Self {
        let mut tcp = Self::new(start, State::Connecting);
        tcp.learn(segment, true);
        tcp
    }

    pub fn to_guest(start: &Parameters) -> Self {
        let mut tcp = Self::new(start, State::SynSent);
        tcp.receiver.scale = Receiver::best_scale(MAX_CAPACITY);
        tcp.syn = true;
        tcp
    }

    /// Takes sequence number and options of the guest's SYN. `scaled`: we offer window scaling.
    fn learn(&mut self, segment: &Segment<'_>, scaled: bool) {
        let max = usize::from(self.mss);
        // A smaller maximum is an attempt to make us send many tiny segments.
        let mss = segment.mss.map_or(DEFAULT_MSS, |mss| usize::from(mss).max(64));
        self.sender.mss = mss.min(max);
        self.receiver.set_first(segment.seq.plus(1));
        match segment.scale.filter(|_| scaled) {
            Some(scale) => {
                self.sender.scale = scale.min(MAX_SCALE);
                self.receiver.scale = Receiver::best_scale(MAX_CAPACITY);
            }
            None => self.receiver.scale = 0,
        }
    }

    /// Called when the outside has connected.
    pub fn connected(&mut self) {
        if self.state == State::Connecting {
            self.state = State::SynReceived;
            self.syn = true;
        }
    }

    pub fn handle(&mut self, segment: &Segment<'_>, now: Instant) {
        self.last_segment = now;
        match self.state {
            State::Closed => {}
            // The guest repeats its SYN, or gives up.
            State::Connecting => {
                if segment.has(RST) {
                    self.state = State::Closed;
                }
            }
            State::SynSent => self.handle_syn_answer(segment, now),
            State::SynReceived | State::Established => self.handle_established(segment, now),
        }
    }

    /// RFC 9293, 3.10.7.3
    fn handle_syn_answer(&mut self, segment: &Segment<'_>, now: Instant) {
        let answers = segment.has(ACK) && segment.ack == self.sender.next;
        if segment.has(RST) {
            if answers {
                self.state = State::Closed;
            }
        } else if segment.has(ACK) && !answers {
            // An answer to a former connection.
            self.reset = segment.refusal();
        } else if segment.has(SYN) && answers {
            self.learn(segment, true);
            self.sender.open(0);
            // The window in a SYN is not scaled.
            let scale = std::mem::take(&mut self.sender.scale);
            self.sender.open(segment.window);
            self.sender.scale = scale;
            self.open(now);
            self.receiver.ack_pending = true;
        }
    }

    fn open(&mut self, now: Instant) {
        self.state = State::Established;
        self.syn = false;
        self.tries = 0;
        self.due = None;
        self.rearm(now);
    }

    /// RFC 9293, 3.10.7.4
    fn handle_established(&mut self, segment: &Segment<'_>, now: Instant) {
        if segment.has(RST) {
            // Only a reset with exactly the next number counts, else it may be spoofed (RFC 5961,
            // 3.2).
            if segment.seq == self.receiver.next {
                self.state = State::Closed;
            } else if self.receiver.expects(segment.seq) {
                self.receiver.ack_pending = true;
            }
            return;
        }
        if segment.has(SYN) {
            // The guest repeats its SYN, or has lost the connection. In this case it answers our
            // acknowledgment with a reset (RFC 5961, 4.2).
            if self.state == State::SynReceived {
                self.syn = true;
            } else {
                self.receiver.ack_pending = true;
            }
            return;
        }
        if !segment.has(ACK) {
            return;
        }
        if self.state == State::SynReceived {
            if segment.ack != self.sender.next {
                self.reset = segment.refusal();
                return;
            }
            self.sender.open(segment.window);
            self.open(now);
        }
        let probed = std::mem::take(&mut self.probed);
        match self.sender.handle(segment) {
            AckKind::Invalid => {
                self.receiver.ack_pending = true;
                return;
            }
            AckKind::New => {
                self.tries = 0;
                self.due = None;
            }
            // The guest answers the probe, so it is alive. Probing continues at the same rate, and
            // never gives up.
            AckKind::Duplicate if probed => self.tries = self.tries.min(MAX_TRIES / 2),
            AckKind::Duplicate => {}
        }
        self.receiver.handle(segment);
        self.rearm(now);
    }

    /// Sends all pending segments. Returns false if the link is full.
    pub fn emit(&mut self, now: Instant, send: &mut dyn FnMut(&Segment<'_>) -> bool) -> bool {
        if let Some(reset) = self.reset.take() {
            // If the link is full, the guest gets a reset for its next segment.
            send(&reset);
            // A stray answer does not end the connection that we open.
            if self.state != State::SynSent {
                self.state = State::Closed;
            }
        }
        let sent = match self.state {
            State::Connecting | State::Closed => true,
            State::SynSent | State::SynReceived => self.emit_syn(send),
            State::Established => self.emit_data(send),
        };
        self.rearm(now);
        sent
    }

    fn emit_syn(&mut self, send: &mut dyn FnMut(&Segment<'_>) -> bool) -> bool {
        if !self.syn {
            return true;
        }
        let answers = self.state == State::SynReceived;
        let scale = Some(self.receiver.scale).filter(|scale| *scale > 0);
        let segment = Segment {
            ports: self.ports,
            seq: self.sender.una,
            ack: if answers { self.receiver.next } else { Seq(0) },
            flags: if answers { SYN | ACK } else { SYN },
            window: self.receiver.window(true),
            mss: Some(self.mss),
            scale,
            data: &[],
        };
        self.syn = !send(&segment);
        !self.syn
    }

    fn emit_data(&mut self, send: &mut dyn FnMut(&Segment<'_>) -> bool) -> bool {
        let window = self.receiver.window(false);
        let ports = self.ports;
        let plain = Segment { ports, ack: self.receiver.next, window, ..Segment::default() };
        let mut acknowledged = false;
        let sent = self.sender.emit(&mut |seq, flags, data| {
            let push = if data.is_empty() { 0 } else { PSH };
            let sent = send(&Segment { seq, flags: flags | push | ACK, data, ..plain });
            acknowledged |= sent;
            sent
        });
        if std::mem::take(&mut self.probe) {
            // A number that is already acknowledged. The guest repeats its acknowledgment and its
            // window.
            let seq = Seq(self.sender.una.0.wrapping_sub(1));
            acknowledged |= send(&Segment { seq, flags: ACK, ..plain });
        }
        if self.receiver.ack_pending && !acknowledged {
            let seq = self.sender.next;
            acknowledged = send(&Segment { seq, flags: ACK, ..plain });
        }
        self.receiver.ack_pending &= !acknowledged;
        // One duplicate acknowledgment for each segment that came out of order.
        for _ in 0..std::mem::take(&mut self.receiver.duplicate_acks) {
            send(&Segment { seq: self.sender.next, flags: ACK, ..plain });
        }
        sent && !self.receiver.ack_pending
    }

    /// Sets the timeout while the guest has to answer, and clears it otherwise.
    fn rearm(&mut self, now: Instant) {
        let waits = match self.state {
            State::Connecting | State::Closed => false,
            State::SynSent | State::SynReceived => true,
            State::Established => {
                self.probed || self.sender.in_flight() || self.sender.is_held_back()
            }
        };
        match (waits, self.due) {
            (false, _) => self.due = None,
            (true, None) => {
                let pause = RETRY.saturating_mul(1 << self.tries.min(16));
                self.due = Some(now + pause.min(MAX_RETRY));
            }
            (true, Some(_)) => {}
        }
    }

    /// The time at which [`Tcp::tick`] must be called if no segment comes before.
    pub fn due(&self) -> Option<Instant> {
        match self.state {
            State::Established => Some(self.due.unwrap_or(self.last_segment + KEEPALIVE)),
            _ => self.due,
        }
    }

    /// Handles the timeout, if it is due.
    pub fn tick(&mut self, now: Instant) {
        if self.due().is_none_or(|due| due > now) {
            return;
        }
        self.due = None;
        self.tries += 1;
        if self.tries > if self.state == State::Established { MAX_TRIES } else { MAX_SYN_TRIES } {
            self.abort();
            return;
        }
        match self.state {
            State::Connecting | State::Closed => {}
            State::SynSent | State::SynReceived => self.syn = true,
            State::Established if self.sender.in_flight() => self.sender.go_back(),
            State::Established => (self.probe, self.probed) = (true, true),
        }
        self.rearm(now);
    }

    /// Aborts the connection with a reset to the guest.
    pub fn abort(&mut self) {
        let (ports, seq) = (self.ports, self.sender.next);
        self.reset = match self.state {
            State::Closed | State::SynSent => None,
            State::Connecting | State::SynReceived | State::Established => {
                let seq = if self.state == State::Connecting { Seq(0) } else { seq };
                let ack = self.receiver.next;
                Some(Segment { ports, seq, ack, flags: RST | ACK, ..Segment::default() })
            }
        };
        if self.reset.is_none() {
            self.state = State::Closed;
        }
    }

    /// The number of bytes that may be read from outside now.
    pub fn space(&mut self) -> usize {
        if self.state == State::Established { self.sender.space() } else { 0 }
    }

    /// Appends bytes for the guest to the queue, with at least `spare` bytes of spare capacity.
    pub fn fill<T>(&mut self, spare: usize, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        self.sender.data.fill(spare, fill)
    }

    /// Ends the data from outside.
    pub fn finish(&mut self) {
        self.sender.ended = true;
    }

    /// Received bytes that must be written to the outside.
    pub fn data(&self) -> &[u8] {
        self.receiver.data.bytes()
    }

    /// Removes bytes that were written to the outside.
    pub fn take(&mut self, count: usize) {
        self.receiver.take(count);
    }

    /// Whether the guest has ended its side, and all its data was written to the outside.
    pub fn has_ended(&self) -> bool {
        self.receiver.ended && self.receiver.data.is_empty()
    }

    /// Whether both sides have ended and all is acknowledged.
    pub fn is_done(&self) -> bool {
        self.has_ended() && self.sender.done && !self.receiver.ack_pending
    }

    /// Whether the connection has ended, or will end before it was open.
    pub fn is_closed(&self) -> bool {
        self.state == State::Closed || (self.state == State::Connecting && self.reset.is_some())
    }

    /// Whether the connection has empty buffers, or capacity that it does not need.
    pub fn is_loaded(&self) -> bool {
        self.sender.is_loaded() || self.receiver.data.is_loaded()
    }

    /// Frees empty buffers, and their capacity.
    pub fn release(&mut self) {
        self.sender.release();
        // The receiver keeps its capacity, because the guest may fill the advertised window.
        self.receiver.data.release();
    }
}

#[cfg(test)]
mod test;
