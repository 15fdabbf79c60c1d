//! The interface of a device: registers that a guest accesses, and a state that can be saved. The
//! resources that a device may request are in `grants.rs`.

use std::fmt;

use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// A device: registers that a guest accesses, and a state that can be saved and restored.
///
/// A device never learns its absolute address, the calling vCPU or the VM. It receives the region
/// and the offset of each access. The bus holds one lock per device around every call.
pub trait Device: Send {
    /// Fills `data`. An `Ignored` read returns all-ones.
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access;
    /// Writes `data` to the register. An `Ignored` write has no effect.
    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access;
    /// Stops the device: after this call, no thread of the device runs and it changes no guest
    /// memory.
    fn park(&mut self) -> Saved;
    /// Asks another process for the state that it has for this device. A snapshot calls this before
    /// `park`, which then returns that state, too. The vCPUs are stopped. A device goes on as
    /// before if this fails.
    fn gather(&mut self) -> anyhow::Result<()> {
        Ok(())
    }
    /// Resumes from `saved`. `Saved::default()` is power-on. The vCPUs are stopped during both
    /// calls.
    ///
    /// `park` and `run` implement reset, pause, resume, snapshot and restore, so there is only one
    /// path to test.
    fn run(&mut self, saved: Saved) -> anyhow::Result<()>;
}

/// The result of an access. `Ignored` is the guest's mistake, which the bus logs once.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    Done,
    /// There is no such register, or it does not have this width.
    Ignored,
}

/// Identifies one of a device's own address ranges. Devices compare it with the regions that they
/// were granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Region(pub(crate) u16);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// I/O ports (`in` and `out`).
    Port,
    /// Guest-physical addresses that are not RAM.
    Memory,
    /// As `Memory`, for processors in system-management mode. They find the devices of `Memory`
    /// where there are none of this kind.
    SmmMemory,
    /// PCI configuration space: bus, device and function in bits 27:12, the register below.
    Config,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Port => "ports",
            Self::Memory => "memory",
            Self::SmmMemory => "memory (SMM)",
            Self::Config => "config",
        })
    }
}

/// A device's state between `park` and `run`. The default is power-on.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Saved(Option<serde_json::Value>);

impl Saved {
    pub fn of<T: Serialize>(state: &T) -> Self {
        // Device states are plain structs without maps whose keys are not strings, so this cannot
        // fail.
        Self(Some(serde_json::to_value(state).expect("device states are plain data")))
    }

    /// Returns the default if nothing was saved. Fails if the state is damaged, or from another
    /// version of the device.
    pub fn take<T: DeserializeOwned + Default>(self) -> anyhow::Result<T> {
        self.0.map_or_else(|| Ok(T::default()), |value| Ok(serde_json::from_value(value)?))
    }
}
