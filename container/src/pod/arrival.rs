//! Waits while another pod runs the machine of this volume (`SHUTDOWN=migrate`): until the machine
//! moves here, or until the other pod is gone.
//!
//! Threats: everybody who reaches the port may connect. At most [`MAX_HANDSHAKES`] clients are
//! served at a time, [`MAX_OF_ONE`] of one address, each for [`HANDSHAKE_TIMEOUT`]; old ones give
//! way to new ones. Only the pod that runs the machine has the key that is on the volume, and gets
//! past the handshake. A guest that took over its machine's process there can send anything to the
//! process here, which reads it as `vmm run --incoming` does.

use std::collections::VecDeque;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::Context as _;
use screen::web::stage::PeerNetwork;
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::mpsc::{self, Sender};
use tokio::task::{AbortHandle, JoinHandle};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::Pod;
use super::child::Child;
use super::departure::copy;
use super::machine_client;
use super::stop::Signals;
use super::suspend::{LOCK_FILE, SuspendFolder};
use super::thread::run_in_thread;
use super::watch::{KILL_TIMEOUT, Start};
use crate::log::bucket::{Amount, Bucket, Rate};
use crate::migration::tls::Key;
use crate::migration::{self, ACCEPTED, Place, Running, Waiting};
use crate::net::{every_address, link};
use crate::plan::Plan;
use crate::settings::Shutdown;
use crate::settings::environment::Environment;
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::story::Story;
use crate::suspended;

const POLL_INTERVAL: Duration = Duration::from_secs(1);
const LOCK_INTERVAL: Duration = Duration::from_millis(100);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
const MAX_HANDSHAKES: usize = 16;
/// Handshakes with one address, so that another one cannot be pushed out by it.
const MAX_OF_ONE: usize = 4;
/// Pause after accepting fails, as without free file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How long the machine's process may take to listen, and to end after the connection.
const PROCESS_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the pod that ran the machine may take to end.
const OTHER_POD_TIMEOUT: Duration = Duration::from_secs(30);

/// Lines about refused clients.
const REFUSALS: Rate = Rate {
    burst: Amount { lines: 16, bytes: 4 << 10 },
    per_second: Amount { lines: 1, bytes: 16 },
};

type Stream = TlsStream<TcpStream>;

/// The end of the waiting.
pub(super) enum Waited {
    /// No other pod runs the machine.
    Alone(Arc<Plan>),
    /// The machine comes through this connection.
    Arrives(Arc<Plan>, Arriving),
    /// A signal has ended the pod.
    Ended(u8),
}

/// The connection through which a machine comes, until it is used.
#[derive(Default)]
pub(super) struct Arriving(Mutex<Option<Box<Stream>>>);

/// Waits while another pod runs the machine.
pub(super) async fn wait(
    plan: Arc<Plan>,
    environment: &Environment,
    story: &Story,
    signals: &mut Signals,
) -> anyhow::Result<Waited> {
    let settings = &plan.input.settings;
    let waits = settings.pod.shutdown == Shutdown::Migrate && !settings.disk.ephemeral;
    let folder = suspended::folder(settings, Path::new("/"));
    if !waits || plan.source == Source::Probe || !is_taken(&folder).await? {
        return Ok(Waited::Alone(plan));
    }
    let port = settings.migrate_port().context("no port")?;
    let waiter = Waiter::new(folder, port).await?;
    story.step(&format!("Another pod runs {}: waiting for it at port {port}…", plan.name()));
    let came = tokio::select! {
        came = waiter.wait() => came?,
        status = signals.peek() => {
            waiter.leave();
            return Ok(Waited::Ended(status));
        }
    };
    let root = Path::new("/");
    let Some(stream) = came else {
        waiter.leave();
        story.step(&format!("The other pod is gone: {} starts here", plan.name()));
        let plan = Plan::make(environment, root)?;
        plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        return Ok(Waited::Alone(Arc::new(plan)));
    };
    story.step(&format!("{} arrives from another pod…", plan.name()));
    waiter.leave();
    let running = waiter.running.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let plan = Plan::for_arrival(environment, root, &running.context("no other pod")?)?;
    plan.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
    Ok(Waited::Arrives(Arc::new(plan), Arriving(Mutex::new(Some(Box::new(stream))))))
}

/// Whether another pod runs the machine.
async fn is_taken(folder: &Path) -> anyhow::Result<bool> {
    let path = folder.join(LOCK_FILE);
    let is_taken = move || migration::is_taken(&path).with_context(|| path.display().to_string());
    run_in_thread("migrate", is_taken).await
}

struct Waiter {
    folder: PathBuf,
    listener: TcpListener,
    acceptor: TlsAcceptor,
    waiting: Waiting,
    place: Mutex<Option<Place>>,
    /// The pod that may connect.
    running: Arc<Mutex<Option<Running>>>,
}

impl Waiter {
    async fn new(folder: PathBuf, port: u16) -> anyhow::Result<Self> {
        let key = Key::make()?;
        let running = Arc::<Mutex<Option<Running>>>::default();
        let known = running.clone();
        let acceptor = key.acceptor(Box::new(move || {
            let known = known.lock().unwrap_or_else(PoisonError::into_inner);
            Ok(known.as_ref().context("the other pod has no key yet")?.key.clone())
        }))?;
        let listener = TcpListener::bind((every_address(), port)).await.with_context(|| {
            format!("MIGRATE_PORT={port}: a pod cannot wait there: give another port")
        })?;
        let waiting = Waiting::new(key.public(), link::own_addresses().await?, port);
        let place = Mutex::default();
        Ok(Self { folder, listener, acceptor, waiting, place, running })
    }

    /// Returns the connection of the pod that runs the machine, or nothing when it is gone.
    async fn wait(&self) -> anyhow::Result<Option<Stream>> {
        let (sender, mut accepted) = mpsc::channel(1);
        let mut handshakes = Handshakes::default();
        let refusals = Arc::new(Mutex::new(Bucket::new(REFUSALS)));
        let mut polls = interval(POLL_INTERVAL);
        polls.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                Some(stream) = accepted.recv() => return Ok(Some(stream)),
                _ = polls.tick() => {
                    match self.look().await {
                        Ok(true) => {}
                        Ok(false) => return Ok(None),
                        // The volume may be back later.
                        Err(error) => tracing::debug!("MIGRATE_PORT: {error:#}"),
                    }
                }
                client = self.listener.accept() => {
                    let Ok((stream, address)) = client else {
                        sleep(ACCEPT_PAUSE).await;
                        continue;
                    };
                    let (acceptor, accepted) = (self.acceptor.clone(), sender.clone());
                    let serve = serve(acceptor, stream, address.ip(), accepted, refusals.clone());
                    handshakes.begin(address.ip(), serve);
                }
            }
        }
    }

    /// Whether the other pod still runs the machine. If so, this one takes the place of the waiting
    /// one, and remembers who may connect.
    async fn look(&self) -> anyhow::Result<bool> {
        if !is_taken(&self.folder).await? {
            // The machine may have moved to another pod, which takes the lock in a moment.
            sleep(POLL_INTERVAL).await;
            return is_taken(&self.folder).await;
        }
        let (folder, waiting) = (self.folder.clone(), self.waiting.clone());
        let has_place = self.place().is_some();
        let look = move || {
            let place = if has_place { None } else { Place::take(&folder, &waiting)? };
            Ok((place, Running::read(&folder)))
        };
        let (place, running) = run_in_thread("migrate", look).await?;
        if place.is_some() {
            *self.place() = place;
        }
        *self.running.lock().unwrap_or_else(PoisonError::into_inner) = Some(running?);
        Ok(true)
    }

    /// Another pod may wait from now on.
    fn leave(&self) {
        if let Some(place) = self.place().take() {
            place.leave(&self.folder);
        }
    }

    fn place(&self) -> std::sync::MutexGuard<'_, Option<Place>> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The clients in the handshake, the oldest first.
#[derive(Default)]
struct Handshakes(VecDeque<(PeerNetwork, AbortHandle)>);

impl Handshakes {
    /// Begins a handshake. Ends the oldest one if there are too many, or too many with this
    /// network.
    fn begin(&mut self, address: IpAddr, handshake: impl Future<Output = ()> + Send + 'static) {
        let network = PeerNetwork::of(address);
        self.0.retain(|(_, task)| !task.is_finished());
        let own = self.0.iter().filter(|it| it.0 == network).count();
        let oldest = if own >= MAX_OF_ONE {
            self.0.iter().position(|it| it.0 == network)
        } else {
            (self.0.len() >= MAX_HANDSHAKES).then_some(0)
        };
        if let Some((_, task)) = oldest.and_then(|at| self.0.remove(at)) {
            task.abort();
        }
        self.0.push_back((network, tokio::spawn(handshake).abort_handle()));
    }
}

async fn serve(
    acceptor: TlsAcceptor,
    client: TcpStream,
    address: IpAddr,
    accepted: Sender<Stream>,
    refusals: Arc<Mutex<Bucket>>,
) {
    let greeted = timeout(HANDSHAKE_TIMEOUT, greet(&acceptor, client, &accepted)).await;
    let reason = match greeted {
        Ok(Ok(())) => return,
        Ok(Err(error)) => format!("{error:#}"),
        Err(_) => "it says nothing".into(),
    };
    let line = format!("MIGRATE_PORT: a client at {address} is refused: {reason}");
    let mut refusals = refusals.lock().unwrap_or_else(PoisonError::into_inner);
    if refusals.take(line.len(), std::time::Instant::now()).is_some() {
        tracing::info!("{line}");
    }
}

/// Accepts the pod that runs the machine. It may come to several addresses of this one at once: one
/// connection is accepted, because both pods must keep the same one.
async fn greet(
    acceptor: &TlsAcceptor,
    stream: TcpStream,
    accepted: &Sender<Stream>,
) -> anyhow::Result<()> {
    stream.set_nodelay(true)?;
    let mut stream = acceptor.accept(stream).await?;
    let place = accepted.try_reserve().context("another connection is accepted")?;
    stream.write_all(ACCEPTED).await?;
    stream.flush().await?;
    place.send(stream);
    Ok(())
}

impl Arriving {
    /// Gives the machine's process what comes through the connection, from the moment when it
    /// listens at this socket.
    fn forward(&self, socket: PathBuf) -> JoinHandle<()> {
        let stream = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        tokio::spawn(async move {
            let Some(stream) = stream else { return };
            match timeout(PROCESS_TIMEOUT, connect(&socket)).await {
                Ok(machine) => copy(stream, machine).await,
                Err(_) => tracing::warn!("the machine's process does not listen"),
            }
        })
    }
}

async fn connect(socket: &Path) -> UnixStream {
    loop {
        match UnixStream::connect(socket).await {
            Ok(stream) => return stream,
            Err(_) => sleep(Duration::from_millis(20)).await,
        }
    }
}

impl Pod {
    /// Waits until the machine of the other pod runs here.
    pub(super) async fn arrive(
        &self,
        child: &mut Child,
        signals: &mut Signals,
    ) -> anyhow::Result<Start> {
        let mut forwards = self.continuity.arriving.forward(self.runtime_folder.incoming());
        let control = self.runtime_folder.waking();
        let cut = async {
            (&mut forwards).await.ok();
            // The machine has arrived, or its process ends, or waits for another connection.
            sleep(PROCESS_TIMEOUT).await;
        };
        let interrupted = tokio::select! {
            () = machine_client::until_ready(&control) => None,
            ended = child.end() => {
                // A guest that has arrived may switch itself off at once.
                if ended?.success() {
                    return Ok(Start::Ended(0));
                }
                let why = child.last_error().await;
                return Err(has_not_arrived(why.as_deref().unwrap_or(CUT)));
            }
            () = cut => Some(Err(has_not_arrived(CUT))),
            status = signals.peek() => Some(Ok(Start::Ended(status))),
        };
        if let Some(end) = interrupted {
            forwards.abort();
            if !self.is_here_after_all(child).await {
                return end;
            }
        }
        self.runtime_folder.wake()?;
        self.take_control(child).await;
        Ok(Start::Continued)
    }

    /// Whether the machine was here when the connection was cut. Otherwise its process ends.
    async fn is_here_after_all(&self, child: &mut Child) -> bool {
        let control = self.runtime_folder.waking();
        tokio::select! {
            () = machine_client::until_ready(&control) => return true,
            _ = child.end() => return false,
            () = sleep(KILL_TIMEOUT) => {}
        }
        // It waits for another connection.
        child.terminate();
        if timeout(KILL_TIMEOUT, child.end()).await.is_err() {
            child.kill();
        }
        false
    }

    /// Takes the place of the pod that ran the machine, when it has ended.
    pub(super) async fn succeed(&self) {
        let start = Instant::now();
        let mut warned = false;
        let taken = loop {
            let plan = self.plan.clone();
            let prepare = move || SuspendFolder::prepare(&plan, Path::new("/"));
            match run_in_thread("suspend", prepare).await {
                Err(error) if Status::of(&error) == Status::State => {}
                other => break other,
            }
            if !warned && start.elapsed() > OTHER_POD_TIMEOUT {
                warned = true;
                let app = self.plan.name();
                tracing::warn!(
                    "the other pod has not ended yet: until then, {app} can neither be suspended \
                     nor move"
                );
            }
            sleep(LOCK_INTERVAL).await;
        };
        if let Err(error) = taken.and_then(|folder| self.keep(folder)) {
            let app = self.plan.name();
            tracing::warn!("{app} can neither be suspended nor move again: {error:#}");
        }
    }
}

const CUT: &str = "the connection was cut";

fn has_not_arrived(why: &str) -> anyhow::Error {
    let sentence = format!(
        "the machine of the other pod has not arrived: {why}. It goes on there, or is saved on the \
         volume: start this pod again"
    );
    Failure::new(Status::State, sentence)
}

#[cfg(test)]
mod test {
    use std::future::pending;
    use std::net::Ipv4Addr;

    use super::*;

    fn address(last: usize) -> IpAddr {
        Ipv4Addr::new(10, 0, 0, u8::try_from(last).unwrap()).into()
    }

    #[tokio::test]
    async fn one_address_cannot_push_out_the_handshake_of_another() {
        let mut handshakes = Handshakes::default();
        let mut begin = |last| {
            handshakes.begin(address(last), pending());
            let of = |last| {
                handshakes.0.iter().filter(|it| it.0 == PeerNetwork::of(address(last))).count()
            };
            (of(1), of(2), handshakes.0.len())
        };
        assert_eq!(begin(1), (1, 0, 1));
        for _ in 0..50 {
            begin(2);
        }
        assert_eq!(begin(2), (1, MAX_OF_ONE, 1 + MAX_OF_ONE));
        for last in 0..50 {
            assert!(begin(100 + last).2 <= MAX_HANDSHAKES);
        }
    }
}
