//! The mouse pointer, drawn over the picture.

use serde::{Deserialize, Serialize};

use super::resource::PIXEL;
use crate::bytes::Bytes;
use crate::pages::Pages;
use host::display::Mode;

/// Width and height in pixels. Drivers know no other size.
pub(super) const SIDE: u32 = 64;
pub(super) const BYTES: usize = 4 * (SIDE * SIDE) as usize;

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Pointer {
    /// The position of the upper left corner.
    pub(super) at: (i32, i32),
    /// Pixels with premultiplied alpha: blue, green, red, alpha. `None` hides the pointer.
    pub(super) image: Option<Box<Bytes<BYTES>>>,
}

impl Pointer {
    /// The visible part of each line: its offset in the display's memory, and the part of the image
    /// in bytes.
    fn lines(&self, mode: &Mode) -> impl Iterator<Item = (u64, std::ops::Range<usize>)> {
        let (left, top) = (i64::from(self.at.0), i64::from(self.at.1));
        let side = i64::from(SIDE);
        let first = (-left).clamp(0, side);
        let end = (i64::from(mode.width) - left).clamp(first, side);
        let mode = *mode;
        (0..side).filter_map(move |row| {
            let y = u64::try_from(top + row).ok().filter(|y| *y < u64::from(mode.height))?;
            let x = u64::try_from(left + first).ok().filter(|_| first < end)?;
            let part = |column: i64| usize::try_from((row * side + column) * 4).unwrap_or(BYTES);
            let start = mode.start + y * u64::from(mode.stride) + x * PIXEL;
            Some((start, part(first)..part(end)))
        })
    }

    /// Marks the pages that the pointer covers.
    pub(super) fn mark(&self, mode: &Mode, pages: &mut Pages) {
        if self.image.is_some() {
            self.lines(mode).for_each(|(start, part)| pages.mark(start, part.len()));
        }
    }

    /// Draws the pointer over a part of the display's memory.
    pub(super) fn draw(&self, mode: &Mode, offset: u64, data: &mut [u8]) {
        let Some(image) = &self.image else { return };
        let end = offset + data.len() as u64;
        let lines = self.lines(mode);
        for (start, part) in
            lines.filter(|(start, part)| *start < end && offset < *start + part.len() as u64)
        {
            for (at, pixel) in (start..).step_by(4).zip(image[part].as_chunks::<4>().0) {
                let at = at.checked_sub(offset).and_then(|at| usize::try_from(at).ok());
                let under = at.and_then(|at| data.get_mut(at..at + 4));
                under.into_iter().for_each(|under| blend(under, *pixel));
            }
        }
    }
}

fn blend(under: &mut [u8], [blue, green, red, alpha]: [u8; 4]) {
    for (under, over) in under.iter_mut().zip([blue, green, red]) {
        let rest = u16::from(*under) * u16::from(u8::MAX - alpha) / u16::from(u8::MAX);
        *under = u8::try_from(rest).unwrap_or(u8::MAX).saturating_add(over);
    }
}
