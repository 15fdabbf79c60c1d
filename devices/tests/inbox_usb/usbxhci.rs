//! A model of usbxhci: registers, rings, events and commands.
//!
//! Nothing is polled: as in the real driver, an event ring is read only after its message, so a
//! lost interrupt ends a test.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::grants::Shared;
use devices::hypervisor::Message;
use devices::testutil::Bench;
use devices::testutil::xhci::{Block, block};

use super::AT;

/// A time limit that is enough even on a busy machine.
pub(crate) const LIMIT: Duration = Duration::from_secs(30);

const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;

/// Offsets in the operational registers (xHCI 5.4).
pub(crate) const USBCMD: u64 = 0x00;
pub(crate) const USBSTS: u64 = 0x04;
pub(crate) const CRCR: u64 = 0x18;
const DNCTRL: u64 = 0x14;
const DCBAAP: u64 = 0x30;
const CONFIG: u64 = 0x38;
const PORTS: u64 = 0x400;

pub(crate) const RUN: u32 = 1;
const HCRST: u32 = 2;
const INTE: u32 = 4;
pub(crate) const HALTED: u32 = 1;
const NOT_READY: u32 = 1 << 11;

/// TRB types, shifted to their position.
const LINK: u32 = 6 << 10;
pub(crate) const ENABLE_SLOT: u32 = 9 << 10;
pub(crate) const DISABLE_SLOT: u32 = 10 << 10;
pub(crate) const ADDRESS_DEVICE: u32 = 11 << 10;
pub(crate) const CONFIGURE_ENDPOINT: u32 = 12 << 10;
pub(crate) const EVALUATE_CONTEXT: u32 = 13 << 10;
pub(crate) const RESET_ENDPOINT: u32 = 14 << 10;
pub(crate) const STOP_ENDPOINT: u32 = 15 << 10;
pub(crate) const SET_DEQUEUE: u32 = 16 << 10;
pub(crate) const RESET_DEVICE: u32 = 17 << 10;
pub(crate) const NO_OP: u32 = 23 << 10;

/// Bits of a TRB's control word.
const TOGGLE: u32 = 1 << 1;
pub(crate) const CHAIN: u32 = 1 << 4;

/// Completion codes (Table 6-90).
pub(crate) const SUCCESS: u32 = 1;
pub(crate) const TRANSACTION: u32 = 4;
pub(crate) const STALL: u32 = 6;
pub(crate) const SHORT: u32 = 13;
pub(crate) const CONTEXT_STATE: u32 = 19;
pub(crate) const STOPPED: u32 = 26;

/// Event types.
pub(crate) const TRANSFER: u32 = 32;
const COMMAND: u32 = 33;
pub(crate) const PORT: u32 = 34;

/// TRBs of a ring's segment: 512 bytes, of which the last TRB is a link (usb3kd: Size 512).
pub(crate) const SEGMENT: u64 = 32;
/// TRBs of an event ring's segment, and segments (usb3kd: TRBsPerSegment 256,
/// TotalEventRingSegments 2).
const EVENTS: u64 = 256;
const EVENT_SEGMENTS: u64 = 2;
/// Events that the driver handles per interrupt before it reports how far it is (conjecture). With
/// more in the ring, another interrupt must come.
const BATCH: usize = 4;
/// Interrupters: the first, and one for each of four processors. In usb3kd's dumps, transfers have
/// the targets 0, 1 and 2.
const INTERRUPTERS: u32 = 4;
/// Data buffers of a TRB do not cross this (xHCI 6.4.1).
pub(crate) const BOUNDARY: u64 = 0x1_0000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event(pub(crate) Block);

impl Event {
    pub(crate) fn kind(self) -> u32 {
        self.0[3] >> 10 & 0x3f
    }

    pub(crate) fn code(self) -> u32 {
        self.0[2] >> 24
    }

    pub(crate) fn length(self) -> u32 {
        self.0[2] & 0xff_ffff
    }

    pub(crate) fn pointer(self) -> u64 {
        u64::from(self.0[1]) << 32 | u64::from(self.0[0])
    }

    /// ED: the pointer is the driver's cookie.
    pub(crate) fn has_cookie(self) -> bool {
        self.0[3] & 4 != 0
    }

    pub(crate) fn slot(self) -> u8 {
        self.0[3].to_le_bytes()[3]
    }

    pub(crate) fn endpoint(self) -> u8 {
        self.0[3].to_le_bytes()[2] & 0x1f
    }
}

/// A ring of linked segments that the driver fills.
#[derive(Clone, Debug)]
pub(crate) struct Ring {
    segments: Vec<u64>,
    segment: usize,
    index: u64,
    cycle: u32,
}

impl Ring {
    /// The address of the next TRB, with the cycle bit, as in a dequeue pointer.
    pub(crate) fn pointer(&self) -> u64 {
        (self.segments[self.segment] + 16 * self.index) | u64::from(self.cycle)
    }
}

/// An event ring as the driver reads it.
struct EventRing {
    segments: Vec<u64>,
    segment: usize,
    index: u64,
    cycle: u32,
}

pub(crate) struct Xhci {
    pub(crate) shared: Shared,
    /// The messages that the controller has sent.
    sent: Arc<Mutex<Vec<Message>>>,
    operational: u64,
    runtime: u64,
    doorbells: u64,
    /// The address of the next buffer.
    free: u64,
    contexts: u64,
    commands: Ring,
    rings: BTreeMap<(u8, u8), Ring>,
    events: Vec<EventRing>,
    /// Events that the driver has read and not used yet.
    pub(crate) heard: VecDeque<Event>,
    /// The number of messages that were handled.
    handled: usize,
    cookie: u64,
    /// The length of contiguous memory in bytes: longer buffers are in several TRBs.
    pub(crate) part: u32,
    /// The addresses of the output contexts and of the input contexts, by slot.
    pub(crate) devices: BTreeMap<u8, (u64, u64)>,
}

impl Xhci {
    /// Finds the controller and takes it from firmware.
    pub(crate) fn find(bench: &Bench) -> Self {
        let empty = Ring { segments: vec![0], segment: 0, index: 0, cycle: 1 };
        let mut it = Self {
            shared: bench.board.shared.clone(),
            sent: bench.hypervisor.sent.clone(),
            operational: 0,
            runtime: 0,
            doorbells: 0,
            free: 1 << 20,
            contexts: 0,
            commands: empty,
            rings: BTreeMap::new(),
            events: Vec::new(),
            heard: VecDeque::new(),
            handled: 0,
            // usb3kd: the data of an Event Data TRB is a kernel address.
            cookie: 0xffff_fa80_05b9_6210,
            part: 20,
            devices: BTreeMap::new(),
        };
        for (register, value) in [(0x10, BAR0), (0x14, 0), (0x18, BAR2), (0x04, 6)] {
            it.set_config(register, u32::try_from(value).unwrap());
        }
        // spec (5.3.1): the length of the capability registers is a byte of its own.
        let [length] = it.read_bytes(0);
        let version = u16::from_le_bytes(it.read_bytes(2));
        // xHCI 0.95 is the oldest version with drivers; 0.96 and later have no quirks.
        assert!((0x96..0x200).contains(&version), "HCIVERSION {version:#x}");
        it.operational = u64::from(length);
        it.runtime = u64::from(it.capability(0x18) & !0x1f);
        it.doorbells = u64::from(it.capability(0x14) & !3);
        it.hand_over();
        it.enable_messages();
        it
    }

    fn set_config(&self, register: u64, value: u32) {
        self.shared.spaces.of(Kind::Config).write(AT.config() + register, &value.to_le_bytes());
    }

    /// MSI-X with one message for each interrupter (UCX: the driver gets what PnP assigned).
    fn enable_messages(&self) {
        for vector in 0..INTERRUPTERS {
            let at = BAR2 + 16 * u64::from(vector);
            let memory = self.shared.spaces.of(Kind::Memory);
            memory.write(at, &0xfee0_0000_u64.to_le_bytes());
            memory.write(at + 8, &u64::from(vector).to_le_bytes());
        }
        self.set_config(0x40, 0x8000_0000);
    }

    pub(crate) fn capability(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.read_bytes(register))
    }

    fn read_bytes<const N: usize>(&self, register: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.shared.spaces.of(Kind::Memory).read(BAR0 + register, &mut bytes);
        bytes
    }

    /// Writes to the registers at this offset, in one access.
    fn write_bytes(&self, register: u64, bytes: &[u8]) {
        self.shared.spaces.of(Kind::Memory).write(BAR0 + register, bytes);
    }

    /// The extended capabilities, each with its offset.
    pub(crate) fn extended(&self) -> Vec<(u64, u8)> {
        let mut at = u64::from(self.capability(0x10) >> 16) * 4;
        let mut all = Vec::new();
        while at != 0 {
            let [id, next, ..] = self.capability(at).to_le_bytes();
            all.push((at, id));
            assert!(all.len() < 32, "a loop of extended capabilities");
            at = if next == 0 { 0 } else { at + u64::from(next) * 4 };
        }
        all
    }

    /// Takes the controller from firmware (spec, 4.22.1: set OS Owned, wait for BIOS Owned to
    /// clear, disable its interrupts).
    fn hand_over(&self) {
        for (at, _) in self.extended().into_iter().filter(|it| it.1 == 1) {
            // Each owner has a byte (7.1.1), so that neither overwrites the other's.
            self.write_bytes(at + 3, &[1]);
            self.wait_until("firmware gives up the controller", |it| {
                it.capability(at) >> 16 & 0x101 == 0x100
            });
            self.write_bytes(at + 4, &0xe000_0000_u32.to_le_bytes());
        }
    }

    pub(crate) fn get(&self, register: u64) -> u32 {
        self.capability(self.operational + register)
    }

    pub(crate) fn set(&self, register: u64, value: u32) {
        self.write_bytes(self.operational + register, &value.to_le_bytes());
    }

    /// Writes 64 bits at once, as drivers of 64 bits do where AC64 is set (conjecture).
    pub(crate) fn set_wide(&self, register: u64, value: u64) {
        self.write_bytes(self.operational + register, &value.to_le_bytes());
    }

    pub(crate) fn wait_until(&self, what: &str, is: impl Fn(&Self) -> bool) {
        let start = Instant::now();
        while !is(self) {
            assert!(start.elapsed() < LIMIT, "in vain: {what}");
            std::thread::yield_now();
        }
    }

    /// A zeroed buffer. It does not cross a boundary of 64 KiB if it is shorter than that.
    pub(crate) fn allocate(&mut self, size: u64) -> u64 {
        let align = size.next_power_of_two().clamp(512, BOUNDARY);
        let at = self.free.next_multiple_of(align);
        self.free = at + size;
        self.write(at, &vec![0; usize::try_from(size).unwrap()]);
        at
    }

    pub(crate) fn write(&self, at: u64, data: &[u8]) {
        self.shared.memory.write(at, data).unwrap();
    }

    pub(crate) fn read(&self, at: u64, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        self.shared.memory.read(at, &mut data).unwrap();
        data
    }

    fn put(&self, at: u64, words: Block) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(at, &bytes);
    }

    /// Halts and resets the controller (spec, 4.2: wait until it is ready).
    pub(crate) fn reset(&mut self) {
        self.set(USBCMD, self.get(USBCMD) & !RUN);
        self.wait_until("halted", |it| it.get(USBSTS) & HALTED != 0);
        self.set(USBCMD, HCRST);
        self.wait_until("reset", |it| it.get(USBCMD) & HCRST == 0);
        self.wait_until("ready", |it| it.get(USBSTS) & NOT_READY == 0);
        self.rings.clear();
        self.heard.clear();
        self.devices.clear();
    }

    /// Starts the controller after a reset, in the order of xHCI 4.2.
    pub(crate) fn start(&mut self) {
        self.reset();
        assert_eq!(self.get(0x08), 1, "PAGESIZE");
        let slots = self.capability(0x04) & 0xff;
        self.set(CONFIG, slots);
        self.contexts = self.allocate(4096);
        let scratchpads = self.capability(0x08) >> 27 | self.capability(0x08) >> 16 & 0x3e0;
        if scratchpads > 0 {
            let array = self.allocate(8 * u64::from(scratchpads));
            for number in 0..u64::from(scratchpads) {
                let page = self.allocate(4096);
                self.write(array + 8 * number, &page.to_le_bytes());
            }
            self.write(self.contexts, &array.to_le_bytes());
        }
        self.set_wide(DCBAAP, self.contexts);
        self.commands = self.new_ring(1);
        self.set_wide(CRCR, self.commands.pointer());
        // Device notifications: function wake (UCX: the driver reports it to UCX).
        self.set(DNCTRL, 1 << 1);
        self.start_interrupters();
        self.set(USBCMD, RUN | INTE);
        self.wait_until("running", |it| it.get(USBSTS) & HALTED == 0);
    }

    /// An event ring for each interrupter, of several segments.
    fn start_interrupters(&mut self) {
        let exponent = self.capability(0x08) >> 4 & 0xf;
        assert!(EVENT_SEGMENTS <= 1 << exponent, "segments: at most 2^{exponent}");
        self.events.clear();
        self.handled = self.sent.lock().unwrap().len();
        for number in 0..INTERRUPTERS {
            let table = self.allocate(512);
            let segments: Vec<u64> =
                (0..EVENT_SEGMENTS).map(|_| self.allocate(16 * EVENTS)).collect();
            for (entry, segment) in (0..).zip(&segments) {
                self.put(table + 16 * entry, block(*segment, u32::try_from(EVENTS).unwrap(), 0));
            }
            let at = self.runtime + 0x20 + 0x20 * u64::from(number);
            self.set_runtime(at + 8, u32::try_from(EVENT_SEGMENTS).unwrap());
            self.set_runtime_wide(at + 0x18, segments[0] | 8);
            self.set_runtime_wide(at + 0x10, table);
            // IMOD: the interval, in units of 250 ns (conjecture: 50 microseconds).
            self.set_runtime(at + 4, 200);
            self.set_runtime(at, 2);
            self.events.push(EventRing { segments, segment: 0, index: 0, cycle: 1 });
        }
    }

    fn set_runtime(&self, at: u64, value: u32) {
        self.write_bytes(at, &value.to_le_bytes());
    }

    fn set_runtime_wide(&self, at: u64, value: u64) {
        self.write_bytes(at, &value.to_le_bytes());
    }

    /// A ring of some segments, linked in a circle.
    pub(crate) fn new_ring(&mut self, segments: u64) -> Ring {
        let segments = (0..segments).map(|_| self.allocate(16 * SEGMENT)).collect();
        Ring { segments, segment: 0, index: 0, cycle: 1 }
    }

    /// Writes a descriptor into a ring. The first TRB becomes valid last (conjecture), so that the
    /// controller sees all or nothing. Returns the addresses.
    fn enqueue(&self, ring: &mut Ring, trbs: &[Block]) -> Vec<u64> {
        let (mut at, mut first) = (Vec::new(), None);
        for words in trbs {
            if ring.index == SEGMENT - 1 {
                self.link(ring, CHAIN);
            }
            let here = ring.segments[ring.segment] + 16 * ring.index;
            let cycle = if first.is_none() { ring.cycle ^ 1 } else { ring.cycle };
            self.put(here, [words[0], words[1], words[2], words[3] | cycle]);
            first.get_or_insert((here, [words[0], words[1], words[2], words[3] | ring.cycle]));
            at.push(here);
            ring.index += 1;
            if ring.index == SEGMENT - 1 && words[3] & CHAIN == 0 {
                self.link(ring, 0);
            }
        }
        if let Some((here, words)) = first {
            self.put(here, words);
        }
        at
    }

    /// Leaves a segment. Within a chain, the link is a part of it (spec, 4.11.5.1).
    fn link(&self, ring: &mut Ring, chain: u32) {
        let last = ring.segment + 1 == ring.segments.len();
        let next = if last { 0 } else { ring.segment + 1 };
        let toggle = if last { TOGGLE } else { 0 };
        let words = block(ring.segments[next], 0, LINK | toggle | chain | ring.cycle);
        self.put(ring.segments[ring.segment] + 16 * ring.index, words);
        (ring.segment, ring.index) = (next, 0);
        ring.cycle ^= u32::from(last);
    }

    pub(crate) fn ring_doorbell(&self, slot: u8, target: u8) {
        self.set_runtime(self.doorbells + 4 * u64::from(slot), target.into());
    }

    /// Gives an endpoint a ring, and returns the pointer for its context.
    pub(crate) fn give_ring(&mut self, slot: u8, endpoint: u8, segments: u64) -> u64 {
        let ring = self.new_ring(segments);
        let pointer = ring.pointer();
        self.rings.insert((slot, endpoint), ring);
        pointer
    }

    pub(crate) fn ring(&self, slot: u8, endpoint: u8) -> &Ring {
        &self.rings[&(slot, endpoint)]
    }

    /// Puts a descriptor into the ring of an endpoint.
    pub(crate) fn push(&mut self, slot: u8, endpoint: u8, trbs: &[Block]) -> Vec<u64> {
        let mut ring = self.rings.remove(&(slot, endpoint)).expect("an endpoint with a ring");
        let at = self.enqueue(&mut ring, trbs);
        self.rings.insert((slot, endpoint), ring);
        at
    }

    /// The interrupter of a slot's transfers.
    pub(crate) fn target(slot: u8) -> u32 {
        (1 + u32::from(slot) % (INTERRUPTERS - 1)) << 22
    }

    pub(crate) fn new_cookie(&mut self) -> u64 {
        self.cookie += 0x60;
        self.cookie
    }

    /// Handles messages: reads the rings of their interrupters, then reports how far (ERDP).
    fn serve(&mut self) {
        let vectors: BTreeSet<u32> = {
            let sent = self.sent.lock().unwrap();
            let new = sent.iter().skip(self.handled).map(|message| message.data).collect();
            self.handled = sent.len();
            new
        };
        for vector in vectors {
            let number = usize::try_from(vector).unwrap();
            for _ in 0..BATCH {
                let Some(event) = self.take(number) else { break };
                let transfer = event.kind() == TRANSFER;
                let target = if transfer { Self::target(event.slot()) >> 22 } else { 0 };
                assert_eq!(target, vector, "the wrong interrupter: {event:x?}");
                self.heard.push_back(event);
            }
            let ring = &self.events[number];
            let at = ring.segments[ring.segment] + 16 * ring.index;
            // DESI (the segment) is in the low bits, EHB says that the handler is done (5.5.2.3.3).
            let segment = u64::try_from(ring.segment).unwrap();
            let register = self.runtime + 0x20 + 0x20 * u64::from(vector) + 0x18;
            self.set_runtime_wide(register, at | segment | 8);
        }
    }

    fn take(&mut self, number: usize) -> Option<Event> {
        let ring = &self.events[number];
        let bytes = self.read(ring.segments[ring.segment] + 16 * ring.index, 16);
        let words = bytes.as_chunks::<4>().0;
        let event = [words[0], words[1], words[2], words[3]].map(u32::from_le_bytes);
        let ring = &mut self.events[number];
        if event[3] & 1 != ring.cycle {
            return None;
        }
        ring.index += 1;
        if ring.index == EVENTS {
            (ring.index, ring.segment) = (0, ring.segment + 1);
            if ring.segment == ring.segments.len() {
                (ring.segment, ring.cycle) = (0, ring.cycle ^ 1);
            }
        }
        Some(Event(event))
    }

    /// Waits for the first event that fits, and takes it.
    pub(crate) fn wait_event(&mut self, what: &str, fits: impl Fn(Event) -> bool) -> Event {
        let start = Instant::now();
        loop {
            self.serve();
            if let Some(at) = self.heard.iter().position(|event| fits(*event)) {
                return self.heard.remove(at).unwrap();
            }
            assert!(start.elapsed() < LIMIT, "no event: {what}; others: {:x?}", self.heard);
            std::thread::yield_now();
        }
    }

    /// Takes all events of ports. They are complete after a command.
    pub(crate) fn port_events(&mut self) -> Vec<u8> {
        self.command(block(0, 0, NO_OP));
        let ports = self.heard.iter().filter(|it| it.kind() == PORT);
        let ports = ports.map(|it| it.0[0].to_le_bytes()[3]).collect();
        self.heard.retain(|it| it.kind() != PORT);
        ports
    }

    /// Checks that nothing but port changes was reported in addition.
    pub(crate) fn expect_quiet(&mut self) {
        self.command(block(0, 0, NO_OP));
        self.heard.retain(|it| it.kind() != PORT);
        assert!(self.heard.is_empty(), "unexpected events: {:x?}", self.heard);
    }

    /// Sends a command without waiting. Returns its address.
    pub(crate) fn begin(&mut self, words: Block) -> u64 {
        let mut commands = self.commands.clone();
        let at = self.enqueue(&mut commands, &[words])[0];
        self.commands = commands;
        self.ring_doorbell(0, 0);
        at
    }

    /// Sends a command, and returns its completion code and slot.
    pub(crate) fn command(&mut self, words: Block) -> (u32, u8) {
        let at = self.begin(words);
        let fits = |it: Event| it.kind() == COMMAND && it.pointer() == at;
        let event = self.wait_event("a command", fits);
        (event.code(), event.slot())
    }

    /// A command for an endpoint. Returns the completion code.
    pub(crate) fn endpoint_command(&mut self, kind: u32, slot: u8, endpoint: u8) -> u32 {
        self.command(block(0, 0, kind | of(slot, endpoint))).0
    }

    /// Lets an endpoint continue at the driver's position, which is after all its transfers.
    pub(crate) fn set_dequeue(&mut self, slot: u8, endpoint: u8) -> u32 {
        let pointer = self.ring(slot, endpoint).pointer();
        let (code, _) = self.command(block(pointer, 0, SET_DEQUEUE | of(slot, endpoint)));
        assert!(code != SUCCESS || self.dequeue(slot, endpoint) == pointer, "as in the context");
        code
    }

    /// The position of an endpoint in its ring, with the cycle bit, in the output context.
    pub(crate) fn dequeue(&self, slot: u8, endpoint: u8) -> u64 {
        let at = self.devices[&slot].0 + 0x20 * u64::from(endpoint) + 8;
        u64::from_le_bytes(self.read(at, 8).try_into().unwrap())
    }

    /// The state of a context in the output device context: an endpoint's, or that of the slot.
    pub(crate) fn state(&self, slot: u8, endpoint: u8) -> u32 {
        let at = self.devices[&slot].0 + 0x20 * u64::from(endpoint);
        let word = |at| u32::from_le_bytes(self.read(at, 4).try_into().unwrap());
        if endpoint == 0 { word(at + 12) >> 27 } else { word(at) & 7 }
    }

    /// The output context and the input context of a new slot.
    pub(crate) fn give_contexts(&mut self, slot: u8) {
        let contexts = (self.allocate(4096), self.allocate(4096));
        self.write(self.contexts + 8 * u64::from(slot), &contexts.0.to_le_bytes());
        self.devices.insert(slot, contexts);
    }

    // Ports, counted from 1.

    pub(crate) fn port(&self, number: u8) -> u32 {
        self.get(PORTS + 16 * (u64::from(number) - 1))
    }

    /// Writes PORTSC: the bits that keep their value as read, and these.
    pub(crate) fn set_port(&self, number: u8, bits: u32) {
        // PP, PIC and the wake-up enables keep their value; PED and the changes are cleared by 1.
        let kept = self.port(number) & (1 << 9 | 3 << 14 | 7 << 25);
        self.set(PORTS + 16 * (u64::from(number) - 1), kept | bits);
    }

    pub(crate) fn power(&self, number: u8) -> u32 {
        self.get(PORTS + 16 * (u64::from(number) - 1) + 4)
    }

    pub(crate) fn set_power(&self, number: u8, value: u32) {
        self.set(PORTS + 16 * (u64::from(number) - 1) + 4, value);
    }
}

/// The slot and the endpoint of a command.
pub(crate) fn of(slot: u8, endpoint: u8) -> u32 {
    u32::from(slot) << 24 | u32::from(endpoint) << 16
}
