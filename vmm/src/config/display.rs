//! `--display`: a word that says there is none, or what there is.

use devices::display::bochs;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Serialize};

use super::Word;
use host::keyvalue;

/// What people look at.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Display {
    /// There is none.
    Absent(Absent),
    /// There is this one.
    Present(bochs::Config),
}

/// The word for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Absent {
    /// No display.
    None,
}

impl Default for Display {
    fn default() -> Self {
        Self::Present(bochs::Config::default())
    }
}

impl Word for Display {
    const ELSE: &'static str = "`none`, the size of a picture or an object";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = match text {
            "none" => Self::Absent(Absent::None),
            _ => Self::Present(keyvalue::parse(text, Some("mode"))?),
        };
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        let config = Deserialize::deserialize(MapAccessDeserializer::new(map))?;
        Ok(Self::Present(config))
    }
}
