//! Chips, each alone on a board. A hostile guest accesses their registers, and the host sends input
//! and presses the power button.

use std::path::Path;

use devices::device::Kind;
use devices::testutil::Bench;
use devices::testutil::hostile::Guest;
use host::input::{Key, Motion};

use crate::every_kind;

/// A chip, and how to check that it works.
pub(crate) struct Chip {
    kind: &'static str,
    /// Prepares the chip as firmware does.
    begin: fn(&Bench),
    /// Registers that must have the same values after every reset.
    look: fn(&Bench) -> Vec<u8>,
    /// Checks the chip's files.
    check: fn(&Path),
}

/// Firmware's flash memory. The guest's reads do not reach the device.
pub(crate) const FLASH: Chip =
    Chip { kind: "flash", begin: |_| (), look: |_| Vec::new(), check: images };

/// Timers: checks the capabilities, and that the counter is off.
pub(crate) const HPET: Chip = Chip {
    kind: "hpet",
    begin: |_| (),
    look: |bench| {
        let at = |offset: u64| bench.read::<8>(Kind::Memory, 0xfed0_0000 + offset);
        [at(0), at(0x10), at(0x20), at(0xf0)].concat()
    },
    check: |_| (),
};

/// Checks the bits for halted and valid in registers B and D.
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

/// Checks the self-tests of the controller and of its first port.
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

/// Power management in the LPC bridge: checks enables and control.
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

/// The I/O address of the power management block.
const BLOCK: u16 = 0x600;

/// Sets PMBASE and ACPI_CNTL of the LPC bridge, function 31.0.
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

/// Runs a chip from power-on to its end. A reset must bring back the power-on state.
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

/// Actions of the host between the guest's accesses.
fn host(bench: &Bench, what: u8, value: u8) {
    let number = i32::from(value) - 128;
    match what {
        0..100 => {
            if let Some(key) = Key::new(u16::from(value)) {
                bench.board.shared.input.key(key, what & 1 == 0);
            }
        }
        100..160 => {
            let motion = Motion { dx: number << (what % 24), dy: -number, ..Motion::default() };
            bench.board.shared.input.motion(motion);
        }
        160..200 => {
            bench.board.shared.buttons.press();
        }
        200..230 => {
            let saved = bench.board.park();
            bench.board.run(saved).expect("what was just saved");
        }
        230..240 => bench.board.reset().expect("power-on again"),
        _ => bench.events.lock().expect("no panic").clear(),
    }
}
