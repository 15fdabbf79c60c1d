//! The machine moves to the pod that waits for it on the same volume (`arrival.rs`).

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdUnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt as _, StreamExt as _};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, copy_bidirectional_with_sizes};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Mutex, watch};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use vmm::control::{Client, Command};

use super::child::Child;
use super::machine_client;
use super::thread::run_in_thread;
use crate::migration::tls::{Key, PublicKey};
use crate::migration::{ACCEPTED, Running, Waiting};
use crate::plan::Plan;
use crate::story::Story;

const POLL_INTERVAL: Duration = Duration::from_millis(500);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the process of the machine may take to give up, after the time for the migration.
const EXTRA_TIME: Duration = Duration::from_secs(60);
/// How long the process of the machine may take to end a move.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(5);
/// How long the process of a machine that has moved may take to end.
const END_TIMEOUT: Duration = Duration::from_secs(5);
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Bytes that are copied at a time.
const BUFFER: usize = 256 << 10;

/// Moves the machine to another pod.
pub struct Departure {
    /// The folder of the suspended machine.
    folder: PathBuf,
    key: Key,
    control: PathBuf,
    memory: u64,
    /// Milliseconds for which the guest may stand still.
    pause: u32,
    story: Arc<Story>,
    /// Whether a command has moved the machine. Held while it moves, and while a command waits for
    /// that.
    moving: Mutex<bool>,
    /// The pod stops, and no command moves the machine any more.
    stops: watch::Sender<bool>,
}

/// The time limits of a move.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// For another pod to wait.
    pub wait: Duration,
    /// For the move.
    pub within: Option<Duration>,
}

impl Departure {
    /// Lets other pods wait for the machine.
    pub(super) fn announce(
        plan: &Plan,
        folder: &Path,
        control: PathBuf,
        story: Arc<Story>,
    ) -> anyhow::Result<Self> {
        let (key, memory) = (Key::make()?, plan.sizes.memory);
        Running::new(key.public(), plan.sizes.processors, memory).write(folder)?;
        let (folder, moving, stops) = (folder.to_owned(), Mutex::default(), Default::default());
        let pause = plan.input.settings.pod.migration.pause.0;
        Ok(Self { folder, key, control, memory, pause, story, moving, stops })
    }

    /// Moves the machine for a command, unless the pod stops before it has reached another one.
    pub async fn command(&self, limits: Limits) -> anyhow::Result<Value> {
        let one = self.moving.try_lock().ok();
        let mut has_moved = one.context("another command moves the machine")?;
        let mut stops = self.stops.subscribe();
        let reached = tokio::select! {
            reached = self.reach(limits.wait) => reached?,
            _ = stops.wait_for(|stops| *stops) => bail!("the pod is being stopped"),
        };
        let report = self.send(reached, limits.within).await?;
        *has_moved = true;
        Ok(report)
    }

    /// Moves the machine of a pod that stops.
    pub(super) async fn leave(&self, limits: Limits) -> anyhow::Result<Value> {
        let reached = self.reach(limits.wait).await?;
        self.send(reached, limits.within).await
    }

    /// Ends commands that wait, and gives one that moves the machine this time. Returns whether the
    /// machine's process has ended.
    pub(super) async fn end_commands(&self, child: &mut Child, limit: Duration) -> bool {
        self.stops.send_replace(true);
        tokio::select! {
            _ = self.moving.lock() => {}
            _ = child.end() => return true,
            () = sleep(limit) => {
                machine_client::ask_now(&self.control, Command::MigrateCancel).await.ok();
                timeout(CANCEL_TIMEOUT, self.moving.lock()).await.ok();
            }
        }
        // The process of a machine that has moved is still ending.
        if self.moving.try_lock().is_ok_and(|has_moved| *has_moved) {
            timeout(END_TIMEOUT, child.end()).await.ok();
        }
        child.has_ended()
    }

    /// Sends the machine, whose process ends then. If this is cancelled or fails, the machine
    /// stays; in the last moment, its process ends if it may run there. Returns the machine's
    /// report, with `to`.
    async fn send(
        &self,
        (stream, address): (TlsStream<TcpStream>, IpAddr),
        within: Option<Duration>,
    ) -> anyhow::Result<Value> {
        let (ours, theirs) = StdUnixStream::pair().context("a stream")?;
        ours.set_nonblocking(true).context("a stream")?;
        let machine = UnixStream::from_std(ours).context("a stream")?;
        let _copier = Copier(tokio::spawn(copy(stream, machine)));
        let (control, pause) = (self.control.clone(), Some(self.pause));
        let ask = move || {
            let time = within.unwrap_or(Duration::from_secs(u16::MAX.into()));
            let mut client = Client::connect_timeout(&control, time + EXTRA_TIME)?;
            let within = within.map(|it| u16::try_from(it.as_secs()).unwrap_or(u16::MAX));
            let to = PathBuf::from("another pod");
            let command = Command::Migrate { to, pause, within };
            client.ask_with(&command, &[theirs.as_fd()])
        };
        let mut moved = tokio::select! {
            moved = run_in_thread("migrate", ask) => moved?,
            () = self.show_progress() => bail!("no progress"),
        };
        ensure!(moved.is_object(), "the machine's answer is damaged");
        moved["to"] = address.to_string().into();
        Ok(moved)
    }

    /// Connects to the pod that waits for the machine. Until this time is over, another one may
    /// come.
    async fn reach(&self, wait: Duration) -> anyhow::Result<(TlsStream<TcpStream>, IpAddr)> {
        let start = Instant::now();
        loop {
            let folder = self.folder.clone();
            let found = run_in_thread("migrate", move || Waiting::find(&folder)).await;
            let reached = match found {
                Ok(Some(waiting)) => self.connect(&waiting).await,
                Ok(None) => Err(anyhow::anyhow!(
                    "no other pod waits for the machine: start one with SHUTDOWN=migrate on the \
                     same volume"
                )),
                Err(error) => Err(error),
            };
            if reached.is_ok() || start.elapsed() >= wait {
                return reached;
            }
            sleep(POLL_INTERVAL).await;
        }
    }

    /// Tries all addresses at once.
    async fn connect(&self, waiting: &Waiting) -> anyhow::Result<(TlsStream<TcpStream>, IpAddr)> {
        let attempts = waiting.addresses.iter().map(|address| {
            let place = SocketAddr::new(*address, waiting.port);
            let greeted = timeout(CONNECT_TIMEOUT, self.greet(place, waiting.key.clone()));
            greeted.map(move |greeted| match greeted {
                Ok(Ok(stream)) => Ok((stream, place.ip())),
                Ok(Err(error)) => Err(format!("{place}: {error:#}")),
                Err(_) => Err(format!("{place}: no answer")),
            })
        });
        let mut attempts: FuturesUnordered<_> = attempts.collect();
        let mut errors = Vec::new();
        while let Some(reached) = attempts.next().await {
            match reached {
                Ok(reached) => return Ok(reached),
                Err(error) => errors.push(error),
            }
        }
        bail!(
            "the pod that waits for the machine cannot be reached at its MIGRATE_PORT: {}",
            errors.join("; ")
        )
    }

    async fn greet(
        &self,
        place: SocketAddr,
        key: PublicKey,
    ) -> anyhow::Result<TlsStream<TcpStream>> {
        let stream = TcpStream::connect(place).await?;
        stream.set_nodelay(true)?;
        let connector = self.key.connector(Box::new(move || Ok(key.clone())))?;
        let name = ServerName::IpAddress(place.ip().into());
        let mut stream = connector.connect(name, stream).await?;
        let mut line = [0; ACCEPTED.len()];
        stream.read_exact(&mut line).await.context("the pod refuses this one")?;
        ensure!(line == *ACCEPTED, "another program answers");
        Ok(stream)
    }

    /// Never returns.
    async fn show_progress(&self) {
        loop {
            sleep(PROGRESS_INTERVAL).await;
            let status = machine_client::ask_now(&self.control, Command::Status).await;
            let Ok(status) = status else { continue };
            if let Some(left) = status["migration"]["left_bytes"].as_u64() {
                self.story.progress(self.memory.saturating_sub(left), self.memory);
            }
        }
    }
}

/// Copies until the connection is closed or cut, or until this is dropped.
struct Copier(JoinHandle<()>);

impl Drop for Copier {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Copies both ways between the other pod and the machine.
pub(super) async fn copy(
    mut pod: impl AsyncRead + AsyncWrite + Unpin,
    mut machine: impl AsyncRead + AsyncWrite + Unpin,
) {
    let copied = copy_bidirectional_with_sizes(&mut pod, &mut machine, BUFFER, BUFFER).await;
    if let Err(error) = copied {
        tracing::debug!("the connection between the pods: {error}");
    }
}

/// A move, for people.
pub fn sentence(moved: &Value) -> String {
    let number = |name: &str| moved[name].as_f64().unwrap_or_default();
    format!(
        "moved to {} in {:.1} s, with a pause of {:.0} ms: {:.0} MiB were sent",
        moved["to"].as_str().unwrap_or("another pod"),
        number("seconds"),
        number("pause_ms"),
        number("sent_bytes") / f64::from(1 << 20)
    )
}
