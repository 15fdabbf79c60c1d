//! What the guest shows: pictures that it is given in memory, and scenes that are made of them.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use transom_benches::pictures::{LINE, Picture};

/// Room for the table, in bytes.
const HEADER: usize = 4096;
/// Numbers of a scene in the table.
const FIELDS: usize = 12;
/// Lines of text that go by until scrolling begins anew, frames of a video, of an animation.
const SCROLLED: u16 = 60;
const VIDEO: usize = 8;
const ANIMATED: u16 = 14;
/// The side of what is animated, and of what answers.
const SMALL: u16 = 64;

/// Where something is.
#[derive(Clone, Copy)]
struct Area {
    at: (u16, u16),
    size: (u16, u16),
}

/// A scene: what it is called, and what is in it.
pub(crate) struct Scene {
    /// As the probe numbers them.
    pub(crate) number: u8,
    /// `1080p` or `4k`.
    pub(crate) size: &'static str,
    pub(crate) kind: &'static str,
    /// Frames a second.
    pub(crate) rate: u32,
    /// The first frame, of scenes that stay as they are.
    pub(crate) still: Option<Picture>,
}

/// All scenes, and the file that the guest reads them from.
pub(crate) struct Stage {
    pub(crate) scenes: Vec<Scene>,
    table: Vec<[usize; FIELDS]>,
    pixels: Vec<u32>,
}

/// Frames one behind the other in the module: where the first is, bytes of a line, how many there
/// are, and bytes from one to the next.
type Reel = [usize; 4];

impl Stage {
    /// Draws everything.
    pub(crate) fn new() -> Self {
        let mut it = Self { scenes: Vec::new(), table: Vec::new(), pixels: Vec::new() };
        it.screen("1080p", (1920, 1080), [20, 10]);
        let mut desktop = Picture::new(1920, 1080);
        desktop.desktop();
        let ground = it.add(&desktop);
        let video = it.reel(VIDEO, (640, 360), |frame, picture| picture.photo(frame));
        let area = Area { at: (600, 300), size: (640, 360) };
        it.scene(("1080p", "video", 25), area, video, (ground, &desktop));
        let bar = it.reel(ANIMATED.into(), (SMALL, SMALL), |frame, picture| {
            for (at, pixel) in picture.pixels.iter_mut().enumerate() {
                let inside = (frame * 4..frame * 4 + 8).contains(&(at % usize::from(SMALL)));
                *pixel = if inside { 0x00ff_a020 } else { 0x0020_3040 };
            }
        });
        let area = Area { at: (928, 508), size: (SMALL, SMALL) };
        it.scene(("1080p", "animation", 100), area, bar, (ground, &desktop));
        let square = it.reel(4, (SMALL, SMALL), |frame, picture| {
            picture.pixels.fill([0x00ff_0000, 0x0000_ff00, 0x0000_00ff, 0x00ff_ffff][frame]);
        });
        it.scene(("1080p", "answer", 0), area, square, (ground, &desktop));
        it.screen("4k", (3840, 2160), [10, 5]);
        it
    }

    /// A desktop that stays, a page that scrolls so often a second, and the two by turns.
    fn screen(&mut self, name: &'static str, size: (u16, u16), [scroll, redraw]: [u32; 2]) {
        let mut desktop = Picture::new(size.0, size.1);
        desktop.desktop();
        let whole = Area { at: (0, 0), size };
        let (line, screen) = (4 * usize::from(size.0), desktop.pixels.len() * 4);
        let ground = self.add(&desktop);
        let mut page = Picture::new(size.0, size.1 + SCROLLED * LINE);
        page.text(0);
        let text = self.add(&page);
        let still = [ground, line, 1, 0];
        self.scene((name, "desktop", 0), whole, still, (ground, &desktop));
        let down = [text, line, SCROLLED.into(), line * usize::from(LINE)];
        self.scene((name, "scrolling", scroll), whole, down, (ground, &desktop));
        let turns = [ground, line, 2, screen];
        self.scene((name, "redraw", redraw), whole, turns, (ground, &desktop));
    }

    /// Where a picture is in the module.
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
        (size, kind, rate): (&'static str, &'static str, u32),
        area: Area,
        [first, stride, frames, step]: Reel,
        (ground, desktop): (usize, &Picture),
    ) {
        let number = u8::try_from(self.table.len()).expect("a few scenes");
        let sides = [desktop.width, desktop.height, area.at.0, area.at.1, area.size.0, area.size.1];
        let [width, height, left, top, columns, lines] = sides.map(usize::from);
        let rate_of = rate as usize;
        self.table.push([
            width, height, left, top, columns, lines, first, stride, frames, step, rate_of, ground,
        ]);
        let still = (kind == "desktop").then(|| desktop.clone());
        self.scenes.push(Scene { number, size, kind, rate, still });
    }

    /// Writes the module.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
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
