//! Tight (rfbproto, 7.7.6), and Tight with PNG (7.7.9).
//!
//! The picture is first divided into cells of 16 pixels and classified ([`grid`]). Then cells are
//! combined to rectangles: plain areas, photographs, and all others by their colors. Parts with
//! sharp edges, such as text, are never sent as JPEG. The gradient filter is not used, because
//! noVNC does not support it.

mod grid;

use std::mem::take;

pub(super) use self::grid::Grid;
use self::grid::Span;
use super::deflate::{Effort, Stream};
use super::wire::{Wire, put};
use super::{Encoding, Job, Scratch, header, jpeg, png};
use crate::rfb::format::PixelFormat;
use crate::rfb::picture::{Area, View};

/// Maximum width of a rectangle, by specification and in clients.
const MAX_WIDTH: u16 = 2048;

/// Height that is planned at once. It limits the memory of the plan, and the length of a rectangle.
const MAX_HEIGHT: u16 = 256;

/// Lengths have at most 22 bits.
const MAX_LENGTH: usize = (1 << 22) - 1;

/// Shorter data is not compressed.
const MIN_COMPRESSED: usize = 12;

/// Kinds of rectangles, in the upper half of their first byte.
const FILL: u8 = 0x80;
const JPEG: u8 = 0x90;
const PNG: u8 = 0xa0;
const EXPLICIT_FILTER: u8 = 0x40;
const PALETTE_FILTER: u8 = 1;

/// Numbers of the streams. Each has similar data.
const FULL: u8 = 0;
const MONO: u8 = 1;
const INDEXED: u8 = 2;

/// Plain areas with at least this many cells are filled first.
const MIN_PLAIN: usize = 8;

/// Minimum cells of a photograph. A smaller one does not justify the tables of a JPEG image.
const MIN_PHOTOGRAPH: usize = 6;

/// Among text of more colors, text of two colors gets its own rectangle if it has at least this
/// many cells.
const MIN_MONO: usize = 16;

pub(super) struct Tight {
    format: PixelFormat,
    wire: Wire,
    streams: [Stream; 3],
}

impl Tight {
    pub(super) fn new() -> Self {
        Self {
            format: PixelFormat::OURS,
            wire: Wire::tight(&PixelFormat::OURS),
            streams: Default::default(),
        }
    }

    /// Appends the area as rectangles, and returns their number.
    pub(super) fn encode(
        &mut self,
        job: Job<'_, '_>,
        format: &PixelFormat,
        scratch: &mut Scratch,
        out: &mut Vec<u8>,
    ) -> usize {
        if *format != self.format {
            self.format = *format;
            self.wire = Wire::tight(format);
        }
        let Self { wire, streams, .. } = self;
        // Moved out of the buffers, because the block borrows all others.
        let (mut grid, mut words) = (take(&mut scratch.grid), take(&mut scratch.words));
        let (done, full) = (Wire::done(wire.size), format.is_full());
        let mut count = 0;
        for area in job.view.area.pieces(MAX_WIDTH, MAX_HEIGHT) {
            let view = if full {
                job.view.of(area)
            } else {
                // The client's format has fewer colors, so compare words instead of pixels.
                wire.gather(&job.view.of(area), &mut words);
                let Area { width, height, .. } = area;
                let here = Area { x: 0, y: 0, width, height };
                View { pixels: &words, stride: usize::from(width), area: here }
            };
            grid.survey(&view);
            let wire = if full { &*wire } else { &done };
            let mut block = Block { job, area, view, wire, streams, scratch, out, count: 0 };
            block.plan(&mut grid, job.parameters.quality.filter(|_| full));
            count += block.count;
        }
        (scratch.grid, scratch.words) = (grid, words);
        count
    }
}

/// A part of the picture that is divided into rectangles.
struct Block<'a, 'b> {
    job: Job<'a, 'b>,
    /// Position in the client's picture.
    area: Area,
    /// Its pixels, or words.
    view: View<'a>,
    wire: &'a Wire,
    streams: &'a mut [Stream; 3],
    scratch: &'a mut Scratch,
    out: &'a mut Vec<u8>,
    count: usize,
}

impl Block<'_, '_> {
    fn plan(&mut self, grid: &mut Grid, quality: Option<u8>) {
        for start in 0..grid.len() {
            if let Some(span) = grid.plain(start).filter(|span| span.cells() >= MIN_PLAIN) {
                grid.take(span);
                self.fill(span, grid.word(start));
            }
        }
        if quality.is_some() {
            grid.fill_holes();
        }
        for start in 0..grid.len() {
            let Some(span) = grid.photograph(start) else { continue };
            match quality {
                Some(_) if span.cells() < MIN_PHOTOGRAPH => grid.reject_photograph(start),
                _ => {
                    grid.take(span);
                    self.photograph(span, quality);
                }
            }
        }
        for start in 0..grid.len() {
            self.rest(grid, start);
        }
    }

    /// Makes a rectangle that starts here, unless the cell is in one already.
    fn rest(&mut self, grid: &mut Grid, start: usize) {
        let mono = grid.mono(start);
        let enough = mono.filter(|span| span.cells() >= MIN_MONO);
        let indexed = if enough.is_some() { None } else { self.indexed(grid, start) };
        let span = match (mono, indexed) {
            (Some(mono), Some(indexed)) if 2 * mono.cells() < indexed.cells() => indexed,
            (Some(mono), _) => {
                self.scratch.palette.clear();
                grid.colours(mono, &self.view, &mut self.scratch.palette);
                mono
            }
            (None, Some(indexed)) => indexed,
            (None, None) => return,
        };
        grid.take(span);
        self.exact(span);
    }

    /// Finds a rectangle that starts here with few enough colors for a palette.
    fn indexed(&mut self, grid: &Grid, start: usize) -> Option<Span> {
        let (view, palette) = (self.view, &mut self.scratch.palette);
        palette.clear();
        grid.grow(start, |strip| grid.colours(strip, &view, palette))
    }

    fn begin(&mut self, span: Span, kind: u8) {
        header(span.area(self.area), self.job.parameters.encoding, self.out);
        self.out.push(kind);
        self.count += 1;
    }

    fn fill(&mut self, span: Span, word: u32) {
        self.begin(span, FILL);
        put([self.wire.word(word)].into_iter(), self.wire.size, self.out);
    }

    /// Appends a photograph: as JPEG if a quality is set, else without loss.
    fn photograph(&mut self, span: Span, quality: Option<u8>) {
        let Some(level) = quality else { return self.full(span, self.job.effort().photograph()) };
        let view = self.view.of(span.area(self.view.area));
        let Scratch { plain, packed, .. } = &mut *self.scratch;
        let written = jpeg::write(&view, level, plain, packed);
        if written.is_err() || packed.len() > MAX_LENGTH {
            return self.full(span, self.job.effort().photograph());
        }
        self.begin(span, JPEG);
        self.image();
    }

    /// Appends a rectangle without loss, in the form with the fewest bytes. The palette must have
    /// its colors.
    fn exact(&mut self, span: Span) {
        let many = span.area(self.area).pixels() / 4;
        match *self.scratch.palette.words {
            [word] => self.fill(span, word),
            _ if self.job.parameters.encoding == Encoding::TightPng => self.png(span),
            [_, _] => self.colours(span, MONO, 1),
            ref words if words.len() <= many => self.colours(span, INDEXED, 8),
            _ => self.full(span, self.job.effort()),
        }
    }

    /// Appends the pixels without a palette.
    fn full(&mut self, span: Span, effort: Effort) {
        if self.job.parameters.encoding == Encoding::TightPng {
            return self.png(span);
        }
        let view = self.view.of(span.area(self.view.area));
        self.begin(span, FULL << 4);
        view.rows().for_each(|row| self.wire.write(row, &mut self.scratch.plain));
        self.data(FULL, effort);
    }

    /// Appends indices of the palette, with this many bits each.
    fn colours(&mut self, span: Span, stream: u8, bits: usize) {
        let view = self.view.of(span.area(self.view.area));
        self.begin(span, stream << 4 | EXPLICIT_FILTER);
        let Scratch { palette, plain, .. } = &mut *self.scratch;
        let words = &palette.words;
        let last = u8::try_from(words.len() - 1).expect("there are at most 256 colors");
        self.out.extend([PALETTE_FILTER, last]);
        put(words.iter().map(|word| self.wire.word(*word)), self.wire.size, self.out);
        view.rows().for_each(|row| palette.indices(row, bits, plain));
        self.data(stream, self.job.effort());
    }

    /// Appends the bytes in `plain`, compressed if there are enough.
    fn data(&mut self, stream: u8, effort: Effort) {
        let Scratch { plain, packed, .. } = &mut *self.scratch;
        if plain.len() < MIN_COMPRESSED {
            self.out.append(plain);
            return;
        }
        packed.clear();
        self.streams[usize::from(stream)].finish(effort, plain, packed);
        self.image();
    }

    fn png(&mut self, span: Span) {
        let view = self.view.of(span.area(self.view.area));
        let Scratch { palette, plain, packed, .. } = &mut *self.scratch;
        packed.clear();
        png::write(&view, palette, plain, packed).expect("an area with pixels is an image");
        self.begin(span, PNG);
        self.image();
    }

    /// Appends the bytes in `packed` behind their length, in groups of seven bits, lowest first.
    /// The highest bit of a byte is set if more follow.
    fn image(&mut self) {
        let packed = &self.scratch.packed;
        let mut length = packed.len();
        while length > 0x7f {
            self.out.push(length.to_le_bytes()[0] | 0x80);
            length >>= 7;
        }
        self.out.push(length.to_le_bytes()[0]);
        self.out.extend(packed);
    }
}
