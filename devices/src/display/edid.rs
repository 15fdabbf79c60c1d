//! The description of the monitor: VESA E-EDID 1.4, with DisplayID 1.3 in an extension for timings
//! that do not fit. Timings follow CVT 1.2 with reduced blanking, at 60 Hz.

use super::Resolution;

/// Size in bytes of the base block, and of an extension.
const BLOCK: usize = 128;
/// Offset of the number of extensions.
const EXTENSIONS: usize = 126;

/// Letters of "Transom". No manufacturer has registered this ID.
const MANUFACTURER: [u8; 3] = *b"TSM";
const NAME: &[u8] = b"Transom";
const PRODUCT: u16 = 1;
/// 2026, counted from 1990. A week of 255 marks it as the model year.
const YEAR: u8 = 36;

/// 3.6.1: digital, 8 bits per color, undefined interface.
const DIGITAL_8_BITS: u8 = 0b1010_0000;
/// 3.6.4: sRGB, and the first detailed timing is the native one.
const FEATURES: u8 = 0b0000_0110;
/// A gamma of 2.2, multiplied by 100, minus 100.
const GAMMA: u8 = 120;
/// 3.7: the primaries and the white point of sRGB.
const SRGB: [u8; 10] = [0xee, 0x91, 0xa3, 0x54, 0x4c, 0x99, 0x26, 0x0f, 0x50, 0x54];
/// 3.8: 640x480, 800x600 and 1024x768 at 60 Hz, which fit into the smallest frame buffer.
const ESTABLISHED: [u8; 3] = [0x21, 0x08, 0x00];
/// 3.9: widths, heights, and the codes of their aspect ratios.
const STANDARD: [(u16, u16, u8); 8] = [
    (1280, 720, 3),
    (1280, 800, 0),
    (1280, 1024, 2),
    (1440, 900, 0),
    (1600, 900, 3),
    (1680, 1050, 0),
    (1920, 1080, 3),
    (1920, 1200, 0),
];
/// Larger sizes, which are in the extension if there is room.
const LARGE: [Resolution; 2] = [Resolution::new(2560, 1440), Resolution::new(3840, 2160)];
/// Maximum size of the base's preferred timing, which replaces a preferred size that does not fit.
const MAX_IN_BASE: (u32, u32) = (3840, 2160);

// Tags of display descriptors (3.10.3): name, serial number, dummy.
const TAG_NAME: u8 = 0xfc;
const TAG_SERIAL: u8 = 0xff;
const TAG_DUMMY: u8 = 0x10;

// An extension block with a DisplayID section: version 1.3, of a standalone monitor.
const DISPLAY_ID: [u8; 2] = [0x70, 0x13];
const STANDALONE: u8 = 3;
// Size in bytes of the section's data blocks, and their offset.
const PAYLOAD: u8 = 121;
const PAYLOAD_AT: usize = 5;
// Data blocks (DisplayID 1.3, 4): product, size, interface, type I timings.
const PRODUCT_IDENTIFICATION: u8 = 0x00;
const DISPLAY_PARAMETERS: u8 = 0x01;
const TYPE_1: u8 = 0x03;
const INTERFACE: u8 = 0x0f;
/// Interface: proprietary digital.
const PROPRIETARY: u8 = 0xe0;
/// 8 bits per color in RGB.
const DEPTH_8: u8 = 1 << 1;
const LEVELS_8: u8 = 0x77;
const TYPE_1_PREFERRED: u8 = 0x80;
const TYPE_1_NO_ASPECT: u8 = 8;
const POSITIVE: u32 = 1 << 15;

/// Returns the EDID of a monitor that prefers the size `preferred`, on a display with `memory`
/// bytes.
pub(crate) fn edid(preferred: Resolution, memory: u64, serial: u32) -> Vec<u8> {
    let own = Timing::new(preferred);
    let in_base = own.descriptor(preferred);
    let first = in_base.or_else(|| {
        let width = preferred.width().min(MAX_IN_BASE.0);
        let nearest = Resolution::nearest(width, preferred.height().min(MAX_IN_BASE.1));
        Timing::new(nearest).descriptor(preferred)
    });
    let first = first.expect("a timing of at most MAX_IN_BASE fits");
    let mut all = base(preferred, memory, serial, &first);
    all.extend(extension(preferred, memory, serial));
    for block in all.chunks_mut(BLOCK) {
        seal(block);
    }
    all
}

/// Returns the EDID as a single block, if its fields can describe the size. Windows' viogpudo takes
/// every extension for one of CTA-861, and its bytes for numbers of modes.
pub(crate) fn single_block(preferred: Resolution, memory: u64, serial: u32) -> Option<Vec<u8>> {
    let first = Timing::new(preferred).descriptor(preferred)?;
    let mut block = base(preferred, memory, serial, &first);
    block[EXTENSIONS] = 0;
    seal(&mut block);
    Some(block)
}

/// Sets the last byte so that the sum of all bytes is zero.
fn seal(bytes: &mut [u8]) {
    if let Some((last, rest)) = bytes.split_last_mut() {
        *last = rest.iter().fold(0, |sum: u8, byte| sum.wrapping_sub(*byte));
    }
}

fn low(number: u32) -> u8 {
    number.to_le_bytes()[0]
}

/// Packs bits 11:8 of two numbers into one byte.
fn high(one: u32, two: u32) -> u8 {
    (one.to_le_bytes()[1] & 0xf) << 4 | two.to_le_bytes()[1] & 0xf
}

/// Converts pixels to millimeters at 96 pixels per inch.
fn millimeters(pixels: u32) -> u32 {
    pixels * 254 / 960
}

fn base(preferred: Resolution, memory: u64, serial: u32, first: &[u8; 18]) -> Vec<u8> {
    let mut block = vec![0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0];
    let letters = MANUFACTURER.map(|letter| u16::from(letter - b'A' + 1));
    block.extend((letters[0] << 10 | letters[1] << 5 | letters[2]).to_be_bytes());
    block.extend(PRODUCT.to_le_bytes());
    block.extend(serial.to_le_bytes());
    block.extend([0xff, YEAR, 1, 4, DIGITAL_8_BITS]);
    let centimeters = |pixels| low((millimeters(pixels) / 10).min(255));
    block.extend([centimeters(preferred.width()), centimeters(preferred.height())]);
    block.extend([GAMMA, FEATURES]);
    block.extend(SRGB);
    block.extend(ESTABLISHED);
    let fits = |it: &&(u16, u16, u8)| Resolution::new(it.0, it.1).bytes() <= memory;
    let standard = STANDARD.iter().filter(fits).map(|(width, _, aspect)| {
        // The refresh rate of 60 Hz is encoded as 0.
        [low(u32::from(*width) / 8 - 31), aspect << 6]
    });
    // 01 01 is an unused entry.
    block.extend(standard.chain([[1, 1]; 8]).take(8).flatten());
    block.extend(first);
    block.extend(text(TAG_NAME, NAME));
    block.extend(text(TAG_SERIAL, format!("{serial:08X}").as_bytes()));
    block.extend([0, 0, 0, TAG_DUMMY]);
    block.resize(BLOCK, 0);
    block[EXTENSIONS] = 1;
    block
}

/// A display descriptor with a text of at most 12 characters (3.10.3.4).
fn text(tag: u8, text: &[u8]) -> [u8; 18] {
    let mut descriptor = [b' '; 18];
    descriptor[..5].copy_from_slice(&[0, 0, 0, tag, 0]);
    let to = &mut descriptor[5..];
    to[..text.len()].copy_from_slice(text);
    to[text.len()] = b'\n';
    descriptor
}

/// A DisplayID 1.3 section that repeats the base's data, and adds the timings that do not fit
/// there.
fn extension(preferred: Resolution, memory: u64, serial: u32) -> Vec<u8> {
    let mut block = DISPLAY_ID.to_vec();
    block.extend([PAYLOAD, STANDALONE, 0]);
    let mut product = MANUFACTURER.to_vec();
    product.extend(PRODUCT.to_le_bytes());
    product.extend(serial.to_le_bytes());
    // The model year, counted from 2000, and an empty name.
    product.extend([0xff, YEAR - 10, 0]);
    let (width, height) = (preferred.width(), preferred.height());
    let mut parameters = Vec::new();
    for number in [millimeters(width) * 10, millimeters(height) * 10, width, height] {
        parameters.extend(u16::try_from(number).unwrap_or(u16::MAX).to_le_bytes());
    }
    let aspect = width.max(height) * 100 / width.min(height);
    parameters.extend([0, GAMMA, low((aspect - 100).min(255)), LEVELS_8]);
    let interface = vec![PROPRIETARY, 0, DEPTH_8, 0, 0, 0, 0, 0, 0, 0];
    let larger = LARGE.into_iter().filter(|it| *it != preferred && it.bytes() <= memory);
    let mut timings = Timing::new(preferred).type_1(true);
    timings.extend(larger.flat_map(|size| Timing::new(size).type_1(false)));
    for (tag, body) in [
        (PRODUCT_IDENTIFICATION, product),
        (DISPLAY_PARAMETERS, parameters),
        (INTERFACE, interface),
        (TYPE_1, timings),
    ] {
        block.extend([tag, 0, low(u32::try_from(body.len()).unwrap_or(0))]);
        block.extend(body);
    }
    block.resize(PAYLOAD_AT + usize::from(PAYLOAD) + 1, 0);
    // The section begins after the extension's tag, and has its own checksum.
    seal(&mut block[1..]);
    block.push(0);
    block
}

// Duration of a frame, and the minimum blanking time in it (CVT 1.2, 5.4).
const FRAME_NS: u64 = 1_000_000_000 / 60;
const BLANK_NS: u64 = 460_000;

/// A video timing (CVT 1.2, 5.4): active pixels, and blanking that contains the sync pulse.
struct Timing {
    /// Pixel clock in kilohertz.
    clock: u32,
    horizontal: Span,
    vertical: Span,
}

struct Span {
    active: u32,
    blank: u32,
    front: u32,
    sync: u32,
}

impl Timing {
    fn new(size: Resolution) -> Self {
        let (width, height) = (size.width(), size.height());
        let horizontal = Span { active: width, blank: 160, front: 48, sync: 32 };
        // The width of the pulse encodes the aspect ratio (3.4.2).
        let aspects = [(4, 3, 4), (16, 9, 5), (16, 10, 6), (5, 4, 7), (15, 9, 7)];
        let aspect = aspects.iter().find(|(x, y, _)| width == height * x / y / 8 * 8);
        let sync = aspect.map_or(10, |it| it.2);
        // At least 460 µs of blanking, and room for the pulse between two porches.
        let lines = BLANK_NS * u64::from(height) / (FRAME_NS - BLANK_NS) + 1;
        let blank = u32::try_from(lines).unwrap_or(0).max(3 + sync + 6);
        let vertical = Span { active: height, blank, front: 3, sync };
        let hertz = u64::from(width + horizontal.blank) * u64::from(height + blank) * 60;
        let clock = u32::try_from(hertz / 250_000 * 250).unwrap_or(0);
        Self { clock, horizontal, vertical }
    }

    /// The detailed timing descriptor (E-EDID 1.4, 3.10.2) on a monitor of this size, if the values
    /// fit into its fields.
    fn descriptor(&self, size: Resolution) -> Option<[u8; 18]> {
        let [clock_low, clock_high] = u16::try_from(self.clock / 10).ok()?.to_le_bytes();
        let (h, v) = (&self.horizontal, &self.vertical);
        if [h.active, h.blank, v.active, v.blank].into_iter().any(|it| it > 0xfff) {
            return None;
        }
        let wide = millimeters(size.width()).min(0xfff);
        let tall = millimeters(size.height()).min(0xfff);
        Some([
            clock_low,
            clock_high,
            low(h.active),
            low(h.blank),
            high(h.active, h.blank),
            low(v.active),
            low(v.blank),
            high(v.active, v.blank),
            low(h.front),
            low(h.sync),
            low(v.front << 4 | v.sync),
            // The upper bits of the previous four fields, which are all zero.
            0,
            low(wide),
            low(tall),
            high(wide, tall),
            0,
            0,
            // Two digital sync pulses: horizontal positive, vertical negative.
            0b0001_1010,
        ])
    }

    /// The timing in DisplayID's type I format, without the code of an aspect ratio.
    fn type_1(&self, preferred: bool) -> Vec<u8> {
        let mut bytes = (self.clock / 10 - 1).to_le_bytes()[..3].to_vec();
        bytes.push(TYPE_1_NO_ASPECT | if preferred { TYPE_1_PREFERRED } else { 0 });
        for (span, polarity) in [(&self.horizontal, POSITIVE), (&self.vertical, 0)] {
            let front = (span.front - 1) | polarity;
            for number in [span.active - 1, span.blank - 1, front, span.sync - 1] {
                bytes.extend(&number.to_le_bytes()[..2]);
            }
        }
        bytes
    }
}

#[cfg(test)]
mod test {
    use std::io::Write as _;
    use std::process::{Command, Stdio};

    use super::*;

    const MEMORY: u64 = 64 << 20;

    fn of(width: u16, height: u16) -> Vec<u8> {
        edid(Resolution::new(width, height), MEMORY, 7)
    }

    fn sizes() -> impl Iterator<Item = (u16, u16)> {
        [
            (640, 480),
            (1024, 768),
            (1280, 800),
            (1366, 768),
            (1728, 1117),
            (1920, 1080),
            (2560, 1600),
            (3840, 2160),
            (4095, 2160),
            (4096, 2160),
            (641, 4095),
            (8192, 480),
            (8192, 8192),
        ]
        .into_iter()
    }

    /// The size in the first detailed timing, as firmware reads it.
    fn first(edid: &[u8]) -> (u32, u32) {
        let number =
            |low: usize, high: usize| u32::from(edid[low]) | u32::from(edid[high] & 0xf0) << 4;
        (number(56, 58), number(59, 61))
    }

    #[test]
    fn blocks_have_valid_checksums_and_the_announced_count() {
        let small = edid(Resolution::new(640, 480), 4 << 20, 7);
        let sum = |bytes: &[u8]| bytes.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte));
        for edid in sizes().map(|(width, height)| of(width, height)).chain([small]) {
            assert!(edid.starts_with(&[0, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0]));
            assert_eq!(edid.len(), 128 * (1 + usize::from(edid[126])));
            assert!(edid.chunks(128).all(|block| sum(block) == 0));
            assert!(edid[128..].chunks(128).all(|block| sum(&block[1..127]) == 0));
        }
    }

    #[test]
    fn a_single_block_has_the_same_sizes_and_no_extension() {
        for (width, height) in [(640, 480), (1366, 768), (3840, 2160)] {
            let block = single_block(Resolution::new(width, height), MEMORY, 7).unwrap();
            let whole = of(width, height);
            assert_eq!((&block[..126], block.len()), (&whole[..126], 128));
            assert_eq!(block[126], 0);
            assert_eq!(block.iter().fold(0, |sum: u8, byte| sum.wrapping_add(*byte)), 0);
        }
        // Too wide for the field, and too fast for the field of the clock.
        for (width, height) in [(4096, 480), (640, 4096), (4095, 4095)] {
            assert_eq!(single_block(Resolution::new(width, height), MEMORY, 7), None);
        }
    }

    #[test]
    fn the_preferred_size_is_the_first_timing() {
        for (width, height) in sizes().filter(|it| it.0 <= 4095 && it.1 <= 4095) {
            assert_eq!(first(&of(width, height)), (width.into(), height.into()));
        }
        assert_eq!(first(&of(4096, 2160)), (3840, 2160));
        assert_eq!(first(&of(8192, 480)), (3840, 480));
        // The first timing of the extension, with the preferred flag.
        let extension = &of(4096, 2160)[128..];
        assert_eq!(extension[48..51], [TYPE_1, 0, 60]);
        assert_eq!(extension[51 + 3], 0x88);
        assert_eq!(extension[51 + 4..51 + 6], 4095_u16.to_le_bytes());
    }

    #[test]
    fn timings_match_the_cvt_standard() {
        // VESA CVT 1.2: 1920x1080 at 60 Hz with reduced blanking has 138.5 MHz, 2080 by 1111.
        let timing = Timing::new(Resolution::new(1920, 1080));
        assert_eq!((timing.clock, timing.vertical.blank, timing.vertical.sync), (138_500, 31, 5));
        // 2560x1600: 268.5 MHz, 2720 by 1646.
        let timing = Timing::new(Resolution::new(2560, 1600));
        assert_eq!((timing.clock, timing.vertical.blank, timing.vertical.sync), (268_500, 46, 6));
        // 1400x1050: 101 MHz, 1560 by 1080.
        let timing = Timing::new(Resolution::new(1400, 1050));
        assert_eq!((timing.clock, timing.vertical.blank, timing.vertical.sync), (101_000, 30, 4));
    }

    #[test]
    fn modes_larger_than_the_memory_are_not_offered() {
        let small = edid(Resolution::new(800, 600), 4 << 20, 7);
        // 1280x720 and 1280x800 fit.
        assert_eq!(small[38..44], [129, 0xc0, 129, 0, 1, 1]);
        assert_eq!(small[128 + 48..][..3], [TYPE_1, 0, 20], "only its own size");
    }

    #[test]
    fn edid_decode_finds_no_errors() {
        for (width, height) in sizes() {
            let mut decoder = Command::new("edid-decode");
            decoder.args(["--check", "-"]).stdin(Stdio::piped()).stdout(Stdio::piped());
            let Ok(mut child) = decoder.spawn() else {
                let test = "edid_decode_finds_no_errors";
                return skip::not_run(test, "there is no edid-decode");
            };
            child.stdin.take().unwrap().write_all(&of(width, height)).unwrap();
            let output = child.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(said.contains("conformity: PASS"), "{width}x{height}: {said}");
        }
    }
}
