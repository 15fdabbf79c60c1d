//! Pictures and parts of them.

/// A rectangle of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    /// The left edge.
    pub x: u16,
    /// The upper edge.
    pub y: u16,
    /// Pixels of a line.
    pub width: u16,
    /// Lines.
    pub height: u16,
}

/// Pixels `0x00RRGGBB`.
pub struct View<'a> {
    /// All of the picture.
    pub pixels: &'a [u32],
    /// Pixels from a line to the next.
    pub stride: usize,
    /// What is to be sent.
    pub area: Area,
}
