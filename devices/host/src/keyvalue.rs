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

/// Reads `text` into `T`. The first word, if it has no `=`, is the value of the key `first`.
///
/// # Errors
///
/// One sentence that names the word: an unknown key (with the nearest known one), a key given
/// twice, a value of the wrong type, an empty word.
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
#[must_use]
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

/// Deserializes the words with their current readings.
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
    /// The type is wrong.
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
#[must_use]
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
#[must_use]
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
#[must_use]
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
mod test {
    use std::path::PathBuf;

    use serde::{Deserialize, Serialize};

    use super::*;
    use crate::size::Size;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Rng {
        #[serde(default = "default_limit")]
        limit: usize,
    }

    fn default_limit() -> usize {
        64 << 10
    }

    #[derive(Debug, Default, PartialEq, Serialize, Deserialize)]
    #[serde(rename_all = "kebab-case")]
    enum Format {
        #[default]
        Raw,
        Qcow2,
    }

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields, rename_all = "kebab-case")]
    struct Blk {
        path: PathBuf,
        serial: Option<String>,
        #[serde(default)]
        format: Format,
        #[serde(default)]
        read_only: bool,
        queues: Option<u8>,
        size: Option<Size>,
        weight: Option<f64>,
        offset: Option<i32>,
    }

    /// The shape of the registry of devices.
    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(tag = "kind", rename_all = "kebab-case", deny_unknown_fields)]
    enum Device {
        Rng(Rng),
        VirtioBlk(Blk),
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Memory {
        size: Size,
        hugepages: Option<Size>,
        #[serde(default)]
        prealloc: bool,
    }

    #[derive(Debug, PartialEq, Deserialize)]
    #[serde(deny_unknown_fields, try_from = "Layout")]
    struct Cpus {
        count: u32,
    }

    /// Is checked as a whole: it is invalid until its last word is there.
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Layout {
        count: u32,
        #[serde(default)]
        label: String,
        sockets: Option<u32>,
        cores: Option<u32>,
        threads: Option<u32>,
    }

    impl TryFrom<Layout> for Cpus {
        type Error = String;

        fn try_from(layout: Layout) -> Result<Self, String> {
            let product = [layout.sockets, layout.cores, layout.threads]
                .into_iter()
                .map(|part| part.unwrap_or(1))
                .product::<u32>();
            let plain = layout.sockets.is_none() && layout.label.is_empty();
            (plain || product == layout.count)
                .then_some(Self { count: layout.count })
                .ok_or_else(|| format!("{} CPUs in a layout of {product}", layout.count))
        }
    }

    fn device(text: &str) -> Device {
        parse(text, Some("kind")).unwrap_or_else(|error| panic!("{text}: {error:#}"))
    }

    fn refusal(text: &str) -> String {
        parse::<Device>(text, Some("kind")).expect_err(text).to_string()
    }

    fn blk(path: &str) -> Blk {
        Blk {
            path: path.into(),
            serial: None,
            format: Format::Raw,
            read_only: false,
            queues: None,
            size: None,
            weight: None,
            offset: None,
        }
    }

    #[test]
    fn fills_the_struct_that_json_fills() {
        for (text, json) in [
            ("rng", r#"{"kind":"rng"}"#),
            ("rng,limit=4096", r#"{"kind":"rng","limit":4096}"#),
            ("limit=0x1000,kind=rng", r#"{"limit":4096,"kind":"rng"}"#),
            (
                "virtio-blk,path=a.img,format=qcow2,queues=4,read-only,size=4G",
                r#"{"kind":"virtio-blk","path":"a.img","format":"qcow2","queues":4,
                    "read-only":true,"size":"4G"}"#,
            ),
        ] {
            assert_eq!(device(text), serde_json::from_str(json).unwrap(), "{text}");
        }
    }

    #[test]
    fn reads_a_number_as_text_where_text_is_wanted() {
        let read = device("virtio-blk,path=007,serial=12,queues=12");
        let wanted = Blk { serial: Some("12".into()), queues: Some(12), ..blk("007") };
        assert_eq!(read, Device::VirtioBlk(wanted));
        let read = device("virtio-blk,serial=on,path=true");
        assert_eq!(read, Device::VirtioBlk(Blk { serial: Some("on".into()), ..blk("true") }));
    }

    #[test]
    fn reads_switches_and_all_kinds_of_numbers() {
        for (value, wanted) in [("on", true), ("true", true), ("off", false), ("false", false)] {
            let read = device(&format!("virtio-blk,path=x,read-only={value}"));
            assert_eq!(read, Device::VirtioBlk(Blk { read_only: wanted, ..blk("x") }));
        }
        let read = device("virtio-blk,path=x,size=4096,weight=1.5,offset=-7,queues=0x10");
        let wanted = Blk {
            size: Some(Size(4096)),
            weight: Some(1.5),
            offset: Some(-7),
            queues: Some(16),
            ..blk("x")
        };
        assert_eq!(read, Device::VirtioBlk(wanted));
    }

    #[test]
    fn reads_plain_structs_with_and_without_a_first_key() {
        let gib = |count: u64| Size(count << 30);
        let memory: Memory = parse("4G,hugepages=2M,prealloc", Some("size")).unwrap();
        let wanted = Memory { size: gib(4), hugepages: Some(Size(2 << 20)), prealloc: true };
        assert_eq!(memory, wanted);
        let memory: Memory = parse("prealloc,size=1073741824", None).unwrap();
        assert_eq!(memory, Memory { size: gib(1), hugepages: None, prealloc: true });
    }

    #[test]
    fn judges_a_whole_only_when_all_words_are_there() {
        let read = |text| parse::<Cpus>(text, Some("count"));
        assert_eq!(read("4,sockets=1,cores=2,threads=2").unwrap(), Cpus { count: 4 });
        assert_eq!(read("4,label=5,sockets=4").unwrap(), Cpus { count: 4 });
        let error = read("4,sockets=1,cores=2").unwrap_err().to_string();
        assert_eq!(error, "4 CPUs in a layout of 2");
    }

    #[test]
    fn takes_a_doubled_comma_as_a_comma_of_the_word() {
        let path = |text: &str| match device(&format!("virtio-blk,path={text}")) {
            Device::VirtioBlk(blk) => blk.path.to_str().unwrap().to_owned(),
            Device::Rng(rng) => panic!("{rng:?}"),
        };
        assert_eq!(path("a,,b"), "a,b");
        assert_eq!(path("a,,,read-only"), "a,");
        assert_eq!(path(",,,,"), ",,");
        assert_eq!(path("a=b"), "a=b");
        assert_eq!(path(""), "");
    }

    #[test]
    fn refuses_words_that_say_nothing() {
        for text in ["", "rng,", ",rng", "rng,limit=1,"] {
            assert!(refusal(text).contains("has an empty word"), "{text}");
        }
        assert_eq!(refusal("rng,=4"), "`=4` has no key before its `=`");
        let twice = "the key `limit` is given twice in `rng,limit=1,limit=2`";
        assert_eq!(refusal("rng,limit=1,limit=2"), twice);
        assert_eq!(refusal("rng,kind=rng"), "the key `kind` is given twice in `rng,kind=rng`");
    }

    #[test]
    fn refuses_unknown_keys_and_names_the_nearest() {
        assert_eq!(
            refusal("rng,limti=4096"),
            "unknown key `limti`: did you mean `limit`? (known: `limit`)"
        );
        assert_eq!(refusal("rng,colour=red"), "unknown key `colour` (known: `limit`)");
        assert_eq!(
            refusal("rngg"),
            "unknown value `rngg`: did you mean `rng`? (known: `rng`, `virtio-blk`)"
        );
        assert_eq!(
            refusal("virtio-blk,path=x,format=qcow3"),
            "`format=qcow3`: unknown value `qcow3`: did you mean `qcow2`? (known: `raw`, `qcow2`)"
        );
        assert_eq!(refusal("limit=4"), "missing key `kind`");
        assert_eq!(refusal("virtio-blk,read-only"), "missing key `path`");
    }

    #[test]
    fn refuses_values_of_another_type_and_names_the_word() {
        for (text, sentence) in [
            ("rng,limit=lots", "`limit=lots`: `lots` is not a whole number, 0 or more"),
            ("rng,limit", "`limit`: `true` is not a whole number, 0 or more"),
            ("rng,limit=-1", "`limit=-1`: `-1` is not a whole number, 0 or more"),
            ("virtio-blk,path=x,queues=300", "`queues=300`: `300` is not"),
            ("virtio-blk,path=x,read-only=1", "`read-only=1`: `1` is not true or false"),
            ("virtio-blk,path=x,size=4 gigs", "`4 gigs` is not a size: the unit ` gigs`"),
        ] {
            let error = refusal(text);
            assert!(error.starts_with(sentence), "{error}");
        }
    }

    #[test]
    fn what_is_escaped_reads_back() {
        for value in ["a", ",", "a,b,,c", ",,,", "a=b,limit=5"] {
            assert_eq!(split(&escaped(value)), [value]);
        }
    }

    #[test]
    fn explains_errors_of_json_in_the_same_words() {
        let explained = |json| explain(serde_json::from_str::<Device>(json).unwrap_err());
        assert_eq!(
            explained(r#"{"kind":"rng","limti":4096}"#).to_string(),
            "unknown key `limti`: did you mean `limit`? (known: `limit`)"
        );
        let plain = |json| explain(serde_json::from_str::<Memory>(json).unwrap_err()).to_string();
        assert_eq!(
            plain(r#"{"size":4096,"preallocate":true}"#),
            "unknown key `preallocate`: did you mean `prealloc`? \
             (known: `size`, `hugepages`, `prealloc`) at line 1 column 26"
        );
        assert_eq!(plain("{}"), "missing key `size` at line 1 column 2");
        let passed_through = "invalid length 0, expected struct Memory with 3 elements";
        assert!(plain("[]").starts_with(passed_through));
    }

    #[test]
    fn ends_in_a_sentence_whatever_the_text() {
        let parts = ["rng", "limit", "kind", "path", "=", ",", ",,", "0x", "-", "9", "1e999", "`é"];
        let (mut state, mut accepted) = (1_u64, 0);
        for _ in 0..20_000 {
            let mut text = String::new();
            for _ in 0..state % 9 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(99);
                text.push_str(parts[usize::try_from((state >> 33) % 12).unwrap()]);
            }
            state = state.wrapping_add(0x9e37_79b9);
            match parse::<Device>(&text, Some("kind")) {
                Ok(_) => accepted += 1,
                Err(error) => assert!(!error.to_string().is_empty(), "{text}"),
            }
        }
        assert!(accepted > 0, "some of them are right");
    }

    #[test]
    fn finds_the_nearest_word_or_none() {
        let known = ["memory", "cpus", "kernel", "cmdline", "serial"];
        for (word, near) in [
            ("memroy", "memory"),
            ("mem0ry", "memory"),
            ("cpu", "cpus"),
            ("Kernel", "kernel"),
            ("cmd-line", "cmdline"),
            ("searial", "serial"),
        ] {
            assert_eq!(nearest(word, &known), Some(near), "{word}");
        }
        for word in ["", "x", "mmoorry", "disk", "kind"] {
            assert_eq!(nearest(word, &known), None, "{word}");
        }
        assert_eq!(nearest("memory", &[]), None);
    }

    #[test]
    fn counts_a_swap_as_one_edit() {
        for (from, to, count) in [
            ("", "abc", 3),
            ("abc", "abc", 0),
            ("ab", "ba", 1),
            ("kitten", "sitting", 3),
            ("é", "e", 1),
        ] {
            assert_eq!(edit_distance(&letters(from), &letters(to)), count, "{from} {to}");
            assert_eq!(edit_distance(&letters(to), &letters(from)), count, "{to} {from}");
        }
    }
}
