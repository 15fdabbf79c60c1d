//! `--restore` and `--incoming`: options over those of a snapshot, or of a machine that arrives.

use std::fmt;
use std::path::PathBuf;

use host::keyvalue;
use host::listen::UnixAddress;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::{Config, OptionValue};
use crate::snapshot::MEMORY;

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

/// Whether a machine leaves the files of the one that was saved alone.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Cloning {
    #[default]
    Off,
    /// Its disks are empty images over those of the snapshot.
    On,
    /// Such images are made in this folder.
    In(PathBuf),
}

impl Serialize for Cloning {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Off => serializer.serialize_bool(false),
            Self::On => serializer.serialize_bool(true),
            Self::In(folder) => folder.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Cloning {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl Visitor<'_> for Form {
            type Value = Cloning;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a boolean, or the path of a folder")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Cloning, E> {
                Ok(if on { Cloning::On } else { Cloning::Off })
            }

            fn visit_str<E: de::Error>(self, folder: &str) -> Result<Cloning, E> {
                match folder {
                    "" => Err(E::custom("an empty path")),
                    folder => Ok(Cloning::In(folder.into())),
                }
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// When the contents of memory are compared with their checksums.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Checks {
    /// While the guest runs, whose writes to its disks wait until then.
    #[default]
    Later,
    /// Before the guest runs.
    First,
    Off,
}

/// The snapshot to restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Restore {
    pub dir: PathBuf,
    pub copy: bool,
    pub check: Checks,
    /// The processors wait for `vmm ctl resume`.
    pub paused: bool,
    pub options: Options,
    pub clone: Cloning,
    /// The file with the key or the passphrase of an encrypted snapshot.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<PathBuf>,
}

impl Restore {
    /// The snapshot's memory, in errors.
    pub fn memory(&self) -> String {
        format!("--restore {}: {MEMORY}", self.dir.display())
    }
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
        own.set("restore", "dir,clone=").unwrap_err();
        for (text, clone) in [
            ("dir", Cloning::Off),
            ("dir,clone", Cloning::On),
            ("dir,clone=new", Cloning::In("new".into())),
        ] {
            own.set("restore", text).unwrap();
            assert_eq!(own.restore.as_ref().unwrap().clone, clone);
            let json = serde_json::to_string(&own).unwrap();
            assert_eq!(Config::from_json(&json).unwrap().restore.unwrap().clone, clone);
        }
    }
}
