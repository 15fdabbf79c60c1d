//! Displays as viewers see them.
//!
//! A display registers its [`Scanout`] when it is built. One viewer of the machine takes what
//! changed ([`Scanout::changed`] answers once) and hands it on to all who look.

use std::sync::{Arc, Mutex};

/// Bytes that one bit of [`Scanout::changed`] stands for.
pub const PAGE: u64 = 4096;

/// A picture: its size, and where it lies in the display's memory. A pixel is 32 bits, blue in its
/// first byte, then green and red; the last is nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    /// Pixels of a line.
    pub width: u32,
    /// Lines.
    pub height: u32,
    /// Bytes from a line to the next.
    pub stride: u32,
    /// The first pixel's first byte.
    pub start: u64,
}

/// A display, seen from the host's side.
pub trait Scanout: Send + Sync {
    /// What is shown now, all of it within the display's memory; nothing while the guest has
    /// switched it off.
    fn mode(&self) -> Option<Mode>;
    /// The pages of its memory that the guest wrote since this was last asked: bit `n % 64` of word
    /// `n / 64` is page `n`. Sets bits and clears none; makes the list as long as it must be.
    fn changed(&self, pages: &mut Vec<u64>);
    /// Copies out of its memory; what lies behind the end is left alone.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// The size that a viewer would like: the preferred mode from now on, which a guest sees when
    /// it looks again, at the latest after a reset.
    fn prefer(&self, width: u32, height: u32);
}

/// The displays of a machine.
#[derive(Default)]
pub struct Screens {
    displays: Mutex<Vec<Arc<dyn Scanout>>>,
}

impl Screens {
    /// Adds a display.
    pub fn register(&self, display: Arc<dyn Scanout>) {
        self.displays.lock().expect("no display panicked").push(display);
    }

    /// The one that people look at: the first.
    pub fn first(&self) -> Option<Arc<dyn Scanout>> {
        self.displays.lock().expect("no display panicked").first().cloned()
    }
}
