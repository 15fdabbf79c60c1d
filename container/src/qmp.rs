//! QEMU's control protocols, QMP and the human monitor, for programs that drive the reference image
//! by them. They listen only where the user asks, and have no password.
//!
//! Threats: any client that reaches a listener may use it. At an address that other hosts or the
//! guest can reach, only commands are answered that neither disturb the guest nor show its screen.
//! Each listener has at most [`MAX_CLIENTS`] clients, and another host [`MAX_PER_ADDRESS`] of them,
//! so that one host cannot keep the others out. A request has at most 64 KiB, other hosts get
//! [`PAUSE`] between answers, and a client that does not read, or is gone, is disconnected. A page
//! in a browser cannot talk to a listener either: the first line of HTTP or TLS ends the
//! connection.

mod commands;
mod events;
mod framing;
mod human;
mod keys;
pub mod protocol;
mod screendump;

use std::collections::BTreeMap;
use std::fs::{self, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context as _;
use futures_util::future::join_all;
use screen::web::stage::{ConnectionLimit, PeerNetwork, Slot, keep_alive};
use tokio::io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt};
use tokio::io::{BufReader, split};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::Mutex;
use tokio::sync::broadcast::Receiver;
use tokio::sync::broadcast::error::TryRecvError;
use tokio::time::{Instant, sleep, sleep_until, timeout};

pub use self::commands::Rights;
use self::events::{Event, Events};
use self::framing::Framing;
use self::protocol::{Failure, Request, VERSION};
use crate::settings::translate::monitor::{Place, Protocol};
use crate::settings::{MONITOR_SOCKET, Settings};
use crate::status::{self, SIGNALS, Status};

/// Maximum clients of a listener, and those of them that one other host has.
const MAX_CLIENTS: usize = 8;
const MAX_PER_ADDRESS: usize = 2;
/// Pause after each answer to another host: its requests cannot take the guest's processors.
const PAUSE: Duration = Duration::from_millis(10);
/// Maximum bytes of a line of the human monitor.
const MAX_LINE: u64 = 4 << 10;
/// How long a client may take to read an answer.
const WRITE_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 500 } else { 10_000 });
/// How long a client of QMP may take to negotiate.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 5 } else { 60 });
/// Pause after accepting fails, as without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Folders for pictures of the screen, besides those of the pod, where they exist.
const FOLDERS: [&str; 2] = ["/tmp", "/dev/shm"];

/// The state that all listeners share.
pub struct Monitors {
    control: PathBuf,
    name: String,
    events: Events,
    /// Locked while a picture of the screen is written.
    picture: Arc<Mutex<()>>,
    /// Folders in which pictures of the screen are written.
    folders: Vec<PathBuf>,
    /// A client has switched the machine off.
    quits: AtomicBool,
    /// USB devices that `device_add` attached: QEMU's name, and the words of `usb-host`.
    usb: std::sync::Mutex<BTreeMap<String, String>>,
}

impl Monitors {
    /// `own` are the folders that the pod may write to.
    pub fn new(control: PathBuf, name: String, own: &[&Path]) -> Arc<Self> {
        let own = own.iter().map(|path| path.to_path_buf());
        Arc::new(Self {
            events: Events::new(control.clone()),
            control,
            name,
            picture: Arc::default(),
            folders: own.chain(FOLDERS.map(PathBuf::from)).collect(),
            quits: AtomicBool::new(false),
            usb: std::sync::Mutex::default(),
        })
    }

    /// Folders for pictures that the pod has no other need to write to.
    pub fn folders(settings: &Settings) -> Vec<&'static Path> {
        let any = settings.monitors().iter().any(|(_, place)| !place.is_exposed());
        let there = FOLDERS.map(Path::new).into_iter().filter(|path| any && path.is_dir());
        there.collect()
    }

    /// Reports that the pod presses the power button.
    pub fn report_powerdown(&self) {
        self.events.send("POWERDOWN", serde_json::Value::Null);
    }

    /// Reports the end of the machine. `status` is that of the pod; the machine has switched itself
    /// off if it is 0.
    pub async fn end(&self, status: &anyhow::Result<u8>) {
        let (guest, reason) = match status {
            _ if self.quits.load(Ordering::Relaxed) => (false, "host-qmp-quit"),
            Ok(0) => (true, "guest-shutdown"),
            Ok(status) if *status > SIGNALS => (false, "host-signal"),
            _ => (false, "host-error"),
        };
        self.events.end(guest, reason).await;
    }
}

type Task = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Listens where the settings say. The future serves the clients while it is polled; without a
/// listener there is none.
pub fn open(settings: &Settings, monitors: &Arc<Monitors>) -> anyhow::Result<Option<Task>> {
    let mut tasks: Vec<Task> = Vec::new();
    for (protocol, place) in settings.monitors() {
        let task = match Server::at(&place, protocol, monitors.clone()).listen(&place) {
            Ok(task) => task,
            // With COMPAT=dockur it is a default, which no user may need.
            Err(error) if place == Place::Unix(MONITOR_SOCKET.into()) => {
                tracing::warn!("no human monitor at {}: {error:#}", place.show());
                continue;
            }
            Err(error) => {
                let name = if protocol == Protocol::Qmp { "QMP" } else { "MONITOR" };
                let text = format!("{name}: {}: {error:#}", place.show());
                return Err(status::Failure::new(Status::Failed, text));
            }
        };
        tracing::info!("{} at {}", server_name(protocol), place.show());
        tasks.push(task);
    }
    if tasks.is_empty() {
        return Ok(None);
    }
    let watched = monitors.clone();
    tasks.push(Box::pin(async move { watched.events.watch().await }));
    Ok(Some(Box::pin(async move { drop(join_all(tasks).await) })))
}

const fn server_name(protocol: Protocol) -> &'static str {
    match protocol {
        Protocol::Qmp => "QMP listens",
        Protocol::Human => "QEMU's human monitor listens",
    }
}

/// Serves the clients of a listener.
#[derive(Clone)]
pub struct Server {
    pub protocol: Protocol,
    pub rights: Rights,
    /// The pause after each answer.
    pub pause: Duration,
    pub monitors: Arc<Monitors>,
}

impl Server {
    fn at(place: &Place, protocol: Protocol, monitors: Arc<Monitors>) -> Self {
        if place.is_exposed() {
            Self { protocol, rights: Rights::Harmless, pause: PAUSE, monitors }
        } else {
            Self { protocol, rights: Rights::All, pause: Duration::ZERO, monitors }
        }
    }

    fn listen(self, place: &Place) -> anyhow::Result<Task> {
        let limit = ConnectionLimit::new(MAX_CLIENTS, MAX_PER_ADDRESS);
        Ok(match place {
            Place::Tcp(address) => {
                let listener = std::net::TcpListener::bind(address)?;
                listener.set_nonblocking(true)?;
                let listener = TcpListener::from_std(listener)?;
                Box::pin(async move {
                    loop {
                        let Ok((stream, from)) = listener.accept().await else {
                            sleep(ACCEPT_PAUSE).await;
                            continue;
                        };
                        if let Some(slot) = limit.acquire(PeerNetwork::of(from.ip())) {
                            // The connection also works without these options.
                            stream.set_nodelay(true).ok();
                            keep_alive(&stream).ok();
                            self.admit(stream, slot);
                        }
                    }
                })
            }
            Place::Unix(path) => {
                let listener = bind_unix(path)?;
                Box::pin(async move {
                    loop {
                        let Ok((stream, _)) = listener.accept().await else {
                            sleep(ACCEPT_PAUSE).await;
                            continue;
                        };
                        if let Some(slot) = limit.acquire(PeerNetwork::Local) {
                            self.admit(stream, slot);
                        }
                    }
                })
            }
        })
    }

    /// Serves a client in a task of its own.
    fn admit(&self, stream: impl AsyncRead + AsyncWrite + Send + 'static, slot: Slot) {
        let server = self.clone();
        tokio::spawn(async move {
            server.serve(stream).await.ok();
            drop(slot);
        });
    }

    /// Talks to a client until it disconnects or the machine ends.
    pub async fn serve(&self, stream: impl AsyncRead + AsyncWrite) -> io::Result<()> {
        let (read, write) = split(stream);
        let output = Output(Box::pin(write));
        match self.protocol {
            Protocol::Qmp => Client { server: self, events: None, output }.serve_qmp(read).await,
            Protocol::Human => self.serve_human(read, output).await,
        }
    }

    async fn serve_human(
        &self,
        read: impl AsyncRead,
        mut output: Output<impl AsyncWrite>,
    ) -> io::Result<()> {
        const PROMPT: &str = "(qemu) ";
        let read = std::pin::pin!(read);
        let mut lines = BufReader::new(read);
        let [major, minor, micro] = VERSION;
        let banner =
            format!("QEMU {major}.{minor}.{micro} monitor - type 'help' for more information");
        output.send(&format!("{banner}\r\n{PROMPT}")).await?;
        loop {
            let mut line = Vec::new();
            (&mut lines).take(MAX_LINE).read_until(b'\n', &mut line).await?;
            let line = String::from_utf8_lossy(&line);
            // A line without an end is too long, or the connection was cut within it.
            if !line.ends_with('\n') || is_of_a_browser(&line) {
                return Ok(());
            }
            let answer = self.monitors.run_line(self.rights, &line).await;
            output.send(&format!("{answer}{PROMPT}")).await?;
            self.rest().await;
        }
    }

    async fn rest(&self) {
        if !self.pause.is_zero() {
            sleep(self.pause).await;
        }
    }
}

/// Whether a line is the start of HTTP or of TLS, both of which may contain further lines in words
/// of a page.
fn is_of_a_browser(line: &str) -> bool {
    line.contains(" HTTP/") || line.contains(|it: char| it.is_control() && !it.is_whitespace())
}

/// Replaces the socket of an earlier run, and nothing else.
fn bind_unix(path: &Path) -> anyhow::Result<UnixListener> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    }
    if fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket()) {
        fs::remove_file(path)?;
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// The side of the connection to which answers are written.
struct Output<W>(Pin<Box<W>>);

impl<W: AsyncWrite> Output<W> {
    async fn send(&mut self, text: &str) -> io::Result<()> {
        let written = timeout(WRITE_TIMEOUT, self.0.write_all(text.as_bytes())).await;
        written.map_err(|_| io::Error::from(ErrorKind::TimedOut))?
    }
}

/// A client of QMP.
struct Client<'a, W> {
    server: &'a Server,
    /// Set by the negotiation.
    events: Option<Receiver<Event>>,
    output: Output<W>,
}

impl<W: AsyncWrite> Client<'_, W> {
    async fn serve_qmp(mut self, read: impl AsyncRead) -> io::Result<()> {
        let mut read = std::pin::pin!(read);
        self.output.send(&protocol::greeting()).await?;
        let (mut framing, mut bytes) = (Framing::default(), [0; 4096]);
        let negotiation_end = Instant::now() + NEGOTIATION_TIMEOUT;
        loop {
            while let Some(request) = framing.take() {
                self.reply(request).await?;
                self.server.rest().await;
            }
            tokio::select! {
                count = read.read(&mut bytes) => match count? {
                    0 => return Ok(()),
                    count => framing.push(&bytes[..count]),
                },
                event = next_event(&mut self.events, negotiation_end) => {
                    self.pass_on(event?).await?;
                }
            }
        }
    }

    /// Answers a request. As at QEMU, the event of `stop` and `cont` comes before the answer, and
    /// others come after it.
    async fn reply(&mut self, request: Result<Vec<u8>, Failure>) -> io::Result<()> {
        let request = match request {
            Ok(request) => request,
            Err(failure) => {
                // It may be a browser, which would send more.
                self.output.send(&protocol::answer(None, Err(failure))).await?;
                return Err(ErrorKind::InvalidData.into());
            }
        };
        let (id, request) = protocol::parse(&request);
        let is_immediate = |it: &Request| matches!(it.command.as_str(), "stop" | "cont");
        let events_first = request.as_ref().is_ok_and(is_immediate);
        let result = match request {
            Ok(request) => self.execute(request).await,
            Err(failure) => Err(failure),
        };
        while let Some(events) = self.events.as_mut().filter(|_| events_first) {
            match events.try_recv() {
                Ok(event) => self.pass_on(event).await?,
                Err(TryRecvError::Empty) => break,
                Err(error) => return Err(io::Error::other(error)),
            }
        }
        self.output.send(&protocol::answer(id, result)).await
    }

    async fn pass_on(&mut self, event: Event) -> io::Result<()> {
        self.output.send(&event.line).await?;
        if event.last { Err(ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    async fn execute(&mut self, request: Request) -> Result<serde_json::Value, Failure> {
        let Request { command, arguments } = request;
        match (command.as_str(), &self.events) {
            ("qmp_capabilities", Some(_)) => Err(Failure::unknown(
                "Capabilities negotiation is already complete, command ignored",
            )),
            ("qmp_capabilities", None) => {
                let wanted = arguments.get("enable").and_then(|it| it.as_array());
                if let Some(capability) = wanted.and_then(|it| it.first()) {
                    let name = capability.as_str().unwrap_or_default();
                    return Err(Failure::generic(format!("Capability {name} not available")));
                }
                self.events = Some(self.server.monitors.events.subscribe().await);
                Ok(serde_json::json!({}))
            }
            (_, None) => {
                Err(Failure::unknown("Expecting capabilities negotiation with 'qmp_capabilities'"))
            }
            (command, Some(_)) => {
                self.server.monitors.execute(self.server.rights, command, arguments).await
            }
        }
    }
}

/// The next event. A client that has not negotiated by `negotiation_end` is disconnected.
async fn next_event(
    events: &mut Option<Receiver<Event>>,
    negotiation_end: Instant,
) -> io::Result<Event> {
    match events {
        Some(events) => events.recv().await.map_err(io::Error::other),
        None => {
            sleep_until(negotiation_end).await;
            Err(ErrorKind::TimedOut.into())
        }
    }
}

#[cfg(test)]
mod test;
