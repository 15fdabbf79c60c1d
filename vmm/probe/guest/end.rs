//! Ends a run: `then=poweroff`, `reset`, `keyboard`, `acpi`, `triple`, `beats`, `deaf`, or (the
//! default) `halt`.
use core::fmt::Write as _;
use core::hint::spin_loop;
use core::sync::atomic::{AtomicU32, Ordering};

use crate::acpi::Table;
use crate::console::Console;
use crate::gate;
use crate::input::route;
use crate::io::{in16, out8, out16, read8, read64, tsc};
use crate::start::{Start, Words};

/// PM1_CNT: SLP_EN with sleep type 0, which is S5.
const SLEEP: u16 = 0x2000;
/// The power button in PM1_STS and PM1_EN, and its interrupt line.
const BUTTON: u16 = 1 << 8;
const LINE: u32 = 9;

/// The reset register of ACPI: port and value; 0 if there is none.
static ACPI_RESET: AtomicU32 = AtomicU32::new(0);

/// Finds the reset register in the FADT (ACPI 6.5, 4.8.3.6).
pub(crate) fn find_reset(start: &Start) {
    const IO_SPACE: u8 = 1;
    let Some(fadt) = Table::find(start, *b"FACP").filter(|fadt| fadt.length > 128) else { return };
    let (port, value) = (read64(fadt.address + 120), read8(fadt.address + 128));
    if read8(fadt.address + 116) == IO_SPACE && port <= 0xffff {
        ACPI_RESET.store(u32::from(value) << 16 | port as u32, Ordering::Relaxed);
    }
}

pub(crate) fn end(words: Words, pm_base: u16) -> ! {
    match words.get("then") {
        Some("poweroff") => out16(pm_base + 4, SLEEP),
        Some("reset") => out8(0xcf9, 6),
        Some("keyboard") => out8(0x64, 0xfe),
        Some("acpi") => {
            let reset = ACPI_RESET.load(Ordering::Relaxed);
            out8(reset as u16, (reset >> 16) as u8);
        }
        Some("triple") => gate::triple_fault(),
        Some("beats") => beat(),
        _ => {}
    }
    gate::halt()
}

/// Prints tildes endlessly, so that the first moment is seen in which a saved machine goes on.
fn beat() -> ! {
    /// About a tenth of a millisecond.
    const CYCLES: u64 = 1 << 18;

    let mut console = Console::open();
    loop {
        console.write_str("~").ok();
        let start = tsc();
        while tsc().wrapping_sub(start) < CYCLES {
            spin_loop();
        }
    }
}

/// The power button, with interrupts enabled.
#[derive(Clone, Copy)]
pub(crate) struct Button(u16);

impl Button {
    pub(crate) fn open(pm_base: u16) -> Self {
        route(LINE);
        out16(pm_base + 2, BUTTON);
        Self(pm_base)
    }

    /// Powers off if the button was pressed.
    pub(crate) fn poll(self) {
        if in16(self.0) & BUTTON != 0 {
            out16(self.0, BUTTON);
            out16(self.0 + 4, SLEEP);
        }
    }
}
