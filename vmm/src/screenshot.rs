//! Screenshots: read from the display by the machine, and written as a PNG file by the client.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::{Context, ensure};
use host::display::{Mode, Scanout};
use serde::{Deserialize, Serialize};

/// Bytes of a pixel: blue, green, red, and an unused byte.
const PIXEL: usize = 4;

/// The size of a picture. The pixels are stored row by row, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Picture {
    pub width: u32,
    pub height: u32,
}

/// Fails if the display is off.
pub fn take(display: &dyn Scanout) -> anyhow::Result<(Picture, Vec<u8>)> {
    let mode = display.mode();
    let mode = mode.context("the display is off: the guest has not switched it on")?;
    let Mode { width, height, stride, start } = mode;
    let mut pixels = vec![0; width as usize * height as usize * PIXEL];
    let lines = pixels.chunks_exact_mut(width as usize * PIXEL);
    for (line, at) in lines.zip((start..).step_by(stride as usize)) {
        display.read(at, line);
    }
    Ok((Picture { width, height }, pixels))
}

/// Writes a picture as a PNG file.
pub fn write(picture: Picture, pixels: Vec<u8>, path: &Path) -> anyhow::Result<()> {
    let file = File::create(path).with_context(|| path.display().to_string())?;
    encode(picture, pixels, BufWriter::new(file)).with_context(|| path.display().to_string())
}

/// Writes a picture in PNG format.
pub fn encode(picture: Picture, mut pixels: Vec<u8>, to: impl Write) -> anyhow::Result<()> {
    let wanted = u64::from(picture.width) * u64::from(picture.height) * PIXEL as u64;
    ensure!(pixels.len() as u64 == wanted, "{} bytes do not match {picture:?}", pixels.len());
    // PNG stores red first, and three bytes for each pixel.
    let mut end = 0;
    for from in (0..pixels.len()).step_by(PIXEL) {
        let [blue, green, red] = [pixels[from], pixels[from + 1], pixels[from + 2]];
        pixels[end..end + 3].copy_from_slice(&[red, green, blue]);
        end += 3;
    }
    pixels.truncate(end);
    let mut encoder = png::Encoder::new(to, picture.width, picture.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    encoder.set_compression(png::Compression::Fast);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&pixels)?;
    Ok(writer.finish()?)
}

#[cfg(test)]
mod test {
    use super::*;

    /// A display whose bytes have the values of their offsets.
    struct Test(Option<Mode>);

    impl Scanout for Test {
        fn mode(&self) -> Option<Mode> {
            self.0
        }
        fn changed(&self, _: &mut Vec<u64>) {}
        fn read(&self, offset: u64, data: &mut [u8]) {
            let bytes = (offset..).map(|at| at.to_le_bytes()[0]);
            data.iter_mut().zip(bytes).for_each(|(to, byte)| *to = byte);
        }
        fn set_preferred_size(&self, _: u32, _: u32) -> bool {
            false
        }
    }

    #[test]
    fn a_picture_leaves_out_the_padding_between_lines() {
        let error = take(&Test(None)).unwrap_err().to_string();
        assert!(error.contains("off"), "{error}");
        let mode = Mode { width: 2, height: 3, stride: 20, start: 100 };
        let (picture, pixels) = take(&Test(Some(mode))).unwrap();
        assert_eq!(picture, Picture { width: 2, height: 3 });
        let lines = [100, 120, 140].map(|start: u8| (start..start + 8).collect::<Vec<_>>());
        assert_eq!(pixels, lines.concat());
    }

    #[test]
    fn a_file_has_the_colours_of_the_picture() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out.png");
        let picture = Picture { width: 2, height: 1 };
        write(picture, vec![1, 2, 3, 0, 4, 5, 6, 255], &path).unwrap();
        let file = std::io::BufReader::new(File::open(&path).unwrap());
        let mut reader = png::Decoder::new(file).read_info().unwrap();
        let mut pixels = [0; 6];
        let info = reader.next_frame(&mut pixels).unwrap();
        assert_eq!((info.width, info.height, pixels), (2, 1, [3, 2, 1, 6, 5, 4]));
        assert!(write(picture, vec![0; 7], &path).is_err());
        let nowhere = write(picture, vec![0; 8], &folder.path().join("a/b.png")).unwrap_err();
        assert!(format!("{nowhere:#}").contains("a/b.png"), "{nowhere:#}");
    }
}
