//! The scenes and their pictures, each with the number of its frame.

use std::path::Path;

use anyhow::Result;
use transom_benches::pictures::Picture;
use transom_benches::stage::{Area, Backdrop, Stage, Title};

/// The size of the screen in pixels.
pub(crate) const SIZE: (u16, u16) = (1280, 720);
/// The number of different frames of a scene.
pub(crate) const FRAMES: u8 = 16;
/// The number of the scene with one picture, and the number of its frame.
pub(crate) const LAST: u8 = 2;
pub(crate) const LAST_FRAME: u8 = 18;
/// The upper left corners of the squares with the number of the frame, and their side: whole blocks
/// of JPEG, so that lossy encodings keep their shade.
pub(crate) const SQUARES: [(u16, u16); 3] = [(0, 0), (624, 336), (1248, 688)];
pub(crate) const SIDE: u16 = 32;
/// The shade of frame 0, and the difference to the next.
pub(crate) const SHADES: (u8, u8) = (8, 12);

pub(crate) struct Scene {
    pub(crate) number: u8,
    pub(crate) name: &'static str,
    /// Frames per second.
    pub(crate) rate: u32,
}

pub(crate) const SCENES: [Scene; 2] = [
    Scene { number: 0, name: "video", rate: 25 },
    Scene { number: 1, name: "scrolling", rate: 20 },
];

/// The pictures of all scenes, by their numbers.
pub(crate) struct Show(pub(crate) [Vec<Picture>; 3]);

impl Show {
    pub(crate) fn new() -> Self {
        let frames = |draw: fn(&mut Picture, usize)| {
            let frame = |number: u8| {
                let mut picture = Picture::new(SIZE.0, SIZE.1);
                draw(&mut picture, number.into());
                number_squares(&mut picture, number);
                picture
            };
            (0..FRAMES).map(frame).collect()
        };
        let mut last = Picture::new(SIZE.0, SIZE.1);
        number_squares(&mut last, LAST_FRAME);
        let text = |picture: &mut Picture, frame| picture.endless_text(frame, FRAMES.into());
        Self([frames(Picture::photo), frames(text), vec![last]])
    }

    /// Writes the module for the probe.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let mut stage = Stage::default();
        let whole = Area { at: (0, 0), size: SIZE };
        for (number, pictures) in self.0.iter().enumerate() {
            let reel = stage.reel(pictures.len(), SIZE, |frame, to| {
                to.pixels.copy_from_slice(&pictures[frame].pixels);
            });
            let rate = SCENES.get(number).map_or(0, |it| it.rate);
            let title = Title { size: "720p", kind: "", rate };
            let backdrop = Backdrop { offset: reel[0], picture: &pictures[0] };
            stage.scene(title, whole, reel, backdrop);
        }
        stage.write(path)
    }
}

fn number_squares(picture: &mut Picture, number: u8) {
    let shade = u32::from(SHADES.0 + SHADES.1 * number) * 0x0001_0101;
    for (left, top) in SQUARES {
        for y in top..top + SIDE {
            let at = usize::from(y) * usize::from(SIZE.0) + usize::from(left);
            picture.pixels[at..at + usize::from(SIDE)].fill(shade);
        }
    }
}
