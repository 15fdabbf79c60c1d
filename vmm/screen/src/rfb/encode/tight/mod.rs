//! Tight (rfbproto, 7.7.6), and Tight with PNG (7.7.9).
//!
//! A picture is looked at in cells of 16 pixels first ([`grid`]). Then larger and larger parts of
//! it become rectangles: plain areas, photographs, and what is left by its colours. What has sharp
//! edges, as text has, is never sent as JPEG. The gradient filter is not used: noVNC lacks it.

mod grid;

use std::mem::take;

pub(super) use self::grid::Grid;
use self::grid::Span;
use super::deflate::{Effort, Stream};
use super::wire::{Wire, put};
use super::{Encoding, Job, Room, header, jpeg, png};
use crate::rfb::format::PixelFormat;
use crate::rfb::picture::{Area, View};

/// Neither clients nor the specification know wider rectangles.
const WIDTH: u16 = 2048;

/// How much is planned at once. It bounds what the plan takes, and the length of a rectangle.
const HEIGHT: u16 = 256;

/// A length has at most 22 bits.
const LONGEST: usize = (1 << 22) - 1;

/// What is shorter is not compressed.
const SHORTEST: usize = 12;

/// Kinds of rectangles, in the upper half of their first byte.
const FILL: u8 = 0x80;
const JPEG: u8 = 0x90;
const PNG: u8 = 0xa0;
const EXPLICIT_FILTER: u8 = 0x40;
const PALETTE_FILTER: u8 = 1;

/// The streams: what is compressed together is alike.
const FULL: u8 = 0;
const MONO: u8 = 1;
const INDEXED: u8 = 2;

/// Plain areas of at least so many cells are filled before all else.
const PLAIN: usize = 8;

/// Photographs of at least so many cells are worth the tables that each JPEG image brings along.
const PHOTOGRAPH: usize = 6;

/// Text of two colours among text of more of them is worth its own rectangle from so many cells on.
const MONO_CELLS: usize = 16;

/// A client's streams.
pub(super) struct Tight {
    format: PixelFormat,
    wire: Wire,
    streams: [Stream; 3],
}

impl Tight {
    /// For a client that has just come.
    pub(super) fn new() -> Self {
        Self {
            format: PixelFormat::OURS,
            wire: Wire::tight(&PixelFormat::OURS),
            streams: Default::default(),
        }
    }

    /// Appends the area as rectangles, and says how many.
    pub(super) fn encode(
        &mut self,
        job: Job<'_, '_>,
        format: &PixelFormat,
        room: &mut Room,
        out: &mut Vec<u8>,
    ) -> usize {
        if *format != self.format {
            self.format = *format;
            self.wire = Wire::tight(format);
        }
        let Self { wire, streams, .. } = self;
        // Taken out meanwhile, because all else is lent to the block.
        let (mut grid, mut words) = (take(&mut room.grid), take(&mut room.words));
        let (done, full) = (Wire::done(wire.size()), format.is_full());
        let mut count = 0;
        for area in job.view.area.pieces(WIDTH, HEIGHT) {
            let view = if full {
                job.view.of(area)
            } else {
                // Fewer colours are left of these pixels, so that it pays to look at words.
                wire.gather(&job.view.of(area), &mut words);
                let Area { width, height, .. } = area;
                let here = Area { x: 0, y: 0, width, height };
                View { pixels: &words, stride: usize::from(width), area: here }
            };
            grid.survey(&view);
            let wire = if full { &*wire } else { &done };
            let mut block = Block { job, area, view, wire, streams, room, out, count: 0 };
            block.plan(&mut grid, job.choice.quality.filter(|_| full));
            count += block.count;
        }
        (room.grid, room.words) = (grid, words);
        count
    }
}

/// A part of the picture, which becomes rectangles.
struct Block<'a, 'b> {
    job: Job<'a, 'b>,
    /// Where it is for the client.
    area: Area,
    /// Its pixels, or words.
    view: View<'a>,
    wire: &'a Wire,
    streams: &'a mut [Stream; 3],
    room: &'a mut Room,
    out: &'a mut Vec<u8>,
    count: usize,
}

impl Block<'_, '_> {
    /// Cuts the block into rectangles.
    fn plan(&mut self, grid: &mut Grid, quality: Option<u8>) {
        for start in 0..grid.len() {
            if let Some(span) = grid.plain(start).filter(|span| span.cells() >= PLAIN) {
                grid.take(span);
                self.fill(span, grid.word(start));
            }
        }
        if quality.is_some() {
            grid.close();
        }
        for start in 0..grid.len() {
            let Some(span) = grid.photograph(start) else { continue };
            match quality {
                Some(_) if span.cells() < PHOTOGRAPH => grid.sharpen(start),
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

    /// A rectangle for what starts here, if it has none yet.
    fn rest(&mut self, grid: &mut Grid, start: usize) {
        let mono = grid.mono(start);
        let enough = mono.filter(|span| span.cells() >= MONO_CELLS);
        let indexed = if enough.is_some() { None } else { self.indexed(grid, start) };
        let span = match (mono, indexed) {
            (Some(mono), Some(indexed)) if 2 * mono.cells() < indexed.cells() => indexed,
            (Some(mono), _) => {
                self.room.palette.clear();
                grid.colours(mono, &self.view, &mut self.room.palette);
                mono
            }
            (None, Some(indexed)) => indexed,
            (None, None) => return,
        };
        grid.take(span);
        self.exact(span);
    }

    /// What starts here and has few enough colours for a palette.
    fn indexed(&mut self, grid: &Grid, start: usize) -> Option<Span> {
        let (view, palette) = (self.view, &mut self.room.palette);
        palette.clear();
        grid.grow(start, |strip| grid.colours(strip, &view, palette))
    }

    /// Starts a rectangle.
    fn begin(&mut self, span: Span, kind: u8) {
        header(span.area(self.area), self.job.choice.encoding, self.out);
        self.out.push(kind);
        self.count += 1;
    }

    /// One colour.
    fn fill(&mut self, span: Span, word: u32) {
        self.begin(span, FILL);
        put([self.wire.word(word)].into_iter(), self.wire.size(), self.out);
    }

    /// JPEG, if it may be.
    fn photograph(&mut self, span: Span, quality: Option<u8>) {
        let Some(level) = quality else { return self.full(span, self.job.effort().photograph()) };
        let view = self.view.of(span.area(self.view.area));
        let Room { plain, packed, .. } = &mut *self.room;
        let written = jpeg::write(&view, level, plain, packed);
        if written.is_err() || packed.len() > LONGEST {
            return self.full(span, self.job.effort().photograph());
        }
        self.begin(span, JPEG);
        self.image();
    }

    /// Each pixel as it is, in the way that takes the fewest bytes. Its colours are in the
    /// palette.
    fn exact(&mut self, span: Span) {
        let many = span.area(self.area).pixels() / 4;
        match *self.room.palette.words() {
            [word] => self.fill(span, word),
            _ if self.job.choice.encoding == Encoding::TightPng => self.png(span),
            [_, _] => self.colours(span, MONO, 1),
            ref words if words.len() <= many => self.colours(span, INDEXED, 8),
            _ => self.full(span, self.job.effort()),
        }
    }

    /// Each pixel with all its colours.
    fn full(&mut self, span: Span, effort: Effort) {
        if self.job.choice.encoding == Encoding::TightPng {
            return self.png(span);
        }
        let view = self.view.of(span.area(self.view.area));
        self.begin(span, FULL << 4);
        view.rows().for_each(|row| self.wire.write(row, &mut self.room.plain));
        self.data(FULL, effort);
    }

    /// Indices of the colours that were found, each of so many bits.
    fn colours(&mut self, span: Span, stream: u8, bits: usize) {
        let view = self.view.of(span.area(self.view.area));
        self.begin(span, stream << 4 | EXPLICIT_FILTER);
        let Room { palette, plain, .. } = &mut *self.room;
        let words = palette.words();
        let last = u8::try_from(words.len() - 1).expect("there are at most 256 colours");
        self.out.extend([PALETTE_FILTER, last]);
        put(words.iter().map(|word| self.wire.word(*word)), self.wire.size(), self.out);
        view.rows().for_each(|row| palette.indices(row, bits, plain));
        self.data(stream, self.job.effort());
    }

    /// The bytes in `plain`, compressed if there are enough.
    fn data(&mut self, stream: u8, effort: Effort) {
        let Room { plain, packed, .. } = &mut *self.room;
        if plain.len() < SHORTEST {
            self.out.append(plain);
            return;
        }
        packed.clear();
        self.streams[usize::from(stream)].finish(effort, plain, packed);
        self.image();
    }

    fn png(&mut self, span: Span) {
        let view = self.view.of(span.area(self.view.area));
        let Room { palette, plain, packed, .. } = &mut *self.room;
        packed.clear();
        png::write(&view, palette, plain, packed).expect("an area with pixels is an image");
        self.begin(span, PNG);
        self.image();
    }

    /// The bytes in `packed`, behind their length: seven bits of it in each byte, the lowest
    /// first, and whether there are more.
    fn image(&mut self) {
        let packed = &self.room.packed;
        let mut length = packed.len();
        while length > 0x7f {
            self.out.push(length.to_le_bytes()[0] | 0x80);
            length >>= 7;
        }
        self.out.push(length.to_le_bytes()[0]);
        self.out.extend(packed);
    }
}
