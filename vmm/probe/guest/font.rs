//! Glyphs as packed by `vmm/probe/font.rs`: Noto Sans Mono, and marks.
//!
//! A font begins with its width and height. Then, for each glyph from the space on: the offset of
//! its levels in two bytes, and left, top, width and height of its bounding box. The levels follow,
//! from 0 to 15, two in a byte, the first in the lower half.

/// Glyphs after the last ASCII character: passed, failed, unknown.
pub(crate) const RIGHT: u8 = 0x7f;
pub(crate) const WRONG: u8 = 0x80;
pub(crate) const DOT: u8 = 0x81;

const FIRST: u8 = b' ';
const LAST: u8 = DOT;
const HEAD: usize = 2;
const ENTRY: usize = 6;
const LEVELS: usize = HEAD + ENTRY * (LAST - FIRST + 1) as usize;

macro_rules! font {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name))
    };
}

/// A font, perhaps magnified.
#[derive(Clone, Copy)]
pub(crate) struct Font {
    bytes: &'static [u8],
    scale: u32,
}

impl Font {
    /// Fonts for a page, from the largest to the smallest.
    pub(crate) const SIZES: [Self; 6] = [
        Self { bytes: font!("regular24"), scale: 3 },
        Self { bytes: font!("regular24"), scale: 2 },
        Self { bytes: font!("regular20"), scale: 2 },
        Self { bytes: font!("regular24"), scale: 1 },
        Self { bytes: font!("regular20"), scale: 1 },
        Self { bytes: font!("regular16"), scale: 1 },
    ];

    pub(crate) const SMALLEST: Self = Self::SIZES[Self::SIZES.len() - 1];

    /// The font of the title of a page in this font.
    pub(crate) fn title(self) -> Self {
        Self { bytes: font!("bold32"), scale: self.scale }
    }

    pub(crate) fn scale(&self) -> u32 {
        self.scale
    }

    pub(crate) fn width(&self) -> u32 {
        u32::from(self.bytes[0]) * self.scale
    }

    pub(crate) fn height(&self) -> u32 {
        u32::from(self.bytes[1]) * self.scale
    }

    /// How much of a pixel a glyph covers, in fifteenths. Edges stay smooth when the font is
    /// magnified.
    pub(crate) fn level(&self, code: u8, x: u32, y: u32) -> u32 {
        let glyph = self.glyph(code);
        let scale = self.scale;
        if scale == 1 {
            return glyph.level(x as i32, y as i32);
        }
        // In half pixels of the magnified letter, relative to the center of the first small pixel.
        let split = |at: u32| {
            let from = (2 * at + 1) as i32 - scale as i32;
            let step = 2 * scale as i32;
            (from.div_euclid(step), from.rem_euclid(step) as u32)
        };
        let ((left, right), (top, below)) = (split(x), split(y));
        let step = 2 * scale;
        let line = |y| glyph.level(left, y) * (step - right) + glyph.level(left + 1, y) * right;
        let sum = line(top) * (step - below) + line(top + 1) * below;
        (sum + step * step / 2) / (step * step)
    }

    fn glyph(&self, code: u8) -> Glyph {
        let code = if (FIRST..=LAST).contains(&code) { code } else { b'?' };
        let at = HEAD + ENTRY * usize::from(code - FIRST);
        let start = u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]);
        let [left, top, width, height] =
            [2, 3, 4, 5].map(|field| i32::from(self.bytes[at + field]));
        Glyph { levels: &self.bytes[LEVELS + usize::from(start)..], left, top, width, height }
    }
}

struct Glyph {
    levels: &'static [u8],
    left: i32,
    top: i32,
    width: i32,
    height: i32,
}

impl Glyph {
    fn level(&self, x: i32, y: i32) -> u32 {
        let (x, y) = (x - self.left, y - self.top);
        if !(0..self.width).contains(&x) || !(0..self.height).contains(&y) {
            return 0;
        }
        let index = (y * self.width + x) as usize;
        let pair = self.levels.get(index / 2).copied().unwrap_or(0);
        u32::from(pair >> (4 * (index % 2)) & 0xf)
    }
}
