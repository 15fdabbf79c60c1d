//! System-management mode (SMM): which processors see which RAM, and system-management interrupts
//! (SMIs).
//!
//! KVM has two address spaces. A processor in SMM uses the second, which also has the RAM that the
//! chip set hides. That RAM is in slots of its own, because a slot cannot be divided while
//! processors run.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::ensure;
use devices::hypervisor;
use host::smram::{self, Smram};
use kvm_bindings::KVM_CAP_X86_MSR_FILTER;
use kvm_ioctls::{Cap, Kvm};

use super::fd::Runner;
use super::ram_slots::{IN_SMM, NORMAL, RamSlots};

/// The error names what the host lacks.
pub fn check(kvm: &Kvm) -> anyhow::Result<()> {
    let spaces = kvm.check_extension_raw(kvm_bindings::KVM_CAP_MULTI_ADDRESS_SPACE.into());
    let filter = kvm.check_extension_raw(KVM_CAP_X86_MSR_FILTER.into());
    ensure!(
        kvm.check_extension(Cap::X86Smm) && spaces > 1 && filter > 0,
        "this host's KVM has no system-management mode (X86_SMM, MULTI_ADDRESS_SPACE, \
         X86_MSR_FILTER): use a host whose kernel has CONFIG_KVM_SMM and hardware virtualization, \
         or firmware that does not need SMM"
    );
    Ok(())
}

/// Whether a kernel of this release filters the registers that a hypervisor in the guest lets VMX
/// load from lists in memory. Linux before 6.12 does not, so that its writes are not checked here.
pub fn filters_lists(release: &str) -> bool {
    let mut numbers = release.split(|it: char| !it.is_ascii_digit()).map(str::parse::<u32>);
    let mut next = || numbers.next().and_then(Result::ok).unwrap_or(0);
    (next(), next()) >= (6, 12)
}

/// IA32_APIC_BASE. Wherever its page is, it takes the accesses of processors in SMM, too: over the
/// flash, writes of the firmware would be lost.
const APIC_BASE: u32 = 0x1b;
const DEFAULT_APIC_PAGE: u64 = 0xfee0_0000;
/// Bits of IA32_APIC_BASE: x2APIC mode, and the controller is enabled.
const X2APIC: u64 = 1 << 10;
const ENABLED: u64 = 1 << 11;
/// HV_X64_MSR_SIMP: KVM writes messages to its page, to hidden RAM while the processor is in SMM.
const SIMP: u32 = 0x4000_0083;
/// The registers whose writes KVM leaves to this process, in a machine with SMM.
pub(super) const FILTERED: [u32; 2] = [APIC_BASE, SIMP];
const PAGE_MASK: u64 = 0xf_ffff_ffff_f000;

/// The input of a processor for SMIs. It is not a message to the processor's local controller,
/// which the guest's kernel can switch off.
#[derive(Default)]
struct Input {
    raised: AtomicBool,
    runner: Arc<Runner>,
}

pub(super) struct Smm {
    ram: Arc<RamSlots>,
    inputs: Vec<Input>,
}

impl Smm {
    /// The regions of `ram` must be those of [`smram::parts`], in both address spaces.
    pub(super) fn new(ram: Arc<RamSlots>, processors: usize) -> anyhow::Result<Self> {
        let inputs = (0..processors).map(|_| Input::default()).collect();
        let smm = Self { ram, inputs };
        smm.map(Smram::default())?;
        Ok(smm)
    }

    /// The thread of the processor with this index.
    pub(super) fn runner(&self, index: usize) -> Arc<Runner> {
        self.inputs[index].runner.clone()
    }

    /// Takes the SMI that was raised for the processor with this index. Returns whether there was
    /// one.
    pub(super) fn take_smi(&self, index: usize) -> bool {
        let raised = &self.inputs[index].raised;
        // Each exit of a processor comes here: no locked instruction without need.
        raised.load(Ordering::Relaxed) && raised.swap(false, Ordering::AcqRel)
    }

    /// Adds and removes slots so that they show the RAM that `smram` does not hide.
    fn map(&self, smram: Smram) -> anyhow::Result<()> {
        let low_ram = smram::low_ram(&self.ram.ram);
        self.ram.map(|part, space| smram.shows(part, low_ram, space == IN_SMM))
    }

    /// Whether a processor outside of SMM may write this value to one of the filtered registers,
    /// which has the value `old` now.
    pub(super) fn allows(&self, index: u32, old: u64, value: u64) -> bool {
        let page = value & PAGE_MASK;
        let all = page..page + 4096;
        match index {
            APIC_BASE => page == DEFAULT_APIC_PAGE && is_change_of_mode(old, value),
            SIMP => value & 1 == 0 || self.ram.shown(NORMAL, &all).first() == Some(&all),
            _ => false,
        }
    }
}

/// Whether a processor accepts this change of IA32_APIC_BASE (Intel SDM 3A, 11.12.5). KVM checks it
/// for guests only, and not for this process.
fn is_change_of_mode(old: u64, new: u64) -> bool {
    match (new & ENABLED != 0, new & X2APIC != 0) {
        (false, false) => true,
        (false, true) => false,
        (true, false) => old & X2APIC == 0,
        (true, true) => old & ENABLED != 0,
    }
}

impl hypervisor::Smm for Smm {
    fn set_smram(&self, smram: Smram) -> anyhow::Result<()> {
        self.map(smram)
    }

    fn interrupt(&self, everybody: bool) {
        for input in &self.inputs {
            let here = input.runner.is_here();
            if here || everybody {
                input.raised.store(true, Ordering::Release);
            }
            // This thread's processor is not in the guest now.
            if !here && everybody {
                input.runner.kick();
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn kernels_filter_the_lists_of_vmx_since_6_12() {
        let new = ["6.12.0", "6.12.118+deb13-cloud-amd64", "6.17-rc1", "7.0.0-1-amd64"];
        let old = ["6.1.0-40-amd64", "6.11.11", "5.14.0-503.el9", "4.18.0", "", "unknown"];
        assert_eq!(new.map(filters_lists), [true; 4]);
        assert_eq!(old.map(filters_lists), [false; 6]);
    }

    #[test]
    fn the_local_controller_changes_its_mode_like_a_processor() {
        let modes = [0, ENABLED, ENABLED | X2APIC, X2APIC];
        let allowed = modes.map(|old| modes.map(|new| is_change_of_mode(old, new)));
        assert_eq!(allowed[0], [true, true, false, false], "from disabled");
        assert_eq!(allowed[1], [true, true, true, false], "from xAPIC");
        assert_eq!(allowed[2], [true, false, true, false], "from x2APIC");
    }
}
