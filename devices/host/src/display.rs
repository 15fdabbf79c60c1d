//! The interface between display devices and viewers.
//!
//! A display registers its [`Scanout`] when it is built. Each change is reported only once
//! ([`Scanout::changed`]), so a machine has one reader of changes, which serves all viewers.

use std::sync::{Arc, Mutex};

/// Bytes per bit of [`Scanout::changed`].
pub const PAGE_BYTES: u64 = 4096;

/// A picture: its size, and its location in the display's memory. A pixel has four bytes: blue,
/// green, red, and one that is unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mode {
    pub width: u32,
    pub height: u32,
    /// Bytes from one line to the next.
    pub stride: u32,
    /// Offset of the first pixel in the display's memory, in bytes.
    pub start: u64,
}

pub trait Scanout: Send + Sync {
    /// The current picture, which lies within the display's memory. `None` while the guest has the
    /// display switched off.
    fn mode(&self) -> Option<Mode>;
    /// The pages of its memory that the guest wrote since the last call: bit `n % 64` of word
    /// `n / 64` is page `n`. Sets bits and clears none; extends the list as needed.
    fn changed(&self, pages: &mut Vec<u64>);
    /// Copies out of the display's memory. The part of `data` beyond its end stays unchanged.
    fn read(&self, offset: u64, data: &mut [u8]);
    /// Sets the preferred mode to the size that a viewer asks for. The guest sees it when it reads
    /// the EDID again, at the latest after a reset. Returns false if the display cannot show it.
    fn set_preferred_size(&self, width: u32, height: u32) -> bool;
    /// Whether the display asks a running driver to change to the preferred size.
    fn resizes(&self) -> bool {
        false
    }
}

#[derive(Default)]
pub struct Screens {
    displays: Mutex<Vec<Arc<dyn Scanout>>>,
}

impl Screens {
    pub fn register(&self, display: Arc<dyn Scanout>) {
        self.displays.lock().expect("no display panicked").push(display);
    }

    /// The display that viewers see.
    pub fn first(&self) -> Option<Arc<dyn Scanout>> {
        self.displays.lock().expect("no display panicked").first().cloned()
    }
}
