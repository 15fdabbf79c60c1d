//! `--vnc` and `--web`: a place to listen, then what holds there.

use serde::Deserialize;
use serde::de::MapAccess;
use serde::de::value::MapAccessDeserializer;

use super::Word;
use crate::rfb::listen;
use crate::{keyvalue, web};

macro_rules! place_words {
    ($($type:ty),*) => {$(
        impl Word for Option<$type> {
            const ELSE: &'static str = "a place or an object";

            fn put(&mut self, text: &str) -> anyhow::Result<()> {
                *self = Some(keyvalue::parse(text, Some("to"))?);
                Ok(())
            }

            fn object<'de, M: MapAccess<'de>>(map: M) -> Result<Self, M::Error> {
                <$type>::deserialize(MapAccessDeserializer::new(map)).map(Some)
            }
        }
    )*};
}

place_words!(listen::Config, web::Config);
