//! The VM Generation ID of a machine: its value, its address in the guest, and how it changes.

use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use boot::acpi::{self, vmgenid};
use devices::platform::fw_cfg::{Content, File};
use devices::power::Buttons;
use host::memory::Memory;
use host::uuid::Uuid;

/// The ID, shared by the firmware's files, direct boot and `vmm ctl vmgenid`.
pub struct Generation {
    state: Mutex<State>,
}

struct State {
    id: Uuid,
    /// The guest-physical address of the ID; 0 until firmware has reported it.
    address: u64,
}

impl Generation {
    pub(super) fn new(id: Uuid) -> Self {
        Self { state: Mutex::new(State { id, address: 0 }) }
    }

    pub fn show(&self) -> String {
        self.state().id.to_string()
    }

    /// The ID in the byte order of the guest's memory.
    pub(super) fn bytes(&self) -> [u8; 16] {
        self.state().id.in_memory()
    }

    /// Records the address at which direct boot puts the ID.
    pub(super) fn started_directly(&self) {
        self.state().address = acpi::DIRECT_GENERATION_ID;
    }

    /// The fw_cfg file into which firmware writes the address of the ID.
    pub(super) fn address_file(self: &Arc<Self>) -> File {
        let generation = self.clone();
        let written = move |bytes: &[u8]| {
            let address = bytes.try_into().map_or(0, u64::from_le_bytes);
            generation.state().address = address;
        };
        let content = Content::Writable(vec![0; 8], Arc::new(written));
        File { name: vmgenid::ADDRESS_FILE.to_owned(), content }
    }

    /// Continues with the ID of a snapshot, which the guest knows.
    pub(super) fn restore(&self, id: Uuid) {
        self.state().id = id;
    }

    /// Changes the ID, and notifies the guest if it knows the ID. Fails if the address that the
    /// guest reported is not in RAM.
    pub fn change(&self, id: Uuid, memory: &Memory, buttons: &Buttons) -> anyhow::Result<()> {
        let mut state = self.state();
        if state.address != 0 {
            let placed = memory.write(state.address, &id.in_memory());
            placed.ok().with_context(|| {
                format!("the guest put its VM Generation ID at {:#x}: not RAM", state.address)
            })?;
            buttons.raise(vmgenid::EVENT);
        }
        state.id = id;
        Ok(())
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("no thread panicked")
    }
}
