//! System-management mode (SMM): which processors see which RAM, and system-management interrupts
//! (SMIs).
//!
//! KVM has two address spaces. A processor in SMM uses the second, which also has the RAM that the
//! chip set hides. That RAM is in slots of its own, because a slot cannot be divided while
//! processors run.

use std::cell::Cell;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use anyhow::{Context, ensure};
use devices::hypervisor;
use host::smram::{self, Smram};
use kvm_bindings::kvm_msi;
use kvm_ioctls::{Cap, Kvm, VmFd};
use vm_memory::{GuestMemoryBackend as _, GuestMemoryMmap};

use super::fd::{self, Slot};

/// Address space of a slot, bits 31:16 of its number.
pub(super) const NORMAL: u32 = 0;
pub(super) const IN_SMM: u32 = 1;

/// The number of the same slot in another address space.
pub(super) fn slot_in(space: u32, number: u32) -> u32 {
    space << 16 | number & 0xffff
}

/// The error names what the host lacks.
pub fn check(kvm: &Kvm) -> anyhow::Result<()> {
    let spaces = kvm.check_extension_raw(kvm_bindings::KVM_CAP_MULTI_ADDRESS_SPACE.into());
    ensure!(
        kvm.check_extension(Cap::X86Smm) && spaces > 1,
        "this host's KVM has no system-management mode (X86_SMM, MULTI_ADDRESS_SPACE): use a host \
         whose kernel has CONFIG_KVM_SMM and hardware virtualization, or firmware that does not \
         need SMM"
    );
    Ok(())
}

/// An SMI as a message to a local interrupt controller: physical destination, delivery mode 010b
/// (Intel SDM 3A, 11.11).
const MESSAGE_ADDRESS: u32 = 0xfee0_0000;
const DELIVERY_SMI: u32 = 2 << 8;

thread_local! {
    /// The APIC ID of the processor that this thread runs.
    static PROCESSOR: Cell<Option<u32>> = const { Cell::new(None) };
}

/// Makes this thread that of a processor: the SMIs that its accesses cause are for this processor.
pub(super) fn set_processor(apic_id: u32) {
    PROCESSOR.set(Some(apic_id));
}

pub(super) struct Smm {
    vm: Arc<VmFd>,
    ram: Arc<GuestMemoryMmap>,
    apic_ids: Vec<u32>,
    slots: Mutex<Vec<RamSlot>>,
}

/// A region of RAM in one of the address spaces.
struct RamSlot {
    slot: Slot,
    /// The index of the region.
    region: usize,
    mapped: bool,
}

impl Smm {
    /// The regions of `ram` must be those of [`smram::parts`]. Their slots are numbered from 0 in
    /// both address spaces.
    pub(super) fn new(
        vm: Arc<VmFd>,
        ram: Arc<GuestMemoryMmap>,
        apic_ids: Vec<u32>,
    ) -> anyhow::Result<Self> {
        let mut slots = Vec::new();
        for space in [NORMAL, IN_SMM] {
            for (index, region) in ram.iter().enumerate() {
                let number = slot_in(space, u32::try_from(index)?);
                let slot = Slot { number, flags: 0, guest: smram::range(region).start };
                slots.push(RamSlot { slot, region: index, mapped: false });
            }
        }
        let smm = Self { vm, ram, apic_ids, slots: Mutex::new(slots) };
        smm.map(Smram::default())?;
        Ok(smm)
    }

    /// Adds and removes slots so that they show the RAM that `smram` does not hide.
    fn map(&self, smram: Smram) -> anyhow::Result<()> {
        let low_ram = smram::low_ram(&self.ram);
        let mut slots = self.slots.lock().expect("no thread panicked");
        for it in slots.iter_mut() {
            let region = self.ram.iter().nth(it.region).context("a region of memory")?;
            let in_smm = it.slot.number >> 16 == IN_SMM;
            let wanted = smram.shows(&smram::range(region), low_ram, in_smm);
            if wanted != it.mapped {
                let mapping = region.get_mmap();
                fd::set_slot(&self.vm, it.slot, wanted.then_some(&*mapping))?;
                it.mapped = wanted;
            }
        }
        Ok(())
    }

    /// The parts of `range` that are RAM outside of system-management mode.
    pub(super) fn visible(&self, range: &Range<u64>) -> Vec<Range<u64>> {
        let slots = self.slots.lock().expect("no thread panicked");
        let seen = slots.iter().filter(|it| it.mapped && it.slot.number >> 16 == NORMAL);
        let regions = seen.filter_map(|it| self.ram.iter().nth(it.region)).map(smram::range);
        let parts = regions.map(|it| it.start.max(range.start)..it.end.min(range.end));
        parts.filter(|part| !part.is_empty()).collect()
    }
}

impl hypervisor::Smm for Smm {
    fn set_smram(&self, smram: Smram) -> anyhow::Result<()> {
        self.map(smram)
    }

    fn interrupt(&self, everybody: bool) {
        let own = PROCESSOR.get();
        for apic_id in self.apic_ids.iter().filter(|id| everybody || own == Some(**id)) {
            // The processor of this thread takes it before its next instruction, because it is not
            // in the guest now.
            let message = kvm_msi {
                address_lo: MESSAGE_ADDRESS | (apic_id & 0xff) << 12,
                address_hi: apic_id & !0xff,
                data: DELIVERY_SMI,
                ..Default::default()
            };
            if let Err(error) = self.vm.signal_msi(message) {
                tracing::debug!("an SMI for the processor with APIC ID {apic_id}: {error}");
            }
        }
    }
}
