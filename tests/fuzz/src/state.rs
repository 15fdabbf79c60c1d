//! Machines that go on from a damaged or forged state: their devices refuse it, or work with it.

use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use serde_json::{Value, json};

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
const DIGITS: &str = "0123456789abcdef";
/// More things than any device has, and more numbers than any queue has elements.
const MANY: [usize; 2] = [300, 70_000];
/// The most accesses of the guest before it is saved.
const ACCESSES: u8 = 64;

pub(crate) fn run(bench: &Bench, bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let Some(accesses) = bytes.next() else { return };
    let mut guest = Guest::new(bench, &mut bytes).open();
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
    let mut guest = Guest::new(bench, bytes);
    while guest.step() {}
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
}

/// Goes down to some part of the state, and changes it. Returns None if the bytes are used up.
pub(crate) fn change(value: &mut Value, bytes: &mut dyn Iterator<Item = u8>) -> Option<()> {
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
            replace(other, which);
            Some(())
        }
    }
}

fn replace(value: &mut Value, which: usize) {
    match value {
        _ if which % 32 == 31 => *value = Value::Null,
        Value::Number(_) if which % 32 == 30 => *value = json!(-1),
        Value::Number(it) => {
            let (before, edge) = (it.as_u64().unwrap_or(0), EDGES[which / 4 % EDGES.len()]);
            *value = json!(match which % 4 {
                0 => before.wrapping_add(1),
                1 => before ^ 1 << (which / 4 % 16),
                _ => edge,
            });
        }
        Value::Null => *value = json!(EDGES[which % EDGES.len()]),
        Value::Bool(it) => *it = !*it,
        // Bytes are hexadecimal digits.
        Value::String(it) if it.is_ascii() && !which.is_multiple_of(8) => {
            let at = which.min(it.len().saturating_sub(1));
            it.replace_range(at..it.len().min(at + 1), &DIGITS[which % 16..][..1]);
        }
        Value::String(it) => *it = it.chars().take(which / 8).collect(),
        Value::Array(all) => match (which % 4, all.last().cloned()) {
            (0, _) | (_, None) => all.clear(),
            (1, _) => all.truncate(all.len() - 1),
            (2, Some(last)) => all.push(last),
            (_, Some(last)) => all.resize(MANY[usize::from(last.is_number())], last),
        },
        Value::Object(all) => {
            if let Some(key) = all.keys().nth(which % all.len().max(1)).cloned() {
                all.remove(&key);
            }
        }
    }
}
