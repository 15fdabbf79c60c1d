//! A client's decoder for all encodings, for tests. It was written from the specification alone,
//! independently of the encoders. It panics on invalid data.

use std::io::Cursor;

use flate2::{Decompress, FlushDecompress};

use crate::rfb::format::PixelFormat;
use crate::rfb::picture::Area;

/// Received bytes that were not read yet.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> &'a [u8] {
        let (taken, rest) = self.0.split_at(count);
        self.0 = rest;
        taken
    }

    /// Reads a number of `size` bytes.
    fn number(&mut self, size: usize, big_endian: bool) -> u32 {
        let mut bytes = self.take(size).to_vec();
        if !big_endian {
            bytes.reverse();
        }
        bytes.iter().fold(0, |number, byte| number << 8 | u32::from(*byte))
    }

    fn byte(&mut self) -> u8 {
        self.take(1)[0]
    }

    fn wide(&mut self) -> u16 {
        u16::try_from(self.number(2, true)).unwrap()
    }

    fn length(&mut self) -> usize {
        self.number(4, true) as usize
    }

    /// Reads a length of Tight: seven bits, seven bits, eight bits.
    fn short_length(&mut self) -> usize {
        let mut length = 0;
        for shift in [0, 7, 14] {
            let byte = usize::from(self.byte());
            if shift == 14 {
                return length | byte << 14;
            }
            length |= (byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        length
    }
}

/// A client with a screen in its own pixel format.
pub(super) struct Client {
    pub(super) format: PixelFormat,
    pub(super) width: usize,
    pub(super) screen: Vec<u32>,
    zlib: Decompress,
    zrle: Decompress,
    tight: [Decompress; 4],
    /// The first bytes of all Tight rectangles.
    pub(super) kinds: Vec<u8>,
}

impl Client {
    pub(super) fn new(format: PixelFormat, width: usize, height: usize) -> Self {
        let stream = || Decompress::new(true);
        Self {
            format,
            width,
            screen: vec![0x5555_5555; width * height],
            zlib: stream(),
            zrle: stream(),
            tight: [(); 4].map(|()| stream()),
            kinds: Vec::new(),
        }
    }

    /// The expected value of a pixel with this red, green and blue.
    pub(super) fn expected(&self, pixel: u32) -> u32 {
        let colours = [pixel >> 16 & 0xff, pixel >> 8 & 0xff, pixel & 0xff];
        let shifted = |(channel, colour): (crate::rfb::format::Channel, u32)| {
            // Round to the nearest value: add a half before the division.
            let nearest = (2 * colour * u32::from(channel.max) + 255) / (2 * 255);
            nearest << channel.shift
        };
        self.format.channels.into_iter().zip(colours).map(shifted).sum()
    }

    fn set(&mut self, x: usize, y: usize, pixel: u32) {
        assert!(x < self.width, "beyond the right edge");
        self.screen[y * self.width + x] = pixel;
    }

    fn fill(&mut self, area: Area, pixel: u32) {
        for y in area.y..area.y + area.height {
            for x in area.x..area.x + area.width {
                self.set(x.into(), y.into(), pixel);
            }
        }
    }

    fn pixels(&mut self, area: Area, mut next: impl FnMut() -> u32) {
        for y in area.y..area.y + area.height {
            for x in area.x..area.x + area.width {
                self.set(x.into(), y.into(), next());
            }
        }
    }

    /// `PIXEL`.
    fn pixel(&self, bytes: &mut Bytes<'_>) -> u32 {
        bytes.number(self.format.bytes(), self.format.big_endian)
    }

    /// `CPIXEL`.
    fn compact(&self, bytes: &mut Bytes<'_>) -> u32 {
        let channels = self.format.channels;
        let bits: u64 = channels.iter().map(|it| u64::from(it.max) << it.shift).sum();
        if self.format.bytes() != 4 || self.format.depth > 24 {
            self.pixel(bytes)
        } else if bits < 1 << 24 {
            bytes.number(3, self.format.big_endian)
        } else if bits & 0xff == 0 {
            bytes.number(3, self.format.big_endian) << 8
        } else {
            self.pixel(bytes)
        }
    }

    /// Whether a `TPIXEL` consists of red, green and blue.
    fn is_full(&self) -> bool {
        let all = self.format.channels.iter().all(|it| it.max == 255);
        self.format.bytes() == 4 && self.format.depth == 24 && all
    }

    /// `TPIXEL`.
    fn tight_pixel(&self, bytes: &mut Bytes<'_>) -> u32 {
        if self.is_full() { self.expected(bytes.number(3, true)) } else { self.pixel(bytes) }
    }

    /// Reads a rectangle, and returns its encoding.
    pub(super) fn rectangle(&mut self, bytes: &mut Bytes<'_>) -> i32 {
        let [x, y, width, height] = [(); 4].map(|()| bytes.wide());
        let area = Area { x, y, width, height };
        assert!(width > 0 && height > 0, "an empty rectangle");
        let encoding = i32::from_be_bytes(bytes.take(4).try_into().unwrap());
        match encoding {
            0 => self.raw(area, bytes),
            1 => self.copied(area, bytes),
            2 | 4 => self.rre(area, encoding == 2, bytes),
            5 => self.hextile(area, bytes),
            6 => {
                let length = bytes.length();
                let plain = inflate(&mut self.zlib, bytes.take(length));
                let mut plain = Bytes(&plain);
                self.raw(area, &mut plain);
                assert!(plain.0.is_empty());
            }
            7 => self.tight(area, false, bytes),
            -260 => self.tight(area, true, bytes),
            15 => self.tiles(area, 16, bytes),
            16 => {
                let length = bytes.length();
                let plain = inflate(&mut self.zrle, bytes.take(length));
                let mut plain = Bytes(&plain);
                self.tiles(area, 64, &mut plain);
                assert!(plain.0.is_empty());
            }
            other => panic!("encoding {other}"),
        }
        encoding
    }

    fn raw(&mut self, area: Area, bytes: &mut Bytes<'_>) {
        for y in area.y..area.y + area.height {
            for x in area.x..area.x + area.width {
                let pixel = self.pixel(bytes);
                self.set(x.into(), y.into(), pixel);
            }
        }
    }

    fn copied(&mut self, area: Area, bytes: &mut Bytes<'_>) {
        let (x, y) = (usize::from(bytes.wide()), usize::from(bytes.wide()));
        let (screen, width) = (self.screen.clone(), self.width);
        let columns = usize::from(area.width);
        let mut at = 0;
        self.pixels(area, || {
            at += 1;
            screen[(y + (at - 1) / columns) * width + x + (at - 1) % columns]
        });
    }

    fn rre(&mut self, area: Area, wide: bool, bytes: &mut Bytes<'_>) {
        let count = bytes.length();
        let background = self.pixel(bytes);
        self.fill(area, background);
        for _ in 0..count {
            let pixel = self.pixel(bytes);
            let size = if wide { 2 } else { 1 };
            let [x, y, width, height] =
                [(); 4].map(|()| u16::try_from(bytes.number(size, true)).unwrap());
            assert!(x + width <= area.width && y + height <= area.height);
            self.fill(Area { x: area.x + x, y: area.y + y, width, height }, pixel);
        }
    }

    fn hextile(&mut self, area: Area, bytes: &mut Bytes<'_>) {
        let (mut background, mut foreground) = (None, None);
        for tile in grid(area, 16) {
            let mask = bytes.byte();
            assert!(mask < 32);
            if mask & 1 != 0 {
                self.raw(tile, bytes);
                (background, foreground) = (None, None);
                continue;
            }
            if mask & 2 != 0 {
                background = Some(self.pixel(bytes));
            }
            if mask & 4 != 0 {
                foreground = Some(self.pixel(bytes));
            }
            self.fill(tile, background.expect("a background"));
            let count = if mask & 8 == 0 { 0 } else { bytes.byte() };
            for _ in 0..count {
                let pixel = match mask & 16 {
                    0 => foreground.expect("a foreground"),
                    _ => self.pixel(bytes),
                };
                let (position, size) = (u16::from(bytes.byte()), u16::from(bytes.byte()));
                let (x, y) = (tile.x + (position >> 4), tile.y + (position & 15));
                let (width, height) = ((size >> 4) + 1, (size & 15) + 1);
                assert!(x + width <= tile.x + tile.width && y + height <= tile.y + tile.height);
                self.fill(Area { x, y, width, height }, pixel);
            }
            if mask & 16 != 0 {
                assert!(mask & 4 == 0, "a foreground for colored subrectangles");
                foreground = None;
            }
        }
    }

    /// Reads the tiles of ZRLE and TRLE.
    fn tiles(&mut self, area: Area, side: u16, bytes: &mut Bytes<'_>) {
        for tile in grid(area, side) {
            let kind = bytes.byte();
            let colours = usize::from(kind & 127);
            if kind == 0 || kind == 128 {
                let mut left = (0, 0);
                let client = Self::new(self.format, 1, 1);
                self.pixels(tile, || {
                    if left.0 == 0 {
                        let pixel = client.compact(bytes);
                        left = (if kind == 0 { 1 } else { run(bytes) }, pixel);
                    }
                    left.0 -= 1;
                    left.1
                });
                assert_eq!(left.0, 0, "a run beyond its tile");
                continue;
            }
            assert!(!matches!(kind, 17..=127 | 129), "kind {kind}");
            let palette: Vec<u32> = (0..colours).map(|_| self.compact(bytes)).collect();
            if kind == 1 {
                self.fill(tile, palette[0]);
            } else if kind < 128 {
                let bits = [1, 2, 4][usize::from(colours > 2) + usize::from(colours > 4)];
                self.packed(tile, bits, &palette, bytes);
            } else {
                let mut left = (0, 0);
                self.pixels(tile, || {
                    if left.0 == 0 {
                        let index = bytes.byte();
                        let length = if index < 128 { 1 } else { run(bytes) };
                        left = (length, palette[usize::from(index & 127)]);
                    }
                    left.0 -= 1;
                    left.1
                });
                assert_eq!(left.0, 0, "a run beyond its tile");
            }
        }
    }

    /// Reads indices with this many bits each, the highest first. Each row starts at a byte.
    fn packed(&mut self, area: Area, bits: u16, palette: &[u32], bytes: &mut Bytes<'_>) {
        for y in area.y..area.y + area.height {
            let row = bytes.take(usize::from(area.width * bits).div_ceil(8));
            for x in 0..area.width {
                let at = x * bits;
                let byte = row[usize::from(at / 8)];
                let index = (byte >> (8 - bits - at % 8)) & u8::MAX >> (8 - bits);
                self.set((area.x + x).into(), y.into(), palette[usize::from(index)]);
            }
        }
    }

    fn tight(&mut self, area: Area, png: bool, bytes: &mut Bytes<'_>) {
        assert!(area.width <= 2048, "{} pixels wide", area.width);
        let control = bytes.byte();
        self.kinds.push(control);
        assert_eq!(control & 15, 0, "a stream starts anew");
        match control >> 4 {
            8 => {
                let pixel = self.tight_pixel(bytes);
                self.fill(area, pixel);
            }
            kind @ (9 | 10) => {
                assert!(kind == 9 || png, "PNG without having been asked for");
                assert!(self.is_full());
                let length = bytes.short_length();
                let image = bytes.take(length);
                let image = if kind == 9 { jpeg(image, area) } else { png_image(image, area) };
                let mut colours = image.chunks_exact(3).map(|it| Bytes(it).number(3, true));
                let client = Self::new(self.format, 1, 1);
                self.pixels(area, || client.expected(colours.next().unwrap()));
            }
            kind => {
                assert!(kind < 8 && !png, "kind {kind}");
                let filter = if kind & 4 == 0 { 0 } else { bytes.byte() };
                self.basic(area, usize::from(kind & 3), filter, bytes);
            }
        }
    }

    fn basic(&mut self, area: Area, stream: usize, filter: u8, bytes: &mut Bytes<'_>) {
        let palette: Vec<u32> = match filter {
            0 => Vec::new(),
            1 => (0..=bytes.byte()).map(|_| self.tight_pixel(bytes)).collect(),
            other => panic!("filter {other}"),
        };
        let pixel = if self.is_full() { 3 } else { self.format.bytes() };
        let row = match palette.len() {
            0 => usize::from(area.width) * pixel,
            1 => panic!("a palette of one color"),
            2 => usize::from(area.width).div_ceil(8),
            _ => usize::from(area.width),
        };
        let length = row * usize::from(area.height);
        let plain = if length < 12 {
            bytes.take(length).to_vec()
        } else {
            let packed = bytes.short_length();
            inflate(&mut self.tight[stream], bytes.take(packed))
        };
        assert_eq!(plain.len(), length);
        let mut plain = Bytes(&plain);
        match palette.len() {
            0 => {
                let client = Self::new(self.format, 1, 1);
                self.pixels(area, || client.tight_pixel(&mut plain));
            }
            2 => self.packed(area, 1, &palette, &mut plain),
            _ => self.packed(area, 8, &palette, &mut plain),
        }
    }
}

/// Splits an area into squares, row by row.
fn grid(area: Area, side: u16) -> Vec<Area> {
    let mut all = Vec::new();
    let mut y = 0;
    while y < area.height {
        let mut x = 0;
        while x < area.width {
            let (width, height) = (side.min(area.width - x), side.min(area.height - y));
            all.push(Area { x: area.x + x, y: area.y + y, width, height });
            x += side;
        }
        y += side;
    }
    all
}

/// Reads the length of a run: one plus a sum of bytes, of which the first that is not 255 is the
/// last.
fn run(bytes: &mut Bytes<'_>) -> usize {
    let mut length = 1;
    loop {
        let byte = bytes.byte();
        length += usize::from(byte);
        if byte != 255 {
            return length;
        }
    }
}

/// Decompresses these bytes of a stream.
fn inflate(stream: &mut Decompress, mut bytes: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(4 * bytes.len() + 64);
    loop {
        let before = (stream.total_in(), plain.len());
        stream.decompress_vec(bytes, &mut plain, FlushDecompress::Sync).unwrap();
        let taken = usize::try_from(stream.total_in() - before.0).unwrap();
        bytes = &bytes[taken..];
        if plain.len() < plain.capacity() && (bytes.is_empty() || before.1 == plain.len()) {
            assert!(bytes.is_empty(), "{} bytes behind the end", bytes.len());
            return plain;
        }
        plain.reserve(plain.len().max(4096));
    }
}

fn jpeg(image: &[u8], area: Area) -> Vec<u8> {
    let mut decoder = zune_jpeg::JpegDecoder::new(Cursor::new(image));
    let pixels = decoder.decode().unwrap();
    assert_eq!(decoder.dimensions(), Some((area.width.into(), area.height.into())));
    assert_eq!(pixels.len(), area.pixels() * 3);
    pixels
}

fn png_image(image: &[u8], area: Area) -> Vec<u8> {
    let mut decoder = png::Decoder::new(Cursor::new(image));
    decoder.set_transformations(png::Transformations::EXPAND);
    let mut reader = decoder.read_info().unwrap();
    let mut pixels = vec![0; reader.output_buffer_size().unwrap()];
    let info = reader.next_frame(&mut pixels).unwrap();
    assert_eq!((info.width, info.height), (area.width.into(), area.height.into()));
    assert_eq!(info.color_type, png::ColorType::Rgb);
    pixels
}
