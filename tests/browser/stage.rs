//! A screen of this process without a machine, for tests of parts of the page.

use std::sync::Arc;

use anyhow::Result;
use host::{clipboard, sound};
use screen::rfb::canvas::Canvas;
use screen::rfb::{Interfaces, Server};
use screen::web::listen::Listener;
use screen::web::stage::{ExtraRoutes, Layout, LocalStage, Stage};
use screen::web::{Config, routes};
use serde_json::json;
use tokio::runtime::Runtime;

/// A screen with sound and clipboard but without a machine. Returns its address.
pub(crate) fn serve(
    runtime: &Runtime,
    sound: &Arc<sound::Hub>,
    clipboard: &Arc<clipboard::Hub>,
) -> Result<String> {
    serve_with(runtime, sound, clipboard, |stage| stage, routes::health())
}

/// The same with another stage and more routes.
pub(crate) fn serve_with<S: Stage>(
    runtime: &Runtime,
    sound: &Arc<sound::Hub>,
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
    let stage = stage(Arc::new(LocalStage::new(server, "stage".into(), running)));
    runtime.spawn(async { listener.run(stage, routes).await });
    Ok(address)
}
