//! JPEG for areas that resemble photographs.

use anyhow::{Context as _, Result};
use jpeg_encoder::{ColorType, Encoder, SamplingFactor};

use super::wire::put;
use crate::rfb::picture::View;

/// For each quality level, the quality of JPEG and the subsampling of color. Other servers use the
/// same values.
const LEVELS: [(u8, SamplingFactor); 10] = [
    (15, SamplingFactor::F_2_2),
    (29, SamplingFactor::F_2_2),
    (41, SamplingFactor::F_2_2),
    (42, SamplingFactor::F_2_1),
    (62, SamplingFactor::F_2_1),
    (77, SamplingFactor::F_2_1),
    (79, SamplingFactor::F_1_1),
    (86, SamplingFactor::F_1_1),
    (92, SamplingFactor::F_1_1),
    (100, SamplingFactor::F_1_1),
];

/// Replaces `image` with the area as a JPEG image. `plain` is a scratch buffer.
pub(super) fn write(
    view: &View<'_>,
    level: u8,
    plain: &mut Vec<u8>,
    image: &mut Vec<u8>,
) -> Result<()> {
    let (quality, sampling) = LEVELS[usize::from(level).min(LEVELS.len() - 1)];
    plain.clear();
    view.rows().for_each(|row| put(row.iter().copied(), 4, plain));
    image.clear();
    let mut encoder = Encoder::new(image, quality);
    encoder.set_sampling_factor(sampling);
    let encoded = encoder.encode(plain, view.area.width, view.area.height, ColorType::Bgra);
    plain.clear();
    encoded.with_context(|| format!("a JPEG image of {:?}", view.area))
}
