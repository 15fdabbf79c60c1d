//! Host memory that is mapped into the guest for a device: firmware in flash, a display's frame
//! buffer.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use anyhow::ensure;
use devices::hypervisor::Backing;
use devices::pages::Pages;
use host::ram::MmapRegion;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use kvm_ioctls::VmFd;
use vm_memory::{Bytes, VolatileMemory};

use super::fd::{self, Slot};
use super::ram_slots;

/// The I/O APIC and the local APICs. A slot would hide them; in a PC, they hide the memory behind
/// them.
pub(super) const CHIPS: Range<u64> = 0xfec0_0000..0xfef0_0000;

/// A mapping, and the memory slot that shows it to the guest.
pub struct DeviceMemory {
    guest: Place,
    region: Arc<MmapRegion>,
    state: Mutex<State>,
}

/// The machine that shows the memory to its guest.
pub(super) struct Place {
    pub(super) vm: Arc<VmFd>,
    /// The ranges of RAM, some of which may be hidden now. In a PC, they hide what is behind them.
    pub(super) ram: Vec<Range<u64>>,
    /// Whether processors have a second address space, for system-management mode.
    pub(super) smm: bool,
}

impl Place {
    /// Sets the slot in all address spaces in which it is. In system-management mode, accesses to
    /// memory whose writes are tracked reach the device.
    fn set(&self, slot: Slot, host: Option<&MmapRegion>) -> anyhow::Result<()> {
        if self.smm && !tracks_writes(slot) {
            let number = ram_slots::slot_in(ram_slots::IN_SMM, slot.number);
            fd::set_slot(&self.vm, Slot { number, ..slot }, host)?;
        }
        fd::set_slot(&self.vm, slot, host)
    }
}

struct State {
    slot: Slot,
    /// Whether KVM has the slot now.
    mapped: bool,
    /// Pages that were written and not yet reported: by the host, and perhaps by the guest at an
    /// earlier address.
    changed: Pages,
}

impl DeviceMemory {
    /// The mapping is not in the guest until `place` gives it an address.
    pub(super) fn new(guest: Place, region: MmapRegion, slot: Slot) -> Self {
        let tracked = if tracks_writes(slot) { region.size() as u64 } else { 0 };
        let state = State { slot, mapped: false, changed: Pages::empty(tracked) };
        Self { guest, region: Arc::new(region), state: Mutex::new(state) }
    }

    pub fn contents(&self) -> Arc<MmapRegion> {
        self.region.clone()
    }

    /// The contents, which the caller replaces.
    pub fn overwrite(&self) -> Arc<MmapRegion> {
        let mut state = self.state.lock().expect("no thread panicked");
        state.changed.mark(0, self.region.size());
        self.region.clone()
    }

    /// Fetches and clears KVM's list of pages that the guest wrote.
    fn collect(&self, state: &mut State) {
        if !state.mapped || !tracks_writes(state.slot) {
            return;
        }
        match self.guest.vm.get_dirty_log(state.slot.number, self.region.size()) {
            Ok(pages) => state.changed.add(&pages),
            // Without the list, report all pages: none may be missed.
            Err(error) => {
                tracing::debug!("memory slot {}: no list of writes: {error}", state.slot.number);
                state.changed.mark(0, self.region.size());
            }
        }
    }
}

fn tracks_writes(slot: Slot) -> bool {
    slot.flags & KVM_MEM_LOG_DIRTY_PAGES != 0
}

impl Backing for DeviceMemory {
    fn map(&self, at: Option<u64>) -> anyhow::Result<()> {
        let mut state = self.state.lock().expect("no thread panicked");
        // KVM cannot move a slot that the guest may not write: remove it, then add it.
        if std::mem::take(&mut state.mapped) {
            self.guest.set(state.slot, None).ok();
            // KVM dropped the slot's list of writes, and processors may have written until then.
            state.changed.mark(0, self.region.size());
        }
        if let Some(at) = at {
            let end = at.saturating_add(self.region.size() as u64);
            ensure!(
                end <= CHIPS.start || CHIPS.end <= at,
                "{at:#x}-{:#x}: reserved for interrupt controllers",
                end - 1
            );
            let covers = |ram: &Range<u64>| at < ram.end && ram.start < end;
            ensure!(!self.guest.ram.iter().any(covers), "{at:#x}-{:#x}: there is RAM", end - 1);
            state.slot.guest = at;
            self.guest.set(state.slot, Some(&self.region))?;
            state.mapped = true;
        }
        Ok(())
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        self.region.as_volatile_slice().read(data, offset).ok();
    }

    fn write(&self, offset: u64, data: &[u8]) {
        let at = usize::try_from(offset).unwrap_or(usize::MAX);
        let written = self.region.as_volatile_slice().write(data, at);
        let mut state = self.state.lock().expect("no thread panicked");
        state.changed.mark(offset, written.unwrap_or(0));
    }

    fn changed(&self, pages: &mut Vec<u64>) {
        let mut state = self.state.lock().expect("no thread panicked");
        self.collect(&mut state);
        state.changed.move_to(pages);
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.map(None).ok();
    }
}
