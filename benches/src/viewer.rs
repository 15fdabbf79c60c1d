//! A viewer of the remote frame buffer protocol: it decodes updates, counts their bytes, and
//! requests more.

use std::io::{BufReader, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use zlib_rs::{Inflate, InflateFlush};
use zune_jpeg::JpegDecoder;
use zune_jpeg::zune_core::bytestream::ZCursor;

/// The maximum time that a server takes to answer.
const PATIENCE: Duration = Duration::from_secs(20);
// Numbers of encodings.
const COPY_RECT: i32 = 1;
const TIGHT: i32 = 7;
const ZRLE: i32 = 16;
const RESIZE: i32 = -223;
const LAST_RECT: i32 = -224;
const FENCE: i32 = -312;
const CONTINUOUS: i32 = -313;
/// The flag of a fence that requests an answer.
const REQUEST: u32 = 1 << 31;
/// The window size of zlib: 32 KiB.
const WINDOW: u8 = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Preference {
    pub name: &'static str,
    /// The preferred one first.
    pub encodings: &'static [i32],
    pub lossy: bool,
}

/// The compared preferences. Servers choose the level of compression, as with most viewers.
pub const PREFERENCES: [Preference; 3] = [
    Preference { name: "zrle", encodings: &[ZRLE], lossy: false },
    Preference { name: "tight", encodings: &[TIGHT], lossy: false },
    // Quality 8, which TigerVNC requests.
    Preference { name: "jpeg", encodings: &[TIGHT, -24], lossy: true },
];

#[derive(Clone, Copy, Debug, Default)]
pub struct Update {
    /// The number of rectangles with pixels.
    pub rectangles: usize,
    pub pixels: usize,
}

#[derive(Clone, Copy)]
struct Area {
    x: usize,
    y: usize,
    width: usize,
    height: usize,
}

pub struct Viewer {
    line: BufReader<UnixStream>,
    /// Bytes from the server.
    pub received: u64,
    pub width: usize,
    pub height: usize,
    /// The pixels as `0x00RRGGBB`, line by line.
    pub pixels: Vec<u32>,
    zrle: Inflate,
    tight: [Inflate; 4],
    packed: Vec<u8>,
    plain: Vec<u8>,
}

impl Viewer {
    /// Connects to a socket that requires no password.
    pub fn new(path: &Path) -> Result<Self> {
        let line = UnixStream::connect(path).with_context(|| path.display().to_string())?;
        line.set_read_timeout(Some(PATIENCE))?;
        let stream = || Inflate::new(true, WINDOW);
        let mut it = Self {
            line: BufReader::with_capacity(256 << 10, line),
            received: 0,
            width: 0,
            height: 0,
            pixels: Vec::new(),
            zrle: stream(),
            tight: [(); 4].map(|()| stream()),
            packed: Vec::new(),
            plain: Vec::new(),
        };
        it.take::<12>()?;
        it.send(b"RFB 003.008\n")?;
        let [count] = it.take()?;
        let kinds = it.bytes(count.into())?;
        ensure!(kinds.contains(&1), "the server requires a password: security types {kinds:?}");
        it.send(&[1])?;
        ensure!(it.take()? == [0; 4], "the server refused the connection");
        it.send(&[1])?;
        let [width, height] = it.numbers()?;
        it.resize(width, height);
        it.take::<16>()?;
        let length = u32::from_be_bytes(it.take()?);
        it.bytes(length as usize)?;
        // 32 bits, 24 of them used, little-endian, with red, green and blue at bits 16, 8 and 0.
        it.send(&[0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0])?;
        Ok(it)
    }

    fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.line.get_mut().write_all(bytes).context("the server is gone")
    }

    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut bytes = [0; N];
        self.line.read_exact(&mut bytes).context("reading from the server")?;
        self.received += N as u64;
        Ok(bytes)
    }

    /// Reads `count` bytes into `packed`, where they stay until the next read.
    fn bytes(&mut self, count: usize) -> Result<&[u8]> {
        self.packed.resize(count, 0);
        self.line.read_exact(&mut self.packed).context("reading from the server")?;
        self.received += count as u64;
        Ok(&self.packed)
    }

    fn numbers<const N: usize>(&mut self) -> Result<[usize; N]> {
        let mut numbers = [0; N];
        for number in &mut numbers {
            *number = u16::from_be_bytes(self.take()?).into();
        }
        Ok(numbers)
    }

    fn resize(&mut self, width: usize, height: usize) {
        (self.width, self.height) = (width, height);
        self.pixels.clear();
        self.pixels.resize(width * height, 0);
    }

    /// Sends the preferred encodings. `streams` announces support for continuous updates.
    pub fn set_preference(&mut self, preference: Preference, streams: bool) -> Result<()> {
        let mut numbers = preference.encodings.to_vec();
        numbers.extend([COPY_RECT, RESIZE, LAST_RECT]);
        numbers.extend([FENCE, CONTINUOUS].iter().filter(|_| streams));
        let count = u16::try_from(numbers.len())?;
        let mut message = vec![2, 0];
        message.extend(count.to_be_bytes());
        numbers.iter().for_each(|number| message.extend(number.to_be_bytes()));
        self.send(&message)
    }

    /// Requests the whole picture, or its changes if `incremental`.
    pub fn ask(&mut self, incremental: bool) -> Result<()> {
        self.send_area(3, incremental)
    }

    /// Enables or disables continuous updates.
    pub fn stream(&mut self, on: bool) -> Result<()> {
        self.send_area(150, on)
    }

    fn send_area(&mut self, kind: u8, flag: bool) -> Result<()> {
        let mut message = vec![kind, flag.into(), 0, 0, 0, 0];
        for side in [self.width, self.height] {
            message.extend(u16::try_from(side)?.to_be_bytes());
        }
        self.send(&message)
    }

    pub fn key(&mut self, symbol: u32, down: bool) -> Result<()> {
        let [a, b, c, d] = symbol.to_be_bytes();
        self.send(&[4, down.into(), 0, 0, a, b, c, d])
    }

    /// Counts the bytes that arrive within `time`.
    pub fn silence(&mut self, time: Duration) -> Result<u64> {
        std::thread::sleep(time);
        let mut count = self.line.buffer().len() as u64;
        self.line.get_ref().set_nonblocking(true)?;
        let mut bytes = [0; 4096];
        while let Ok(more) = self.line.get_mut().read(&mut bytes) {
            ensure!(more > 0, "the server is gone");
            count += more as u64;
        }
        self.line.get_ref().set_nonblocking(false)?;
        Ok(count)
    }

    /// Waits for an update with pixels, or with another size.
    pub fn update(&mut self) -> Result<Update> {
        loop {
            match self.take()? {
                [0] => {
                    self.take::<1>()?;
                    let [count] = self.numbers()?;
                    return self.rectangles(count);
                }
                [1] => {
                    let [_, _, _, high, low] = self.take()?;
                    self.bytes(6 * usize::from(u16::from_be_bytes([high, low])))?;
                }
                [2 | 150] => {}
                [3] => {
                    self.take::<3>()?;
                    let length = u32::from_be_bytes(self.take()?);
                    self.bytes(length as usize)?;
                }
                [248] => self.answer()?,
                [250] => drop(self.take::<3>()?),
                [other] => bail!("unknown message {other}"),
            }
        }
    }

    fn answer(&mut self) -> Result<()> {
        self.take::<3>()?;
        let flags = u32::from_be_bytes(self.take()?);
        let [length] = self.take()?;
        let mut message = vec![248, 0, 0, 0];
        message.extend((flags & !REQUEST).to_be_bytes());
        message.push(length);
        message.extend(self.bytes(length.into())?);
        if flags & REQUEST != 0 {
            self.send(&message)?;
        }
        Ok(())
    }

    fn rectangles(&mut self, count: usize) -> Result<Update> {
        let mut update = Update::default();
        for _ in 0..count {
            let [x, y, width, height] = self.numbers()?;
            let area = Area { x, y, width, height };
            let encoding = i32::from_be_bytes(self.take()?);
            if encoding == LAST_RECT {
                break;
            }
            if encoding == RESIZE {
                self.resize(width, height);
                continue;
            }
            let inside = x + width <= self.width && y + height <= self.height;
            ensure!(inside, "{width}x{height} at {x},{y} is outside of the picture");
            update.rectangles += 1;
            update.pixels += width * height;
            match encoding {
                0 => self.raw(area)?,
                COPY_RECT => self.copied(area)?,
                TIGHT => self.tight(area)?,
                ZRLE => self.zrle(area)?,
                other => bail!("unknown encoding {other}"),
            }
        }
        Ok(update)
    }

    fn set(&mut self, area: Area, mut next: impl FnMut() -> u32) {
        for y in area.y..area.y + area.height {
            let start = y * self.width + area.x;
            let row = &mut self.pixels[start..start + area.width];
            row.iter_mut().for_each(|pixel| *pixel = next());
        }
    }

    fn fill(&mut self, area: Area, pixel: u32) {
        for y in area.y..area.y + area.height {
            let start = y * self.width + area.x;
            self.pixels[start..start + area.width].fill(pixel);
        }
    }

    fn raw(&mut self, area: Area) -> Result<()> {
        self.bytes(4 * area.width * area.height)?;
        let packed = std::mem::take(&mut self.packed);
        let mut words = packed.as_chunks::<4>().0.iter();
        self.set(area, || words.next().map_or(0, |word| u32::from_le_bytes(*word) & 0xff_ffff));
        self.packed = packed;
        Ok(())
    }

    fn copied(&mut self, area: Area) -> Result<()> {
        let [x, y] = self.numbers()?;
        let inside = x + area.width <= self.width && y + area.height <= self.height;
        ensure!(inside, "a copy from outside of the picture");
        let mut line = |row: usize| {
            let from = (y + row) * self.width + x;
            let to = (area.y + row) * self.width + area.x;
            self.pixels.copy_within(from..from + area.width, to);
        };
        if y < area.y {
            (0..area.height).rev().for_each(&mut line);
        } else {
            (0..area.height).for_each(&mut line);
        }
        Ok(())
    }

    fn zrle(&mut self, area: Area) -> Result<()> {
        let length = u32::from_be_bytes(self.take()?);
        self.bytes(length as usize)?;
        inflate(&mut self.zrle, &self.packed, &mut self.plain)?;
        let plain = std::mem::take(&mut self.plain);
        let mut rest = Bytes(&plain);
        for y in (0..area.height).step_by(64) {
            for x in (0..area.width).step_by(64) {
                let (width, height) = (64.min(area.width - x), 64.min(area.height - y));
                self.tile(Area { x: area.x + x, y: area.y + y, width, height }, &mut rest)?;
            }
        }
        ensure!(rest.0.is_empty(), "{} bytes behind the tiles", rest.0.len());
        self.plain = plain;
        Ok(())
    }

    fn tile(&mut self, area: Area, bytes: &mut Bytes) -> Result<()> {
        let kind = bytes.byte()?;
        let mut palette = [0; 128];
        for color in palette.iter_mut().take(usize::from(kind & 127)) {
            *color = bytes.pixel()?;
        }
        match kind {
            1 => self.fill(area, palette[0]),
            2..=16 => {
                let bits = [1, 2, 4][usize::from(kind > 2) + usize::from(kind > 4)];
                self.indexed(area, bits, &palette, bytes)?;
            }
            0 => {
                let mut pixels = bytes.take(3 * area.width * area.height)?;
                self.set(area, || pixels.pixel().unwrap_or(0));
            }
            128 | 130.. => {
                let mut count = area.width * area.height;
                let mut runs = Vec::new();
                while count > 0 {
                    let run = bytes.run(kind, &palette)?;
                    count = count.checked_sub(run.0).context("a run beyond its tile")?;
                    runs.push(run);
                }
                let mut runs = runs.into_iter();
                let (mut left, mut pixel) = (0, 0);
                self.set(area, || {
                    if left == 0 {
                        (left, pixel) = runs.next().unwrap_or((1, 0));
                    }
                    left -= 1;
                    pixel
                });
            }
            other => bail!("a tile of kind {other}"),
        }
        Ok(())
    }

    /// Decodes indexes of `bits` bits, the highest bits first. Each row starts with a new byte.
    fn indexed(
        &mut self,
        area: Area,
        bits: usize,
        palette: &[u32],
        bytes: &mut Bytes,
    ) -> Result<()> {
        for y in 0..area.height {
            let row = bytes.take((area.width * bits).div_ceil(8))?.0;
            let start = (area.y + y) * self.width + area.x;
            let index = |x: usize| {
                let byte = row[x * bits / 8] >> (8 - bits - x * bits % 8);
                usize::from(byte & (u8::MAX >> (8 - bits)))
            };
            for (x, pixel) in self.pixels[start..start + area.width].iter_mut().enumerate() {
                *pixel = palette.get(index(x)).copied().context("an index beyond its palette")?;
            }
        }
        Ok(())
    }

    fn tight(&mut self, area: Area) -> Result<()> {
        let [control] = self.take()?;
        for (number, stream) in self.tight.iter_mut().enumerate() {
            if control >> number & 1 != 0 {
                *stream = Inflate::new(true, WINDOW);
            }
        }
        match control >> 4 {
            8 => {
                let color = self.take::<3>()?;
                self.fill(area, rgb(color));
            }
            9 => {
                let length = self.length()?;
                self.bytes(length)?;
                let mut decoder = JpegDecoder::new(ZCursor::new(&self.packed));
                let image = decoder.decode().context("a JPEG image")?;
                ensure!(image.len() == 3 * area.width * area.height, "a JPEG of another size");
                let mut colors = image.as_chunks::<3>().0.iter();
                self.set(area, || colors.next().map_or(0, |color| rgb(*color)));
            }
            kind @ 0..8 => {
                let [filter] = if kind & 4 == 0 { [0] } else { self.take()? };
                self.basic(area, usize::from(kind & 3), filter)?;
            }
            other => bail!("Tight of kind {other}"),
        }
        Ok(())
    }

    fn basic(&mut self, area: Area, stream: usize, filter: u8) -> Result<()> {
        let mut palette = Vec::new();
        if filter == 1 {
            let [last] = self.take()?;
            for _ in 0..=last {
                palette.push(rgb(self.take()?));
            }
        }
        ensure!(filter < 3 && palette.len() != 1, "Tight's filter {filter} of {palette:?}");
        let row = match palette.len() {
            0 => 3 * area.width,
            2 => area.width.div_ceil(8),
            _ => area.width,
        };
        if row * area.height < 12 {
            self.bytes(row * area.height)?;
            std::mem::swap(&mut self.packed, &mut self.plain);
        } else {
            let length = self.length()?;
            self.bytes(length)?;
            inflate(&mut self.tight[stream], &self.packed, &mut self.plain)?;
        }
        let mut plain = std::mem::take(&mut self.plain);
        ensure!(plain.len() == row * area.height, "{} bytes of Tight", plain.len());
        if filter == 2 {
            unslope(&mut plain, row);
        }
        if palette.is_empty() {
            let mut colors = plain.as_chunks::<3>().0.iter();
            self.set(area, || colors.next().map_or(0, |color| rgb(*color)));
        } else {
            let bits = if palette.len() == 2 { 1 } else { 8 };
            self.indexed(area, bits, &palette, &mut Bytes(&plain))?;
        }
        self.plain = plain;
        Ok(())
    }

    /// Reads a length of Tight: seven bits, seven bits, eight bits.
    fn length(&mut self) -> Result<usize> {
        let mut length = 0;
        for shift in [0, 7, 14] {
            let [byte] = self.take()?;
            let mask = if shift == 14 { 0xff } else { 0x7f };
            length |= usize::from(byte & mask) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        Ok(length)
    }
}

fn rgb([red, green, blue]: [u8; 3]) -> u32 {
    u32::from_be_bytes([0, red, green, blue])
}

/// Reverts Tight's gradient filter: each color is a prediction from its neighbors plus a
/// difference.
fn unslope(plain: &mut [u8], row: usize) {
    for at in 0..plain.len() {
        let near = |is_there: bool, back: usize| {
            if is_there { i16::from(plain[at - back]) } else { 0 }
        };
        let (inner, lower) = (at % row >= 3, at >= row);
        let expected = near(inner, 3) + near(lower, row) - near(inner && lower, row + 3);
        let expected = u8::try_from(expected.clamp(0, 255)).unwrap_or(0);
        plain[at] = plain[at].wrapping_add(expected);
    }
}

/// Decompresses all data in these bytes of a stream.
fn inflate(stream: &mut Inflate, mut packed: &[u8], plain: &mut Vec<u8>) -> Result<()> {
    let mut length = 0;
    plain.resize(plain.capacity().max(64 << 10), 0);
    loop {
        let (taken, given) = (stream.total_in(), stream.total_out());
        let status = stream.decompress(packed, &mut plain[length..], InflateFlush::SyncFlush);
        if let Err(error) = status {
            bail!("a compressed stream: {}", error.as_str());
        }
        packed = &packed[usize::try_from(stream.total_in() - taken)?..];
        length += usize::try_from(stream.total_out() - given)?;
        if length < plain.len() {
            ensure!(packed.is_empty(), "{} bytes behind the end", packed.len());
            plain.truncate(length);
            return Ok(());
        }
        plain.resize(2 * length, 0);
    }
}

/// The unread bytes.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn take(&mut self, count: usize) -> Result<Self> {
        let (taken, rest) = self.0.split_at_checked(count).context("too few bytes")?;
        self.0 = rest;
        Ok(Self(taken))
    }

    fn byte(&mut self) -> Result<u8> {
        Ok(self.take(1)?.0[0])
    }

    /// `CPIXEL`
    fn pixel(&mut self) -> Result<u32> {
        let bytes = self.take(3)?.0;
        Ok(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], 0]))
    }

    /// Reads a run: its length, and the pixel.
    fn run(&mut self, kind: u8, palette: &[u32]) -> Result<(usize, u32)> {
        let pixel = if kind == 128 {
            self.pixel()?
        } else {
            let index = self.byte()?;
            let pixel = palette[usize::from(index & 127)];
            if index < 128 {
                return Ok((1, pixel));
            }
            pixel
        };
        let mut length = 1;
        loop {
            let byte = self.byte()?;
            length += usize::from(byte);
            if byte != 255 {
                return Ok((length, pixel));
            }
        }
    }
}
