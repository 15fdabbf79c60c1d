//! `--vnc` and `--web`: a place to listen, then what holds there.

use serde::Deserialize;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserializer, MapAccess, SeqAccess};

use super::{Word, word};
use host::keyvalue;
use screen::rfb::listen;
use screen::web;

impl Word for Option<web::Config> {
    const ELSE: &'static str = "a place or an object";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
        *self = Some(keyvalue::parse(text, Some("to"))?);
        Ok(())
    }

    fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
        web::Config::deserialize(MapAccessDeserializer::new(map)).map(Some)
    }
}

impl Word for Vec<listen::Config> {
    const REPEATS: bool = true;
    const ELSE: &'static str = "a place, an object, or a list of them";

    fn put(&mut self, text: &str) -> anyhow::Result<()> {
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

/// One of the list, which may be a text or an object.
struct Each(Vec<listen::Config>);

impl<'de> Deserialize<'de> for Each {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        word(deserializer).map(Self)
    }
}
