//! Classifies a picture in cells of 16 pixels (plain, two colors, photograph, others), and finds
//! rectangles of similar cells.

use crate::rfb::encode::palette::{MAX_COLOURS, Palette};
use crate::rfb::picture::{Area, View};

const SIDE: u16 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Solid,
    Two,
    /// More colors, possibly with sharp edges.
    Other,
    /// Many colors, and no details that JPEG would spoil.
    Photo,
}

#[derive(Clone, Copy, Debug)]
struct Cell {
    kind: Kind,
    /// The cell is part of a rectangle.
    taken: bool,
    /// The cell contains an edge.
    sharp: bool,
    /// The first two colors.
    words: [u32; 2],
}

impl Cell {
    fn is(&self, kind: Kind) -> bool {
        self.kind == kind
    }

    /// The colors, if there are at most two.
    fn few_colours(&self) -> Option<&[u32]> {
        match self.kind {
            Kind::Solid => Some(&self.words[..1]),
            Kind::Two => Some(&self.words),
            Kind::Other | Kind::Photo => None,
        }
    }
}

/// A rectangle of cells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    column: u16,
    row: u16,
    columns: u16,
    rows: u16,
}

impl Span {
    pub(super) const fn cells(self) -> usize {
        self.columns as usize * self.rows as usize
    }

    fn each(self) -> impl Iterator<Item = Self> {
        let columns = self.column..self.column + self.columns;
        (self.row..self.row + self.rows).flat_map(move |row| {
            columns.clone().map(move |column| Self { column, row, columns: 1, rows: 1 })
        })
    }

    /// The pixels of the cells, where `of` is the area of the whole grid.
    pub(super) fn area(self, of: Area) -> Area {
        let (x, y) = (self.column * SIDE, self.row * SIDE);
        Area {
            x: of.x + x,
            y: of.y + y,
            width: (self.columns * SIDE).min(of.width - x),
            height: (self.rows * SIDE).min(of.height - y),
        }
    }
}

#[derive(Default)]
pub(in crate::rfb::encode) struct Grid {
    cells: Vec<Cell>,
    columns: u16,
    rows: u16,
    palette: Palette,
}

impl Grid {
    /// Classifies the pixels of an area.
    pub(super) fn survey(&mut self, view: &View<'_>) {
        self.cells.clear();
        self.columns = view.area.width.div_ceil(SIDE);
        self.rows = view.area.height.div_ceil(SIDE);
        let pieces = view.area.pieces(SIDE, SIDE);
        let classify = |area| classify(&view.of(area), &mut self.palette);
        self.cells.extend(pieces.map(classify));
    }

    pub(super) const fn len(&self) -> usize {
        self.cells.len()
    }

    /// The first color of a cell.
    pub(super) fn word(&self, cell: usize) -> u32 {
        self.cells[cell].words[0]
    }

    fn at(&self, column: u16, row: u16) -> usize {
        usize::from(row) * usize::from(self.columns) + usize::from(column)
    }

    fn position(&self, cell: usize) -> (u16, u16) {
        let columns = usize::from(self.columns);
        let [column, row] = [cell % columns, cell / columns]
            .map(|it| u16::try_from(it).expect("a cell has 16 pixels of a side of at most 65535"));
        (column, row)
    }

    /// Whether all cells of a span fulfill a condition, and none is part of a rectangle.
    fn all(&self, span: Span, mut is: impl FnMut(&Cell) -> bool) -> bool {
        (span.row..span.row + span.rows).all(|row| {
            let start = self.at(span.column, row);
            let cells = &self.cells[start..start + usize::from(span.columns)];
            cells.iter().all(|cell| !cell.taken && is(cell))
        })
    }

    /// Adds the colors of a span to a palette. Returns false and adds nothing if there are too
    /// many, or if a cell is a photograph or part of a rectangle.
    pub(super) fn colours(&self, span: Span, view: &View<'_>, palette: &mut Palette) -> bool {
        let before = palette.words.len();
        let fits = self.all(span, |cell| !cell.is(Kind::Photo))
            && span.each().all(|one| {
                match self.cells[self.at(one.column, one.row)].few_colours() {
                    Some(words) => palette.add_all(words, MAX_COLOURS),
                    None => view
                        .of(one.area(view.area))
                        .rows()
                        .all(|row| palette.add_all(row, MAX_COLOURS)),
                }
            });
        if !fits {
            palette.truncate(before);
        }
        fits
    }

    /// Marks cells as part of a rectangle.
    pub(super) fn take(&mut self, span: Span) {
        for row in span.row..span.row + span.rows {
            let start = self.at(span.column, row);
            let cells = &mut self.cells[start..start + usize::from(span.columns)];
            cells.iter_mut().for_each(|cell| cell.taken = true);
        }
    }

    /// Reclassifies a cell whose photograph is too small for JPEG.
    pub(super) fn reject_photograph(&mut self, cell: usize) {
        self.cells[cell].kind = Kind::Other;
    }

    /// Finds a span that starts at a cell: first as wide and then as high as each added strip fits.
    pub(super) fn grow(&self, cell: usize, mut fits: impl FnMut(Span) -> bool) -> Option<Span> {
        let (column, row) = self.position(cell);
        let mut span = Span { column, row, columns: 1, rows: 1 };
        if self.cells[cell].taken || !fits(span) {
            return None;
        }
        while column + span.columns < self.columns
            && fits(Span { column: column + span.columns, columns: 1, ..span })
        {
            span.columns += 1;
        }
        while row + span.rows < self.rows && fits(Span { row: row + span.rows, rows: 1, ..span }) {
            span.rows += 1;
        }
        Some(span)
    }

    /// Finds a span of one color that starts at a cell.
    pub(super) fn plain(&self, cell: usize) -> Option<Span> {
        let word = self.word(cell);
        let same = |it: &Cell| it.kind == Kind::Solid && it.words[0] == word;
        self.grow(cell, |strip| self.all(strip, same))
    }

    pub(super) fn photograph(&self, cell: usize) -> Option<Span> {
        self.grow(cell, |strip| self.all(strip, |it| it.kind == Kind::Photo))
    }

    /// Finds a span of at most two colors that starts at a cell.
    pub(super) fn mono(&self, cell: usize) -> Option<Span> {
        let (mut words, mut count) = ([0; 2], 0);
        let mut known = |it: &Cell| {
            let mut words_of = it.few_colours().unwrap_or_default().iter();
            it.few_colours().is_some()
                && words_of.all(|word| {
                    if !words[..count].contains(word) {
                        if count == words.len() {
                            return false;
                        }
                        words[count] = *word;
                        count += 1;
                    }
                    true
                })
        };
        self.grow(cell, |strip| self.all(strip, &mut known))
    }

    /// Makes cells that photographs surround part of them, unless they contain an edge.
    pub(super) fn fill_holes(&mut self) {
        for cell in 0..self.cells.len() {
            let it = self.cells[cell];
            if it.taken || it.sharp || it.kind == Kind::Photo {
                continue;
            }
            let (column, row) = self.position(cell);
            let beside = [
                column.checked_sub(1).map(|column| (column, row)),
                row.checked_sub(1).map(|row| (column, row)),
                (column + 1 < self.columns).then_some((column + 1, row)),
                (row + 1 < self.rows).then_some((column, row + 1)),
            ];
            let photos = beside
                .into_iter()
                .flatten()
                .filter(|(column, row)| self.cells[self.at(*column, *row)].kind == Kind::Photo);
            if photos.count() >= 3 {
                self.cells[cell].kind = Kind::Photo;
            }
        }
    }
}

fn classify(view: &View<'_>, palette: &mut Palette) -> Cell {
    let first = view.row(0)[0];
    let mut cell = Cell { kind: Kind::Solid, taken: false, sharp: false, words: [first; 2] };
    let Some(other) = view.rows().find_map(|row| another(row, first)) else { return cell };
    cell.words[1] = other;
    let strange = |row: &[u32]| {
        row.iter().fold(0, |all, word| all + u32::from(*word != first && *word != other))
    };
    cell.sharp = true;
    if view.rows().all(|row| strange(row) == 0) {
        cell.kind = Kind::Two;
        return cell;
    }
    cell.kind = Kind::Other;
    let pairs = view.area.pixels() - usize::from(view.area.height);
    let equal = count(view, |one, next| one == next);
    if 4 * equal >= 3 * pairs {
        return cell;
    }
    let sharp = count(view, is_edge);
    cell.sharp = sharp > 0 || is_edge_between(view);
    // Soft everywhere, or different everywhere. Text is neither: it has edges and a plain
    // background.
    let enough = if 16 * sharp < pairs { view.area.pixels() / 12 } else { pairs / 3 };
    if (16 * sharp < pairs || 4 * equal < pairs) && !(cell.sharp && is_partly_text(view, palette)) {
        palette.clear();
        // Counting stops as soon as there are enough.
        if !view.rows().all(|row| palette.add_all(row, enough.clamp(1, MAX_COLOURS))) {
            cell.kind = Kind::Photo;
        }
    }
    cell
}

/// Counts pixels that fulfill a condition with their right neighbor.
fn count(view: &View<'_>, is: impl Fn(u32, u32) -> bool) -> usize {
    let row = |row: &[u32]| {
        let pairs = row.iter().zip(&row[1..]);
        pairs.fold(0_u32, |count, (one, next)| count + u32::from(is(*one, *next)))
    };
    view.rows().map(row).sum::<u32>() as usize
}

/// Finds the first other color. Mostly all pixels are equal, so that is checked first.
fn another(row: &[u32], first: u32) -> Option<u32> {
    let different = row.iter().fold(0, |all, word| all | (word ^ first));
    if different == 0 {
        return None;
    }
    row.iter().copied().find(|word| *word != first)
}

fn is_edge_between(view: &View<'_>) -> bool {
    let edges = |(upper, lower): (&[u32], &[u32])| {
        let pairs = upper.iter().zip(lower);
        pairs.fold(false, |any, (one, next)| any | is_edge(*one, *next))
    };
    view.rows().zip(view.rows().skip(1)).any(edges)
}

/// Whether a part of a cell does not resemble a photograph although the whole does, as at the edge
/// of a photograph.
fn is_partly_text(view: &View<'_>, palette: &mut Palette) -> bool {
    let mut few_colours = |area: Area| {
        palette.clear();
        view.of(area).rows().all(|row| palette.add_all(row, area.pixels() / 4))
    };
    let strips = |width, height| view.area.pieces(width, height);
    view.rows().any(has_paper) || strips(SIDE, 4).chain(strips(4, SIDE)).any(&mut few_colours)
}

/// Whether a row has plain background somewhere, with or without text. It lies beside a photograph,
/// and would look bad as a part of it.
fn has_paper(row: &[u32]) -> bool {
    row.chunks_exact(8).any(|part| {
        let pairs = || part.iter().zip(&part[1..]);
        let equal = pairs().filter(|(one, next)| one == next).count();
        equal == 7 || equal > 3 && pairs().any(|(one, next)| is_edge(*one, *next))
    })
}

/// A larger difference in one color is an edge.
const EDGE: u32 = 32;

/// Whether two pixels differ by more than `EDGE` in some color.
fn is_edge(one: u32, next: u32) -> bool {
    let far = |shift: u32| {
        let [one, next] = [one, next].map(|it| it >> shift & 0xff);
        u32::from((one + EDGE).wrapping_sub(next) > 2 * EDGE)
    };
    far(0) | far(8) | far(16) != 0
}
