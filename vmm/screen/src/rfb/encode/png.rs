//! PNG for browsers, which decode it faster than a script decodes Tight.

use anyhow::Result;
use png::{BitDepth, ColorType, Compression, Encoder};

use super::palette::{MAX_COLOURS, Palette};
use super::wire::put;
use crate::rfb::picture::View;

/// Appends the area as a PNG image to `image`, with a palette if it has few enough colors. `plain`
/// is a scratch buffer.
pub(super) fn write(
    view: &View<'_>,
    palette: &mut Palette,
    plain: &mut Vec<u8>,
    image: &mut Vec<u8>,
) -> Result<()> {
    palette.clear();
    let indexed = view.rows().all(|row| palette.add_all(row, MAX_COLOURS));
    let depth = match palette.words.len() {
        0..=2 => BitDepth::One,
        3..=4 => BitDepth::Two,
        5..=16 => BitDepth::Four,
        _ => BitDepth::Eight,
    };
    let colours = |pixels: &[u32], to: &mut Vec<u8>| {
        put(pixels.iter().map(|pixel| pixel.swap_bytes() >> 8), 3, to);
    };
    let area = view.area;
    let mut encoder = Encoder::new(image, u32::from(area.width), u32::from(area.height));
    plain.clear();
    if indexed {
        encoder.set_color(ColorType::Indexed);
        encoder.set_depth(depth);
        let mut entries = Vec::with_capacity(3 * MAX_COLOURS);
        colours(&palette.words, &mut entries);
        encoder.set_palette(entries);
        view.rows().for_each(|row| palette.indices(row, depth as usize, plain));
    } else {
        encoder.set_color(ColorType::Rgb);
        view.rows().for_each(|row| colours(row, plain));
    }
    encoder.set_compression(Compression::Fast);
    let written = encoder.write_header().and_then(|mut it| it.write_image_data(plain));
    plain.clear();
    Ok(written?)
}
