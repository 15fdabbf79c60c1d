//! A display and a client for tests.

use std::sync::{Arc, Mutex};

use host::display::{Mode, PAGE_BYTES, Scanout};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::Wire;
use super::picture::{Area, Move};
use super::security::{LoginLimiter, PeerNetwork};

/// Checks that this number of wrong passwords was counted. Then blocks the network for so long that
/// the next client finds it blocked, however slow the host is.
pub(crate) fn lock_out(limiter: &LoginLimiter, network: PeerNetwork, guesses: u32) {
    assert_eq!(limiter.failed(network), guesses + 1);
    while limiter.failed(network) < 8 {}
}

/// The memory of a display, which tests write to.
pub(crate) struct FakeDisplay {
    state: Mutex<State>,
}

struct State {
    mode: Option<Mode>,
    bytes: Vec<u8>,
    changed: Vec<u64>,
    preferred: Option<(u32, u32)>,
}

impl FakeDisplay {
    /// Creates a black picture.
    pub(crate) fn new(width: u32, height: u32) -> Arc<Self> {
        let mode = Some(Mode { width, height, stride: width * 4, start: 0 });
        let bytes = vec![0; 16 << 20];
        let changed = vec![0; bytes.len() / 4096 / 64];
        Arc::new(Self { state: Mutex::new(State { mode, bytes, changed, preferred: None }) })
    }

    /// Sets the mode, or switches the display off.
    pub(super) fn set(&self, mode: Option<Mode>) {
        self.state.lock().unwrap().mode = mode;
    }

    /// Draws one pixel.
    pub(super) fn draw(&self, x: u32, y: u32, colour: u32) {
        let mut state = self.state.lock().unwrap();
        let mode = state.mode.unwrap();
        let at = mode.start + u64::from(y * mode.stride + x * 4);
        let index = usize::try_from(at).unwrap();
        state.bytes[index..index + 4].copy_from_slice(&(colour | 0xff00_0000).to_le_bytes());
        for page in [at / PAGE_BYTES, (at + 3) / PAGE_BYTES] {
            state.changed[usize::try_from(page / 64).unwrap()] |= 1 << (page % 64);
        }
    }

    /// Fills the picture with noise.
    pub(crate) fn paint(&self, seed: u32) {
        let mut state = self.state.lock().unwrap();
        let mode = state.mode.unwrap();
        let start = usize::try_from(mode.start).unwrap();
        let end = start + usize::try_from(mode.stride * mode.height).unwrap();
        let mut noise = seed.wrapping_mul(2_654_435_761) | 1;
        for pixel in state.bytes[start..end].chunks_exact_mut(4) {
            noise ^= noise << 13;
            noise ^= noise >> 17;
            noise ^= noise << 5;
            pixel.copy_from_slice(&noise.to_le_bytes());
        }
        state.changed.fill(u64::MAX);
    }

    /// Draws like a program that overwrites rows: only pages with different pixels count as
    /// written.
    pub(super) fn redraw<T>(&self, work: impl FnOnce(&mut [u32], usize) -> T) -> T {
        let mut pixels = self.pixels();
        let mut state = self.state.lock().unwrap();
        let width = usize::try_from(state.mode.unwrap().width).unwrap();
        let result = work(&mut pixels, width);
        for (at, pixel) in pixels.iter().enumerate() {
            let bytes = (pixel | 0xff00_0000).to_le_bytes();
            if state.bytes[4 * at..4 * at + 4] != bytes {
                state.bytes[4 * at..4 * at + 4].copy_from_slice(&bytes);
                let page = at / 1024;
                state.changed[page / 64] |= 1 << (page % 64);
            }
        }
        result
    }

    /// The pixels of the picture.
    pub(super) fn pixels(&self) -> Vec<u32> {
        let state = self.state.lock().unwrap();
        let mode = state.mode.unwrap();
        assert_eq!((mode.start, mode.stride), (0, mode.width * 4));
        let end = usize::try_from(mode.stride * mode.height).unwrap();
        let pixels = state.bytes[..end].chunks_exact(4);
        pixels.map(|it| u32::from_le_bytes(it.try_into().unwrap()) & 0x00ff_ffff).collect()
    }

    /// Marks all pages as written.
    pub(super) fn touch(&self) {
        self.state.lock().unwrap().changed.fill(u64::MAX);
    }

    /// The size that a viewer requested.
    pub(super) fn preferred(&self) -> Option<(u32, u32)> {
        self.state.lock().unwrap().preferred
    }
}

impl Scanout for FakeDisplay {
    fn mode(&self) -> Option<Mode> {
        self.state.lock().unwrap().mode
    }

    fn changed(&self, pages: &mut Vec<u64>) {
        let mut state = self.state.lock().unwrap();
        let count = pages.len().max(state.changed.len());
        pages.resize(count, 0);
        for (page, changed) in pages.iter_mut().zip(&mut state.changed) {
            *page |= std::mem::take(changed);
        }
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        let state = self.state.lock().unwrap();
        let start = usize::try_from(offset).unwrap().min(state.bytes.len());
        let count = data.len().min(state.bytes.len() - start);
        data[..count].copy_from_slice(&state.bytes[start..start + count]);
    }

    /// It has room for less than a megapixel.
    fn set_preferred_size(&self, width: u32, height: u32) -> bool {
        let fits = width * height < 1 << 20;
        if fits {
            self.state.lock().unwrap().preferred = Some((width, height));
        }
        fits
    }
}

/// Pseudo-random numbers.
pub(super) struct Random(u32);

impl Random {
    pub(super) fn new(seed: u32) -> Self {
        Self(0x9e37_79b1_u32.wrapping_mul(seed) | 1)
    }

    pub(super) fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    pub(super) fn below(&mut self, limit: u16) -> u16 {
        u16::try_from(self.next() % u32::from(limit)).unwrap()
    }

    pub(super) fn colour(&mut self) -> u32 {
        self.next() >> 8
    }

    pub(super) fn area(&mut self, (width, height): (u16, u16)) -> Area {
        let (x, y) = (self.below(width), self.below(height));
        Area { x, y, width: 1 + self.below(width - x), height: 1 + self.below(height - y) }
    }
}

/// Moves pixels as a client does for CopyRect.
pub(super) fn move_pixels(pixels: &mut [u32], stride: usize, it: Move) {
    let before = pixels.to_vec();
    let at = |x: u16, y: u16| usize::from(y) * stride + usize::from(x);
    for row in 0..it.to.height {
        let (from, to) = (at(it.from.0, it.from.1 + row), at(it.to.x, it.to.y + row));
        let length = usize::from(it.to.width);
        pixels[to..to + length].copy_from_slice(&before[from..from + length]);
    }
}

/// Draws at random: mostly text that scrolls or a window that is dragged.
pub(super) fn draw_randomly(pixels: &mut [u32], size: (u16, u16), random: &mut Random) {
    let stride = usize::from(size.0);
    let paint = |pixels: &mut [u32], area: Area, colour: &mut dyn FnMut() -> u32| {
        for y in area.y..area.y + area.height {
            let start = usize::from(y) * stride + usize::from(area.x);
            let row = &mut pixels[start..start + usize::from(area.width)];
            row.iter_mut().for_each(|pixel| *pixel = colour());
        }
    };
    let kind = random.below(40);
    match kind {
        0 => paint(pixels, random.area(size), &mut || kind.into()),
        1 | 2 => paint(pixels, random.area(size), &mut || random.colour()),
        3..8 => pixels[usize::from(random.below(size.1)) * stride] = random.colour(),
        _ => {
            let all = Area { x: 0, y: 0, width: size.0, height: size.1 };
            let to = if kind < 20 { all } else { random.area(size) };
            let (width, height) = (to.width - to.width / 8, to.height - to.height / 8);
            let to = Area { width, height, ..to };
            let mut from = |to: u16, length: u16, most: u16| {
                let near = (to + random.below(41)).saturating_sub(20);
                let from = if random.below(3) == 0 { to } else { near };
                from.min(most - length)
            };
            let from = (from(to.x, to.width, size.0), from(to.y, to.height, size.1));
            move_pixels(pixels, stride, Move { from, to });
            // The source remains, or other content appears there.
            if random.below(2) == 0 {
                let new = Area { height: to.height.min(9), ..to };
                paint(pixels, new, &mut || random.colour());
            }
        }
    }
}

/// A certificate for `localhost`, its key, and another key.
pub(crate) const CERTIFICATE: &str = include_str!("../../../../tests/vnc_clients/certificate.pem");
pub(crate) const KEY: &str = include_str!("../../../../tests/vnc_clients/key.pem");
pub(crate) const OTHER_KEY: &str = "\
-----BEGIN PRIVATE KEY-----\n\
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgMyyUNJJbLldwsQeQ\n\
sMmCIustC/jGy7HsBtdj2O0OZJShRANCAASTYq7pl+E7jSXql1o6EKXCNjGarckX\n\
yWQkkWP6BAN/OjIpPwRDRcxZSGxt1vj8+312U/WzhvcEqW3q8gnvH8n1\n\
-----END PRIVATE KEY-----\n";
/// Another certificate for `localhost`.
pub(crate) const OTHER_CERTIFICATE: &str = "\
-----BEGIN CERTIFICATE-----\n\
MIIBkTCCATigAwIBAgIUJRQWviHmEuZe+49KEhGYRYbnzqAwCgYIKoZIzj0EAwIw\n\
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyMTA3NDQ0OFoYDzIxMjYxMDI4\n\
MDc0NDQ4WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO\n\
PQMBBwNCAAQThF9OQEeYD+ltSXTVi3x8aieuXkppH00faQZtin9ytMuveLojbnVk\n\
zSZfXVz5J87vcslL8CIvbBXB0sUr4frDo2YwZDAdBgNVHQ4EFgQUXNQvKiTZklF/\n\
uVUCov+8A6glV7UwHwYDVR0jBBgwFoAUXNQvKiTZklF/uVUCov+8A6glV7UwFAYD\n\
VR0RBA0wC4IJbG9jYWxob3N0MAwGA1UdEwEB/wQCMAAwCgYIKoZIzj0EAwIDRwAw\n\
RAIgYEpYZo7ZPcc64iGCUvscbYKA/k8+8G/gu3askobf+K0CIGPx+pI4hl8jYEhw\n\
rP881ba3XS9j/5oCrWuB/ofmObAp\n\
-----END CERTIFICATE-----\n";
/// Key of `OTHER_CERTIFICATE`.
pub(crate) const THIRD_KEY: &str = "\
-----BEGIN PRIVATE KEY-----\n\
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgUZyiispMqMoLbLIB\n\
Y7ldEEaOaTEKYLgYunJldo+GOR6hRANCAAQThF9OQEeYD+ltSXTVi3x8aieuXkpp\n\
H00faQZtin9ytMuveLojbnVkzSZfXVz5J87vcslL8CIvbBXB0sUr4frD\n\
-----END PRIVATE KEY-----\n";

/// A message from the server.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Received {
    Update,
    Colours,
    Fence(u32, Vec<u8>),
    EndOfContinuous,
    Power(u8),
    Text(Vec<u8>),
    Clipboard(Vec<u8>),
}

/// A client that decodes Raw and checks all messages.
pub(super) struct TestClient {
    pub(super) stream: Wire,
    pub(super) size: (u16, u16),
    pub(super) name: String,
    pub(super) pixels: Vec<u32>,
    /// Pseudo-rectangles: number, position and size, content.
    pub(super) signs: Vec<(i32, [u16; 4], Vec<u8>)>,
    /// Number of pixels that were received, and of pixels that were moved.
    pub(super) drawn: usize,
    pub(super) moved: usize,
}

impl TestClient {
    /// Performs the handshake without a password.
    pub(super) async fn open(mut stream: Wire, shared: bool) -> anyhow::Result<Self> {
        let mut version = [0; 12];
        stream.read_exact(&mut version).await?;
        stream.write_all(b"RFB 003.008\n").await?;
        let mut types = [0; 2];
        stream.read_exact(&mut types).await?;
        anyhow::ensure!(types == [1, 1], "{types:?}");
        stream.write_all(&[1]).await?;
        anyhow::ensure!(stream.read_u32().await? == 0);
        Self::init(stream, shared).await
    }

    /// Performs the rest of the handshake, after authentication succeeded.
    pub(super) async fn init(mut stream: Wire, shared: bool) -> anyhow::Result<Self> {
        stream.write_all(&[u8::from(shared)]).await?;
        let size = (stream.read_u16().await?, stream.read_u16().await?);
        let mut format = [0; 16];
        stream.read_exact(&mut format).await?;
        let mut name = vec![0; stream.read_u32().await? as usize];
        stream.read_exact(&mut name).await?;
        let pixels = vec![0x0055_5555; usize::from(size.0) * usize::from(size.1)];
        let name = String::from_utf8(name)?;
        Ok(Self { stream, size, name, pixels, signs: Vec::new(), drawn: 0, moved: 0 })
    }

    pub(super) async fn send(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }

    pub(super) async fn encodings(&mut self, numbers: &[i32]) {
        let mut out = vec![2, 0];
        out.extend(u16::try_from(numbers.len()).unwrap().to_be_bytes());
        numbers.iter().for_each(|number| out.extend(number.to_be_bytes()));
        self.send(&out).await;
    }

    pub(super) async fn request(&mut self, incremental: bool) {
        let (width, height) = self.size;
        self.request_area(incremental, [0, 0, width, height]).await;
    }

    /// Requests an update of an area.
    pub(super) async fn request_area(&mut self, incremental: bool, area: [u16; 4]) {
        let mut out = vec![3, u8::from(incremental)];
        area.iter().for_each(|number| out.extend(number.to_be_bytes()));
        self.send(&out).await;
    }

    pub(super) async fn receive(&mut self) -> anyhow::Result<Received> {
        let stream = &mut self.stream;
        Ok(match stream.read_u8().await? {
            0 => {
                self.update().await?;
                Received::Update
            }
            1 => {
                stream.read_exact(&mut [0; 5 + 256 * 6]).await?;
                Received::Colours
            }
            3 => {
                stream.read_exact(&mut [0; 3]).await?;
                let length = stream.read_i32().await?;
                let mut text = vec![0; length.unsigned_abs() as usize];
                stream.read_exact(&mut text).await?;
                if length < 0 { Received::Clipboard(text) } else { Received::Text(text) }
            }
            150 => Received::EndOfContinuous,
            248 => {
                stream.read_exact(&mut [0; 3]).await?;
                let flags = stream.read_u32().await?;
                let mut payload = vec![0; stream.read_u8().await?.into()];
                stream.read_exact(&mut payload).await?;
                Received::Fence(flags, payload)
            }
            250 => {
                stream.read_exact(&mut [0; 2]).await?;
                Received::Power(stream.read_u8().await?)
            }
            other => anyhow::bail!("message {other}"),
        })
    }

    /// Receives messages up to the next update.
    pub(super) async fn receive_update(&mut self) -> anyhow::Result<()> {
        while self.receive().await? != Received::Update {}
        Ok(())
    }

    async fn update(&mut self) -> anyhow::Result<()> {
        self.stream.read_u8().await?;
        let count = self.stream.read_u16().await?;
        self.rectangles(count).await
    }

    /// Receives the rectangles of an update.
    pub(super) async fn rectangles(&mut self, count: u16) -> anyhow::Result<()> {
        for _ in 0..count {
            let mut area = [0; 4];
            for part in &mut area {
                *part = self.stream.read_u16().await?;
            }
            let number = self.stream.read_i32().await?;
            match number {
                0 => {
                    self.raw(area).await?;
                    continue;
                }
                1 => {
                    self.copied(area).await?;
                    continue;
                }
                2 => {
                    self.on_ground(area).await?;
                    continue;
                }
                _ => {}
            }
            let length = match number {
                -308 => 20,
                -261 => 1,
                0x574d_5668 => 4,
                -307 => self.stream.read_u32().await? as usize,
                // An image of one pixel: the pixel and its mask, or its encoding and the pixel.
                -239 => 5,
                -314 => 8,
                -224 | -223 | -257 | -258 | -259 | -316 => 0,
                other => anyhow::bail!("encoding {other}"),
            };
            let mut content = vec![0; length];
            self.stream.read_exact(&mut content).await?;
            if matches!(number, -223 | -308) {
                self.size = (area[2], area[3]);
                self.pixels = vec![0; usize::from(area[2]) * usize::from(area[3])];
            }
            self.signs.push((number, area, content));
            if number == -224 {
                break;
            }
        }
        Ok(())
    }

    /// Receives a CopyRect.
    async fn copied(&mut self, [x, y, width, height]: [u16; 4]) -> anyhow::Result<()> {
        let from = (self.stream.read_u16().await?, self.stream.read_u16().await?);
        self.moved += usize::from(width) * usize::from(height);
        let it = Move { from, to: Area { x, y, width, height } };
        move_pixels(&mut self.pixels, self.size.0.into(), it);
        Ok(())
    }

    /// Receives an RRE rectangle.
    async fn on_ground(&mut self, [x, y, width, height]: [u16; 4]) -> anyhow::Result<()> {
        let count = self.stream.read_u32().await?;
        let ground = self.stream.read_u32_le().await?;
        self.fill([x, y, width, height], ground);
        for _ in 0..count {
            let pixel = self.stream.read_u32_le().await?;
            let mut part = [0; 4];
            for number in &mut part {
                *number = self.stream.read_u16().await?;
            }
            self.fill([x + part[0], y + part[1], part[2], part[3]], pixel);
        }
        Ok(())
    }

    fn fill(&mut self, [x, y, width, height]: [u16; 4], pixel: u32) {
        for y in y..y + height {
            let start = usize::from(y) * usize::from(self.size.0) + usize::from(x);
            self.pixels[start..start + usize::from(width)].fill(pixel);
        }
    }

    async fn raw(&mut self, [x, y, width, height]: [u16; 4]) -> anyhow::Result<()> {
        let mut line = vec![0; usize::from(width) * 4];
        self.drawn += usize::from(width) * usize::from(height);
        for y in y..y + height {
            self.stream.read_exact(&mut line).await?;
            let start = usize::from(y) * usize::from(self.size.0) + usize::from(x);
            let line = line.chunks_exact(4).map(|it| u32::from_le_bytes(it.try_into().unwrap()));
            let pixels = &mut self.pixels[start..start + usize::from(width)];
            pixels.iter_mut().zip(line).for_each(|(pixel, new)| *pixel = new);
        }
        Ok(())
    }
}
