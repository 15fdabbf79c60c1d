//! Packs the glyphs of the probe in the format that vmm/probe/guest/font.rs reads: Noto Sans Mono
//! (SIL Open Font License 1.1) as pictures with 16 levels, and three marks.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use noto_sans_mono_bitmap::{FontWeight, RasterHeight, RasterizedChar, get_raster};

const FONTS: [(&str, FontWeight, RasterHeight); 4] = [
    ("regular16", FontWeight::Regular, RasterHeight::Size16),
    ("regular20", FontWeight::Regular, RasterHeight::Size20),
    ("regular24", FontWeight::Regular, RasterHeight::Size24),
    ("bold32", FontWeight::Bold, RasterHeight::Size32),
];

/// Marks, as lines between points of a square. The side of the square is the width of a letter.
const MARKS: [&[[f64; 4]]; 3] = [
    &[[0.06, 0.55, 0.37, 0.88], [0.37, 0.88, 0.94, 0.16]],
    &[[0.12, 0.14, 0.88, 0.90], [0.88, 0.14, 0.12, 0.90]],
    &[[0.5, 0.52, 0.5, 0.52]],
];

/// Writes one file for each font.
pub(crate) fn write(folder: &Path) -> Result<()> {
    for (name, weight, height) in FONTS {
        let letter = |letter| get_raster(letter, weight, height).context("a character of ASCII");
        let letters = (' '..='~').map(letter).collect::<Result<Vec<_>>>()?;
        let font = pack(&letters)?;
        fs::write(folder.join(name), font).with_context(|| format!("writing {name}"))?;
    }
    Ok(())
}

fn pack(letters: &[RasterizedChar]) -> Result<Vec<u8>> {
    let first = letters.first().context("no letters")?;
    let (width, height) = (first.width(), first.height());
    let (mut entries, mut levels) = (Vec::new(), Vec::new());
    let pictures = letters.iter().map(|letter| letter.pixels().to_vec());
    for picture in pictures.chain(MARKS.iter().map(|lines| mark(lines, width, height))) {
        let level = |x: usize, y: usize| (u32::from(picture[y * width + x]) * 15 + 127) / 255;
        let seen = |x: &usize, y: &usize| level(*x, *y) > 0;
        let columns: Vec<_> = (0..width).filter(|x| (0..height).any(|y| seen(x, &y))).collect();
        let rows: Vec<_> = (0..height).filter(|y| (0..width).any(|x| seen(&x, y))).collect();
        let span = |list: &[usize]| match list {
            [] => 0..0,
            [first, ..] => *first..list.last().map_or(0, |last| last + 1),
        };
        let (across, down) = (span(&columns), span(&rows));
        entries.extend(u16::try_from(levels.len())?.to_le_bytes());
        for side in [across.start, down.start, across.len(), down.len()] {
            entries.push(u8::try_from(side)?);
        }
        let box_levels = down.flat_map(|y| across.clone().map(move |x| (x, y)));
        let nibbles = box_levels.map(|(x, y)| u8::try_from(level(x, y)));
        let nibbles = nibbles.collect::<Result<Vec<_>, _>>()?;
        levels.extend(nibbles.chunks(2).map(|pair| pair[0] | pair.get(1).unwrap_or(&0) << 4));
    }
    let sides = [u8::try_from(width)?, u8::try_from(height)?];
    Ok([&sides[..], &entries, &levels].concat())
}

/// Draws strokes with soft edges, in the lower part of the box like letters.
fn mark(lines: &[[f64; 4]], width: usize, height: usize) -> Vec<u8> {
    let (side, box_height) = (width as f64, height as f64);
    let is_dot = lines.len() == 1;
    let half = side * if is_dot { 0.2 } else { 0.1 };
    let top = (box_height - side) * 0.58;
    let distance = |x: f64, y: f64, [ax, ay, bx, by]: [f64; 4]| {
        let (ax, ay, bx, by) = (ax * side, ay * side + top, bx * side, by * side + top);
        let length = (bx - ax).powi(2) + (by - ay).powi(2);
        let along = ((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / length.max(1e-9);
        let along = along.clamp(0.0, 1.0);
        (x - ax - along * (bx - ax)).hypot(y - ay - along * (by - ay))
    };
    let pixels = (0..height).flat_map(|y| (0..width).map(move |x| (x, y)));
    let cover = pixels.map(|(x, y)| {
        let near = |line: &[f64; 4]| distance(x as f64 + 0.5, y as f64 + 0.5, *line);
        let nearest = lines.iter().map(near).fold(f64::MAX, f64::min);
        (half + 0.5 - nearest).clamp(0.0, 1.0)
    });
    let level = |cover: f64| (0..=u8::MAX).rev().find(|it| f64::from(*it) <= cover * 255.0);
    cover.map(|cover| level(cover).unwrap_or(0)).collect()
}
