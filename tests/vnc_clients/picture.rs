//! Compares the picture that a client shows with the machine's.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use transom_tests::print::Picture;

/// How close the pictures must be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Near {
    /// Identical.
    Same,
    /// Each pixel has the nearest color of a client with few colors; the numbers are its maximum
    /// values of red, green and blue.
    Levels([u16; 3]),
    /// Like `Levels`, for a client that fills the missing bits with zeros, which makes pixels
    /// darker by half a step or more.
    Cut([u16; 3]),
    /// A peak signal-to-noise ratio of at least this many decibels.
    Decibels(f64),
}

impl Near {
    /// The precision of pixels with this many bits.
    pub(crate) fn bits(bits: u32) -> Self {
        match bits {
            8 => Self::Levels([7, 7, 3]),
            16 => Self::Levels([31, 63, 31]),
            _ => Self::Same,
        }
    }

    /// See [`Near::Cut`].
    pub(crate) fn cut(self) -> Self {
        if let Self::Levels(most) = self { Self::Cut(most) } else { self }
    }

    /// # Errors
    ///
    /// The first difference, if the pictures are not close enough.
    pub(crate) fn check(self, seen: &Picture, wanted: &Picture) -> Result<()> {
        let size = |it: &Picture| (it.width, it.pixels.len() / 4 / it.width.max(1));
        ensure!(size(seen) == size(wanted), "size {:?}, not {:?}", size(seen), size(wanted));
        match self {
            Self::Same => differ(seen, wanted, [0.5; 3]),
            // At most half a step, and 1 more for different rounding.
            Self::Levels(most) => differ(seen, wanted, most.map(|it| 127.5 / f64::from(it) + 1.0)),
            Self::Cut(most) => differ(
                seen,
                wanted,
                most.map(|it| 127.5 / f64::from(it) + 256.0 / (f64::from(it) + 1.0)),
            ),
            Self::Decibels(least) => {
                let ratio = decibels(seen, wanted);
                ensure!(ratio >= least, "{ratio:.1} dB, at least {least} dB");
                Ok(())
            }
        }
    }
}

/// Fails if a pixel differs by more than `most` (red, green, blue).
fn differ(seen: &Picture, wanted: &Picture, most: [f64; 3]) -> Result<()> {
    let [red, green, blue] = most;
    let is_off = |(one, other): (&[u8; 4], &[u8; 4])| {
        let pairs = one.iter().zip(other).zip([blue, green, red]);
        pairs.into_iter().any(|((a, b), most)| f64::from(a.abs_diff(*b)) > most)
    };
    let pairs = || seen.pixels.as_chunks().0.iter().zip(wanted.pixels.as_chunks().0);
    let off = pairs().filter(|it| is_off(*it)).count();
    let Some(first) = pairs().position(is_off) else { return Ok(()) };
    let (x, y) = (first % seen.width, first / seen.width);
    let (is, shall) = (seen.pixel(x, y), wanted.pixel(x, y));
    bail!("{off} pixels are wrong, the first at {x}, {y}: {is:?} in place of {shall:?}");
}

/// The peak signal-to-noise ratio over all three colors.
pub(crate) fn decibels(seen: &Picture, wanted: &Picture) -> f64 {
    let pairs = seen.pixels.as_chunks::<4>().0.iter().zip(wanted.pixels.as_chunks::<4>().0);
    let square = |(a, b): (&u8, &u8)| u64::from(a.abs_diff(*b)).pow(2);
    let sum: u64 = pairs.map(|(a, b)| a[..3].iter().zip(&b[..3]).map(square).sum::<u64>()).sum();
    if sum == 0 {
        return f64::INFINITY;
    }
    let count = u32::try_from(wanted.pixels.len() / 4 * 3).map_or(f64::MAX, f64::from);
    // The sum is far below 2^53, so that an f64 holds it exactly.
    let sum = u32::try_from(sum >> 16).map_or(f64::MAX, |it| f64::from(it) * 65536.0)
        + u32::try_from(sum & 0xffff).map_or(0.0, f64::from);
    10.0 * (255.0 * 255.0 * count / sum).log10()
}

/// Reads pixels of four bytes: blue, green, red, and an unused one.
pub(crate) fn plain(path: &Path, width: usize) -> Result<Picture> {
    let pixels = fs::read(path).with_context(|| path.display().to_string())?;
    Ok(Picture { width, pixels })
}

/// Reads a PPM file with three bytes per pixel.
pub(crate) fn ppm(bytes: &[u8]) -> Result<Picture> {
    let mut fields = Vec::new();
    let mut rest = bytes;
    while fields.len() < 4 {
        let end = rest.iter().position(u8::is_ascii_whitespace).context("a header")?;
        let (field, after) = rest.split_at(end);
        if !field.is_empty() {
            fields.push(std::str::from_utf8(field)?);
        }
        rest = &after[1..];
    }
    ensure!(fields[0] == "P6" && fields[3] == "255", "no PPM: {fields:?}");
    let width = fields[1].parse()?;
    let pixels = rest.as_chunks().0.iter().flat_map(|[red, green, blue]| [*blue, *green, *red, 0]);
    Ok(Picture { width, pixels: pixels.collect() })
}

#[test]
fn one_wrong_pixel_is_detected() {
    let picture = |value: u8| Picture { width: 3, pixels: vec![value; 24] };
    let wanted = picture(100);
    let mut seen = wanted.clone();
    Near::Same.check(&seen, &wanted).expect("the same");
    assert!(decibels(&seen, &wanted).is_infinite());
    // The unused byte is ignored.
    seen.pixels[3] = 7;
    Near::Same.check(&seen, &wanted).expect("the same");
    seen.pixels[4 * 4 + 2] = 110;
    let said = Near::Same.check(&seen, &wanted).expect_err("another red").to_string();
    assert_eq!(
        said,
        "1 pixels are wrong, the first at 1, 1: [100, 100, 110] in place of [100; 3]"
            .replace("[100; 3]", "[100, 100, 100]")
    );
    Near::bits(8).check(&seen, &wanted).expect("near enough for three bits");
    assert!(Near::bits(16).check(&seen, &wanted).is_err(), "too far for five");
    // 18 values, a square error of 100.
    let ratio = 10.0 * (255.0_f64 * 255.0 * 18.0 / 100.0).log10();
    assert!((decibels(&seen, &wanted) - ratio).abs() < 1e-9);
    assert!(Near::Decibels(41.0).check(&seen, &wanted).is_err());
    Near::Decibels(40.0).check(&seen, &wanted).expect("40.7 dB");
    let narrow = Picture { width: 2, ..wanted.clone() };
    assert!(Near::Decibels(0.0).check(&narrow, &wanted).is_err(), "another size");
    assert_eq!(ppm(b"P6\n1 2\n255\n123456").expect("a picture").pixels, b"321\x00654\x00");
}
