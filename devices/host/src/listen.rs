//! Addresses of servers: a TCP port, a Unix socket, or an inherited socket that listens already.
//! With an inherited socket, this process needs no network of its own.

use std::fmt;
use std::io::ErrorKind;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use crate::net::inherited::{self, Listening};
use crate::stream::ListeningSocket;
use anyhow::{anyhow, bail};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Address {
    /// `HOST:PORT`
    Tcp(String),
    /// `unix:PATH`
    Unix(PathBuf),
    /// `fd:N`
    Inherited(i32),
}

impl FromStr for Address {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() {
                Err(format!("`{text}` names no path: write unix:PATH"))
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        if let Some(number) = text.strip_prefix("fd:") {
            return inherited(number).map(Self::Inherited);
        }
        let parts = text.rsplit_once(':');
        let good =
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if good {
            return Ok(Self::Tcp(text.to_owned()));
        }
        Err(format!(
            "`{text}` is not an address: write HOST:PORT, such as 127.0.0.1:5900, unix:PATH, or \
             fd:N for an inherited socket that listens already"
        ))
    }
}

impl Address {
    /// Whether the kernel chooses a free port: the port is 0.
    pub fn is_any(&self) -> bool {
        matches!(self, Self::Tcp(address) if address.ends_with(":0"))
    }
}

crate::as_text!(Address);

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
            Self::Inherited(number) => write!(f, "fd:{number}"),
        }
    }
}

/// The number of an inherited file descriptor. 0 to 2 are standard input, output and error.
fn inherited(text: &str) -> Result<i32, String> {
    let number = text.parse().ok().filter(|number| *number > 2);
    number.ok_or_else(|| format!("`{text}` names no inherited file descriptor, 3 or above"))
}

/// A server's address for local clients only: a path, or `fd:N`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum UnixAddress {
    Path(PathBuf),
    /// `fd:N`
    Inherited(i32),
}

impl TryFrom<String> for UnixAddress {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        match text.strip_prefix("fd:") {
            Some(number) => inherited(number).map(Self::Inherited),
            None if text.is_empty() => Err("a path is missing".into()),
            None => Ok(Self::Path(text.into())),
        }
    }
}

impl From<UnixAddress> for String {
    fn from(local: UnixAddress) -> Self {
        match local {
            UnixAddress::Path(path) => path.display().to_string(),
            UnixAddress::Inherited(number) => format!("fd:{number}"),
        }
    }
}

impl UnixAddress {
    pub fn listen(&self) -> anyhow::Result<ListeningSocket> {
        match self {
            Self::Path(path) => ListeningSocket::new(path),
            Self::Inherited(number) => match inherited::listening(*number)? {
                Listening::Unix(listener) => Ok(ListeningSocket::try_from(listener)?),
                Listening::Tcp(_) => bail!("fd:{number} is a TCP socket: a Unix socket is needed"),
            },
        }
    }
}

pub enum Socket {
    Tcp(TcpListener),
    /// A Unix socket. Dropping it deletes its file.
    Unix(ListeningSocket),
}

impl Socket {
    /// A server that is `unauthenticated` may listen on loopback addresses only.
    pub fn new(address: &Address, unauthenticated: bool) -> anyhow::Result<Self> {
        Ok(match address {
            Address::Tcp(address) => Self::Tcp(listen(address, unauthenticated)?),
            Address::Unix(path) => Self::Unix(ListeningSocket::new(path)?),
            Address::Inherited(number) => match inherited::listening(*number)? {
                Listening::Tcp(listener) => {
                    guard(&[listener.local_addr()?], unauthenticated)?;
                    Self::Tcp(listener)
                }
                Listening::Unix(listener) => Self::Unix(ListeningSocket::try_from(listener)?),
            },
        })
    }
}

/// Refuses to serve other hosts without authentication.
fn guard(addresses: &[SocketAddr], unauthenticated: bool) -> anyhow::Result<()> {
    if let Some(far) =
        addresses.iter().find(|it| unauthenticated && !it.ip().to_canonical().is_loopback())
    {
        bail!(
            "everybody who reaches {} could use the machine: set password=FILE, or auth=none to \
             allow this",
            far.ip()
        );
    }
    Ok(())
}

fn listen(address: &str, unauthenticated: bool) -> anyhow::Result<TcpListener> {
    let found: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| anyhow!("{address} is not an address of this host: {error}"))?
        .collect();
    guard(&found, unauthenticated)?;
    TcpListener::bind(&found[..]).map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow!("the port is in use by another process"),
        ErrorKind::AddrNotAvailable => anyhow!("{address} is not an address of this host"),
        ErrorKind::PermissionDenied => {
            anyhow!("ports below 1024 need root: choose another port ({error})")
        }
        _ => anyhow!("{error}"),
    })
}

#[cfg(test)]
mod test {
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn an_address_reads_back_as_printed() {
        for text in ["127.0.0.1:5900", "[::]:0", "unix:/run/s", "fd:3"] {
            assert_eq!(Address::try_from(text.to_owned()).unwrap().to_string(), text);
        }
        for bad in ["", "5900", ":5900", "unix:", "fd:", "fd:2", "fd:-1", "fd:3:4", "fd:x"] {
            assert!(Address::try_from(bad.to_owned()).is_err(), "{bad}");
        }
        for text in ["/run/s", "./fd:x", "fd:3"] {
            assert_eq!(String::from(UnixAddress::try_from(text.to_owned()).unwrap()), text);
        }
        for bad in ["", "fd:", "fd:2", "fd:x"] {
            assert!(UnixAddress::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_inherited_port_open_to_others_needs_configuration() {
        let said = |listener: &TcpListener, open| {
            let opened = Socket::new(&Address::Inherited(listener.as_raw_fd()), open);
            opened.err().map(|error| error.to_string()).unwrap_or_default()
        };
        let far = TcpListener::bind("0.0.0.0:0").unwrap();
        assert!(said(&far, true).contains("auth=none"));
        assert_eq!(said(&far, false), "");
        let near = TcpListener::bind("127.0.0.1:0").unwrap();
        assert_eq!(said(&near, true), "");
        let control = UnixAddress::Inherited(near.as_raw_fd()).listen().err().unwrap().to_string();
        assert!(control.contains("a Unix socket is needed"), "{control}");
    }

    #[test]
    fn a_path_in_use_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let address = UnixAddress::Path(folder.path().join("control"));
        let _bound = address.listen().unwrap();
        let error = format!("{:#}", address.listen().err().unwrap());
        assert!(error.contains("in use"), "{error}");
    }

    #[test]
    fn the_file_of_an_inherited_socket_is_not_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        drop(UnixAddress::Inherited(listener.as_raw_fd()).listen().unwrap());
        assert!(path.exists());
    }
}
