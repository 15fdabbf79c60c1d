//! `--smbios`: the machine's identification.

use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Smbios {
    pub manufacturer: String,
    pub product: String,
    pub version: String,
    pub serial: String,
    /// The machine's UUID. If empty, it is derived from the path of the first disk, so that a
    /// machine keeps it. A machine without a disk gets the nil UUID, all zeros.
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
