//! Sound in the browser: a screen of this process plays at the pace of a sound card, and the page
//! schedules every frame right behind the one before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use host::clipboard;
use host::sound::{FRAME_BYTES, Hub, RATE};
use screen::rfb::canvas::Canvas;
use screen::rfb::{Interfaces, Server};
use screen::web::listen::Listener;
use screen::web::stage::{ExtraRoutes, Layout, LocalStage, Stage};
use screen::web::{Config, routes};
use serde_json::json;
use tokio::runtime::Runtime;
use transom_tests::browser::Browser;
use transom_tests::{lab, say};

use crate::{CONNECTED, browser, runs_here};

/// The card's time between two looks at its streams.
const TICK: Duration = Duration::from_millis(2);
/// One round must be without a gap. On a host whose processors are busy, the card of this test
/// itself is late at times.
const ROUNDS: u32 = 6;

/// A screen with sound and clipboard but without a machine. Returns its address.
pub(crate) fn serve(
    runtime: &Runtime,
    sound: &Arc<Hub>,
    clipboard: &Arc<clipboard::Hub>,
) -> Result<String> {
    serve_with(runtime, sound, clipboard, |stage| stage, routes::health())
}

/// The same with another stage and more routes.
pub(crate) fn serve_with<S: Stage>(
    runtime: &Runtime,
    sound: &Arc<Hub>,
    clipboard: &Arc<clipboard::Hub>,
    stage: impl FnOnce(Arc<LocalStage>) -> Arc<S>,
    routes: ExtraRoutes,
) -> Result<String> {
    let config =
        Config { address: Some("127.0.0.1:0".to_owned().try_into().unwrap()), ..Config::default() };
    let _context = runtime.enter();
    let listener = Listener::new(&config)?;
    let address = listener.url();
    let hub = Arc::default();
    let canvas = Canvas::new(None, Arc::clone(&hub));
    runtime.spawn(canvas.clone().run());
    let interfaces = Interfaces {
        hub,
        layout: Layout::named("us").expect("a keyboard"),
        clipboard: clipboard.clone(),
        sound: sound.clone(),
        power: Box::new(|_| {}),
    };
    let server = Server::new(canvas, interfaces);
    let agent = clipboard.clone();
    let running =
        Arc::new(move |_| Ok(json!({ "state": "running", "clipboard": agent.has_agent() })));
    let stage = stage(Arc::new(LocalStage::new(server, "sound".into(), running)));
    runtime.spawn(async { listener.run(stage, routes).await });
    Ok(address)
}

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

#[test]
fn sound_plays_without_gaps() -> Result<()> {
    if !runs_here("sound_plays_without_gaps") {
        return Ok(());
    }
    let seconds = if lab::everything() { 60 } else { 10 };
    let sound = Arc::<Hub>::default();
    sound.add_card();
    let (runtime, stop) = (Runtime::new()?, AtomicBool::new(false));
    let address = serve(&runtime, &sound, &Arc::default())?;
    let (mut browser, _folder) = browser()?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    thread::scope(|scope| {
        let player = scope.spawn(|| play(&sound, &stop));
        let mut measure = || -> Result<()> {
            browser.until("!document.querySelector('#sound').hidden")?;
            browser.click("#sound")?;
            browser.until("Number(document.querySelector('#sound').dataset.frames) > 0")?;
            let mut rounds = (0..ROUNDS).map(|_| -> Result<bool> {
                let before = numbers(&mut browser)?;
                thread::sleep(Duration::from_secs(seconds));
                let after = numbers(&mut browser)?;
                let (frames, gaps) = (after.0 - before.0, after.1 - before.1);
                say!("{frames} frames in {seconds} s, gaps: {gaps}");
                ensure!(frames >= seconds * u64::from(RATE) * 95 / 100, "{frames} frames only");
                Ok(gaps == 0)
            });
            let whole = rounds.find(|it| !matches!(it, Ok(false))).unwrap_or(Ok(false))?;
            ensure!(whole, "gaps in each of {ROUNDS} rounds");
            browser.click("#sound")?;
            browser.until("document.querySelector('#sound').ariaPressed == 'false'")
        };
        let result = measure();
        stop.store(true, Ordering::Relaxed);
        player.join().expect("the player does not panic");
        result
    })
}
