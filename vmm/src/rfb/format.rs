//! How a client wants its pixels (RFC 6143 7.4).

use anyhow::ensure;

/// A pixel format that can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PixelFormat {
    bytes: [u8; 16],
}

impl PixelFormat {
    /// 32 bits, blue in the first byte: as the picture is kept.
    pub const OURS: Self =
        Self { bytes: [32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0] };

    /// Reads what a client sent.
    ///
    /// # Errors
    ///
    /// When no pixel can look like that.
    pub fn read(bytes: &[u8; 16]) -> anyhow::Result<Self> {
        ensure!(matches!(bytes[0], 8 | 16 | 32), "pixels of {} bits", bytes[0]);
        let most = |at: usize| u16::from_be_bytes([bytes[at], bytes[at + 1]]);
        for (max, shift) in [(most(4), bytes[10]), (most(6), bytes[11]), (most(8), bytes[12])] {
            if bytes[3] == 0 {
                break;
            }
            ensure!(shift < bytes[0], "a colour's shift of {shift} in {} bits", bytes[0]);
            ensure!(max & max.wrapping_add(1) == 0, "a colour's maximum of {max}");
        }
        Ok(Self { bytes: *bytes })
    }

    /// As it stands in messages.
    pub fn write(&self) -> [u8; 16] {
        self.bytes
    }

    /// Whether the client has a map of colours.
    pub const fn is_mapped(&self) -> bool {
        self.bytes[3] == 0
    }

    /// SetColourMapEntries: what a client with a map is sent first.
    pub fn colour_map() -> Vec<u8> {
        let mut out = vec![1, 0, 0, 0, 1, 0];
        for entry in 0..=255_u16 {
            for (value, most) in [(entry & 7, 7), (entry >> 3 & 7, 7), (entry >> 6, 3)] {
                out.extend_from_slice(&(u16::MAX / most * value).to_be_bytes());
            }
        }
        out
    }

    /// One pixel.
    pub(super) fn put(&self, pixel: u32, out: &mut Vec<u8>) {
        let most = |at: usize| u32::from(u16::from_be_bytes([self.bytes[at], self.bytes[at + 1]]));
        let colour = |value: u32, at: usize, shift: usize| {
            ((value & 0xff) * most(at) / 255).checked_shl(u32::from(self.bytes[shift])).unwrap_or(0)
        };
        let value = if self.bytes[3] == 0 {
            let part = |shift: u32, most: u32| (pixel >> shift & 0xff) * most / 255;
            part(16, 7) | (part(8, 7) << 3) | (part(0, 3) << 6)
        } else {
            colour(pixel >> 16, 4, 10) | colour(pixel >> 8, 6, 11) | colour(pixel, 8, 12)
        };
        let count = usize::from(self.bytes[0]) / 8;
        if self.bytes[2] == 0 {
            out.extend_from_slice(&value.to_le_bytes()[..count]);
        } else {
            out.extend_from_slice(&value.to_be_bytes()[4 - count..]);
        }
    }
}
