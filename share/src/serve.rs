//! The loop of a connection, over any stream socket.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{RecvFlags, SendFlags, recv, send};

use crate::connection::Connection;
use crate::lobby::Place;
use crate::server::Server;

/// The time for a login, and for the rest of a frame or its answer.
const LOGIN: Duration = Duration::from_secs(30);
const POLL: Timespec = Timespec { tv_sec: 30, tv_nsec: 0 };
const REST: Duration = Duration::from_secs(60);
/// A stream that delivers nothing is looked at again after this time, whether it may stay.
const TICK: Duration = Duration::from_secs(1);
/// The time after which a lock that others have is tried again.
const RETRY: Timespec = Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
/// NetBIOS session messages: data, and keep-alive.
const DATA: u8 = 0;
const KEEP_ALIVE: u8 = 0x85;

/// Serves a client until it ends the connection, breaks a rule or gives its place to another.
pub fn serve(server: &Arc<Server>, place: Place) {
    let stream = place.stream().clone();
    // Streams without timeouts only hold up their own thread.
    let _ = set_socket_timeout(&*stream, Timeout::Recv, Some(TICK));
    let _ = set_socket_timeout(&*stream, Timeout::Send, Some(REST));
    let mut connection = Connection::new(server, Some(place));
    if let Err(error) = run(&mut connection, stream.as_fd()) {
        tracing::debug!("shared folder: connection ended: {error}");
    }
}

fn run(connection: &mut Connection, stream: BorrowedFd<'_>) -> Result<(), Errno> {
    let (mut frame, mut login) = (Vec::new(), Instant::now() + LOGIN);
    loop {
        if connection.logged_in() {
            // After a logoff, another login may follow.
            login = Instant::now() + LOGIN;
            connection.rest();
        }
        let (readable, changed) = wait(connection, stream)?;
        if changed {
            for answer in connection.take_ready() {
                write_frame(stream, &answer)?;
            }
        }
        // Empty frames do not prolong it.
        let until = if connection.logged_in() { Instant::now() + REST } else { login };
        if Instant::now() > until {
            return Err(Errno::TIMEDOUT);
        }
        if !readable {
            continue;
        }
        if !read_frame(stream, connection.max_frame(), &mut frame, until)? {
            return Ok(());
        }
        if frame.is_empty() {
            continue;
        }
        let Ok(answer) = connection.receive(&mut frame) else { return Ok(()) };
        if !answer.is_empty() {
            write_frame(stream, &answer)?;
        }
        for answer in connection.take_ready() {
            write_frame(stream, &answer)?;
        }
    }
}

/// Waits for the client, or for a change of a watched directory.
fn wait(connection: &Connection, stream: BorrowedFd<'_>) -> Result<(bool, bool), Errno> {
    let timeout = match connection.logged_in() {
        true => connection.waits_for_locks().then_some(&RETRY),
        false => Some(&POLL),
    };
    let mut list = vec![PollFd::from_borrowed_fd(stream, PollFlags::IN)];
    list.extend(connection.changes().map(|it| PollFd::from_borrowed_fd(it, PollFlags::IN)));
    loop {
        match poll(&mut list, timeout) {
            Ok(0) if connection.logged_in() => return Ok((false, true)),
            Ok(0) => return Err(Errno::TIMEDOUT),
            Ok(_) => {
                let ready = |at: usize| list.get(at).is_some_and(|it| !it.revents().is_empty());
                return Ok((ready(0), ready(1)));
            }
            Err(Errno::INTR) => (),
            Err(error) => return Err(error),
        }
    }
}

/// Reads a frame. Returns false at the end, and an empty frame for a keep-alive.
fn read_frame(
    stream: BorrowedFd<'_>,
    limit: usize,
    frame: &mut Vec<u8>,
    until: Instant,
) -> Result<bool, Errno> {
    let mut head = [0; 4];
    if !read_exact(stream, &mut head, until)? {
        return Ok(false);
    }
    let length = usize::try_from(u32::from_be_bytes([0, head[1], head[2], head[3]]));
    let length = length.map_err(|_| Errno::MSGSIZE)?;
    if length > limit || !matches!(head[0], DATA | KEEP_ALIVE) {
        return Err(Errno::MSGSIZE);
    }
    frame.clear();
    frame.resize(length, 0);
    if !read_exact(stream, frame, until)? {
        return Ok(false);
    }
    if head[0] == KEEP_ALIVE {
        frame.clear();
    }
    Ok(true)
}

fn read_exact(
    stream: BorrowedFd<'_>,
    mut buffer: &mut [u8],
    until: Instant,
) -> Result<bool, Errno> {
    while !buffer.is_empty() {
        // A byte now and then does not prolong it.
        if Instant::now() > until {
            return Err(Errno::TIMEDOUT);
        }
        match recv(stream, &mut *buffer, RecvFlags::WAITALL) {
            Ok((_, 0)) => return Ok(false),
            Ok((_, count)) => buffer = &mut buffer[count..],
            Err(Errno::INTR | Errno::AGAIN) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

fn write_frame(stream: BorrowedFd<'_>, frame: &[u8]) -> Result<(), Errno> {
    let length = u32::try_from(frame.len()).map_err(|_| Errno::MSGSIZE)?;
    write_all(stream, &length.to_be_bytes(), SendFlags::MORE)?;
    write_all(stream, frame, SendFlags::empty())
}

fn write_all(stream: BorrowedFd<'_>, mut bytes: &[u8], flags: SendFlags) -> Result<(), Errno> {
    while !bytes.is_empty() {
        match send(stream, bytes, flags | SendFlags::NOSIGNAL) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => (),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
