//! The memory slots that show guest RAM to its processors, and KVM's lists of the pages that they
//! write.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use host::ram::GuestMemoryMmap;
use host::smram;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use kvm_ioctls::VmFd;
use vm_memory::GuestMemoryBackend as _;
use vm_memory::bitmap::Bitmap as _;

use super::fd::{self, Slot};

pub(super) struct RamSlots {
    vm: Arc<VmFd>,
    /// Kept alive as long as KVM maps it.
    pub(super) ram: Arc<GuestMemoryMmap>,
    slots: Mutex<Vec<RamSlot>>,
}

/// A region of RAM in one of the address spaces.
struct RamSlot {
    slot: Slot,
    /// The index of the region.
    region: usize,
    space: u32,
    mapped: bool,
}

/// Address space of a slot, bits 31:16 of its number.
pub(super) const NORMAL: u32 = 0;
pub(super) const IN_SMM: u32 = 1;

/// The number of the same slot in another address space.
pub(super) fn slot_in(space: u32, number: u32) -> u32 {
    space << 16 | number & 0xffff
}

impl RamSlots {
    /// Nothing is mapped yet. Slots are numbered from 0 in each address space.
    pub(super) fn new(
        vm: Arc<VmFd>,
        ram: Arc<GuestMemoryMmap>,
        spaces: &[u32],
    ) -> anyhow::Result<Self> {
        let mut slots = Vec::new();
        for space in spaces {
            for (region, found) in ram.iter().enumerate() {
                let number = slot_in(*space, u32::try_from(region)?);
                let slot = Slot { number, flags: 0, guest: smram::range(found).start };
                slots.push(RamSlot { slot, region, space: *space, mapped: false });
            }
        }
        Ok(Self { vm, ram, slots: Mutex::new(slots) })
    }

    /// Adds and removes slots so that each address space shows the regions that it is to show.
    pub(super) fn map(&self, shows: impl Fn(&Range<u64>, u32) -> bool) -> anyhow::Result<()> {
        for it in self.slots.lock().expect("no thread panicked").iter_mut() {
            let region = self.ram.iter().nth(it.region).context("a region of memory")?;
            let wanted = shows(&smram::range(region), it.space);
            if wanted != it.mapped {
                let mapping = region.get_mmap();
                fd::set_slot(&self.vm, it.slot, wanted.then_some(&*mapping))?;
                it.mapped = wanted;
                // KVM drops the list of a slot that goes, and processors write until then.
                mapping.bitmap().mark_dirty(0, mapping.size());
            }
        }
        Ok(())
    }

    /// The parts of `range` that an address space shows.
    pub(super) fn shown(&self, space: u32, range: &Range<u64>) -> Vec<Range<u64>> {
        let slots = self.slots.lock().expect("no thread panicked");
        let seen = slots.iter().filter(|it| it.mapped && it.space == space);
        let regions = seen.filter_map(|it| self.ram.iter().nth(it.region)).map(smram::range);
        let parts = regions.map(|it| it.start.max(range.start)..it.end.min(range.end));
        parts.filter(|part| !part.is_empty()).collect()
    }

    /// Begins or ends recording of all pages that are written. Nobody may write meanwhile.
    pub(super) fn record_writes(&self, on: bool) -> anyhow::Result<()> {
        for region in self.ram.iter() {
            region.get_mmap().bitmap().record(on);
        }
        for it in self.slots.lock().expect("no thread panicked").iter_mut() {
            it.slot.flags = if on { KVM_MEM_LOG_DIRTY_PAGES } else { 0 };
            let region = self.ram.iter().nth(it.region).filter(|_| it.mapped);
            if let Some(region) = region {
                fd::set_slot(&self.vm, it.slot, Some(&region.get_mmap()))?;
            }
        }
        Ok(())
    }

    /// Adds the pages that processors have written to those that this process has written.
    pub(super) fn collect_writes(&self) -> anyhow::Result<()> {
        let slots = self.slots.lock().expect("no thread panicked");
        slots.iter().try_for_each(|it| self.collect_from(it))
    }

    fn collect_from(&self, it: &RamSlot) -> anyhow::Result<()> {
        if !it.mapped || it.slot.flags & KVM_MEM_LOG_DIRTY_PAGES == 0 {
            return Ok(());
        }
        let region = self.ram.iter().nth(it.region).context("a region of memory")?.get_mmap();
        let pages = self.vm.get_dirty_log(it.slot.number, region.size());
        let pages = pages.with_context(|| format!("writes to memory slot {}", it.slot.number))?;
        region.bitmap().add(&pages);
        Ok(())
    }
}
