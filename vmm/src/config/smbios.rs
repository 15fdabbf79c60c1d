//! `--smbios`

use serde::{Deserialize, Serialize};

/// What SMBIOS tells.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Smbios {
    /// Who made the machine.
    pub manufacturer: String,
    /// What it is called.
    pub product: String,
    /// Its version.
    pub version: String,
    /// Its serial number.
    pub serial: String,
    /// Its UUID, in the usual form. Derived from the first disk's place when it is empty, so that a
    /// machine keeps it; all zeros without a disk.
    pub uuid: String,
}

impl Default for Smbios {
    fn default() -> Self {
        Self {
            manufacturer: "Transom".into(),
            product: "Virtual machine".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            serial: String::new(),
            uuid: String::new(),
        }
    }
}
