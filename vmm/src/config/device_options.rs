//! `--disk`, `--tpm` and `--device`: options that are read as a device's own `Config`.

use devices::platform::tpm;
use devices::registry;
use host::disk;
use serde::Deserialize;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;

use super::OptionValue;
use host::keyvalue;

impl OptionValue for Vec<registry::Config> {
    const REPEATS: bool = true;
    const JSON_FORMS: &'static str = "a list of objects";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.push(keyvalue::parse(text, Some("kind"))?);
        Ok(())
    }
}

impl OptionValue for Vec<disk::Config> {
    const REPEATS: bool = true;
    const JSON_FORMS: &'static str = "a list of objects";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        let disk: disk::Config = keyvalue::parse(text, Some("path"))?;
        anyhow::ensure!(!disk.path.as_os_str().is_empty(), "a path is missing");
        self.push(disk);
        Ok(())
    }
}

impl OptionValue for Option<tpm::Config> {
    const JSON_FORMS: &'static str = "a path or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        let tpm: tpm::Config = keyvalue::parse(text, Some("path"))?;
        anyhow::ensure!(!tpm.path.as_os_str().is_empty(), "a path is missing");
        *self = Some(tpm);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        tpm::Config::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}
