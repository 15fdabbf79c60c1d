//! Tests of `keyvalue`.

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
fn parses_the_same_structs_as_json() {
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
fn reads_a_number_as_text_for_text_fields() {
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
fn validates_a_struct_after_reading_all_keys() {
    let read = |text| parse::<Cpus>(text, Some("count"));
    assert_eq!(read("4,sockets=1,cores=2,threads=2").unwrap(), Cpus { count: 4 });
    assert_eq!(read("4,label=5,sockets=4").unwrap(), Cpus { count: 4 });
    let error = read("4,sockets=1,cores=2").unwrap_err().to_string();
    assert_eq!(error, "4 CPUs in a layout of 2");
}

#[test]
fn reads_a_doubled_comma_as_a_literal_comma() {
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
fn refuses_empty_and_repeated_words() {
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
fn refuses_values_of_another_type_and_names_the_key() {
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
fn escaped_text_reads_back() {
    for value in ["a", ",", "a,b,,c", ",,,", "a=b,limit=5"] {
        assert_eq!(split(&escaped(value)), [value]);
    }
}

#[test]
fn explains_json_errors_in_the_same_words() {
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
fn any_text_gives_a_value_or_an_error() {
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
