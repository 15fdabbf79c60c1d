//! Ends a run: `then=poweroff`, `reset`, `triple`, `deaf`, or (the default) `halt`.
use crate::entry;
use crate::input::route;
use crate::io::{in16, out8, out16};
use crate::start::Words;

/// PM1_CNT: SLP_EN with sleep type 0, which is S5.
const SLEEP: u16 = 0x2000;
/// The power button in PM1_STS and PM1_EN, and its interrupt line.
const BUTTON: u16 = 1 << 8;
const LINE: u32 = 9;

pub(crate) fn end(words: Words, pm_base: u16) -> ! {
    match words.get("then") {
        Some("poweroff") => out16(pm_base + 4, SLEEP),
        Some("reset") => out8(0xcf9, 6),
        Some("triple") => entry::triple_fault(),
        _ => {}
    }
    entry::halt()
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
