//! The other processors, which wait in ring 0 for the commands of this one (trampoline.rs).
use crate::cpu::Cpu;
use crate::entry::WAKE_VECTOR;
use crate::io::{read_memory, write_memory, write32};
use crate::timer::LOCAL_APIC;
use crate::trampoline::{slots, started_counter};

const SLOT: u64 = 1024;
const COMMAND: u64 = 0;
const APIC_ID: u64 = 4;
const ARGUMENT: u64 = 8;
const VALUE: u64 = 16;
const INTERRUPTS: u64 = 24;
const CARRY: u64 = 32;

const READ_MSR: u64 = 1;
const WRITE_MSR: u64 = 2;
const LOAD: u64 = 3;

const ICR_HIGH: u64 = LOCAL_APIC + 0x310;
const ICR_LOW: u64 = LOCAL_APIC + 0x300;
const TIMEOUT_MS: u64 = 5000;

/// Must run before the processors start.
pub(crate) fn clear() {
    let (first, count) = slots();
    for slot in 0..count {
        for field in [COMMAND, ARGUMENT, VALUE, INTERRUPTS, CARRY] {
            write_memory(first + slot * SLOT + field, 8, 0);
        }
    }
}

#[derive(Clone, Copy)]
pub(crate) struct Peer(u64);

impl Peer {
    /// All other processors that run, as far as there are slots for them.
    pub(crate) fn all() -> impl Iterator<Item = Self> + Clone {
        let (first, count) = slots();
        let started = read_memory(started_counter() as u64, 4);
        (0..started.min(count)).map(move |slot| Self(first + slot * SLOT))
    }

    pub(crate) fn read_msr(self, cpu: &Cpu, index: u32) -> Option<u64> {
        self.ask(cpu, READ_MSR, index.into(), 0)
    }

    pub(crate) fn write_msr(self, cpu: &Cpu, index: u32, value: u64) -> bool {
        self.ask(cpu, WRITE_MSR, index.into(), value).is_some()
    }

    /// Reads 8 bytes of memory as this processor sees it.
    pub(crate) fn load(self, cpu: &Cpu, address: u64) -> Option<u64> {
        self.ask(cpu, LOAD, address, 0)
    }

    /// The number of interrupts at `PEER_VECTOR`.
    pub(crate) fn interrupts(self) -> u64 {
        read_memory(self.0 + INTERRUPTS, 4)
    }

    /// `None`: a fault, or no answer.
    fn ask(self, cpu: &Cpu, command: u64, argument: u64, value: u64) -> Option<u64> {
        write_memory(self.0 + ARGUMENT, 8, argument);
        write_memory(self.0 + VALUE, 8, value);
        write_memory(self.0 + CARRY, 8, 0);
        write_memory(self.0 + COMMAND, 4, command);
        write32(ICR_HIGH, (read_memory(self.0 + APIC_ID, 4) as u32) << 24);
        write32(ICR_LOW, 0x4000 | u32::from(WAKE_VECTOR));
        cpu.wait(TIMEOUT_MS, || read_memory(self.0 + COMMAND, 4) == 0)?;
        let carry = read_memory(self.0 + CARRY, 1) != 0;
        (!carry).then(|| read_memory(self.0 + VALUE, 8))
    }
}
