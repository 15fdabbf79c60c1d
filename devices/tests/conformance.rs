//! What holds for a device of any kind: it takes whatever a guest does, parks, runs on as it was,
//! comes back to power-on, and leaves nothing behind.

mod every_kind;

use std::time::{Duration, Instant};

use devices::device::Saved;
use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::{Guest, Noise};
use serde_json::Value;

/// Accesses per device.
const ACCESSES: usize = 20_000;

/// No access may take longer, however loaded the machine that tests is.
const SLOWEST: Duration = Duration::from_secs(1);

/// What goes on by itself while a device runs: kinds, and where their state holds it.
const CLOCKS: &[(&str, &str)] = &[("lpc", "/device/pm/timer"), ("lpc", "/device/pm/overflow")];

/// A device of this kind alone, running.
fn bench(kind: &str, folder: &tempfile::TempDir) -> Bench {
    let mut bench = Bench::new(1 << 20);
    every_kind::add(&mut bench, kind, folder.path());
    bench.board.run(Vec::new()).unwrap();
    bench
}

fn torment(bench: &Bench, seed: u64, kind: &str) {
    let mut guest = Guest::new(bench, Noise::new(seed));
    for access in 0..ACCESSES {
        let start = Instant::now();
        guest.step();
        let took = start.elapsed();
        assert!(took < SLOWEST, "access {access} of seed {seed} to `{kind}` took {took:?}");
    }
}

/// The state without what goes on by itself.
fn still(kind: &str, saved: &[(String, Saved)]) -> Value {
    let mut state = serde_json::to_value(&saved[0].1).unwrap();
    for (_, pointer) in CLOCKS.iter().filter(|it| it.0 == kind) {
        let clock = state.pointer_mut(pointer);
        *clock.unwrap_or_else(|| panic!("`{kind}` has no clock at {pointer}")) = Value::Null;
    }
    state
}

/// Where two states differ first.
fn difference(one: &Value, two: &Value, path: &str) -> Option<String> {
    let inner = match (one, two) {
        (Value::Object(one), Value::Object(two)) if one.len() == two.len() => {
            one.iter().find_map(|(key, it)| difference(it, two.get(key)?, &format!("{path}/{key}")))
        }
        (Value::Array(one), Value::Array(two)) if one.len() == two.len() => (0..)
            .zip(one.iter().zip(two))
            .find_map(|(at, (one, two))| difference(one, two, &format!("{path}/{at}"))),
        _ => None,
    };
    inner.or_else(|| (one != two).then(|| format!("{path}: {one} and {two}")))
}

#[test]
fn parking_and_running_on_changes_nothing() {
    for kind in KINDS {
        let mut differs = None;
        // A worker may be busy when the device is parked, and goes on after it: it is given time,
        // and more if that was too short. What is lost in between is lost each time.
        for attempt in 0..5 {
            let folder = tempfile::tempdir().unwrap();
            let bench = bench(kind, &folder);
            torment(&bench, attempt, kind);
            std::thread::sleep(Duration::from_millis(5 << (2 * attempt)));
            let first = bench.board.park();
            bench.board.run(first.clone()).unwrap();
            differs = difference(&still(kind, &first), &still(kind, &bench.board.park()), "");
            if differs.is_none() {
                break;
            }
        }
        assert_eq!(differs, None, "`{kind}`: if that is a clock, name it in CLOCKS");
    }
}

#[test]
fn a_reset_is_power_on() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let (new, used) = (bench(kind, &folder), bench(kind, &folder));
        torment(&used, 10, kind);
        used.board.reset().unwrap();
        let (new, used) = (new.board.park(), used.board.park());
        let differs = difference(&still(kind, &new), &still(kind, &used), "");
        assert_eq!(differs, None, "`{kind}`: new, and after a reset");
    }
}

#[test]
fn nothing_is_left_of_a_device_that_is_gone() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(kind, &folder);
        torment(&bench, 20, kind);
        let Bench { board, host, .. } = bench;
        drop(board);
        let high: Vec<u32> = (0..24).filter(|gsi| host.pins.is_high(*gsi)).collect();
        assert_eq!(high, [0; 0], "pins that `{kind}` left high");
        assert_eq!(*host.bells.lock().unwrap(), [], "doorbells that `{kind}` left");
    }
}

/// Every state that is `state` with one thing damaged. Of long arrays a few elements are enough.
fn damaged(state: &Value) -> Vec<Value> {
    let mut all = vec![Value::Null, (-1).into(), u64::MAX.into(), "".into(), Value::Array(vec![])];
    match state {
        Value::Object(fields) => {
            for (key, field) in fields {
                for worse in damaged(field) {
                    let mut fields = fields.clone();
                    fields[key] = worse;
                    all.push(fields.into());
                }
            }
        }
        Value::Array(items) => {
            for at in [0, 1, items.len() / 2] {
                for worse in items.get(at).map(damaged).unwrap_or_default() {
                    let mut items = items.clone();
                    items[at] = worse;
                    all.push(items.into());
                }
            }
            let end = items.len().saturating_sub(1);
            all.push(items[..end].to_vec().into());
            all.push([&items[..], &items[end..]].concat().into());
        }
        Value::String(text) if !text.is_empty() => {
            all.push(text[1..].into());
            all.push(format!("x{}", &text[1..]).into());
            all.push(text.replace(|_| true, "f").into());
        }
        _ => {}
    }
    all
}

#[test]
fn a_damaged_state_is_refused_or_borne() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = bench(kind, &folder);
        torment(&bench, 30, kind);
        let saved = serde_json::to_value(bench.board.park()).unwrap();
        let mut refused = 0;
        for state in damaged(&saved[0][1]) {
            let damaged = serde_json::json!([[saved[0][0], state]]);
            let ran = bench.board.run(serde_json::from_value(damaged).unwrap());
            refused += u32::from(ran.is_err());
            let mut guest = Guest::new(&bench, Noise::new(31));
            assert!((0..100).all(|_| guest.step()));
            bench.board.park();
        }
        assert!(refused > 0, "`{kind}` takes anything for its state");
        bench.board.run(Vec::new()).unwrap();
    }
}
