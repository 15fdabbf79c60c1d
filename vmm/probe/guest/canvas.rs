//! Draws areas and text. Text consists of cells; only cells that changed are drawn.
use core::fmt::{self, Write};

use crate::font::Font;
use crate::io::{read32, write32, write64};

/// The appearance of a cell: two indices into the palette, for text and background.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style(u8);

const PALETTE: [u32; 10] = [
    0x0d_1117, // the page
    0x16_1d27, // a panel
    0x2a_3646, // a key
    0xdd_e5ee, // text
    0x86_94a6, // labels
    0x6c_b6ff, // headings
    0x57_d08c, // right
    0xff_6b6b, // wrong
    0xf0_c04c, // not yet known
    0xff_ffff, // the title
];
const PAGE: u8 = 0;
const PANEL: u8 = 1;

impl Style {
    pub(crate) const PAGE: Self = Self::of(3, PAGE);
    pub(crate) const TEXT: Self = Self::of(3, PANEL);
    pub(crate) const LABEL: Self = Self::of(4, PANEL);
    pub(crate) const HEADING: Self = Self::of(5, PANEL);
    pub(crate) const GOOD: Self = Self::of(6, PANEL);
    pub(crate) const BAD: Self = Self::of(7, PANEL);
    pub(crate) const OPEN: Self = Self::of(8, PANEL);
    pub(crate) const KEY: Self = Self::of(3, 2);
    pub(crate) const HELD: Self = Self::of(PAGE, 5);
    pub(crate) const TITLE: Self = Self::of(9, PAGE);
    pub(crate) const SUBTITLE: Self = Self::of(4, PAGE);
    pub(crate) const ALL_GOOD: Self = Self::of(PAGE, 6);
    pub(crate) const SOME_BAD: Self = Self::of(PAGE, 7);
    pub(crate) const WORKING: Self = Self::of(PAGE, 8);

    const fn of(text: u8, background: u8) -> Self {
        Self(text | background << 4)
    }

    fn colours(self) -> [u32; 2] {
        [self.0 & 0xf, self.0 >> 4].map(|at| PALETTE.get(usize::from(at)).copied().unwrap_or(0))
    }
}

/// A frame buffer with four bytes per pixel, row by row.
#[derive(Clone, Copy)]
pub(crate) struct Canvas {
    pub(crate) picture: u64,
    pub(crate) width: u32,
    pub(crate) height: u32,
}

impl Canvas {
    fn at(&self, x: u32, y: u32) -> u64 {
        self.picture + 4 * (u64::from(y) * u64::from(self.width) + u64::from(x))
    }

    /// Fills the screen with the page's background color.
    pub(crate) fn clear(&self) {
        let pair = u64::from(PALETTE[usize::from(PAGE)]) * 0x1_0000_0001;
        let end = self.at(0, self.height);
        (self.picture..end & !7).step_by(8).for_each(|at| write64(at, pair));
    }

    /// Fills an area (left, top, right, bottom) with the background color of a style.
    pub(crate) fn fill(&self, [left, top, right, bottom]: [u32; 4], style: Style) {
        let [_, background] = style.colours();
        for y in top..bottom {
            (left..right).for_each(|x| self.set(x, y, background));
        }
    }

    pub(crate) fn get(&self, x: u32, y: u32) -> u32 {
        if x < self.width && y < self.height { read32(self.at(x, y)) } else { 0 }
    }

    pub(crate) fn set(&self, x: u32, y: u32, colour: u32) {
        if x < self.width && y < self.height {
            write32(self.at(x, y), colour);
        }
    }

    /// Draws a cell: its background, and a glyph in the middle of its height.
    fn cell(&self, layer: &Layer, index: usize, cell: Cell) {
        let [text, background] = cell.style.colours();
        let shades: [u32; 16] = core::array::from_fn(|level| mix(text, background, level as u32));
        let (column, row) = (index % layer.columns, index / layer.columns);
        let (width, height) = (layer.font.width(), layer.font.height());
        let left = layer.x + column as u32 * width;
        let top = layer.y + row as u32 * layer.line;
        let above = (layer.line - height) / 2;
        let blank = cell.code == b' ';
        for y in 0..layer.line {
            let inside = !blank && (above..above + height).contains(&y);
            for x in 0..width {
                let level = if inside { layer.font.level(cell.code, x, y - above) } else { 0 };
                self.set(left + x, top + y, shades[level as usize & 0xf]);
            }
        }
    }
}

/// Mixes two colors: `level` fifteenths of the text, and the rest of the background.
fn mix(text: u32, background: u32, level: u32) -> u32 {
    [0, 8, 16].into_iter().fold(0, |sum, shift| {
        let [text, background] = [text, background].map(|colour| colour >> shift & 0xff);
        sum | (text * level + background * (15 - level)) / 15 << shift
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Cell {
    code: u8,
    style: Style,
}

impl Cell {
    /// The initial content of static memory.
    pub(crate) const ZERO: Self = Self { code: 0, style: Style(0) };
    pub(crate) const EMPTY: Self = Self { code: b' ', style: Style::PAGE };
}

/// A grid of cells with one font.
pub(crate) struct Layer {
    pub(crate) font: Font,
    /// The position of the grid, and the height of a row, in pixels.
    pub(crate) x: u32,
    pub(crate) y: u32,
    pub(crate) line: u32,
    pub(crate) columns: usize,
    pub(crate) rows: usize,
    /// The wanted content, and the content that is on the screen.
    pub(crate) wanted: &'static mut [Cell],
    pub(crate) shown: &'static mut [Cell],
}

impl Layer {
    /// Clears the wanted content.
    pub(crate) fn blank(&mut self) {
        self.wanted.fill(Cell::EMPTY);
    }

    /// Marks the screen as cleared, so that everything is drawn again.
    pub(crate) fn forget(&mut self) {
        self.shown.fill(Cell::EMPTY);
    }

    /// A pen that writes into a row, from `column` to `end` (exclusive).
    pub(crate) fn pen(&mut self, row: usize, column: usize, end: usize) -> Pen<'_> {
        let end = end.min(self.columns);
        Pen { layer: self, row, begin: column, column, end, style: Style::TEXT }
    }

    /// Draws the cells that changed.
    pub(crate) fn draw(&mut self, canvas: &Canvas) {
        let count = (self.columns * self.rows).min(self.wanted.len()).min(self.shown.len());
        for index in 0..count {
            let cell = self.wanted[index];
            if cell != self.shown[index] {
                self.shown[index] = cell;
                canvas.cell(self, index, cell);
            }
        }
    }
}

/// Writes into one row of a layer, and cuts text that does not fit.
pub(crate) struct Pen<'a> {
    layer: &'a mut Layer,
    row: usize,
    begin: usize,
    column: usize,
    end: usize,
    style: Style,
}

impl Pen<'_> {
    pub(crate) fn style(&mut self, style: Style) -> &mut Self {
        self.style = style;
        self
    }

    pub(crate) fn write(&mut self, style: Style, text: fmt::Arguments) -> &mut Self {
        self.style = style;
        self.write_fmt(text).ok();
        self
    }

    /// Writes a glyph by its number in the font. Some glyphs are not characters.
    pub(crate) fn glyph(&mut self, code: u8) {
        let index = self.row * self.layer.columns + self.column;
        if self.row >= self.layer.rows {
            return;
        }
        if self.column >= self.end {
            return self.cut();
        }
        if let Some(cell) = self.layer.wanted.get_mut(index) {
            *cell = Cell { code, style: self.style };
            self.column += 1;
        }
    }

    fn cut(&mut self) {
        let index = (self.row * self.layer.columns + self.end).checked_sub(1);
        let last = index.and_then(|index| self.layer.wanted.get_mut(index));
        if let Some(cell) = last.filter(|_| self.end > self.begin) {
            *cell = Cell { code: b'~', style: self.style };
        }
    }

    pub(crate) fn column(&self) -> usize {
        self.column
    }

    /// Fills the rest of the row with the current style.
    pub(crate) fn fill(&mut self) {
        while self.row < self.layer.rows && self.column < self.end {
            self.glyph(b' ');
        }
    }
}

impl Write for Pen<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        text.bytes().filter(|byte| *byte >= b' ').for_each(|byte| self.glyph(byte));
        Ok(())
    }
}
