//! `--restore` and `--incoming`: options over those of a snapshot, or of a machine that arrives.

use std::path::PathBuf;

use host::keyvalue;
use host::listen::UnixAddress;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{Config, OptionValue};

/// The options of a machine that continues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Options {
    /// Those of the snapshot, for all that are not given.
    #[default]
    Saved,
    /// None of the snapshot: its machine may have been taken over by its guest.
    Given,
}

/// The snapshot to restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Restore {
    pub dir: PathBuf,
    pub copy: bool,
    pub unchecked: bool,
    /// The processors wait for `vmm ctl resume`.
    pub paused: bool,
    pub options: Options,
}

impl OptionValue for Option<Restore> {
    const JSON_FORMS: &'static str = "a folder or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        let restore: Restore = keyvalue::parse(text, Some("dir"))?;
        anyhow::ensure!(!restore.dir.as_os_str().is_empty(), "a folder is missing");
        *self = Some(restore);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        Restore::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}

/// Where a machine arrives.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Incoming {
    pub socket: UnixAddress,
    #[serde(default)]
    pub options: Options,
}

impl OptionValue for Option<Incoming> {
    const JSON_FORMS: &'static str = "a socket or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(keyvalue::parse(text, Some("socket"))?);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        Incoming::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}

impl Config {
    /// These options over those of `base`: an option that has its default value is that of `base`.
    pub fn over(&self, base: &Self) -> anyhow::Result<Self> {
        let mut all = serde_json::to_value(base)?;
        if let (Some(all), Value::Object(own)) = (all.as_object_mut(), serde_json::to_value(self)?)
        {
            all.extend(own);
        }
        Ok(serde_json::from_value(all)?)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn options_that_are_given_replace_those_of_the_snapshot() {
        let base =
            r#"{"cpus": 2, "disk": [{"path": "a"}, {"path": "b"}], "grace": 9, "display": "none"}"#;
        let mut own = Config::default();
        let given = [("restore", "dir,copy"), ("disk", "c"), ("control", "fd:4"), ("memory", "1G")];
        given.iter().for_each(|(key, text)| own.set(key, text).unwrap());
        let all = own.over(&Config::from_json(base).unwrap()).unwrap();
        let wanted = r#"{"cpus": 2, "disk": [{"path": "c"}], "grace": 9, "memory": "1G",
            "display": "none", "control": "fd:4", "restore": {"dir": "dir", "copy": true}}"#;
        let wanted = Config::from_json(wanted).unwrap();
        assert_eq!(serde_json::to_value(all).unwrap(), serde_json::to_value(wanted).unwrap());
        own.set("restore", "").unwrap_err();
    }
}
