//! What a device is: registers that a guest can touch, and a state that can be saved. What a device
//! may ask for is in `grants.rs`.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// Registers that a guest can touch, and a state that can be taken out and put back.
///
/// A device never learns its absolute address, the calling vCPU or the VM. It is told which of its
/// own regions was hit, and where. The bus holds one lock per device around every call.
pub trait Device: Send {
    /// Fills `data`. What is left `Ignored` reads as all-ones.
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access;
    /// Takes `data`. What is `Ignored` is dropped.
    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access;
    /// Goes quiet: after this no thread of ours runs and no guest memory changes.
    fn park(&mut self) -> Saved;
    /// Runs on from `saved`; `Saved::default()` is power-on. vCPUs are stopped during both.
    ///
    /// These two are reset, pause, resume, snapshot and restore: one path, so one path to test.
    fn run(&mut self, saved: Saved) -> anyhow::Result<()>;
}

/// `Ignored` is the guest's mistake (no such register, bad width). The bus logs it once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The register took the access.
    Done,
    /// There is no such register, or not of that width.
    Ignored,
}

/// Which of a device's own grants was hit; devices compare it with the ones they were given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region(pub(crate) u16);

/// The address spaces of a PC.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// `in` and `out`.
    Port,
    /// Guest-physical addresses that are not RAM.
    Memory,
    /// PCI configuration: bus, device, function in bits 27:12, the register below.
    Config,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "ports",
            Self::Memory => "memory",
            Self::Config => "config",
        })
    }
}

/// A device's state between `park` and `run`. Nothing saved means power-on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Saved(Option<serde_json::Value>);

impl Saved {
    /// Takes a copy of `state`.
    pub fn of<T: Serialize>(state: &T) -> Self {
        // Our own plain structs: no map with other keys than strings, so this cannot fail.
        Self(Some(serde_json::to_value(state).expect("device states are plain data")))
    }

    /// The state that was saved, or power-on.
    ///
    /// # Errors
    ///
    /// When the state is of another version of the device, or damaged.
    pub fn take<T: DeserializeOwned + Default>(self) -> anyhow::Result<T> {
        self.0.map_or_else(|| Ok(T::default()), |value| Ok(serde_json::from_value(value)?))
    }
}
