//! `--smbios`

use anyhow::Context as _;
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
    /// Its UUID, in the usual form.
    pub uuid: String,
}

impl Default for Smbios {
    fn default() -> Self {
        Self {
            manufacturer: "Transom".into(),
            product: "Virtual machine".into(),
            version: env!("CARGO_PKG_VERSION").into(),
            serial: String::new(),
            uuid: "00000000-0000-0000-0000-000000000000".into(),
        }
    }
}

impl Smbios {
    /// The UUID's bytes, as it is written.
    ///
    /// # Errors
    ///
    /// When it is not one.
    pub fn uuid(&self) -> anyhow::Result<[u8; 16]> {
        let digits: String = self.uuid.chars().filter(|c| *c != '-').collect();
        let number = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok()).flatten();
        let number = number.with_context(|| {
            format!("--smbios uuid={}: a UUID is 32 hexadecimal digits", self.uuid)
        })?;
        Ok(number.to_be_bytes())
    }
}
