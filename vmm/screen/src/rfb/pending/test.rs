//! Tests of `pending`.

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
            let copies = self.pending.copies;
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
        self.planned.is_empty() && self.pending.dirty.is_empty() && self.pending.moves.is_empty()
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
fn clients_with_and_without_copies_see_the_same_picture() {
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
fn moves_from_tiles_in_flight_are_sent_as_pixels() {
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
fn an_overwritten_area_is_not_the_source_of_a_later_move() {
    let mut pending = PendingUpdate::all((64, 64));
    pending.set_copies(true);
    pending.dirty().put(Area { x: 0, y: 0, width: 64, height: 64 }, false);
    let part = |x: u16| Area { x, y: 0, width: 32, height: 64 };
    let across = |from: u16, to: u16| Move { from: (from, 0), to: part(to) };
    // The halves swap places. Only one of them can be a move.
    pending.change(&Tiles::all(64, 64), &[across(0, 32), across(32, 0)]);
    assert_eq!((pending.moves.as_slice(), pending.dirty.bounds()), (&[across(0, 32)][..], part(0)));
}

#[test]
fn a_partly_moved_tile_keeps_its_other_pixels() {
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
fn pending_moves_are_limited() {
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
