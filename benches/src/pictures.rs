//! Pictures as screens show them, made here so that they are the same everywhere.
#![expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "places on a screen, and numbers of frames, are small"
)]

use font8x8::legacy::BASIC_LEGACY;

/// Pixels as 0x00RRGGBB.
#[derive(Clone)]
pub struct Picture {
    /// Pixels of a line.
    pub width: u16,
    /// Lines.
    pub height: u16,
    /// Line by line.
    pub pixels: Vec<u32>,
}

/// Something to look at, frame by frame.
pub struct Scene {
    /// What tables call it.
    pub name: &'static str,
    /// The frame that was drawn last.
    pub picture: Picture,
    kind: Kind,
}

enum Kind {
    Desktop,
    Scroll,
    Video,
    Noise,
    Flat,
}

/// How letters look.
#[derive(Clone, Copy)]
struct Style {
    ink: u32,
    paper: u32,
    /// Smooth edges, as most desktops have, or whole pixels, as consoles have.
    smooth: bool,
}

const WORDS: &[&str] = &[
    "the",
    "machine",
    "starts",
    "from",
    "a",
    "stock",
    "image",
    "and",
    "reads",
    "its",
    "disk",
    "in",
    "pages",
    "of",
    "four",
    "KiB,",
    "while",
    "screen",
    "(1920x1080)",
    "shows",
    "what",
    "was",
    "written;",
    "nothing",
    "else",
    "is",
    "sent",
    "to",
    "those",
    "who",
    "look.",
    "0x7ffe",
    "error:",
];

/// Pixels from a line of text to the next.
pub const LINE: u16 = 20;

/// A generator of numbers that look like chance.
struct Chance(u32);

impl Chance {
    fn next(&mut self) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0
    }
}

/// All scenes.
pub fn scenes() -> Vec<Scene> {
    let scene =
        |name, width, height, kind| Scene { name, picture: Picture::new(width, height), kind };
    vec![
        scene("desktop 1080p", 1920, 1080, Kind::Desktop),
        scene("desktop 4K", 3840, 2160, Kind::Desktop),
        scene("scrolling 1080p", 1920, 1080, Kind::Scroll),
        scene("video 1080p", 1920, 1080, Kind::Video),
        scene("noise 720p", 1280, 720, Kind::Noise),
        scene("flat 1080p", 1920, 1080, Kind::Flat),
    ]
}

impl Scene {
    /// Draws a frame.
    pub fn draw(&mut self, frame: usize) {
        let it = &mut self.picture;
        match self.kind {
            Kind::Desktop if frame == 0 => it.desktop(),
            // It stays as it is, and is sent again.
            Kind::Desktop => {}
            Kind::Scroll => it.text(frame),
            Kind::Video => it.photo(frame),
            Kind::Noise => {
                let mut chance = Chance(frame as u32 + 1);
                it.pixels.iter_mut().for_each(|pixel| *pixel = chance.next() >> 8);
            }
            Kind::Flat => {
                let colour = [0x0020_4060, 0x00f0_f0f0][frame % 2];
                it.pixels.fill(colour);
            }
        }
    }
}

const DARK: Style = Style { ink: 0x001e_1e1e, paper: 0x00ff_ffff, smooth: true };
const CONSOLE: Style = Style { ink: 0x00d0_d0d0, paper: 0x0000_0000, smooth: false };

impl Picture {
    /// A black one.
    pub fn new(width: u16, height: u16) -> Self {
        Self { width, height, pixels: vec![0; usize::from(width) * usize::from(height)] }
    }

    /// A page of text; the first line is the `scroll`th. There are [`LINE`] pixels from one to
    /// the next.
    pub fn text(&mut self, scroll: usize) {
        self.page((0, 0), (self.width, self.height), scroll, DARK);
    }

    /// A frame of what a camera sees.
    pub fn photo(&mut self, frame: usize) {
        self.photograph((0, 0), (self.width, self.height), frame);
    }

    /// Windows with text, one with a photograph, a bar below.
    pub fn desktop(&mut self) {
        let (width, height) = (self.width, self.height);
        self.fill((0, 0), (width, height), 0x0000_5a9e);
        for y in (0..height).step_by(1080) {
            for x in (0..width).step_by(1920) {
                self.screen(x, y);
            }
        }
        self.fill((0, height - 40), (width, 40), 0x0020_2020);
        for icon in 0..10 {
            self.fill((8 + icon * 48, height - 34), (32, 28), 0x0030_80c0 + u32::from(icon) * 9000);
        }
        let clock = Style { ink: 0x00f0_f0f0, paper: 0x0020_2020, smooth: true };
        self.line((width - 90, height - 28), "12:34 Sat", clock, 80);
    }

    fn screen(&mut self, x: u16, y: u16) {
        self.window((x + 60, y + 40), (820, 640), "Report - Editor");
        self.page((x + 61, y + 70), (818, 609), 1, DARK);
        self.window((x + 700, y + 420), (720, 520), "Terminal");
        self.page((x + 701, y + 450), (718, 489), 2, CONSOLE);
        self.window((x + 1000, y + 60), (640, 400), "Pictures");
        self.photograph((x + 1080, y + 110), (480, 320), 1);
        self.window((x + 1300, y + 480), (560, 480), "Settings");
        for row in 0..12 {
            let top = y + 530 + row * 34;
            self.fill((x + 1320, top), (18, 18), 0x0000_78d4);
            let label = WORDS[usize::from(row) * 2..][..3].join(" ");
            self.line((x + 1350, top), &label, DARK, 400);
            self.fill((x + 1320, top + 26), (520, 1), 0x00e0_e0e0);
        }
    }

    fn window(&mut self, (x, y): (u16, u16), (width, height): (u16, u16), title: &str) {
        self.fill((x, y), (width, height), 0x0090_9090);
        self.fill((x + 1, y + 1), (width - 2, height - 2), 0x00ff_ffff);
        self.fill((x + 1, y + 1), (width - 2, 28), 0x00e8_eef4);
        let style = Style { ink: 0x0020_2020, paper: 0x00e8_eef4, smooth: true };
        self.line((x + 12, y + 7), title, style, width - 60);
        self.fill((x + width - 34, y + 8), (12, 12), 0x00c0_3020);
    }

    fn fill(&mut self, (x, y): (u16, u16), (width, height): (u16, u16), colour: u32) {
        for y in y..(y + height).min(self.height) {
            let start = usize::from(y) * usize::from(self.width) + usize::from(x);
            let width = width.min(self.width.saturating_sub(x));
            self.pixels[start..start + usize::from(width)].fill(colour);
        }
    }

    /// Lines of words; the first one is `scroll` lines further down the text.
    fn page(&mut self, at: (u16, u16), (width, height): (u16, u16), scroll: usize, style: Style) {
        self.fill(at, (width, height), style.paper);
        for line in 0..(height.saturating_sub(8)) / LINE {
            let mut chance = Chance((usize::from(line) + scroll) as u32 * 7919 + 17);
            let (mut text, indent) = (String::new(), chance.next() as u16 % 3 * 24);
            for _ in 0..chance.next() % 14 {
                text += WORDS[chance.next() as usize % WORDS.len()];
                text.push(' ');
            }
            let room = width.saturating_sub(indent + 16);
            self.line((at.0 + 8 + indent, at.1 + 4 + line * LINE), &text, style, room);
        }
    }

    fn line(&mut self, (x, y): (u16, u16), text: &str, style: Style, room: u16) {
        let step = if style.smooth { 9 } else { 8 };
        for (at, letter) in (0..room / step).zip(text.bytes()) {
            self.letter((x + at * step, y), letter, style);
        }
    }

    /// A letter of 8 by 16 pixels. A smooth one is a little wider, with half shades at its edges.
    fn letter(&mut self, (x, y): (u16, u16), letter: u8, style: Style) {
        let glyph = BASIC_LEGACY[usize::from(letter & 0x7f)];
        let bit = |column: i32, row: i32| {
            let inside = (0..8).contains(&column) && (0..8).contains(&row);
            u32::from(inside && glyph[row.max(0) as usize] >> column.max(0) & 1 == 1)
        };
        for row in 0..16 {
            for column in 0..9 {
                let ink = if style.smooth {
                    // From nine parts of the glyph's eight: each pixel has parts of four bits.
                    let (across, down) = (column * 8, row * 16 - 4);
                    let (left, part) = (across / 9, (across % 9) as u32);
                    let (top, lower) = ((down + 32) / 32 - 1, ((down + 32) % 32) as u32);
                    let upper = bit(left, top) * (9 - part) + bit(left + 1, top) * part;
                    let below = bit(left, top + 1) * (9 - part) + bit(left + 1, top + 1) * part;
                    (upper * (32 - lower) + below * lower) * 16 / 288
                } else {
                    bit(column, row / 2) * 16
                };
                let colour = mix(style.paper, style.ink, ink);
                let at = usize::from(y + row as u16) * usize::from(self.width)
                    + usize::from(x + column as u16);
                if let (true, Some(pixel)) = (ink > 0, self.pixels.get_mut(at)) {
                    *pixel = colour;
                }
            }
        }
    }

    /// Soft shapes at three scales, and grain.
    fn photograph(&mut self, at: (u16, u16), (width, height): (u16, u16), frame: usize) {
        let mut grain = Chance(frame as u32 * 977 + 5);
        for y in 0..height {
            for x in 0..width {
                let (across, down) = (u32::from(x) + frame as u32 * 3, u32::from(y));
                let shape = |seed, scale| soft(across, down, scale, seed);
                let rough = shape(1, 128) * 4 + shape(2, 32) * 2 + shape(3, 8);
                let noise = grain.next() >> 8 & 0x0003_0303;
                let [red, green, blue] =
                    [rough / 8, (rough + shape(4, 64) * 3) / 11, (shape(5, 96) + rough / 7) / 2];
                let to = usize::from(at.1 + y) * usize::from(self.width) + usize::from(at.0 + x);
                self.pixels[to] = ((red << 16 | green << 8 | blue) & 0x00fc_fcfc) | noise;
            }
        }
    }
}

fn mix(paper: u32, ink: u32, part: u32) -> u32 {
    (0..3).fold(0, |colour, channel| {
        let [paper, ink] = [paper, ink].map(|it| it >> (8 * channel) & 0xff);
        colour | (((paper * (16 - part) + ink * part) / 16) << (8 * channel))
    })
}

/// A shade of 0 to 255 that changes slowly: between the corners of a square of `scale` pixels.
fn soft(x: u32, y: u32, scale: u32, seed: u32) -> u32 {
    let corner = |x: u32, y: u32| {
        let mut hash = Chance(x * 374_761 + y * 668_265 + seed * 1_274_126 + 1);
        hash.next();
        hash.next() >> 24
    };
    let (left, top, right, below) = (x / scale, y / scale, x % scale, y % scale);
    let upper = corner(left, top) * (scale - right) + corner(left + 1, top) * right;
    let lower = corner(left, top + 1) * (scale - right) + corner(left + 1, top + 1) * right;
    (upper * (scale - below) + lower * below) / (scale * scale)
}
