//! What browsers, probes and programs are told at the web port.
//!
//! The gate, the viewer and its WebSocket are those of `vmm`; what is behind them here is the
//! machine in its own process, and what the pod itself has to say.

mod api;
mod metrics;
mod page;
mod ready;

use std::net::{IpAddr, Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use axum::routing::{get, post};
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;
use vmm::web::listen::Listener;
use vmm::web::stage::{Doors, More, Stage, Viewer};
use vmm::web::{self, Config};

use self::ready::Ready;
use crate::plan::{Plan, Source};
use crate::pod::guard::Guard;
use crate::pod::room::Room;
use crate::settings::Settings;
use crate::settings::translate::Display;
use crate::status::{Failure, Status};
use crate::story::{Phase, Story};

/// What is shown.
pub struct Front {
    story: Arc<Story>,
    room: Room,
    doors: Doors,
    ready: Ready,
    /// What runs, for people.
    name: String,
    /// There is a screen.
    seen: bool,
    /// Where files lie that may be lent to the machine.
    volume: PathBuf,
}

impl Front {
    /// Of a pod whose guest will be at this address.
    pub fn new(story: Arc<Story>, room: Room, plan: &Plan, guest: Arc<OnceLock<IpAddr>>) -> Self {
        let settings = &plan.said.settings;
        Self {
            story,
            room,
            doors: Doors::default(),
            ready: Ready { runs: plan.source == Source::Probe, guest },
            name: settings.pod.app.0.clone(),
            seen: settings.screen.display.is == Display::Web,
            volume: settings.storage.folder.clone(),
        }
    }
}

impl Stage for Front {
    fn doors(&self) -> &Doors {
        &self.doors
    }

    fn show(self: Arc<Self>, mut viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let mut machine = match UnixStream::connect(self.room.screen()).await {
                Ok(machine) => machine,
                Err(error) => {
                    return tracing::info!("web: {} sees nothing: {error}", viewer.peer);
                }
            };
            // How it ends is no news: browsers leave as they like.
            copy_bidirectional(&mut viewer.line, &mut machine).await.ok();
        })
    }

    fn instead(&self) -> Option<Response> {
        let shown = self.seen && matches!(self.story.phase(), Phase::Booting | Phase::Running);
        (!shown).then(|| page::page(&self.name, self.seen))
    }
}

/// Listens; what comes back lets browsers in for as long as it is polled.
///
/// # Errors
///
/// When the port is in use.
pub fn open(
    settings: &Settings,
    guard: &Guard,
    front: Front,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    if !settings.screen.web {
        return Ok(None);
    }
    let port = settings.screen.web_port.0;
    // Where the kernel has no IPv6 the usual address is not one.
    let every = match TcpListener::bind(("::", 0)) {
        Ok(_) => format!("[::]:{port}"),
        Err(_) => format!("{}:{port}", Ipv4Addr::UNSPECIFIED),
    };
    let mut config = Config { name: Some(front.name.clone()), ..Config::default() };
    config.to = Some(every.try_into().map_err(anyhow::Error::msg)?);
    match guard {
        Guard::Open => config.auth = web::Auth::None,
        Guard::Asks { user, password } => {
            config.user = Some(user.clone());
            config.password = Some(password.clone());
        }
    }
    let listener = Listener::new(&config).map_err(|error| {
        let sentence = format!("WEB_PORT={port}: {error:#}");
        Failure::new(Status::Failed, sentence)
    })?;
    let front = Arc::new(front);
    let more = more(&front);
    Ok(Some(async move {
        let run = listener.run(front, more).await.context("web");
        if let Err(error) = run {
            tracing::error!("nobody can come in: {error:#}");
        }
    }))
}

/// What is served besides the viewer.
fn more(front: &Arc<Front>) -> More {
    let open = Router::new()
        .route("/msg.html", get(page::message))
        .route("/events", get(page::events))
        .route("/pod/{name}", get(page::file))
        .route("/healthz", get(ready::health))
        .route("/readyz", get(ready::readiness))
        .route("/startupz", get(ready::startup))
        .with_state(front.clone());
    let inside = Router::new()
        .route("/log", get(page::log))
        .route("/metrics", get(metrics::metrics))
        .route("/api/openapi.json", get(api::document))
        .route("/api/v1/state", get(api::state))
        .route("/api/v1/screenshot", get(api::screenshot))
        .route("/api/v1/power", post(api::power))
        .route("/api/v1/media", post(api::media))
        .route("/api/v1/usb", post(api::usb))
        .with_state(front.clone());
    More { open, inside }
}
