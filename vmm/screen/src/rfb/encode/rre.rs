//! RRE and CoRRE (RFC 6143, 7.7.3; rfbproto, 7.7.4): a background with rectangles on it.
//!
//! Tiles that are shorter as raw pixels are sent in Raw, because each rectangle may have any
//! encoding.

use super::wire::{Wire, put};
use super::{Encoding, header};
use crate::rfb::picture::{Area, View};

/// Side of a tile. A search for rectangles in larger tiles takes longer than its savings justify.
const SIDE: u16 = 64;

/// A rectangle of one color in a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Subrectangle {
    pub(super) word: u32,
    pub(super) x: u8,
    pub(super) y: u8,
    pub(super) width: u8,
    pub(super) height: u8,
}

/// Splits a tile of at most 255 by 255 pixels into rectangles, until `each` returns false. Returns
/// whether it never did.
pub(super) fn take_apart(
    words: &mut [u32],
    width: usize,
    background: u32,
    mut each: impl FnMut(Subrectangle) -> bool,
) -> bool {
    let rows = words.len() / width;
    for y in 0..rows {
        let mut x = 0;
        while x < width {
            let word = words[y * width + x];
            if word == background {
                x += 1;
                continue;
            }
            let row = &words[y * width + x..(y + 1) * width];
            let wide = row.iter().take_while(|it| **it == word).count();
            let mut high = 1;
            while y + high < rows {
                let below = &mut words[(y + high) * width + x..][..wide];
                if below.iter().any(|it| *it != word) {
                    break;
                }
                below.fill(background);
                high += 1;
            }
            let [x8, y8, width8, height8] = [x, y, wide, high].map(small);
            if !each(Subrectangle { word, x: x8, y: y8, width: width8, height: height8 }) {
                return false;
            }
            x += wide;
        }
    }
    true
}

fn small(number: usize) -> u8 {
    u8::try_from(number).expect("a tile has at most 255 pixels to a side")
}

/// RRE, with coordinates of 16 bits.
pub(super) fn rre(view: &View<'_>, wire: &Wire, tile: &mut Vec<u32>, out: &mut Vec<u8>) -> usize {
    tiles(view, wire, tile, out, Encoding::Rre)
}

/// CoRRE, with coordinates of 8 bits.
pub(super) fn corre(view: &View<'_>, wire: &Wire, tile: &mut Vec<u32>, out: &mut Vec<u8>) -> usize {
    tiles(view, wire, tile, out, Encoding::CoRre)
}

/// Number of rectangles for an area.
pub(super) fn count(area: Area) -> usize {
    area.pieces(SIDE, SIDE).count()
}

fn tiles(
    view: &View<'_>,
    wire: &Wire,
    tile: &mut Vec<u32>,
    out: &mut Vec<u8>,
    encoding: Encoding,
) -> usize {
    let pieces = view.area.pieces(SIDE, SIDE);
    pieces.map(|area| one(&view.of(area), wire, tile, out, encoding)).count()
}

fn one(view: &View<'_>, wire: &Wire, tile: &mut Vec<u32>, out: &mut Vec<u8>, encoding: Encoding) {
    let Area { width, .. } = view.area;
    let start = out.len();
    wire.gather(view, tile);
    let limit = start + 12 + tile.len() * wire.size;
    header(view.area, encoding, out);
    out.extend([0; 4]);
    let background = tile[0];
    put([background].into_iter(), wire.size, out);
    let mut count = 0_u32;
    let fits = take_apart(tile, usize::from(width), background, |it| {
        count += 1;
        put([it.word].into_iter(), wire.size, out);
        for number in [it.x, it.y, it.width, it.height] {
            if encoding == Encoding::Rre {
                out.push(0);
            }
            out.push(number);
        }
        out.len() < limit
    });
    if fits {
        out[start + 12..start + 16].copy_from_slice(&count.to_be_bytes());
    } else {
        out.truncate(start);
        header(view.area, Encoding::Raw, out);
        view.rows().for_each(|row| wire.write(row, out));
    }
}
