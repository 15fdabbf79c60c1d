//! Hextile (RFC 6143, 7.7.4).

use super::palette::Palette;
use super::rre::{Subrectangle, take_apart};
use super::wire::{Wire, put};
use crate::rfb::picture::View;

const RAW: u8 = 1;
const BACKGROUND: u8 = 2;
const FOREGROUND: u8 = 4;
const SUBRECTANGLES: u8 = 8;
const COLOURED: u8 = 16;

const SIDE: u16 = 16;

/// Tiles with more colors are sent uncompressed, because almost every pixel would take a rectangle.
const COLOURS: usize = 64;

/// Colors that the client keeps from tile to tile.
#[derive(Clone, Copy, Default)]
struct KnownColours {
    background: Option<u32>,
    foreground: Option<u32>,
}

/// Appends the tiles of an area. Returns 1, the number of rectangles.
pub(super) fn encode(
    view: &View<'_>,
    wire: &Wire,
    palette: &mut Palette,
    out: &mut Vec<u8>,
) -> usize {
    let mut hextile = Hextile { size: wire.size, palette, known: KnownColours::default() };
    let mut tile = Vec::with_capacity(usize::from(SIDE * SIDE));
    for area in view.area.pieces(SIDE, SIDE) {
        let piece = view.of(area);
        wire.gather(&piece, &mut tile);
        let start = out.len();
        if !hextile.tile(&mut tile, usize::from(area.width), out) {
            out.truncate(start);
            out.push(RAW);
            piece.rows().for_each(|row| wire.write(row, out));
            // Both are undefined after a raw tile.
            hextile.known = KnownColours::default();
        }
    }
    1
}

struct Hextile<'a> {
    size: usize,
    palette: &'a mut Palette,
    known: KnownColours,
}

impl Hextile<'_> {
    /// Appends a tile as rectangles on a background. Returns false if that is not shorter than raw
    /// pixels.
    fn tile(&mut self, words: &mut [u32], width: usize, out: &mut Vec<u8>) -> bool {
        self.palette.clear();
        if !self.palette.add_all(words, COLOURS) {
            return false;
        }
        let limit = out.len() + 1 + words.len() * self.size;
        let background = self.background(words);
        let foreground = match *self.palette.words {
            [_] => return self.head(0, background, None, out),
            [one, other] => Some(if one == background { other } else { one }),
            _ => None,
        };
        let coloured = if foreground.is_some() { 0 } else { COLOURED };
        self.head(SUBRECTANGLES | coloured, background, foreground, out);
        let number = out.len();
        out.push(0);
        take_apart(words, width, background, |it| {
            let Subrectangle { word, x, y, width, height } = it;
            if foreground.is_none() {
                put([word].into_iter(), self.size, out);
            }
            out.extend([x << 4 | y, (width - 1) << 4 | (height - 1)]);
            // At least one pixel is background, so there are at most 255.
            out[number] += 1;
            out.len() < limit
        })
    }

    /// The most frequent color.
    fn background(&self, words: &[u32]) -> u32 {
        let mut counts = [0_usize; COLOURS];
        for run in words.chunk_by(|one, next| one == next) {
            counts[usize::from(self.palette.index(run[0]))] += run.len();
        }
        let most = counts.iter().enumerate().max_by_key(|(_, count)| **count);
        self.palette.words[most.map_or(0, |(index, _)| index)]
    }

    /// Appends the data in front of the rectangles, without colors that the client already has.
    fn head(&mut self, mask: u8, background: u32, ink: Option<u32>, out: &mut Vec<u8>) -> bool {
        let at = out.len();
        out.push(mask);
        if self.known.background != Some(background) {
            self.known.background = Some(background);
            out[at] |= BACKGROUND;
            put([background].into_iter(), self.size, out);
        }
        if let Some(foreground) = ink.filter(|_| self.known.foreground != ink) {
            out[at] |= FOREGROUND;
            put([foreground].into_iter(), self.size, out);
        }
        // A tile of many colors makes the foreground undefined. One without rectangles does not
        // change it.
        if mask != 0 {
            self.known.foreground = ink;
        }
        true
    }
}
