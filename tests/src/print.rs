//! Reads the probe's page from its picture, by comparing letters with the font they come from.

use noto_sans_mono_bitmap::{FontWeight, RasterHeight, get_raster};

/// A picture. Each pixel has four bytes: blue, green, red, and one that is ignored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Picture {
    pub width: usize,
    /// All pixels, line after line.
    pub pixels: Vec<u8>,
}

#[derive(Clone, Copy)]
pub struct Print {
    pub weight: FontWeight,
    pub height: RasterHeight,
    /// Pixels from the left edge to the first letter.
    pub x: usize,
    /// Pixels from the top to the first line.
    pub y: usize,
    /// Pixels from one line to the next.
    pub line: usize,
}

const fn print(height: RasterHeight, x: usize, y: usize, line: usize) -> Print {
    Print { weight: FontWeight::Regular, height, x, y, line }
}

const fn title(x: usize, y: usize) -> Print {
    Print { weight: FontWeight::Bold, height: RasterHeight::Size32, x, y, line: 32 }
}

/// Sizes of displays, with the layout of the title and of the other text.
pub const PAGES: [((usize, usize), Print, Print); 3] = [
    ((1280, 800), title(28, 24), print(RasterHeight::Size20, 28, 74, 24)),
    ((1920, 1080), title(30, 28), print(RasterHeight::Size24, 30, 81, 28)),
    ((640, 480), title(8, 8), print(RasterHeight::Size16, 8, 52, 16)),
];

impl Print {
    /// The width of a letter in pixels.
    pub fn width(&self) -> usize {
        get_raster('0', self.weight, self.height).expect("a digit").width()
    }

    /// The coverage of each pixel by a letter, in 16 levels.
    fn cover(&self, letter: char) -> Vec<f64> {
        let raster = get_raster(letter, self.weight, self.height).expect("a character of ASCII");
        let levels = raster.pixels().iter().map(|level| (u32::from(*level) * 15 + 127) / 255);
        scaled(levels.map(f64::from).collect())
    }
}

/// Scales values so that the largest is 1, unless all are 0.
fn scaled(mut values: Vec<f64>) -> Vec<f64> {
    let most = values.iter().copied().fold(0.0, f64::max);
    if most > 0.0 {
        values.iter_mut().for_each(|value| *value /= most);
    }
    values
}

impl Picture {
    /// Blue, green and red.
    pub fn pixel(&self, x: usize, y: usize) -> [u8; 3] {
        let at = 4 * (y * self.width + x);
        [0, 1, 2].map(|color| self.pixels[at + color])
    }

    /// The coverage of each pixel in a letter's cell, by its difference from the pixel in the
    /// corner. `None` if all pixels are equal.
    fn cover(&self, (left, top): (usize, usize), print: &Print) -> Option<Vec<f64>> {
        let ground = self.pixel(left, top);
        let (width, height) = (print.width(), print.height.val());
        let top = top + (print.line - height) / 2;
        let places = (0..height).flat_map(|y| (0..width).map(move |x| (left + x, top + y)));
        let far = |(x, y)| {
            let pairs = self.pixel(x, y).into_iter().zip(ground);
            f64::from(pairs.map(|(a, b)| u32::from(a.abs_diff(b))).sum::<u32>())
        };
        let cover: Vec<_> = places.map(far).collect();
        cover.iter().any(|far| *far > 0.0).then(|| scaled(cover))
    }

    /// Reads at most `count` lines. An unknown letter is `?`.
    pub fn read(&self, print: Print, count: usize) -> Vec<String> {
        let letters: Vec<_> = ('!'..='~').map(|letter| (letter, print.cover(letter))).collect();
        let columns = (self.width - print.x) / print.width();
        let rows = (self.pixels.len() / 4 / self.width - print.y) / print.line;
        let letter = |row: usize, column: usize| {
            let place = (print.x + column * print.width(), print.y + row * print.line);
            let Some(seen) = self.cover(place, &print) else { return ' ' };
            let apart =
                |cover: &[f64]| seen.iter().zip(cover).map(|(a, b)| (a - b).powi(2)).sum::<f64>();
            let all = letters.iter().map(|(letter, cover)| (*letter, apart(cover)));
            let best = all.min_by(|a, b| a.1.total_cmp(&b.1)).expect("an alphabet");
            if best.1 < 0.5 { best.0 } else { '?' }
        };
        let line = |row| (0..columns).map(|column| letter(row, column)).collect();
        (0..rows.min(count)).map(line).collect()
    }

    pub fn all(&self, print: Print) -> Vec<String> {
        self.read(print, usize::MAX)
    }
}

/// The rest of the first line that has this label, from the label on.
pub fn find<'a>(lines: &'a [String], label: &str) -> Option<&'a str> {
    lines.iter().find_map(|line| Some(line[line.find(label)?..].trim_end()))
}

/// Whether the line with a label also contains a text.
pub fn says<'a>(print: Print, label: &'a str, text: &'a str) -> impl Fn(&Picture) -> bool + 'a {
    move |picture| find(&picture.all(print), label).is_some_and(|line| line.contains(text))
}

/// The position of a text after a label: its first cell, in pixels. Panics if the page does not
/// have them.
pub fn place(picture: &Picture, print: Print, label: &str, text: &str) -> (usize, usize) {
    let lines = picture.all(print);
    let row = lines.iter().position(|line| line.contains(label)).expect("a line");
    let from = lines[row].find(label).expect("a label") + label.len();
    let column = from + lines[row][from..].find(text).expect("a text");
    (print.x + column * print.width(), print.y + row * print.line)
}
