//! Server of the remote frame buffer protocol (RFC 6143 and the extensions of the community's
//! rfbproto), which shows the screen in any VNC client.
//!
//! One [`Server`] owns the picture (`canvas`) and all clients. Moved content is detected once for
//! all of them (`scroll`), and sent as moves to clients that support CopyRect (`pending`). A client
//! is a stream and an [`Admission`]. Listeners hand clients over (`listen`), and so does the
//! browser's WebSocket. `lobby` and `handshake` let a client in. Then `session` reads its messages
//! and `paint` writes to it, as two futures of one task.
//!
//! Threats: everybody who reaches the port, and the guest, whose picture is only ever treated as
//! bytes. A client costs a bounded amount of memory: 1 MiB of received messages, twice that while
//! the buffer grows (`message`), 64 KiB of replies or one text of the guest (`session`), 1 MiB of
//! picture ([`paint::CHUNK`]) and its compressors (`encode`). It rarely uses a tenth of that. All
//! clients together have [`BUDGET`] in addition. A client that does not read blocks only its own
//! task, and is disconnected after a while. A client that requests updates all the time takes turns
//! like all others, and comes after them if it requests pixels that it already has. A client that
//! sends more than people do is read slowly (`meter`).

pub mod canvas;
pub mod clipboard;
pub mod connection_limit;
pub mod encode;
pub mod failure_log;
pub mod format;
mod handshake;
pub mod input;
pub mod keys;
pub mod listen;
pub mod lobby;
pub mod message;
pub(crate) mod meter;
pub mod paint;
pub mod pending;
pub mod picture;
pub mod preferences;
mod rate;
pub mod scroll;
pub mod security;
mod session;
mod sound;
#[cfg(test)]
mod test;
#[cfg(test)]
pub(crate) mod testing;
pub mod tiles;
pub mod tls;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use host::clipboard::MAX_TEXT_BYTES;
use host::input::Hub;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use self::canvas::{Canvas, Viewer};
use self::clipboard::Text;
use self::format::PixelFormat;
use self::handshake::Welcome;
use self::lobby::{Entrant, HANDSHAKE, Lobby};
use self::security::{Access, LoginLimiter, Passwords, PeerNetwork};
use self::session::State;
use self::sound::Sound;
use crate::keys::layout::Layout;

pub const MAX_CLIENTS: usize = 64;
/// Maximum threads that encode at the same time.
const ENCODERS: usize = 4;
/// KiB of memory for updates that are encoded as a whole, shared by all clients that cannot take
/// them in parts.
const BUDGET: usize = 128 << 10;

/// Number of processors available to this process. The first call reads it, which must happen
/// before the jail hides it.
pub fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

pub fn encoders() -> usize {
    processors().min(ENCODERS)
}

pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// A stream of any kind: TCP, Unix, TLS or WebSocket.
pub type Wire = Box<dyn Duplex>;

/// Facts about a client before it sends anything.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Address or description of the client, for logs.
    pub peer: String,
    pub entry: Entry,
}

#[derive(Clone, Copy, Debug)]
pub enum Entry {
    /// The client authenticates as the rules require. Failures are counted for this network.
    Authenticate(PeerNetwork),
    /// The client was authenticated elsewhere.
    Authenticated {
        /// The client may not use keyboard and mouse.
        view_only: bool,
    },
}

/// Settings of one listener.
#[derive(Default)]
pub struct Rules {
    pub passwords: Passwords,
    /// If set, clients must use TLS.
    pub tls: Option<tls::Files>,
    pub view_only: bool,
    /// Clients that request exclusive access share the screen all the same.
    pub always_shared: bool,
    /// Desktop name, which viewers show in their window's title.
    pub name: String,
}

/// Button of the machine that a client presses (xvp extension).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// The power button.
    Off,
    Reset,
}

/// Interfaces of the server to the rest of the machine.
pub struct Interfaces {
    pub hub: Arc<Hub>,
    pub layout: Arc<Layout>,
    /// Texts of viewers go to the agent in the guest. Without one, they are dropped.
    pub clipboard: Arc<host::clipboard::Hub>,
    /// Sound cards play there, if there are any.
    pub sound: Arc<host::sound::Hub>,
    pub power: Box<dyn Fn(Power) + Send + Sync>,
}

pub struct Server {
    pub canvas: Arc<Canvas>,
    pub interfaces: Interfaces,
    lobby: Lobby,
    clients: Mutex<BTreeMap<u64, Arc<Client>>>,
    next: AtomicU64,
    budget: Arc<Semaphore>,
    encoders: Arc<Semaphore>,
    /// A single permit to encode updates whose clients may have the picture already.
    repeats: Arc<Semaphore>,
}

/// A client that was let in.
struct Client {
    peer: String,
    rules: Arc<Rules>,
    since: Instant,
    access: Access,
    shared: bool,
    security: &'static str,
    viewer: Arc<Viewer>,
    state: Mutex<State>,
    sound: Mutex<Sound>,
    /// Notified when pending replies were written.
    room: Notify,
    /// Notified when the client must be disconnected.
    kick: Notify,
    sent: AtomicU64,
}

impl Client {
    fn state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().expect("no session panicked"))
    }

    fn sound(&self) -> MutexGuard<'_, Sound> {
        self.sound.lock().expect("no session panicked")
    }
}

impl Server {
    /// A server for a display. The caller must poll `canvas().run()`.
    pub fn new(canvas: Arc<Canvas>, interfaces: Interfaces) -> Arc<Self> {
        let copied = interfaces.clipboard.clone();
        let server = Arc::new(Self {
            canvas,
            interfaces,
            lobby: Lobby::new(Arc::default()),
            clients: Mutex::default(),
            next: AtomicU64::new(1),
            budget: Arc::new(Semaphore::new(BUDGET)),
            encoders: Arc::new(Semaphore::new(encoders())),
            repeats: Arc::new(Semaphore::new(1)),
        });
        let viewers = Arc::downgrade(&server);
        copied.on_copied(Box::new(move |text| {
            if let Some(server) = viewers.upgrade() {
                server.copied(text);
            }
        }));
        server
    }

    /// Failed logins, counted for VNC viewers and browsers together.
    pub fn login_limiter(&self) -> &LoginLimiter {
        &self.lobby.limiter
    }

    /// Serves one client until it disconnects, with the rules of its listener.
    pub async fn serve(self: Arc<Self>, rules: Arc<Rules>, stream: Wire, admission: Admission) {
        let Some(entrant) = self.lobby.admit(&rules, stream, &admission).await else { return };
        let Entrant { welcome, slot: _slot } = entrant;
        let peer = admission.peer;
        match self.show_screen(welcome, &peer, rules).await {
            Ok(()) => tracing::info!("vnc: {peer} disconnected"),
            Err(error) => tracing::info!("vnc: {peer} disconnected: {error:#}"),
        }
    }

    async fn show_screen(
        self: &Arc<Self>,
        mut welcome: Welcome,
        peer: &str,
        rules: Arc<Rules>,
    ) -> anyhow::Result<()> {
        let access = if rules.view_only { Access::View } else { welcome.access };
        let canvas = self.canvas.clone();
        let viewer = tokio::task::spawn_blocking(move || canvas.admit()).await?;
        let (width, height) = viewer.dirty(|dirty| dirty.size());
        let init = server_init((width, height), &rules.name)?;
        let greet = async {
            welcome.stream.write_all(&init).await?;
            welcome.stream.flush().await
        };
        timeout(HANDSHAKE, greet).await.context("it stopped reading")??;
        let client = Arc::new(Client {
            peer: peer.to_owned(),
            since: Instant::now(),
            access,
            shared: welcome.shared || rules.always_shared,
            rules,
            security: welcome.security,
            viewer,
            state: Mutex::default(),
            sound: Mutex::default(),
            room: Notify::new(),
            kick: Notify::new(),
            sent: AtomicU64::new(0),
        });
        let _registration = self.register(&client)?;
        let input = if access == Access::Full { "with keyboard and mouse" } else { "view-only" };
        tracing::info!("vnc: {peer} connected, {input} (security {})", client.security);
        let (reader, writer) = tokio::io::split(welcome.stream);
        let session = session::Session::new(self.clone(), client.clone());
        let painter = paint::Painter::new(self.clone(), client.clone(), (width, height));
        tokio::select! {
            ended = session.run(reader) => ended,
            ended = painter.run(writer) => ended,
            () = client.kick.notified() => bail!("another client requested exclusive access"),
        }
    }

    /// Registers the client. A client with exclusive access disconnects all others, unless it is
    /// view-only.
    fn register(self: &Arc<Self>, client: &Arc<Client>) -> anyhow::Result<Registration> {
        let mut clients = self.clients.lock().expect("no client panicked");
        let alone = !client.shared && client.access == Access::Full;
        if alone {
            clients.values().for_each(|other| other.kick.notify_one());
        } else if client.access == Access::Full {
            let taken = clients.values().any(|it| !it.shared && it.access == Access::Full);
            ensure!(!taken, "another client has exclusive access");
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        clients.insert(number, client.clone());
        Ok(Registration { server: self.clone(), number })
    }

    /// Offers a text that the guest copied to all clients with full access.
    pub fn copied(&self, text: &str) {
        if text.len() > MAX_TEXT_BYTES {
            return tracing::debug!(
                "vnc: clipboard text of {} bytes is too long to send",
                text.len()
            );
        }
        let text = Arc::new(Text::new(text));
        for client in self.all().into_iter().filter(|it| it.access == Access::Full) {
            client.state(|state| state.offer(&text));
            client.viewer.wake.notify_one();
        }
    }

    fn all(&self) -> Vec<Arc<Client>> {
        self.clients.lock().expect("no client panicked").values().cloned().collect()
    }

    /// Describes all connected clients for the control interface.
    pub fn status(&self) -> Vec<Value> {
        let show = |client: Arc<Client>| {
            let encoding = client.state(|state| state.preferences.parameters(0).encoding);
            json!({
                "peer": client.peer,
                "seconds": client.since.elapsed().as_secs(),
                "access": if client.access == Access::Full { "full" } else { "view" },
                "shared": client.shared,
                "security": client.security,
                "encoding": format!("{encoding:?}").to_lowercase(),
                "sent": client.sent.load(Ordering::Relaxed),
            })
        };
        self.all().into_iter().map(show).collect()
    }
}

/// Registration in the list of clients, removed on drop.
struct Registration {
    server: Arc<Server>,
    number: u64,
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.server.clients.lock().expect("no client panicked").remove(&self.number);
    }
}

/// `ServerInit` (RFC 6143 7.3.2).
fn server_init((width, height): (u16, u16), name: &str) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    out.extend(width.to_be_bytes());
    out.extend(height.to_be_bytes());
    out.extend(PixelFormat::OURS.write());
    out.extend(u32::try_from(name.len())?.to_be_bytes());
    out.extend(name.as_bytes());
    Ok(out)
}
