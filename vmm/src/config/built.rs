//! `--disk`, `--tpm` and `--device`: devices in the words of their own configuration.

use devices::platform::tpm;
use devices::registry;
use host::disk;
use serde::Deserialize;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;

use super::Word;
use host::keyvalue;

impl Word for Vec<registry::Config> {
    const REPEATS: bool = true;
    const ELSE: &'static str = "a list of objects";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        self.push(keyvalue::parse(text, Some("kind"))?);
        Ok(())
    }
}

impl Word for Vec<disk::Config> {
    const REPEATS: bool = true;
    const ELSE: &'static str = "a list of objects";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        let disk: disk::Config = keyvalue::parse(text, Some("path"))?;
        anyhow::ensure!(!disk.path.as_os_str().is_empty(), "a path is missing");
        self.push(disk);
        Ok(())
    }
}

impl Word for Option<tpm::Config> {
    const ELSE: &'static str = "a path or an object";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        let tpm: tpm::Config = keyvalue::parse(text, Some("path"))?;
        anyhow::ensure!(!tpm.path.as_os_str().is_empty(), "a path is missing");
        *self = Some(tpm);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        tpm::Config::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}
