//! Finds the largest rectangles of tiles that moved by one offset.

use super::{Frames, Offset, number};
use crate::rfb::picture::Area;
use crate::rfb::tiles::{TILE, Tiles};

/// The tiles of an area, compared for one offset.
pub(super) struct Grid {
    area: Area,
    columns: usize,
    /// Whether each tile equals its source in the old picture.
    moved: Vec<bool>,
    /// Prefix sums of `changed`: the number of changed tiles above and to the left of each corner.
    sums: Vec<usize>,
    changed: Vec<bool>,
}

/// Ranges of columns and rows of tiles.
type Block = (std::ops::Range<usize>, std::ops::Range<usize>);

impl Grid {
    pub(super) fn new(frames: &Frames<'_>, area: Area, offset: Offset, changed: &Tiles) -> Self {
        let tiles = || area.pieces(TILE, TILE);
        let moved = tiles().map(|tile| frames.is_moved(tile, offset)).collect();
        let changed = tiles().map(|tile| changed.touches(tile)).collect();
        let columns = usize::from(area.width.div_ceil(TILE));
        let mut grid = Self { area, columns, moved, sums: Vec::new(), changed };
        grid.sum();
        grid
    }

    fn rows(&self) -> usize {
        self.moved.len() / self.columns
    }

    fn sum(&mut self) {
        let columns = self.columns;
        self.sums.clear();
        self.sums.resize((columns + 1) * (self.rows() + 1), 0);
        for (row, tiles) in self.changed.chunks(columns).enumerate() {
            let mut sum = 0;
            for (column, changed) in tiles.iter().enumerate() {
                sum += usize::from(*changed);
                let above = self.sums[row * (columns + 1) + column + 1];
                self.sums[(row + 1) * (columns + 1) + column + 1] = above + sum;
            }
        }
    }

    /// Number of changed tiles in a block.
    fn worth(&self, (columns, rows): &Block) -> usize {
        let sum = |column: usize, row: usize| self.sums[row * (self.columns + 1) + column];
        sum(columns.end, rows.end) + sum(columns.start, rows.start)
            - sum(columns.end, rows.start)
            - sum(columns.start, rows.end)
    }

    /// Returns the moved rectangle with the most changed tiles, if there are at least `least` of
    /// them.
    pub(super) fn best(&self, least: usize) -> Option<Area> {
        let (mut heights, mut best) = (vec![0; self.columns + 1], (0, (0..0, 0..0)));
        let mut open: Vec<(usize, usize)> = Vec::new();
        for (row, tiles) in self.moved.chunks(self.columns).enumerate() {
            for (height, moved) in heights.iter_mut().zip(tiles) {
                *height = if *moved { *height + 1 } else { 0 };
            }
            // The last height is 0 and closes all open rectangles.
            for (column, height) in heights.iter().enumerate() {
                let mut start = column;
                while let Some((left, high)) = open.pop_if(|it| it.1 >= *height) {
                    let block = (left..column, row + 1 - high..row + 1);
                    let worth = self.worth(&block);
                    if worth > best.0 {
                        best = (worth, block);
                    }
                    start = left;
                }
                open.push((start, *height));
            }
            open.clear();
        }
        (best.0 >= least.max(1)).then(|| self.area(self.trimmed(best.1)))
    }

    /// Removes rows and columns without changed tiles at the edges.
    fn trimmed(&self, (mut columns, mut rows): Block) -> Block {
        let none = |columns, rows| self.worth(&(columns, rows)) == 0;
        while none(columns.clone(), rows.start..rows.start + 1) {
            rows.start += 1;
        }
        while none(columns.clone(), rows.end - 1..rows.end) {
            rows.end -= 1;
        }
        while none(columns.start..columns.start + 1, rows.clone()) {
            columns.start += 1;
        }
        while none(columns.end - 1..columns.end, rows.clone()) {
            columns.end -= 1;
        }
        (columns, rows)
    }

    fn area(&self, (columns, rows): Block) -> Area {
        let side = |tiles: std::ops::Range<usize>, length: u16| {
            let at = |tile: usize| number(tile * usize::from(TILE)).min(length);
            (at(tiles.start), at(tiles.end) - at(tiles.start))
        };
        let (x, width) = side(columns, self.area.width);
        let (y, height) = side(rows, self.area.height);
        Area { x: self.area.x + x, y: self.area.y + y, width, height }
    }

    /// Excludes the tiles of a reported move from further searches.
    pub(super) fn clear(&mut self, found: Area) {
        for (at, tile) in self.area.pieces(TILE, TILE).enumerate() {
            if found.covers(tile) {
                (self.moved[at], self.changed[at]) = (false, false);
            }
        }
        self.sum();
    }
}
