//! What browsers, probes and programs are told at the web port.
//!
//! The gate, the viewer and its WebSocket are those of `vmm`; what is behind them here is the
//! machine in its own process, and what the pod itself has to say.

mod address;
mod api;
mod compat;
mod lent;
mod metrics;
mod page;
mod ready;
mod vnc;

use std::net::{Ipv4Addr, TcpListener};
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context as _;
use axum::Router;
use axum::response::Response;
use axum::routing::{get, post};
use futures_util::future::OptionFuture;
use host::listen::Address;
use screen::web::listen::Listener;
use screen::web::stage::{self, About, Button, Crowd, Doors, Layout, More, Stage, Viewer};
use screen::web::viewers::{announce, carry};
use screen::web::{self, Config, Words};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

pub use self::address::{address, line};
use self::lent::Lender;
pub use self::ready::Health;
use self::ready::Ready;
use crate::agent::Agent;
use crate::plan::Plan;
use crate::pod::asked;
use crate::pod::guard::Guard;
use crate::pod::network::Place;
use crate::pod::room::Room;
use crate::settings::translate::Display;
use crate::settings::{Compat, Settings};
use crate::source::Source;
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
    /// Where wrong passwords are counted, of browsers and of VNC viewers.
    doors: Arc<Doors>,
    ready: Ready,
    agent: Arc<Agent>,
    /// Who may be told at once what happens.
    listeners: Crowd,
    /// What runs, for people.
    name: String,
    /// There is a screen.
    seen: bool,
    /// Files that may be attached to the machine.
    lender: Lender,
    /// The keyboard that the guest expects.
    keyboard: Arc<Layout>,
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
        let ready = Ready { runs: plan.source == Source::Probe, guest, agent };
        Self::of(story, room, &plan.said.settings, ready)
    }

    /// Of a pod that has failed before it had any of this.
    fn failed(story: Arc<Story>, settings: &Settings) -> Self {
        let room = Room::nowhere();
        let agent = Arc::new(Agent::new(room.agent()));
        let ready = Ready { runs: false, guest: Arc::default(), agent };
        Self::of(story, room, settings, ready)
    }

    fn of(story: Arc<Story>, room: Room, settings: &Settings, ready: Ready) -> Self {
        Self {
            story,
            machine: asked::Status::new(room.control()),
            picture: Arc::default(),
            room,
            doors: Arc::default(),
            agent: ready.agent.clone(),
            ready,
            listeners: Crowd::new(LISTENERS, NEIGHBOURS),
            name: settings.title().to_owned(),
            seen: settings.screen.display.is == Display::Web,
            lender: Lender::new(settings),
            keyboard: settings.layout(),
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

    fn show(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            let mut machine = match UnixStream::connect(self.room.screen()).await {
                Ok(machine) => machine,
                Err(error) => {
                    // Whoever comes in may come as often as they like.
                    return tracing::debug!("web: {} sees nothing: {error}", viewer.peer);
                }
            };
            announce(&mut machine, &format!("{} (web)", viewer.peer)).await.ok();
            carry(viewer.line, machine).await;
        })
    }

    fn instead(&self) -> Option<Response> {
        let phase = matches!(self.story.phase(), Phase::Booting | Phase::Running);
        let shown = self.seen && phase && !self.story.has_failed();
        (!shown).then(|| page::page(&self.name, self.seen))
    }

    fn about(&self) -> About {
        About {
            keyboard: self.keyboard.clone(),
            // Texts go to the machine's screen, which has no agent.
            clipboard: false,
            login: "The name is USERNAME of the container, or Docker. The password is its \
                    PASSWORD; the command “transom password” in the container prints it.",
            again: "To start it again, start its container, as with “docker start”.",
        }
    }

    fn press(self: Arc<Self>, button: Option<Button>) -> stage::Answer {
        Box::pin(async move {
            if let Some(button) = button {
                self.order(button).await?;
            }
            let state = match button {
                Some(Button::Off) => json!("off"),
                _ => {
                    self.machine.get().await.context("the machine does not answer")?["state"].take()
                }
            };
            Ok(json!({ "state": state }))
        })
    }
}

/// Listens for browsers and VNC viewers, where that is asked for; what comes back lets them in for
/// as long as it is polled.
///
/// # Errors
///
/// When a port is in use.
pub fn open(
    settings: &Settings,
    guard: &Guard,
    front: &Arc<Front>,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    let browsers = serve(config(settings, guard), settings, front.clone(), more(front))?;
    let viewers = vnc::open(settings, guard, front)?;
    let any = browsers.is_some() || viewers.is_some();
    Ok(any.then_some(async {
        tokio::join!(OptionFuture::from(browsers), OptionFuture::from(viewers));
    }))
}

/// A port at every address of the pod, as listeners read it.
fn everywhere(port: impl std::fmt::Display) -> anyhow::Result<Address> {
    // Where the kernel has no IPv6 the usual address is not one.
    let every = match TcpListener::bind(("::", 0)) {
        Ok(_) => format!("[::]:{port}"),
        Err(_) => format!("{}:{port}", Ipv4Addr::UNSPECIFIED),
    };
    every.try_into().map_err(anyhow::Error::msg)
}

/// Shows why a pod failed that got no further, to all who come. Nothing else is there: whom to let
/// in may not be known, nor a password.
///
/// # Errors
///
/// When the port is in use.
pub fn open_failed(
    settings: &Settings,
    story: &Arc<Story>,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    let front = Arc::new(Front::failed(story.clone(), settings));
    let more = More { health: health(&front), open: open_to_all(&front), ..More::default() };
    // A page that changes nothing is shown under any name.
    let config = Config { any_name: true, ..config(settings, &Guard::Open) };
    serve(config, settings, front, more)
}

fn serve(
    mut config: Config,
    settings: &Settings,
    front: Arc<Front>,
    more: More,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    if !settings.screen.web {
        return Ok(None);
    }
    let port = settings.screen.web_port.0;
    config.to = Some(everywhere(port)?);
    let listener = Listener::new(&config).map_err(|error| {
        // It says itself where that is.
        Failure::new(Status::Failed, format!("{error:#}"))
    })?;
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
        name: Some(settings.title().to_owned()),
        origin: screen.web_origin.as_ref().map(|it| it.0.to_string()),
        proxy: screen.web_proxy.as_ref().map(|it| it.0.clone()),
        any_name: settings.pod.compat == Compat::Dockur,
        words: words(screen.web_port.0),
        ..Config::default()
    };
    match guard {
        Guard::Open => config.auth = web::Auth::None,
        Guard::Asks { user, password, .. } => {
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

/// What is served under any name: questions of health.
fn health(front: &Arc<Front>) -> Router {
    Router::new()
        .route("/healthz", get(ready::health))
        .route("/readyz", get(ready::readiness))
        .route("/startupz", get(ready::startup))
        .with_state(front.clone())
}

/// What is served to everybody.
fn open_to_all(front: &Arc<Front>) -> Router {
    Router::new()
        .route("/msg.html", get(compat::message))
        .route("/status", get(compat::status))
        .route("/events", get(page::events))
        .route("/pod/{name}", get(page::file))
        .with_state(front.clone())
}

/// What is served besides the viewer.
pub fn more(front: &Arc<Front>) -> More {
    let inside = Router::new()
        .route("/log", get(page::log))
        .route("/audio", get(compat::audio))
        .route("/metrics", get(metrics::metrics))
        .route("/api/openapi.json", get(api::document))
        .route("/api/v1/state", get(api::state))
        .route("/api/v1/screenshot", get(api::screenshot))
        .route("/api/v1/power", post(api::power))
        .route("/api/v1/type", post(api::type_text))
        .route("/api/v1/media", post(api::media))
        .route("/api/v1/usb", post(api::usb))
        .with_state(front.clone());
    More { health: health(front), open: open_to_all(front), inside }
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
        let asks = Guard::Asks { user: "bill".into(), password: "/run/password".into(), vnc: None };
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
