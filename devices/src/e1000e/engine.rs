//! The thread of a card: moves frames between the rings and the port.
//!
//! Threats: after a bounded number of frames, the thread looks at its orders and at the other
//! direction. A frame for which the driver has no buffers is kept, and nothing further is read from
//! the port, so frames wait on the host's side.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::Context;
use host::ram::GuestMemoryMmap;
use vm_memory::GuestAddress;

use super::card::Card;
use super::receive::{self, Delivery};
use super::segments::Frames;
use super::transmit::{QUEUES, Queue};
use crate::poller::POLL_TIME;
use crate::sleep::{Interest, Orders, Sleep};
use host::memory::{Memory, Piece};
use host::net::{Backend, HEADER_LENGTH, MAX_FRAME, Offloads, Port, TransferError};

/// Packets or frames in one direction, before the other direction and the orders are served.
const MAX_PER_ROUND: usize = 64;
/// Frames that are discarded when the cable is plugged in again.
const MAX_STALE_FRAMES: usize = 4096;
/// Bytes of a header and a frame, and of the pages that they are in.
const LARGEST: usize = HEADER_LENGTH + MAX_FRAME;
const BOUNCE: usize = LARGEST.next_multiple_of(4096);

/// A frame to everybody, from the card.
const EVERYBODY: [u8; 6] = [0xff; 6];
/// RFC 903: the type, and a request that asks for the address of the card.
const REVERSE_ARP: [u8; 10] = [0x80, 0x35, 0, 1, 0x08, 0, 6, 4, 0, 3];
const SHORTEST: usize = 60;

pub(super) struct Engine {
    pub(super) card: Arc<Mutex<Card>>,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) memory: Memory,
    pub(super) port: Box<dyn Port>,
    /// Work that is left to the backend.
    pub(super) offloads: Offloads,
    transmit: Transmit,
    /// A header and a frame from the port.
    arrived: Vec<u8>,
    /// A frame that waits for buffers.
    waiting: Option<Vec<u8>>,
    /// The number of resets that this state reflects.
    resets: u32,
    /// The peer accepts no more frames at the moment.
    full: bool,
    unplugged: bool,
}

pub(super) type Queues = [Queue; QUEUES as usize];

struct Transmit {
    queues: Queues,
    /// Frames of the current packet that were sent.
    sent: [usize; QUEUES as usize],
    /// The current frame, and memory from which a port can send it.
    frame: Vec<u8>,
    bounce: Memory,
}

/// The progress of a packet.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    Sent,
    /// There are more frames.
    Begun,
    Blocked,
}

impl Engine {
    pub(super) fn new(
        card: Arc<Mutex<Card>>,
        backend: Arc<dyn Backend>,
        memory: Memory,
        offloads: bool,
    ) -> anyhow::Result<Self> {
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), BOUNCE)])
            .context("memory for frames")?;
        let port = backend.ports().pop().context("a network has a port")?;
        let transmit = Transmit {
            queues: Default::default(),
            sent: Default::default(),
            frame: Vec::new(),
            bounce: Memory::new(Arc::new(ram)),
        };
        let can = if offloads { backend.offloads() } else { Offloads::default() };
        Ok(Self {
            card,
            backend,
            memory,
            port,
            offloads: can.and(Offloads::ALL),
            transmit,
            arrived: vec![0; LARGEST],
            waiting: None,
            resets: 0,
            full: false,
            unplugged: false,
        })
    }

    /// The queues of a card that has had this many resets.
    pub(super) fn queues(&self, resets: u32) -> Queues {
        if resets == self.resets { self.transmit.queues } else { Queues::default() }
    }

    /// Continues with these queues on a card that was just restored. Frames on their way are lost.
    pub(super) fn restore(&mut self, queues: Queues) {
        let resets = lock(&self.card).resets;
        self.begin(resets, queues);
    }

    fn begin(&mut self, resets: u32, queues: Queues) {
        self.resets = resets;
        self.waiting = None;
        self.transmit.queues = queues;
        self.transmit.sent = Default::default();
    }

    /// Tells the switches where the card is now. Nothing repeats it if it is lost.
    pub(super) fn announce(&mut self) {
        let own = lock(&self.card).address();
        let mut frame = [&[0; HEADER_LENGTH], &EVERYBODY[..], &own, &REVERSE_ARP].concat();
        // The card as the sender and as the target, without addresses of IPv4.
        frame.extend([&own[..], &[0; 4], &own, &[0; 4]].concat());
        frame.resize(HEADER_LENGTH + SHORTEST, 0);
        let length = u32::try_from(frame.len()).unwrap_or(u32::MAX);
        let bounce = &self.transmit.bounce;
        if self.backend.link().is_plugged() && bounce.write(0, &frame).is_ok() {
            self.port.send(bounce, &[Piece { address: 0, length }]).ok();
        }
    }

    /// Serves the rings until it is asked to stop.
    pub(super) fn run(mut self, orders: &Orders, sleep: &mut Sleep) -> Self {
        let mut polls = false;
        while !orders.stop.load(Ordering::Acquire) {
            let kicks = lock(&self.card).kicks;
            if self.serve() || polls && orders.poll(|| self.serve()) {
                continue;
            }
            let mut card = lock(&self.card);
            if card.kicks != kicks {
                continue;
            }
            let ready = receive::is_ready(&card) && self.waiting.is_none();
            (card.sleeping, card.starved) = (true, !ready);
            drop(card);
            polls = self.sleep(sleep, ready) < POLL_TIME;
            lock(&self.card).sleeping = false;
        }
        self
    }

    /// Returns false if there was nothing to do.
    fn serve(&mut self) -> bool {
        let resets = lock(&self.card).resets;
        if resets != self.resets {
            self.begin(resets, Queues::default());
        }
        self.full = false;
        let sent = [0, 1].map(|queue| self.send(queue)).contains(&true);
        self.accept() || sent
    }

    /// Sends from one queue. Returns true if there was a packet or a context.
    fn send(&mut self, number: u32) -> bool {
        let (mut causes, mut progress) = (0, false);
        let at = number as usize;
        for _ in 0..MAX_PER_ROUND {
            let card = lock(&self.card);
            let unit = self.transmit.queues[at].take(&card, &self.memory, number);
            drop(card);
            let Some(unit) = unit else { break };
            let done = unit.packet.as_ref().map_or(Progress::Sent, |packet| {
                Frames::new(packet, self.offloads)
                    .map_or(Progress::Sent, |frames| self.send_frames(&frames, at))
            });
            self.full |= done == Progress::Blocked;
            progress |= done != Progress::Blocked;
            if done != Progress::Sent {
                break;
            }
            self.transmit.sent[at] = 0;
            causes |= unit.finish(&mut lock(&self.card), &self.memory, number);
        }
        if causes != 0 {
            lock(&self.card).raise(causes);
        }
        progress
    }

    /// Sends the frames of a packet that were not sent before.
    fn send_frames(&mut self, frames: &Frames<'_>, at: usize) -> Progress {
        let plugged = self.backend.link().is_plugged();
        let (from, count) = (self.transmit.sent[at], frames.count());
        for number in from..count {
            if number - from == MAX_PER_ROUND {
                return Progress::Begun;
            }
            let Transmit { frame, bounce, sent, .. } = &mut self.transmit;
            let header = frames.make(number, frame);
            let length = u32::try_from(HEADER_LENGTH + frame.len()).unwrap_or(u32::MAX);
            let written = bounce.write(0, &header);
            let written = written.and_then(|()| bounce.write(HEADER_LENGTH as u64, frame));
            // Without a cable, frames are lost. A tagged frame may be longer than the buffer.
            if plugged && written.is_ok() {
                let result = self.port.send(bounce, &[Piece { address: 0, length }]);
                if result == Err(TransferError::WouldBlock) {
                    return Progress::Blocked;
                }
            }
            sent[at] = number + 1;
            lock(&self.card).count(frame, false);
        }
        Progress::Sent
    }

    /// Discards the frames that came while the cable was unplugged. Returns false while it is.
    fn is_plugged(&mut self) -> bool {
        let plugged = self.backend.link().is_plugged();
        if plugged && self.unplugged {
            for _ in 0..MAX_STALE_FRAMES {
                if self.receive() == Err(TransferError::WouldBlock) {
                    break;
                }
            }
        }
        self.unplugged = !plugged;
        plugged
    }

    fn receive(&mut self) -> Result<usize, TransferError> {
        self.port.receive(&self.transmit.bounce, &[], &mut self.arrived)
    }

    /// Receives frames. Returns true if there was one.
    fn accept(&mut self) -> bool {
        if !self.is_plugged() {
            return false;
        }
        let (mut causes, mut progress) = (0, false);
        for _ in 0..MAX_PER_ROUND {
            if !receive::is_ready(&lock(&self.card)) {
                break;
            }
            let mut frame = match self.waiting.take() {
                Some(frame) => frame,
                None => match self.receive() {
                    Ok(length) => {
                        let end = length.min(self.arrived.len());
                        self.arrived.get(HEADER_LENGTH..end).unwrap_or_default().to_vec()
                    }
                    Err(TransferError::Refused) => continue,
                    Err(TransferError::WouldBlock) => break,
                },
            };
            let mut card = lock(&self.card);
            match receive::deliver(&mut card, &self.memory, &mut frame) {
                Delivery::Done(more) => causes |= more,
                Delivery::NoBuffers => {
                    drop(card);
                    self.waiting = Some(frame);
                    break;
                }
            }
            progress = true;
        }
        let mut card = lock(&self.card);
        if causes != 0 && card.resets == self.resets {
            card.raise(causes);
        }
        progress
    }

    /// Returns how long it waited.
    fn sleep(&mut self, sleep: &mut Sleep, ready: bool) -> Duration {
        let receive = ready && self.is_plugged();
        let wait = self.port.wait();
        let interest = Interest { receive, send: self.full || wait.full };
        let start = Instant::now();
        sleep.until(&wait, interest);
        start.elapsed()
    }
}

pub(super) fn lock(card: &Mutex<Card>) -> MutexGuard<'_, Card> {
    card.lock().expect("no device panicked")
}
