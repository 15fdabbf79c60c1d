//! A byte stream both ways that makes nobody wait and loses nothing: what has no room stays with
//! who writes, what is not wanted stays with who sends.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{Mode, OFlags, Timespec, open};
use rustix::net::{RecvFlags, recv};
use rustix::termios::isatty;
use vmm_sys_util::epoll::EventSet;

use super::stream::{self, Bound, Escape, Stream};

/// What a pipe or a terminal that has any room has room for.
const PIECE: usize = 4096;

/// The host's side of a stream.
pub struct Channel(Side);

enum Side {
    Nowhere,
    Stdio {
        escape: Escape,
        /// What was typed and not read.
        typed: Vec<u8>,
        output: OwnedFd,
    },
    File(OwnedFd),
    Socket(Bound, Option<Client>),
}

/// Who is connected to a socket.
struct Client {
    stream: UnixStream,
    /// It sends nothing any more.
    ended: bool,
    /// It is gone; what it sent may still be there.
    gone: bool,
}

impl Channel {
    /// Opens a stream.
    ///
    /// # Errors
    ///
    /// When the file or socket cannot be had.
    pub fn open(stream: &Stream) -> anyhow::Result<Self> {
        Ok(Self(match stream {
            Stream::None => Side::Nowhere,
            Stream::Stdio => {
                stream::make_raw();
                let (escape, typed) = Default::default();
                Side::Stdio { escape, typed, output: stdout().context("standard output")? }
            }
            Stream::File(path) => {
                // A FIFO without a reader is an error, and does not wait for one.
                let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::TRUNC;
                let flags = flags | OFlags::NONBLOCK | OFlags::CLOEXEC;
                let file = open(path, flags, Mode::from_raw_mode(0o644));
                Side::File(file.with_context(|| format!("file {}", path.display()))?)
            }
            Stream::Socket(path) => Side::Socket(Bound::new(path)?, None),
        }))
    }

    /// Whether there is somebody at the other end.
    pub fn is_open(&self) -> bool {
        !matches!(&self.0, Side::Socket(_, None))
    }

    /// What to wait for: input if it is wanted, room if that is, and always who comes and goes.
    pub fn awaits(&self, input: bool, room: bool) -> Vec<(RawFd, EventSet)> {
        let output = if room { EventSet::OUT } else { EventSet::empty() };
        let flags = |input: bool| output | if input { EventSet::IN } else { EventSet::empty() };
        let on = |fd: &dyn AsRawFd, what: EventSet| (fd.as_raw_fd(), what);
        match &self.0 {
            Side::Nowhere => Vec::new(),
            Side::Stdio { escape, output, .. } => {
                let stdin = rustix::stdio::stdin();
                let input = (input && !escape.has_ended()).then(|| on(&stdin, EventSet::IN));
                input.into_iter().chain(room.then(|| on(output, EventSet::OUT))).collect()
            }
            Side::File(file) => room.then(|| on(file, EventSet::OUT)).into_iter().collect(),
            Side::Socket(bound, None) => vec![on(bound.listener(), EventSet::IN)],
            Side::Socket(_, Some(client)) => {
                let flags = flags(input && !client.ended);
                // Who is gone says so for ever.
                let silent = flags.is_empty() && client.gone;
                (!silent).then(|| on(&client.stream, flags)).into_iter().collect()
            }
        }
    }

    /// Lets somebody in, or sees that somebody left. What one who left has sent is still read, if
    /// the guest listens.
    pub fn heed(&mut self, listens: bool) {
        let Side::Socket(bound, place) = &mut self.0 else { return };
        let Some(client) = place else {
            match bound.listener().accept() {
                Ok((stream, _)) => {
                    let client = Client { stream, ended: false, gone: false };
                    *place = client.stream.set_nonblocking(true).is_ok().then_some(client);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                // Out of file descriptors, for a while: no reason to spin.
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

    /// Reads what came in.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is nothing now, or nothing any more.
    pub fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let nothing = Err(ErrorKind::WouldBlock.into());
        match &mut self.0 {
            Side::Nowhere | Side::File(_) | Side::Socket(_, None) => nothing,
            Side::Stdio { escape, typed, .. } => {
                if typed.is_empty()
                    && !escape.has_ended()
                    && has(&rustix::stdio::stdin(), PollFlags::IN)
                {
                    escape.read(&mut [0; PIECE], typed);
                }
                let count = typed.len().min(buffer.len());
                for (to, from) in buffer.iter_mut().zip(typed.drain(..count)) {
                    *to = from;
                }
                if count == 0 { nothing } else { Ok(count) }
            }
            Side::Socket(_, Some(client)) if client.ended => nothing,
            Side::Socket(_, place @ Some(_)) => {
                let Some(client) = place else { return nothing };
                match client.stream.read(buffer) {
                    Ok(count) if count > 0 => return Ok(count),
                    Err(error) if is_later(&error) => return nothing,
                    // It may still want to hear what is said to it.
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

    /// Writes what there is room for.
    ///
    /// # Errors
    ///
    /// `WouldBlock` when there is no room now; else there is nobody any more.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &mut self.0 {
            Side::Nowhere => Ok(bytes.len()),
            Side::Stdio { output, .. } | Side::File(output) => {
                if !has(output, PollFlags::OUT) {
                    return Err(ErrorKind::WouldBlock.into());
                }
                let piece = &bytes[..bytes.len().min(PIECE)];
                Ok(rustix::io::write(&*output, piece)?)
            }
            Side::Socket(_, None) => Err(ErrorKind::BrokenPipe.into()),
            Side::Socket(_, Some(client)) => client.stream.write(bytes),
        }
    }
}

/// Whether it is for later.
pub fn is_later(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

/// Whether this, or the end, is there now.
fn has(fd: &impl AsFd, what: PollFlags) -> bool {
    let mut fds = [PollFd::new(fd, what)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut fds, Some(&now)).is_ok() && !fds[0].revents().is_empty()
}

/// Standard output. A terminal that somebody stopped with Ctrl-S makes writers wait, unless they
/// have opened it for themselves: it may be shared with others, who expect that.
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
