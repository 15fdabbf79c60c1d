//! From pixels to rectangles.

use super::format::PixelFormat;
use super::picture::View;

/// How rectangles are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// RFC 6143 7.7.1
    Raw,
}

impl Encoding {
    /// Its number in the protocol.
    pub fn number(self) -> i32 {
        match self {
            Self::Raw => 0,
        }
    }

    /// The encoding with this number, if we have it.
    pub fn from_number(number: i32) -> Option<Self> {
        (number == 0).then_some(Self::Raw)
    }
}

/// What is sent to a client.
#[derive(Clone, Debug)]
pub struct Choice {
    /// How.
    pub encoding: Encoding,
    /// 0 to 9, none is lossless.
    pub quality: Option<u8>,
    /// 0 to 9.
    pub compression: u8,
}

/// What lives as long as a client.
pub struct Encoder;

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}

impl Encoder {
    /// Streams that nothing was sent on.
    pub fn new() -> Self {
        Self
    }

    /// Appends whole rectangles, and answers how many.
    pub fn encode(
        &mut self,
        choice: &Choice,
        format: &PixelFormat,
        view: &View<'_>,
        out: &mut Vec<u8>,
    ) -> usize {
        let area = view.area;
        for part in [area.x, area.y, area.width, area.height] {
            out.extend_from_slice(&part.to_be_bytes());
        }
        out.extend_from_slice(&choice.encoding.number().to_be_bytes());
        for y in 0..usize::from(area.height) {
            let start = (usize::from(area.y) + y) * view.stride + usize::from(area.x);
            for pixel in &view.pixels[start..start + usize::from(area.width)] {
                format.put(*pixel, out);
            }
        }
        1
    }
}
