//! Chips, each alone on a board, under a guest that does anything to its registers, and a host that
//! types and presses.

use std::path::Path;

use devices::device::Kind;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use host::input::{Key, Motion};

use crate::every_kind;

/// A chip, and how to see that it works.
pub(crate) struct Chip {
    kind: &'static str,
    /// Done first, as firmware does.
    begin: fn(&Bench),
    /// What a driver sees right after power-on, whatever was before.
    look: fn(&Bench) -> Vec<u8>,
    /// Its files are in order.
    check: fn(&Path),
}

/// Firmware's flash memory. Reads do not come to it.
pub(crate) const FLASH: Chip =
    Chip { kind: "flash", begin: |_| (), look: |_| Vec::new(), check: images };

/// Timers: the capabilities, and that the counter is off.
pub(crate) const HPET: Chip = Chip {
    kind: "hpet",
    begin: |_| (),
    look: |bench| {
        let at = |offset: u64| bench.read::<8>(Kind::Memory, 0xfed0_0000 + offset);
        [at(0), at(0x10), at(0x20), at(0xf0)].concat()
    },
    check: |_| (),
};

/// Registers B and D: not halted, and valid.
pub(crate) const RTC: Chip = Chip {
    kind: "rtc",
    begin: |_| (),
    look: |bench| {
        let register = |number| {
            bench.write(Kind::Port, 0x70, &[number]);
            bench.read::<1>(Kind::Port, 0x71)[0]
        };
        vec![register(0x0b), register(0x0d)]
    },
    check: |_| (),
};

/// The controller's self-test and that of its first port.
pub(crate) const I8042: Chip = Chip {
    kind: "i8042",
    begin: |_| (),
    look: |bench| {
        let ask = |command| {
            bench.write(Kind::Port, 0x64, &[command]);
            bench.read::<1>(Kind::Port, 0x60)[0]
        };
        vec![ask(0xaa), ask(0xab)]
    },
    check: |_| (),
};

/// Power management, which the LPC bridge has: enables and control.
pub(crate) const PM: Chip = Chip {
    kind: "lpc",
    begin: place_block,
    look: |bench| {
        place_block(bench);
        let at = |offset| bench.read::<2>(Kind::Port, u64::from(BLOCK) + offset);
        [at(2), at(4), at(0x28), at(0x30)].concat()
    },
    check: |_| (),
};

/// Where the block of power management is put.
const BLOCK: u16 = 0x600;

/// PMBASE and ACPI_CNTL of the LPC bridge, function 31.0.
fn place_block(bench: &Bench) {
    let bridge = 31 << 15;
    bench.write(Kind::Config, bridge + 0x40, &u32::from(BLOCK | 1).to_le_bytes());
    bench.write(Kind::Config, bridge + 0x44, &[0x80]);
}

/// CODE is never written, and VARS keeps its size.
fn images(folder: &Path) {
    let read = |name| std::fs::read(folder.join("flash").join(name)).expect("an image");
    assert!(read("code").iter().all(|byte| *byte == 0x90), "CODE was written");
    assert_eq!(read("vars").len(), 0x4000);
}

/// A life of the chip. After a reset it is as after power-on.
pub(crate) fn run(chip: &Chip, folder: &Path, bytes: &[u8]) {
    let mut bench = Bench::new(1 << 16);
    every_kind::add(&mut bench, chip.kind, folder);
    bench.board.run(Vec::new()).expect("power-on");
    let fresh = (chip.look)(&bench);
    bench.board.reset().expect("power-on again");
    (chip.begin)(&bench);
    let mut deeds = bytes.iter().copied();
    while let Some(count) = deeds.next() {
        let mut guest = Guest::new(&bench, deeds.by_ref());
        if !(0..count % 64).all(|_| guest.step()) {
            break;
        }
        let Some(what) = deeds.next() else { break };
        host(&bench, what, deeds.next().unwrap_or(0));
    }
    let saved = bench.board.park();
    bench.board.run(saved).expect("what was just saved");
    bench.board.reset().expect("power-on again");
    assert_eq!((chip.look)(&bench), fresh, "the {} after a reset", chip.kind);
    drop(bench);
    (chip.check)(folder);
}

/// What people and their machine do meanwhile.
fn host(bench: &Bench, what: u8, value: u8) {
    let number = i32::from(value) - 128;
    match what {
        0..100 => {
            if let Some(key) = Key::new(u16::from(value)) {
                bench.board.input().key(key, what & 1 == 0);
            }
        }
        100..160 => {
            let motion = Motion { dx: number << (what % 24), dy: -number, ..Motion::default() };
            bench.board.input().motion(motion);
        }
        160..200 => {
            bench.board.buttons().press();
        }
        200..230 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        230..240 => bench.board.reset().expect("power-on again"),
        _ => bench.events.lock().expect("no panic").clear(),
    }
}
