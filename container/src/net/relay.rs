//! The DNS relay. It forwards the guest's questions to the pod's resolvers, each from a random port
//! and with a random id, and returns only answers that match the question.

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

use super::dns::{self, LocalNames, Query, ResponseCode, Transport};
use super::hosts::Hosts;
use super::resolv::{File, Resolv};

/// Further questions are dropped while this many wait for an answer.
const MAX_PENDING: usize = 256;
/// The maximum time for a server while there is another one. Windows repeats a question after one
/// second, and gives up after ten.
const SERVER_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum size of an answer by UDP, in bytes.
const MAX_DATAGRAM: usize = 65535;

pub struct Relay {
    local: LocalNames,
    resolv: File,
    hosts: File<Hosts>,
    pending: Semaphore,
    /// The server that answered last, which is asked first. The others may be dead.
    last: AtomicUsize,
}

impl Relay {
    /// A relay to the resolvers in `resolv.conf` of a folder, which is `/etc`. It also answers with
    /// names of `hosts` in it.
    pub fn new(local: LocalNames, folder: &Path) -> Self {
        let resolv = File::new(folder.join("resolv.conf"), Resolv::read);
        let hosts = File::new(folder.join("hosts"), Hosts::read);
        let pending = Semaphore::new(MAX_PENDING);
        Self { local, resolv, hosts, pending, last: AtomicUsize::new(0) }
    }

    /// The current resolvers of the pod.
    pub fn resolv(&self) -> Arc<Resolv> {
        self.resolv.now()
    }

    /// The guest's host name.
    pub fn host(&self) -> &str {
        &self.local.host
    }

    /// The answer to a message of the guest, for the same transport. Nothing if the message gets
    /// none.
    pub async fn answer(&self, message: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let query = match Query::read(message) {
            Ok(query) => query,
            Err(refusal) => return refusal,
        };
        if let Some(answer) = self.local.answer(&query, &self.hosts.now()) {
            return Some(answer);
        }
        let _permit = self.pending.try_acquire().ok()?;
        let answer = self.search(&query, transport).await;
        Some(query.fit(answer.unwrap_or_else(|| query.refuse(ResponseCode::ServFail)), transport))
    }

    /// Asks for one candidate name after the other until one has an address. If none has, returns
    /// the answer for the original name.
    async fn search(&self, query: &Query<'_>, transport: Transport) -> Option<Vec<u8>> {
        let resolv = self.resolv.now();
        let mut plain = None;
        for name in dns::candidates(query, &resolv) {
            let name = name.as_deref();
            // With a search domain, the name may be too long.
            let Some(sent) = query.forward(id(), name) else { continue };
            let Some(answer) = self.ask(&resolv, &sent, transport).await else { continue };
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

    /// Asks one server after the other. An error response counts only if no server has an answer.
    async fn ask(&self, resolv: &Resolv, sent: &[u8], transport: Transport) -> Option<Vec<u8>> {
        let count = resolv.servers.len();
        let limit = if count > 1 { resolv.timeout.min(SERVER_TIMEOUT) } else { resolv.timeout };
        let first = self.last.load(Ordering::Relaxed);
        let mut failed = None;
        for turn in 0..count * usize::from(resolv.attempts) {
            let index = first.wrapping_add(turn) % count;
            let server = SocketAddr::new(resolv.servers[index], dns::PORT);
            let Ok(Ok(answer)) = timeout(limit, exchange(server, sent, transport)).await else {
                continue;
            };
            match dns::response_code(&answer) {
                ResponseCode::NoError | ResponseCode::NxDomain => {
                    self.last.store(index, Ordering::Relaxed);
                    return Some(answer);
                }
                _ => failed = Some(answer),
            }
            // A server that has failed is not asked twice.
            if turn + 1 >= count {
                break;
            }
        }
        failed
    }
}

fn id() -> [u8; 2] {
    let mut id = [0; 2];
    // Without flags this blocks until the kernel has random numbers, and does not fail.
    rustix::rand::getrandom(&mut id, rustix::rand::GetRandomFlags::empty()).ok();
    id
}

/// Asks a server by the guest's transport. A server without TCP is asked by UDP instead.
async fn exchange(server: SocketAddr, sent: &[u8], transport: Transport) -> io::Result<Vec<u8>> {
    match transport {
        Transport::Udp => by_udp(server, sent).await,
        Transport::Tcp => match by_tcp(server, sent).await {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                by_udp(server, sent).await
            }
            done => done,
        },
    }
}

/// Asks from a random port of the kernel's choice. The socket is connected, so that it receives
/// from this server only.
async fn by_udp(server: SocketAddr, sent: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr = match server {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind(SocketAddr::new(any, 0)).await?;
    socket.connect(server).await?;
    socket.send(sent).await?;
    let mut received = vec![0; MAX_DATAGRAM];
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
        Err(io::Error::new(io::ErrorKind::InvalidData, "the answer is to another question"))
    }
}

/// Reads a message with a length prefix (RFC 1035, 4.2.2).
pub async fn read_framed(stream: &mut (impl AsyncReadExt + Unpin)) -> io::Result<Vec<u8>> {
    let length = stream.read_u16().await?;
    let mut message = vec![0; length.into()];
    stream.read_exact(&mut message).await?;
    Ok(message)
}

/// Writes a message with a length prefix. Fails if it is longer than 65535 bytes.
pub async fn write_framed(
    stream: &mut (impl AsyncWriteExt + Unpin),
    message: &[u8],
) -> io::Result<()> {
    let length = u16::try_from(message.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes(), message].concat()).await
}
