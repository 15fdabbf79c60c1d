//! What one client has not been sent yet: tiles whose pixels it lacks, and moves of what it has.
//!
//! This holds between any two calls. Take the client's picture as it is when all that was planned
//! has arrived, and do the moves that wait, one after the other: that is the canvas' picture, but
//! for tiles that are dirty.
//!
//! Pixels are taken when they are encoded, later than they were planned. A tile that is planned and
//! not encoded yet (it flies) will be as the picture is then, which nobody knows now: what comes
//! out of one is no move. That a tile *changes* meanwhile is no harm: it is dirty again. And what
//! the client moves is its own: that the picture changed there since is no matter, as its pixels
//! come behind all moves that were found before.

use super::picture::{Area, Move};
use super::tiles::Tiles;

/// So many moves wait at most; what moves then is sent as pixels.
const MOST: usize = 32;

/// See the module.
pub struct Owed {
    dirty: Tiles,
    flying: Tiles,
    moves: Vec<Move>,
    copies: bool,
}

impl Owed {
    /// All of a picture.
    pub fn all((width, height): (u16, u16)) -> Self {
        let (dirty, flying) = (Tiles::all(width, height), Tiles::none(width, height));
        Self { dirty, flying, moves: Vec::new(), copies: false }
    }

    /// The tiles whose pixels it lacks.
    pub fn dirty(&mut self) -> &mut Tiles {
        &mut self.dirty
    }

    /// Whether it can be told of moves.
    pub fn copies(&self) -> bool {
        self.copies
    }

    /// Says whether it can; what waits becomes pixels if it can no longer.
    pub fn set_copies(&mut self, copies: bool) {
        self.copies = copies;
        if !copies {
            self.give_up();
        }
    }

    /// The picture changed: in these tiles, of which some are what was elsewhere before. The moves
    /// are all of the picture as it was.
    pub fn change(&mut self, changed: &Tiles, moves: &[Move]) {
        if self.dirty.size() != changed.size() {
            *self = Self { copies: self.copies, ..Self::all(changed.size()) };
            return;
        }
        if !self.copies || moves.is_empty() {
            self.dirty.unite(changed);
            return;
        }
        // What the client does not have as the picture was.
        let mut other = self.dirty.clone();
        other.unite(&self.flying);
        self.dirty.unite(changed);
        for it in moves {
            let mut left = self.dirty.clone();
            it.carry(&other, &mut left);
            if self.moves.len() < MOST && left.count() < self.dirty.count() {
                self.moves.push(*it);
                self.dirty = left;
                other.insert_area(it.to);
            }
        }
    }

    /// Plans what is asked for: moves that come first, and tiles of which pixels follow.
    pub fn take(&mut self, asked: Area) -> (Vec<Move>, Tiles) {
        if !self.moves.iter().all(|it| asked.covers(it.to)) {
            self.give_up();
        }
        let tiles = self.dirty.split_off(asked);
        // What is sent anyway need not be moved, unless it is moved on.
        while self.moves.pop_if(|last| tiles.covers(last.to)).is_some() {}
        self.fly(&tiles);
        (std::mem::take(&mut self.moves), tiles)
    }

    /// These are planned, and not encoded yet.
    pub fn fly(&mut self, tiles: &Tiles) {
        if tiles.size() == self.dirty.size() {
            self.flying.clone_from(tiles);
        } else {
            // A picture of another size is there, and nothing of what was planned will be.
            self.flying = Tiles::none(self.dirty.size().0, self.dirty.size().1);
        }
    }

    /// Where something would have been moved to, its pixels are sent.
    fn give_up(&mut self) {
        self.moves.drain(..).for_each(|it| self.dirty.insert_area(it.to));
    }
}

impl Move {
    /// Moves along what holds for tiles: one of the target has it if something of its source had it
    /// in `before`, or if it had it and keeps something. What a set says of other tiles stays.
    pub fn carry(&self, before: &Tiles, set: &mut Tiles) {
        for tile in before.touched(self.to) {
            let to = tile.common(self.to);
            let (x, y) = (to.x - self.to.x + self.from.0, to.y - self.to.y + self.from.1);
            let keeps = to != tile && before.touches(tile);
            set.put(tile, keeps || before.touches(Area { x, y, ..to }));
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::rfb::picture::Picture;
    use crate::rfb::scroll::Scroll;
    use crate::rfb::testing::{Chance, move_pixels, stir};

    /// Something else, and sometimes another size.
    fn draw(picture: &mut Picture, chance: &mut Chance) {
        if chance.below(40) > 0 {
            let size = picture.size();
            return stir(&mut picture.pixels, size, chance);
        }
        let mut side = || 200 + 10 * chance.below(6);
        (picture.width, picture.height) = (side(), side());
        let count = usize::from(picture.width) * usize::from(picture.height);
        picture.pixels = (0..count).map(|_| chance.colour()).collect();
    }

    /// A client that asks, is planned for and encoded for whenever chance wants.
    struct Reader {
        owed: Owed,
        size: (u16, u16),
        pixels: Vec<u32>,
        planned: Tiles,
        /// How likely it does nothing: so many in ten.
        lazy: u16,
        whole: bool,
        moved: usize,
    }

    impl Reader {
        fn new(lazy: u16, whole: bool, copies: bool, size: (u16, u16)) -> Self {
            let mut owed = Owed::all(size);
            owed.set_copies(copies);
            let planned = Tiles::none(0, 0);
            Self { owed, size: (0, 0), pixels: Vec::new(), planned, lazy, whole, moved: 0 }
        }

        fn plan(&mut self, chance: &mut Chance, settle: bool) {
            let size = self.owed.dirty().size();
            if size != self.size {
                self.size = size;
                self.pixels = vec![0; usize::from(size.0) * usize::from(size.1)];
            }
            if !settle && chance.below(20) == 0 {
                let copies = self.owed.copies();
                self.owed.set_copies(false);
                self.owed.set_copies(copies);
            }
            let all = Area { x: 0, y: 0, width: u16::MAX, height: u16::MAX };
            let whole = self.whole || settle || chance.below(2) == 0;
            let asked = if whole { all } else { chance.area(size) };
            if chance.below(30) == 0 {
                self.owed.dirty().insert_area(asked);
            }
            let (moves, tiles) = self.owed.take(asked);
            for it in moves {
                self.moved += it.to.pixels();
                move_pixels(&mut self.pixels, size.0.into(), it);
            }
            self.planned = tiles;
        }

        /// Plans, or takes pixels for a part of what is planned.
        fn work(&mut self, picture: &Picture, chance: &mut Chance, settle: bool) {
            if self.planned.is_empty() {
                self.plan(chance, settle);
                return;
            }
            if self.planned.size() != picture.size() {
                self.planned = Tiles::none(0, 0);
            }
            let mut areas = Vec::new();
            self.planned.take(1 + usize::from(chance.below(40_000)), &mut areas);
            let stride = usize::from(self.size.0);
            for row in areas.iter().flat_map(|area| area.pieces(u16::MAX, 1)) {
                let start = usize::from(row.y) * stride + usize::from(row.x);
                let row = start..start + usize::from(row.width);
                self.pixels[row.clone()].copy_from_slice(&picture.pixels[row]);
            }
            self.owed.fly(&self.planned);
        }

        fn is_settled(&mut self) -> bool {
            self.planned.is_empty() && self.owed.dirty.is_empty() && self.owed.moves.is_empty()
        }
    }

    fn different(old: &Picture, new: &Picture) -> Tiles {
        if old.size() != new.size() {
            return Tiles::all(new.width, new.height);
        }
        let mut changed = Tiles::none(new.width, new.height);
        for (at, (old, new_pixel)) in old.pixels.iter().zip(&new.pixels).enumerate() {
            if old != new_pixel {
                let number = |it: usize| u16::try_from(it).unwrap();
                let width = usize::from(new.width);
                changed.insert(number(at % width), number(at / width));
            }
        }
        changed
    }

    /// What is drawn, when a client asks, when it is planned for and when its pixels are taken come
    /// in any order; in the end all have the same picture.
    #[test]
    fn whoever_moves_what_it_has_sees_what_the_others_see() {
        let mut moved = [0; 6];
        for seed in 1..60 {
            let mut chance = Chance::new(seed);
            let mut picture = Picture { pixels: vec![7; 240 * 250], width: 240, height: 250 };
            let mut scroll = Scroll::default();
            let kinds = [
                (0, true, true),
                (0, false, true),
                (5, true, true),
                (8, true, true),
                (8, false, true),
                (5, true, false),
            ];
            let mut readers =
                kinds.map(|(lazy, whole, copies)| Reader::new(lazy, whole, copies, picture.size()));
            for round in 0..140 {
                let (width, height) = picture.size();
                let old = Picture { pixels: picture.pixels.clone(), width, height };
                draw(&mut picture, &mut chance);
                let changed = different(&old, &picture);
                if old.size() == picture.size() && chance.below(10) > 0 {
                    scroll.keep(&old, old.pixels.len());
                }
                let moves = scroll.find(&picture, &changed);
                for it in &mut readers {
                    it.owed.change(&changed, &moves);
                    while chance.below(10) >= it.lazy && round < 130 && chance.below(3) > 0 {
                        it.work(&picture, &mut chance, false);
                    }
                }
            }
            for (at, it) in readers.iter_mut().enumerate() {
                while !it.is_settled() {
                    it.work(&picture, &mut chance, true);
                }
                assert_eq!(it.size, picture.size());
                assert!(it.pixels == picture.pixels, "client {at} in round {seed}");
                moved[at] += it.moved;
            }
        }
        eprintln!("pixels that each client moved: {moved:?}");
        assert!(moved[..5].iter().all(|it| *it > 100_000) && moved[5] == 0, "{moved:?}");
    }

    #[test]
    fn what_would_come_out_of_something_that_flies_is_sent_as_pixels() {
        let mut owed = Owed::all((128, 128));
        owed.set_copies(true);
        let all = Area { x: 0, y: 0, width: 128, height: 128 };
        let changed = Tiles::all(128, 128);
        let up = Move { from: (0, 20), to: Area { x: 0, y: 0, width: 128, height: 96 } };
        // All of it is planned, and its pixels may be taken before or after the move.
        assert_eq!(owed.take(all).0, []);
        owed.change(&changed, &[up]);
        assert_eq!((owed.moves.len(), owed.dirty.count()), (0, 16));
        assert_eq!(owed.take(all).0, []);
        owed.fly(&Tiles::none(128, 128));
        owed.change(&changed, &[up]);
        assert_eq!(
            (owed.moves.as_slice(), owed.dirty.bounds()),
            (&[up][..], Area { x: 0, y: 96, width: 128, height: 32 })
        );
        // The next one finds that below unknown, and moves the rest on.
        owed.change(&changed, &[up]);
        assert_eq!((owed.moves.len(), owed.dirty.bounds().y), (2, 64));
        let (moves, tiles) = owed.take(Area { height: 90, ..all });
        assert!(moves.is_empty() && tiles.count() == 12, "not all of it was asked for");
    }

    #[test]
    fn what_a_move_overwrites_is_no_source_of_the_next() {
        let mut owed = Owed::all((64, 64));
        owed.set_copies(true);
        owed.dirty().put(Area { x: 0, y: 0, width: 64, height: 64 }, false);
        let part = |x: u16| Area { x, y: 0, width: 32, height: 64 };
        let across = |from: u16, to: u16| Move { from: (from, 0), to: part(to) };
        // The two halves change places, which only one of them can do.
        owed.change(&Tiles::all(64, 64), &[across(0, 32), across(32, 0)]);
        assert_eq!((owed.moves.as_slice(), owed.dirty.bounds()), (&[across(0, 32)][..], part(0)));
    }

    #[test]
    fn a_tile_that_is_partly_moved_keeps_what_else_is_in_it() {
        let part = Move { from: (64, 40), to: Area { x: 64, y: 0, width: 19, height: 64 } };
        for lacks in [false, true] {
            let mut owed = Owed::all((128, 128));
            owed.set_copies(true);
            owed.dirty().put(Area { x: 0, y: 0, width: 128, height: 128 }, false);
            if lacks {
                owed.dirty().insert(95, 0);
            }
            let mut changed = Tiles::none(128, 128);
            changed.insert_area(part.to);
            owed.change(&changed, &[part]);
            let rest = if lacks { 32 } else { 0 };
            assert_eq!((owed.moves.len(), owed.dirty.bounds().height), (1, rest));
        }
    }

    #[test]
    fn no_more_moves_wait_than_there_is_room_for() {
        let mut owed = Owed::all((64, 640));
        owed.set_copies(true);
        owed.dirty().put(Area { x: 0, y: 0, width: 64, height: 640 }, false);
        let to = Area { x: 0, y: 0, width: 64, height: 32 };
        for _ in 0..100 {
            let mut changed = Tiles::none(64, 640);
            changed.insert_area(to);
            owed.change(&changed, &[Move { from: (0, 320), to }]);
        }
        assert_eq!((owed.moves.len(), owed.dirty.count()), (MOST, 2));
    }
}
