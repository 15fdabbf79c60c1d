//! The guest's pictures, which it receives in a module, and the scenes that consist of them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use transom_benches::pictures::{LINE, Picture};

/// The size of the table of scenes in bytes.
const HEADER: usize = 4096;
/// The number of fields of a scene in the table.
const FIELDS: usize = 12;
/// The number of lines of text until scrolling starts again.
const SCROLL_LINES: u16 = 60;
const VIDEO_FRAMES: usize = 8;
const ANIMATION_FRAMES: u16 = 14;
/// The width and height of the animation and of the answer in pixels.
const SMALL: u16 = 64;

/// A rectangle in pixels.
#[derive(Clone, Copy)]
struct Area {
    at: (u16, u16),
    size: (u16, u16),
}

pub(crate) struct Scene {
    /// The probe's number of the scene.
    pub(crate) number: u8,
    /// `1080p` or `4k`.
    pub(crate) size: &'static str,
    pub(crate) kind: &'static str,
    /// Frames per second.
    pub(crate) rate: u32,
    /// The picture of a scene that does not change.
    pub(crate) still: Option<Picture>,
}

/// All scenes, and the module that the guest reads them from.
pub(crate) struct Stage {
    pub(crate) scenes: Vec<Scene>,
    table: Vec<[usize; FIELDS]>,
    pixels: Vec<u32>,
}

/// Frames in the module: the offset of the first frame, the bytes of a line, the number of frames,
/// and the bytes from one frame to the next.
type Reel = [usize; 4];

/// `rate` is in frames per second.
#[derive(Clone, Copy)]
struct Title {
    size: &'static str,
    kind: &'static str,
    rate: u32,
}

/// The picture behind a scene, and its offset in the module.
#[derive(Clone, Copy)]
struct Backdrop<'a> {
    offset: usize,
    picture: &'a Picture,
}

impl Stage {
    pub(crate) fn new() -> Self {
        let mut it = Self { scenes: Vec::new(), table: Vec::new(), pixels: Vec::new() };
        it.screen("1080p", (1920, 1080), [20, 10]);
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
        it.screen("4k", (3840, 2160), [10, 5]);
        it
    }

    /// Adds a still desktop, a page that scrolls `scroll` times per second, and both in alternation
    /// at the rate `redraw`.
    fn screen(&mut self, name: &'static str, size: (u16, u16), [scroll, redraw]: [u32; 2]) {
        let mut desktop = Picture::new(size.0, size.1);
        desktop.desktop();
        let whole = Area { at: (0, 0), size };
        let (line, screen) = (4 * usize::from(size.0), desktop.pixels.len() * 4);
        let ground = self.add(&desktop);
        let backdrop = Backdrop { offset: ground, picture: &desktop };
        let mut page = Picture::new(size.0, size.1 + SCROLL_LINES * LINE);
        page.text(0);
        let text = self.add(&page);
        let still = [ground, line, 1, 0];
        self.scene(Title { size: name, kind: "desktop", rate: 0 }, whole, still, backdrop);
        let down = [text, line, SCROLL_LINES.into(), line * usize::from(LINE)];
        self.scene(Title { size: name, kind: "scrolling", rate: scroll }, whole, down, backdrop);
        let turns = [ground, line, 2, screen];
        self.scene(Title { size: name, kind: "redraw", rate: redraw }, whole, turns, backdrop);
    }

    /// Adds a picture to the module, and returns its offset.
    fn add(&mut self, picture: &Picture) -> usize {
        let at = HEADER + 4 * self.pixels.len();
        self.pixels.extend(&picture.pixels);
        at
    }

    fn reel(
        &mut self,
        frames: usize,
        size: (u16, u16),
        mut draw: impl FnMut(usize, &mut Picture),
    ) -> Reel {
        let mut picture = Picture::new(size.0, size.1);
        let first = HEADER + 4 * self.pixels.len();
        for frame in 0..frames {
            draw(frame, &mut picture);
            self.add(&picture);
        }
        [first, 4 * usize::from(size.0), frames, 4 * picture.pixels.len()]
    }

    fn scene(
        &mut self,
        Title { size, kind, rate }: Title,
        area: Area,
        [first, stride, frames, step]: Reel,
        backdrop: Backdrop<'_>,
    ) {
        let number = u8::try_from(self.table.len()).expect("a few scenes");
        let Backdrop { offset: ground, picture: desktop } = backdrop;
        let sides = [desktop.width, desktop.height, area.at.0, area.at.1, area.size.0, area.size.1];
        let [width, height, left, top, columns, lines] = sides.map(usize::from);
        let rate_of = rate as usize;
        self.table.push([
            width, height, left, top, columns, lines, first, stride, frames, step, rate_of, ground,
        ]);
        let still = (kind == "desktop").then(|| desktop.clone());
        self.scenes.push(Scene { number, size, kind, rate, still });
    }

    pub(crate) fn write(&mut self, path: &Path) -> Result<()> {
        let count = u32::try_from(self.table.len())?;
        let mut bytes = count.to_le_bytes().to_vec();
        for number in self.table.iter().flatten() {
            bytes.extend(u32::try_from(*number)?.to_le_bytes());
        }
        bytes.resize(HEADER, 0);
        bytes.extend(self.pixels.iter().flat_map(|pixel| pixel.to_le_bytes()));
        self.pixels = Vec::new();
        fs::write(path, bytes).with_context(|| path.display().to_string())
    }
}
