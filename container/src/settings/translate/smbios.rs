//! `SM_BIOS` and `-smbios`: texts of the SMBIOS tables.

use anyhow::{bail, ensure};
use host::uuid::Uuid;

use super::options::Options;
use crate::settings::value::{Value, quote};

/// Texts of the SMBIOS system information (type 1).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Smbios {
    pub manufacturer: Option<String>,
    pub product: Option<String>,
    pub version: Option<String>,
    pub serial: Option<String>,
    pub uuid: Option<Uuid>,
    /// Notes on keys that have no meaning here.
    pub notes: Vec<String>,
}

impl Smbios {
    /// Applies one `-smbios` option.
    pub fn take(&mut self, options: &Options) -> anyhow::Result<()> {
        let kind = options.get("type").unwrap_or("none");
        if kind != "1" {
            let sentence = "has no effect: only type=1, the system information, can be set";
            self.notes.push(format!("-smbios type={} {sentence}", quote(kind)));
            return Ok(());
        }
        for (key, value) in &options.rest {
            let value = value.as_deref().unwrap_or_default();
            let field = match key.as_str() {
                "manufacturer" => &mut self.manufacturer,
                "product" => &mut self.product,
                "version" => &mut self.version,
                "serial" => &mut self.serial,
                "uuid" => {
                    self.uuid = Some(Uuid::read(value)?);
                    continue;
                }
                "type" => continue,
                other => {
                    let sentence = "has no effect: only manufacturer, product, version, serial \
                                    and uuid can be set";
                    self.notes.push(format!("{} of -smbios {sentence}", quote(other)));
                    continue;
                }
            };
            *field = Some(line(value)?);
        }
        Ok(())
    }
}

/// Checks that a text fits into a table.
fn line(text: &str) -> anyhow::Result<String> {
    ensure!(text.len() <= 255, "a text of SMBIOS has at most 255 bytes: shorten it");
    ensure!(!text.is_empty(), "a text of SMBIOS cannot be empty: leave the key out");
    String::read(text)
}

impl Value for Smbios {
    const ACCEPTS: &'static str = "serial number, or type=1,serial=…";

    fn read(text: &str) -> anyhow::Result<Self> {
        let mut smbios = Self::default();
        let text = text.strip_prefix("-smbios").unwrap_or(text).trim();
        if text.is_empty() {
            bail!("give a serial number, or type=1,serial=…");
        }
        if text.contains('=') {
            smbios.take(&Options::read(text))?;
        } else {
            smbios.serial = Some(line(text)?);
        }
        Ok(smbios)
    }
    fn show(&self) -> String {
        let uuid = self.uuid.as_ref().map(Uuid::show);
        let said = [
            ("manufacturer", &self.manufacturer),
            ("product", &self.product),
            ("version", &self.version),
            ("serial", &self.serial),
            ("uuid", &uuid),
        ];
        let said = said.into_iter().filter_map(|(key, it)| Some((key, it.as_deref()?)));
        let said: Vec<_> = said.map(|(key, it)| format!("{key}={}", quote(it))).collect();
        said.join(",")
    }
    fn notes(&self) -> Vec<String> {
        self.notes.clone()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn accepts_a_serial_number_or_qemu_options() {
        assert_eq!(Smbios::read("ABC 123").unwrap().serial.unwrap(), "ABC 123");
        let words = "-smbios type=1,manufacturer=Me,,Inc,serial=7,family=x";
        let smbios = Smbios::read(words).unwrap();
        assert_eq!(smbios.show(), "manufacturer=Me,Inc,serial=7");
        assert_eq!(smbios.notes.len(), 1);
        assert_eq!(Smbios::read("type=2,serial=7").unwrap().notes.len(), 1);
        assert!(Smbios::read("type=1,uuid=x").is_err());
        assert!(Smbios::read("type=1,serial=").is_err());
        assert!(Smbios::read(&"x".repeat(256)).is_err());
    }
}
