//! A two-way byte stream that neither blocks nor loses data: the writer keeps bytes for which there
//! is no room, the sender keeps bytes that the reader does not want yet.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, Timespec, open};
use rustix::net::{RecvFlags, recv};
use rustix::termios::isatty;
use vmm_sys_util::epoll::EventSet;

use super::clipboard::{Hub, Port};
use super::stream::{self, Escape, ListeningSocket, Stream};

/// A pipe or terminal that polls as writable has room for at least this many bytes.
const CHUNK: usize = 4096;

pub struct Channel(Side);

enum Side {
    Nowhere,
    Stdio {
        escape: Escape,
        /// Input that the guest has not read.
        typed: Vec<u8>,
        output: OwnedFd,
    },
    File(OwnedFd),
    Socket(ListeningSocket, Option<Client>),
    Clipboard(Port),
}

struct Client {
    stream: UnixStream,
    /// It has shut down its sending side.
    ended: bool,
    /// It has disconnected. The socket may still hold data that it sent.
    gone: bool,
}

impl Channel {
    /// `goes_on` is that of `stream::output_file`.
    pub fn open(stream: &Stream, clipboard: &Arc<Hub>, goes_on: bool) -> anyhow::Result<Self> {
        Ok(Self(match stream {
            Stream::None => Side::Nowhere,
            Stream::Stdio => {
                stream::make_raw();
                let (escape, typed) = Default::default();
                Side::Stdio { escape, typed, output: stdout().context("standard output")? }
            }
            Stream::File(path) => {
                let file = stream::output_file(path, goes_on);
                Side::File(file.with_context(|| format!("file {}", path.display()))?.into())
            }
            Stream::Socket(path) => Side::Socket(ListeningSocket::new(path)?, None),
            Stream::Clipboard => Side::Clipboard(clipboard.port()?),
        }))
    }

    /// A program in the guest has opened or closed the port.
    pub fn guest_listens(&self, listens: bool) {
        if let Side::Clipboard(port) = &self.0 {
            port.set_open(listens);
        }
    }

    /// False only for a socket without a client.
    pub fn is_open(&self) -> bool {
        !matches!(&self.0, Side::Socket(_, None))
    }

    /// The events to poll for: input if `input`, room for output if `room`, and always new and
    /// leaving clients.
    pub fn poll_events(&self, input: bool, room: bool) -> Vec<(RawFd, EventSet)> {
        let output = if room { EventSet::OUT } else { EventSet::empty() };
        let flags = |input: bool| output | if input { EventSet::IN } else { EventSet::empty() };
        let on = |fd: &dyn AsRawFd, what: EventSet| (fd.as_raw_fd(), what);
        match &self.0 {
            Side::Nowhere => Vec::new(),
            Side::Stdio { escape, output, .. } => {
                let stdin = rustix::stdio::stdin();
                let input = (input && !escape.ended).then(|| on(&stdin, EventSet::IN));
                input.into_iter().chain(room.then(|| on(output, EventSet::OUT))).collect()
            }
            Side::File(file) => room.then(|| on(file, EventSet::OUT)).into_iter().collect(),
            Side::Clipboard(port) => input.then(|| on(port, EventSet::IN)).into_iter().collect(),
            Side::Socket(bound, None) => vec![on(&bound.listener, EventSet::IN)],
            Side::Socket(_, Some(client)) => {
                let flags = flags(input && !client.ended);
                // Polling a client that is gone would report EPOLLHUP again and again.
                let silent = flags.is_empty() && client.gone;
                (!silent).then(|| on(&client.stream, flags)).into_iter().collect()
            }
        }
    }

    /// Accepts a client, or notices that it left. A client that left stays until its data is read,
    /// unless the guest does not listen (`listens`).
    pub fn accept_or_drop(&mut self, listens: bool) {
        let Side::Socket(bound, place) = &mut self.0 else { return };
        let Some(client) = place else {
            match bound.listener.accept() {
                Ok((stream, _)) => {
                    let client = Client { stream, ended: false, gone: false };
                    *place = client.stream.set_nonblocking(true).is_ok().then_some(client);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // No file descriptor is free. The listener stays ready, so do not spin.
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
            return;
        };
        client.gone = has(&client.stream, PollFlags::empty());
        let left = || {
            let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
            !client.ended && recv(&client.stream, &mut [0], flags).is_ok_and(|it| it.0 > 0)
        };
        if client.gone && !(listens && left()) {
            *place = None;
        }
    }

    /// Returns `WouldBlock` when there is no input now, and also at the end of the input.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let nothing = Err(ErrorKind::WouldBlock.into());
        match &mut self.0 {
            Side::Nowhere | Side::File(_) | Side::Socket(_, None) => nothing,
            Side::Stdio { escape, typed, .. } => {
                if typed.is_empty() && !escape.ended && has(&rustix::stdio::stdin(), PollFlags::IN)
                {
                    escape.read(&mut [0; CHUNK], typed);
                }
                let count = typed.len().min(buffer.len());
                for (to, from) in buffer.iter_mut().zip(typed.drain(..count)) {
                    *to = from;
                }
                if count == 0 { nothing } else { Ok(count) }
            }
            Side::Clipboard(port) => match port.read(buffer) {
                0 => nothing,
                count => Ok(count),
            },
            Side::Socket(_, Some(client)) if client.ended => nothing,
            Side::Socket(_, place @ Some(_)) => {
                let Some(client) = place else { return nothing };
                match client.stream.read(buffer) {
                    Ok(count) if count > 0 => return Ok(count),
                    Err(error) if is_retryable(&error) => return nothing,
                    // It may still read: only its sending side is closed.
                    Ok(_) => client.ended = true,
                    Err(_) => (client.ended, client.gone) = (true, true),
                }
                if client.gone {
                    *place = None;
                }
                nothing
            }
        }
    }

    /// Writes as many bytes as there is room for. Any error but `WouldBlock` means that the other
    /// end is gone.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Side::Nowhere => Ok(bytes.len()),
            Side::Clipboard(port) => {
                port.write(bytes);
                Ok(bytes.len())
            }
            Side::Stdio { output, .. } | Side::File(output) => {
                if !has(output, PollFlags::OUT) {
                    return Err(ErrorKind::WouldBlock.into());
                }
                let chunk = &bytes[..bytes.len().min(CHUNK)];
                Ok(rustix::io::write(&*output, chunk)?)
            }
            Side::Socket(_, None) => Err(ErrorKind::BrokenPipe.into()),
            Side::Socket(_, Some(client)) => client.stream.write(bytes),
        }
    }
}

/// Whether the operation may succeed later: it would have blocked, or was interrupted.
pub fn is_retryable(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Also true for an error and a hang-up.
fn has(fd: &impl AsFd, what: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd, what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}

/// Standard output. A terminal that was stopped with Ctrl-S blocks its writers. To write without
/// blocking, it is opened anew with `O_NONBLOCK`: setting the flag on the inherited descriptor
/// would affect the other processes that share it.
fn stdout() -> io::Result<OwnedFd> {
    let stdout = rustix::stdio::stdout();
    if isatty(stdout) {
        let flags = OFlags::WRONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        if let Ok(own) = open("/proc/self/fd/1", flags, Mode::empty()) {
            return Ok(own);
        }
    }
    stdout.try_clone_to_owned()
}
