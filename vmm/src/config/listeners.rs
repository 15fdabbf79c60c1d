//! `--vnc` and `--web`: an address to listen on, then the settings of this listener.

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess};

use super::{OptionValue, deserialize_option};
use host::keyvalue;
use screen::rfb::listen;
use screen::web;

impl OptionValue for Option<web::Config> {
    const JSON_FORMS: &'static str = "an address or an object";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(keyvalue::parse(text, Some("to"))?);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        web::Config::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}

impl OptionValue for Vec<listen::Config> {
    const REPEATS: bool = true;
    const JSON_FORMS: &'static str = "an address, an object, or a list of them";

    fn read_text(&mut self, text: &str) -> anyhow::Result<()> {
        self.push(keyvalue::parse(text, Some("to"))?);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        listen::Config::deserialize(MapAccessDeserializer::new(map)).map(|it| vec![it])
    }

    fn list<'de, S: SeqAccess<'de>>(list: S) -> Result<Self, S::Error> {
        let each = Vec::<Each>::deserialize(SeqAccessDeserializer::new(list))?;
        Ok(each.into_iter().flat_map(|Each(one)| one).collect())
    }
}

/// One element of the JSON list: a string or an object.
struct Each(Vec<listen::Config>);

impl<'de> Deserialize<'de> for Each {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserialize_option(deserializer).map(Self)
    }
}
