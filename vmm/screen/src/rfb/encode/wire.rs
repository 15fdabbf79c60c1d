//! Conversion of pixels to a client's format.
//!
//! A pixel becomes a *word*: its bytes on the wire, the first one lowest. Two words differ exactly
//! if the client's pixels differ. Encodings compare and count words, and need not know formats.

use crate::rfb::format::{Channel, PixelFormat};
use crate::rfb::picture::View;

/// Conversion of a pixel to a word, and the number of bytes per word.
#[derive(Clone, Debug)]
pub(super) struct Wire {
    map: Map,
    pub(super) size: usize,
}

#[derive(Clone, Debug)]
enum Map {
    /// The word equals the pixel.
    Same,
    /// The word consists of red, green and blue.
    Reversed,
    /// The pixel is a word already.
    Done,
    /// For each color, a table of the bits that each intensity adds.
    Tables(Box<[[u32; 256]; 3]>),
}

impl Wire {
    /// `PIXEL`: all bytes.
    pub(super) fn pixel(format: &PixelFormat) -> Self {
        if *format == PixelFormat::OURS {
            return Self { map: Map::Same, size: 4 };
        }
        Self::cut(format, 0, format.bytes())
    }

    /// `CPIXEL` (RFC 6143, 7.7.5): three bytes, if all colors are in three of the four.
    pub(super) fn compact(format: &PixelFormat) -> Self {
        if *format == PixelFormat::OURS {
            return Self { map: Map::Same, size: 3 };
        }
        let bits: u64 = format.channels.iter().map(|it| it.mask()).sum();
        let (low, high) = (bits >> 24 == 0, bits & 0xff == 0);
        if format.bytes() < 4 || format.depth > 24 || format.mapped || !(low || high) {
            return Self::pixel(format);
        }
        // The unused byte is the first one, or the last.
        Self::cut(format, usize::from(low == format.big_endian), 3)
    }

    /// `TPIXEL` of Tight: red, green and blue, if each has eight bits.
    pub(super) fn tight(format: &PixelFormat) -> Self {
        if format.is_full() {
            return Self { map: Map::Reversed, size: 3 };
        }
        Self::pixel(format)
    }

    /// For pixels that are words already, of `size` bytes.
    pub(super) const fn done(size: usize) -> Self {
        Self { map: Map::Done, size }
    }

    /// Takes `size` bytes of a pixel, starting at byte `skip`.
    fn cut(format: &PixelFormat, skip: usize, size: usize) -> Self {
        let table = |channel: Channel| {
            let mut intensities = 0..=255_u8;
            [(); 256].map(|()| {
                let word = channel.position(intensities.next().unwrap_or_default());
                let word = if format.big_endian {
                    word.swap_bytes() >> (32 - 8 * format.bytes())
                } else {
                    word
                };
                word >> (8 * skip)
            })
        };
        Self { map: Map::Tables(Box::new(format.channels.map(table))), size }
    }

    pub(super) fn word(&self, pixel: u32) -> u32 {
        match &self.map {
            Map::Same => pixel & 0x00ff_ffff,
            Map::Reversed => pixel.swap_bytes() >> 8,
            Map::Done => pixel,
            Map::Tables(tables) => {
                let [reds, greens, blues] = &**tables;
                let [blue, green, red, _] = pixel.to_le_bytes();
                reds[usize::from(red)] | greens[usize::from(green)] | blues[usize::from(blue)]
            }
        }
    }

    pub(super) fn append(&self, pixels: &[u32], words: &mut Vec<u32>) {
        match &self.map {
            Map::Same => words.extend(pixels.iter().map(|pixel| pixel & 0x00ff_ffff)),
            Map::Reversed => words.extend(pixels.iter().map(|pixel| pixel.swap_bytes() >> 8)),
            Map::Done => words.extend(pixels),
            Map::Tables(_) => words.extend(pixels.iter().map(|pixel| self.word(*pixel))),
        }
    }

    /// Replaces `words` with those of an area.
    pub(super) fn gather(&self, view: &View<'_>, words: &mut Vec<u32>) {
        words.clear();
        view.rows().for_each(|row| self.append(row, words));
    }

    /// Appends pixels as bytes.
    pub(super) fn write(&self, pixels: &[u32], out: &mut Vec<u8>) {
        match (&self.map, self.size) {
            (Map::Same, size) => put(pixels.iter().map(|pixel| pixel & 0x00ff_ffff), size, out),
            (Map::Reversed, size) => put(pixels.iter().map(|it| it.swap_bytes() >> 8), size, out),
            (Map::Done, size) => put(pixels.iter().copied(), size, out),
            (Map::Tables(_), size) => put(pixels.iter().map(|it| self.word(*it)), size, out),
        }
    }
}

/// Appends words as bytes.
pub(super) fn put(words: impl ExactSizeIterator<Item = u32>, size: usize, out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + words.len() * size, 0);
    let to = &mut out[start..];
    match size {
        1 => fill::<1>(words, to),
        2 => fill::<2>(words, to),
        3 => fill::<3>(words, to),
        _ => fill::<4>(words, to),
    }
}

fn fill<const SIZE: usize>(words: impl Iterator<Item = u32>, to: &mut [u8]) {
    for (to, word) in to.as_chunks_mut::<SIZE>().0.iter_mut().zip(words) {
        to.copy_from_slice(&word.to_le_bytes()[..SIZE]);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn format(bytes: [u8; 13]) -> PixelFormat {
        let mut all = [0; 16];
        all[..13].copy_from_slice(&bytes);
        PixelFormat::read(&all).unwrap()
    }

    fn bytes(wire: &Wire) -> Vec<u8> {
        let mut out = Vec::new();
        wire.write(&[0x0011_2233], &mut out);
        let mut words = Vec::new();
        wire.append(&[0x0011_2233], &mut words);
        assert_eq!(words, [wire.word(0x0011_2233)]);
        assert_eq!(words[0].to_le_bytes()[..wire.size], out);
        out
    }

    #[test]
    fn compact_pixels_lack_the_byte_without_colour() {
        let full = |big, red, green, blue| {
            format([32, 24, big, 1, 0, 255, 0, 255, 0, 255, red, green, blue])
        };
        for (format, pixel, compact) in [
            (PixelFormat::OURS, vec![0x33, 0x22, 0x11, 0], vec![0x33, 0x22, 0x11]),
            (full(0, 0, 8, 16), vec![0x11, 0x22, 0x33, 0], vec![0x11, 0x22, 0x33]),
            (full(0, 8, 16, 24), vec![0, 0x11, 0x22, 0x33], vec![0x11, 0x22, 0x33]),
            (full(1, 16, 8, 0), vec![0, 0x11, 0x22, 0x33], vec![0x11, 0x22, 0x33]),
            (full(1, 24, 16, 8), vec![0x11, 0x22, 0x33, 0], vec![0x11, 0x22, 0x33]),
            (full(0, 0, 8, 24), vec![0x11, 0x22, 0, 0x33], vec![0x11, 0x22, 0, 0x33]),
        ] {
            assert_eq!(bytes(&Wire::pixel(&format)), pixel, "{format:?}");
            assert_eq!(bytes(&Wire::compact(&format)), compact, "{format:?}");
            assert_eq!(bytes(&Wire::tight(&format)), [0x11, 0x22, 0x33], "{format:?}");
        }
        let deep = format([32, 32, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0]);
        for wire in [Wire::compact(&deep), Wire::tight(&deep)] {
            assert_eq!(bytes(&wire), [0x33, 0x22, 0x11, 0]);
        }
    }

    #[test]
    fn small_pixels_keep_their_byte_order() {
        let high = |big| format([16, 16, big, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0]);
        // 2, 8, 6 of 31, 63, 31.
        let value = (2_u16 << 11) | (8 << 5) | 6;
        for wire in [Wire::pixel, Wire::compact, Wire::tight] {
            assert_eq!(bytes(&wire(&high(0))), value.to_le_bytes());
            assert_eq!(bytes(&wire(&high(1))), value.to_be_bytes());
        }
        assert_eq!(bytes(&Wire::pixel(&format([8, 8, 1, 1, 0, 7, 0, 7, 0, 3, 0, 3, 6]))), [0x48]);
    }
}
