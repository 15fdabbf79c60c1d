//! Scenes that the probe plays on its display, and the module that it reads their pictures from.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use crate::pictures::Picture;

/// The size of the table of scenes in bytes.
const HEADER: usize = 4096;
/// The number of fields of a scene in the table.
const FIELDS: usize = 12;

/// A rectangle in pixels.
#[derive(Clone, Copy)]
pub struct Area {
    pub at: (u16, u16),
    pub size: (u16, u16),
}

pub struct Scene {
    /// The probe's number of the scene.
    pub number: u8,
    /// A name such as `1080p`.
    pub size: &'static str,
    pub kind: &'static str,
    /// Frames per second.
    pub rate: u32,
    /// The picture of a scene that does not change.
    pub still: Option<Picture>,
}

/// All scenes, and the module that the guest reads them from.
#[derive(Default)]
pub struct Stage {
    pub scenes: Vec<Scene>,
    table: Vec<[usize; FIELDS]>,
    pixels: Vec<u32>,
}

/// Frames in the module: the offset of the first frame, the bytes of a line, the number of frames,
/// and the bytes from one frame to the next.
pub type Reel = [usize; 4];

/// `rate` is in frames per second.
#[derive(Clone, Copy)]
pub struct Title {
    pub size: &'static str,
    pub kind: &'static str,
    pub rate: u32,
}

/// The picture behind a scene, and its offset in the module.
#[derive(Clone, Copy)]
pub struct Backdrop<'a> {
    pub offset: usize,
    pub picture: &'a Picture,
}

impl Stage {
    /// Adds a picture to the module, and returns its offset.
    pub fn add(&mut self, picture: &Picture) -> usize {
        let at = HEADER + 4 * self.pixels.len();
        self.pixels.extend(&picture.pixels);
        at
    }

    pub fn reel(
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

    pub fn scene(
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

    pub fn write(&mut self, path: &Path) -> Result<()> {
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
