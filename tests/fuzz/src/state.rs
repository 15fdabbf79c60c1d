//! Machines that go on from a damaged or forged state: their devices refuse it, or work with it.

use std::path::Path;

use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use serde_json::{Value, json};

use crate::every_kind;

/// Numbers at which something ends.
const EDGES: [u64; 16] = [
    0,
    1,
    2,
    7,
    0x7f,
    0x80,
    0xff,
    0x100,
    0xfff,
    0xffff,
    0x1_0000,
    0x7fff_ffff,
    0xffff_ffff,
    1 << 32,
    u64::MAX >> 1,
    u64::MAX,
];
const DIGITS: &[u8; 16] = b"0123456789abcdef";
/// More numbers than any queue has elements, and more of other things than any device has.
const MANY: [usize; 2] = [300, 70_000];
/// The most accesses of the guest before it is saved.
const ACCESSES: u8 = 64;

pub(crate) fn run(folder: &Path, bytes: &[u8]) {
    let mut bench = Bench::new(1 << 16);
    for kind in KINDS {
        every_kind::add(&mut bench, kind, folder);
    }
    bench.board.run(Vec::new()).expect("power-on");
    let mut bytes = bytes.iter().copied();
    let Some(accesses) = bytes.next() else { return };
    let mut guest = Guest::new(&bench, &mut bytes).open();
    if !(0..accesses % ACCESSES).all(|_| guest.step()) {
        return;
    }
    let mut saved = bench.board.park();
    let Some(changes) = bytes.next() else { return };
    for _ in 0..1 + changes % 4 {
        let Some(which) = bytes.next() else { break };
        let count = saved.len();
        let state = &mut saved[usize::from(which) % count].1;
        let mut value = serde_json::to_value(&*state).expect("plain data");
        if change(&mut value, &mut bytes).is_none() {
            break;
        }
        // Every value is the state of some device.
        *state = serde_json::from_value(value).expect("a state");
    }
    if bench.board.run(saved).is_err() {
        return;
    }
    let mut guest = Guest::new(&bench, bytes);
    while guest.step() {}
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
}

/// Goes down to some part of the state, and changes it. Returns None if the bytes are used up.
fn change(value: &mut Value, bytes: &mut dyn Iterator<Item = u8>) -> Option<()> {
    let (which, stops) = (usize::from(bytes.next()?), bytes.next()?.is_multiple_of(16));
    match value {
        Value::Array(all) if !all.is_empty() && !stops => {
            let count = all.len();
            change(&mut all[which % count], bytes)
        }
        Value::Object(all) if !all.is_empty() && !stops => {
            let count = all.len();
            change(all.values_mut().nth(which % count)?, bytes)
        }
        other => {
            *other = replacement(other, which);
            Some(())
        }
    }
}

fn replacement(value: &Value, which: usize) -> Value {
    match value {
        _ if which % 32 == 31 => Value::Null,
        Value::Number(_) if which % 32 == 30 => json!(-1),
        Value::Number(it) => {
            let (before, edge) = (it.as_u64().unwrap_or(0), EDGES[which / 4 % EDGES.len()]);
            json!(match which % 4 {
                0 => before.wrapping_add(1),
                1 => before ^ 1 << (which / 4 % 16),
                _ => edge,
            })
        }
        Value::Null => json!(EDGES[which % EDGES.len()]),
        Value::Bool(it) => json!(!it),
        // Bytes are hexadecimal digits.
        Value::String(it) if it.is_ascii() && !which.is_multiple_of(8) => {
            let at = which.min(it.len().saturating_sub(1));
            let digit = [DIGITS[which % 16]];
            json!(format!(
                "{}{}{}",
                &it[..at],
                digit.escape_ascii(),
                it.get(at + 1..).unwrap_or("")
            ))
        }
        Value::String(it) => json!(it.chars().take(which / 8).collect::<String>()),
        Value::Array(all) => {
            let mut all = all.clone();
            match (which % 4, all.last().cloned()) {
                (0, _) | (_, None) => all.clear(),
                (1, _) => all.truncate(all.len() - 1),
                (2, Some(last)) => all.push(last),
                (_, Some(last)) => all.resize(MANY[usize::from(last.is_number())], last),
            }
            json!(all)
        }
        Value::Object(all) => {
            let mut all = all.clone();
            if let Some(key) = all.keys().nth(which % all.len().max(1)).cloned() {
                all.remove(&key);
            }
            json!(all)
        }
    }
}
