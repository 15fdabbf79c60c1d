//! The educational device 1234:11e8 of `vmm`: checks its factorial, DMA in both directions and its
//! doorbell, each completed by a message-signaled interrupt. QEMU's device has no MSI-X and is not
//! tested.
use crate::Session;
use crate::config::Function;
use crate::cpu::Cpu;
use crate::entry::device_interrupts;
use crate::gate::{halt_once, set_interrupts};
use crate::io::{read_memory, read32, tsc, write_memory, write32};
use crate::msix;
use crate::paging::map_device;
use crate::random::Random;
use crate::report::Finding;
use crate::timer;

const ID: u32 = 0x11e8_1234;
const VERSION: u32 = 0x0100_00ed;
/// The size of the BAR, which has the registers and the device's buffer.
const BAR_SIZE: u64 = 1 << 20;
/// COMMAND of PCI: memory, bus master.
const ON: u32 = 6;

const LIVENESS: u64 = 0x04;
const FACTORIAL: u64 = 0x08;
const STATUS: u64 = 0x20;
const TELL_FACTORIAL: u32 = 1 << 7;
const INTERRUPT_STATUS: u64 = 0x24;
const ACKNOWLEDGE: u64 = 0x64;
const SOURCE: u64 = 0x80;
const DESTINATION: u64 = 0x88;
const COUNT: u64 = 0x90;
const COMMAND: u64 = 0x98;
const DOORBELL: u64 = 0x9c;
/// COMMAND of the DMA.
const START: u32 = 1;
const TO_MEMORY: u32 = 2;
const TELL: u32 = 4;
/// The address of the device's buffer, for DMA.
const BUFFER: u64 = 0x4_0000;

const BYTES: u64 = 1024;
const ROUNDS: usize = 64;
const TIMEOUT_MS: u64 = 2000;
/// Ends a halt that no interrupt of the device ends.
const TICK_US: u64 = 100_000;

/// The buffers for sending and for receiving.
static mut MEMORY: [[u64; BYTES as usize / 8]; 2] = [[0; BYTES as usize / 8]; 2];

struct Edu<'a> {
    bar: u64,
    cpu: &'a Cpu,
    interrupts: u32,
    /// Whether the processor halts until an interrupt, or else polls.
    halts: bool,
}

pub(crate) fn check(session: &mut Session, cpu: &Cpu) {
    let Some(function) = Function::find(ID) else { return };
    let Some(bar) = set_up(function, cpu) else {
        session.add(Finding::info("edu").flag("msix", false));
        return;
    };
    let mut edu = Edu { bar, cpu, interrupts: 0, halts: false };
    set_interrupts(true);
    let alive = edu.is_alive();
    let factorial = edu.factorial();
    let dma = edu.round_trip();
    let mut times = [0; ROUNDS];
    let doorbell = times.iter_mut().all(|time| edu.ring().map(|took| *time = took).is_some());
    set_interrupts(false);
    times.sort_unstable();
    let mut wakes = [0; ROUNDS];
    let woken = !session.interruptible || edu.wake(&mut wakes);
    session.add(
        Finding::check("edu", alive && factorial && dma && doorbell && woken)
            .flag("alive", alive)
            .flag("factorial", factorial)
            .flag("dma", dma)
            .flag("doorbell", doorbell)
            .flag("woken", woken)
            .number("interrupts", edu.interrupts.into())
            .number("min_ns", cpu.nanoseconds(times[0]))
            .number("median_ns", cpu.nanoseconds(times[ROUNDS / 2]))
            .number("wake_min_ns", cpu.nanoseconds(wakes[0]))
            .number("wake_median_ns", cpu.nanoseconds(wakes[ROUNDS / 2])),
    );
}

/// Enables the function and its interrupt vector. Returns the address of its registers.
fn set_up(function: Function, cpu: &Cpu) -> Option<u64> {
    function.write_command(ON);
    let bar = map_device(function.memory(0)?, BAR_SIZE, cpu)?;
    msix::switch_on(function, cpu).then_some(bar)
}

impl Edu<'_> {
    fn read(&self, register: u64) -> u32 {
        read32(self.bar + register)
    }

    fn write(&self, register: u64, value: u32) {
        write32(self.bar + register, value);
    }

    fn is_alive(&self) -> bool {
        self.write(LIVENESS, 0x1234_5678);
        self.read(0) == VERSION && self.read(LIVENESS) == !0x1234_5678
    }

    /// Runs `action` and waits for the interrupt. Returns the time stamp counts until it arrived.
    fn wait(&mut self, action: impl FnOnce(&Self)) -> Option<u64> {
        let before = device_interrupts();
        let start = tsc();
        action(self);
        while device_interrupts() == before {
            if self.cpu.nanoseconds(tsc() - start) > TIMEOUT_MS * 1_000_000 {
                return None;
            }
            if self.halts {
                halt_once();
            } else {
                core::hint::spin_loop();
            }
        }
        let took = tsc() - start;
        self.interrupts += device_interrupts() - before;
        let status = self.read(INTERRUPT_STATUS);
        self.write(ACKNOWLEDGE, status);
        (status != 0 && self.read(INTERRUPT_STATUS) == 0).then_some(took)
    }

    /// Measures doorbells whose interrupt ends a halt. Interrupts are disabled in ring 3, so one
    /// that arrives before the halt ends it at once.
    fn wake(&mut self, times: &mut [u64]) -> bool {
        self.halts = true;
        timer::tick(self.cpu, TICK_US);
        let woken = times.iter_mut().all(|time| self.ring().map(|took| *time = took).is_some());
        timer::stop();
        times.sort_unstable();
        woken
    }

    fn factorial(&mut self) -> bool {
        self.write(STATUS, TELL_FACTORIAL);
        let interrupted = self.wait(|edu| edu.write(FACTORIAL, 10)).is_some();
        interrupted && self.read(FACTORIAL) == 3_628_800
    }

    fn program(&self, source: u64, destination: u64, command: u32) {
        write_memory(self.bar + SOURCE, 8, source);
        write_memory(self.bar + DESTINATION, 8, destination);
        write_memory(self.bar + COUNT, 8, BYTES);
        self.write(COMMAND, command);
    }

    /// Copies random bytes into the device, and back to another buffer.
    fn round_trip(&mut self) -> bool {
        let [out, back] = buffers();
        let mut random = Random::new(11);
        for at in (0..BYTES).step_by(8) {
            write_memory(out + at, 8, random.next());
            write_memory(back + at, 8, 0);
        }
        let sent = self.wait(|edu| edu.program(out, BUFFER, START | TELL)).is_some();
        let got = self.wait(|edu| edu.program(BUFFER, back, START | TO_MEMORY | TELL)).is_some();
        sent && got && is_copied()
    }

    /// Copies back again. The transfer is programmed first, and then started by the doorbell.
    fn ring(&mut self) -> Option<u64> {
        let [_, back] = buffers();
        (0..BYTES).step_by(8).for_each(|at| write_memory(back + at, 8, 0));
        self.program(BUFFER, back, TO_MEMORY | TELL);
        let took = self.wait(|edu| edu.write(DOORBELL, 1))?;
        is_copied().then_some(took)
    }
}

fn buffers() -> [u64; 2] {
    let first = &raw const MEMORY as u64;
    [first, first + BYTES]
}

fn is_copied() -> bool {
    let [out, back] = buffers();
    (0..BYTES).step_by(8).all(|at| read_memory(out + at, 8) == read_memory(back + at, 8))
}
