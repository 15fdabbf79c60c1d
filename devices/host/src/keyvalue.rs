//! Parses options in flat text form: `rng,limit=4096` into the same struct that JSON fills.
//!
//! Words are separated by commas, `,,` is a comma (as in QEMU), and a word without `=` is a switch
//! that is on. Text has no types, and serde hides the expected type where it buffers, as it does
//! for internally tagged enums. So every word has a few *readings* (`5` is a number, or else a
//! text). Words are added one by one, and the first reading that the struct accepts is kept. This
//! works for any `Deserialize`, at the price of a few extra passes over a handful of words.
use std::fmt;

use anyhow::{anyhow, bail, ensure};
use serde::de::value::MapDeserializer;
use serde::de::{
    self, DeserializeOwned, Deserializer, Expected, IntoDeserializer, Unexpected, Visitor,
};
use serde::forward_to_deserialize_any;

/// Reads `text` into `T`. The first word, if it has no `=`, is the value of the key `first`. The
/// error is one sentence that names the word.
pub fn parse<T: DeserializeOwned>(text: &str, first: Option<&'static str>) -> anyhow::Result<T> {
    let words = words(text, first)?;
    let mut read: Vec<(&str, Reading)> = Vec::new();
    for word in &words {
        read.push((word.key.as_str(), Reading::Text(String::new())));
        let last = read.len() - 1;
        let mut best: Option<(Fit, Reading)> = None;
        for reading in word.readings() {
            read[last].1 = reading;
            let fit = Fit::of(attempt::<T>(&read).as_ref().err());
            if best.as_ref().is_none_or(|(best, _)| fit < *best) {
                best = Some((fit, read[last].1.clone()));
            }
        }
        let Some((fit, reading)) = best else { unreachable!("every word has a text reading") };
        read[last].1 = reading;
        if let (Fit::BadValue | Fit::BadType, Err(error)) = (fit, attempt::<T>(&read)) {
            return Err(blame(word, error));
        }
    }
    attempt(&read).map_err(explain)
}

/// Escapes a value for use after `KEY=`: doubles each comma.
pub fn escaped(value: &str) -> String {
    value.replace(',', ",,")
}

/// Puts the refused word in front of the error, unless the sentence already names it.
fn blame(word: &Word, refusal: Refusal) -> anyhow::Error {
    let key = matches!(refusal.kind, Kind::Key);
    let sentence = explain(refusal).to_string();
    if key || sentence.contains(&format!("`{}`", word.text)) {
        return anyhow!(sentence);
    }
    anyhow!("`{}`: {sentence}", word.text)
}

fn attempt<T: DeserializeOwned>(read: &[(&str, Reading)]) -> Result<T, Refusal> {
    T::deserialize(MapDeserializer::new(read.iter().map(|(key, reading)| (*key, reading))))
}

/// The result of a reading, best first.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Fit {
    /// The words so far are valid.
    Good,
    /// The struct's own check refused it, perhaps because later words are still missing.
    Unsure,
    /// The type is right; the value or the key is not.
    BadValue,
    BadType,
}

impl Fit {
    fn of(refusal: Option<&Refusal>) -> Self {
        match refusal.map(|refusal| &refusal.kind) {
            None | Some(Kind::Missing) => Self::Good,
            Some(Kind::Other) => Self::Unsure,
            Some(Kind::Key | Kind::Value) => Self::BadValue,
            Some(Kind::Type) => Self::BadType,
        }
    }
}

/// A word of the text, with single commas.
struct Word {
    key: String,
    value: String,
    /// The whole word, for errors.
    text: String,
}

impl Word {
    /// The possible readings of the value, the narrowest first. The text itself is always the last.
    fn readings(&self) -> impl Iterator<Item = Reading> {
        let narrow = match self.value.as_str() {
            "true" | "on" => Some(Reading::Bool(true)),
            "false" | "off" => Some(Reading::Bool(false)),
            text => number(text),
        };
        narrow.into_iter().chain([Reading::Text(self.value.clone())])
    }
}

/// `text` as a number, if it looks like one: decimal, `0x` hexadecimal, or a fraction.
fn number(text: &str) -> Option<Reading> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    if let Some(hex) = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X")) {
        let plain = hex.bytes().all(|digit| digit.is_ascii_hexdigit());
        return plain.then(|| u64::from_str_radix(hex, 16).ok()).flatten().map(Reading::Unsigned);
    }
    let unsigned = text.parse().ok().map(Reading::Unsigned);
    let signed = || text.parse().ok().map(Reading::Signed);
    unsigned.or_else(signed).or_else(|| text.parse().ok().map(Reading::Float))
}

/// Cuts `text` into words. Refuses empty words and keys, and keys that are given twice.
fn words(text: &str, first: Option<&str>) -> anyhow::Result<Vec<Word>> {
    let mut words: Vec<Word> = Vec::new();
    for (index, word) in split(text).into_iter().enumerate() {
        ensure!(!word.is_empty(), "`{text}` has an empty word (write a comma in a value as `,,`)");
        let (key, value) = match (word.split_once('='), first) {
            (Some((key, value)), _) => (key, value),
            (None, Some(key)) if index == 0 => (key, word.as_str()),
            (None, _) => (word.as_str(), "true"),
        };
        ensure!(!key.is_empty(), "`{word}` has no key before its `=`");
        if words.iter().any(|other| other.key == key) {
            bail!("the key `{key}` is given twice in `{text}`");
        }
        words.push(Word { key: key.to_owned(), value: value.to_owned(), text: word });
    }
    // The tag decides which other keys exist, so it comes before them.
    words.sort_by_key(|word| Some(word.key.as_str()) != first);
    Ok(words)
}

/// Splits at single commas. A doubled comma is a comma within the word.
fn split(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = text.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == ',' && letters.next_if_eq(&',').is_none() {
            words.push(String::new());
        } else if let Some(word) = words.last_mut() {
            word.push(letter);
        }
    }
    words
}

/// A typed interpretation of a value.
#[derive(Clone)]
enum Reading {
    Bool(bool),
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Text(String),
}

impl<'de> IntoDeserializer<'de, Refusal> for &Reading {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for &Reading {
    type Error = Refusal;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refusal> {
        match self {
            Reading::Bool(value) => visitor.visit_bool(*value),
            Reading::Unsigned(value) => visitor.visit_u64(*value),
            Reading::Signed(value) => visitor.visit_i64(*value),
            Reading::Float(value) => visitor.visit_f64(*value),
            Reading::Text(value) => visitor.visit_str(value),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Refusal> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _name: &'static str,
        visitor: V,
    ) -> Result<V::Value, Refusal> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _name: &'static str,
        _variants: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Refusal> {
        match self {
            Reading::Text(variant) => visitor.visit_enum(variant.as_str().into_deserializer()),
            // The visitor refuses it, and its error names the expected type.
            _ => self.deserialize_any(visitor),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier ignored_any
    }
}

/// The error of a struct that refuses the words.
#[derive(Debug)]
struct Refusal {
    kind: Kind,
    sentence: String,
}

#[derive(Debug, Clone, Copy)]
enum Kind {
    Missing,
    Key,
    Type,
    Value,
    Other,
}

impl Refusal {
    fn new(kind: Kind, sentence: impl fmt::Display) -> Self {
        Self { kind, sentence: sentence.to_string() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

impl std::error::Error for Refusal {}

impl de::Error for Refusal {
    fn custom<T: fmt::Display>(sentence: T) -> Self {
        Self::new(Kind::Other, sentence)
    }

    fn invalid_type(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(Kind::Type, format_args!("invalid type: {found}, expected {expected}"))
    }

    fn invalid_value(found: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::new(Kind::Value, format_args!("invalid value: {found}, expected {expected}"))
    }

    fn unknown_variant(variant: &str, known: &'static [&'static str]) -> Self {
        Self::new(Kind::Value, Self::unlike("variant", variant, known))
    }

    fn unknown_field(field: &str, known: &'static [&'static str]) -> Self {
        Self::new(Kind::Key, Self::unlike("field", field, known))
    }

    fn missing_field(field: &'static str) -> Self {
        Self::new(Kind::Missing, format_args!("missing field `{field}`"))
    }
}

impl Refusal {
    /// Uses serde's wording, so that [`explain`] has to parse only one.
    fn unlike(what: &str, word: &str, known: &[&str]) -> String {
        let known: Vec<String> = known.iter().map(|known| format!("`{known}`")).collect();
        format!("unknown {what} `{word}`, expected one of {}", known.join(", "))
    }
}

/// Rewrites a serde error as one sentence for the user, with the nearest known key.
///
/// The wording of serde ("unknown field `x`, expected one of `a`, `b`") is the only interface of
/// `serde_json` errors. An unknown wording stays as it is.
pub fn explain(error: impl std::error::Error) -> anyhow::Error {
    let sentence = error.to_string();
    let better = if let Some(rest) = sentence.strip_prefix("unknown field `") {
        unlike("key", rest)
    } else if let Some(rest) = sentence.strip_prefix("unknown variant `") {
        unlike("value", rest)
    } else {
        let missing = sentence.strip_prefix("missing field `");
        missing.map(|rest| format!("missing key `{rest}")).or_else(|| misfit(&sentence))
    };
    anyhow!(better.unwrap_or(sentence))
}

/// Rewrites "invalid type: string "x", expected u32 at line 1" as the value and a plain description
/// of the expected type.
fn misfit(sentence: &str) -> Option<String> {
    let rest = sentence.strip_prefix("invalid type: ");
    let rest = rest.or_else(|| sentence.strip_prefix("invalid value: "))?;
    let (found, rest) = rest.split_once(", expected ")?;
    let (wanted, place) = rest.split_at(rest.find(" at line ").unwrap_or(rest.len()));
    let wanted = match wanted {
        "u8" => "a whole number from 0 to 255",
        "u16" => "a whole number from 0 to 65535",
        "u32" => "a whole number from 0 to 4294967295",
        "u64" | "usize" => "a whole number, 0 or more",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "internally tagged enum Config" => "an object with a `kind`",
        "struct Config" => "an object with a `path`",
        other => other,
    };
    // `string "x"` and "integer `1`" contain the value in quotes, `map` contains no value.
    let value = found.split_once(['"', '`']).map(|(_, rest)| rest.trim_end_matches(['"', '`']));
    Some(match value {
        Some(value) => format!("`{value}` is not {wanted}{place}"),
        None => format!("found {found}, expected {wanted}{place}"),
    })
}

/// `rest` follows serde's "unknown field `": the word, the known words, and in JSON the position.
fn unlike(what: &str, rest: &str) -> Option<String> {
    let (word, rest) = rest.split_once('`')?;
    let mut known: Vec<&str> = rest.split('`').collect();
    let place = known.pop().and_then(|end| end.find(" at line ").map(|at| &end[at..]));
    let place = place.unwrap_or_default();
    // Every second part is a known word; the others are separators.
    let known: Vec<&str> = known.into_iter().skip(1).step_by(2).collect();
    let list = match known.as_slice() {
        [] => "none is allowed here".to_owned(),
        known => format!("known: `{}`", known.join("`, `")),
    };
    Some(match nearest(word, &known) {
        Some(near) => format!("unknown {what} `{word}`: did you mean `{near}`? ({list}){place}"),
        None => format!("unknown {what} `{word}` ({list}){place}"),
    })
}

/// The word of `known` of which `word` is most likely a misspelling, if one is near enough.
///
/// Near means at most one edit per three letters. An edit adds, removes or replaces a letter, or
/// swaps two neighbors.
pub fn nearest<'a>(word: &str, known: &[&'a str]) -> Option<&'a str> {
    let wanted = letters(word);
    let near = |known: &&'a str| {
        let (edits, length) = (
            edit_distance(&wanted, &letters(known)),
            word.chars().count().max(known.chars().count()),
        );
        (edits <= length / 3).then_some((edits, *known))
    };
    known.iter().filter_map(near).min_by_key(|(edits, _)| *edits).map(|(_, known)| known)
}

/// The letters of a word in lower case.
fn letters(word: &str) -> Vec<char> {
    word.chars().flat_map(char::to_lowercase).collect()
}

/// The number of edits between two words. A swap of neighbors is one edit ("optimal string
/// alignment").
pub fn edit_distance(from: &[char], to: &[char]) -> usize {
    let (mut before, mut last) = (Vec::new(), (0..=to.len()).collect::<Vec<_>>());
    for row in 1..=from.len() {
        let mut line = vec![row];
        for column in 1..=to.len() {
            let other = usize::from(from[row - 1] != to[column - 1]);
            let least = (last[column - 1] + other).min(last[column] + 1).min(line[column - 1] + 1);
            let swapped = row > 1
                && column > 1
                && from[row - 1] == to[column - 2]
                && from[row - 2] == to[column - 1];
            line.push(if swapped { least.min(before[column - 2] + 1) } else { least });
        }
        before = std::mem::replace(&mut last, line);
    }
    last[to.len()]
}

#[cfg(test)]
mod test;
