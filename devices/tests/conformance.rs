//! Requirements for devices of every kind: they survive any access, can be parked and run again
//! unchanged, reset to the power-on state, and leave nothing behind.

mod every_kind;

use std::time::{Duration, Instant};

use devices::device::{Kind, Saved};
use devices::grants::Claim;
use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use host::testutil::in_time;
use host::testutil::noise::Noise;
use serde_json::{Value, json};

/// Number of accesses to each device.
const ACCESSES: usize = 50_000;

/// Limit for a single access, generous because the test machine may be busy.
const MAX_ACCESS_TIME: Duration = Duration::from_secs(1);

/// Registers with which firmware places regions that have no BAR: kind, offset in configuration
/// space, value.
const FIRMWARE: &[(&str, u64, u32)] = &[("lpc", 0x40, 0x601), ("lpc", 0x44, 0x80)];

/// Values that change by themselves while a device runs: kind, and JSON pointer into its state.
const CLOCKS: &[(&str, &str)] = &[
    ("hpet", "/count"),
    ("hpet", "/seen"),
    ("hpet", "/timers/0/comparator"),
    ("hpet", "/timers/1/comparator"),
    ("hpet", "/timers/2/comparator"),
    ("lpc", "/device/pm/timer"),
    ("lpc", "/device/pm/overflow"),
];

/// State that outlives a reset: kind, and JSON pointer into its state.
const KEPT: &[(&str, &str)] = &[("tpm", "/presence")];

/// A running bench with one device of this kind.
fn bench(kind: &str, folder: &tempfile::TempDir) -> Bench {
    let mut bench = Bench::new(1 << 20);
    every_kind::add(&mut bench, kind, folder.path());
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// A bench after many accesses.
fn tormented(kind: &str, folder: &tempfile::TempDir, seed: u64) -> Bench {
    in_time(MAX_ACCESS_TIME, format_args!("an access of seed {seed} to `{kind}`"), || {
        let bench = bench(kind, folder);
        (torment(&bench, seed, kind), bench)
    })
}

/// Runs random accesses and returns the duration of the slowest.
fn torment(bench: &Bench, seed: u64, kind: &str) -> Duration {
    let mut guest = Guest::new(bench, Noise::new(seed));
    let mut slowest = Duration::ZERO;
    for access in 0..ACCESSES {
        // The second half opens the registers, which only few random accesses reach before.
        if access == ACCESSES / 2 {
            guest = guest.open();
            assign_regions(bench, kind);
        }
        let start = Instant::now();
        guest.step();
        slowest = slowest.max(start.elapsed());
    }
    slowest
}

fn assign_regions(bench: &Bench, kind: &str) {
    let claims = bench.board.claims().flat_map(|(_, claims)| claims);
    let function = claims.into_iter().find_map(|claim| match claim {
        Claim::Pci(at, _) => Some(at.config()),
        _ => None,
    });
    for (_, register, value) in FIRMWARE.iter().filter(|it| it.0 == kind) {
        let at = function.expect("a function has configuration space") + register;
        bench.write(Kind::Config, at, &value.to_le_bytes());
    }
}

/// The pins that are high.
fn high(bench: &Bench) -> Vec<u32> {
    (0..24).filter(|gsi| bench.hypervisor.pins.is_high(*gsi)).collect()
}

/// The state without the values that change by themselves.
fn without_clocks(kind: &str, saved: &[(String, Saved)]) -> Value {
    without(CLOCKS, kind, serde_json::to_value(&saved[0].1).unwrap())
}

/// The state without the values of a list.
fn without(list: &[(&str, &str)], kind: &str, mut state: Value) -> Value {
    for (_, pointer) in list.iter().filter(|it| it.0 == kind) {
        let value = state.pointer_mut(pointer);
        *value.unwrap_or_else(|| panic!("`{kind}` has nothing at {pointer}")) = Value::Null;
    }
    state
}

/// The first difference of two states.
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

/// Runs accesses, waits, parks the device, runs it in a new bench and returns the first difference.
fn moved(kind: &str, seed: u64, wait: Duration) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let old = tormented(kind, &folder, seed);
    std::thread::sleep(wait);
    let (pins, saved) = (high(&old), old.board.park());
    drop(old);
    let new = bench(kind, &folder);
    new.board.park();
    new.board.run(saved.clone()).unwrap();
    let before = json!([pins, without_clocks(kind, &saved)]);
    let after = json!([high(&new), without_clocks(kind, &new.board.park())]);
    difference(&before, &after, "")
}

#[test]
fn a_parked_device_continues_unchanged_in_another_machine() {
    for kind in KINDS {
        for seed in 0..8 {
            // A worker may be busy when the device is parked and continue afterwards, so the test
            // waits, and waits longer after a difference. A real loss shows every time.
            let waits = [2, 10, 50, 250, 1000].map(Duration::from_millis);
            let differs: Vec<_> = waits.into_iter().map_while(|it| moved(kind, seed, it)).collect();
            assert!(
                differs.len() < waits.len(),
                "`{kind}`, seed {seed}: if that is a clock, see CLOCKS: {differs:?}"
            );
        }
    }
}

#[test]
fn a_reset_restores_the_power_on_state() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let new = bench(kind, &folder).board.park();
        let used = tormented(kind, &folder, 10);
        used.board.reset().unwrap();
        assert_eq!(high(&used), [0; 0], "pins that a reset of `{kind}` left high");
        let [new, used] =
            [new, used.board.park()].map(|saved| without(KEPT, kind, without_clocks(kind, &saved)));
        let differs = difference(&new, &used, "");
        assert_eq!(differs, None, "`{kind}`: new, and after a reset");
    }
}

#[test]
fn a_removed_device_leaves_nothing_behind() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = tormented(kind, &folder, 20);
        let host = bench.hypervisor.clone();
        drop(bench);
        let gone = Bench { hypervisor: host, ..Bench::new(4096) };
        assert_eq!(high(&gone), [0; 0], "pins that `{kind}` left high");
        assert_eq!(gone.hypervisor.bells(), [], "doorbells that `{kind}` left");
        assert_eq!(*gone.hypervisor.mapped.lock().unwrap(), [], "memory that `{kind}` left");
    }
}

/// All states with one damaged value. A few elements of long arrays are enough.
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
fn a_damaged_state_is_refused_or_tolerated() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = tormented(kind, &folder, 30);
        let saved = serde_json::to_value(bench.board.park()).unwrap();
        let mut refused = 0;
        for state in damaged(&saved[0][1]) {
            let damaged = json!([[saved[0][0], state]]);
            let ran = bench.board.run(serde_json::from_value(damaged).unwrap());
            refused += u32::from(ran.is_err());
            let mut guest = Guest::new(&bench, Noise::new(31));
            assert!((0..100).all(|_| guest.step()));
            bench.board.park();
        }
        let has_state = !saved[0][1].is_null();
        assert!(refused > 0 || !has_state, "`{kind}` accepts every damaged state");
        bench.board.run(Vec::new()).unwrap();
    }
}
