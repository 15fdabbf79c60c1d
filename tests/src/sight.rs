//! A viewer's picture, and text read from it. Firmware and Linux draw letters of one font in a
//! grid, so that a letter that was seen once can be recognized pixel by pixel.

use std::collections::{HashMap, HashSet};
use std::fmt;

use anyhow::{Context, ensure};
use vmm::screenshot::{self, Picture};

use crate::lab;

/// A picture. Each pixel has four bytes: blue, green, red, and one that is ignored.
#[derive(Clone, PartialEq, Eq)]
pub struct Sight {
    picture: Picture,
    pixels: Vec<u8>,
}

/// Colors that differ by more than this, summed over red, green and blue, count as different. Some
/// encodings are lossy.
const CONTRAST: u32 = 150;

impl Sight {
    /// Fails if the number of pixels does not match the size.
    pub fn new(picture: Picture, pixels: Vec<u8>) -> anyhow::Result<Self> {
        let wanted = 4 * u64::from(picture.width) * u64::from(picture.height);
        ensure!(pixels.len() as u64 == wanted, "{} bytes for {picture:?}", pixels.len());
        Ok(Self { picture, pixels })
    }

    /// Such as `800x600`.
    pub fn size(&self) -> String {
        format!("{}x{}", self.picture.width, self.picture.height)
    }

    /// Saves the picture as a PNG file for people, and returns its path.
    pub fn keep(&self, name: &str) -> anyhow::Result<String> {
        let file = lab::shared()?.join(format!("{name}.png"));
        screenshot::write(self.picture, self.pixels.clone(), &file)?;
        Ok(file.display().to_string())
    }

    pub fn colours(&self) -> usize {
        let (pixels, _) = self.pixels.as_chunks::<4>();
        pixels.iter().map(|it| [it[0], it[1], it[2]]).collect::<HashSet<_>>().len()
    }

    /// The percentage of pixels with this color (blue, green, red).
    pub fn share(&self, color: [u8; 3]) -> usize {
        let (pixels, _) = self.pixels.as_chunks::<4>();
        let like = pixels.iter().filter(|it| apart([it[0], it[1], it[2]], color) <= CONTRAST);
        100 * like.count() / pixels.len().max(1)
    }

    /// Lines that differ from an earlier picture of the same size.
    pub fn changed(&self, before: &Self) -> Vec<usize> {
        let other = |x, y| apart(self.color(x, y), before.color(x, y)) > CONTRAST;
        (0..self.height()).filter(|y| (0..self.width()).any(|x| other(x, *y))).collect()
    }

    fn width(&self) -> usize {
        self.picture.width as usize
    }

    fn height(&self) -> usize {
        self.picture.height as usize
    }

    fn color(&self, x: usize, y: usize) -> [u8; 3] {
        let at = 4 * (y * self.width() + x);
        [self.pixels[at], self.pixels[at + 1], self.pixels[at + 2]]
    }

    /// The glyph in a cell: a byte for each line, a bit for each pixel that differs from the first
    /// one.
    fn glyph(&self, x: usize, y: usize, height: usize) -> Glyph {
        let paper = self.color(x, y);
        let ink = |x, y| u8::from(apart(self.color(x, y), paper) > CONTRAST);
        let line = |y| (x..x + WIDTH).fold(0, |bits, x| bits << 1 | ink(x, y));
        Glyph((y..y + height).map(line).collect())
    }
}

/// The sum of the differences in blue, green and red.
fn apart(one: [u8; 3], other: [u8; 3]) -> u32 {
    one.iter().zip(other).map(|(one, other)| u32::from(one.abs_diff(other))).sum()
}

/// The width of a letter in pixels.
const WIDTH: usize = 8;

/// The shape in a cell of the grid.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Glyph(Vec<u8>);

impl Glyph {
    pub fn is_blank(&self) -> bool {
        self.0.iter().all(|line| *line == 0)
    }
}

impl fmt::Debug for Glyph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|line| write!(f, "{line:02x}"))
    }
}

/// Stands for a glyph that is not a known letter: a cursor, a frame.
pub const UNKNOWN: char = '\u{fffd}';

pub struct Font {
    height: usize,
    centred: bool,
    letters: HashMap<Glyph, char>,
}

impl Font {
    /// The font of UEFI's consoles. The grid is centered on the screen.
    pub fn of_firmware() -> Self {
        Self { height: 19, centred: true, letters: HashMap::new() }
    }

    pub fn of_linux() -> Self {
        Self { height: 16, centred: false, letters: HashMap::new() }
    }

    /// The glyphs of each row, up to the last that is not blank.
    pub fn rows(&self, sight: &Sight) -> Vec<Vec<Glyph>> {
        let (left, top) = self.corner(sight);
        let row = |row: usize| {
            let y = top + row * self.height;
            let place = |it: usize| sight.glyph(left + it * WIDTH, y, self.height);
            let mut glyphs: Vec<_> = (0..sight.width() / WIDTH).map(place).collect();
            let used = glyphs.iter().rposition(|it| !it.is_blank()).map_or(0, |last| last + 1);
            glyphs.truncate(used);
            glyphs
        };
        (0..sight.height() / self.height).map(row).collect()
    }

    /// Learns letters from glyphs that show a known text. Fails if two letters look the same, or
    /// one looks different twice.
    pub fn learn(&mut self, glyphs: &[Glyph], text: &str) -> anyhow::Result<()> {
        ensure!(glyphs.len() == text.chars().count(), "{} glyphs for {text:?}", glyphs.len());
        for (glyph, letter) in glyphs.iter().zip(text.chars()) {
            ensure!(glyph.is_blank() == (letter == ' '), "{letter:?} looks like {glyph:?}");
            let known = *self.letters.entry(glyph.clone()).or_insert(letter);
            ensure!(known == letter, "{letter:?} looks like {known:?}: {glyph:?}");
            let looks = self.letters.values().filter(|it| **it == letter).count();
            ensure!(looks == 1, "{letter:?} has two different glyphs: {glyph:?}");
        }
        Ok(())
    }

    /// The text on the screen: one line for each row, without trailing blanks.
    pub fn read(&self, sight: &Sight) -> Vec<String> {
        let text = |row: &Vec<Glyph>| row.iter().map(|it| self.letter(it)).collect();
        self.rows(sight).iter().map(text).collect()
    }

    fn letter(&self, glyph: &Glyph) -> char {
        match self.letters.get(glyph) {
            Some(letter) => *letter,
            None if glyph.is_blank() => ' ',
            None => UNKNOWN,
        }
    }

    /// The upper left corner of the grid.
    fn corner(&self, sight: &Sight) -> (usize, usize) {
        let edge = |all, each| if self.centred { all % each / 2 } else { 0 };
        (edge(sight.width(), WIDTH), edge(sight.height(), self.height))
    }

    /// The text on a background of this color: one line for each row, trimmed.
    pub fn read_on(&self, sight: &Sight, paper: [u8; 3]) -> Vec<String> {
        let (left, top) = self.corner(sight);
        let is_on = |x: usize, y: usize| apart(sight.color(x, y), paper) < CONTRAST;
        let row = |row: &[Glyph], at: usize| {
            let places = (left..).step_by(WIDTH).map(|x| is_on(x, top + at * self.height));
            let on = row.iter().zip(places).filter(|(_, on)| *on);
            on.map(|(glyph, _)| self.letter(glyph)).collect::<String>().trim().to_owned()
        };
        self.rows(sight).iter().enumerate().map(|(at, it)| row(it, at)).collect()
    }

    pub fn known(&self) -> usize {
        self.letters.len()
    }
}

/// The last row with text, and its index.
pub fn last(rows: &[Vec<Glyph>]) -> anyhow::Result<(usize, &[Glyph])> {
    let at = rows.iter().rposition(|row| !row.is_empty()).context("an empty screen")?;
    Ok((at, &rows[at]))
}

#[cfg(test)]
mod test {
    use super::*;

    /// A screen of letters 8 pixels wide and 16 high, each a pattern of its own.
    fn drawn(text: &[&str], paper: u8, ink: u8) -> Sight {
        let picture = Picture { width: 8 * 10 + 3, height: 16 * 3 };
        let mut pixels = Vec::new();
        for y in 0..48 {
            for x in 0..83 {
                let letter = text.get(y / 16).and_then(|row| row.as_bytes().get(x / 8));
                let code = letter.map_or(0, |it| if *it == b' ' { 0 } else { *it });
                let on = y % 16 == 5 && code >> (x % 8) & 1 == 1;
                pixels.extend([if on { ink } else { paper }; 4]);
            }
        }
        Sight::new(picture, pixels).unwrap()
    }

    #[test]
    fn learned_letters_are_recognized_in_any_colour() {
        let mut font = Font::of_linux();
        let rows = font.rows(&drawn(&["abcde fgh"], 0, 255));
        assert_eq!(last(&rows).unwrap().0, 0);
        font.learn(&rows[0], "abcde fgh").unwrap();
        assert_eq!(font.known(), 9);
        let other = drawn(&["", "bad z", "cab"], 200, 90);
        assert_eq!(font.read(&other), ["", "bad \u{fffd}", "cab"]);
        assert_eq!(font.read_on(&other, [200; 3]), ["", "bad \u{fffd}", "cab"]);
        assert_eq!(font.read_on(&other, [0; 3]), ["", "", ""]);
        assert_eq!(last(&font.rows(&other)).unwrap().0, 2);
        assert_eq!((other.size(), other.colours()), ("83x48".to_owned(), 2));
    }

    #[test]
    fn text_that_was_not_drawn_is_not_learned() {
        let mut font = Font::of_linux();
        let rows = font.rows(&drawn(&["abc", "aba"], 0, 255));
        font.learn(&rows[0], "abc").unwrap();
        for (row, text) in [(0, "ab"), (0, "abd"), (1, "abd"), (1, "ab "), (1, "xba")] {
            assert!(font.learn(&rows[row], text).is_err(), "{row} is not {text}");
        }
        assert!(last(&font.rows(&drawn(&[], 0, 255))).is_err());
        assert!(Sight::new(Picture { width: 2, height: 2 }, vec![0; 15]).is_err());
    }
}
