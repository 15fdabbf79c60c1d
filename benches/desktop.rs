//! The two ways to a pod's screen in a browser, side by side: the console (noVNC) and the remote
//! desktop (RDP). A video and a scrolling page fill the screen, and the page in Chromium is asked
//! which frames it showed: frames have numbers, as shades of gray in three squares.
//!
//! One pod serves both. Its guest is the probe, which plays the scenes on the machine's display.
//! The probe has no remote desktop, so xrdp on this host stands in for it at the guest's address,
//! and plays the same pictures. Words after `--` select a scene (`video`, `scrolling`) or a way
//! (`console`, `desktop`).
#![forbid(unsafe_code)]

#[path = "desktop/page.rs"]
mod page;
#[path = "desktop/painter.rs"]
mod painter;
#[path = "desktop/pod.rs"]
mod pod;
#[path = "desktop/show.rs"]
mod show;

use std::fmt::Write as _;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use transom_benches::table::{Spread, print};
use transom_tests::browser;
use transom_tests::rdp_hosts::{self, Xrdp};

use self::page::{Page, Way};
use self::painter::Painter;
use self::pod::{Pod, processor_seconds};
use self::show::{LAST, SCENES, Scene, Show};

const ROUNDS: usize = 5;
/// The time to measure a scene.
const SPAN: Duration = Duration::from_secs(10);
/// From the first picture to the measurement.
const WARM_UP: Duration = Duration::from_secs(3);
/// The address of a guest in user mode, as the pod sees it.
const GUEST: &str = "127.0.0.1";

const FIGURES: [&str; 9] = [
    "drawn/s",
    "updates/s",
    "whole/s",
    "looks/s",
    "kB/s",
    "pod ms/s",
    "guest ms/s",
    "page ms/s",
    "lag ms",
];

/// The result of one run of a scene, in the order of [`FIGURES`].
type Figures = [f64; FIGURES.len()];

/// The pod, and the programs that play a scene at both of its screens.
struct Setup {
    pod: Pod,
    xrdp: Xrdp,
    painter: Painter,
}

/// Something that plays scenes.
trait Player {
    /// Selects a scene. Returns the number of frames drawn of the previous one.
    fn play(&mut self, scene: u8) -> Result<f64>;
}

fn main() -> Result<()> {
    ensure!(browser::is_here(), "there is no chromium");
    ensure!(rustix::process::geteuid().is_root(), "Xorg of xrdp needs root");
    if let Some(missing) = rdp_hosts::missing() {
        anyhow::bail!("{missing} is not installed");
    }
    let words: Vec<_> = std::env::args().skip(1).filter(|it| !it.starts_with("--")).collect();
    let named = |tags: &[&str]| words.iter().all(|word| tags.contains(&&**word));
    let show = Show::new();
    let xrdp = Xrdp::start(GUEST)?;
    let painter = Painter::new(xrdp.display(), &show)?;
    let mut setup = Setup { pod: Pod::start(&show)?, xrdp, painter };
    drop(show);
    for scene in &SCENES {
        let ways: Vec<_> =
            Way::ALL.into_iter().filter(|it| named(&[it.name(), scene.name])).collect();
        if ways.is_empty() {
            continue;
        }
        let mut samples = vec![Vec::new(); ways.len()];
        for round in 0..=ROUNDS {
            for (way, samples) in ways.iter().zip(&mut samples) {
                let figures = run(&mut setup, *way, scene).with_context(|| way.name())?;
                // The first round warms up caches.
                if round > 0 {
                    samples.push(figures);
                }
            }
        }
        print(&table(scene, &ways, &samples)?);
    }
    Ok(())
}

impl Setup {
    fn player(&mut self, way: Way) -> &mut dyn Player {
        match way {
            Way::Console => &mut self.pod,
            Way::Desktop => &mut self.painter,
        }
    }

    /// Processor seconds of the pod without its guest, and of the guest.
    fn seconds(&self, way: Way) -> Result<[f64; 2]> {
        let (pod, guest) = self.pod.seconds()?;
        Ok(match way {
            Way::Console => [pod, guest],
            Way::Desktop => {
                let host = self.xrdp.processes().into_iter().map(processor_seconds);
                [pod, host.sum::<Result<f64>>()?]
            }
        })
    }
}

fn run(setup: &mut Setup, way: Way, scene: &Scene) -> Result<Figures> {
    setup.player(way).play(scene.number)?;
    let began = Instant::now();
    let mut page = Page::open(setup.pod.web, way)?;
    page.watch()?;
    sleep(WARM_UP);
    let before = page.seen()?;
    let [pod, guest] = setup.seconds(way)?;
    let (browser, start) = (page.processor_seconds()?, Instant::now());
    sleep(SPAN);
    let seconds = start.elapsed().as_secs_f64();
    let browser = page.processor_seconds()? - browser;
    let [pod, guest] = {
        let now = setup.seconds(way)?;
        [now[0] - pod, now[1] - guest]
    };
    let seen = page.seen()?;
    let drawn = setup.player(way).play(LAST)? / began.elapsed().as_secs_f64();
    let lag = page.until_last()?;
    setup.player(way).play(LAST)?;
    page.keep(&format!("{} {}", way.name(), scene.name))?;
    let each = |now: f64, before: f64| (now - before) / seconds;
    let [pod, guest, browser] = [pod, guest, browser].map(|it| it / seconds * 1e3);
    Ok([
        drawn,
        each(seen.changed, before.changed),
        each(seen.whole, before.whole),
        each(seen.looks, before.looks),
        each(seen.bytes, before.bytes) / 1e3,
        pod,
        guest,
        browser,
        lag,
    ])
}

/// Builds a table with one line for each way: medians, and their spread.
fn table(scene: &Scene, ways: &[Way], samples: &[Vec<Figures>]) -> Result<String> {
    let mut text = format!("{} ({ROUNDS} rounds in turn)\n  {:<10}", scene.name, "");
    FIGURES.iter().try_for_each(|head| write!(text, "{head:>20}"))?;
    text.push('\n');
    for (way, its) in ways.iter().zip(samples) {
        write!(text, "  {:<10}", way.name())?;
        for at in 0..FIGURES.len() {
            let all: Vec<_> = its.iter().map(|it| it[at]).collect();
            let Spread { median, min, max, .. } = Spread::of(&all);
            let digits = usize::from(max < 100.0);
            let cell = format!("{median:.digits$} ({min:.digits$}-{max:.digits$})");
            write!(text, "{cell:>20}")?;
        }
        text.push('\n');
    }
    text.push('\n');
    Ok(text)
}
