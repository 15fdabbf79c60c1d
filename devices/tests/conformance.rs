//! What holds for a device of any kind: it takes whatever a guest does, parks, runs on as it was,
//! comes back to power-on, and leaves nothing behind.

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

/// Accesses per device.
const ACCESSES: usize = 50_000;

/// No access may take as long, unless the machine that tests is busy with others just then.
const SLOWEST: Duration = Duration::from_secs(1);

/// What firmware writes into the configuration space of a kind to place what no BAR does.
const FIRMWARE: &[(&str, u64, u32)] = &[("lpc", 0x40, 0x601), ("lpc", 0x44, 0x80)];

/// What goes on by itself while a device runs: kinds, and where their state holds it.
const CLOCKS: &[(&str, &str)] = &[
    ("hpet", "/count"),
    ("hpet", "/seen"),
    ("hpet", "/timers/0/comparator"),
    ("hpet", "/timers/1/comparator"),
    ("hpet", "/timers/2/comparator"),
    ("lpc", "/device/pm/timer"),
    ("lpc", "/device/pm/overflow"),
];

/// A device of this kind alone, running.
fn bench(kind: &str, folder: &tempfile::TempDir) -> Bench {
    let mut bench = Bench::new(1 << 20);
    every_kind::add(&mut bench, kind, folder.path());
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// The same after many accesses.
fn tormented(kind: &str, folder: &tempfile::TempDir, seed: u64) -> Bench {
    in_time(SLOWEST, format_args!("an access of seed {seed} to `{kind}`"), || {
        let bench = bench(kind, folder);
        (torment(&bench, seed, kind), bench)
    })
}

/// How long the slowest access took.
fn torment(bench: &Bench, seed: u64, kind: &str) -> Duration {
    let mut guest = Guest::new(bench, Noise::new(seed));
    let mut slowest = Duration::ZERO;
    for access in 0..ACCESSES {
        // The second half of a function's life is its registers', which few BARs lead to before.
        if access == ACCESSES / 2 {
            guest = guest.open();
            place(bench, kind);
        }
        let start = Instant::now();
        guest.step();
        slowest = slowest.max(start.elapsed());
    }
    slowest
}

fn place(bench: &Bench, kind: &str) {
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

/// Which pins are high.
fn high(bench: &Bench) -> Vec<u32> {
    (0..24).filter(|gsi| bench.host.pins.is_high(*gsi)).collect()
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

/// What differs when a device is tormented, parked after a while, and run on in another machine.
fn moved(kind: &str, seed: u64, wait: Duration) -> Option<String> {
    let folder = tempfile::tempdir().unwrap();
    let old = tormented(kind, &folder, seed);
    std::thread::sleep(wait);
    let (pins, saved) = (high(&old), old.board.park());
    drop(old);
    let new = bench(kind, &folder);
    new.board.park();
    new.board.run(saved.clone()).unwrap();
    let before = json!([pins, still(kind, &saved)]);
    let after = json!([high(&new), still(kind, &new.board.park())]);
    difference(&before, &after, "")
}

#[test]
fn what_was_parked_runs_on_in_another_machine_as_it_was() {
    for kind in KINDS {
        for seed in 0..8 {
            // A worker may be busy when the device is parked, and goes on after it: it is given
            // time, and more if that was too short. What is lost in between is lost each time.
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
fn a_reset_is_power_on() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let new = bench(kind, &folder).board.park();
        let used = tormented(kind, &folder, 10);
        used.board.reset().unwrap();
        assert_eq!(high(&used), [0; 0], "pins that a reset of `{kind}` left high");
        let differs = difference(&still(kind, &new), &still(kind, &used.board.park()), "");
        assert_eq!(differs, None, "`{kind}`: new, and after a reset");
    }
}

#[test]
fn nothing_is_left_of_a_device_that_is_gone() {
    for kind in KINDS {
        let folder = tempfile::tempdir().unwrap();
        let bench = tormented(kind, &folder, 20);
        let host = bench.host.clone();
        drop(bench);
        let gone = Bench { host, ..Bench::new(4096) };
        assert_eq!(high(&gone), [0; 0], "pins that `{kind}` left high");
        assert_eq!(*gone.host.bells.lock().unwrap(), [], "doorbells that `{kind}` left");
        assert_eq!(*gone.host.lent.lock().unwrap(), [], "memory that `{kind}` left");
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
        assert!(refused > 0 || !has_state, "`{kind}` takes anything for its state");
        bench.board.run(Vec::new()).unwrap();
    }
}
