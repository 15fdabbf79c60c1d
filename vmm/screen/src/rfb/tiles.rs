//! Sets of tiles of a picture, one bit per tile.

use super::picture::Area;

/// Edge of a tile in pixels: about the size of a letter, the smallest thing that usually changes.
pub const TILE: u16 = 32;

/// A set of tiles of a picture of one size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tiles {
    width: u16,
    height: u16,
    bits: Vec<bool>,
}

impl Tiles {
    pub fn none(width: u16, height: u16) -> Self {
        let count = usize::from(width.div_ceil(TILE)) * usize::from(height.div_ceil(TILE));
        Self { width, height, bits: vec![false; count] }
    }

    pub fn all(width: u16, height: u16) -> Self {
        let mut tiles = Self::none(width, height);
        tiles.bits.fill(true);
        tiles
    }

    /// Width and height of the picture in pixels.
    pub fn size(&self) -> (u16, u16) {
        (self.width, self.height)
    }

    fn columns(&self) -> usize {
        usize::from(self.width.div_ceil(TILE))
    }

    /// Inserts the tile that contains a pixel.
    pub fn insert(&mut self, x: u16, y: u16) {
        let at = usize::from(y / TILE) * self.columns() + usize::from(x / TILE);
        if let Some(bit) = self.bits.get_mut(at) {
            *bit = true;
        }
    }

    /// Inserts all tiles that an area touches. Parts of the area outside the picture are ignored.
    pub fn insert_area(&mut self, area: Area) {
        self.put(area, true);
    }

    /// Inserts or removes all tiles that an area touches.
    pub fn put(&mut self, area: Area, is_in: bool) {
        let (columns, rows) = self.reach(area);
        let width = self.columns();
        for y in rows {
            self.bits[y * width + columns.start..y * width + columns.end].fill(is_in);
        }
    }

    /// `other` must be of the same picture.
    pub fn unite(&mut self, other: &Self) {
        debug_assert_eq!(self.size(), other.size(), "sets of one picture");
        self.bits.iter_mut().zip(&other.bits).for_each(|(bit, other)| *bit |= other);
    }

    /// `other` must be of the same picture.
    pub fn subtract(&mut self, other: &Self) {
        debug_assert_eq!(self.size(), other.size(), "sets of one picture");
        self.bits.iter_mut().zip(&other.bits).for_each(|(bit, other)| *bit &= !other);
    }

    pub fn count(&self) -> usize {
        self.bits.iter().filter(|bit| **bit).count()
    }

    /// Upper bound of the number of pixels: tiles at the edges of the picture count in full.
    pub fn pixels(&self) -> usize {
        self.count() * usize::from(TILE) * usize::from(TILE)
    }

    pub fn is_empty(&self) -> bool {
        !self.bits.contains(&true)
    }

    pub fn touches(&self, area: Area) -> bool {
        let (columns, rows) = self.reach(area);
        let width = self.columns();
        rows.into_iter().any(|y| columns.clone().any(|x| self.bits[y * width + x]))
    }

    /// Whether all tiles that an area touches are in the set.
    pub fn covers(&self, area: Area) -> bool {
        let (columns, rows) = self.reach(area);
        let width = self.columns();
        rows.into_iter().all(|y| columns.clone().all(|x| self.bits[y * width + x]))
    }

    /// The pixels of each tile that an area touches, whether the tile is in the set or not.
    pub fn touched(&self, area: Area) -> impl Iterator<Item = Area> {
        let (columns, rows) = self.reach(area);
        let width = self.columns();
        rows.into_iter()
            .flat_map(move |y| columns.clone().map(move |x| self.area(y * width + x, 1, 1)))
    }

    /// The smallest area that contains all tiles of the set.
    pub fn bounds(&self) -> Area {
        let columns = self.columns().max(1);
        let (mut left, mut right) = (columns, 0);
        let (mut top, mut bottom) = (usize::MAX, 0);
        for (y, row) in self.bits.chunks(columns).enumerate() {
            let Some(first) = row.iter().position(|bit| *bit) else { continue };
            let last = row.iter().rposition(|bit| *bit).unwrap_or(first);
            (left, right) = (left.min(first), right.max(last + 1));
            (top, bottom) = (top.min(y), y + 1);
        }
        if right == 0 {
            return Area { x: 0, y: 0, width: 0, height: 0 };
        }
        self.area(top * columns + left, right - left, bottom - top)
    }

    /// Removes the tiles that an area touches, and returns them.
    pub fn split_off(&mut self, area: Area) -> Self {
        let mut taken = Self::none(self.width, self.height);
        let (columns, rows) = self.reach(area);
        let width = self.columns();
        for y in rows {
            for at in columns.clone().map(|x| y * width + x) {
                taken.bits[at] = std::mem::take(&mut self.bits[at]);
            }
        }
        taken
    }

    /// The ranges of columns and rows of tiles that an area touches.
    fn reach(&self, area: Area) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
        let range = |start: u16, length: u16, most: u16| {
            let end = start.saturating_add(length).min(most);
            if start >= end {
                return 0..0;
            }
            usize::from(start / TILE)..usize::from(end.div_ceil(TILE))
        };
        (range(area.x, area.width, self.width), range(area.y, area.height, self.height))
    }

    /// Removes tiles and appends them to `areas` as rectangles, until these have at least `limit`
    /// pixels.
    pub fn take(&mut self, limit: usize, areas: &mut Vec<Area>) {
        let (columns, mut pixels) = (self.columns(), 0);
        while pixels < limit {
            let Some(first) = self.bits.iter().position(|bit| *bit) else { return };
            let row = &self.bits[first..(first / columns + 1) * columns];
            let run = row.iter().take_while(|bit| **bit).count();
            let pixels_of_row = run * usize::from(TILE) * usize::from(TILE);
            let room = ((limit - pixels) / pixels_of_row).max(1);
            let mut rows = 0;
            while rows < room {
                let start = first + rows * columns;
                let Some(row) = self.bits.get_mut(start..start + run) else { break };
                if row.contains(&false) {
                    break;
                }
                row.fill(false);
                rows += 1;
            }
            let area = self.area(first, run, rows);
            pixels += usize::from(area.width) * usize::from(area.height);
            areas.push(area);
        }
    }

    /// The pixels of a block of `run` by `rows` tiles whose upper left tile has the index `first`.
    fn area(&self, first: usize, run: usize, rows: usize) -> Area {
        let at = |tiles: usize, most: u16| {
            let pixel = tiles * usize::from(TILE);
            u16::try_from(pixel).map_or(most, |pixel| pixel.min(most))
        };
        let columns = self.columns();
        let (left, top) = (first % columns, first / columns);
        let (x, y) = (at(left, self.width), at(top, self.height));
        let width = at(left + run, self.width) - x;
        Area { x, y, width, height: at(top + rows, self.height) - y }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn area(x: u16, y: u16, width: u16, height: u16) -> Area {
        Area { x, y, width, height }
    }

    #[test]
    fn inserted_tiles_come_out_once_as_rectangles() {
        let mut tiles = Tiles::none(100, 70);
        tiles.insert_area(area(31, 0, 2, 33));
        tiles.insert(99, 69);
        assert!(tiles.touches(area(0, 0, 1, 1)) && !tiles.touches(area(64, 0, 36, 64)));
        let mut areas = Vec::new();
        tiles.take(usize::MAX, &mut areas);
        assert_eq!(areas, [area(0, 0, 64, 64), area(96, 64, 4, 6)]);
        assert!(tiles.is_empty());
    }

    #[test]
    fn a_full_picture_is_one_rectangle_or_bands_of_limited_size() {
        let mut areas = Vec::new();
        Tiles::all(1920, 1080).take(usize::MAX, &mut areas);
        assert_eq!(areas, [area(0, 0, 1920, 1080)]);
        areas.clear();
        let mut tiles = Tiles::all(1920, 1080);
        tiles.take(1 << 18, &mut areas);
        let sum: usize =
            areas.iter().map(|it| usize::from(it.width) * usize::from(it.height)).sum();
        assert!((1 << 18..(1 << 18) + (1 << 17)).contains(&sum), "{areas:?}");
        tiles.take(usize::MAX, &mut areas);
        let sum: usize =
            areas.iter().map(|it| usize::from(it.width) * usize::from(it.height)).sum();
        assert_eq!(sum, 1920 * 1080);
    }

    #[test]
    fn areas_outside_of_the_picture_are_empty() {
        for area in [
            area(100, 0, 9, 9),
            area(0, 70, 1, 1),
            area(5, 5, 0, 9),
            area(65535, 65535, 65535, 65535),
        ] {
            let mut tiles = Tiles::none(100, 70);
            tiles.insert_area(area);
            assert!(tiles.is_empty(), "{area:?}");
        }
        let mut tiles = Tiles::none(0, 0);
        tiles.insert_area(area(0, 0, 65535, 65535));
        tiles.insert(3, 3);
        tiles.take(9, &mut Vec::new());
        assert!(tiles.is_empty());
    }

    #[test]
    fn bounds_are_minimal() {
        let mut tiles = Tiles::none(100, 70);
        assert!(tiles.bounds().is_empty() && Tiles::none(0, 0).bounds().is_empty());
        tiles.insert(40, 69);
        assert_eq!(tiles.bounds(), area(32, 64, 32, 6));
        tiles.insert(99, 33);
        assert_eq!(tiles.bounds(), area(32, 32, 68, 38));
        assert!(tiles.covers(area(33, 64, 3, 6)) && !tiles.covers(area(33, 63, 3, 2)));
        tiles.put(area(0, 0, 100, 64), false);
        assert_eq!((tiles.bounds(), tiles.count()), (area(32, 64, 32, 6), 1));
        assert_eq!(Tiles::all(100, 70).bounds(), area(0, 0, 100, 70));
    }

    #[test]
    fn a_part_can_be_split_off() {
        let mut tiles = Tiles::all(64, 64);
        let mut part = tiles.split_off(area(0, 0, 64, 1));
        let mut areas = Vec::new();
        part.take(usize::MAX, &mut areas);
        tiles.take(usize::MAX, &mut areas);
        assert_eq!(areas, [area(0, 0, 64, 32), area(0, 32, 64, 32)]);
    }
}
