//! How a run ends: `then=poweroff`, `reset`, `triple`, `deaf`, or (the default) `halt`.
use crate::entry;
use crate::hands::route;
use crate::io::{in16, out8, out16};
use crate::start::Words;

/// PM1_CNT: SLP_EN with sleep type 0, which is S5.
const SLEEP: u16 = 0x2000;
/// The power button in PM1_STS and PM1_EN, and the line that it interrupts on.
const BUTTON: u16 = 1 << 8;
const LINE: u32 = 9;

/// Ends the run as the command line says.
pub(crate) fn end(words: Words, pm_base: u16) -> ! {
    match words.get("then") {
        Some("poweroff") => out16(pm_base + 4, SLEEP),
        Some("reset") => out8(0xcf9, 6),
        Some("triple") => entry::triple_fault(),
        _ => {}
    }
    entry::halt()
}

/// The power button, which interrupts from now on.
#[derive(Clone, Copy)]
pub(crate) struct Button(u16);

impl Button {
    /// That of the power management registers at this port.
    pub(crate) fn open(pm_base: u16) -> Self {
        route(LINE);
        out16(pm_base + 2, BUTTON);
        Self(pm_base)
    }

    /// Switches the machine off if it was pressed.
    pub(crate) fn obey(self) {
        if in16(self.0) & BUTTON != 0 {
            out16(self.0, BUTTON);
            out16(self.0 + 4, SLEEP);
        }
    }
}
