//! Snapshots whose `machine.json` is damaged or forged: it is refused in a sentence, or describes a
//! machine.

use std::fs::{self, File};
use std::path::Path;
use std::sync::LazyLock;

use serde_json::{Value, json};
use vmm::config::{Checks, Config, Restore};
use vmm::run::with_snapshot;
use vmm::snapshot::{Header, Snapshot};

use crate::state::change;

/// The second line of the `machine.json` of a machine without disks. If a change of the format
/// makes it unreadable, give the format another number, and write this file anew.
const STATE: &str = include_str!("snapshot.json");
const MIB: usize = 1 << 20;
/// The memory has a mebibyte of these, and one that is empty.
const BYTE: u8 = 7;

static SAVED: LazyLock<Value> = LazyLock::new(|| {
    let mut saved: Value = serde_json::from_str(STATE).expect("JSON");
    let checksums = json!([crc32fast::hash(&[BYTE; MIB]), null]);
    saved["memory"] = json!([{ "bytes": 2 * MIB, "checksums": checksums }]);
    saved
});

/// The first byte is the number of changes of the state, the second that of the first line.
pub(crate) fn open(folder: &Path, bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut saved = SAVED.clone();
    let [changes, more] = [bytes.next(), bytes.next()].map(|it| it.unwrap_or_default() % 3);
    let changed = (0..changes).take_while(|_| change(&mut saved, &mut bytes).is_some()).count();
    let state = serde_json::to_vec(&saved).expect("JSON");
    let mut header = json!({
        "format": 1,
        "vmm": "0.1.0",
        "bytes": state.len(),
        "crc32": crc32fast::hash(&state),
        "then": "quit",
    });
    let more = (0..more).take_while(|_| change(&mut header, &mut bytes).is_some()).count();
    let machine = folder.join("machine.json");
    fs::write(&machine, [header.to_string().as_bytes(), b"\n", &state].concat()).expect("a file");
    let memory = folder.join("memory");
    // Nothing writes to it, so it is the same for all inputs.
    if !memory.exists() {
        fs::write(memory, [vec![BYTE; MIB], vec![0; MIB]].concat()).expect("a file");
    }
    Header::check(&File::open(&machine).expect("a file")).ok();
    let from = Restore { dir: folder.to_owned(), check: Checks::First, ..Restore::default() };
    let opened = Snapshot::open(&from);
    assert!(opened.is_ok() || changed + more > 0, "{:?}", opened.err());
    let Ok(snapshot) = opened else { return };
    let config = Config { restore: Some(from), ..Config::default() };
    let checked = snapshot.check(&snapshot.saved.config.memory);
    assert!(checked.is_ok() || changed > 0, "{checked:?}");
    if let Ok(config) = with_snapshot(config, Some(&snapshot)) {
        config.check().ok();
    }
}
