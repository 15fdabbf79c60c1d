//! Tiles of ZRLE and TRLE (RFC 6143, 7.7.5 and 7.7.6).

use super::palette::Palette;
use super::wire::put;
use crate::rfb::picture::Area;

/// Maximum colors of a palette.
const COLOURS: usize = 127;

/// Maximum colors of a palette with packed indices.
const PACKED: usize = 16;

pub(super) struct Tile<'a> {
    words: &'a [u32],
    width: usize,
    size: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Solid,
    Raw,
    Packed,
    Runs,
    PaletteRuns,
}

impl Shape {
    pub(super) fn is_raw(self) -> bool {
        self == Self::Raw
    }
}

impl<'a> Tile<'a> {
    /// A tile with the words of an area, each of `size` bytes.
    pub(super) fn new(words: &'a [u32], area: Area, size: usize) -> Self {
        Self { words, width: usize::from(area.width), size }
    }

    /// Appends the tile in the shape that [`Self::shape`] found.
    pub(super) fn write(&self, shape: Shape, palette: &Palette, out: &mut Vec<u8>) {
        let words = self.words;
        match shape {
            Shape::Solid => {
                out.push(1);
                self.put(&words[..1], out);
            }
            Shape::Raw => {
                out.push(0);
                self.put(words, out);
            }
            Shape::Packed => self.packed(palette, out),
            Shape::Runs => {
                out.push(128);
                for (word, length) in runs(words) {
                    out.extend(&word.to_le_bytes()[..self.size]);
                    run(length, out);
                }
            }
            Shape::PaletteRuns => {
                out.push(128 | colours(palette));
                self.put(&palette.words, out);
                for (word, length) in runs(words) {
                    let index = palette.index(word);
                    if length == 1 {
                        out.push(index);
                    } else {
                        out.push(index | 128);
                        run(length, out);
                    }
                }
            }
        }
    }

    /// Finds the shape that takes the fewest bytes, and fills the palette if the shape has one.
    pub(super) fn shape(&self, palette: &mut Palette) -> Shape {
        let (words, size) = (self.words, self.size);
        let runs = 1 + count(words.iter().zip(&words[1..]), |(one, next)| one != next);
        if runs == 1 {
            return Shape::Solid;
        }
        // A run takes one more byte for each 255 pixels.
        let long = (words.len() - runs) / 255;
        let mut best = (words.len() * size, Shape::Raw);
        let mut offer = |length: usize, shape: Shape| {
            if length < best.0 {
                best = (length, shape);
            }
        };
        offer(runs * (size + 1) + long, Shape::Runs);
        palette.clear();
        if palette.add_all(words, COLOURS) {
            let colours = palette.words.len();
            let triples = words.iter().zip(&words[1..]).zip(&words[2..]);
            let inner = count(triples, |((before, it), after)| before != it && it != after);
            let first = usize::from(words[0] != words[1]);
            let last = usize::from(words[words.len() - 1] != words[words.len() - 2]);
            let single = inner + first + last;
            offer(colours * size + 2 * runs - single + long, Shape::PaletteRuns);
            if colours <= PACKED {
                let rows = words.len() / self.width;
                let row = (self.width * bits(colours)).div_ceil(8);
                offer(colours * size + rows * row, Shape::Packed);
            }
        }
        best.1
    }

    fn packed(&self, palette: &Palette, out: &mut Vec<u8>) {
        out.push(colours(palette));
        self.put(&palette.words, out);
        let bits = bits(palette.words.len());
        self.words.chunks(self.width).for_each(|row| palette.indices(row, bits, out));
    }

    fn put(&self, words: &[u32], out: &mut Vec<u8>) {
        put(words.iter().copied(), self.size, out);
    }
}

/// Counts matches, in a form that the compiler can vectorize.
fn count<T>(all: impl Iterator<Item = T>, is: impl Fn(T) -> bool) -> usize {
    all.map(|it| u32::from(is(it))).sum::<u32>() as usize
}

/// Bits per index.
const fn bits(colours: usize) -> usize {
    match colours {
        0..=2 => 1,
        3..=4 => 2,
        _ => 4,
    }
}

fn colours(palette: &Palette) -> u8 {
    u8::try_from(palette.words.len()).expect("a tile has at most 127 colors")
}

/// Words with the lengths of their runs.
fn runs(words: &[u32]) -> impl Iterator<Item = (u32, usize)> {
    words.chunk_by(|one, next| one == next).map(|run| (run[0], run.len()))
}

/// Appends a length minus one, as a sum of bytes of which all but the last are 255.
fn run(length: usize, out: &mut Vec<u8>) {
    let (full, rest) = ((length - 1) / 255, (length - 1) % 255);
    out.extend(std::iter::repeat_n(255, full));
    out.push(u8::try_from(rest).expect("a remainder of 255"));
}
