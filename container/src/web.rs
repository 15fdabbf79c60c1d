//! The web port: serves browsers, health probes and programs.
//!
//! The gate, the viewer and its WebSocket come from the crate `screen`. Behind them are the
//! machine, in its own process, and the pod.

mod address;
mod api;
mod compat;
mod desktop;
mod images;
pub mod logins;
mod metrics;
mod page;
mod ready;
mod vnc;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
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
use screen::web::stage::{
    self, About, Button, ConnectionLimit, ExtraRoutes, Layout, LoginLimiter, Stage, Viewer,
};
use screen::web::viewers::{announce, copy_both_ways};
use screen::web::{self, Config, OptionNames, Sessions};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio::sync::Mutex;
use tokio::time::timeout;

pub use self::address::{address, line};
use self::images::Images;
use self::page::Screen;
pub use self::ready::Health;
use self::ready::{Asked, Ready};
use crate::agent::Agent;
use crate::desktop::Gateway;
use crate::net::every_address;
use crate::plan::Plan;
use crate::pod::doze;
use crate::pod::guard::Guard;
use crate::pod::machine_client;
use crate::pod::network::GuestAddress;
use crate::pod::runtime_folder::RuntimeFolder;
use crate::settings::translate::{self, Display};
use crate::settings::{Compat, Settings};
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::story::installation::Stage as Installed;
use crate::story::{Phase, Story};

/// Maximum clients of `/events` and `/status` together, and of one address.
const MAX_LISTENERS: usize = 64;
const MAX_PER_ADDRESS: usize = 16;
/// Timeout of questions to the guest's agent.
const AGENT_TIMEOUT: Duration = Duration::from_secs(5);

pub struct WebState {
    pub story: Arc<Story>,
    runtime_folder: RuntimeFolder,
    /// The machine's status, fetched when needed.
    machine: machine_client::Status,
    /// Locked while a picture of the screen is taken.
    picture: Arc<Mutex<()>>,
    /// Counts wrong passwords, of browsers and of VNC viewers together.
    login_limiter: Arc<LoginLimiter>,
    ready: Ready,
    pub agent: Arc<Agent>,
    /// The guest's remote desktop.
    pub desktop: Arc<Gateway>,
    /// Limits the clients that receive events.
    listeners: ConnectionLimit,
    /// The name of the guest for people.
    name: String,
    /// The step that the pod takes with its volume, and the reason. `null` without a volume, or
    /// after an error.
    step: Value,
    /// The pod installs Windows, whose scripts report the progress.
    installs: bool,
    /// The made account of Windows, once it is known. Only clients that logged in may see it.
    account: OnceLock<Value>,
    images: Images,
    equipment: Equipment,
}

/// Equipment of the machine that the pages show.
struct Equipment {
    /// The keyboard layout that the guest expects.
    keyboard: Arc<Layout>,
    sound: bool,
    /// The container has the host's USB devices.
    usb: bool,
    /// The picture may follow the viewer's window.
    resizes: bool,
    /// A screen that browsers show.
    screen: bool,
}

impl WebState {
    pub fn new(
        story: Arc<Story>,
        runtime_folder: RuntimeFolder,
        plan: &Plan,
        guest: Arc<OnceLock<GuestAddress>>,
        agent: Arc<Agent>,
    ) -> Self {
        let settings = &plan.input.settings;
        let logon = settings.account.autologin;
        let ready = Ready {
            runs: plan.source == Source::Probe,
            logon,
            guest,
            agent,
            asked: Asked::default(),
        };
        let step = plan.next.as_ref().map(|next| next.step.json()).unwrap_or_default();
        let installs = plan.next.as_ref().is_some_and(|next| !next.step.keeps());
        let installs = installs && !settings.windows.manual;
        Self { step, installs, ..Self::with(story, runtime_folder, settings, ready) }
    }

    /// The state of a pod that failed before it had a machine.
    fn failed(story: Arc<Story>, settings: &Settings) -> Self {
        let runtime_folder = RuntimeFolder::nonexistent();
        let agent = Arc::new(Agent::new(runtime_folder.agent()));
        let (guest, asked) = (Arc::default(), Asked::default());
        let ready = Ready { runs: false, logon: false, guest, agent, asked };
        Self::with(story, runtime_folder, settings, ready)
    }

    fn with(
        story: Arc<Story>,
        runtime_folder: RuntimeFolder,
        settings: &Settings,
        ready: Ready,
    ) -> Self {
        Self {
            story,
            machine: machine_client::Status::new(runtime_folder.control()),
            picture: Arc::default(),
            runtime_folder,
            login_limiter: Arc::default(),
            agent: ready.agent.clone(),
            desktop: Arc::new(Gateway::new(ready.guest.clone())),
            ready,
            listeners: ConnectionLimit::new(MAX_LISTENERS, MAX_PER_ADDRESS),
            name: settings.title().to_owned(),
            step: Value::Null,
            installs: false,
            account: OnceLock::new(),
            images: Images::new(settings),
            equipment: Equipment {
                keyboard: settings.layout(),
                sound: settings.screen.audio,
                usb: Path::new(host::usb::NODES).is_dir(),
                resizes: settings.screen.adapter.value == translate::Screen::Virtio,
                screen: settings.screen.display.value == Display::Web,
            },
        }
    }

    pub fn control(&self) -> PathBuf {
        self.runtime_folder.control()
    }

    /// State of the pod, of its machine, and of the guest if its agent answers.
    pub async fn state(&self) -> Value {
        let machine = self.machine.get().await;
        let asks = self.agent.answers() && !doze::is_asleep();
        let guest = OptionFuture::from(asks.then(|| self.agent.guest()));
        let guest = timeout(AGENT_TIMEOUT, guest).await.ok().flatten();
        let scene = self.story.scene().borrow().clone();
        let since = self.story.since.elapsed().as_secs();
        json!({ "name": self.name, "uptime": since, "pod": scene, "machine": machine,
            "agent": guest, "step": self.step, "idle": doze::state() })
    }

    /// Shows the generated password of Windows' account to clients that logged in.
    pub fn show_account(&self, user: &str, password: &str) {
        self.account.get_or_init(|| json!({ "user": user, "password": password }));
    }

    /// The answer to a health question: whether it is good, and the text.
    pub async fn health(&self, page: Health) -> (bool, String) {
        ready::answer(self, page).await
    }
}

impl Stage for WebState {
    fn login_limiter(&self) -> &LoginLimiter {
        &self.login_limiter
    }

    fn serve(self: Arc<Self>, viewer: Viewer) -> Pin<Box<dyn Future<Output = ()> + Send>> {
        Box::pin(async move {
            // A viewer of a machine that does not wake sees its last picture.
            doze::wake().await.ok();
            let mut machine = match UnixStream::connect(self.runtime_folder.screen()).await {
                Ok(machine) => machine,
                Err(error) => {
                    // Not a warning: clients choose how often this happens.
                    return tracing::debug!("web: {} sees nothing: {error}", viewer.peer);
                }
            };
            let peer = format!("{} (web)", viewer.peer);
            announce(&mut machine, &peer, viewer.view_only).await.ok();
            copy_both_ways(viewer.stream, machine).await;
        })
    }

    fn replacement_page(&self) -> Option<Response> {
        let phase = self.story.phase();
        let phase = matches!(phase, Phase::Booting | Phase::Running | Phase::Asleep);
        let shown = self.equipment.screen && phase && !self.story.has_failed();
        let screen = if self.equipment.screen { Screen::Next } else { Screen::None };
        (!shown).then(|| page::page(self, screen))
    }

    fn about(&self) -> About {
        About {
            keyboard: self.equipment.keyboard.clone(),
            sound: self.equipment.sound,
            resizes: self.equipment.resizes,
            login: "The name is USERNAME of the container, or Docker. The password is its \
                    PASSWORD; the command “transom password” in the container prints it.",
            restart_hint: "To start it again, start its container, as with “docker start”.",
            desktop: true,
            usb: self.equipment.usb,
            progress: self.installs
                && self.story.installation().is_none_or(|it| it.stage != Installed::Ready),
        }
    }

    fn control(self: Arc<Self>, button: Option<Button>) -> stage::StatusFuture {
        Box::pin(async move {
            if let Some(button) = button {
                self.order(button).await?;
            }
            if button == Some(Button::Off) {
                return Ok(json!({ "state": "off" }));
            }
            let status = self.machine.get().await.context("the machine does not answer")?;
            Ok(stage::brief(&status))
        })
    }
}

/// Listens for browsers and VNC viewers, if they are enabled.
pub fn open(
    settings: &Settings,
    guard: &Guard,
    web: &Arc<WebState>,
) -> anyhow::Result<Opened<impl Future<Output = ()> + use<>>> {
    let listener = listen(config(settings, guard), settings)?;
    let sessions = listener.as_ref().map(Listener::sessions);
    let browsers = listener.map(|listener| serve(listener, web.clone(), routes(web)));
    let viewers = vnc::open(settings, guard, web)?;
    let any = browsers.is_some() || viewers.is_some();
    let served = any.then_some(async {
        tokio::join!(OptionFuture::from(browsers), OptionFuture::from(viewers));
    });
    Ok(Opened { served, sessions })
}

/// Ports that are open.
pub struct Opened<S> {
    /// Serves them while it is polled.
    pub served: Option<S>,
    /// The sessions of browsers.
    pub sessions: Option<Arc<Sessions>>,
}

/// A port on all addresses of the pod, as listeners take it.
fn all_addresses(port: impl std::fmt::Display) -> anyhow::Result<Address> {
    let every = match every_address() {
        IpAddr::V6(every) => format!("[{every}]:{port}"),
        IpAddr::V4(every) => format!("{every}:{port}"),
    };
    every.try_into().map_err(anyhow::Error::msg)
}

/// Serves the status page of a pod that failed early, to everybody. It serves nothing else:
/// settings and passwords may not be known.
pub fn open_failed(
    settings: &Settings,
    story: &Arc<Story>,
) -> anyhow::Result<Option<impl Future<Output = ()> + use<>>> {
    let web = Arc::new(WebState::failed(story.clone(), settings));
    let more =
        ExtraRoutes { health: health(&web), open: open_to_all(&web), ..ExtraRoutes::default() };
    // The page changes nothing, so any host name is allowed.
    let config = Config { any_host: true, ..config(settings, &Guard::Open) };
    Ok(listen(config, settings)?.map(|listener| serve(listener, web, more)))
}

/// Opens the web port, if it is enabled.
fn listen(mut config: Config, settings: &Settings) -> anyhow::Result<Option<Listener>> {
    if !settings.screen.web {
        return Ok(None);
    }
    let port = settings.screen.web_port.0;
    config.address = Some(all_addresses(port)?);
    let listener = Listener::new(&config).map_err(|error| {
        // The error names the port.
        Failure::new(Status::Failed, format!("{error:#}"))
    })?;
    Ok(Some(listener))
}

async fn serve(listener: Listener, web: Arc<WebState>, more: ExtraRoutes) {
    let run = listener.run(web, more).await.context("web");
    if let Err(error) = run {
        tracing::error!("the web port serves no more clients: {error:#}");
    }
}

/// Configuration of the web port: names, proxies and passwords.
fn config(settings: &Settings, guard: &Guard) -> Config {
    let screen = &settings.screen;
    let mut config = Config {
        name: Some(settings.title().to_owned()),
        origin: screen.web_origin.as_ref().map(|it| it.0.to_string()),
        proxy: screen.web_proxy.as_ref().map(|it| it.0.clone()),
        any_host: settings.pod.compat == Compat::Dockur,
        option_names: option_names(screen.web_port.0),
        ..Config::default()
    };
    match guard {
        Guard::Open => config.auth = web::Auth::None,
        Guard::Password { user, password, .. } => {
            config.user = Some(user.clone());
            config.password = Some(password.clone());
        }
    }
    config
}

/// How messages of the web port name its settings.
fn option_names(port: impl std::fmt::Display) -> OptionNames {
    OptionNames {
        address: Some(format!("WEB_PORT={port}")),
        origin: "WEB_ORIGIN",
        password: "PROTECT=Y",
        tls: "put a reverse proxy with TLS in front, and set its address in WEB_PROXY",
    }
}

/// Health pages, which are served under any host name.
fn health(web: &Arc<WebState>) -> Router {
    Router::new()
        .route("/healthz", get(ready::health))
        .route("/readyz", get(ready::readiness))
        .route("/startupz", get(ready::startup))
        .with_state(web.clone())
}

/// Pages without a password.
fn open_to_all(web: &Arc<WebState>) -> Router {
    Router::new()
        .route("/msg.html", get(compat::message))
        .route("/vnc.html", get(compat::viewer))
        .route("/vnc_lite.html", get(compat::viewer))
        .route("/status", get(compat::status))
        .route("/progress", get(page::progress))
        .route("/events", get(page::events))
        .route("/pod/{name}", get(page::file))
        .with_state(web.clone())
}

/// All pages besides the viewer.
pub fn routes(web: &Arc<WebState>) -> ExtraRoutes {
    let inside = Router::new()
        .route("/log", get(page::log))
        .route("/account", get(page::account))
        .route("/metrics", get(metrics::metrics))
        .route("/api/openapi.json", get(api::document))
        .route("/api/v1/state", get(api::state))
        .route("/api/v1/screenshot", get(api::screenshot))
        .route("/api/v1/power", post(api::power))
        .route("/api/v1/type", post(api::type_text))
        .route("/api/v1/media", post(api::media))
        .route("/api/v1/usb", get(api::usb_devices).post(api::usb))
        .with_state(web.clone());
    let (health, open) = (health(web), open_to_all(web));
    desktop::add(ExtraRoutes { health, open, inside, ..ExtraRoutes::default() }, web)
}

#[cfg(test)]
mod test {
    use std::net::TcpListener;

    use super::*;
    use crate::settings::environment::read;

    /// The head and the body of an answer.
    async fn fetch(port: u16, path: &str) -> (String, String) {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let request =
            format!("GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
        let mut stream = tokio::net::TcpStream::connect(("127.0.0.1", port)).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        (head.to_lowercase(), body.to_owned())
    }

    #[tokio::test]
    async fn tools_of_the_reference_image_find_its_pages() {
        let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let words = [("WEB_PORT".into(), port.to_string().into())].into();
        let settings = read(&words).unwrap().settings;
        let secret = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(secret.path(), "a long word").unwrap();
        let password = secret.path().to_owned();
        let guard = Guard::Password { user: "Docker".into(), password, vnc: None };
        let story = Story::new();
        let web = Arc::new(WebState::failed(story.clone(), &settings));
        let served = tokio::spawn(open(&settings, &guard, &web).unwrap().served.unwrap());
        story.step("Downloading Windows 11…");
        story.progress(123, 1000);
        let (head, body) = fetch(port, "/msg.html").await;
        assert!(head.starts_with("http/1.1 200") && head.contains("no-store"), "{head}");
        assert_eq!(body, "Downloading Windows 11 (12.3%)…\n");
        for path in ["/vnc.html", "/vnc.html?autoconnect=true&resize=remote", "/vnc_lite.html?a"] {
            let (head, _) = fetch(port, path).await;
            assert!(head.starts_with("http/1.1 307") && head.contains("location: ./\r"), "{head}");
        }
        // A missing page is the sign that there is a screen.
        story.enter(Phase::Running, "Windows starts");
        let (head, _) = fetch(port, "/msg.html").await;
        assert!(head.starts_with("http/1.1 404"), "{head}");
        // The viewer, where the redirect leads, needs a login. So does a generated password.
        web.show_account("Docker", "hush");
        for path in ["/", "/account", "/log"] {
            let (head, body) = fetch(port, path).await;
            let refused = head.starts_with("http/1.1 303") || head.starts_with("http/1.1 401");
            assert!(refused && !body.contains("hush"), "{path}: {head}");
        }
        // The page has the current step, for browsers without scripts, too.
        let (_, body) = fetch(port, "/progress").await;
        assert!(body.contains(">Windows starts</p>") && !body.contains("hush"), "{body}");
        served.abort();
    }

    #[test]
    fn web_settings_reach_the_gate() {
        let of = |words: &[(&str, &str)], guard: &Guard| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            config(&read(&words).unwrap().settings, guard)
        };
        let asks =
            Guard::Password { user: "bill".into(), password: "/run/password".into(), vnc: None };
        let plain = of(&[], &asks);
        assert_eq!((plain.proxy, plain.origin, plain.any_host), (None, None, false));
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
        assert!(said.any_host && said.auth == web::Auth::None && said.password.is_none());
        assert_eq!(said.name.as_deref(), Some("Box"));
    }
}
