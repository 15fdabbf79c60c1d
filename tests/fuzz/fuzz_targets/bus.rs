//! Accesses made of arbitrary bytes, to a board with a device of every kind, which is then parked,
//! run on, and reset.
#![no_main]

#[path = "../../../devices/tests/every_kind/mod.rs"]
mod every_kind;

use std::sync::LazyLock;

use devices::registry::KINDS;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use libfuzzer_sys::fuzz_target;
use tempfile::TempDir;

static FOLDER: LazyLock<TempDir> = LazyLock::new(|| tempfile::tempdir().expect("a folder"));

fuzz_target!(|bytes: &[u8]| {
    let mut bench = Bench::new(1 << 16);
    for kind in KINDS {
        every_kind::add(&mut bench, kind, FOLDER.path());
    }
    bench.board.run(Vec::new()).expect("power-on");
    // The first byte says where firmware would have come in.
    let Some((firmware, bytes)) = bytes.split_first() else { return };
    let mut guest = Guest::new(&bench, bytes.iter().copied());
    let before = (0..*firmware).all(|_| guest.step());
    if before {
        let mut guest = guest.open();
        while guest.step() {}
    }
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
    bench.board.reset().expect("power-on again");
});
