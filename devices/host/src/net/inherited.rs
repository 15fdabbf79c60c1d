//! Inherited file descriptors: detects whether they are taps, connected sockets or listening
//! sockets.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};

use anyhow::{Context, anyhow, bail, ensure};
use rustix::fs::FileType;
use rustix::net::{AddressFamily, SocketType, sockopt};

use super::tap::duplicate;

pub enum Inherited {
    /// Queues of a tap or macvtap.
    Taps(Vec<OwnedFd>),
    Stream(UnixStream),
}

/// Duplicates inherited file descriptors and detects their kind.
pub fn inherit(list: &[i32]) -> anyhow::Result<Inherited> {
    let mut taps = Vec::new();
    for number in list {
        let fd = duplicate(*number)?;
        let stat = rustix::fs::fstat(&fd).with_context(|| format!("file descriptor {number}"))?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::CharacterDevice => taps.push(fd),
            FileType::Socket => {
                let kind = sockopt::socket_type(&fd)?;
                ensure!(
                    kind == SocketType::STREAM,
                    "file descriptor {number} is not a stream socket, which passt needs"
                );
                ensure!(
                    list.len() == 1,
                    "a socket carries one pair of queues: write it alone, as fd:{number}"
                );
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

#[derive(Debug)]
pub enum Listening {
    Tcp(TcpListener),
    /// On a path, or on an abstract name.
    Unix(UnixListener),
}

/// Duplicates an inherited socket that listens.
pub fn listening(number: i32) -> anyhow::Result<Listening> {
    let fd = duplicate(number)?;
    let kind = sockopt::socket_type(&fd);
    let kind = kind.map_err(|_| anyhow!("file descriptor {number} is not a socket"))?;
    let listens = kind == SocketType::STREAM && sockopt::socket_acceptconn(&fd)?;
    ensure!(listens, "file descriptor {number} is a socket that does not listen");
    match sockopt::socket_domain(&fd)? {
        AddressFamily::INET | AddressFamily::INET6 => Ok(Listening::Tcp(fd.into())),
        AddressFamily::UNIX => Ok(Listening::Unix(fd.into())),
        _ => bail!("file descriptor {number} listens neither at a TCP port nor at a Unix socket"),
    }
}

#[cfg(test)]
mod test {
    use std::net::{TcpStream, UdpSocket};
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn only_a_listening_socket_is_accepted() {
        let take = |fd: &dyn AsFd| listening(fd.as_fd().as_raw_fd());
        let folder = tempfile::tempdir().unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let unix = UnixListener::bind(folder.path().join("socket")).unwrap();
        assert!(matches!(take(&tcp), Ok(Listening::Tcp(it))
            if it.local_addr().unwrap() == tcp.local_addr().unwrap()));
        assert!(matches!(take(&unix), Ok(Listening::Unix(_))));
        let refused = |fd: &dyn AsFd| format!("{:#}", take(fd).unwrap_err());
        assert!(refused(&tempfile::tempfile().unwrap()).contains("is not a socket"));
        let connected = TcpStream::connect(tcp.local_addr().unwrap()).unwrap();
        assert!(refused(&connected).contains("does not listen"));
        assert!(refused(&UdpSocket::bind("127.0.0.1:0").unwrap()).contains("does not listen"));
        assert!(format!("{:#}", listening(1 << 20).unwrap_err()).contains("was it inherited?"));
    }
}
