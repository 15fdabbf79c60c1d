//! Encodings (RFC 6143, 7.7, and the community's `rfbproto`). They turn pixels into rectangles,
//! without any input or output.
//!
//! The client's picture equals the original, or nearly so if the client allows lossy encoding. Text
//! is never degraded.
//!
//! An [`Encoder`] has a bounded amount of memory, whatever is sent: a compressor of a third of a
//! MiB for each stream in use, at most seven. Buffers belong to the thread ([`Scratch`]), so a
//! client that does not read occupies none.

mod deflate;
mod hextile;
mod jpeg;
mod palette;
mod png;
mod rre;
mod tight;
mod tiles;
mod wire;

use std::cell::RefCell;

use self::deflate::{Effort, Stream};
use self::palette::Palette;
use self::tight::{Grid, Tight};
use self::wire::Wire;
use super::format::PixelFormat;
use super::picture::{Area, View};

/// The number of `CopyRect`, which copies within the client's picture: see [`copy`].
pub const COPY_RECT: i32 = 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// 7.7.1: uncompressed pixels.
    Raw,
    /// 7.7.3: a background with rectangles on it.
    Rre,
    /// Like RRE, with coordinates of 8 bits.
    CoRre,
    /// 7.7.4: RRE in tiles of 16 pixels.
    Hextile,
    /// Raw, compressed.
    Zlib,
    /// Like Tight, with PNG instead of its own lossless compression. For browsers.
    TightPng,
    /// Filled areas, palettes and JPEG, chosen for each part of the picture.
    Tight,
    /// 7.7.5: palettes and runs in tiles of 16 pixels.
    Trle,
    /// 7.7.6: palettes and runs in tiles of 64 pixels, compressed.
    Zrle,
}

impl Encoding {
    /// All encodings, in the order in which a server prefers them.
    pub const ALL: [Self; 9] = [
        Self::Tight,
        Self::Zrle,
        Self::TightPng,
        Self::Hextile,
        Self::Zlib,
        Self::Trle,
        Self::CoRre,
        Self::Rre,
        Self::Raw,
    ];

    /// The number in `SetEncodings` and in the header of a rectangle.
    pub const fn number(self) -> i32 {
        match self {
            Self::Raw => 0,
            Self::Rre => 2,
            Self::CoRre => 4,
            Self::Hextile => 5,
            Self::Zlib => 6,
            Self::Tight => 7,
            Self::Trle => 15,
            Self::Zrle => 16,
            Self::TightPng => -260,
        }
    }

    /// Number of rectangles that [`Encoder::encode`] makes of an area, unless it depends on the
    /// pixels.
    pub fn rectangles(self, format: &PixelFormat, area: Area) -> Option<usize> {
        match self {
            Self::Tight => None,
            Self::TightPng if format.is_full() => None,
            Self::Rre | Self::CoRre => Some(rre::count(area)),
            _ => Some(usize::from(!area.is_empty())),
        }
    }

    pub fn from_number(number: i32) -> Option<Self> {
        Self::ALL.into_iter().find(|it| it.number() == number)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    pub encoding: Encoding,
    /// Quality of JPEG, 0 to 9. Without it, encoding is lossless.
    pub quality: Option<u8>,
    /// Effort of compression, 0 to 9.
    pub compression: u8,
}

#[derive(Clone, Copy)]
struct Job<'a, 'b> {
    parameters: &'a Parameters,
    view: &'a View<'b>,
}

impl Job<'_, '_> {
    fn effort(&self) -> Effort {
        Effort::new(self.parameters.compression)
    }
}

/// Buffers that are reused for each rectangle, by all clients whose pictures this thread encodes.
#[derive(Default)]
struct Scratch {
    tile: Vec<u32>,
    plain: Vec<u8>,
    palette: Palette,
    packed: Vec<u8>,
    words: Vec<u32>,
    grid: Grid,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Encoder for one client, whose decoder has the same streams.
pub struct Encoder {
    format: PixelFormat,
    /// Whole pixels, `PIXEL`.
    pixel: Wire,
    /// Pixels without their unused byte, `CPIXEL`.
    compact: Wire,
    zlib: Stream,
    zrle: Stream,
    tight: Tight,
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Encoder {
    pub fn new() -> Self {
        let format = PixelFormat::OURS;
        Self {
            format,
            pixel: Wire::pixel(&format),
            compact: Wire::compact(&format),
            zlib: Stream::default(),
            zrle: Stream::default(),
            tight: Tight::new(),
        }
    }

    /// Appends the area as rectangles with their headers, and returns their number. There is fewer
    /// than one rectangle per 256 pixels, unless the area is narrower than 16.
    ///
    /// The format may change between two calls, as `SetPixelFormat` allows. The streams continue.
    pub fn encode(
        &mut self,
        parameters: &Parameters,
        format: &PixelFormat,
        view: &View<'_>,
        out: &mut Vec<u8>,
    ) -> usize {
        if *format != self.format {
            self.format = *format;
            self.pixel = Wire::pixel(format);
            self.compact = Wire::compact(format);
        }
        SCRATCH.with_borrow_mut(|scratch| self.append(Job { parameters, view }, scratch, out))
    }

    fn append(&mut self, job: Job<'_, '_>, scratch: &mut Scratch, out: &mut Vec<u8>) -> usize {
        let (Job { parameters, view }, format) = (job, self.format);
        match parameters.encoding {
            _ if view.area.is_empty() => 0,
            Encoding::TightPng if !format.is_full() => self.raw(job, out),
            Encoding::Tight | Encoding::TightPng => self.tight.encode(job, &format, scratch, out),
            Encoding::Raw => self.raw(job, out),
            Encoding::Rre => rre::rre(view, &self.pixel, &mut scratch.tile, out),
            Encoding::CoRre => rre::corre(view, &self.pixel, &mut scratch.tile, out),
            Encoding::Hextile => {
                header(view.area, Encoding::Hextile, out);
                hextile::encode(view, &self.pixel, &mut scratch.palette, out)
            }
            Encoding::Zlib => self.zlib(job, scratch, out),
            Encoding::Trle => self.trle(job, scratch, out),
            Encoding::Zrle => self.zrle(job, scratch, out),
        }
    }

    fn raw(&self, job: Job<'_, '_>, out: &mut Vec<u8>) -> usize {
        header(job.view.area, Encoding::Raw, out);
        out.reserve(job.view.area.pixels() * self.pixel.size);
        job.view.rows().for_each(|row| self.pixel.write(row, out));
        1
    }

    fn zlib(&mut self, job: Job<'_, '_>, scratch: &mut Scratch, out: &mut Vec<u8>) -> usize {
        header(job.view.area, Encoding::Zlib, out);
        let (length, effort) = (Length::reserve(out), job.effort());
        for row in job.view.rows() {
            self.pixel.write(row, &mut scratch.plain);
            self.zlib.feed(effort, &mut scratch.plain, out);
        }
        self.zlib.finish(effort, &mut scratch.plain, out);
        length.fill(out);
        1
    }

    fn zrle(&mut self, job: Job<'_, '_>, scratch: &mut Scratch, out: &mut Vec<u8>) -> usize {
        header(job.view.area, Encoding::Zrle, out);
        let (length, effort) = (Length::reserve(out), job.effort());
        let mut before = effort;
        for area in job.view.area.pieces(64, 64) {
            self.compact.gather(&job.view.of(area), &mut scratch.tile);
            let tile = tiles::Tile::new(&scratch.tile, area, self.compact.size);
            let shape = tile.shape(&mut scratch.palette);
            let its = if shape.is_raw() { effort.photograph() } else { effort };
            if its != before {
                self.zrle.finish(before, &mut scratch.plain, out);
                before = its;
            }
            tile.write(shape, &scratch.palette, &mut scratch.plain);
            self.zrle.feed(its, &mut scratch.plain, out);
        }
        self.zrle.finish(before, &mut scratch.plain, out);
        length.fill(out);
        1
    }

    fn trle(&self, job: Job<'_, '_>, scratch: &mut Scratch, out: &mut Vec<u8>) -> usize {
        header(job.view.area, Encoding::Trle, out);
        for area in job.view.area.pieces(16, 16) {
            self.compact.gather(&job.view.of(area), &mut scratch.tile);
            let tile = tiles::Tile::new(&scratch.tile, area, self.compact.size);
            tile.write(tile.shape(&mut scratch.palette), &scratch.palette, out);
        }
        1
    }
}

/// Appends a `CopyRect` (7.7.2), which copies the pixels at `x`, `y` to `area`.
pub fn copy(area: Area, x: u16, y: u16, out: &mut Vec<u8>) {
    numbered(area, COPY_RECT, out);
    out.extend(x.to_be_bytes());
    out.extend(y.to_be_bytes());
}

/// Appends the header of a rectangle (7.6.1).
fn header(area: Area, encoding: Encoding, out: &mut Vec<u8>) {
    numbered(area, encoding.number(), out);
}

fn numbered(area: Area, encoding: i32, out: &mut Vec<u8>) {
    for number in [area.x, area.y, area.width, area.height] {
        out.extend(number.to_be_bytes());
    }
    out.extend(encoding.to_be_bytes());
}

/// The position of a length that is filled in once the data behind it has been written.
struct Length(usize);

impl Length {
    fn reserve(out: &mut Vec<u8>) -> Self {
        out.extend([0; 4]);
        Self(out.len())
    }

    fn fill(self, out: &mut [u8]) {
        let length = u32::try_from(out.len() - self.0).expect("no area has 4 GiB of pixels");
        out[self.0 - 4..self.0].copy_from_slice(&length.to_be_bytes());
    }
}

#[cfg(test)]
mod decoder;
#[cfg(test)]
mod test;
