//! An NVMe controller with a hostile driver.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use devices::device::Kind;
use devices::pci::Address;
use devices::registry::Config;
use devices::testutil::Bench;
use devices::testutil::hostile::Actions;
use serde_json::{Value, json};

const AT: Address = Address::new(2, 0);
/// Guest addresses of the registers, the MSI-X table and the doorbells.
const REGISTERS: u64 = 0xc000_0000;
const TABLE: u32 = 0xd000_0000;
const BELLS: u64 = REGISTERS + 0x1000;
/// Offset of the control word of the MSI-X capability.
const CONTROL: u64 = 0x42;
/// Sizes of guest memory and of the disk.
const RAM: u64 = 1 << 18;
const DISK: u64 = 1 << 18;
/// The admin queue and three I/O queues, and the number of entries of each. One page each, first
/// all submission queues, then all completion queues.
const QUEUES: u16 = 4;
const ENTRIES: u16 = 64;
const PAGE: u64 = 0x1000;
/// Address of data and PRP lists.
const DATA: u64 = 0x1_0000;

/// How long a driver waits for a response.
const TIMEOUT: Duration = Duration::from_secs(10);

const CREATE_QUEUE: [u8; 2] = [5, 1];
/// Admin commands: create and delete queues, log pages, identify, abort, features, events,
/// keep-alive, doorbell buffers, and an unknown one.
const ADMIN: [u8; 12] = [0, 1, 2, 4, 5, 6, 8, 9, 0x0a, 0x0c, 0x7c, 0x18];
/// I/O commands: flush, write, read, compare, write zeroes, dataset management.
const IO: [u8; 8] = [0, 1, 2, 5, 8, 9, 1, 2];

/// Configurations of the disk.
const CONFIGS: &[fn(&Path) -> Value] = &[
    |folder| json!({ "path": disk(folder), "overlay": true }),
    |folder| json!({ "path": disk(folder), "queues": 3 }),
    |folder| json!({ "path": disk(folder), "sector": 4096, "iops": 2000 }),
    |folder| json!({ "path": disk(folder), "readonly": true }),
];

fn disk(folder: &Path) -> PathBuf {
    let path = folder.join("disk");
    let file = std::fs::OpenOptions::new().create(true).truncate(false).write(true).open(&path);
    file.expect("a folder to write in").set_len(DISK).expect("a few pages");
    path
}

/// The driver's view of its queues.
struct Driver<'a> {
    bench: &'a Bench,
    tails: [u16; QUEUES as usize],
    heads: [u16; QUEUES as usize],
    /// The phase bit of a new completion.
    phases: [bool; QUEUES as usize],
}

fn commands(queue: u16) -> u64 {
    PAGE * u64::from(1 + queue)
}

fn completions(queue: u16) -> u64 {
    commands(QUEUES + queue)
}

impl<'a> Driver<'a> {
    /// Assigns the BARs and enables the controller with its admin queue. Interrupts are MSI-X
    /// messages, or the interrupt line, which has one vector.
    fn start(bench: &'a Bench, messages: bool) -> Self {
        let config = |at: u64, value: u32| {
            bench.write(Kind::Config, AT.config() + at, &value.to_le_bytes());
        };
        config(0x10, u32::try_from(REGISTERS).expect("below 4 GiB"));
        config(0x18, TABLE);
        config(0x04, 6);
        bench.write(
            Kind::Config,
            AT.config() + CONTROL,
            &(u16::from(messages) << 15).to_le_bytes(),
        );
        let set = |at: u64, value: u64| {
            bench.write(Kind::Memory, REGISTERS + at, &value.to_le_bytes()[..4]);
        };
        let is_ready = |wanted: bool| {
            let start = Instant::now();
            while (bench.read::<4>(Kind::Memory, REGISTERS + 0x1c)[0] & 1 == 1) != wanted {
                assert!(start.elapsed() < TIMEOUT, "it should be ready: {wanted}");
                std::thread::yield_now();
            }
        };
        set(0x14, 0);
        is_ready(false);
        for queue in 0..QUEUES {
            bench.memory.write(completions(queue), &[0; ENTRIES as usize * 16]).expect("it is RAM");
        }
        let last = u64::from(ENTRIES - 1);
        set(0x24, last << 16 | last);
        set(0x28, commands(0));
        set(0x30, completions(0));
        set(0x14, 0x46_0001);
        is_ready(true);
        Self { bench, tails: [0; 4], heads: [0; 4], phases: [true; 4] }
    }

    /// Puts a command into a queue: opcode, identifier, and the dwords from the namespace on.
    fn submit(&mut self, queue: u16, opcode: u8, id: u8, dwords: [u32; 15]) {
        let mut bytes = vec![opcode, 0, id, 0];
        bytes.extend(dwords.iter().flat_map(|it| it.to_le_bytes()));
        let tail = &mut self.tails[usize::from(queue)];
        let at = commands(queue) + u64::from(*tail) * 64;
        self.bench.memory.write(at, &bytes).expect("it is RAM");
        *tail = (*tail + 1) % ENTRIES;
    }

    /// Writes the tail doorbell.
    fn ring(&self, queue: u16) {
        self.bell(2 * queue, u32::from(self.tails[usize::from(queue)]));
    }

    fn bell(&self, bell: u16, value: u32) {
        self.bench.write(Kind::Memory, BELLS + 4 * u64::from(bell), &value.to_le_bytes());
    }

    /// Takes all completions and writes the head doorbell. Returns the last status.
    fn reap(&mut self, queue: u16) -> Option<u16> {
        let number = usize::from(queue);
        let mut last = None;
        loop {
            let mut status = [0; 2];
            let at = completions(queue) + u64::from(self.heads[number]) * 16;
            self.bench.memory.read(at + 14, &mut status).expect("it is RAM");
            let status = u16::from_le_bytes(status);
            // A driver that overwrote its own queue would never stop.
            if (status & 1 == 1) != self.phases[number] || last.is_some() && self.heads[number] == 0
            {
                break;
            }
            last = Some(status >> 1);
            self.heads[number] = (self.heads[number] + 1) % ENTRIES;
            self.phases[number] ^= self.heads[number] == 0;
        }
        self.bell(2 * queue + 1, self.heads[number].into());
        last
    }
}

/// Runs the actions that the bytes describe, then checks that the controller still works. The first
/// byte selects the configuration. Returns how often reads, writes or flushes succeeded.
pub(crate) fn run(folder: &Path, mut bytes: impl Iterator<Item = u8>) -> u32 {
    let Some(way) = bytes.next() else { return 0 };
    let mut fields = CONFIGS[usize::from(way) % CONFIGS.len()](folder);
    fields["slot"] = json!("02.0");
    let config =
        Config::of_kind("nvme", fields).expect("it is in the registry").expect("its fields");
    let mut bench = Bench::new(usize::try_from(RAM).expect("a few pages"));
    bench.board.add("nvme", |grants| config.build(grants)).expect("the board is empty");
    bench.board.run(Vec::new()).expect("power-on");
    let mut driver = Driver::start(&bench, true);
    let mut actions = Actions::new(bytes, RAM);
    let mut served = 0;
    while step(&mut actions, &mut driver, &mut served).is_some() {}
    bench.board.reset().expect("power-on again");
    let mut driver = Driver::start(&bench, false);
    // IDENTIFY of the controller.
    driver.submit(0, 6, 0, dwords(0, (DATA, 0), [1, 0, 0]));
    driver.ring(0);
    let start = Instant::now();
    let status = loop {
        if let Some(status) = driver.reap(0) {
            break status;
        }
        assert!(start.elapsed() < TIMEOUT, "nothing came");
        std::thread::yield_now();
    };
    assert_eq!(status, 0);
    served
}

/// The dwords of a command: namespace, data pointer, and dwords 10 to 12.
fn dwords(space: u32, (first, second): (u64, u64), own: [u32; 3]) -> [u32; 15] {
    let mut dwords = [0; 15];
    dwords[0] = space;
    for (at, data) in [(5, first), (7, second)] {
        let [a, b, c, d, e, f, g, h] = data.to_le_bytes();
        dwords[at] = u32::from_le_bytes([a, b, c, d]);
        dwords[at + 1] = u32::from_le_bytes([e, f, g, h]);
    }
    dwords[9..12].copy_from_slice(&own);
    dwords
}

/// Runs one action. Returns None at the end of the bytes.
fn step<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'_>,
    served: &mut u32,
) -> Option<()> {
    let (what, bench) = (actions.byte()?, driver.bench);
    let queue = u16::from(actions.byte()?) % QUEUES;
    match what {
        0..20 => create(actions, driver, queue)?,
        20..120 => command(actions, driver, queue)?,
        120..150 => driver.ring(queue),
        150..180 => {
            let done = driver.reap(queue) == Some(0);
            *served += u32::from(done && queue > 0);
        }
        180..190 => driver.bell(u16::from(actions.byte()? % 20), u32::from(actions.byte()? % 80)),
        190..210 => drop(bench.memory.write(actions.address()?, &actions.word()?.to_le_bytes())),
        210..220 => {
            let (at, value) = (u64::from(actions.byte()?) & 0x3c, actions.word()?);
            bench.write(Kind::Memory, REGISTERS + at, &value.to_le_bytes());
        }
        220..225 => {
            let at = REGISTERS + (u64::from(actions.short()?) & 0x3ffc);
            bench.write(Kind::Memory, at, &actions.word()?.to_le_bytes());
        }
        225..228 => bench.write(Kind::Config, AT.config() + 4, &[actions.byte()?, 0]),
        228..231 => {
            let size = DISK + u64::from(actions.byte()?) * 4096;
            bench.board.shared.disks.all().iter().for_each(|disk| drop(disk.grow(Some(size))));
        }
        231..238 => {
            bench.read::<4>(Kind::Memory, REGISTERS + u64::from(actions.byte()? & 0x3c));
        }
        238..247 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        247..249 => {
            bench.board.reset().expect("power-on again");
            *driver = Driver::start(bench, true);
        }
        // A new driver.
        _ => *driver = Driver::start(bench, queue != 0),
    }
    Some(())
}

/// Creates a pair of queues, mostly a valid one.
fn create<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'_>,
    queue: u16,
) -> Option<()> {
    let odd = u32::from(actions.byte()?);
    let number = u32::from(queue) | u32::from(ENTRIES - 1 - u16::from(odd == 1)) << 16;
    for (opcode, at) in CREATE_QUEUE.into_iter().zip([completions(queue), commands(queue)]) {
        // Contiguous, with interrupts and a vector, or with the completion queue's number.
        let flags = match opcode {
            5 if odd % 4 == 0 => 3,
            5 => u32::from(queue) << 16 | 3,
            _ if odd < 240 => u32::from(queue) << 16 | 1,
            _ => (odd % u32::from(QUEUES)) << 16 | odd >> 1 & 1,
        };
        driver.submit(0, opcode, 0, dwords(0, (at, 0), [number, flags, 0]));
    }
    let number = usize::from(queue);
    (driver.tails[number], driver.heads[number], driver.phases[number]) = match queue {
        0 => (driver.tails[0], driver.heads[0], driver.phases[0]),
        _ => (0, 0, true),
    };
    driver.ring(0);
    Some(())
}

/// A well-formed command with random contents.
fn command<B: Iterator<Item = u8>>(
    actions: &mut Actions<B>,
    driver: &mut Driver<'_>,
    queue: u16,
) -> Option<()> {
    let (choice, shape) = (actions.byte()?, actions.byte()?);
    let list: &[u8] = if queue == 0 { &ADMIN } else { &IO };
    let opcode =
        if choice < 250 { list[usize::from(choice) % list.len()] } else { actions.byte()? };
    let space = if shape < 200 { 1 } else { u32::from(actions.byte()?).wrapping_sub(2) };
    // Whole pages with a PRP list, or random addresses.
    let list = DATA + 0x8000 + u64::from(actions.byte()? & 0xf8);
    let data = match shape % 8 {
        0 => (actions.address()?, actions.address()?),
        1 | 2 => (DATA + u64::from(actions.short()? & 0xffc), list),
        _ => (DATA, DATA + PAGE),
    };
    for slot in 0..u64::from(shape & 7) {
        let page = DATA + PAGE * u64::from(actions.byte()? % 16);
        driver.bench.memory.write(list + 8 * slot, &page.to_le_bytes()).expect("it is RAM");
    }
    let small = |byte: u8| u32::from(byte % if queue == 0 { 16 } else { 64 });
    let own = match (queue, shape % 4) {
        (_, 0) => [actions.word()?, actions.word()?, actions.word()?],
        // Log page or feature, and length. For deletions: a queue number.
        (0, _) => {
            [small(actions.byte()?) | small(actions.byte()?) << 16, actions.short()?.into(), 0]
        }
        // First block and number of blocks.
        _ => [small(actions.byte()?) * 8, 0, small(actions.byte()?) | u32::from(shape & 0xc) << 28],
    };
    driver.submit(queue, opcode, choice, dwords(space, data, own));
    if shape & 16 == 0 {
        driver.ring(queue);
    }
    Some(())
}
