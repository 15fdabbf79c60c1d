//! One connection as the guest sees it (RFC 9293): segments in, segments out, and bytes between.
//! Nothing here knows of sockets; `connection` carries the bytes outside.
//!
//! Threats: the guest sends any segment at any time. What is outside of what it may send is
//! answered as the RFC has it, and what it may send is bounded: see `buffer`.

pub mod buffer;
pub mod receiver;
pub mod sender;

use std::time::{Duration, Instant};

use self::buffer::{Budget, Room};
use self::receiver::Receiver;
use self::sender::{Heard, Sender};
use super::segment::{ACK, MAX_SCALE, PSH, RST, SYN, Segment, Seq};

/// Room of each direction while the budget has it, and at most.
const ROOM: usize = 64 << 10;
const LARGE: usize = 1 << 20;
/// How long until something is sent again at first, and at most: the guest is near, but may stand
/// still for a while.
const RETRY: Duration = Duration::from_millis(250);
const SLOWEST: Duration = Duration::from_secs(30);
/// How often something is sent again: some minutes together.
const TRIES: u32 = 14;
/// The same of a connection that does not begin: half a minute, since whoever is outside waits.
const SYN_TRIES: u32 = 6;
/// How long until a guest that says nothing is asked whether it still knows of the connection: it
/// may have been reset.
const QUIET: Duration = Duration::from_secs(300);
/// The most data of a segment for one who does not say (RFC 9293, 3.7.1).
const DEFAULT_MSS: usize = 536;

/// How far a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// The guest asked; the outside did not answer yet.
    Asked,
    /// The guest gets our SYN.
    Asking,
    /// The guest gets our SYN with the answer to its own.
    Answering,
    /// Data may go.
    Open,
    /// It is over.
    Over,
}

/// What is known before the first segment.
#[derive(Clone, Debug)]
pub struct Start {
    /// Our port, and the guest's.
    pub ports: (u16, u16),
    /// Our first number.
    pub first: Seq,
    /// The most data of a segment that fits on the link.
    pub mss: u16,
    /// What connections share.
    pub budget: Budget,
    /// Now.
    pub now: Instant,
}

/// A connection.
#[derive(Debug)]
pub struct Tcp {
    ports: (u16, u16),
    mss: u16,
    stage: Stage,
    sender: Sender,
    receiver: Receiver,
    /// The SYN is to be sent.
    syn: bool,
    /// The guest is to be asked whether it is there, and how large its window is.
    probe: bool,
    /// It was asked and did not answer.
    probed: bool,
    /// Something is to be done then.
    due: Option<Instant>,
    tries: u32,
    /// When the guest last said something.
    heard: Instant,
    /// What ends it at once.
    reset: Option<Segment<'static>>,
}

impl Tcp {
    fn new(start: &Start, stage: Stage) -> Self {
        // The largest segments take a window of several.
        let mss = usize::from(start.mss);
        let size = (4 * mss).clamp(ROOM, 4 * ROOM);
        let room = || Room::new(size, LARGE, &start.budget);
        Self {
            ports: start.ports,
            mss: start.mss,
            stage,
            sender: Sender::new(start.first, mss.min(DEFAULT_MSS), room()),
            receiver: Receiver::new(Seq(0), mss, room()),
            syn: false,
            probe: false,
            probed: false,
            due: None,
            tries: 0,
            heard: start.now,
            reset: None,
        }
    }

    /// The guest wants a connection.
    #[must_use]
    pub fn asked(start: &Start, segment: &Segment<'_>) -> Self {
        let mut tcp = Self::new(start, Stage::Asked);
        tcp.learn(segment, true);
        tcp
    }

    /// Somebody wants a connection to the guest.
    #[must_use]
    pub fn asking(start: &Start) -> Self {
        let mut tcp = Self::new(start, Stage::Asking);
        tcp.receiver.scale = Receiver::best_scale(LARGE);
        tcp.syn = true;
        tcp
    }

    /// Takes from the guest's SYN what is in it. `scaled` says whether we offer to shift windows.
    fn learn(&mut self, segment: &Segment<'_>, scaled: bool) {
        let most = usize::from(self.mss);
        // Less than that is no segment, but a way to make us work.
        let mss = segment.mss.map_or(DEFAULT_MSS, |mss| usize::from(mss).max(64));
        self.sender.mss = mss.min(most);
        self.receiver.begin(segment.seq.plus(1));
        match segment.scale.filter(|_| scaled) {
            Some(scale) => {
                self.sender.scale = scale.min(MAX_SCALE);
                self.receiver.scale = Receiver::best_scale(LARGE);
            }
            None => self.receiver.scale = 0,
        }
    }

    /// The outside has connected.
    pub fn connected(&mut self) {
        if self.stage == Stage::Asked {
            self.stage = Stage::Answering;
            self.syn = true;
        }
    }

    /// How far it is.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// A segment came from the guest.
    pub fn hear(&mut self, segment: &Segment<'_>, now: Instant) {
        self.heard = now;
        match self.stage {
            Stage::Over => {}
            // It grows impatient, or gave up.
            Stage::Asked => {
                if segment.has(RST) {
                    self.stage = Stage::Over;
                }
            }
            Stage::Asking => self.hear_answer(segment, now),
            Stage::Answering | Stage::Open => self.hear_more(segment, now),
        }
    }

    /// RFC 9293, 3.10.7.3
    fn hear_answer(&mut self, segment: &Segment<'_>, now: Instant) {
        let answers = segment.has(ACK) && segment.ack == self.sender.next;
        if segment.has(RST) {
            if answers {
                self.stage = Stage::Over;
            }
        } else if segment.has(ACK) && !answers {
            // Of a connection that was here before.
            self.reset = segment.refusal();
        } else if segment.has(SYN) && answers {
            self.learn(segment, true);
            self.sender.open(0);
            // A window in a SYN is not shifted.
            let scale = std::mem::take(&mut self.sender.scale);
            self.sender.open(segment.window);
            self.sender.scale = scale;
            self.open(now);
            self.receiver.owes = true;
        }
    }

    fn open(&mut self, now: Instant) {
        self.stage = Stage::Open;
        self.syn = false;
        self.tries = 0;
        self.due = None;
        self.rearm(now);
    }

    /// RFC 9293, 3.10.7.4
    fn hear_more(&mut self, segment: &Segment<'_>, now: Instant) {
        if segment.has(RST) {
            // Exactly the next number, or anybody could end it (RFC 5961, 3.2).
            if segment.seq == self.receiver.next {
                self.stage = Stage::Over;
            } else if self.receiver.expects(segment.seq) {
                self.receiver.owes = true;
            }
            return;
        }
        if segment.has(SYN) {
            // The guest repeats itself, or has forgotten us and will say so (RFC 5961, 4.2).
            if self.stage == Stage::Answering {
                self.syn = true;
            } else {
                self.receiver.owes = true;
            }
            return;
        }
        if !segment.has(ACK) {
            return;
        }
        if self.stage == Stage::Answering {
            if segment.ack != self.sender.next {
                self.reset = segment.refusal();
                return;
            }
            self.sender.open(segment.window);
            self.open(now);
        }
        let probed = std::mem::take(&mut self.probed);
        match self.sender.hear(segment) {
            Heard::Nonsense => {
                self.receiver.owes = true;
                return;
            }
            Heard::News => {
                self.tries = 0;
                self.due = None;
            }
            // It lives: it is asked again, but not more often, and never given up.
            Heard::Nothing if probed => self.tries = self.tries.min(TRIES / 2),
            Heard::Nothing => {}
        }
        self.receiver.hear(segment);
        self.rearm(now);
    }

    /// Sends all that is to be sent; false when the link is full.
    pub fn emit(&mut self, now: Instant, send: &mut dyn FnMut(&Segment<'_>) -> bool) -> bool {
        if let Some(reset) = self.reset.take() {
            // Where the link is full the guest hears it when it next says something.
            send(&reset);
            // A stray answer does not end what we ask for.
            if self.stage != Stage::Asking {
                self.stage = Stage::Over;
            }
        }
        let sent = match self.stage {
            Stage::Asked | Stage::Over => true,
            Stage::Asking | Stage::Answering => self.emit_syn(send),
            Stage::Open => self.emit_data(send),
        };
        self.rearm(now);
        sent
    }

    fn emit_syn(&mut self, send: &mut dyn FnMut(&Segment<'_>) -> bool) -> bool {
        if !self.syn {
            return true;
        }
        let answers = self.stage == Stage::Answering;
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
        let mut told = false;
        let sent = self.sender.emit(&mut |seq, flags, data| {
            let push = if data.is_empty() { 0 } else { PSH };
            let sent = send(&Segment { seq, flags: flags | push | ACK, data, ..plain });
            told |= sent;
            sent
        });
        if std::mem::take(&mut self.probe) {
            // A number that it has acknowledged: it says so again, and how large its window is.
            let seq = Seq(self.sender.una.0.wrapping_sub(1));
            told |= send(&Segment { seq, flags: ACK, ..plain });
        }
        if self.receiver.owes && !told {
            let seq = self.sender.next;
            told = send(&Segment { seq, flags: ACK, ..plain });
        }
        self.receiver.owes &= !told;
        // What is missing is told by an acknowledgement for each segment that came early.
        for _ in 0..std::mem::take(&mut self.receiver.repeats) {
            send(&Segment { seq: self.sender.next, flags: ACK, ..plain });
        }
        sent && !self.receiver.owes
    }

    /// Something is due while the guest owes an answer.
    fn rearm(&mut self, now: Instant) {
        let waits = match self.stage {
            Stage::Asked | Stage::Over => false,
            Stage::Asking | Stage::Answering => true,
            Stage::Open => self.probed || self.sender.in_flight() || self.sender.is_held_back(),
        };
        match (waits, self.due) {
            (false, _) => self.due = None,
            (true, None) => {
                let pause = RETRY.saturating_mul(1 << self.tries.min(16));
                self.due = Some(now + pause.min(SLOWEST));
            }
            (true, Some(_)) => {}
        }
    }

    /// When something is to be done if nothing comes.
    #[must_use]
    pub fn due(&self) -> Option<Instant> {
        match self.stage {
            Stage::Open => Some(self.due.unwrap_or(self.heard + QUIET)),
            _ => self.due,
        }
    }

    /// It is late enough for what is due.
    pub fn tick(&mut self, now: Instant) {
        if self.due().is_none_or(|due| due > now) {
            return;
        }
        self.due = None;
        self.tries += 1;
        if self.tries > if self.stage == Stage::Open { TRIES } else { SYN_TRIES } {
            self.abort();
            return;
        }
        match self.stage {
            Stage::Asked | Stage::Over => {}
            Stage::Asking | Stage::Answering => self.syn = true,
            Stage::Open if self.sender.in_flight() => self.sender.go_back(),
            Stage::Open => (self.probe, self.probed) = (true, true),
        }
        self.rearm(now);
    }

    /// It ends at once, and the guest is told.
    pub fn abort(&mut self) {
        let (ports, seq) = (self.ports, self.sender.next);
        self.reset = match self.stage {
            Stage::Over | Stage::Asking => None,
            Stage::Asked | Stage::Answering | Stage::Open => {
                let seq = if self.stage == Stage::Asked { Seq(0) } else { seq };
                let ack = self.receiver.next;
                Some(Segment { ports, seq, ack, flags: RST | ACK, ..Segment::default() })
            }
        };
        if self.reset.is_none() {
            self.stage = Stage::Over;
        }
    }

    /// How much may be read from outside now.
    pub fn space(&mut self) -> usize {
        if self.stage == Stage::Open { self.sender.space() } else { 0 }
    }

    /// Has whoever knows how put bytes for the guest at the end of what waits.
    pub fn fill<T>(&mut self, room: usize, fill: impl FnOnce(&mut Vec<u8>) -> T) -> T {
        self.sender.data.fill(room, fill)
    }

    /// No more comes from outside.
    pub fn finish(&mut self) {
        self.sender.ended = true;
    }

    /// What the outside is to take.
    #[must_use]
    pub fn data(&self) -> &[u8] {
        self.receiver.data.bytes()
    }

    /// The outside took so much.
    pub fn take(&mut self, count: usize) {
        self.receiver.take(count);
    }

    /// Whether the guest sends nothing more, and the outside took all.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.receiver.ended && self.receiver.data.is_empty()
    }

    /// Whether both sides have ended and know it of each other.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.has_ended() && self.sender.is_done() && !self.receiver.owes
    }

    /// Whether nothing will come of it any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.stage == Stage::Over || (self.stage == Stage::Asked && self.reset.is_some())
    }

    /// Whether there is memory that holds nothing, or room that is kept for nothing.
    #[must_use]
    pub fn is_loaded(&self) -> bool {
        self.sender.is_loaded() || self.receiver.data.is_loaded()
    }

    /// Gives back memory that holds nothing, and room for it.
    pub fn release(&mut self) {
        self.sender.release();
        // The guest may fill the window that it was told of: the receiver's room stays.
        self.receiver.data.release();
    }
}

#[cfg(test)]
mod test;
