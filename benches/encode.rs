//! The cost of sending a picture: time on one core and bytes, for each encoding.
#![forbid(unsafe_code)]

use std::fmt::Write as _;

use anyhow::Result;
use rustix::time::{ClockId, clock_gettime};
use screen::rfb::encode::{Encoder, Encoding, Parameters};
use screen::rfb::format::PixelFormat;
use screen::rfb::picture::{Area, View};
use transom_benches::pictures::{Picture, Scene, scenes};
use transom_benches::table::{Spread, print};

/// Measured frames. One more frame comes first, like the one that a new client receives.
const FRAMES: usize = 15;

struct Column {
    name: &'static str,
    parameters: Parameters,
}

fn columns() -> Vec<Column> {
    let all = [
        ("Raw", Encoding::Raw, None, 1),
        ("Hextile", Encoding::Hextile, None, 1),
        ("Zlib", Encoding::Zlib, None, 1),
        ("ZRLE 1", Encoding::Zrle, None, 1),
        ("ZRLE 2", Encoding::Zrle, None, 2),
        ("ZRLE 6", Encoding::Zrle, None, 6),
        ("Tight 1", Encoding::Tight, None, 1),
        ("Tight 2", Encoding::Tight, None, 2),
        ("Tight 3", Encoding::Tight, None, 3),
        ("Tight 6", Encoding::Tight, None, 6),
        ("Tight q6", Encoding::Tight, Some(6), 2),
        ("Tight q8", Encoding::Tight, Some(8), 2),
        ("PNG", Encoding::TightPng, None, 2),
    ];
    let column = |(name, encoding, quality, compression)| Column {
        name,
        parameters: Parameters { encoding, quality, compression },
    };
    all.map(column).into()
}

/// Measures milliseconds and kilobytes per frame, and rectangles.
fn measure(scene: &mut Scene, parameters: &Parameters) -> (Spread, f64, usize) {
    let (mut encoder, mut out) = (Encoder::new(), Vec::new());
    let (mut times, mut bytes, mut rectangles) = (Vec::new(), 0, 0);
    for frame in 0..=FRAMES {
        scene.draw(frame);
        let Picture { width, height, pixels } = &scene.picture;
        let area = Area { x: 0, y: 0, width: *width, height: *height };
        let view = View { pixels, stride: usize::from(*width), area };
        out.clear();
        let start = milliseconds();
        rectangles = encoder.encode(parameters, &PixelFormat::OURS, &view, &mut out);
        if frame > 0 {
            times.push(milliseconds() - start);
            bytes += out.len();
        }
    }
    (Spread::of(&times), bytes as f64 / times.len() as f64 / 1e3, rectangles)
}

/// Processor time of this thread, so that other threads on this core do not count.
fn milliseconds() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e3 + now.tv_nsec as f64 / 1e6
}

fn main() -> Result<()> {
    let heads = ["ms", "min", "p90", "kB", "rects"];
    let mut text = format!("{:<18}{:<10}", "picture", "encoding");
    heads.iter().try_for_each(|head| write!(text, "{head:>10}"))?;
    text.push('\n');
    for mut scene in scenes() {
        for Column { name, parameters } in columns() {
            let (time, kilobytes, rectangles) = measure(&mut scene, &parameters);
            writeln!(
                text,
                "{:<18}{name:<10}{:>10.2}{:>10.2}{:>10.2}{kilobytes:>10.1}{rectangles:>10}",
                scene.name, time.median, time.min, time.p90
            )?;
        }
        print(&text);
        text.clear();
    }
    Ok(())
}
