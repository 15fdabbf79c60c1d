//! Tracks what a client has not received yet: dirty tiles, and moves (CopyRect) to be sent first.
//!
//! Invariant, between any two calls: apply all pending moves to the client's picture, in order, as
//! it is once every planned update has arrived. Then every tile that is not dirty equals the
//! canvas.
//!
//! Pixels are taken when they are encoded, which is later than they are planned. A tile is *in
//! flight* from the moment its update is planned until it is encoded. Its final content is unknown
//! until then, so a move must not copy from it. Changing it meanwhile is harmless: the tile becomes
//! dirty again. A move copies within the client's own picture, so later changes of the canvas do
//! not disturb it: their pixels are sent after all moves that were found before.

use super::picture::{Area, Move};
use super::tiles::Tiles;

/// Further moves are sent as pixels instead.
const MAX_PENDING_MOVES: usize = 32;

/// Changes that one client has not received yet.
pub struct PendingUpdate {
    dirty: Tiles,
    in_flight: Tiles,
    moves: Vec<Move>,
    copies: bool,
}

impl PendingUpdate {
    /// A client that has received nothing of a picture of this size.
    pub fn all((width, height): (u16, u16)) -> Self {
        let (dirty, in_flight) = (Tiles::all(width, height), Tiles::none(width, height));
        Self { dirty, in_flight, moves: Vec::new(), copies: false }
    }

    /// The tiles whose pixels the client lacks.
    pub fn dirty(&mut self) -> &mut Tiles {
        &mut self.dirty
    }

    /// Whether moves are recorded for this client.
    pub fn copies(&self) -> bool {
        self.copies
    }

    /// Enables or disables moves. When disabled, pending moves are replaced with dirty tiles.
    pub fn set_copies(&mut self, copies: bool) {
        self.copies = copies;
        if !copies {
            self.drop_moves();
        }
    }

    /// Records a change of the canvas. The `moves` explain some of the `changed` tiles; their
    /// sources are in the picture before the change.
    pub fn change(&mut self, changed: &Tiles, moves: &[Move]) {
        if self.dirty.size() != changed.size() {
            *self = Self { copies: self.copies, ..Self::all(changed.size()) };
            return;
        }
        if !self.copies || moves.is_empty() {
            self.dirty.unite(changed);
            return;
        }
        // Tiles of the previous picture that the client does not have.
        let mut other = self.dirty.clone();
        other.unite(&self.in_flight);
        self.dirty.unite(changed);
        for it in moves {
            let mut left = self.dirty.clone();
            it.apply(&other, &mut left);
            if self.moves.len() < MAX_PENDING_MOVES && left.count() < self.dirty.count() {
                self.moves.push(*it);
                self.dirty = left;
                other.insert_area(it.to);
            }
        }
    }

    /// Plans an update of the requested area: moves, which come first, and tiles whose pixels
    /// follow.
    pub fn take(&mut self, requested: Area) -> (Vec<Move>, Tiles) {
        if !self.moves.iter().all(|it| requested.covers(it.to)) {
            self.drop_moves();
        }
        let tiles = self.dirty.split_off(requested);
        // A final move is useless if the pixels of its target are sent anyway.
        while self.moves.pop_if(|last| tiles.covers(last.to)).is_some() {}
        self.set_in_flight(&tiles);
        (std::mem::take(&mut self.moves), tiles)
    }

    /// Sets the tiles that are planned and not encoded yet.
    pub fn set_in_flight(&mut self, tiles: &Tiles) {
        if tiles.size() == self.dirty.size() {
            self.in_flight.clone_from(tiles);
        } else {
            // The picture has a new size. Nothing of the old plan will be encoded.
            self.in_flight = Tiles::none(self.dirty.size().0, self.dirty.size().1);
        }
    }

    /// Replaces all pending moves with dirty tiles.
    fn drop_moves(&mut self) {
        self.moves.drain(..).for_each(|it| self.dirty.insert_area(it.to));
    }
}

impl Move {
    /// Applies the move to a property of tiles. A target tile gets the property if its source has
    /// it in `before`, or if the tile itself has it there and is only partly overwritten. Other
    /// tiles in `set` are unchanged.
    pub fn apply(&self, before: &Tiles, set: &mut Tiles) {
        for tile in before.touched(self.to) {
            let to = tile.intersection(self.to);
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
    use crate::rfb::testing::{Random, draw_randomly, move_pixels};

    /// Draws something, and sometimes changes the size.
    fn draw(picture: &mut Picture, random: &mut Random) {
        if random.below(40) > 0 {
            let size = picture.size();
            return draw_randomly(&mut picture.pixels, size, random);
        }
        let mut side = || 200 + 10 * random.below(6);
        (picture.width, picture.height) = (side(), side());
        let count = usize::from(picture.width) * usize::from(picture.height);
        picture.pixels = (0..count).map(|_| random.colour()).collect();
    }

    /// A client whose requests, plans and encodings come at random times.
    struct Reader {
        pending: PendingUpdate,
        size: (u16, u16),
        pixels: Vec<u32>,
        planned: Tiles,
        /// The client does nothing in this many of ten turns.
        lazy: u16,
        whole: bool,
        moved: usize,
    }

    impl Reader {
        fn new(lazy: u16, whole: bool, copies: bool, size: (u16, u16)) -> Self {
            let mut pending = PendingUpdate::all(size);
            pending.set_copies(copies);
            let planned = Tiles::none(0, 0);
            Self { pending, size: (0, 0), pixels: Vec::new(), planned, lazy, whole, moved: 0 }
        }

        fn plan(&mut self, random: &mut Random, settle: bool) {
            let size = self.pending.dirty().size();
            if size != self.size {
                self.size = size;
                self.pixels = vec![0; usize::from(size.0) * usize::from(size.1)];
            }
            if !settle && random.below(20) == 0 {
                let copies = self.pending.copies();
                self.pending.set_copies(false);
                self.pending.set_copies(copies);
            }
            let all = Area { x: 0, y: 0, width: u16::MAX, height: u16::MAX };
            let whole = self.whole || settle || random.below(2) == 0;
            let requested = if whole { all } else { random.area(size) };
            if random.below(30) == 0 {
                self.pending.dirty().insert_area(requested);
            }
            let (moves, tiles) = self.pending.take(requested);
            for it in moves {
                self.moved += it.to.pixels();
                move_pixels(&mut self.pixels, size.0.into(), it);
            }
            self.planned = tiles;
        }

        /// Plans an update, or takes the pixels of a part of the planned one.
        fn work(&mut self, picture: &Picture, random: &mut Random, settle: bool) {
            if self.planned.is_empty() {
                self.plan(random, settle);
                return;
            }
            if self.planned.size() != picture.size() {
                self.planned = Tiles::none(0, 0);
            }
            let mut areas = Vec::new();
            self.planned.take(1 + usize::from(random.below(40_000)), &mut areas);
            let stride = usize::from(self.size.0);
            for row in areas.iter().flat_map(|area| area.pieces(u16::MAX, 1)) {
                let start = usize::from(row.y) * stride + usize::from(row.x);
                let row = start..start + usize::from(row.width);
                self.pixels[row.clone()].copy_from_slice(&picture.pixels[row]);
            }
            self.pending.set_in_flight(&self.planned);
        }

        fn is_settled(&mut self) -> bool {
            self.planned.is_empty()
                && self.pending.dirty.is_empty()
                && self.pending.moves.is_empty()
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

    /// Drawing, requests, plans and encodings come in any order. In the end all clients have the
    /// same picture.
    #[test]
    fn whoever_moves_what_it_has_sees_what_the_others_see() {
        let mut moved = [0; 6];
        for seed in 1..60 {
            let mut random = Random::new(seed);
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
                draw(&mut picture, &mut random);
                let changed = different(&old, &picture);
                if old.size() == picture.size() && random.below(10) > 0 {
                    scroll.save(&old, old.pixels.len());
                }
                let moves = scroll.find(&picture, &changed);
                for it in &mut readers {
                    it.pending.change(&changed, &moves);
                    while random.below(10) >= it.lazy && round < 130 && random.below(3) > 0 {
                        it.work(&picture, &mut random, false);
                    }
                }
            }
            for (at, it) in readers.iter_mut().enumerate() {
                while !it.is_settled() {
                    it.work(&picture, &mut random, true);
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
        let mut pending = PendingUpdate::all((128, 128));
        pending.set_copies(true);
        let all = Area { x: 0, y: 0, width: 128, height: 128 };
        let changed = Tiles::all(128, 128);
        let up = Move { from: (0, 20), to: Area { x: 0, y: 0, width: 128, height: 96 } };
        // All tiles are planned, and their pixels may be taken before or after the move.
        assert_eq!(pending.take(all).0, []);
        pending.change(&changed, &[up]);
        assert_eq!((pending.moves.len(), pending.dirty.count()), (0, 16));
        assert_eq!(pending.take(all).0, []);
        pending.set_in_flight(&Tiles::none(128, 128));
        pending.change(&changed, &[up]);
        assert_eq!(
            (pending.moves.as_slice(), pending.dirty.bounds()),
            (&[up][..], Area { x: 0, y: 96, width: 128, height: 32 })
        );
        // The next move finds the lowest part unknown, and moves the rest again.
        pending.change(&changed, &[up]);
        assert_eq!((pending.moves.len(), pending.dirty.bounds().y), (2, 64));
        let (moves, tiles) = pending.take(Area { height: 90, ..all });
        assert!(moves.is_empty() && tiles.count() == 12, "a request for a part cannot use moves");
    }

    #[test]
    fn what_a_move_overwrites_is_no_source_of_the_next() {
        let mut pending = PendingUpdate::all((64, 64));
        pending.set_copies(true);
        pending.dirty().put(Area { x: 0, y: 0, width: 64, height: 64 }, false);
        let part = |x: u16| Area { x, y: 0, width: 32, height: 64 };
        let across = |from: u16, to: u16| Move { from: (from, 0), to: part(to) };
        // The halves swap places. Only one of them can be a move.
        pending.change(&Tiles::all(64, 64), &[across(0, 32), across(32, 0)]);
        assert_eq!(
            (pending.moves.as_slice(), pending.dirty.bounds()),
            (&[across(0, 32)][..], part(0))
        );
    }

    #[test]
    fn a_tile_that_is_partly_moved_keeps_what_else_is_in_it() {
        let part = Move { from: (64, 40), to: Area { x: 64, y: 0, width: 19, height: 64 } };
        for lacks in [false, true] {
            let mut pending = PendingUpdate::all((128, 128));
            pending.set_copies(true);
            pending.dirty().put(Area { x: 0, y: 0, width: 128, height: 128 }, false);
            if lacks {
                pending.dirty().insert(95, 0);
            }
            let mut changed = Tiles::none(128, 128);
            changed.insert_area(part.to);
            pending.change(&changed, &[part]);
            let rest = if lacks { 32 } else { 0 };
            assert_eq!((pending.moves.len(), pending.dirty.bounds().height), (1, rest));
        }
    }

    #[test]
    fn no_more_moves_wait_than_there_is_room_for() {
        let mut pending = PendingUpdate::all((64, 640));
        pending.set_copies(true);
        pending.dirty().put(Area { x: 0, y: 0, width: 64, height: 640 }, false);
        let to = Area { x: 0, y: 0, width: 64, height: 32 };
        for _ in 0..100 {
            let mut changed = Tiles::none(64, 640);
            changed.insert_area(to);
            pending.change(&changed, &[Move { from: (0, 320), to }]);
        }
        assert_eq!((pending.moves.len(), pending.dirty.count()), (MAX_PENDING_MOVES, 2));
    }
}
