//! The policy for model-specific registers (MSRs) that KVM does not know.
//!
//! Windows reads many registers of real chip sets, some of them without an exception handler. The
//! usual workaround is `kvm.ignore_msrs=1` for the whole host; this policy applies to one machine.

use std::collections::BTreeSet;
use std::sync::Mutex;

use serde::{Deserialize, Serialize};

use crate::hyperv::Own;

/// The registers that KVM leaves to this process.
pub struct Registers {
    pub policy: Policy,
    /// `None` if KVM provides Hyper-V's registers, or nobody does.
    pub hyperv: Option<Own>,
}

/// How accesses to MSRs that are on no list are answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum UnknownMsr {
    /// `Ignore` for a guest that is offered Hyper-V, since Windows reads registers without an
    /// exception handler; `Fault` for any other.
    #[default]
    Auto,
    /// A general-protection fault, as on a processor without the register.
    Fault,
    /// Reads return zero; writes are ignored.
    Ignore,
}

/// MSRs that read as zero and ignore writes: power, thermal and performance registers, which
/// Windows and its drivers access and which have no meaning in a virtual machine.
const BENIGN: &[std::ops::RangeInclusive<u32>] = &[
    0x34..=0x34,               // SMI_COUNT
    0x4e..=0x4f,               // PPIN_CTL, PPIN: the processor's serial number
    0x88..=0x8a,               // BBL_CR_D0..: read by Windows' HAL
    0xe7..=0xe8,               // MPERF, APERF
    0x116..=0x11e,             // BBL_CR_*
    0x198..=0x19c,             // PERF_STATUS, CLOCK_MODULATION, THERM_*
    0x1a2..=0x1a2,             // TEMPERATURE_TARGET
    0x1ad..=0x1ae,             // TURBO_RATIO_LIMIT
    0x1b0..=0x1b2,             // ENERGY_PERF_BIAS, PACKAGE_THERM_*
    0x601..=0x64f,             // RAPL, core and package residency, PPERF
    0x770..=0x777,             // HWP
    0xc001_0015..=0xc001_0015, // HWCR
    0xc001_0061..=0xc001_0071, // P-states
    0xc001_0114..=0xc001_0114, // VM_CR
    0xc001_0299..=0xc001_029b, // RAPL
    0xc001_1020..=0xc001_102d, // LS_CFG .. DE_CFG
];

/// The policy of one machine, and the MSRs that were already logged.
pub struct Policy {
    faults: bool,
    /// Each MSR is logged once, so that a guest cannot flood the log.
    logged: Mutex<BTreeSet<u32>>,
}

/// Maximum number of MSRs in the log. No honest guest accesses more.
const MAX_LOGGED: usize = 256;

impl Policy {
    /// `hyperv`: the guest is offered Hyper-V.
    pub fn new(unknown: UnknownMsr, hyperv: bool) -> Self {
        let faults = match unknown {
            UnknownMsr::Auto => !hyperv,
            UnknownMsr::Fault => true,
            UnknownMsr::Ignore => false,
        };
        Self { faults, logged: Mutex::default() }
    }

    /// Returns `None` for a fault.
    pub fn read(&self, index: u32) -> Option<u64> {
        self.allows(index, "reads").then_some(0)
    }

    /// Whether a write is accepted; if not, it faults.
    pub fn write(&self, index: u32, value: u64) -> bool {
        self.allows(index, &format!("writes {value:#x} to"))
    }

    fn allows(&self, index: u32, verb: &str) -> bool {
        if BENIGN.iter().any(|range| range.contains(&index)) {
            return true;
        }
        let mut logged = self.logged.lock().expect("no thread panicked");
        if logged.len() < MAX_LOGGED && logged.insert(index) {
            let answer = if self.faults { "a fault (--msr ignore makes it zero)" } else { "zero" };
            tracing::info!("the guest {verb} unknown MSR {index:#x}: it gets {answer}");
        }
        !self.faults
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn listed_registers_are_zero_and_others_follow_the_policy() {
        let strict = Policy::new(UnknownMsr::Fault, true);
        assert_eq!((strict.read(0x611), strict.write(0x1b0, 6)), (Some(0), true));
        assert_eq!((strict.read(0xdead), strict.write(0xdead, 1)), (None, false));
        assert_eq!((strict.read(0x4e), strict.read(0x4f)), (Some(0), Some(0)));
        let lax = Policy::new(UnknownMsr::Ignore, false);
        assert_eq!((lax.read(0xdead), lax.write(0xdead, 1)), (Some(0), true));
    }

    #[test]
    fn unknown_registers_read_as_zero_with_hyperv() {
        assert_eq!(Policy::new(UnknownMsr::Auto, true).read(0xdead), Some(0));
        assert_eq!(Policy::new(UnknownMsr::Auto, false).read(0xdead), None);
    }

    #[test]
    fn probing_all_registers_costs_bounded_memory() {
        let policy = Policy::new(UnknownMsr::Fault, false);
        (0..100_000).for_each(|index| {
            policy.read(index);
        });
        assert!(policy.logged.lock().unwrap().len() <= MAX_LOGGED);
    }
}
