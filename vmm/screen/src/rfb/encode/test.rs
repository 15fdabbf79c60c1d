//! Checks that clients decode the original pixels.

use super::decoder::{Bytes, Client};
use super::*;

/// Pseudo-random numbers.
struct Random(u32);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }

    fn below(&mut self, limit: usize) -> usize {
        self.next() as usize % limit
    }

    fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// A slow gradient, different in each color.
fn gradient(x: usize, y: usize) -> u32 {
    u32::from_be_bytes([0, byte(x * 2), byte(y * 3), byte((x + y) / 2)])
}

/// The lowest eight bits.
fn byte(number: usize) -> u8 {
    number.to_le_bytes()[0]
}

/// A picture with everything that encodings treat differently: plain areas, text of two and of more
/// colors, runs, gradients and noise, at any position.
fn picture(width: usize, height: usize, random: &mut Random) -> Vec<u32> {
    let mut pixels = vec![random.next() >> 8; width * height];
    for _ in 0..random.below(12) {
        let (left, top) = (random.below(width), random.below(height));
        let (right, bottom) =
            (left + 1 + random.below(width - left), top + 1 + random.below(height - top));
        let colours: Vec<u32> = (0..256).map(|_| random.next() >> 8).collect();
        let some = random.of(&[2, 3, 5, 16, 17, 90, 127, 128, 256]);
        let kind = random.below(6);
        for y in top..bottom {
            let mut colour = 0;
            for x in left..right {
                pixels[y * width + x] = match kind {
                    0 => colours[0],
                    1 => colours[random.below(8) / 7],
                    2 => colours[random.below(some)],
                    3 => {
                        if random.below(300) == 0 {
                            colour = random.below(some);
                        }
                        colours[colour]
                    }
                    4 => gradient(x, y),
                    _ => random.next() >> 8,
                };
            }
        }
    }
    pixels
}

fn format(bytes: [u8; 13]) -> PixelFormat {
    let mut all = [0; 16];
    all[..13].copy_from_slice(&bytes);
    PixelFormat::read(&all).unwrap()
}

fn formats() -> Vec<PixelFormat> {
    let mut all = vec![PixelFormat::OURS];
    for big in [0, 1] {
        let full = |red, green, blue, depth| {
            format([32, depth, big, 1, 0, 255, 0, 255, 0, 255, red, green, blue])
        };
        all.extend([full(16, 8, 0, 24), full(0, 8, 16, 24), full(24, 16, 8, 24)]);
        // Bits beyond the depth, unusual shifts, more bits than ours.
        all.extend([full(16, 8, 0, 32), full(3, 12, 21, 24)]);
        all.push(format([32, 30, big, 1, 3, 255, 3, 255, 3, 255, 20, 10, 0]));
        all.push(format([32, 24, big, 1, 0, 15, 0, 127, 0, 1, 9, 16, 30]));
        all.push(format([16, 16, big, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0]));
        all.push(format([16, 15, big, 1, 0, 31, 0, 31, 0, 31, 0, 5, 10]));
        all.push(format([8, 8, big, 1, 0, 7, 0, 7, 0, 3, 0, 3, 6]));
        all.push(format([8, 6, big, 1, 0, 3, 0, 3, 0, 3, 4, 2, 0]));
        all.push(format([8, 8, big, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    }
    all
}

/// Encodes and decodes an area. Returns the number of bytes.
fn send(
    encoder: &mut Encoder,
    client: &mut Client,
    parameters: &Parameters,
    view: &View<'_>,
) -> usize {
    let format = client.format;
    let mut out = b"before".to_vec();
    let count = encoder.encode(parameters, &format, view, &mut out);
    assert!(out.starts_with(b"before"));
    let mut bytes = Bytes(&out[6..]);
    for _ in 0..count {
        let encoding = client.rectangle(&mut bytes);
        assert!(encoding == parameters.encoding.number() || encoding == 0);
    }
    assert!(bytes.0.is_empty(), "{} bytes behind the last rectangle", bytes.0.len());
    out.len() - 6
}

/// Panics if the client's screen differs from the view within its area, or has changed elsewhere.
fn compare(client: &Client, before: &[u32], view: &View<'_>, what: &str) {
    let Area { x, y, width, height } = view.area;
    for (at, pixel) in client.screen.iter().enumerate() {
        let (column, row) = (at % client.width, at / client.width);
        let within = (usize::from(x)..usize::from(x + width)).contains(&column)
            && (usize::from(y)..usize::from(y + height)).contains(&row);
        let expected = if within {
            client.expected(view.pixels[row * view.stride + column])
        } else {
            before[at]
        };
        assert_eq!(*pixel, expected, "{what}: {column}, {row} of {:?}", view.area);
    }
}

const SIZES: [(u16, u16); 16] = [
    (1, 1),
    (1, 17),
    (2, 1),
    (5, 2),
    (15, 16),
    (16, 16),
    (17, 33),
    (64, 64),
    (65, 129),
    (200, 1),
    (3, 300),
    (2048, 2),
    (2049, 3),
    (2100, 20),
    (300, 270),
    (640, 100),
];

/// Simulates one client whose encoding, format, size and effort change while its streams continue.
fn life(seed: u32, encodings: &[Encoding], rounds: usize) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b1) | 1);
    let mut encoder = Encoder::new();
    let mut client = Client::new(PixelFormat::OURS, 1, 1);
    let formats = formats();
    for round in 0..rounds {
        let (width, height) = random.of(&SIZES);
        let (x, y) = (byte(random.below(20)).into(), byte(random.below(20)).into());
        let stride = usize::from(x + width) + random.below(5);
        let rows = usize::from(y + height);
        client.width = stride;
        client.screen = vec![0x5555_5555; stride * rows];
        if round % 3 == 2 {
            client.format = random.of(&formats);
        }
        let pixels = picture(stride, rows, &mut random);
        let view = View { pixels: &pixels, stride, area: Area { x, y, width, height } };
        let parameters = Parameters {
            encoding: random.of(encodings),
            quality: None,
            compression: byte(random.below(12)),
        };
        let before = client.screen.clone();
        let what = format!("seed {seed}, round {round}, {parameters:?}, {:?}", client.format);
        send(&mut encoder, &mut client, &parameters, &view);
        compare(&client, &before, &view, &what);
    }
}

#[test]
fn each_encoding_decodes_to_the_original() {
    for (seed, encoding) in (1..).zip(Encoding::ALL) {
        life(seed, &[encoding], 50);
    }
}

#[test]
fn encodings_and_formats_may_change_at_any_time() {
    for seed in 100..106 {
        life(seed, &Encoding::ALL, 50);
    }
}

#[test]
fn each_format_works_in_each_encoding() {
    let mut random = Random(7);
    let (width, height) = (150, 90);
    let pixels = picture(width.into(), height.into(), &mut random);
    let area = Area { x: 0, y: 0, width, height };
    let view = View { pixels: &pixels, stride: width.into(), area };
    for format in formats() {
        let mut encoder = Encoder::new();
        let mut client = Client::new(format, width.into(), height.into());
        for encoding in Encoding::ALL {
            let parameters = Parameters { encoding, quality: Some(9), compression: 2 };
            let parameters = Parameters {
                quality: parameters.quality.filter(|_| !format.is_full()),
                ..parameters
            };
            client.screen.fill(0x5555_5555);
            send(&mut encoder, &mut client, &parameters, &view);
            compare(&client, &[], &view, &format!("{encoding:?} {format:?}"));
        }
    }
}

/// Smooth shapes with grain.
fn photograph(width: usize, height: usize) -> Vec<u32> {
    let mut random = Random(3);
    // A smooth wave between 16 and 240.
    let wave = |at: usize, length: usize| {
        let part = at % (2 * length) * 256 / length;
        let part = if part < 256 { part } else { 511 - part };
        u32::from(byte(16 + part * part * (768 - 2 * part) / (256 * 256) * 7 / 8))
    };
    (0..width * height)
        .map(|at| {
            let (x, y) = (at % width, at / width);
            let grain = random.next() & 0x0007_0707;
            ((wave(x, 120) << 16) | (wave(y, 97) << 8) | wave(x + y, 171)) + grain
        })
        .collect()
}

/// Similarity of a client's screen with the original, in decibels.
fn psnr(client: &Client, pixels: &[u32]) -> f64 {
    let channels = |pixel: u32| pixel.to_be_bytes().map(f64::from);
    let error: f64 = client
        .screen
        .iter()
        .zip(pixels)
        .flat_map(|(one, other)| channels(*one).into_iter().zip(channels(*other)))
        .map(|(one, other)| (one - other).powi(2))
        .sum();
    10.0 * (255.0 * 255.0 * 3.0 * pixels.len() as f64 / error.max(1e-9)).log10()
}

#[test]
fn photographs_have_the_requested_quality() {
    let (width, height) = (480, 320);
    let pixels = photograph(width.into(), height.into());
    let area = Area { x: 0, y: 0, width, height };
    let view = View { pixels: &pixels, stride: width.into(), area };
    let mut last = 0;
    for (quality, least) in (0..).zip([24.0, 27.0, 28.0, 29.0, 31.0, 33.0, 34.0, 36.0, 38.0, 45.0])
    {
        for encoding in [Encoding::Tight, Encoding::TightPng] {
            let mut client = Client::new(PixelFormat::OURS, width.into(), height.into());
            let parameters = Parameters { encoding, quality: Some(quality), compression: 1 };
            let length = send(&mut Encoder::new(), &mut client, &parameters, &view);
            let near = psnr(&client, &pixels);
            assert!(client.kinds.iter().all(|kind| *kind == 0x90), "{:x?}", client.kinds);
            assert!(near > least, "quality {quality}: {near:.1} dB");
            assert!(length > last / 2 && length < area.pixels() * 3, "{length} bytes");
            last = length;
        }
    }
}

/// Shapes like letters with soft edges: ink, background, and shades between them.
fn text(width: usize, height: usize, random: &mut Random) -> Vec<u32> {
    let mut pixels = vec![0x00ff_ffff; width * height];
    for top in (3..height.saturating_sub(12)).step_by(18) {
        for left in (4..width.saturating_sub(9)).step_by(9) {
            for stroke in 0..random.below(4) {
                let at = left + random.below(6);
                for row in 0..10 {
                    // Each color has its own shade, as in subpixel rendering.
                    let start = (top + row) * width + at;
                    let soft = [0x00ff_c080, 0x0020_2020, 0x0080_c0ff];
                    let (from, to) = if stroke == 1 { (row, row + 1) } else { (0, 3) };
                    pixels[start + from % 3..start + 1 + (to - 1) % 3]
                        .copy_from_slice(&soft[from % 3..=(to - 1) % 3]);
                }
            }
        }
    }
    pixels
}

#[test]
fn text_beside_a_photograph_stays_sharp() {
    let (width, height) = (640, 400);
    let mut pixels = text(width, height, &mut Random(9));
    let photo = photograph(320, 200);
    for (row, from) in photo.chunks(320).enumerate() {
        let start = (row + 100) * width + 200;
        pixels[start..start + 320].copy_from_slice(from);
    }
    let area = Area { x: 0, y: 0, width: 640, height: 400 };
    let view = View { pixels: &pixels, stride: width, area };
    let mut client = Client::new(PixelFormat::OURS, width, height);
    let parameters = Parameters { encoding: Encoding::Tight, quality: Some(3), compression: 1 };
    send(&mut Encoder::new(), &mut client, &parameters, &view);
    assert!(client.kinds.contains(&0x90), "{:x?}", client.kinds);
    for (at, (one, other)) in client.screen.iter().zip(&pixels).enumerate() {
        let (x, y) = (at % width, at / width);
        let beside = (200..520).contains(&x) && (100..300).contains(&y);
        assert!(beside || one == other, "{x}, {y}: {one:06x}, not {other:06x}");
    }
    assert!(psnr(&client, &pixels) > 28.0);
}

#[test]
fn a_plain_screen_takes_a_few_bytes() {
    let pixels = vec![0x0012_3456; 1920 * 1080];
    let area = Area { x: 0, y: 0, width: 1920, height: 1080 };
    let view = View { pixels: &pixels, stride: 1920, area };
    for (encoding, most) in [(Encoding::Tight, 80), (Encoding::TightPng, 80), (Encoding::Zrle, 80)]
    {
        let mut client = Client::new(PixelFormat::OURS, 1920, 1080);
        let parameters = Parameters { encoding, quality: Some(6), compression: 2 };
        let length = send(&mut Encoder::new(), &mut client, &parameters, &view);
        assert!(length <= most, "{encoding:?}: {length} bytes");
        assert!(client.screen.iter().all(|pixel| *pixel == 0x0012_3456));
    }
}

#[test]
fn bits_outside_of_the_colour_are_not_sent() {
    let pixels: Vec<u32> = (0..64 * 64).map(|at| 0xff00_0000 | (at * 77)).collect();
    let area = Area { x: 0, y: 0, width: 64, height: 64 };
    let view = View { pixels: &pixels, stride: 64, area };
    for encoding in Encoding::ALL {
        let mut client = Client::new(PixelFormat::OURS, 64, 64);
        let parameters = Parameters { encoding, quality: None, compression: 2 };
        send(&mut Encoder::new(), &mut client, &parameters, &view);
        let same = |(one, other): (&u32, &u32)| *one == other & 0x00ff_ffff;
        assert!(client.screen.iter().zip(&pixels).all(same), "{encoding:?}");
    }
}

#[test]
fn a_copy_moves_existing_pixels() {
    let mut client = Client::new(PixelFormat::OURS, 10, 10);
    client.screen = (0..100).collect();
    let mut out = Vec::new();
    copy(Area { x: 2, y: 3, width: 4, height: 2 }, 1, 2, &mut out);
    assert_eq!(client.rectangle(&mut Bytes(&out)), COPY_RECT);
    assert_eq!(client.screen[32..36], [21, 22, 23, 24]);
    assert_eq!(client.screen[42..46], [31, 32, 33, 34]);
    assert_eq!(client.screen[52..54], [52, 53]);
}

#[test]
fn encoding_numbers_read_back() {
    for encoding in Encoding::ALL {
        assert_eq!(Encoding::from_number(encoding.number()), Some(encoding));
    }
    for number in [COPY_RECT, -223, 21, i32::MIN] {
        assert_eq!(Encoding::from_number(number), None);
    }
}

#[test]
fn an_empty_area_gives_no_rectangle() {
    let (mut encoder, mut out) = (Encoder::new(), Vec::new());
    for (width, height) in [(0, 0), (0, 5), (5, 0)] {
        let view = View { pixels: &[], stride: 0, area: Area { x: 0, y: 0, width, height } };
        for encoding in Encoding::ALL {
            let parameters = Parameters { encoding, quality: None, compression: 2 };
            assert_eq!(encoder.encode(&parameters, &PixelFormat::OURS, &view, &mut out), 0);
        }
    }
    assert!(out.is_empty());
}
