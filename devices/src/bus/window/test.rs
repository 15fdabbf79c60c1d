//! Windows that overlap while a guest moves them, as Windows does when it rebalances resources.

use std::ptr;
use std::sync::Mutex;

use super::*;
use crate::device::{Access, Device, Saved};
use crate::hypervisor::GuestAccess;
use crate::hypervisor::fake::FakeHypervisor;
use crate::pci::{Address, Bar, Id, Identity};
use crate::testutil::Bench;
use host::testutil::noise::Noise;

const COMMAND: u64 = 4;
const ONES: u32 = u32::MAX;
/// All BARs are placed here, with one of these upper halves: few places, so most overlap.
const ARENA: Range<u64> = 0xc000_0000..0xc002_0000;
const HIGH: [u32; 3] = [0, 1, 0x80];
/// Each function has a BAR of 32 bits, which may have memory, and a BAR of 64 bits.
const SIZES: [(u32, u64); 6] = [
    (0x1000, 0x4000),
    (0x1000, 0x4000),
    (0x4000, 0x4000),
    (0x1_0000, 0x1000),
    (0x1_0000, 0x1_0000),
    (0x1000, 0x2000),
];
const BARS: [u8; 2] = [0, 2];

/// The doorbells of a BAR, at offsets.
fn bells(size: u64) -> [Doorbell; 3] {
    let bell = |address, length, value| Doorbell { kind: Kind::Memory, address, length, value };
    [bell(0, 0, None), bell(8, 4, None), bell(size - 4, 4, Some(1))]
}

/// The memory that is mapped now. The lock is free again before a test can fail.
fn mapped(host: &FakeHypervisor) -> Vec<Range<u64>> {
    host.mapped.lock().unwrap().clone()
}

/// A device whose BARs read as its number. Its first BAR has memory if the host can map it.
struct Numbered {
    number: u8,
    first: Arc<Window>,
}

impl Device for Numbered {
    fn read(&mut self, region: Region, _: u64, data: &mut [u8]) -> Access {
        if region == self.first.region {
            self.first.map_backing();
        }
        data.fill(self.number);
        Access::Done
    }
    fn write(&mut self, _: Region, _: u64, _: &[u8]) -> Access {
        Access::Done
    }
    fn park(&mut self) -> Saved {
        Saved::default()
    }
    fn run(&mut self, _: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

/// A BAR, as a guest that knows the rules sees it.
struct Placed {
    function: u8,
    bar: u8,
    size: u64,
    at: Option<u64>,
    /// When it moved last.
    moved: u32,
    bells: Vec<(Doorbell, Arc<EventFd>)>,
    window: Arc<Window>,
}

impl Placed {
    fn range(&self) -> Option<Range<u64>> {
        self.at.map(|at| at..at + self.size)
    }
}

struct Machine {
    bench: Bench,
    bars: Vec<Placed>,
    moves: u32,
}

impl Machine {
    fn new() -> Self {
        let mut bench = Bench::new(4096);
        let bars = Mutex::new(Vec::new());
        for (function, (one, two)) in (1..).zip(SIZES) {
            let id =
                Id { vendor: 1, device: 2, class: 0x00ff_0000, revision: 3, subsystem: (4, 5) };
            let identity = Identity {
                at: Some(Address::new(function, 0)),
                bars: vec![(0, Bar::Prefetchable32(one.into())), (2, Bar::Memory64(two))],
                ..Identity::new(id)
            };
            let host = bench.hypervisor.clone();
            let add = bench.board.add("numbered", |grants| {
                let slot = grants.pci(identity)?;
                for (bar, size) in BARS.into_iter().zip([u64::from(one), two]) {
                    let window = slot.bar(bar).clone();
                    let connect = |bell: Doorbell| {
                        let event = window.doorbell(bell.address, bell.length, bell.value);
                        (bell, event.unwrap())
                    };
                    let bells = bells(size).map(connect).into();
                    let (at, moved) = (None, 0);
                    let new = Placed { function, bar, size, at, moved, bells, window };
                    bars.lock().unwrap().push(new);
                }
                let first = slot.bar(0).clone();
                first.set_backing(host.backing(one.into(), GuestAccess::ReadWrite)?);
                Ok(slot.wrap(Box::new(Numbered { number: function, first })))
            });
            add.unwrap();
        }
        bench.board.run(Vec::new()).unwrap();
        Self { bench, bars: bars.into_inner().unwrap(), moves: 0 }
    }

    fn config(&self, function: u8, register: u64) -> u32 {
        let at = (u64::from(function) << 15) + register;
        u32::from_le_bytes(self.bench.read(Kind::Config, at))
    }

    /// Writes a register, and updates the places as the PCI specification says.
    fn set(&mut self, function: u8, register: u64, value: u32) {
        let at = (u64::from(function) << 15) + register;
        self.bench.write(Kind::Config, at, &value.to_le_bytes());
        let decodes = self.config(function, COMMAND) & 2 != 0;
        let read = |bar: u8| {
            let register = 0x10 + 4 * u64::from(bar);
            let low = u64::from(self.config(function, register)) & !0xf;
            if bar == 0 { low } else { low | u64::from(self.config(function, register + 4)) << 32 }
        };
        let addresses = BARS.map(read);
        for it in self.bars.iter_mut().filter(|it| it.function == function) {
            let address = addresses[usize::from(it.bar / 2)];
            let whole = address.checked_add(it.size).is_some();
            let at = Some(address).filter(|it| decodes && *it != 0 && whole);
            if it.at != at {
                self.moves += 1;
                (it.at, it.moved) = (at, self.moves);
            }
        }
    }

    fn place(&mut self, function: u8, bar: u8, at: u64) {
        let [low, high] = [at & 0xffff_ffff, at >> 32].map(|half| u32::try_from(half).unwrap());
        self.set(function, 0x10 + 4 * u64::from(bar), low);
        if bar != 0 {
            self.set(function, 0x14 + 4 * u64::from(bar), high);
        }
    }

    /// The BAR that an access reaches: the smallest, or the one that moved last.
    fn winner(&self, address: u64) -> Option<&Placed> {
        let holds = |it: &&Placed| it.at.is_some_and(|at| (at..at + it.size).contains(&address));
        let by_size = |it: &&Placed| (it.size, u32::MAX - it.moved);
        self.bars.iter().filter(holds).min_by_key(by_size)
    }

    /// Every access and every doorbell reaches the same device, and no doorbell is slow or left.
    fn check(&self, context: &str) {
        let host = &self.bench.hypervisor;
        let all = || self.bars.iter().flat_map(|it| &it.bells);
        let mut connected = 0;
        for it in self.bars.iter() {
            assert_eq!(it.window.at(), it.at, "{context}: {}.{}", it.function, it.bar);
            let Some(at) = it.at else { continue };
            for (bell, event) in &it.bells {
                let write = bell.moved(at);
                let winner = self.winner(write.address).expect("it holds the address");
                let read = self.bench.read::<1>(Kind::Memory, write.address);
                assert_eq!(read, [winner.function], "{context}: {write:x?}");
                let wins = (winner.function, winner.bar) == (it.function, it.bar);
                connected += usize::from(wins);
                host.ring(write);
                assert_eq!(event.read().is_ok(), wins, "{context}: {write:x?}");
                let others = all().filter(|(_, other)| other.read().is_ok());
                let allowed = usize::from(!wins);
                assert!(others.count() <= allowed, "{context}: {write:x?} rings several");
            }
        }
        assert_eq!(host.bells().len(), connected, "{context}: {:x?}", host.bells());
        self.check_memory(context);
    }

    /// Memory is mapped where no part of it is hidden, and only there.
    fn check_memory(&self, context: &str) {
        let is_whole = |it: &&Placed| {
            let wins = |address| self.winner(address).is_some_and(|other| ptr::eq(other, *it));
            it.bar == 0 && it.range().is_some_and(|range| range.step_by(0x1000).all(wins))
        };
        // `check` has just read from each BAR that it can reach.
        let whole = self.bars.iter().filter(is_whole).filter_map(Placed::range);
        let mut mapped = mapped(&self.bench.hypervisor);
        mapped.sort_by_key(|range| range.start);
        let mut whole: Vec<_> = whole.collect();
        whole.sort_by_key(|range| range.start);
        assert_eq!(mapped, whole, "{context}");
    }

    /// One step of a guest: decoding on or off, a half of an address, all ones for the size.
    fn step(&mut self, noise: &mut Noise) {
        let function = 1 + u8::try_from(noise.below(SIZES.len() as u64)).unwrap();
        let places = (ARENA.end - ARENA.start) / 0x1000;
        let low = u32::try_from(ARENA.start + 0x1000 * noise.below(places)).unwrap();
        match noise.below(12) {
            0 => self.set(function, COMMAND, 0),
            1..4 => self.set(function, COMMAND, 7),
            4..7 => self.set(function, 0x10, low),
            7..10 => self.set(function, 0x18, low),
            10 => self.set(function, 0x1c, noise.choose(&HIGH)),
            _ => {
                // The size of a BAR, while it decodes.
                let register = noise.choose(&[0x10, 0x18, 0x1c]);
                let old = self.config(function, register);
                self.set(function, register, ONES);
                self.check("all ones");
                self.set(function, register, old);
            }
        }
    }
}

#[test]
fn after_any_moves_doorbells_and_memory_are_where_accesses_go() {
    for seed in 0..40 {
        let (mut machine, mut noise) = (Machine::new(), Noise::new(seed));
        for step in 0..200 {
            machine.step(&mut noise);
            machine.check(&format!("seed {seed}, step {step}"));
        }
        // At last, each BAR has a place of its own.
        for (index, (one, two)) in (0..).zip(SIZES) {
            let function = 1 + u8::try_from(index).unwrap();
            machine.place(function, 0, 0xd000_0000 + 0x10_0000 * index + u64::from(one));
            machine.place(function, 2, 0x90_0000_0000 + 0x10_0000 * index + two);
            machine.set(function, COMMAND, 7);
        }
        machine.check(&format!("seed {seed}, at the end"));
        assert_eq!(machine.bench.hypervisor.bells().len(), 6 * SIZES.len(), "seed {seed}");
        assert_eq!(mapped(&machine.bench.hypervisor).len(), SIZES.len());
        let Machine { bench, bars, .. } = machine;
        let host = &bench.hypervisor.clone();
        drop((bars, bench));
        assert_eq!((host.bells().len(), mapped(host).len()), (0, 0));
    }
}

/// Cloud Hypervisor's issue 8572: two functions exchange their addresses.
#[test]
fn two_functions_exchange_their_addresses_through_an_overlap() {
    for decode in [true, false] {
        let mut machine = Machine::new();
        let [one, two] = [ARENA.start, ARENA.start + 0x4000];
        for (function, at) in [(1, one), (2, two)] {
            machine.place(function, 2, at);
            machine.set(function, COMMAND, 7);
        }
        machine.check("before");
        for function in [1, 2] {
            machine.set(function, COMMAND, if decode { 7 } else { 0 });
        }
        machine.place(1, 2, two);
        machine.check("both at one address");
        machine.place(2, 2, one);
        for function in [2, 1] {
            machine.set(function, COMMAND, 7);
        }
        machine.check("after");
        assert_eq!(machine.bench.hypervisor.bells().len(), 6);
    }
}

#[test]
fn processors_move_windows_at_the_same_time() {
    let machine = Machine::new();
    let spaces = machine.bench.board.shared.spaces.clone();
    let processor = |function: u64| {
        let spaces = spaces.clone();
        move || {
            let set = |register, value: u32| {
                spaces.config.write((function << 15) + register, &value.to_le_bytes());
            };
            set(COMMAND, 7);
            for round in 0..2000 {
                let low = u32::try_from(ARENA.start).unwrap() + 0x4000 * (round % 3);
                set(0x10, low);
                set(0x18, low);
                // Reading maps the memory.
                spaces.memory.read(low.into(), &mut [0]);
            }
            set(COMMAND, 0);
        }
    };
    let processors = [1, 2, 3, 4].map(|function| std::thread::spawn(processor(function)));
    processors.into_iter().for_each(|it| it.join().unwrap());
    let host = &machine.bench.hypervisor;
    assert_eq!((host.bells().len(), mapped(host).len()), (0, 0));
}

#[test]
fn addresses_at_the_end_of_the_space_are_harmless() {
    let mut machine = Machine::new();
    machine.set(1, COMMAND, 7);
    for at in [1 << 52, u64::MAX << 14, (u64::MAX << 14) - 0x4000, u64::MAX << 12] {
        machine.place(1, 2, at);
        machine.check("at the end");
    }
    assert_eq!(machine.bars[1].at, None, "beyond 2^64");
    machine.place(1, 2, ARENA.start);
    machine.check("back");
    assert_eq!(machine.bench.hypervisor.bells().len(), 3);
}

#[test]
fn a_doorbell_that_the_host_refused_is_tried_again_with_the_next_move() {
    let mut machine = Machine::new();
    let host = machine.bench.hypervisor.clone();
    let bell = bells(0x4000)[1].moved(ARENA.start);
    let event = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
    Hypervisor::connect_doorbell(&host, bell, &event).unwrap();
    machine.place(1, 2, ARENA.start);
    machine.set(1, COMMAND, 7);
    assert_eq!(host.bells().len(), 3, "two of its own");
    machine.place(1, 2, ARENA.start + 0x4000);
    assert_eq!(host.bells().len(), 4);
    assert!(host.ring(bell) && event.read().is_ok(), "the other one is still there");
    machine.place(1, 2, ARENA.start);
    Hypervisor::disconnect_doorbell(&host, bell, &event);
    // A neighbour comes and goes.
    machine.place(2, 2, ARENA.start);
    machine.set(2, COMMAND, 7);
    machine.set(2, COMMAND, 0);
    machine.check("at last");
}

/// A device withdraws a doorbell, as NVMe's queues do, at an offset where another one has its own.
#[test]
fn a_doorbell_is_disconnected_alone_and_does_not_come_back() {
    let mut machine = Machine::new();
    let host = machine.bench.hypervisor.clone();
    for (function, at) in [(1, ARENA.start), (2, ARENA.start + 0x4000)] {
        machine.place(function, 2, at);
        machine.set(function, COMMAND, 7);
    }
    let [one, two] = [1, 2].map(|function| {
        let is_it = |it: &&Placed| (it.function, it.bar) == (function, 2);
        machine.bars.iter().find(is_it).expect("all functions have it").window.clone()
    });
    let rings = |at: u64| host.ring(bells(0x4000)[1].moved(at));
    one.disconnect_doorbell(8);
    assert!(!rings(ARENA.start) && rings(ARENA.start + 0x4000));
    machine.place(1, 2, ARENA.start + 0x8000);
    assert!(!rings(ARENA.start + 0x8000) && rings(ARENA.start + 0x4000));
    assert_eq!(host.bells().len(), 5);
    // While the other window hides it.
    machine.place(2, 2, ARENA.start + 0x8000);
    one.disconnect_doorbell(0);
    assert_eq!(host.bells().len(), 3, "those of the window that hides it");
    machine.place(2, 2, ARENA.start);
    assert_eq!((one.at(), two.at()), (Some(ARENA.start + 0x8000), Some(ARENA.start)));
    assert_eq!(host.bells().len(), 4, "one is left to the first");
}
