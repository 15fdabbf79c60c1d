//! Addresses of PCI functions on bus 0, as users write them: `04.0`.

use std::collections::BTreeMap;
use std::fmt;
use std::str::FromStr;

use anyhow::ensure;
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Address {
    /// 0 to 31.
    pub device: u8,
    /// 0 to 7.
    pub function: u8,
}

impl Address {
    /// For constants: panics if `device` or `function` is out of range.
    pub const fn new(device: u8, function: u8) -> Self {
        assert!(device < 32 && function < 8);
        Self { device, function }
    }

    /// The offset of its 4 KiB of configuration space from that of bus 0 (ECAM).
    pub fn config(self) -> u64 {
        u64::from(self.device) << 15 | u64::from(self.function) << 12
    }

    /// The first device number without functions. 0 and 31 belong to the chip set, 1 to the
    /// display.
    pub fn first_free<T>(taken: &BTreeMap<Self, T>) -> Option<Self> {
        let free = |device: &u8| !taken.keys().any(|at| at.device == *device);
        (2..31).find(free).map(|device| Self { device, function: 0 })
    }

    /// The interrupt controller's input for this function's INTx pin (0 is INTA), as in `_PRT`.
    pub fn gsi(self, pin: u8) -> u32 {
        let (device, pin) = (u32::from(self.device), u32::from(pin));
        match device {
            0..=24 => 20 + (device + pin) % 4,
            30 => 20 + pin % 4,
            _ => 16 + pin % 4,
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:02x}.{}", self.device, self.function)
    }
}

crate::as_text!(Address);

impl FromStr for Address {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (device, function) = text.split_once('.').unwrap_or((text, "0"));
        let device = u8::from_str_radix(device, 16).unwrap_or(u8::MAX);
        let function = function.parse().unwrap_or(u8::MAX);
        ensure!(
            device < 32 && function < 8,
            "`{text}` is not a PCI slot: write the device number in hexadecimal, 00 to 1f, and \
             the function number, as in `04.0`"
        );
        Ok(Self { device, function })
    }
}
