//! The relay: asks the pod's resolvers what the guest asks, each question from a port and with an
//! id that nobody can guess, and gives back only what answers it.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::dns::{self, Code, Local, Query, Way};
use super::hosts::Hosts;
use super::resolv::{File, Resolv};

/// Questions that wait for an answer at a time; more are not heard.
const WAITING: usize = 256;
/// Windows asks again after a second, and gives up after ten: no server has longer than this while
/// there is another.
const PATIENCE: Duration = Duration::from_secs(2);
/// The longest datagram with an answer.
const DATAGRAM: usize = 65535;

/// What the guest's name server is.
pub struct Relay {
    local: Local,
    resolv: File,
    hosts: File<Hosts>,
    waiting: Semaphore,
    /// The server that answered last: the others may be dead.
    last: AtomicUsize,
}

impl Relay {
    /// A relay to those that the files in this folder name: `/etc`.
    #[must_use]
    pub fn new(local: Local, folder: &Path) -> Self {
        let resolv = File::new(folder.join("resolv.conf"), Resolv::read);
        let hosts = File::new(folder.join("hosts"), Hosts::read);
        let waiting = Semaphore::new(WAITING);
        Self { local, resolv, hosts, waiting, last: AtomicUsize::new(0) }
    }

    /// What the pod's resolvers are now.
    pub fn resolv(&self) -> Arc<Resolv> {
        self.resolv.now()
    }

    /// What the guest is called.
    pub fn host(&self) -> &str {
        &self.local.host
    }

    /// The answer to a message of the guest, which came this way and goes back on it.
    pub async fn answer(&self, message: &[u8], way: Way) -> Option<Vec<u8>> {
        let query = match Query::read(message) {
            Ok(query) => query,
            Err(refusal) => return refusal,
        };
        if let Some(answer) = self.local.answer(&query, &self.hosts.now()) {
            return Some(answer);
        }
        let _place = self.waiting.try_acquire().ok()?;
        let answer = self.search(&query, way).await;
        Some(query.fit(answer.unwrap_or_else(|| query.refuse(Code::Failed)), way))
    }

    /// Asks for one name after the other until there is an address. If there is none, what counts
    /// is what was said about the name as it came.
    async fn search(&self, query: &Query<'_>, way: Way) -> Option<Vec<u8>> {
        let resolv = self.resolv.now();
        let mut plain = None;
        for name in dns::candidates(query, &resolv) {
            let name = name.as_deref();
            // A name that became too long is none.
            let Some(sent) = query.forward(id(), name) else { continue };
            let Some(answer) = self.ask(&resolv, &sent, way).await else { continue };
            let positive = dns::is_positive(&answer);
            let answer = dns::rename(query, answer, name);
            match answer {
                Some(answer) if positive => return Some(answer),
                Some(answer) if name.is_none() => plain = Some(answer),
                _ => {}
            }
        }
        plain
    }

    /// Asks one server after the other. One that could not tell is believed when all have failed.
    async fn ask(&self, resolv: &Resolv, sent: &[u8], way: Way) -> Option<Vec<u8>> {
        let count = resolv.servers.len();
        let patience = if count > 1 { resolv.timeout.min(PATIENCE) } else { resolv.timeout };
        let first = self.last.load(Ordering::Relaxed);
        let mut unsure = None;
        for turn in 0..count * usize::from(resolv.attempts) {
            let index = first.wrapping_add(turn) % count;
            let server = SocketAddr::new(resolv.servers[index], dns::PORT);
            let Ok(Ok(answer)) = timeout(patience, exchange(server, sent, way)).await else {
                continue;
            };
            match dns::code(&answer) {
                Code::Fine | Code::NoName => {
                    self.last.store(index, Ordering::Relaxed);
                    return Some(answer);
                }
                _ => unsure = Some(answer),
            }
            // Each says once that it does not know.
            if turn + 1 >= count {
                break;
            }
        }
        unsure
    }
}

/// A number that nobody can guess.
fn id() -> [u8; 2] {
    let mut id = [0; 2];
    // A kernel that has no random numbers yet lets us wait: an error is for other flags.
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()).ok();
    id
}

/// Asks a server, on the way that the guest came. Who has no TCP is asked by UDP all the same.
async fn exchange(server: SocketAddr, sent: &[u8], way: Way) -> io::Result<Vec<u8>> {
    match way {
        Way::Datagram => by_udp(server, sent).await,
        Way::Stream => match by_tcp(server, sent).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                by_udp(server, sent).await
            }
            done => done,
        },
    }
}

/// From a port that the kernel chooses at random, and heard only from whom was asked.
async fn by_udp(server: SocketAddr, sent: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(server).await?;
    socket.send(sent).await?;
    let mut received = vec![0; DATAGRAM];
    loop {
        let length = socket.recv(&mut received).await?;
        if dns::is_answer(sent, &received[..length]) {
            received.truncate(length);
            return Ok(received);
        }
    }
}

async fn by_tcp(server: SocketAddr, sent: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    write_framed(&mut stream, sent).await?;
    let received = read_framed(&mut stream).await?;
    if dns::is_answer(sent, &received) {
        Ok(received)
    } else {
        Err(io::Error::new(io::ErrorKind::InvalidData, "an answer to another question"))
    }
}

/// Reads a message with its length before it (RFC 1035, 4.2.2).
///
/// # Errors
///
/// When the stream ends or breaks.
pub async fn read_framed(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Writes a message with its length before it.
///
/// # Errors
///
/// When the stream breaks, or the message is too long for one.
pub async fn write_framed(
    stream: &mut (impl AsyncWriteExt + Unpin),
    message: &[u8],
) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}
