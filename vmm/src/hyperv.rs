//! The part of Hyper-V's interface that needs no help of KVM: identity, clocks, crash reports.
//!
//! For hosts whose KVM has no Hyper-V (`CONFIG_KVM_HYPERV`). Section numbers are those of the
//! Hypervisor Top-Level Functional Specification (TLFS). It has no hypercalls, no synthetic
//! interrupts and no synthetic timers: a guest uses those of a PC.

use std::sync::Mutex;

use host::memory::Memory;
use kvm_bindings::kvm_cpuid_entry2 as Leaf;
use serde::{Deserialize, Serialize};

/// The provider of Hyper-V's interface to a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Provider {
    Kvm,
    /// This module.
    Own,
}

/// The range of Hyper-V's registers.
pub const FIRST_MSR: u32 = 0x4000_0000;
pub const MSRS: u32 = 0x200;

/// Whether this is one of Hyper-V's registers.
pub fn is_register(index: u32) -> bool {
    (FIRST_MSR..FIRST_MSR + MSRS).contains(&index)
}

/// Leaf 0x40000004, EBX: the guest must not report that it waits long for a lock.
pub const NEVER_NOTIFY: u32 = u32::MAX;

const GUEST_OS_ID: u32 = 0x4000_0000;
const HYPERCALL: u32 = 0x4000_0001;
const VP_INDEX: u32 = 0x4000_0002;
const TIME_REF_COUNT: u32 = 0x4000_0020;
const REFERENCE_TSC: u32 = 0x4000_0021;
const TSC_FREQUENCY: u32 = 0x4000_0022;
const APIC_FREQUENCY: u32 = 0x4000_0023;
const CRASH_FIRST: u32 = 0x4000_0100;
const CRASH_LAST: u32 = 0x4000_0104;
const CRASH_CTL: u32 = 0x4000_0105;

/// Registers of a page: enabled; locked until a reset (hypercalls only); the page's address.
const ENABLED: u64 = 1;
const LOCKED: u64 = 2;
const PAGE: u64 = !0xfff;
/// CRASH_CTL: the guest reports a crash.
const CRASH_NOTIFY: u64 = 1 << 63;

/// The counts of the reference time per second: 100 ns each.
const REFERENCE_HZ: u64 = 10_000_000;
/// The bus frequency of KVM's local APIC.
const APIC_HZ: u64 = 1_000_000_000;

/// The code of the hypercall page, for 32 and 64 bits. KVM would handle VMCALL itself, so the page
/// returns without it: `xor edx, edx; mov eax, HV_STATUS_INVALID_HYPERCALL_CODE; ret`.
const HYPERCALL_CODE: [u8; 8] = [0x31, 0xd2, 0xb8, 0x02, 0, 0, 0, 0xc3];

/// The CPUID leaves 0x40000000 to 0x40000005 (TLFS 2.4) of a machine with `count` processors.
pub fn leaves(count: u32) -> Vec<Leaf> {
    let leaf = |number: u32, [eax, ebx, ecx, edx]: [u32; 4]| Leaf {
        function: 0x4000_0000 + number,
        eax,
        ebx,
        ecx,
        edx,
        ..Default::default()
    };
    // The reference counter, hypercalls, the VP index, the reference TSC, the frequencies. Windows
    // never uses the reference TSC without hypercalls and the VP index, so that both are announced.
    let privileges = 1 << 1 | 1 << 5 | 1 << 6 | 1 << 9 | 1 << 11;
    // The frequencies; crash reports.
    let features = 1 << 8 | 1 << 10;
    let relaxed_timing = 1 << 5;
    vec![
        leaf(0, [0x4000_0005, 0x7263_694d, 0x666f_736f, 0x7648_2074]),
        // "Hv#1".
        leaf(1, [0x3123_7648, 0, 0, 0]),
        leaf(2, [0; 4]),
        leaf(3, [privileges, 0, 0, features]),
        leaf(4, [relaxed_timing, NEVER_NOTIFY, 0, 0]),
        leaf(5, [count, 0, 0, 0]),
    ]
}

/// A reading of the guest's time stamp counter, and its rate.
#[derive(Clone, Copy, Debug)]
pub struct Tsc {
    pub hertz: u64,
    pub now: u64,
}

/// The result of writing a register.
#[derive(Debug, PartialEq, Eq)]
pub enum Written {
    Done,
    Fault,
    /// The guest reports a crash: the bug check code and four parameters.
    Crash([u64; 5]),
}

/// The registers of one machine.
pub struct Own {
    memory: Memory,
    /// Whether the TSC of all processors agree now.
    stable: Box<dyn Fn() -> bool + Send + Sync>,
    state: Mutex<State>,
}

/// The state of the registers. A reset keeps the time, and clears all that a guest can change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The rate of the TSC. With a snapshot from another host, that of the other host.
    hertz: u64,
    /// Reference time = (TSC * scale >> 64) + offset.
    scale: u64,
    offset: u64,
    guest_os_id: u64,
    hypercall: u64,
    reference_tsc: u64,
    crash: [u64; 5],
}

impl Own {
    /// The reference time begins now. `stable` tells whether the TSC of all processors agree.
    pub fn new(memory: Memory, tsc: Tsc, stable: Box<dyn Fn() -> bool + Send + Sync>) -> Self {
        let hertz = tsc.hertz.max(1);
        let scale = (u128::from(REFERENCE_HZ) << 64) / u128::from(hertz);
        let scale = u64::try_from(scale).unwrap_or(u64::MAX);
        let offset = scaled(tsc.now, scale).wrapping_neg();
        let state = State { hertz, scale, offset, ..State::default() }.into();
        Self { memory, stable, state }
    }

    /// Reads a register on this processor, whose TSC is `now`. `None`: a fault.
    pub fn read(&self, index: u32, processor: u64, now: impl FnOnce() -> u64) -> Option<u64> {
        let state = self.lock();
        Some(match index {
            GUEST_OS_ID => state.guest_os_id,
            HYPERCALL => state.hypercall,
            VP_INDEX => processor,
            TIME_REF_COUNT => scaled(now(), state.scale).wrapping_add(state.offset),
            REFERENCE_TSC => state.reference_tsc,
            TSC_FREQUENCY => state.hertz,
            APIC_FREQUENCY => APIC_HZ,
            CRASH_FIRST..=CRASH_LAST => state.crash[(index - CRASH_FIRST) as usize],
            CRASH_CTL => CRASH_NOTIFY,
            _ => return None,
        })
    }

    pub fn write(&self, index: u32, value: u64) -> Written {
        let mut state = self.lock();
        match index {
            GUEST_OS_ID => {
                state.guest_os_id = value;
                if value == 0 {
                    state.hypercall &= !ENABLED;
                }
            }
            HYPERCALL => return self.set_hypercall(&mut state, value),
            REFERENCE_TSC => {
                if value & ENABLED != 0 && !self.show_time(value & PAGE, &state) {
                    return Written::Fault;
                }
                state.reference_tsc = value & (PAGE | ENABLED);
            }
            CRASH_FIRST..=CRASH_LAST => state.crash[(index - CRASH_FIRST) as usize] = value,
            CRASH_CTL if value & CRASH_NOTIFY != 0 => return Written::Crash(state.crash),
            CRASH_CTL => {}
            _ => return Written::Fault,
        }
        Written::Done
    }

    /// TLFS 3.13: the page exists only for a guest that has named itself, and may be locked.
    fn set_hypercall(&self, state: &mut State, value: u64) -> Written {
        if state.hypercall & LOCKED != 0 {
            return Written::Fault;
        }
        if state.guest_os_id == 0 {
            return Written::Done;
        }
        let shown = || self.memory.write(value & PAGE, &HYPERCALL_CODE).is_ok();
        if value & ENABLED != 0 && !shown() {
            return Written::Fault;
        }
        state.hypercall = value & (PAGE | ENABLED | LOCKED);
        Written::Done
    }

    /// Writes the reference TSC page (TLFS 12.7). A guest may read it meanwhile, so its sequence,
    /// which makes it valid, is written last. With sequence 0, guests read the register instead.
    fn show_time(&self, page: u64, state: &State) -> bool {
        let sequence = u32::from((self.stable)());
        let parts: [(u64, &[u8]); 4] = [
            (0, &[0; 8]),
            (8, &state.scale.to_le_bytes()),
            (16, &state.offset.to_le_bytes()),
            (0, &sequence.to_le_bytes()),
        ];
        parts.iter().all(|(at, bytes)| self.memory.write(page + at, bytes).is_ok())
    }

    pub fn reset(&self) {
        let mut state = self.lock();
        let State { hertz, scale, offset, .. } = *state;
        *state = State { hertz, scale, offset, ..State::default() };
    }

    /// The state for a snapshot.
    pub fn state(&self) -> State {
        *self.lock()
    }

    /// Continues from the state of a snapshot. The processors must have their time stamp counters.
    /// The pages of the guest are still there, and the time in them is valid, because the counters
    /// continue, too.
    pub fn restore(&self, state: State) {
        *self.lock() = state;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no thread panicked")
    }
}

fn scaled(tsc: u64, scale: u64) -> u64 {
    // The upper half of the product, which fits.
    ((u128::from(tsc) * u128::from(scale)) >> 64) as u64
}

#[cfg(test)]
mod test {
    use std::sync::Arc;

    use host::ram::GuestMemoryMmap;
    use host::testutil::noise::Noise;
    use vm_memory::GuestAddress;

    use super::*;

    const RAM: u64 = 1 << 20;
    const GHZ: u64 = 1_000_000_000;

    fn own(stable: bool) -> (Own, Memory) {
        let size = usize::try_from(RAM).unwrap();
        let ram = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), size)]).unwrap();
        let memory = Memory::new(Arc::new(ram));
        let tsc = Tsc { hertz: 2 * GHZ, now: 40 };
        (Own::new(memory.clone(), tsc, Box::new(move || stable)), memory)
    }

    fn read(own: &Own, index: u32) -> Option<u64> {
        own.read(index, 3, || 40 + 2 * GHZ)
    }

    #[test]
    fn the_page_and_the_register_show_the_same_time() {
        let (own, memory) = own(true);
        assert_eq!(own.write(REFERENCE_TSC, 0x5001), Written::Done);
        let mut page = [0; 24];
        memory.read(0x5000, &mut page).unwrap();
        let field = |at: usize| u64::from_le_bytes(page[at..at + 8].try_into().unwrap());
        assert_eq!(field(0), 1);
        let time = scaled(40 + 2 * GHZ, field(8)).wrapping_add(field(16));
        assert_eq!(Some(time), read(&own, TIME_REF_COUNT));
        assert!(time.abs_diff(REFERENCE_HZ) <= 1, "{time} counts of a second");
        assert_eq!(read(&own, TSC_FREQUENCY), Some(2 * GHZ));
    }

    #[test]
    fn a_restored_clock_keeps_its_rate_on_another_host() {
        let (saved, _memory) = own(true);
        let time = read(&saved, TIME_REF_COUNT);
        let (_, memory) = own(true);
        let other = Own::new(memory, Tsc { hertz: 3 * GHZ, now: 7 }, Box::new(|| true));
        assert_ne!(read(&other, TIME_REF_COUNT), time);
        other.restore(saved.state());
        other.reset();
        let now = [TIME_REF_COUNT, TSC_FREQUENCY].map(|index| read(&other, index));
        assert_eq!(now, [time, Some(2 * GHZ)]);
    }

    #[test]
    fn an_unstable_clock_leaves_the_page_invalid() {
        let (own, memory) = own(false);
        memory.write(0x5000, &[0xff; 24]).unwrap();
        assert_eq!(own.write(REFERENCE_TSC, 0x5001), Written::Done);
        let mut sequence = [0xff; 4];
        memory.read(0x5000, &mut sequence).unwrap();
        assert_eq!(sequence, [0; 4]);
    }

    #[test]
    fn the_hypercall_page_needs_a_name_and_stays_locked() {
        let (own, memory) = own(true);
        assert_eq!(own.write(HYPERCALL, 0x3001), Written::Done);
        assert_eq!(read(&own, HYPERCALL), Some(0), "the guest has no name yet");
        own.write(GUEST_OS_ID, 1 << 48);
        assert_eq!(own.write(HYPERCALL, 0x3003), Written::Done);
        let mut code = [0; 8];
        memory.read(0x3000, &mut code).unwrap();
        assert_eq!((code, read(&own, HYPERCALL)), (HYPERCALL_CODE, Some(0x3003)));
        assert_eq!(own.write(HYPERCALL, 0x4001), Written::Fault, "it is locked");
        own.write(GUEST_OS_ID, 0);
        assert_eq!(read(&own, HYPERCALL), Some(0x3002), "nobody is there to call");
        own.reset();
        assert_eq!((read(&own, HYPERCALL), read(&own, GUEST_OS_ID)), (Some(0), Some(0)));
    }

    #[test]
    fn pages_outside_of_memory_and_unknown_registers_fault() {
        let (own, _memory) = own(true);
        own.write(GUEST_OS_ID, 1);
        for page in [RAM, PAGE, 1 << 40] {
            assert_eq!(own.write(HYPERCALL, page | ENABLED), Written::Fault, "{page:#x}");
            assert_eq!(own.write(REFERENCE_TSC, page | ENABLED), Written::Fault, "{page:#x}");
            assert_eq!(own.write(REFERENCE_TSC, page), Written::Done, "{page:#x}: not enabled");
        }
        assert_eq!(own.write(VP_INDEX, 0), Written::Fault);
        assert_eq!((read(&own, VP_INDEX), read(&own, 0x4000_0080)), (Some(3), None));
        assert!(!is_register(0x4000_0200) && !is_register(0x3fff_ffff) && is_register(0x4000_01ff));
    }

    #[test]
    fn a_crash_is_reported_with_its_parameters() {
        let (own, _memory) = own(true);
        for (index, value) in (CRASH_FIRST..=CRASH_LAST).zip(7..) {
            assert_eq!(own.write(index, value), Written::Done);
        }
        assert_eq!(read(&own, CRASH_CTL), Some(CRASH_NOTIFY));
        assert_eq!(own.write(CRASH_CTL, 0), Written::Done);
        assert_eq!(own.write(CRASH_CTL, CRASH_NOTIFY), Written::Crash([7, 8, 9, 10, 11]));
    }

    #[test]
    fn hostile_writes_change_nothing_that_a_reset_keeps() {
        for seed in 0..20 {
            let (mut noise, (own, _memory)) = (Noise::new(seed), own(seed % 2 == 0));
            let before = *own.lock();
            for _ in 0..5000 {
                let index = FIRST_MSR + u32::try_from(noise.below(u64::from(MSRS))).unwrap();
                let page = noise.below(2 * RAM) & PAGE;
                own.write(index, noise.choose(&[0, u64::MAX, page | 1, page | 3, 1 << 63]));
                read(&own, index);
            }
            own.reset();
            assert_eq!(*own.lock(), before);
        }
    }
}
