//! Bytes as hexadecimal text, as they are in saved states: `#[serde(with = "host::hex")]`.

use anyhow::{Context, ensure};
use serde::de::Error as _;
use serde::{Deserialize as _, Deserializer, Serializer};

pub fn encode(bytes: &[u8]) -> String {
    let digit = |value: u8| char::from_digit(value.into(), 16).expect("four bits");
    bytes.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 15)]).collect()
}

pub fn decode(text: &str) -> anyhow::Result<Vec<u8>> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    ensure!(rest.is_empty(), "an odd number of hexadecimal digits: {}", text.len());
    let value = |digit: u8| char::from(digit).to_digit(16).and_then(|it| u8::try_from(it).ok());
    let byte = |pair: &[u8; 2]| Some(value(pair[0])? << 4 | value(pair[1])?);
    let wrong = |pair: &[u8; 2]| format!("`{}` is not a hexadecimal byte", pair.escape_ascii());
    pairs.iter().map(|pair| byte(pair).with_context(|| wrong(pair))).collect()
}

pub fn serialize<S: Serializer>(bytes: &[u8], to: S) -> Result<S::Ok, S::Error> {
    to.serialize_str(&encode(bytes))
}

pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<u8>, D::Error> {
    decode(&String::deserialize(from)?).map_err(D::Error::custom)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn returns_the_bytes_and_refuses_other_text() {
        assert_eq!(encode(&[0x00, 0x1f, 0xa0]), "001fa0");
        assert_eq!(decode("001fA0").unwrap(), [0x00, 0x1f, 0xa0]);
        assert!(decode("").unwrap().is_empty());
        for bad in ["0", "001", "0g", "+1", "0€"] {
            assert!(decode(bad).is_err(), "{bad}");
        }
    }
}
