//! Memory of ours that the guest sees: firmware in flash, a display's picture.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use anyhow::ensure;
use devices::hypervisor::Backing;
use devices::pages::Pages;
use kvm_bindings::KVM_MEM_LOG_DIRTY_PAGES;
use kvm_ioctls::VmFd;
use vm_memory::{Bytes, MmapRegion, VolatileMemory};

use super::fd::{self, Slot};

/// I/O APIC and local APICs. A slot would hide them, while in a PC they hide what is behind them.
const CHIPS: Range<u64> = 0xfec0_0000..0xfef0_0000;

/// A mapping, and the slot by which the guest sees it.
pub(super) struct Lent {
    vm: Arc<VmFd>,
    region: MmapRegion,
    state: Mutex<State>,
}

struct State {
    slot: Slot,
    /// KVM has the slot now.
    placed: bool,
    /// What was written and not yet told: by us, and maybe by the guest in an earlier place.
    changed: Pages,
}

impl Lent {
    /// A mapping for a slot that nobody else has; its address comes with `place`.
    pub(super) fn new(vm: Arc<VmFd>, region: MmapRegion, slot: Slot) -> Self {
        let noted = if notes(slot) { region.size() as u64 } else { 0 };
        let state = State { slot, placed: false, changed: Pages::none_of(noted) };
        Self { vm, region, state: Mutex::new(state) }
    }

    /// Takes KVM's list of what the guest wrote; from then on KVM begins a new one.
    fn collect(&self, state: &mut State) {
        if !state.placed || !notes(state.slot) {
            return;
        }
        match self.vm.get_dirty_log(state.slot.number, self.region.size()) {
            Ok(pages) => state.changed.add(&pages),
            // Rather too much is looked at than something missed.
            Err(error) => {
                tracing::debug!("memory slot {}: no list of writes: {error}", state.slot.number);
                state.changed.mark(0, self.region.size());
            }
        }
    }
}

/// Whether KVM notes which pages of a slot are written.
fn notes(slot: Slot) -> bool {
    slot.flags & KVM_MEM_LOG_DIRTY_PAGES != 0
}

impl Backing for Lent {
    fn place(&self, at: Option<u64>) -> anyhow::Result<()> {
        let mut state = self.state.lock().expect("no thread panicked");
        // KVM does not move a slot whose contents the guest may not write: take away, then put.
        if std::mem::take(&mut state.placed) {
            fd::set_slot(&self.vm, state.slot, None).ok();
            // Its list of writes went with it, and processors may have written until then.
            state.changed.mark(0, self.region.size());
        }
        if let Some(at) = at {
            let end = at.saturating_add(self.region.size() as u64);
            ensure!(
                end <= CHIPS.start || CHIPS.end <= at,
                "{at:#x}-{:#x}: interrupt controllers are there",
                end - 1
            );
            state.slot.guest = at;
            fd::set_slot(&self.vm, state.slot, Some(&self.region))?;
            state.placed = true;
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

impl Drop for Lent {
    fn drop(&mut self) {
        self.place(None).ok();
    }
}
