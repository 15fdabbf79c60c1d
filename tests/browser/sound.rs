//! Sound in the browser: a screen of this process plays at the pace of a sound card, and the page
//! schedules every frame right behind the one before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use host::sound::{FRAME_BYTES, Hub, RATE};
use tokio::runtime::Runtime;
use transom_tests::browser::Browser;
use transom_tests::{lab, say};

use crate::stage::serve;
use crate::{CONNECTED, browser, runs_here};

/// The card's time between two looks at its streams.
const TICK: Duration = Duration::from_millis(2);
/// One round must be without a gap. On a host whose processors are busy, the card of this test
/// itself is late at times.
const ROUNDS: u32 = 6;

/// Plays as a card does until `stop`, and returns the number of frames.
fn play(sound: &Hub, stop: &AtomicBool) -> u64 {
    let (start, mut played) = (Instant::now(), 0);
    while !stop.load(Ordering::Relaxed) {
        let due = start.elapsed().as_micros() * u128::from(RATE) / 1_000_000;
        let due = u64::try_from(due).unwrap_or(u64::MAX);
        let count = usize::try_from(due - played).unwrap_or(0);
        sound.play(&vec![1; count * FRAME_BYTES]);
        played = due;
        thread::sleep(TICK);
    }
    played
}

/// The numbers of frames and gaps since the sound was turned on.
fn numbers(browser: &mut Browser) -> Result<(u64, u64)> {
    let found = browser.value("({ ...document.querySelector('#sound').dataset })")?;
    let number = |name: &str| found[name].as_str().and_then(|it| it.parse().ok());
    number("frames").zip(number("gaps")).with_context(|| found.to_string())
}

/// Plays to this page, and measures `seconds` of it.
pub(crate) fn plays_without_gaps(browser: &mut Browser, sound: &Hub, seconds: u64) -> Result<()> {
    let stop = AtomicBool::new(false);
    thread::scope(|scope| {
        let player = scope.spawn(|| play(sound, &stop));
        let mut measure = || -> Result<()> {
            browser.until("!document.querySelector('#sound').hidden")?;
            browser.click("#sound")?;
            browser.until("Number(document.querySelector('#sound').dataset.frames) > 0")?;
            let mut rounds = (0..ROUNDS).map(|_| -> Result<bool> {
                let before = numbers(browser)?;
                thread::sleep(Duration::from_secs(seconds));
                let after = numbers(browser)?;
                let (frames, gaps) = (after.0 - before.0, after.1 - before.1);
                say!("{frames} frames in {seconds} s, gaps: {gaps}");
                Ok(gaps == 0 && frames >= seconds * u64::from(RATE) * 95 / 100)
            });
            let whole = rounds.find(|it| !matches!(it, Ok(false))).unwrap_or(Ok(false))?;
            ensure!(whole, "gaps, or too few frames, in each of {ROUNDS} rounds");
            browser.click("#sound")?;
            browser.until("document.querySelector('#sound').ariaPressed == 'false'")
        };
        let result = measure();
        stop.store(true, Ordering::Relaxed);
        player.join().expect("the player does not panic");
        result
    })
}

#[test]
fn sound_plays_without_gaps() -> Result<()> {
    if !runs_here("sound_plays_without_gaps") {
        return Ok(());
    }
    let sound = Arc::<Hub>::default();
    sound.add_card();
    let runtime = Runtime::new()?;
    let address = serve(&runtime, &sound, &Arc::default())?;
    let (mut browser, _folder) = browser()?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    plays_without_gaps(&mut browser, &sound, if lab::everything() { 60 } else { 10 })
}
