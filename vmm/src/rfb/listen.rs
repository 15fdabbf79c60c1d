//! Where clients come from: a TCP port or a Unix socket, and what is asked of them there.

use std::fmt;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use devices::backend::stream::Bound;
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use tokio::net;

use super::meter::Meter;
use super::security::{Door, Passwords};
use super::{Admission, Entry, Rules, Server, tls};

/// `--vnc`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    /// Where to listen.
    pub to: Option<Place>,
    /// A file with the password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<PathBuf>,
    /// A file with a second password, for those who may only look.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub view_password: Option<PathBuf>,
    /// The name that goes with the passwords.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// A certificate in PEM format: clients must use TLS then.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    /// Its private key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// `none` lets everybody in who reaches the port.
    pub auth: Auth,
    /// Nobody may touch.
    pub view_only: bool,
    /// Clients that want the screen for themselves share it all the same.
    pub shared: bool,
    /// What windows are called.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Whether a password is needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auth {
    /// Wherever somebody else may come from: on a port that other hosts reach.
    #[default]
    Auto,
    /// No.
    None,
}

/// Where to listen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Place {
    /// HOST:PORT
    Tcp(String),
    /// A path.
    Unix(PathBuf),
}

impl TryFrom<String> for Place {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            return if path.is_empty() {
                Err(format!("`{text}` names no path"))
            } else {
                Ok(Self::Unix(path.into()))
            };
        }
        let parts = text.rsplit_once(':');
        let good =
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
        if good {
            return Ok(Self::Tcp(text));
        }
        Err(format!(
            "`{text}` is no place to listen: write HOST:PORT, like 127.0.0.1:5900, or unix:PATH"
        ))
    }
}

impl Place {
    /// Whether a free port shall be found.
    pub fn is_any(&self) -> bool {
        matches!(self, Self::Tcp(address) if address.ends_with(":0"))
    }
}

impl From<Place> for String {
    fn from(place: Place) -> Self {
        place.to_string()
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => f.write_str(address),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// A socket that listens, and the rules that hold there.
pub struct Listener {
    socket: Socket,
    rules: Rules,
}

enum Socket {
    Tcp(TcpListener),
    Unix(Bound),
}

impl Listener {
    /// Listens, and reads passwords and certificates. Nobody is let in yet.
    ///
    /// # Errors
    ///
    /// One sentence: what is in use, what is wrong with a file, or what would let everybody in.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        Self::open(config).with_context(|| match &config.to {
            Some(place) => format!("--vnc {place}"),
            None => "--vnc".into(),
        })
    }

    fn open(config: &Config) -> anyhow::Result<Self> {
        let place = config.to.as_ref().context("HOST:PORT or unix:PATH is missing")?;
        let passwords = passwords(config)?;
        let tls = tls::Files::new(config.tls_cert.as_ref(), config.tls_key.as_ref())?;
        let needed = passwords.are_needed();
        ensure!(
            tls.is_some() || config.user.is_none(),
            "user={} needs tls-cert and tls-key: without TLS, viewers ask for no name",
            config.user.as_deref().unwrap_or("")
        );
        if tls.is_none() && passwords.are_long() {
            tracing::warn!(
                "--vnc {place}: without TLS (tls-cert) viewers send {} letters of a password only",
                Passwords::SEEN
            );
        }
        let open = config.auth == Auth::Auto && !needed;
        let socket = match place {
            Place::Unix(path) => Socket::Unix(Bound::new(path)?),
            Place::Tcp(address) => Socket::Tcp(listen(address, open)?),
        };
        let name = config.name.clone().unwrap_or_else(|| "Transom".into());
        ensure!(name.len() <= 256, "a name of {} bytes: at most 256", name.len());
        let (view_only, always_shared) = (config.view_only, config.shared);
        Ok(Self { socket, rules: Rules { passwords, tls, view_only, always_shared, name } })
    }

    /// Takes the rules, which the server keeps.
    pub fn rules(&mut self) -> Rules {
        std::mem::take(&mut self.rules)
    }

    /// Where we listen, with the port that was found.
    pub fn place(&self) -> String {
        match &self.socket {
            Socket::Tcp(socket) => {
                socket.local_addr().map_or("TCP".into(), |address| address.to_string())
            }
            Socket::Unix(_) => "a Unix socket".into(),
        }
    }

    /// Lets clients in, for as long as it is polled.
    ///
    /// # Errors
    ///
    /// When the runtime cannot take the socket.
    pub async fn run(self, server: Arc<Server>) -> anyhow::Result<()> {
        match self.socket {
            Socket::Tcp(socket) => {
                socket.set_nonblocking(true)?;
                let socket = net::TcpListener::from_std(socket)?;
                loop {
                    match socket.accept().await {
                        Ok((stream, peer)) => {
                            // A key's echo is one small packet.
                            stream.set_nodelay(true).ok();
                            keep_alive(&stream).ok();
                            let entry = Entry::Ask(Door::of(peer.ip()));
                            let admission = Admission { peer: peer.to_string(), entry };
                            tokio::spawn(
                                server.clone().serve(Box::new(Meter::new(stream)), admission),
                            );
                        }
                        Err(error) => rest(&error).await,
                    }
                }
            }
            Socket::Unix(bound) => {
                let socket = net::UnixListener::from_std(bound.listener().try_clone()?)?;
                loop {
                    match socket.accept().await {
                        Ok((stream, _)) => {
                            let process = stream.peer_cred().ok().and_then(|it| it.pid());
                            let peer = process.map_or("local".into(), |it| format!("process {it}"));
                            let admission = Admission { peer, entry: Entry::Ask(Door::Local) };
                            tokio::spawn(
                                server.clone().serve(Box::new(Meter::new(stream)), admission),
                            );
                        }
                        Err(error) => rest(&error).await,
                    }
                }
            }
        }
    }
}

/// A client whose host is gone leaves its place after two minutes.
pub(crate) fn keep_alive(stream: &net::TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 6)
}

/// Out of file descriptors, for a while: no reason to spin.
pub(crate) async fn rest(error: &std::io::Error) {
    tracing::debug!("vnc: nobody can come in: {error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// Reads the passwords that a configuration names.
///
/// # Errors
///
/// What is wrong with a file, or with all of it together.
pub(crate) fn passwords(config: &Config) -> anyhow::Result<Passwords> {
    let read =
        |key, path: &Option<PathBuf>| path.as_ref().map(|path| password(key, path)).transpose();
    let passwords = Passwords {
        full: read("password", &config.password)?,
        view: read("view-password", &config.view_password)?,
        user: config.user.clone(),
    };
    let needed = passwords.are_needed();
    ensure!(
        needed || config.user.is_none(),
        "user={} needs password=FILE",
        config.user.as_deref().unwrap_or("")
    );
    ensure!(
        !needed || config.auth == Auth::Auto,
        "auth=none lets everybody in, and there is a password: leave one of them out"
    );
    ensure!(
        passwords.full.is_none() || passwords.full != passwords.view,
        "password and view-password are the same: who has it could be either"
    );
    Ok(passwords)
}

/// The first line of a file.
fn password(key: &str, path: &PathBuf) -> anyhow::Result<String> {
    let text = std::fs::read_to_string(path);
    let text = text.with_context(|| format!("{key}={}", path.display()))?;
    let line = text.lines().next().unwrap_or_default();
    ensure!(
        !line.is_empty(),
        "{key}={}: the password is empty; its first line is the password",
        path.display()
    );
    Ok(line.to_owned())
}

/// Listens on a port; `open` is whether nobody would be asked for anything.
pub(crate) fn listen(address: &str, open: bool) -> anyhow::Result<TcpListener> {
    let found: Vec<SocketAddr> = address
        .to_socket_addrs()
        .map_err(|error| anyhow::anyhow!("{address} is no address of this host: {error}"))?
        .collect();
    if let Some(far) = found.iter().find(|it| open && !it.ip().to_canonical().is_loopback()) {
        bail!(
            "everybody who reaches {} could use the machine: say password=FILE, or auth=none if \
             that is what you want",
            far.ip()
        );
    }
    TcpListener::bind(&found[..]).map_err(|error| match error.kind() {
        std::io::ErrorKind::AddrInUse => {
            anyhow::anyhow!("the port is in use by another process")
        }
        std::io::ErrorKind::AddrNotAvailable => {
            anyhow::anyhow!("{address} is no address of this host")
        }
        std::io::ErrorKind::PermissionDenied => {
            anyhow::anyhow!("ports below 1024 are for root: choose another one ({error})")
        }
        _ => anyhow::anyhow!("{error}"),
    })
}

#[cfg(test)]
mod test {
    use super::*;

    fn said(text: &str) -> String {
        let config = crate::keyvalue::parse::<Config>(text, Some("to"));
        match config.and_then(|config| Listener::new(&config)) {
            Ok(_) => "fine".into(),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn a_port_is_open_to_others_only_when_that_was_said() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let (good, empty) = (file("good", "secret\nnot this\n"), file("empty", "\n"));
        assert_eq!(said("127.0.0.1:0"), "fine");
        assert_eq!(said("[::1]:0"), "fine");
        assert_eq!(said(&format!("unix:{}", folder.path().join("s").display())), "fine");
        assert_eq!(said("0.0.0.0:0,auth=none"), "fine");
        assert_eq!(said(&format!("0.0.0.0:0,password={good}")), "fine");
        for (text, words) in [
            ("0.0.0.0:0".to_owned(), "auth=none"),
            ("[::]:0".to_owned(), "password=FILE"),
            (format!("127.0.0.1:0,password={empty}"), "the password is empty"),
            (format!("127.0.0.1:0,password={good}x"), "No such file"),
            (format!("127.0.0.1:0,password={good},auth=none"), "leave one of them out"),
            (format!("127.0.0.1:0,password={good},view-password={good}"), "the same"),
            (format!("127.0.0.1:0,password={good},user=me"), "tls-cert"),
            ("127.0.0.1:0,user=me".to_owned(), "needs password"),
            (format!("127.0.0.1:0,tls-cert={good}"), "tls-key"),
            (format!("127.0.0.1:0,tls-cert={good},tls-key={good}"), "no certificate"),
            ("5900".to_owned(), "HOST:PORT"),
            (":5900".to_owned(), "HOST:PORT"),
            ("unix:".to_owned(), "names no path"),
            ("127.0.0.1:0,pasword=x".to_owned(), "did you mean `password`"),
        ] {
            let said = said(&text);
            assert!(said.contains(words), "{text}: {said}");
            assert!(!said.contains('\n'), "{said}");
        }
    }

    #[test]
    fn a_port_in_use_is_one_sentence() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let said = said(&other.local_addr().unwrap().to_string());
        assert!(said.ends_with("the port is in use by another process"), "{said}");
    }
}
