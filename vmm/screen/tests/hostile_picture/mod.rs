//! A guest that draws anything, and a client that requests any encoding and format. Checks that the
//! client decodes exactly the picture.

use screen::rfb::encode::{Encoder, Encoding, Parameters};
use screen::rfb::format::PixelFormat;
use screen::rfb::picture::{Area, View};

#[path = "../../src/rfb/encode/decoder.rs"]
mod decoder;

use decoder::{Bytes, Client};

/// The maximum width of a picture. Beyond 2048, Tight begins another rectangle.
const MAX_WIDTH: u16 = 2100;
/// The maximum number of pixels.
const MAX_PIXELS: usize = 1 << 15;

/// The input of the fuzzer, followed by zeros.
struct Input<I>(I);

impl<I: Iterator<Item = u8>> Input<I> {
    fn byte(&mut self) -> u8 {
        self.0.next().unwrap_or(0)
    }

    fn short(&mut self) -> u16 {
        u16::from_be_bytes([self.byte(), self.byte()])
    }

    fn below(&mut self, limit: u16) -> u16 {
        self.short() % limit.max(1)
    }

    fn word(&mut self) -> u32 {
        u32::from_be_bytes([self.byte(), self.byte(), self.byte(), self.byte()])
    }

    /// A picture of plain color, few colors, runs, a gradient and noise, each over a part.
    fn picture(&mut self, width: usize, height: usize) -> Vec<u32> {
        let mut pixels = vec![self.word(); width * height];
        for _ in 0..self.byte() % 6 {
            let (kind, colours, seed) = (self.byte(), usize::from(self.byte()), self.word());
            let start = usize::from(self.short()) % pixels.len();
            let end = (start + 1 + 16 * usize::from(self.short())).min(pixels.len());
            let mut noise = seed | 1;
            for (at, pixel) in (start..).zip(&mut pixels[start..end]) {
                noise ^= noise << 13;
                noise ^= noise >> 17;
                noise ^= noise << 5;
                let [x, y, colours] = [at % width, at / width, colours + 1].map(small);
                *pixel = match kind % 6 {
                    0 => seed,
                    1 => seed ^ ((noise >> 8) % colours),
                    2 => seed ^ (x / colours),
                    3 => ((x * 2) << 16) ^ ((y * 3) << 8) ^ (x + y),
                    4 => self.word(),
                    _ => noise,
                };
            }
        }
        pixels
    }

    fn parameters(&mut self) -> Parameters {
        let encoding = Encoding::ALL[usize::from(self.byte()) % Encoding::ALL.len()];
        Parameters { encoding, quality: None, compression: self.byte() % 12 }
    }
}

fn small(number: usize) -> u32 {
    u32::try_from(number).expect("a side of a picture")
}

/// Runs one client. Returns the number of pictures.
pub(crate) fn run(bytes: impl Iterator<Item = u8>) -> usize {
    let mut bytes = bytes.peekable();
    let mut encoder = Encoder::new();
    let mut client = Client::new(PixelFormat::OURS, 1, 1);
    let mut count = 0;
    while bytes.peek().is_some() && count < 24 {
        round(&mut Input(&mut bytes), &mut encoder, &mut client);
        count += 1;
    }
    count
}

fn round(input: &mut Input<impl Iterator<Item = u8>>, encoder: &mut Encoder, client: &mut Client) {
    if input.byte().is_multiple_of(4) {
        let mut format = [0; 16];
        format.fill_with(|| input.byte());
        if let Ok(format) = PixelFormat::read(&format) {
            client.format = format;
        }
    }
    let (width, height) = (1 + input.below(MAX_WIDTH), 1 + input.below(300));
    let height = usize::from(height).min((MAX_PIXELS / usize::from(width)).max(1));
    let (stride, rows) = (usize::from(width), height);
    let height = u16::try_from(height).expect("one of 300");
    let (x, y) = (input.below(width), input.below(height));
    let area =
        Area { x, y, width: input.below(width - x + 1), height: input.below(height - y + 1) };
    let pixels = input.picture(stride, rows);
    let parameters = input.parameters();
    client.width = stride;
    client.screen = vec![0x5555_5555; stride * rows];
    let view = View { pixels: &pixels, stride, area };
    let mut out = Vec::new();
    let format = client.format;
    let made = encoder.encode(&parameters, &format, &view, &mut out);
    if let Some(announced) = parameters.encoding.rectangles(&format, area) {
        assert_eq!(made, announced, "{parameters:?} {area:?}: the announced number");
    }
    let mut came = Bytes(&out);
    for _ in 0..made {
        client.rectangle(&mut came);
    }
    assert!(came.0.is_empty(), "{} bytes behind the last rectangle", came.0.len());
    assert!(!client.kinds.contains(&0x90), "nothing may be lost");
    for (at, pixel) in client.screen.iter().enumerate() {
        let (column, row) = (at % stride, at / stride);
        let within = (usize::from(x)..usize::from(x + area.width)).contains(&column)
            && (usize::from(y)..usize::from(y + area.height)).contains(&row);
        let wanted = if within { client.expected(pixels[at]) } else { 0x5555_5555 };
        assert_eq!(*pixel, wanted, "{parameters:?} {format:?} {area:?}: {column}, {row}");
    }
}
