//! Tests of `scroll`.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::*;
use crate::rfb::testing::Random;

fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap()
}

fn area(x: u16, y: u16, width: u16, height: u16) -> Area {
    Area { x, y, width, height }
}

fn picture(width: u16, height: u16, pixel: impl FnMut(usize) -> u32) -> Picture {
    let count = usize::from(width) * usize::from(height);
    Picture { pixels: (0..count).map(pixel).collect(), width, height }
}

/// Letters of 8 by 16 pixels on white, with each of their rows twice, and white between the
/// lines and behind their ends.
fn text(width: u16, height: u16, first: usize) -> Picture {
    let columns = usize::from(width);
    let letter = |line: usize, column: usize| {
        let mut random = Random::new(small(line * 1000 + column));
        random.next();
        random.next() % 40
    };
    picture(width, height, |at| {
        let (x, y) = (at % columns, at / columns + first);
        let (line, row) = (y / 20, y % 20);
        let ends = 20 + letter(line, 1 << 20) as usize;
        if row >= 16 || x / 8 > ends {
            return 0x00ff_ffff;
        }
        let mut random = Random::new(letter(line, x / 8) * 77_777 + small(row / 2) * 999 + 7);
        random.next();
        if random.next() >> (x % 8) & 1 == 0 { 0x00ff_ffff } else { 0x0010_2030 }
    })
}

/// Copies an area from a picture of the same size.
fn put(to: &mut Picture, from: &Picture, area: Area) {
    for y in area.y..area.y + area.height {
        let start = usize::from(y) * usize::from(to.width) + usize::from(area.x);
        let row = start..start + usize::from(area.width);
        to.pixels[row.clone()].copy_from_slice(&from.pixels[row]);
    }
}

fn different(old: &Picture, new: &Picture) -> Tiles {
    let mut changed = Tiles::none(new.width, new.height);
    let width = usize::from(new.width);
    for (at, _) in new.pixels.iter().enumerate().filter(|it| *it.1 != old.pixels[it.0]) {
        changed.insert(number(at % width), number(at / width));
    }
    changed
}

/// Runs one search and checks its result.
fn search(scroll: &mut Scroll, old: &Picture, new: &Picture) -> Vec<Move> {
    scroll.save(old, new.pixels.len());
    let moves = scroll.find(new, &different(old, new));
    assert!(moves.len() <= MAX_MOVES);
    for it in &moves {
        for (to, from) in it.to.pieces(9999, 1).zip(it.source().pieces(9999, 1)) {
            let row = |of: &Picture, area: Area| {
                let start = usize::from(area.y) * usize::from(of.width) + usize::from(area.x);
                of.pixels[start..start + usize::from(area.width)].to_vec()
            };
            assert_eq!(row(new, to), row(old, from), "{it:?}");
        }
        // All other pixels of the tile are unchanged, or moved too.
        let other = different(old, new);
        for y in 0..usize::from(new.height) {
            for x in 0..usize::from(new.width) {
                let at = y * usize::from(new.width) + x;
                let pixel = area(number(x), number(y), 1, 1);
                let found = moves.iter().any(|it| it.to.covers(pixel));
                if other.touches(pixel) && it.to.overlaps(tile_of(pixel)) && !found {
                    assert_eq!(new.pixels[at], old.pixels[at], "{x}, {y} of {it:?}");
                }
            }
        }
    }
    moves
}

fn tile_of(pixel: Area) -> Area {
    area(pixel.x / TILE * TILE, pixel.y / TILE * TILE, TILE, TILE)
}

fn offset(it: &Move) -> (i32, i32) {
    let offset = |to: u16, from: u16| i32::from(to) - i32::from(from);
    (offset(it.to.x, it.from.0), offset(it.to.y, it.from.1))
}

fn moved(old: &Picture, new: &Picture) -> Vec<Move> {
    search(&mut Scroll::default(), old, new)
}

#[test]
fn a_scrolled_page_is_one_move() {
    for (lines, from, rows) in [(20, 20, 768 - 32), (60, 60, 768 - 64), (500, 500, 768 - 512)] {
        let moves = moved(&text(1024, 768, 0), &text(1024, 768, lines));
        let [only] = moves[..] else { panic!("{lines} lines: {moves:?}") };
        // The move may start lower, since the right part of the picture is blank.
        assert_eq!((only.from, only.to.y, only.to.height), ((0, from), 0, rows));
        assert!(only.to.width > 400, "{only:?}");
    }
    let moves = moved(&text(1024, 768, 700), &text(1024, 768, 660));
    assert_eq!(moves.len(), 1, "{moves:?}");
    assert_eq!((moves[0].from, moves[0].to.y, moves[0].to.height), ((0, 24), 64, 704));
}

#[test]
fn a_scrolled_area_inside_the_screen_is_found() {
    let mut noise = Random::new(99);
    let mut before = picture(1280, 800, |_| noise.colour());
    let mut after = before.duplicate();
    let window = area(301, 155, 500, 400);
    put(&mut before, &text(1280, 800, 100), window);
    put(&mut after, &text(1280, 800, 120), window);
    // A clock changes as well.
    after.pixels[1270] ^= 0x00ff_ffff;
    let moves = moved(&before, &after);
    assert!(!moves.is_empty() && moves.iter().all(|it| window.covers(it.to)), "{moves:?}");
    assert!(moves.iter().all(|it| offset(it) == (0, -20)), "{moves:?}");
    // The window begins and ends within tiles, and so do the moves.
    assert!(moves.iter().any(|it| it.to.x == 301), "{moves:?}");
    assert!(moves.iter().any(|it| it.to.height >= 320), "{moves:?}");
    let back = moved(&after, &before);
    assert!(!back.is_empty() && back.iter().all(|it| offset(it) == (0, 20)), "{back:?}");
}

/// The guest's picture may be read while it is half drawn.
#[test]
fn a_partial_scroll_is_found_to_the_pixel() {
    let (before, after) = (text(1024, 768, 0), text(1024, 768, 20));
    let (mut one, end) = (text(1024, 768, 0), 401 * 1024 + 300);
    one.pixels[..end].copy_from_slice(&after.pixels[..end]);
    let mut left = different(&before, &one);
    let moves = moved(&before, &one);
    moves.iter().for_each(|it| left.put(it.to, false));
    assert!(left.count() <= 1, "only the seam remains: {:?}", left.bounds());
    let mut left = different(&one, &after);
    moved(&one, &after).iter().for_each(|it| left.put(it.to, false));
    assert_eq!(left.bounds().y, 736, "only the new rows remain: {:?}", left.bounds());
}

#[test]
fn a_dragged_window_moves_in_both_directions() {
    let ground = picture(1280, 800, |at| small(at / 12_800));
    let content = text(1280, 800, 7);
    let with = |x: u16, y: u16| {
        let mut all = ground.duplicate();
        for row in 0..300 {
            let (from, to) = (row * 1280, (usize::from(y) + row) * 1280 + usize::from(x));
            all.pixels[to..to + 420].copy_from_slice(&content.pixels[from..from + 420]);
        }
        all
    };
    for (x, y) in [(113, 90), (87, 111), (100, 77), (140, 100), (500, 450)] {
        let moves = moved(&with(100, 100), &with(x, y));
        let wanted = (i32::from(x) - 100, i32::from(y) - 100);
        assert!(moves.iter().all(|it| offset(it) == wanted), "to {x}, {y}: {moves:?}");
        let pixels: usize = moves.iter().map(|it| it.to.pixels()).sum();
        assert!(pixels > 380 * 230, "to {x}, {y}: {moves:?}");
    }
}

#[test]
fn two_windows_that_scroll_differently_give_two_moves() {
    let mut before = text(1280, 800, 0);
    let mut after = before.duplicate();
    put(&mut before, &text(1280, 800, 1000), area(0, 0, 1280, 400));
    put(&mut after, &text(1280, 800, 1020), area(0, 0, 1280, 400));
    put(&mut after, &text(1280, 800, 60), area(0, 400, 1280, 400));
    let mut offsets: Vec<u16> =
        moved(&before, &after).iter().map(|it| it.from.1 - it.to.y).collect();
    offsets.sort_unstable();
    offsets.dedup();
    assert_eq!(offsets, [20, 60]);
}

#[test]
fn no_move_is_found_without_one() {
    let mut noise = Random::new(5);
    let random = picture(640, 480, |_| noise.colour());
    let white = picture(640, 480, |_| 0x00ff_ffff);
    let black = picture(640, 480, |_| 0);
    let page = text(640, 480, 0);
    for (old, new) in [(&white, &black), (&page, &random), (&random, &white), (&white, &page)] {
        assert_eq!(moved(old, new), []);
    }
    let mut other = text(640, 480, 0);
    other.pixels[5 * 640..9 * 640].fill(3);
    assert_eq!(moved(&page, &other), [], "too few pixels changed");
}

#[test]
fn repeating_patterns_are_moves_only_if_they_match() {
    // Equal rows, repeating rows, repeating columns, both.
    let kinds: [fn(usize, usize) -> usize; 4] =
        [|x, _| x * x, |_, y| y % 40, |x, _| x % 40, |x, y| (x / 4 + y / 4) % 2];
    for kind in kinds {
        for shift in [1, 7, 40, 333] {
            let at = |shift: usize| {
                picture(640, 480, |at| small(kind(at % 640 + shift, at / 640 + shift)))
            };
            moved(&at(0), &at(shift));
        }
    }
}

/// CPU time of this thread.
fn worked() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap()
}

/// Measures the most expensive pictures that a guest can draw.
#[test]
fn the_work_is_bounded_for_any_picture() {
    let size = (1920, 1080);
    let mut noise = Random::new(1);
    let page = || text(size.0, size.1, 0);
    let mut others = vec![
        picture(size.0, size.1, |_| noise.colour()),
        picture(size.0, size.1, |at| small(at % 1920)),
        picture(size.0, size.1, |at| small(at / 1920)),
        picture(size.0, size.1, |at| small(at % 64 * 7 + at / 1920 % 64)),
        picture(size.0, size.1, |at| u32::from(at % 2 == 0)),
    ];
    // Every tile moved, except for its last pixel.
    let mut torn = text(size.0, size.1, 20);
    for y in (31..1080).step_by(32) {
        for x in (31..1920).step_by(32) {
            torn.pixels[y * 1920 + x] ^= 1;
        }
    }
    others.push(torn);
    let mut plain = Duration::MAX;
    let mut longest = Duration::ZERO;
    for other in others {
        for (old, new) in [(&page(), &other), (&other, &page())] {
            let changed = different(old, new);
            let mut scroll = Scroll::default();
            scroll.save(old, old.pixels.len());
            let start = worked();
            assert!(scroll.find(new, &changed).len() <= MAX_MOVES);
            longest = longest.max(worked() - start);
            let start = worked();
            assert_ne!(different(old, new), Tiles::default());
            plain = plain.min(worked() - start);
        }
    }
    eprintln!("a search takes at most {longest:?}, a comparison of all pixels {plain:?}");
    assert!(longest < 100 * plain + Duration::from_secs(2), "{longest:?}");
}

#[test]
fn a_video_is_searched_less_often_until_a_move_is_found() {
    let mut scroll = Scroll::default();
    let mut noise = Random::new(77);
    let mut frame = || picture(320, 200, |_| noise.colour());
    let mut old = frame();
    let mut tries = Vec::new();
    for at in 0..400 {
        let new = frame();
        scroll.save(&old, new.pixels.len());
        if scroll.saved {
            assert!(scroll.before == old.pixels, "the saved picture is outdated");
            tries.push(at);
        }
        assert_eq!(scroll.find(&new, &different(&old, &new)), []);
        old = new;
    }
    assert_eq!(tries[..7], [0, 1, 2, 3, 5, 9, 17]);
    assert!(tries.is_sorted_by_key(|it| *it) && tries.len() < 20, "{tries:?}");
    assert_eq!(tries[tries.len() - 1] - tries[tries.len() - 2], 32);
    let mut found = 0;
    for lines in 0..100 {
        let (old, new) = (text(320, 200, lines * 10), text(320, 200, lines * 10 + 10));
        scroll.stale = Tiles::all(320, 200);
        found += usize::from(!search(&mut scroll, &old, &new).is_empty());
    }
    assert!(found > 60, "{found}");
}

impl Picture {
    fn duplicate(&self) -> Self {
        Self { pixels: self.pixels.clone(), ..*self }
    }
}
