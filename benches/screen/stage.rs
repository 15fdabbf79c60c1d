//! The scenes of this benchmark.

use transom_benches::pictures::{LINE, Picture};
use transom_benches::stage::{Area, Backdrop, Stage, Title};

/// The number of lines of text until scrolling starts again.
const SCROLL_LINES: u16 = 60;
const VIDEO_FRAMES: usize = 8;
const ANIMATION_FRAMES: u16 = 14;
/// The width and height of the animation and of the answer in pixels.
const SMALL: u16 = 64;

pub(crate) fn stage() -> Stage {
    let mut it = Stage::default();
    screen(&mut it, "1080p", (1920, 1080), [20, 10]);
    let mut desktop = Picture::new(1920, 1080);
    desktop.desktop();
    let backdrop = Backdrop { offset: it.add(&desktop), picture: &desktop };
    let video = it.reel(VIDEO_FRAMES, (640, 360), |frame, picture| picture.photo(frame));
    let area = Area { at: (600, 300), size: (640, 360) };
    it.scene(Title { size: "1080p", kind: "video", rate: 25 }, area, video, backdrop);
    let bar = it.reel(ANIMATION_FRAMES.into(), (SMALL, SMALL), |frame, picture| {
        for (at, pixel) in picture.pixels.iter_mut().enumerate() {
            let inside = (frame * 4..frame * 4 + 8).contains(&(at % usize::from(SMALL)));
            *pixel = if inside { 0x00ff_a020 } else { 0x0020_3040 };
        }
    });
    let area = Area { at: (928, 508), size: (SMALL, SMALL) };
    it.scene(Title { size: "1080p", kind: "animation", rate: 100 }, area, bar, backdrop);
    let square = it.reel(4, (SMALL, SMALL), |frame, picture| {
        picture.pixels.fill([0x00ff_0000, 0x0000_ff00, 0x0000_00ff, 0x00ff_ffff][frame]);
    });
    it.scene(Title { size: "1080p", kind: "answer", rate: 0 }, area, square, backdrop);
    screen(&mut it, "4k", (3840, 2160), [10, 5]);
    it
}

/// Adds a still desktop, a page that scrolls `scroll` times per second, and both in alternation
/// at the rate `redraw`.
fn screen(it: &mut Stage, name: &'static str, size: (u16, u16), [scroll, redraw]: [u32; 2]) {
    let mut desktop = Picture::new(size.0, size.1);
    desktop.desktop();
    let whole = Area { at: (0, 0), size };
    let (line, screen) = (4 * usize::from(size.0), desktop.pixels.len() * 4);
    let ground = it.add(&desktop);
    let backdrop = Backdrop { offset: ground, picture: &desktop };
    let mut page = Picture::new(size.0, size.1 + SCROLL_LINES * LINE);
    page.text(0);
    let text = it.add(&page);
    let still = [ground, line, 1, 0];
    it.scene(Title { size: name, kind: "desktop", rate: 0 }, whole, still, backdrop);
    let down = [text, line, SCROLL_LINES.into(), line * usize::from(LINE)];
    it.scene(Title { size: name, kind: "scrolling", rate: scroll }, whole, down, backdrop);
    let turns = [ground, line, 2, screen];
    it.scene(Title { size: name, kind: "redraw", rate: redraw }, whole, turns, backdrop);
}
