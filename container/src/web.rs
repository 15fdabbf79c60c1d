//! What browsers, probes and programs are told at the web port.
//!
//! The gate, the viewer and its WebSocket are those of `vmm`; what is behind them here is the
//! machine in its own process, and what the pod itself has to say.

mod api;
mod compat;
mod metrics;
mod page;
mod ready;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use axum::routing::{get, post};
use serde_json::{Value, json};
use tokio::io::copy_bidirectional;
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;
use vmm::web::listen::Listener;
use vmm::web::stage::{Crowd, Doors, More, Stage, Viewer};
use vmm::web::{self, Config, Words};

pub use self::ready::Health;
use self::ready::Ready;
use crate::agent::Agent;
use crate::plan::{Plan, Source};
use crate::pod::asked;
use crate::pod::guard::Guard;
use crate::pod::network::Place;
use crate::pod::room::Room;
use crate::settings::translate::Display;
use crate::settings::{Compat, Settings};
use crate::status::{Failure, Status};
use crate::story::{Phase, Story};

/// Who listens at `/events` and `/status` at once, and of them from one address.
const LISTENERS: usize = 64;
const NEIGHBOURS: usize = 16;
/// An agent tells of its guest within.
const GUEST: Duration = Duration::from_secs(5);

/// What is shown.
pub struct Front {
    story: Arc<Story>,
    room: Room,
    /// How the machine is.
    machine: asked::Status,
    /// Whoever has it takes a picture of the screen.
    picture: Arc<Mutex<()>>,
    doors: Doors,
    ready: Ready,
    agent: Arc<Agent>,
    /// Who may be told at once what happens.
    listeners: Crowd,
    /// What runs, for people.
    name: String,
    /// There is a screen.
    seen: bool,
    /// Where files lie that may be lent to the machine.
    volume: PathBuf,
}

impl Front {
    /// Of a pod whose guest will be at this address, with this agent.
    pub fn new(
        story: Arc<Story>,
        room: Room,
        plan: &Plan,
        guest: Arc<OnceLock<Place>>,
        agent: Arc<Agent>,
    ) -> Self {
        let settings = &plan.said.settings;
        Self {
            story,
            machine: asked::Status::new(room.control()),
            picture: Arc::default(),
            room,
            doors: Doors::default(),
            ready: Ready { runs: plan.source == Source::Probe, guest, agent: agent.clone() },
            agent,
            listeners: Crowd::new(LISTENERS, NEIGHBOURS),
            name: settings.pod.app.0.clone(),
            seen: settings.screen.display.is == Display::Web,
            volume: settings.storage.folder.clone(),
        }
    }

    /// What happens.
    pub fn story(&self) -> &Arc<Story> {
        &self.story
    }

    /// The guest's agent.
    pub fn agent(&self) -> &Arc<Agent> {
        &self.agent
    }

    /// The control socket of the machine.
    pub fn control(&self) -> PathBuf {
        self.room.control()
    }

    /// How the pod is, its machine, and its guest as far as an agent tells.
    pub async fn state(&self) -> Value {
        let machine = self.machine.get().await;
        let guest =
            async { if self.agent.answers() { Some(self.agent.guest().await) } else { None } };
        let guest = timeout(GUEST, guest).await.ok().flatten();
        let scene = self.story.scene().borrow().clone();
        let since = self.story.since.elapsed().as_secs();
        json!({ "name": self.name, "uptime": since, "pod": scene, "machine": machine,
            "agent": guest })
    }

    /// What a page of health says, and whether that is yes.
    pub async fn health(&self, page: Health) -> (bool, String) {
        ready::answer(self, page).await
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
                    // Whoever comes in may come as often as they like.
                    return tracing::debug!("web: {} sees nothing: {error}", viewer.peer);
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
    front: &Arc<Front>,
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
    let mut config = config(settings, guard);
    config.to = Some(every.try_into().map_err(anyhow::Error::msg)?);
    let listener = Listener::new(&config).map_err(|error| {
        // It says itself where that is.
        Failure::new(Status::Failed, format!("{error:#}"))
    })?;
    let (front, more) = (front.clone(), more(front));
    Ok(Some(async move {
        let run = listener.run(front, more).await.context("web");
        if let Err(error) = run {
            tracing::error!("nobody can come in: {error:#}");
        }
    }))
}

/// Who is let in at the web port, and how.
fn config(settings: &Settings, guard: &Guard) -> Config {
    let screen = &settings.screen;
    let mut config = Config {
        name: Some(settings.pod.app.0.clone()),
        origin: screen.web_origin.as_ref().map(|it| it.0.to_string()),
        proxy: screen.web_proxy.as_ref().map(|it| it.0.clone()),
        any_name: settings.pod.compat == Compat::Dockur,
        words: words(screen.web_port.0),
        ..Config::default()
    };
    match guard {
        Guard::Open => config.auth = web::Auth::None,
        Guard::Asks { user, password } => {
            config.user = Some(user.clone());
            config.password = Some(password.clone());
        }
    }
    config
}

/// How the rules of the web port are set here.
fn words(port: impl std::fmt::Display) -> Words {
    Words {
        to: Some(format!("WEB_PORT={port}")),
        origin: "WEB_ORIGIN",
        password: "PROTECT=Y",
        tls: "have a proxy with TLS before it, and name that in WEB_PROXY",
    }
}

/// What is served besides the viewer.
fn more(front: &Arc<Front>) -> More {
    let open = Router::new()
        .route("/msg.html", get(compat::message))
        .route("/status", get(compat::status))
        .route("/events", get(page::events))
        .route("/pod/{name}", get(page::file))
        .route("/healthz", get(ready::health))
        .route("/readyz", get(ready::readiness))
        .route("/startupz", get(ready::startup))
        .with_state(front.clone());
    let inside = Router::new()
        .route("/log", get(page::log))
        .route("/audio", get(compat::audio))
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

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::environment::read;

    #[test]
    fn what_is_said_of_the_web_port_reaches_its_gate() {
        let of = |words: &[(&str, &str)], guard: &Guard| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            config(&read(&words).unwrap().settings, guard)
        };
        let asks = Guard::Asks { user: "bill".into(), password: "/run/password".into() };
        let plain = of(&[], &asks);
        assert_eq!((plain.proxy, plain.origin, plain.any_name), (None, None, false));
        assert_eq!((plain.user.as_deref(), plain.auth), (Some("bill"), web::Auth::Auto));
        let words = [
            ("WEB_PROXY", "10.0.0.0/8 ::1"),
            ("WEB_ORIGIN", "https://vm.example.org"),
            ("COMPAT", "dockur"),
            ("APP", "Box"),
        ];
        let said = of(&words, &Guard::Open);
        assert_eq!(said.proxy.map(|it| it.to_string()).as_deref(), Some("10.0.0.0/8 ::1"));
        assert_eq!(said.origin.as_deref(), Some("https://vm.example.org"));
        assert!(said.any_name && said.auth == web::Auth::None && said.password.is_none());
        assert_eq!(said.name.as_deref(), Some("Box"));
    }
}
