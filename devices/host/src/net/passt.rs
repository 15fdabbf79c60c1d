//! A Unix stream socket with the protocol of QEMU's `-netdev stream` and passt(1): each frame
//! follows its length, a big-endian number of four bytes. The protocol has no `virtio_net_hdr`, so
//! there are no offloads: the header is removed and added here.
//!
//! Threats: the peer may send any bytes at any pace, or none, and may not read. An invalid length
//! ends the connection, because the start of the next frame is unknown. Input is buffered in a
//! fixed size. At most one partly sent frame is kept. A peer that does not read for a second loses
//! frames, as on any cable, and the guest no longer waits for it.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use anyhow::ensure;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::arrivals::Arrivals;
use super::link::Link;
use super::tap::Vectors;
use super::{
    Backend, GuestBytes, HEADER_LENGTH, MAX_FRAME, MIN_FRAME, Offloads, Options, Port,
    TransferError, Wait, read_pieces, write_pieces,
};
use crate::memory::{Memory, NoMemory, Piece};

/// Bytes of the length before each frame.
const LENGTH: usize = 4;
/// Bytes of the input buffer, which has room for the longest frame.
const BUFFER: usize = 128 << 10;
const RECONNECT_INTERVAL: Duration = Duration::from_secs(1);
/// If the peer has not read for this long, frames for it are dropped.
const SEND_TIMEOUT: Duration = Duration::from_secs(1);

pub struct Passt {
    link: Arc<Link>,
    port: Mutex<Option<Stream>>,
}

impl Passt {
    /// Connects to the peer that listens at `path`, now or when it starts later.
    pub fn new(path: &Path, options: Options) -> anyhow::Result<Self> {
        SocketAddrUnix::new(path)
            .map_err(|_| anyhow::anyhow!("{} is too long for a socket's path", path.display()))?;
        Self::with(Some(path.to_owned()), None, options)
    }

    /// Uses a connected socket. If it disconnects, the link stays down.
    pub fn from_stream(socket: UnixStream, options: Options) -> anyhow::Result<Self> {
        socket.set_nonblocking(true)?;
        Self::with(None, Some(socket), options)
    }

    fn with(
        path: Option<PathBuf>,
        socket: Option<UnixStream>,
        options: Options,
    ) -> anyhow::Result<Self> {
        ensure!(
            options.pairs == 1,
            "a socket carries one pair of queues, not {}: use a tap, or a single pair",
            options.pairs
        );
        let socket = socket.map(Arc::new);
        let peer = Arc::new(Peer::default());
        peer.set(socket.as_ref());
        let link = Arc::new(Link::with_arrivals(options.mtu, peer.clone()));
        link.set_connected(socket.is_some());
        let mut port = Stream {
            path,
            link: link.clone(),
            socket,
            peer,
            connection: 0,
            reconnect_at: None,
            input: vec![0; BUFFER],
            filled: 0..0,
            output: Vec::new(),
            stuck_since: None,
            vectors: Vectors::default(),
            warned: false,
        };
        port.connect();
        Ok(Self { link, port: Mutex::new(Some(port)) })
    }
}

impl Backend for Passt {
    fn offloads(&self) -> Offloads {
        Offloads::default()
    }
    fn set_offloads(&self, _: Offloads) {}
    fn attach(&self, _: usize, _: bool) {}
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
    fn ports(&self) -> Vec<Box<dyn Port>> {
        let port = self.port.lock().expect("no network panicked").take();
        port.into_iter().map(|port| Box::new(port) as Box<dyn Port>).collect()
    }
}

/// The socket of the connection. Only [`Stream`] keeps it open.
#[derive(Default)]
struct Peer(Mutex<Weak<UnixStream>>);

impl Peer {
    fn set(&self, socket: Option<&Arc<UnixStream>>) {
        let socket = socket.map(Arc::downgrade).unwrap_or_default();
        *self.0.lock().expect("no network panicked") = socket;
    }
}

impl Arrivals for Peer {
    /// The peer sends what is for this guest.
    fn filter(&self, _: bool) -> io::Result<()> {
        Ok(())
    }

    fn files(&self) -> io::Result<Vec<OwnedFd>> {
        let socket = self.0.lock().expect("no network panicked").upgrade();
        socket.map(|socket| socket.try_clone().map(OwnedFd::from)).into_iter().collect()
    }
}

/// The connection to the peer, or the attempts to connect.
struct Stream {
    /// `None` for an inherited socket.
    path: Option<PathBuf>,
    link: Arc<Link>,
    socket: Option<Arc<UnixStream>>,
    peer: Arc<Peer>,
    /// The number of the connection, for [`Wait`].
    connection: u32,
    reconnect_at: Option<Instant>,
    input: Vec<u8>,
    /// The received bytes of `input` that are not delivered yet.
    filled: std::ops::Range<usize>,
    /// The rest of a frame that is partly sent.
    output: Vec<u8>,
    /// The time since which the peer does not read.
    stuck_since: Option<Instant>,
    vectors: Vectors,
    /// Whether the missing peer has been logged.
    warned: bool,
}

/// Connects without blocking, also when the listener accepts no clients.
fn connect(path: &Path) -> io::Result<UnixStream> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

impl Stream {
    /// Connects to the peer if there is no connection and the time of the next attempt has come.
    fn connect(&mut self) {
        let Some(path) = self.path.as_deref().filter(|_| self.socket.is_none()) else { return };
        let now = Instant::now();
        if self.reconnect_at.is_some_and(|time| now < time) {
            return;
        }
        self.reconnect_at = Some(now + RECONNECT_INTERVAL);
        match connect(path) {
            Ok(socket) => {
                tracing::info!("the user-mode network at {} is connected", path.display());
                let socket = Arc::new(socket);
                self.peer.set(Some(&socket));
                self.socket = Some(socket);
                self.connection = self.connection.wrapping_add(1);
                self.warned = false;
                self.link.set_connected(true);
            }
            Err(error) if !self.warned => {
                self.warned = true;
                tracing::warn!(
                    "the user-mode network at {}: {error}: the link is down until it is available",
                    path.display()
                );
            }
            Err(_) => {}
        }
    }

    fn disconnect(&mut self, why: &str) {
        tracing::warn!("passt: {why}: the link is down");
        self.socket = None;
        // The delay keeps us from being busy with a peer that hangs up at once, again and again.
        self.reconnect_at = Some(Instant::now() + RECONNECT_INTERVAL);
        self.filled = 0..0;
        self.output.clear();
        self.stuck_since = None;
        self.link.set_connected(false);
    }

    /// The position of the next complete frame in `input`. An invalid length is an error.
    fn frame(&self) -> Result<Option<std::ops::Range<usize>>, u32> {
        let waiting = &self.input[self.filled.clone()];
        let Some((length, rest)) = waiting.split_first_chunk::<LENGTH>() else { return Ok(None) };
        let number = u32::from_be_bytes(*length);
        let length = usize::try_from(number).unwrap_or(usize::MAX);
        if !(MIN_FRAME..=MAX_FRAME).contains(&length) {
            return Err(number);
        }
        let start = self.filled.start + LENGTH;
        Ok((rest.len() >= length).then(|| start..start + length))
    }

    /// Receives available bytes; false without any.
    fn fill(&mut self) -> bool {
        let Some(socket) = &self.socket else { return false };
        // An incomplete frame moves to the front, where the buffer has room for all of it.
        self.input.copy_within(self.filled.clone(), 0);
        self.filled = 0..self.filled.len();
        let room = &mut self.input[self.filled.end..];
        match rustix::net::recv(socket, room, RecvFlags::DONTWAIT) {
            Ok((_, 0)) => self.disconnect("the peer hung up"),
            Ok((_, count)) => {
                self.filled.end += count;
                return true;
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
            Err(error) => self.disconnect(&error.to_string()),
        }
        false
    }

    /// Sends the rest of a partly sent frame; true when none remains.
    fn flush(&mut self) -> bool {
        while let (Some(socket), false) = (&self.socket, self.output.is_empty()) {
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            match rustix::net::send(socket, &self.output, flags) {
                Ok(count) => {
                    self.output.drain(..count);
                    self.stuck_since = None;
                }
                Err(rustix::io::Errno::AGAIN) => return false,
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => self.disconnect(&error.to_string()),
            }
        }
        true
    }

    /// The socket is full. Until `SEND_TIMEOUT` the guest has to wait; then its frames are dropped.
    fn full(&mut self) -> Result<(), TransferError> {
        let since = *self.stuck_since.get_or_insert_with(Instant::now);
        if since.elapsed() < SEND_TIMEOUT { Err(TransferError::WouldBlock) } else { Ok(()) }
    }

    /// Sends a frame of `length` bytes, or its beginning; the rest goes to `output`.
    fn start(
        &mut self,
        memory: &Memory,
        from: &[Piece],
        length: usize,
    ) -> Result<(), TransferError> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let prefix = u32::try_from(length).map_err(|_| TransferError::Refused)?.to_be_bytes();
        let frame = GuestBytes { memory, pieces: from, skip: HEADER_LENGTH };
        let sent = self.vectors.send(socket.as_fd(), &prefix, frame);
        match sent.map_err(|NoMemory| TransferError::Refused)? {
            Ok(count) => {
                self.stuck_since = None;
                if count < LENGTH + length {
                    self.output.extend(prefix.iter().skip(count));
                    let (kept, skip) = (self.output.len(), count.saturating_sub(LENGTH));
                    self.output.resize(kept + length - skip, 0);
                    // The beginning is sent, so the rest must follow, even if its memory is gone.
                    read_pieces(memory, from, HEADER_LENGTH + skip, &mut self.output[kept..]).ok();
                }
                Ok(())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.full(),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                Err(TransferError::WouldBlock)
            }
            Err(error) => {
                self.disconnect(&error.to_string());
                Ok(())
            }
        }
    }
}

impl Port for Stream {
    fn receive(
        &mut self,
        memory: &Memory,
        to: &[Piece],
        rest: &mut [u8],
    ) -> Result<usize, TransferError> {
        let frame = loop {
            match self.frame() {
                Ok(Some(frame)) => break frame,
                Ok(None) if self.fill() => {}
                Ok(None) => return Err(TransferError::WouldBlock),
                Err(length) => {
                    self.disconnect(&format!("a frame of {length} bytes arrived"));
                    return Err(TransferError::WouldBlock);
                }
            }
        };
        self.filled.start = frame.end;
        let frame = &self.input[frame];
        let mut into = |at: usize, data: &[u8]| {
            let done =
                write_pieces(memory, to, at, data).map_err(|NoMemory| TransferError::Refused)?;
            let room = rest.iter_mut().skip((at + done).saturating_sub(super::length(to)));
            room.zip(&data[done..]).for_each(|(to, from)| *to = *from);
            Ok(())
        };
        into(0, &[0; HEADER_LENGTH])?;
        into(HEADER_LENGTH, frame)?;
        Ok(HEADER_LENGTH + frame.len())
    }

    fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), TransferError> {
        let length =
            super::length(from).checked_sub(HEADER_LENGTH).ok_or(TransferError::Refused)?;
        let mut header = [0; HEADER_LENGTH];
        read_pieces(memory, from, 0, &mut header).map_err(|NoMemory| TransferError::Refused)?;
        // No offloads are negotiated, so a header with NEEDS_CSUM or a GSO type is invalid.
        if !(MIN_FRAME..=MAX_FRAME).contains(&length) || header[0] & 1 != 0 || header[1] != 0 {
            return Err(TransferError::Refused);
        }
        if self.flush() { self.start(memory, from, length) } else { self.full() }
    }

    fn wait(&mut self) -> Wait<'_> {
        self.connect();
        let flushed = self.flush();
        if !flushed {
            self.full().ok();
        }
        let give_up = self.stuck_since.map(|since| since + SEND_TIMEOUT);
        let give_up = give_up.filter(|it| *it > Instant::now());
        let reconnect = self.reconnect_at.filter(|_| self.socket.is_none() && self.path.is_some());
        Wait {
            fd: self.socket.as_ref().map(AsFd::as_fd),
            connection: self.connection,
            full: self.stuck_since.is_some(),
            due: give_up.or(reconnect),
        }
    }
}

#[cfg(test)]
mod test;
