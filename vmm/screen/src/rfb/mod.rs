//! The remote frame buffer protocol (RFC 6143, and what its community added since): the screen in
//! any VNC client.
//!
//! One [`Server`] has the picture (`canvas`) and all clients. What of it only moved is found once
//! for all of them (`scroll`), and told to those who can move what they have (`owed`). A client is
//! a stream and what is known of it ([`Admission`]): listeners hand theirs over (`listen`), and so
//! does the browser's WebSocket. `lobby` and `handshake` let it in; then `session` reads what it
//! sends and `paint` writes to it, as two futures of one task.
//!
//! Threats: whoever reaches the port, and the guest, whose picture is only ever bytes. A client
//! costs a bounded amount of memory: 1 MiB of what it sends, which is twice that while it grows
//! (`message`), 64 KiB of answers or one text of the guest (`session`), 1 MiB of picture
//! ([`paint::CHUNK`]) and its compressors (`encode`), hardly ever a tenth of that; besides, all
//! together have [`BUDGET`]. Who does not read is waited for by its own task alone, and closed
//! after a while. Who asks all the time has a turn like all others, and behind them if it asks for
//! what it has; who says more than people do is read slowly (`meter`).

pub mod canvas;
pub mod clipboard;
pub mod complaints;
pub mod crowd;
pub mod encode;
pub mod format;
pub mod hands;
mod handshake;
pub mod keys;
pub mod listen;
pub mod lobby;
pub mod message;
pub(crate) mod meter;
pub mod owed;
pub mod paint;
pub mod picture;
mod rate;
pub mod scroll;
pub mod security;
mod session;
#[cfg(test)]
mod test;
#[cfg(test)]
pub(crate) mod testing;
pub mod tiles;
pub mod tls;
pub mod wishes;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use host::input::Hub;
use serde_json::{Value, json};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{Notify, Semaphore};
use tokio::time::timeout;

use self::canvas::{Canvas, Viewer};
use self::clipboard::{Clipboard, Text};
use self::format::PixelFormat;
use self::handshake::Welcome;
use self::lobby::{Entrant, HANDSHAKE, Lobby};
use self::security::{Door, Doors, Passwords, Right};
use self::session::State;
use crate::keys::layout::Layout;

/// Clients at once.
pub const MOST: usize = 64;
/// The most that encode at once.
const ENCODERS: usize = 4;
/// Whole updates that wait in memory, in KiB, for all clients that take none in parts.
const BUDGET: usize = 128 << 10;

/// How many processors we have, asked once: in a jail nobody sees how many of them are ours.
pub fn processors() -> usize {
    static COUNT: OnceLock<usize> = OnceLock::new();
    *COUNT.get_or_init(|| std::thread::available_parallelism().map_or(1, usize::from))
}

/// How many pictures are encoded at once.
pub fn encoders() -> usize {
    processors().min(ENCODERS)
}

/// A line to a client.
pub trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

/// Any line.
pub type Wire = Box<dyn Duplex>;

/// What is known of a client before it said anything.
#[derive(Clone, Debug)]
pub struct Admission {
    /// Where it is, for people.
    pub peer: String,
    /// Whether it must say a password.
    pub entry: Entry,
}

/// See [`Admission`].
#[derive(Clone, Copy, Debug)]
pub enum Entry {
    /// As the rules are; failures are counted at this door.
    Ask(Door),
    /// It has shown elsewhere that it may come in.
    Open {
        /// To look only.
        view_only: bool,
    },
}

/// What holds for those who come in by one door.
#[derive(Default)]
pub struct Rules {
    /// Who may come in.
    pub passwords: Passwords,
    /// With it, who comes in does so by TLS.
    pub tls: Option<tls::Files>,
    /// Nobody may touch.
    pub view_only: bool,
    /// Clients that want the screen for themselves share it all the same.
    pub always_shared: bool,
    /// What windows are called.
    pub name: String,
}

/// What a client asks of the machine (xvp).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Power {
    /// Press the power button.
    Off,
    /// Press the reset button.
    Reset,
}

/// What the server reaches outside of itself.
pub struct Outside {
    /// Keyboards and mice.
    pub hub: Arc<Hub>,
    /// What symbols mean.
    pub layout: Arc<Layout>,
    /// The guest's agent; without one, texts go nowhere.
    pub clipboard: Option<Arc<dyn Clipboard>>,
    /// The machine's buttons.
    pub power: Box<dyn Fn(Power) + Send + Sync>,
}

/// See the module.
pub struct Server {
    canvas: Arc<Canvas>,
    outside: Outside,
    lobby: Lobby,
    clients: Mutex<BTreeMap<u64, Arc<Client>>>,
    next: AtomicU64,
    budget: Arc<Semaphore>,
    /// Who may encode now.
    encoders: Arc<Semaphore>,
    /// Of those whose clients may have the picture already, one at a time.
    patient: Arc<Semaphore>,
}

/// A client that is in.
struct Client {
    peer: String,
    rules: Arc<Rules>,
    since: Instant,
    right: Right,
    shared: bool,
    security: &'static str,
    viewer: Arc<Viewer>,
    state: Mutex<State>,
    /// There is room for answers again.
    room: Notify,
    /// It must go.
    kick: Notify,
    sent: AtomicU64,
}

impl Client {
    fn state<T>(&self, work: impl FnOnce(&mut State) -> T) -> T {
        work(&mut self.state.lock().expect("no session panicked"))
    }
}

impl Server {
    /// A server for a display; `canvas().run()` is to be polled meanwhile.
    pub fn new(canvas: Arc<Canvas>, outside: Outside) -> Arc<Self> {
        Arc::new(Self {
            canvas,
            outside,
            lobby: Lobby::new(Arc::default()),
            clients: Mutex::default(),
            next: AtomicU64::new(1),
            budget: Arc::new(Semaphore::new(BUDGET)),
            encoders: Arc::new(Semaphore::new(encoders())),
            patient: Arc::new(Semaphore::new(1)),
        })
    }

    /// What it reaches outside of itself.
    pub fn outside(&self) -> &Outside {
        &self.outside
    }

    /// The picture.
    pub fn canvas(&self) -> &Arc<Canvas> {
        &self.canvas
    }

    /// Where guesses are counted, whichever way they come.
    pub fn doors(&self) -> &Doors {
        self.lobby.doors()
    }

    /// Serves one client until it leaves; the rules are those of the door that it came in by.
    pub async fn serve(self: Arc<Self>, rules: Arc<Rules>, stream: Wire, admission: Admission) {
        let Some(entrant) = self.lobby.admit(&rules, stream, &admission).await else { return };
        let Entrant { welcome, place: _place } = entrant;
        let peer = admission.peer;
        match self.host(welcome, &peer, rules).await {
            Ok(()) => tracing::info!("vnc: {peer} left"),
            Err(error) => tracing::info!("vnc: {peer} is gone: {error:#}"),
        }
    }

    /// Shows the screen to one who is in.
    async fn host(
        self: &Arc<Self>,
        mut welcome: Welcome,
        peer: &str,
        rules: Arc<Rules>,
    ) -> anyhow::Result<()> {
        let right = if rules.view_only { Right::View } else { welcome.right };
        let canvas = self.canvas.clone();
        let viewer = tokio::task::spawn_blocking(move || canvas.admit()).await?;
        let (width, height) = viewer.dirty(|dirty| dirty.size());
        let init = server_init((width, height), &rules.name)?;
        let greet = async {
            welcome.stream.write_all(&init).await?;
            welcome.stream.flush().await
        };
        timeout(HANDSHAKE, greet).await.context("it does not read")??;
        let client = Arc::new(Client {
            peer: peer.to_owned(),
            since: Instant::now(),
            right,
            shared: welcome.shared || rules.always_shared,
            rules,
            security: welcome.security,
            viewer,
            state: Mutex::default(),
            room: Notify::new(),
            kick: Notify::new(),
            sent: AtomicU64::new(0),
        });
        let _seat = self.seat(&client)?;
        let may = if right == Right::Full { "with keyboard and mouse" } else { "to look only" };
        tracing::info!("vnc: {peer} is connected, {may} (security {})", client.security);
        let (reader, writer) = tokio::io::split(welcome.stream);
        let session = session::Session::new(self.clone(), client.clone());
        let painter = paint::Painter::new(self.clone(), client.clone(), (width, height));
        tokio::select! {
            ended = session.run(reader) => ended,
            ended = painter.run(writer) => ended,
            () = client.kick.notified() => bail!("another client wants the screen for itself"),
        }
    }

    /// Finds a seat among those who are there: who wants to be alone sends the others away, unless
    /// it only looks.
    fn seat(self: &Arc<Self>, client: &Arc<Client>) -> anyhow::Result<Seat> {
        let mut clients = self.clients.lock().expect("no client panicked");
        let alone = !client.shared && client.right == Right::Full;
        if alone {
            clients.values().for_each(|other| other.kick.notify_one());
        } else if client.right == Right::Full {
            let taken = clients.values().any(|it| !it.shared && it.right == Right::Full);
            ensure!(!taken, "another client has the screen for itself");
        }
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        clients.insert(number, client.clone());
        Ok(Seat { server: self.clone(), number })
    }

    /// The guest copied a text: whoever may touch can paste it.
    pub fn copied(&self, text: &str) {
        if text.len() > message::LONGEST_TEXT {
            return tracing::debug!("vnc: a clipboard of {} bytes stays in the guest", text.len());
        }
        let text = Arc::new(Text::new(text));
        for client in self.all().into_iter().filter(|it| it.right == Right::Full) {
            client.state(|state| state.offer(&text));
            client.viewer.wake.notify_one();
        }
    }

    fn all(&self) -> Vec<Arc<Client>> {
        self.clients.lock().expect("no client panicked").values().cloned().collect()
    }

    /// Who is there.
    pub fn status(&self) -> Vec<Value> {
        let show = |client: Arc<Client>| {
            let encoding = client.state(|state| state.wishes.choice(0).encoding);
            json!({
                "peer": client.peer,
                "seconds": client.since.elapsed().as_secs(),
                "access": if client.right == Right::Full { "full" } else { "view" },
                "shared": client.shared,
                "security": client.security,
                "encoding": format!("{encoding:?}").to_lowercase(),
                "sent": client.sent.load(Ordering::Relaxed),
            })
        };
        self.all().into_iter().map(show).collect()
    }
}

/// A place in the list of those who are there.
struct Seat {
    server: Arc<Server>,
    number: u64,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.server.clients.lock().expect("no client panicked").remove(&self.number);
    }
}

/// RFC 6143 7.3.2
fn server_init((width, height): (u16, u16), name: &str) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    out.extend(width.to_be_bytes());
    out.extend(height.to_be_bytes());
    out.extend(PixelFormat::OURS.write());
    out.extend(u32::try_from(name.len())?.to_be_bytes());
    out.extend(name.as_bytes());
    Ok(out)
}
