//! The mouse pointer: an arrow that is drawn over the page. Moving it restores the pixels below.
use crate::canvas::Canvas;

/// The rows of the arrow, the leftmost pixel in bit 0: bits of its border, and bits of its inside.
const ARROW: [(u16, u16); 17] = [
    (0b1, 0),
    (0b11, 0),
    (0b101, 0b010),
    (0b1001, 0b0110),
    (0b1_0001, 0b0_1110),
    (0b10_0001, 0b01_1110),
    (0b100_0001, 0b011_1110),
    (0b1000_0001, 0b0111_1110),
    (0b1_0000_0001, 0b0_1111_1110),
    (0b10_0000_0001, 0b01_1111_1110),
    (0b111_1100_0001, 0b000_0011_1110),
    (0b100_1001, 0b011_0110),
    (0b1001_0101, 0b0110_0010),
    (0b1001_0011, 0b0110_0000),
    (0b1_0010_0001, 0b0_1100_0000),
    (0b1_0010_0000, 0b0_1100_0000),
    (0b0_1100_0000, 0),
];
const WIDTH: u32 = 11;
const HEIGHT: u32 = ARROW.len() as u32;
const BORDER: u32 = 0x00_0000;
const INSIDE: u32 = 0xff_ffff;
const MAX_SCALE: u32 = 2;

pub(crate) struct Cursor {
    scale: u32,
    at: Option<(u32, u32)>,
    under: [u32; (WIDTH * MAX_SCALE * HEIGHT * MAX_SCALE) as usize],
}

impl Cursor {
    pub(crate) fn new(scale: u32) -> Self {
        Self { scale: scale.min(MAX_SCALE), at: None, under: [0; _] }
    }

    /// The pixels of the arrow: index, and position relative to its tip.
    fn pixels(&self) -> impl Iterator<Item = (usize, u32, u32)> + use<> {
        let (width, height) = (WIDTH * self.scale, HEIGHT * self.scale);
        (0..width * height).map(move |index| (index as usize, index % width, index / width))
    }

    /// Restores the pixels below the arrow.
    pub(crate) fn lift(&mut self, canvas: &Canvas) {
        let Some((left, top)) = self.at.take() else { return };
        for (index, x, y) in self.pixels() {
            canvas.set(left + x, top + y, self.under[index]);
        }
    }

    /// Draws the arrow with its tip at this position. It must not be drawn elsewhere.
    pub(crate) fn put(&mut self, canvas: &Canvas, left: u32, top: u32) {
        for (index, x, y) in self.pixels() {
            self.under[index] = canvas.get(left + x, top + y);
            let (border, inside) = ARROW[(y / self.scale) as usize];
            let has = |bits: u16| bits >> (x / self.scale) & 1 == 1;
            if has(border) {
                canvas.set(left + x, top + y, BORDER);
            } else if has(inside) {
                canvas.set(left + x, top + y, INSIDE);
            }
        }
        self.at = Some((left, top));
    }
}
