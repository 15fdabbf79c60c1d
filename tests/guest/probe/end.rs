//! How a run ends: `then=poweroff`, `reset`, `triple`, or (the default) `halt`.
use crate::entry;
use crate::io::{out8, out16};
use crate::start::Words;

/// PM1_CNT: SLP_EN with sleep type 0, which is S5.
const SLEEP: u16 = 0x2000;

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
