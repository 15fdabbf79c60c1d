//! Networks that were open before this process was: taps and sockets, told apart.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use anyhow::{Context, bail, ensure};
use rustix::fs::FileType;
use rustix::net::SocketType;

use super::tap::duplicate;

/// What was inherited.
pub enum Inherited {
    /// Queues of a tap or macvtap.
    Taps(Vec<OwnedFd>),
    /// A connected socket.
    Stream(UnixStream),
}

/// Takes what was inherited, and tells what it is.
///
/// # Errors
///
/// When a number is none, or what it stands for is neither tap nor stream.
pub fn inherit(list: &[i32]) -> anyhow::Result<Inherited> {
    let mut taps = Vec::new();
    for number in list {
        let fd = duplicate(*number)?;
        let stat = rustix::fs::fstat(&fd).with_context(|| format!("file descriptor {number}"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => taps.push(fd),
            FileType::Socket => {
                let kind = rustix::net::sockopt::socket_type(&fd)?;
                ensure!(
                    kind == SocketType::STREAM,
                    "file descriptor {number} is a socket, but no stream: passt has a stream"
                );
                ensure!(list.len() == 1, "a socket carries one pair of queues: give it alone");
                let stream = UnixStream::from(fd);
                let peer = stream.peer_addr();
                peer.with_context(|| format!("the socket {number} is not connected"))?;
                return Ok(Inherited::Stream(stream));
            }
            _ => bail!("file descriptor {number} is neither a tap nor a socket"),
        }
    }
    Ok(Inherited::Taps(taps))
}
