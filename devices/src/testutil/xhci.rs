//! An xHCI driver for tests. It works like a real driver, and makes mistakes that a test requests.

use std::time::{Duration, Instant};

use super::Bench;
use crate::device::Kind;
use crate::pci::Address;

// The addresses of the BARs.
const BAR0: u64 = 0xc000_0000;
const BAR2: u64 = 0xd000_0000;

// The layout of the driver's memory.
const DCBAA: u64 = 0x1000;
const COMMANDS: u64 = 0x2000;
/// The table of the event ring's segments.
pub const TABLE: u64 = 0x3800;
const EVENTS: u64 = 0x3000;
/// The address of the input context.
pub const INPUT: u64 = 0x4000;
const OUTPUTS: u64 = 0x5000;
const RINGS: u64 = 0x1_0000;
/// The number of blocks in a ring. The last is a link.
pub const BLOCKS: u64 = 64;
/// Free memory for the data of a test.
pub const DATA: u64 = 0x8_0000;

// Registers.
const OPERATIONAL: u64 = 0x80;
/// xHCI 5.4.1
pub const USBCMD: u64 = OPERATIONAL;
/// xHCI 5.4.2
pub const USBSTS: u64 = OPERATIONAL + 4;
/// xHCI 5.4.5
pub const CRCR: u64 = OPERATIONAL + 0x18;
const DCBAAP: u64 = OPERATIONAL + 0x30;
const CONFIG: u64 = OPERATIONAL + 0x38;
const PORTS: u64 = OPERATIONAL + 0x400;
pub const INTERRUPTER: u64 = 0x1020;
const DOORBELLS: u64 = 0x2000;

/// The type of a normal block, in the position of the type field.
pub const NORMAL: u32 = 1 << 10;
/// The flag for a chain that continues.
pub const CHAIN: u32 = 1 << 4;
/// The flag for an event on completion.
pub const COMPLETION: u32 = 1 << 5;

/// The index of mass storage's endpoint 0x81.
pub const BULK_IN: u8 = 3;
/// The index of mass storage's endpoint 0x02.
pub const BULK_OUT: u8 = 4;

/// A block (TRB) of four words.
pub type Block = [u32; 4];

/// The driver's position in a ring that it fills.
#[derive(Clone, Copy, Debug)]
struct Producer {
    base: u64,
    index: u64,
    cycle: u32,
}

impl Producer {
    fn new(base: u64) -> Self {
        Self { base, index: 0, cycle: 1 }
    }
}

pub struct Driver<'a> {
    pub bench: &'a Bench,
    at: Address,
    commands: Producer,
    rings: Vec<(u8, u8, Producer)>,
    event: u64,
    event_cycle: u32,
}

/// See [`Driver::progress`].
#[derive(Clone, Copy, Debug)]
pub struct Progress(Producer, u64, u32);

pub fn block(parameter: u64, status: u32, control: u32) -> Block {
    let [low, high] = [parameter & u64::from(u32::MAX), parameter >> 32];
    [u32::try_from(low).unwrap_or(0), u32::try_from(high).unwrap_or(0), status, control]
}

impl<'a> Driver<'a> {
    /// Finds the controller, and assigns addresses to its BARs.
    pub fn find(bench: &'a Bench, at: Address) -> Self {
        let driver = Self {
            bench,
            at,
            commands: Producer::new(COMMANDS),
            rings: Vec::new(),
            event: 0,
            event_cycle: 1,
        };
        for (register, value) in [(0x10, BAR0), (0x14, 0), (0x18, BAR2), (0x04, 6)] {
            driver.set_config(register, u32::try_from(value).expect("below 4 GiB"));
        }
        driver
    }

    pub fn set_config(&self, register: u64, value: u32) {
        self.bench.write(Kind::Config, self.at.config() + register, &value.to_le_bytes());
    }

    /// Enables MSI-X, with a message for each of the first vectors.
    pub fn use_messages(&self) {
        for vector in 0..16_u32 {
            let at = BAR2 + 16 * u64::from(vector);
            self.bench.write(Kind::Memory, at, &0xfee0_0000_u64.to_le_bytes());
            self.bench.write(Kind::Memory, at + 8, &(0x40 + u64::from(vector)).to_le_bytes());
        }
        self.set_config(0x40, 0x8000_0000);
    }

    pub fn get(&self, register: u64) -> u32 {
        u32::from_le_bytes(self.bench.read(Kind::Memory, BAR0 + register))
    }

    pub fn set(&self, register: u64, value: u32) {
        self.bench.write(Kind::Memory, BAR0 + register, &value.to_le_bytes());
    }

    /// Writes a register of 64 bits in the way of most drivers.
    pub fn set_wide(&self, register: u64, value: u64) {
        let [low, high, ..] = block(value, 0, 0);
        self.set(register, low);
        self.set(register + 4, high);
    }

    /// Waits until the bits of `mask` in a register equal `value`.
    pub fn wait(&self, register: u64, mask: u32, value: u32) {
        let start = Instant::now();
        while self.get(register) & mask != value {
            let now = self.get(register);
            assert!(start.elapsed() < Duration::from_secs(10), "{register:#x} stays {now:#x}");
            std::thread::yield_now();
        }
    }

    /// The offset of PORTSC of a port. Ports are counted from 1.
    pub fn port(number: u8) -> u64 {
        PORTS + 16 * (u64::from(number) - 1)
    }

    /// Resets the controller, and runs it with new rings.
    pub fn start(&mut self) {
        self.set(USBCMD, 2);
        self.wait(USBCMD, 2, 0);
        for at in (DCBAA..INPUT + 0x1000).step_by(8) {
            self.write(at, &[0; 8]);
        }
        for slot in 1..=64 {
            self.write(DCBAA + 8 * slot, &(OUTPUTS + 0x400 * slot).to_le_bytes());
        }
        (self.commands, self.event, self.event_cycle) = (Producer::new(COMMANDS), 0, 1);
        self.rings.clear();
        self.link(COMMANDS);
        self.set(CONFIG, 64);
        self.set_wide(DCBAAP, DCBAA);
        self.set_wide(CRCR, COMMANDS | 1);
        self.write(TABLE, &EVENTS.to_le_bytes());
        self.write(TABLE + 8, &BLOCKS.to_le_bytes());
        self.set(INTERRUPTER + 8, 1);
        self.set_wide(INTERRUPTER + 0x18, EVENTS);
        self.set_wide(INTERRUPTER + 0x10, TABLE);
        self.set(INTERRUPTER, 2);
        self.set(USBCMD, 5);
        self.wait(USBSTS, 1, 0);
    }

    /// The positions in the command ring and the event ring, for a driver that continues here.
    pub fn progress(&self) -> Progress {
        Progress(self.commands, self.event, self.event_cycle)
    }

    /// Continues at the positions of another driver of this controller.
    pub fn resume(&mut self, Progress(commands, event, cycle): Progress) {
        (self.commands, self.event, self.event_cycle) = (commands, event, cycle);
    }

    /// Creates another command ring, and passes it to the controller, which must be stopped.
    pub fn new_commands(&mut self, ring: u64) {
        self.link(ring);
        self.commands = Producer::new(ring);
        self.set_wide(CRCR, ring | 1);
    }

    fn link(&self, ring: u64) {
        let blank = vec![0; usize::try_from(16 * BLOCKS).expect("a page")];
        self.write(ring, &blank);
    }

    pub fn write(&self, at: u64, data: &[u8]) {
        self.bench.memory.write(at, data).expect("the test's memory");
    }

    pub fn read<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut data = [0; N];
        self.bench.memory.read(at, &mut data).expect("the test's memory");
        data
    }

    pub fn put(&self, at: u64, words: Block) {
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.write(at, &bytes);
    }

    fn enqueue(&self, mut ring: Producer, words: Block) -> Producer {
        self.put(
            ring.base + 16 * ring.index,
            [words[0], words[1], words[2], words[3] | ring.cycle],
        );
        ring.index += 1;
        if ring.index == BLOCKS - 1 {
            let link = block(ring.base, 0, 6 << 10 | 2 | ring.cycle);
            self.put(ring.base + 16 * ring.index, link);
            (ring.index, ring.cycle) = (0, ring.cycle ^ 1);
        }
        ring
    }

    /// Takes the next event, if there is one.
    pub fn event(&mut self) -> Option<Block> {
        let bytes: [u8; 16] = self.read(EVENTS + 16 * self.event);
        let words = bytes.as_chunks::<4>().0;
        let event = [words[0], words[1], words[2], words[3]].map(u32::from_le_bytes);
        if event[3] & 1 != self.event_cycle {
            return None;
        }
        self.event += 1;
        if self.event == BLOCKS {
            (self.event, self.event_cycle) = (0, self.event_cycle ^ 1);
        }
        self.set_wide(INTERRUPTER + 0x18, (EVENTS + 16 * self.event) | 8);
        Some(event)
    }

    /// Whether there is an event of this type in the ring. The event stays there.
    pub fn holds(&self, kind: u32) -> bool {
        let control = |at| u32::from_le_bytes(self.read(EVENTS + 16 * at + 12));
        (0..BLOCKS).any(|at| control(at) >> 10 & 0x3f == kind)
    }

    /// Waits for an event of this type. Other events are dropped.
    pub fn wait_event(&mut self, kind: u32) -> Block {
        let start = Instant::now();
        loop {
            match self.event() {
                Some(event) if event[3] >> 10 & 0x3f == kind => return event,
                Some(_) => {}
                None => {
                    assert!(start.elapsed() < Duration::from_secs(10), "no event {kind}");
                    std::thread::yield_now();
                }
            }
        }
    }

    pub fn ring(&self, slot: u8, target: u8) {
        self.set(DOORBELLS + 4 * u64::from(slot), target.into());
    }

    /// Sends a command without waiting.
    pub fn begin(&mut self, words: Block) {
        self.commands = self.enqueue(self.commands, words);
        self.ring(0, 0);
    }

    /// Sends a command, and returns its completion code and its slot.
    pub fn command(&mut self, words: Block) -> (u32, u8) {
        self.begin(words);
        let event = self.wait_event(33);
        let [.., slot] = event[3].to_le_bytes();
        (event[2] >> 24, slot)
    }

    /// Resets a port, and checks that it is enabled.
    pub fn reset_port(&self, number: u8) {
        self.set(Self::port(number), 1 << 4 | 0xfe << 16);
        self.wait(Self::port(number), 0x12, 2);
    }

    /// Creates an empty ring for an endpoint, and returns its address.
    pub fn new_ring(&mut self, slot: u8, endpoint: u8) -> u64 {
        let base = RINGS + 16 * BLOCKS * (u64::from(slot % 4) * 32 + u64::from(endpoint));
        self.link(base);
        self.rings.retain(|ring| (ring.0, ring.1) != (slot, endpoint));
        self.rings.push((slot, endpoint, Producer::new(base)));
        base
    }

    /// Returns the block's address.
    pub fn push(&mut self, slot: u8, endpoint: u8, words: Block) -> u64 {
        let at = self.rings.iter().position(|it| (it.0, it.1) == (slot, endpoint));
        let at = at.expect("a ring was made");
        let ring = self.rings[at].2;
        self.rings[at].2 = self.enqueue(ring, words);
        ring.base + 16 * ring.index
    }

    /// Writes an input context: control, slot, and one endpoint.
    pub fn write_input_context(&self, add: u32, slot: [u32; 2], number: u8, endpoint: [u32; 4]) {
        self.write(INPUT, &[0; 1024]);
        self.write(INPUT + 4, &add.to_le_bytes());
        self.put(INPUT + 0x20, [slot[0], slot[1], 0, 0]);
        self.put(INPUT + 0x20 * (u64::from(number) + 1), endpoint);
    }

    /// Reads a word of a device's output context.
    pub fn output(&self, slot: u8, context: u8, word: u64) -> u32 {
        let at = OUTPUTS + 0x400 * u64::from(slot) + 0x20 * u64::from(context) + 4 * word;
        u32::from_le_bytes(self.read(at))
    }

    /// Enables a slot, and addresses the device at an enabled port. Returns the slot.
    pub fn address(&mut self, port: u8) -> u8 {
        let (code, slot) = self.command(block(0, 0, 9 << 10));
        assert_eq!(code, 1, "enable slot");
        let ring = self.new_ring(slot, 1) | 1;
        let [low, high, ..] = block(ring, 0, 0);
        let control = [0, 4 << 3 | 64 << 16, low, high];
        self.write_input_context(3, [1 << 27, u32::from(port) << 16], 1, control);
        let (code, _) = self.command(block(INPUT, 0, 11 << 10 | u32::from(slot) << 24));
        assert_eq!(code, 1, "address device");
        slot
    }

    /// Configures an interrupt IN endpoint, and the device. Returns the completion code.
    pub fn configure(&mut self, slot: u8, endpoint: u8) -> u32 {
        let [low, high, ..] = block(self.new_ring(slot, endpoint) | 1, 0, 0);
        let context = [0, 7 << 3 | 8 << 16, low, high];
        self.write_input_context(
            1 | 1 << endpoint,
            [u32::from(endpoint) << 27, 0],
            endpoint,
            context,
        );
        let (code, _) = self.command(block(INPUT, 0, 12 << 10 | u32::from(slot) << 24));
        if code == 1 {
            self.control(slot, [0, 9, 1, 0, 0, 0, 0, 0], &mut []);
        }
        code
    }

    /// Configures the two bulk endpoints of mass storage with packets of this size. Returns the
    /// completion code.
    pub fn configure_bulk(&mut self, slot: u8, packet: u32) -> u32 {
        for (endpoint, kind) in [(BULK_IN, 6), (BULK_OUT, 2)] {
            let [low, high, ..] = block(self.new_ring(slot, endpoint) | 1, 0, 0);
            let context = [0, kind << 3 | packet << 16, low, high];
            self.write_input_context(
                1 | 1 << endpoint,
                [u32::from(endpoint) << 27, 0],
                endpoint,
                context,
            );
            let (code, _) = self.command(block(INPUT, 0, 12 << 10 | u32::from(slot) << 24));
            if code != 1 {
                return code;
            }
        }
        self.control(slot, [0, 9, 1, 0, 0, 0, 0, 0], &mut []).0
    }

    /// Transfers `length` bytes at an endpoint. Returns the completion code, and the number of
    /// bytes transferred.
    pub fn transfer(&mut self, slot: u8, endpoint: u8, at: u64, length: u32) -> (u32, u32) {
        let (mut blocks, mut sent) = (Vec::new(), 0);
        loop {
            let part = (length - sent).min(0x1_0000);
            let last = sent + part == length;
            let end = if last { COMPLETION } else { CHAIN };
            let words = block(at + u64::from(sent), part, NORMAL | end | 1 << 2);
            sent += part;
            blocks.push((self.push(slot, endpoint, words), sent));
            if last {
                break;
            }
        }
        self.ring(slot, endpoint);
        let event = self.wait_event(32);
        let (code, of) = (event[2] >> 24, u64::from(event[1]) << 32 | u64::from(event[0]));
        let went = blocks.iter().find(|it| it.0 == of).map_or(0, |it| it.1);
        if code == 13 && went < length {
            // The last block also requests an event, with the same remaining length.
            assert_eq!(self.wait_event(32)[2], event[2], "a short packet is reported twice");
        }
        (code, if matches!(code, 1 | 13) { went - (event[2] & 0xff_ffff) } else { 0 })
    }

    /// Restarts a halted endpoint as drivers do.
    pub fn recover(&mut self, slot: u8, endpoint: u8) {
        let at = u32::from(slot) << 24 | u32::from(endpoint) << 16;
        assert_eq!(self.command(block(0, 0, 14 << 10 | at)).0, 1, "reset endpoint");
        let ring = self.new_ring(slot, endpoint);
        assert_eq!(self.command(block(ring | 1, 0, 16 << 10 | at)).0, 1, "set dequeue pointer");
        let address = endpoint >> 1 | (endpoint & 1) << 7;
        self.control(slot, [2, 1, 0, 0, address, 0, 0, 0], &mut []);
    }

    /// Performs a control transfer. Returns the completion code of its last stage, and the number
    /// of bytes transferred.
    pub fn control(&mut self, slot: u8, setup: [u8; 8], data: &mut [u8]) -> (u32, usize) {
        let is_in = u32::from(setup[0] >> 7);
        let length = u32::try_from(data.len()).expect("short");
        let mut moved = data.len();
        self.push(slot, 1, block(u64::from_le_bytes(setup), 8, 2 << 10 | 1 << 6));
        if !data.is_empty() {
            self.write(DATA, data);
            // Report short packets and the end of the transfer.
            let control = 3 << 10 | is_in << 16 | COMPLETION | 1 << 2;
            self.push(slot, 1, block(DATA, length, control));
        }
        self.push(slot, 1, block(0, 0, 4 << 10 | COMPLETION));
        self.ring(slot, 1);
        if !data.is_empty() {
            let event = self.wait_event(32);
            if !matches!(event[2] >> 24, 1 | 13) {
                return (event[2] >> 24, 0);
            }
            moved -= (event[2] & 0xff_ffff) as usize;
            self.bench.memory.read(DATA, data).expect("the test's memory");
        }
        (self.wait_event(32)[2] >> 24, moved)
    }
}
