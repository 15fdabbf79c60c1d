//! Sense data: why a command failed (SPC-4, 4.5).

use serde::{Deserialize, Serialize};

/// Sense key, code and qualifier of a CHECK CONDITION.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Sense {
    key: u8,
    code: u8,
    qualifier: u8,
}

/// Sense keys.
const NOT_READY: u8 = 2;
const MEDIUM_ERROR: u8 = 3;
const ILLEGAL_REQUEST: u8 = 5;
const UNIT_ATTENTION: u8 = 6;
const DATA_PROTECT: u8 = 7;
const ABORTED_COMMAND: u8 = 0xb;

impl Sense {
    pub(crate) const NONE: Self = Self::new(0, 0, 0);
    pub(crate) const NO_MEDIUM: Self = Self::new(NOT_READY, 0x3a, 0);
    pub(crate) const READ_ERROR: Self = Self::new(MEDIUM_ERROR, 0x11, 0);
    pub(crate) const WRITE_ERROR: Self = Self::new(MEDIUM_ERROR, 0x0c, 0);
    pub(crate) const NO_ROOM: Self = Self::new(DATA_PROTECT, 0x27, 7);
    pub(crate) const INVALID_COMMAND: Self = Self::new(ILLEGAL_REQUEST, 0x20, 0);
    pub(crate) const OUT_OF_RANGE: Self = Self::new(ILLEGAL_REQUEST, 0x21, 0);
    pub(crate) const INVALID_FIELD: Self = Self::new(ILLEGAL_REQUEST, 0x24, 0);
    pub(crate) const NO_UNIT: Self = Self::new(ILLEGAL_REQUEST, 0x25, 0);
    pub(crate) const INVALID_PARAMETER: Self = Self::new(ILLEGAL_REQUEST, 0x26, 0);
    pub(crate) const NOT_SAVED: Self = Self::new(ILLEGAL_REQUEST, 0x39, 0);
    pub(crate) const REMOVAL_PREVENTED: Self = Self::new(ILLEGAL_REQUEST, 0x53, 2);
    pub(crate) const WRITE_PROTECTED: Self = Self::new(DATA_PROTECT, 0x27, 0);
    pub(crate) const MEDIUM_CHANGED: Self = Self::new(UNIT_ATTENTION, 0x28, 0);
    pub(crate) const POWER_ON: Self = Self::new(UNIT_ATTENTION, 0x29, 0);
    pub(crate) const CAPACITY_CHANGED: Self = Self::new(UNIT_ATTENTION, 0x2a, 9);
    pub(crate) const ABORTED: Self = Self::new(ABORTED_COMMAND, 0, 0);

    const fn new(key: u8, code: u8, qualifier: u8) -> Self {
        Self { key, code, qualifier }
    }

    pub(crate) fn key(self) -> u8 {
        self.key
    }

    /// Sense data for REQUEST SENSE, in descriptor or fixed format.
    pub(crate) fn data(self, descriptors: bool) -> Vec<u8> {
        let Self { key, code, qualifier } = self;
        if descriptors {
            return vec![0x72, key, code, qualifier, 0, 0, 0, 0];
        }
        let mut data = vec![0; 18];
        (data[0], data[2], data[7], data[12], data[13]) = (0x70, key, 10, code, qualifier);
        data
    }
}
