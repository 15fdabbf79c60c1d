//! The VM Generation ID of a machine: what it is, where the guest has it, and its change.

use std::sync::{Arc, Mutex};

use anyhow::Context as _;
use boot::acpi::{self, vmgenid};
use devices::platform::fw_cfg::{Content, File};
use devices::power::Buttons;
use host::memory::Memory;
use host::uuid::Uuid;

/// The ID, shared by the firmware's files, by direct boot and by `vmm ctl vmgenid`.
pub struct Generation {
    state: Mutex<State>,
}

struct State {
    id: Uuid,
    /// Where the guest has it; 0 until firmware has said so.
    address: u64,
}

impl Generation {
    /// An ID that no guest has yet.
    pub(super) fn new(id: Uuid) -> Self {
        Self { state: Mutex::new(State { id, address: 0 }) }
    }

    /// The ID, as it is written.
    pub fn show(&self) -> String {
        self.state().id.to_string()
    }

    /// The ID as it is in the guest's memory.
    pub(super) fn bytes(&self) -> [u8; 16] {
        self.state().id.in_memory()
    }

    /// A directly started guest has it where direct boot put it.
    pub(super) fn started_directly(&self) {
        self.state().address = acpi::DIRECT_GENERATION;
    }

    /// The file into which firmware writes where it put the ID.
    pub(super) fn address_file(self: &Arc<Self>) -> File {
        let generation = self.clone();
        let written = move |bytes: &[u8]| {
            let address = bytes.try_into().map_or(0, u64::from_le_bytes);
            generation.state().address = address;
        };
        let content = Content::Writable(vec![0; 8], Arc::new(written));
        File { name: vmgenid::ADDRESS_FILE.to_owned(), content }
    }

    /// Changes the ID and notifies the guest, if it has it already.
    ///
    /// # Errors
    ///
    /// When the guest said that it is where no RAM is.
    pub fn change(&self, id: Uuid, memory: &Memory, buttons: &Buttons) -> anyhow::Result<()> {
        let mut state = self.state();
        if state.address != 0 {
            let placed = memory.write(state.address, &id.in_memory());
            placed.ok().with_context(|| {
                format!("the guest has its VM Generation ID at {:#x}: no RAM", state.address)
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
