//! Sound in the browser: a screen of this process plays at the pace of a sound card, and the page
//! schedules every frame right behind the one before.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use host::sound::{FRAME_BYTES, Hub, RATE};
use screen::rfb::canvas::Canvas;
use screen::rfb::{Interfaces, Server};
use screen::web::listen::Listener;
use screen::web::stage::{Layout, LocalStage};
use screen::web::{Config, routes};
use serde_json::json;
use tokio::runtime::Runtime;
use transom_tests::{lab, say};

use crate::{CONNECTED, browser, runs_here};

/// The card's time between two looks at its streams.
const TICK: Duration = Duration::from_millis(2);

/// A screen with sound but without a machine. Returns its address.
fn serve(runtime: &Runtime, sound: &Arc<Hub>) -> Result<String> {
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
        clipboard: None,
        sound: sound.clone(),
        power: Box::new(|_| {}),
    };
    let server = Server::new(canvas, interfaces);
    let running = Arc::new(|_| Ok(json!({ "state": "running" })));
    let stage = Arc::new(LocalStage::new(server, "sound".into(), running));
    runtime.spawn(async { listener.run(stage, routes::health()).await });
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

#[test]
fn sound_plays_without_gaps() -> Result<()> {
    if !runs_here("sound_plays_without_gaps") {
        return Ok(());
    }
    let seconds = if lab::everything() { 60 } else { 10 };
    let sound = Arc::<Hub>::default();
    sound.add_card();
    let (runtime, stop) = (Runtime::new()?, AtomicBool::new(false));
    let address = serve(&runtime, &sound)?;
    let (mut browser, _folder) = browser()?;
    browser.go(&address)?;
    browser.until(CONNECTED)?;
    thread::scope(|scope| {
        let player = scope.spawn(|| play(&sound, &stop));
        let mut measure = || -> Result<()> {
            browser.until("!document.querySelector('#sound').hidden")?;
            browser.click("#sound")?;
            browser.until("Number(document.querySelector('#sound').dataset.frames) > 0")?;
            thread::sleep(Duration::from_secs(seconds));
            let found = browser.value("({ ...document.querySelector('#sound').dataset })")?;
            let number = |name: &str| found[name].as_str().and_then(|it| it.parse::<u64>().ok());
            let (frames, gaps) = (number("frames").unwrap_or(0), number("gaps"));
            say!("{frames} frames in {seconds} s, gaps: {gaps:?}");
            ensure!(gaps == Some(0), "{found}");
            ensure!(frames >= seconds * u64::from(RATE) * 99 / 100, "{found}");
            browser.click("#sound")?;
            browser.until("document.querySelector('#sound').ariaPressed == 'false'")
        };
        let result = measure();
        stop.store(true, Ordering::Relaxed);
        player.join().expect("the player does not panic");
        result
    })
}
