//! Pictures of a screen, and areas within them.

#[derive(Default)]
pub struct Picture {
    /// Row by row, `0x00RRGGBB`. Empty while there are no viewers.
    pub pixels: Vec<u32>,
    pub width: u16,
    pub height: u16,
}

impl Picture {
    pub(super) fn fill(&mut self, size: (u16, u16), colour: u32) {
        (self.width, self.height) = size;
        self.pixels.clear();
        self.pixels.resize(usize::from(size.0) * usize::from(size.1), colour);
    }

    pub fn size(&self) -> (u16, u16) {
        (self.width, self.height)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Area {
    pub x: u16,
    pub y: u16,
    pub width: u16,
    pub height: u16,
}

impl Area {
    pub const fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }

    pub const fn pixels(self) -> usize {
        self.width as usize * self.height as usize
    }

    /// The first column and the first row behind the area.
    pub fn end(self) -> (u32, u32) {
        let end = |start: u16, length: u16| u32::from(start) + u32::from(length);
        (end(self.x, self.width), end(self.y, self.height))
    }

    pub fn covers(self, other: Self) -> bool {
        let ((right, bottom), (its_right, its_bottom)) = (self.end(), other.end());
        self.x <= other.x && self.y <= other.y && its_right <= right && its_bottom <= bottom
    }

    pub fn overlaps(self, other: Self) -> bool {
        let ((right, bottom), (its_right, its_bottom)) = (self.end(), other.end());
        let beside = right <= other.x.into() || its_right <= self.x.into();
        !beside && bottom > other.y.into() && its_bottom > self.y.into()
    }

    pub fn intersection(self, other: Self) -> Self {
        let range = |start: u16, length: u16, its: u16, its_length: u16| {
            let end = start.saturating_add(length).min(its.saturating_add(its_length));
            let start = start.max(its);
            (start, end.saturating_sub(start))
        };
        let (x, width) = range(self.x, self.width, other.x, other.width);
        let (y, height) = range(self.y, self.height, other.y, other.height);
        Self { x, y, width, height }
    }

    /// Splits the area into pieces of at most this size, row by row.
    pub fn pieces(self, width: u16, height: u16) -> impl Iterator<Item = Self> {
        steps(self.y, self.height, height).flat_map(move |(y, height)| {
            steps(self.x, self.width, width).map(move |(x, width)| Self { x, y, width, height })
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Move {
    /// Upper left corner of the source.
    pub from: (u16, u16),
    /// The target, which may overlap the source. If the target covers a tile only in part, the rest
    /// of that tile is unchanged.
    pub to: Area,
}

impl Move {
    pub const fn source(&self) -> Area {
        let Area { width, height, .. } = self.to;
        Area { x: self.from.0, y: self.from.1, width, height }
    }
}

/// Splits a length into steps: start and length of each.
fn steps(start: u16, length: u16, step: u16) -> impl Iterator<Item = (u16, u16)> {
    (0..length).step_by(usize::from(step)).map(move |at| (start + at, step.min(length - at)))
}

/// Pixels of a screen, and an area of them to be encoded.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    /// `0x00RRGGBB`, row by row, from the upper left corner of the screen.
    pub pixels: &'a [u32],
    /// Distance in pixels between the starts of two rows.
    pub stride: usize,
    /// Lies within `pixels`.
    pub area: Area,
}

impl<'a> View<'a> {
    pub(super) const fn of(&self, area: Area) -> Self {
        Self { pixels: self.pixels, stride: self.stride, area }
    }

    /// One row of the area, counted from its upper edge.
    pub(super) fn row(self, row: usize) -> &'a [u32] {
        let start = (usize::from(self.area.y) + row) * self.stride + usize::from(self.area.x);
        &self.pixels[start..start + usize::from(self.area.width)]
    }

    pub(super) fn rows(self) -> impl Iterator<Item = &'a [u32]> {
        (0..usize::from(self.area.height)).map(move |row| self.row(row))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn pieces_cover_an_area_once() {
        let area = Area { x: 65_000, y: 7, width: 535, height: 33 };
        let mut seen = vec![0; area.pixels()];
        for piece in area.pieces(64, 10) {
            assert!(piece.width <= 64 && piece.height <= 10 && !piece.is_empty());
            for y in piece.y..piece.y + piece.height {
                for x in piece.x..piece.x + piece.width {
                    seen[usize::from(y - 7) * 535 + usize::from(x - 65_000)] += 1;
                }
            }
        }
        assert!(seen.iter().all(|count| *count == 1));
    }

    #[test]
    fn rows_cover_the_area() {
        let pixels: Vec<u32> = (0..50).collect();
        let view =
            View { pixels: &pixels, stride: 10, area: Area { x: 8, y: 3, width: 2, height: 2 } };
        assert_eq!(view.rows().collect::<Vec<_>>(), [&[38, 39], &[48, 49]]);
    }
}
