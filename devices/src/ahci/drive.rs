//! A disk as its commands see it: the settings that they change, its size, and how they fail.

use serde::{Deserialize, Serialize};

use super::fis::{ABRT, DF, DRDY, DSC, ERR, IDNF, Reply, UNC};
use host::disk::{Fault, Geometry};

/// Maximum number of blocks of 512 bytes in a list of DATA SET MANAGEMENT.
pub(super) const MAX_LIST: u16 = 8;
/// Maximum number of sectors in a READ MULTIPLE.
pub(super) const MAX_MULTIPLE: u8 = 16;

/// How a command failed: status, error, and the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Failure {
    pub(super) status: u8,
    pub(super) error: u8,
}

impl Failure {
    pub(super) const ABORTED: Self = Self::new(ABRT);
    pub(super) const NOT_FOUND: Self = Self::new(IDNF);
    const UNCORRECTABLE: Self = Self::new(UNC);
    /// The disk could not write.
    const WRITE_FAULT: Self = Self { status: DRDY | DSC | DF | ERR, error: ABRT };

    pub(super) const fn new(error: u8) -> Self {
        Self { status: DRDY | DSC | ERR, error }
    }

    /// Faults in guest memory are not covered here.
    pub(super) fn of(fault: Fault, write: bool) -> Self {
        match fault {
            Fault::Unsupported => Self::ABORTED,
            Fault::Refused => Self::NOT_FOUND,
            Fault::Broken if !write => Self::UNCORRECTABLE,
            Fault::Broken | Fault::Full => Self::WRITE_FAULT,
        }
    }
}

/// The settings that a driver changes, and counters.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) write_cache: bool,
    pub(super) look_ahead: bool,
    pub(super) smart: bool,
    /// Sectors of a READ MULTIPLE.
    pub(super) multiple: u8,
    /// The transfer mode, as SET FEATURES has it.
    pub(super) mode: u8,
    pub(super) standby: bool,
    /// The last failure of a queued command.
    pub(super) queued_error: Option<QueuedError>,
    /// Reads and writes that failed.
    pub(super) failures: u32,
}

impl Default for State {
    fn default() -> Self {
        Self {
            write_cache: true,
            look_ahead: true,
            smart: true,
            multiple: MAX_MULTIPLE,
            mode: 0x46,
            standby: false,
            queued_error: None,
            failures: 0,
        }
    }
}

impl State {
    /// A reset by hardware or software. The settings stay (IDENTIFY DEVICE, word 79, bit 6).
    pub(super) fn reset(&mut self) {
        self.standby = false;
        self.queued_error = None;
    }
}

/// A disk while it plans a command.
pub(super) struct Disk<'a> {
    pub(super) state: &'a mut State,
    pub(super) serial: &'a str,
    pub(super) geometry: &'a Geometry,
}

impl Disk<'_> {
    pub(super) fn discards(&self) -> bool {
        self.geometry.discard > 0 && !self.geometry.read_only
    }
}

/// A failed queued command, for the log.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct QueuedError {
    /// The tag of the failed command. `None` if the command was not queued.
    pub(super) tag: Option<u8>,
    pub(super) status: u8,
    pub(super) error: u8,
    pub(super) lba: u64,
    pub(super) device: u8,
    pub(super) count: u16,
}

impl QueuedError {
    pub(super) fn new(tag: Option<u8>, reply: &Reply) -> Self {
        let Reply { status, error, lba, device, count } = *reply;
        Self { tag, status, error, lba, device, count }
    }
}
