//! Detects moved content between two frames: text that scrolls, a window that is dragged.
//!
//! The search hashes small windows of the new picture and keeps those that occur exactly once. It
//! then looks for them at every position of some rows of the old picture. Each match is a vote for
//! an offset. For the offsets with the most votes, whole tiles are compared: every reported move is
//! equal pixel by pixel. While large changes contain no moves, as in a film, the search runs less
//! and less often.
//!
//! Threats: the guest draws what it likes. The work is bounded by the picture's size. A window that
//! occurs twice does not vote, a position of the old picture votes once, and the vote table has a
//! fixed size.

mod grid;

use self::grid::Grid;
use super::picture::{Area, Move, Picture};
use super::tiles::{TILE, Tiles};

/// A search starts if at least `min(pixels / LARGE_SHARE, max(MANY_PIXELS, pixels / SMALL_SHARE))`
/// pixels changed.
const LARGE_SHARE: usize = 16;
const SMALL_SHARE: usize = 64;
const MANY_PIXELS: usize = 32 << 10;
/// A move must contain at least 1/16 of the changed tiles.
const MIN_SHARE: usize = 16;
/// Maximum moves of one search, and maximum blocks of whole tiles among them.
const MAX_MOVES: usize = 16;
const MAX_BLOCKS: usize = 4;
/// A window is `WINDOW_WIDTH` pixels of a row, and the pixels `ROW_GAP` rows below them, because
/// single rows of letters often look alike. The gap is odd because scaled text may have each row
/// twice.
const WINDOW_WIDTH: usize = 32;
const ROW_GAP: usize = 7;
/// Columns in which windows are taken; each has one window per row.
const COLUMNS: usize = 8;
/// Number of rows of the old picture that are searched: one for every `ROW_SPACING` changed rows,
/// within these limits.
const SEARCHED_ROWS: std::ops::RangeInclusive<usize> = 16..=64;
const ROW_SPACING: usize = 8;
/// Size of the sieve in words of 64 bits.
const SIEVE_WORDS: usize = 1024;
/// Slots of the vote table, and how many of the best offsets are tried.
const VOTE_SLOTS: usize = 1024;
const MAX_TRIED: usize = 3;
/// Offsets with fewer votes are not tried.
const MIN_VOTES: u32 = 4;
/// Failed searches before pauses begin. Each further failure doubles the pause, up to `MAX_PAUSE`
/// skipped searches.
const FREE_FAILURES: u32 = 3;
const MAX_PAUSE: u32 = 31;
/// Marks a missing coordinate.
const MISSING: u16 = u16::MAX;
/// Odd constants for hashing.
const HASH_BASE: u64 = 0x9e37_79b9_7f4a_7c15;
const LOWER_FACTOR: u64 = 0xc2b2_ae3d_27d4_eb4f;
const MIX_FACTOR: u64 = 0xd6e8_feb8_6659_fd93;

/// State of the search between frames, shared by all clients of a canvas.
#[derive(Default)]
pub struct Scroll {
    /// The previous picture, except for the tiles in `stale`.
    before: Vec<u32>,
    stale: Tiles,
    /// `before` is the picture right before the current change.
    saved: bool,
    failures: u32,
    pause: u32,
    search: Search,
}

impl Scroll {
    /// Saves the picture before at most `written` of its pixels are overwritten.
    pub fn save(&mut self, picture: &Picture, written: usize) {
        self.saved = false;
        if !is_much(written, picture) {
            return;
        }
        if self.pause > 0 {
            self.pause -= 1;
            return;
        }
        self.saved = true;
        if self.stale.size() != picture.size() || self.before.len() != picture.pixels.len() {
            self.before.clone_from(&picture.pixels);
            self.stale = Tiles::none(picture.width, picture.height);
            return;
        }
        let mut areas = Vec::new();
        self.stale.take(usize::MAX, &mut areas);
        let stride = usize::from(picture.width);
        for area in areas {
            for y in usize::from(area.y)..usize::from(area.y) + usize::from(area.height) {
                let start = y * stride + usize::from(area.x);
                let row = start..start + usize::from(area.width);
                self.before[row.clone()].copy_from_slice(&picture.pixels[row]);
            }
        }
    }

    /// Returns the moves that explain some of the changed tiles. They must be applied in this
    /// order.
    pub fn find(&mut self, picture: &Picture, changed: &Tiles) -> Vec<Move> {
        if !std::mem::take(&mut self.saved) {
            if self.stale.size() == changed.size() {
                self.stale.unite(changed);
            } else {
                (self.before, self.stale) = (Vec::new(), Tiles::default());
            }
            return Vec::new();
        }
        self.stale.clone_from(changed);
        if !is_much(changed.pixels(), picture) {
            return Vec::new();
        }
        let frames = Frames { old: &self.before, new: &picture.pixels, size: picture.size() };
        let moves = self.search.run(&frames, changed);
        self.record_result(!moves.is_empty());
        moves
    }

    fn record_result(&mut self, found: bool) {
        self.failures = if found { 0 } else { self.failures.saturating_add(1) };
        let doubled = self.failures.saturating_sub(FREE_FAILURES).min(MAX_PAUSE);
        self.pause = ((1_u32 << doubled.min(8)) - 1).min(MAX_PAUSE);
    }
}

fn is_much(pixels: usize, picture: &Picture) -> bool {
    let all = picture.pixels.len();
    pixels >= (all / LARGE_SHARE).min(MANY_PIXELS.max(all / SMALL_SHARE))
}

struct Frames<'a> {
    old: &'a [u32],
    new: &'a [u32],
    size: (u16, u16),
}

impl Frames<'_> {
    fn width(&self) -> usize {
        self.size.0.into()
    }

    /// Measures a tile beside a block that moved, in lines counted from the block: the smallest
    /// depth that contains all changes, and the largest depth that matches the moved source.
    fn depth(&self, tile: Area, side: Side, offset: Offset) -> (u16, u16) {
        let length = side.length(tile);
        let is_still = |line: &u16| self.is_moved(side.lines(tile, *line, 1), Offset::default());
        let moved = |line: &u16| self.is_moved(side.lines(tile, *line, 1), offset);
        let still = (0..length).rev().take_while(is_still).count();
        let moved = (0..length).take_while(moved).count();
        (length - number(still), number(moved))
    }

    /// Finds moved strips in the tiles beside a block, where the rest of each tile is unchanged.
    fn fringe(&self, block: Area, side: Side, offset: Offset, left: &Tiles) -> Vec<Area> {
        let mut strips: Vec<(Area, u16, u16)> = Vec::new();
        for tile in side.beside(block, self.size).pieces(TILE, TILE) {
            let (changed, moved) = self.depth(tile, side, offset);
            if changed > moved || (changed > 0 && !left.touches(tile)) {
                continue;
            }
            if let Some((area, least, most)) = strips.last_mut()
                && let Some(merged) = joined(*area, tile)
                && changed.max(*least) <= moved.min(*most)
            {
                (*area, *least, *most) = (merged, changed.max(*least), moved.min(*most));
            } else {
                strips.push((tile, changed, moved));
            }
        }
        let strips = strips.into_iter().filter(|it| it.1 > 0);
        strips.map(|(area, depth, _)| side.lines(area, 0, depth)).collect()
    }

    /// Whether this area of the new picture equals the source area of the old one.
    fn is_moved(&self, to: Area, offset: Offset) -> bool {
        let Some(from) = offset.back(to, self.size) else { return false };
        let row = |pixels, area: Area, row: u16| -> &[u32] {
            let pixels: &[u32] = pixels;
            let start = (usize::from(area.y) + usize::from(row)) * self.width();
            let start = start + usize::from(area.x);
            &pixels[start..start + usize::from(area.width)]
        };
        (0..to.height).all(|y| row(self.new, to, y) == row(self.old, from, y))
    }
}

#[derive(Clone, Copy)]
enum Side {
    Above,
    Below,
    Left,
    Right,
}

impl Side {
    const ALL: [Self; 4] = [Self::Above, Self::Below, Self::Left, Self::Right];

    /// The tiles beside an area on this side, clipped to the picture; may be empty.
    fn beside(self, it: Area, (width, height): (u16, u16)) -> Area {
        let before = |start: u16| (start.saturating_sub(TILE), start.min(TILE));
        let behind = |start: u16, length: u16, most: u16| {
            let end = start.saturating_add(length).min(most);
            (end, TILE.min(most - end))
        };
        let (x, wide) = match self {
            Self::Left => before(it.x),
            Self::Right => behind(it.x, it.width, width),
            _ => (it.x, it.width),
        };
        let (y, high) = match self {
            Self::Above => before(it.y),
            Self::Below => behind(it.y, it.height, height),
            _ => (it.y, it.height),
        };
        Area { x, y, width: wide, height: high }
    }

    fn length(self, tile: Area) -> u16 {
        if matches!(self, Self::Above | Self::Below) { tile.height } else { tile.width }
    }

    /// `count` lines of a tile beside a block, starting `first` lines away from the block.
    fn lines(self, tile: Area, first: u16, count: u16) -> Area {
        match self {
            Self::Above => Area { y: tile.y + tile.height - first - count, height: count, ..tile },
            Self::Below => Area { y: tile.y + first, height: count, ..tile },
            Self::Left => Area { x: tile.x + tile.width - first - count, width: count, ..tile },
            Self::Right => Area { x: tile.x + first, width: count, ..tile },
        }
    }
}

/// The union of two areas if `next` directly follows `one` in a row or a column.
fn joined(one: Area, next: Area) -> Option<Area> {
    if (one.y, one.height) == (next.y, next.height) && one.end().0 == u32::from(next.x) {
        return Some(Area { width: one.width + next.width, ..one });
    }
    let below = (one.x, one.width) == (next.x, next.width) && one.end().1 == u32::from(next.y);
    below.then(|| Area { height: one.height + next.height, ..one })
}

/// Distance of a move in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Offset {
    right: i16,
    down: i16,
}

impl Offset {
    fn between(from: (usize, usize), to: (u16, u16)) -> Self {
        let offset = |from: usize, to: u16| {
            let from = i32::try_from(from).unwrap_or(0);
            i16::try_from(i32::from(to) - from).unwrap_or(0)
        };
        Self { right: offset(from.0, to.0), down: offset(from.1, to.1) }
    }

    /// The source area, if it lies within the picture.
    fn back(self, to: Area, (width, height): (u16, u16)) -> Option<Area> {
        let back = |to: u16, offset: i16, length: u16, most: u16| {
            let from = u16::try_from(i32::from(to) - i32::from(offset)).ok()?;
            (u32::from(from) + u32::from(length) <= u32::from(most)).then_some(from)
        };
        let x = back(to.x, self.right, to.width, width)?;
        Some(Area { x, y: back(to.y, self.down, to.height, height)?, ..to })
    }

    /// A hash of the offset, below `limit`.
    fn slot(self, limit: usize) -> usize {
        let bits =
            u64::from(self.right.cast_unsigned()) << 16 | u64::from(self.down.cast_unsigned());
        usize::try_from(mixed(bits) >> 40).unwrap_or(0) % limit
    }
}

/// Buffers that are reused by each search.
#[derive(Default)]
struct Search {
    /// Hash table of windows, at most half full.
    windows: Vec<Window>,
    /// One bit for each hash in `windows`, to reject most positions quickly.
    sieve: Vec<u64>,
    votes: Vec<(Offset, u32)>,
    /// Hash input of the row that is being searched.
    row: Vec<u64>,
}

#[derive(Clone, Copy)]
struct Window {
    /// Lower half of the window's hash.
    sum: u32,
    /// Position in the new picture. The row is `MISSING` if the window occurs twice, the column if
    /// the slot is free.
    position: (u16, u16),
}

/// Combines the pixels of a window's two rows, so that the rolling hash can add and remove them
/// together.
fn pixel(upper: u32, lower: u32) -> u64 {
    u64::from(upper).wrapping_add(u64::from(lower).wrapping_mul(LOWER_FACTOR))
}

fn next(sum: u64, pixel: u64) -> u64 {
    sum.wrapping_mul(HASH_BASE).wrapping_add(pixel)
}

fn mixed(sum: u64) -> u64 {
    let sum = (sum ^ sum >> 32).wrapping_mul(MIX_FACTOR);
    sum ^ sum >> 32
}

/// Factor of the pixel that leaves the window: [`HASH_BASE`] to the power of `WINDOW_WIDTH`.
const LEAVING_FACTOR: u64 = {
    let (mut power, mut count) = (1_u64, 0);
    while count < WINDOW_WIDTH {
        power = power.wrapping_mul(HASH_BASE);
        count += 1;
    }
    power
};

/// Index of the sieve's word for this hash.
fn word(sum: u32) -> usize {
    sum as usize / 64 % SIEVE_WORDS
}

impl Search {
    fn run(&mut self, frames: &Frames<'_>, changed: &Tiles) -> Vec<Move> {
        let area = changed.bounds();
        if usize::from(area.width) < WINDOW_WIDTH || usize::from(area.height) <= ROW_GAP {
            return Vec::new();
        }
        self.collect(frames, area, changed);
        let mut moved = Vec::new();
        let least = (changed.count() / MIN_SHARE).max(1);
        let mut left = changed.clone();
        let mut blocks = 0;
        for offset in self.vote(frames, area) {
            let mut grid = Grid::new(frames, area, offset, &left);
            while blocks < MAX_BLOCKS
                && let Some(block) = grid.best(least)
            {
                blocks += 1;
                grid.clear(block);
                let mut all = vec![block];
                // With a diagonal offset, the block and its strips could overwrite each other's
                // source.
                if offset.right == 0 || offset.down == 0 {
                    let fringe = |side: Side| frames.fringe(block, side, offset, &left);
                    all.extend(Side::ALL.into_iter().flat_map(fringe));
                }
                for to in all {
                    let from = offset.back(to, frames.size).filter(|_| moved.len() < MAX_MOVES);
                    moved.extend(from.map(|from| Move { from: (from.x, from.y), to }));
                    left.put(to, false);
                }
            }
        }
        in_order(moved)
    }

    /// Fills the table with windows of the new picture.
    fn collect(&mut self, frames: &Frames<'_>, area: Area, changed: &Tiles) {
        let rows = usize::from(area.height) - ROW_GAP;
        let columns = COLUMNS.min(usize::from(area.width) / WINDOW_WIDTH);
        self.windows.clear();
        let free = Window { sum: 0, position: (MISSING, MISSING) };
        self.windows.resize((2 * rows * columns).next_power_of_two(), free);
        self.sieve.clear();
        self.sieve.resize(SIEVE_WORDS, 0);
        let gap = usize::from(area.width) / columns;
        for column in 0..columns {
            let x = usize::from(area.x) + column * gap + (gap - WINDOW_WIDTH) / 2;
            for y in usize::from(area.y)..usize::from(area.y) + rows {
                let position = (number(x), number(y));
                if !changed.touches(Area { x: position.0, y: position.1, width: 1, height: 1 }) {
                    continue;
                }
                let start = y * frames.width() + x;
                let upper = &frames.new[start..start + WINDOW_WIDTH];
                let start = start + ROW_GAP * frames.width();
                let lower = &frames.new[start..start + WINDOW_WIDTH];
                if is_plain(upper) && is_plain(lower) {
                    continue;
                }
                let pixels = upper.iter().zip(lower).map(|(upper, lower)| pixel(*upper, *lower));
                self.insert(mixed(pixels.fold(0, next)), position);
            }
        }
    }

    /// The slot that holds this hash, or a free one. None if the probed slots are full.
    fn position(&self, sum: u64) -> Option<(usize, u32)> {
        let (start, mask) = (usize::try_from(sum >> 32).unwrap_or(0), self.windows.len() - 1);
        let sum = u32::try_from(sum & u64::from(u32::MAX)).unwrap_or(0);
        let mut slots = (start..start + 8).map(|slot| slot & mask);
        let slot = slots.find(|slot| {
            let it = &self.windows[*slot];
            it.position.0 == MISSING || it.sum == sum
        });
        slot.map(|slot| (slot, sum))
    }

    fn insert(&mut self, sum: u64, position: (u16, u16)) {
        let Some((at, sum)) = self.position(sum) else { return };
        self.sieve[word(sum)] |= 1 << (sum % 64);
        let it = &mut self.windows[at];
        if it.position.0 == MISSING {
            *it = Window { sum, position };
        } else {
            it.position.1 = MISSING;
        }
    }

    /// Looks for the windows in the old picture. Returns the offsets with the most votes.
    fn vote(&mut self, frames: &Frames<'_>, area: Area) -> Vec<Offset> {
        self.votes.clear();
        self.votes.resize(VOTE_SLOTS, (Offset::default(), 0));
        let count = (usize::from(area.height) / ROW_SPACING)
            .clamp(*SEARCHED_ROWS.start(), *SEARCHED_ROWS.end());
        let area = around(area, frames.size);
        let rows = usize::from(area.height) - ROW_GAP;
        let count = count.min(rows);
        for row in 0..count {
            // The varying start avoids rows at the same height of each text line.
            let (start, end) = (row * rows / count, (row + 1) * rows / count);
            let y = usize::from(area.y) + start + row * 7 % (end - start);
            self.vote_in(frames, area, y);
        }
        let mut best: Vec<_> = self.votes.iter().filter(|it| it.1 >= MIN_VOTES).copied().collect();
        best.sort_unstable_by_key(|it| std::cmp::Reverse(it.1));
        let least = best.first().map_or(0, |it| it.1 / 8);
        best.iter().take(MAX_TRIED).filter(|it| it.1 >= least).map(|it| it.0).collect()
    }

    /// Collects the votes of one row of the old picture.
    fn vote_in(&mut self, frames: &Frames<'_>, area: Area, y: usize) {
        let (left, width) = (usize::from(area.x), usize::from(area.width));
        let start = y * frames.width() + left;
        let upper = &frames.old[start..start + width];
        let start = start + ROW_GAP * frames.width();
        let lower = &frames.old[start..start + width];
        self.row.clear();
        // Nothing leaves the first windows.
        self.row.resize(WINDOW_WIDTH, 0);
        let pixels = upper.iter().zip(lower).map(|(upper, lower)| pixel(*upper, *lower));
        self.row.extend(pixels);
        let row = std::mem::take(&mut self.row);
        let mut sum = 0;
        for (at, (enters, leaves)) in row[WINDOW_WIDTH..].iter().zip(&row).enumerate() {
            sum = next(sum, enters.wrapping_sub(leaves.wrapping_mul(LEAVING_FACTOR)));
            // The window is not full before.
            if at + 1 >= WINDOW_WIDTH {
                self.find((left + at + 1 - WINDOW_WIDTH, y), mixed(sum));
            }
        }
        self.row = row;
    }

    /// Votes for the offset of the window at this position of the old picture, if it is in the
    /// table.
    fn find(&mut self, from: (usize, usize), mixed: u64) {
        let sum = u32::try_from(mixed & u64::from(u32::MAX)).unwrap_or(0);
        if self.sieve[word(sum)] >> (sum % 64) & 1 == 0 {
            return;
        }
        let Some((at, _)) = self.position(mixed) else { return };
        let it = self.windows[at];
        if it.position.1 != MISSING && it.sum == sum {
            self.count(Offset::between(from, it.position));
        }
    }

    /// Counts one vote. If offsets share a slot, the one with the majority remains.
    fn count(&mut self, offset: Offset) {
        if offset == Offset::default() {
            return;
        }
        let slot = &mut self.votes[offset.slot(VOTE_SLOTS)];
        if slot.0 == offset {
            slot.1 += 1;
        } else if slot.1 == 0 {
            *slot = (offset, 1);
        } else {
            slot.1 -= 1;
        }
    }
}

/// The area enlarged by its own size on all sides and clipped to the picture: moved content is
/// searched there.
fn around(area: Area, (width, height): (u16, u16)) -> Area {
    let range = |start: u16, length: u16, most: u16| {
        let from = start.saturating_sub(length);
        let end = start.saturating_add(length).saturating_add(length).min(most);
        (from, end - from)
    };
    let ((x, wide), (y, high)) =
        (range(area.x, area.width, width), range(area.y, area.height, height));
    Area { x, y, width: wide, height: high }
}

fn is_plain(pixels: &[u32]) -> bool {
    pixels.iter().fold(0, |all, pixel| all | (pixel ^ pixels[0])) == 0
}

fn number(at: usize) -> u16 {
    u16::try_from(at).unwrap_or(MISSING)
}

/// Sorts the moves so that none overwrites the source of a later one. Among rectangles with the
/// same offset, one can always be first.
fn in_order(mut moves: Vec<Move>) -> Vec<Move> {
    let mut ordered = Vec::with_capacity(moves.len());
    while !moves.is_empty() {
        let is_free = |at: &usize| {
            let others = moves.iter().enumerate().filter(|other| other.0 != *at);
            others.into_iter().all(|(_, other)| !other.source().overlaps(moves[*at].to))
        };
        let first = (0..moves.len()).find(is_free).unwrap_or(0);
        ordered.push(moves.remove(first));
    }
    ordered
}

#[cfg(test)]
mod test;
