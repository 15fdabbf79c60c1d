//! `--display`: `none`, or the configuration of the display.

use devices::display::bochs;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;
use serde::{Deserialize, Serialize};

use super::OptionValue;
use host::keyvalue;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Display {
    /// `none`
    Absent(Absent),
    Present(bochs::Config),
}

/// The value `none`, as a type of its own so that serde reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Absent {
    None,
}

impl Default for Display {
    fn default() -> Self {
        Self::Present(bochs::Config::default())
    }
}

impl OptionValue for Display {
    const JSON_FORMS: &'static str = "`none`, a resolution or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
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
