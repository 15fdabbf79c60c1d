//! Pixel formats (RFC 6143, 7.4).
//!
//! Threats: the sixteen bytes come from a client. An invalid shift or width would move bits out of
//! a pixel, so such a format is rejected before anything is encoded.

use anyhow::{Result, ensure};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Channel {
    /// The maximum value: a power of two minus one.
    pub max: u16,
    /// Position of its lowest bit in the pixel.
    pub shift: u8,
}

impl Channel {
    pub const fn mask(self) -> u64 {
        (self.max as u64) << self.shift
    }

    /// Rounds an intensity of eight bits to this channel, and shifts it to its position.
    pub fn position(self, intensity: u8) -> u32 {
        ((u32::from(intensity) * u32::from(self.max) + 127) / 255) << self.shift
    }
}

/// A valid pixel format. [`PixelFormat::read`] is the only way to make another than
/// [`PixelFormat::OURS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelFormat {
    bits: u8,
    pub depth: u8,
    pub big_endian: bool,
    pub mapped: bool,
    /// Red, green, blue.
    pub channels: [Channel; 3],
}

impl PixelFormat {
    /// The format until a client chooses one: `0x00RRGGBB` in 32 bits, little-endian.
    pub const OURS: Self = Self {
        bits: 32,
        depth: 24,
        big_endian: false,
        mapped: false,
        channels: [channel(255, 16), channel(255, 8), channel(255, 0)],
    };

    /// Meaning of the 256 entries of the color map, for clients that want one.
    const MAPPED: [Channel; 3] = [channel(7, 5), channel(7, 2), channel(3, 0)];

    pub fn read(bytes: &[u8; 16]) -> Result<Self> {
        let [bits, depth, big_endian, true_colour, ..] = *bytes;
        ensure!(matches!(bits, 8 | 16 | 32), "{bits} bits per pixel: must be 8, 16 or 32");
        ensure!(depth <= bits, "a depth of {depth}: at most {bits}, the bits per pixel");
        let mapped = true_colour == 0;
        ensure!(!mapped || bits == 8, "a color map for {bits} bits per pixel: must be 8");
        let wide = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        let channels = if mapped {
            Self::MAPPED
        } else {
            [channel(wide(4), bytes[10]), channel(wide(6), bytes[11]), channel(wide(8), bytes[12])]
        };
        let mut taken = 0_u64;
        for Channel { max, shift } in channels {
            ensure!(
                max & max.wrapping_add(1) == 0,
                "a maximum intensity of {max}: must be 2^n - 1"
            );
            ensure!(
                shift < bits,
                "a shift of {shift}: must be less than {bits}, the bits per pixel"
            );
            let mask = channel(max, shift).mask();
            ensure!(mask >> bits == 0, "{max} << {shift} does not fit into {bits} bits per pixel");
            ensure!(mask & taken == 0, "{max} << {shift} overlaps another color");
            taken |= mask;
        }
        Ok(Self { bits, depth, big_endian: big_endian != 0, mapped, channels })
    }

    pub fn write(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..4].copy_from_slice(&[
            self.bits,
            self.depth,
            u8::from(self.big_endian),
            u8::from(!self.mapped),
        ]);
        for (index, Channel { max, shift }) in self.channels.iter().enumerate() {
            bytes[4 + 2 * index..][..2].copy_from_slice(&max.to_be_bytes());
            bytes[10 + index] = *shift;
        }
        bytes
    }

    /// `SetColourMapEntries` (RFC 6143, 7.6.2) for all 256 colors: three bits of red, three of
    /// green, two of blue.
    pub fn colour_map() -> Vec<u8> {
        let mut message = vec![1, 0, 0, 0, 1, 0];
        for pixel in 0..=255_u16 {
            for Channel { max, shift } in Self::MAPPED {
                let intensity = u32::from(pixel >> shift & max) * 0xffff / u32::from(max);
                message.extend(intensity.to_be_bytes()[2..].iter());
            }
        }
        message
    }

    /// Bytes per pixel: 1, 2 or 4.
    pub fn bytes(&self) -> usize {
        usize::from(self.bits / 8)
    }

    /// Whether a pixel has eight bits per color in four bytes, as ours. Only then does Tight omit
    /// the fourth byte, and only then may pictures be sent as JPEG.
    pub fn is_full(&self) -> bool {
        self.bits == 32 && self.depth == 24 && self.channels.iter().all(|it| it.max == 255)
    }
}

const fn channel(max: u16, shift: u8) -> Channel {
    Channel { max, shift }
}

#[cfg(test)]
mod test {
    use super::*;

    /// 5-6-5.
    const HIGH: [u8; 16] = [16, 16, 0, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0];

    #[test]
    fn a_format_reads_back() {
        for format in [PixelFormat::OURS, PixelFormat::read(&HIGH).unwrap()] {
            assert_eq!(PixelFormat::read(&format.write()).unwrap(), format);
        }
        assert_eq!(PixelFormat::read(&HIGH).unwrap().write(), HIGH);
    }

    #[test]
    fn refuses_invalid_pixel_formats() {
        let refused = |change: &[(usize, u8)]| {
            let mut bytes = HIGH;
            change.iter().for_each(|(at, value)| bytes[*at] = *value);
            PixelFormat::read(&bytes).unwrap_err().to_string()
        };
        assert_eq!(refused(&[(0, 24)]), "24 bits per pixel: must be 8, 16 or 32");
        assert_eq!(refused(&[(1, 17)]), "a depth of 17: at most 16, the bits per pixel");
        assert_eq!(refused(&[(3, 0)]), "a color map for 16 bits per pixel: must be 8");
        assert_eq!(refused(&[(5, 30)]), "a maximum intensity of 30: must be 2^n - 1");
        assert_eq!(
            refused(&[(10, 200)]),
            "a shift of 200: must be less than 16, the bits per pixel"
        );
        assert_eq!(refused(&[(10, 12)]), "31 << 12 does not fit into 16 bits per pixel");
        assert_eq!(refused(&[(12, 1)]), "31 << 1 overlaps another color");
        assert_eq!(
            refused(&[(4, 255), (5, 255), (10, 15)]),
            "65535 << 15 does not fit into 16 bits per pixel"
        );
    }

    #[test]
    fn no_input_makes_it_panic() {
        let mut state = 1_u32;
        for _ in 0..200_000 {
            let bytes: [u8; 16] = std::array::from_fn(|at| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let choice = [8, 16, 32, 0, 255, 1, 3, state.to_le_bytes()[3]];
                choice[(state >> 16) as usize % choice.len()] >> u8::from(at > 9 && state & 1 == 0)
            });
            if let Ok(format) = PixelFormat::read(&bytes) {
                format.channels.iter().for_each(|it| {
                    it.position(255);
                });
            }
        }
    }

    #[test]
    fn a_map_has_all_colours_of_its_pixels() {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&[8, 8]);
        let format = PixelFormat::read(&bytes).unwrap();
        assert!(format.mapped);
        let map = PixelFormat::colour_map();
        assert_eq!(map[..6], [1, 0, 0, 0, 1, 0]);
        assert_eq!(map.len(), 6 + 256 * 6);
        let white: u32 = format.channels.iter().map(|it| it.position(255)).sum();
        assert_eq!(white, 255);
        assert_eq!(map[6 + 255 * 6..], [255; 6]);
        let red = format.channels[0].position(255) as usize;
        assert_eq!(map[6 + red * 6..][..6], [255, 255, 0, 0, 0, 0]);
    }
}
