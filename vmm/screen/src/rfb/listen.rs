//! Listening sockets for VNC clients: their configuration, and the rules that apply to their
//! clients.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, ensure};
use rustix::net::sockopt;
use serde::{Deserialize, Serialize};
use tokio::net;

use super::meter::Meter;
use super::security::{Passwords, PeerNetwork};
use super::{Admission, Entry, Rules, Wire, lobby, tls};
use host::listen::{Address, Socket};

/// `--vnc`
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub struct Config {
    #[serde(rename = "to")]
    pub address: Option<Address>,
    /// File whose first line is the password.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub password: Option<PathBuf>,
    /// File with a second password, which gives access without keyboard and mouse.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub view_password: Option<PathBuf>,
    /// User name that belongs to the passwords. It requires TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// Certificate in PEM format. If set, clients must use TLS.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_cert: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tls_key: Option<PathBuf>,
    /// `none` allows clients without a password.
    pub auth: Auth,
    pub view_only: bool,
    /// Clients that request exclusive access share the screen all the same.
    pub shared: bool,
    /// Desktop name, which viewers show in the title of their window. Defaults to `Transom`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Name of this listener in messages, for users who do not configure it with `--vnc`.
    #[serde(rename = "called", skip_serializing_if = "Option::is_none")]
    pub display_name: Option<String>,
    /// Clients were authenticated before, and their first line is their name: for a Unix socket
    /// that only a front end of ours reaches.
    pub announced: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Auth {
    /// Required on addresses that other hosts can reach.
    #[default]
    Auto,
    None,
}

pub struct Listener {
    socket: Socket,
    rules: Rules,
    announced: bool,
}

impl Listener {
    /// Opens the socket, and reads passwords and certificates. No client is accepted before
    /// [`Listener::run`].
    /// Refuses a configuration that would let everybody in.
    pub fn new(config: &Config) -> anyhow::Result<Self> {
        Self::open(config).with_context(|| display_name(config))
    }

    fn open(config: &Config) -> anyhow::Result<Self> {
        let address = config.address.as_ref().context("HOST:PORT, unix:PATH or fd:N is missing")?;
        let files = [&config.password, &config.view_password];
        let passwords = passwords(files, config.user.as_ref(), config.auth)?;
        let tls = tls::Files::new(config.tls_cert.as_ref(), config.tls_key.as_ref())?;
        let needed = passwords.are_needed();
        ensure!(
            tls.is_some() || config.user.is_none(),
            "user={} needs tls-cert and tls-key: viewers send a user name only with TLS",
            config.user.as_deref().unwrap_or("")
        );
        if tls.is_none() && passwords.are_long() {
            // A listener with another name is not configured with this option.
            let option = if config.display_name.is_none() { " (tls-cert)" } else { "" };
            tracing::warn!(
                "{}: without TLS{option}, viewers send only the first {} bytes of a password",
                display_name(config),
                Passwords::VNC_BYTES
            );
        }
        let open = config.auth == Auth::Auto && !needed;
        let socket = Socket::new(address, open)?;
        let announced = config.announced;
        ensure!(
            !announced || matches!(socket, Socket::Unix(_)) && !needed,
            "announced needs a Unix socket without a password: its clients are authenticated before"
        );
        let name = title(config.name.as_deref())?;
        let (view_only, always_shared) = (config.view_only, config.shared);
        let rules = Rules { passwords, tls, view_only, always_shared, name };
        Ok(Self { socket, rules, announced })
    }

    /// The address that we listen at, with the actual port.
    pub fn address(&self) -> String {
        match &self.socket {
            Socket::Tcp(socket) => {
                socket.local_addr().map_or("TCP".into(), |address| address.to_string())
            }
            Socket::Unix(_) => "a Unix socket".into(),
        }
    }

    /// Accepts clients and passes them to `serve`, while it is polled.
    pub async fn run<F: Future<Output = ()> + Send + 'static>(
        self,
        serve: impl Fn(Arc<Rules>, Wire, Admission) -> F + Send + Sync + 'static,
    ) -> anyhow::Result<()> {
        let rules = Arc::new(self.rules);
        match self.socket {
            Socket::Tcp(socket) => {
                socket.set_nonblocking(true)?;
                let socket = net::TcpListener::from_std(socket)?;
                loop {
                    match socket.accept().await {
                        Ok((stream, peer)) => {
                            // The echo of a key press is one small packet.
                            stream.set_nodelay(true).ok();
                            keep_alive(&stream).ok();
                            let address = peer.ip().to_canonical();
                            let entry = Entry::Authenticate(PeerNetwork::of(address));
                            let peer = SocketAddr::new(address, peer.port()).to_string();
                            let admission = Admission { peer, entry };
                            let stream = Box::new(Meter::new(stream));
                            tokio::spawn(serve(rules.clone(), stream, admission));
                        }
                        Err(error) => pause_after_accept_error(&error).await,
                    }
                }
            }
            Socket::Unix(bound) => {
                let socket = net::UnixListener::from_std(bound.listener.try_clone()?)?;
                let serve = Arc::new(serve);
                loop {
                    match socket.accept().await {
                        Ok((stream, _)) => {
                            let (serve, rules) = (serve.clone(), rules.clone());
                            tokio::spawn(async move {
                                let identified = identify(stream, self.announced).await;
                                let Some((stream, admission)) = identified else { return };
                                serve(rules, stream, admission).await;
                            });
                        }
                        Err(error) => pause_after_accept_error(&error).await,
                    }
                }
            }
        }
    }
}

/// Describes a client of a Unix socket. An announced client sends its name first.
async fn identify(stream: net::UnixStream, announced: bool) -> Option<(Wire, Admission)> {
    let process = stream.peer_cred().ok().and_then(|it| it.pid());
    let mut stream = Box::new(Meter::new(stream));
    if !announced {
        let peer = process.map_or("local".into(), |it| format!("process {it}"));
        return Some((stream, Admission { peer, entry: Entry::Authenticate(PeerNetwork::Local) }));
    }
    match lobby::read_announcement(&mut stream).await {
        Ok((peer, view_only)) => {
            Some((stream, Admission { peer, entry: Entry::Authenticated { view_only } }))
        }
        Err(error) => {
            tracing::debug!("vnc: a client was not admitted: {error:#}");
            None
        }
    }
}

fn display_name(config: &Config) -> String {
    match (&config.display_name, &config.address) {
        (Some(option), _) => option.clone(),
        (None, Some(address)) => format!("--vnc {address}"),
        (None, None) => "--vnc".into(),
    }
}

/// Makes the kernel close connections to hosts that are gone, after two minutes.
pub fn keep_alive(stream: &net::TcpStream) -> rustix::io::Result<()> {
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(stream, 6)
}

/// Waits after a failed `accept`: without free file descriptors it would fail again at once.
pub(crate) async fn pause_after_accept_error(error: &std::io::Error) {
    tracing::debug!("vnc: cannot accept clients: {error}");
    tokio::time::sleep(Duration::from_millis(100)).await;
}

/// The title of the viewers' windows.
pub(crate) fn title(name: Option<&str>) -> anyhow::Result<String> {
    let name = name.unwrap_or("Transom");
    ensure!(name.len() <= 256, "a name of {} bytes: at most 256 are allowed", name.len());
    Ok(name.to_owned())
}

/// Reads the password files, and checks that the settings do not contradict one another.
pub(crate) fn passwords(
    [full, view]: [&Option<PathBuf>; 2],
    user: Option<&String>,
    auth: Auth,
) -> anyhow::Result<Passwords> {
    let read =
        |key, path: &Option<PathBuf>| path.as_ref().map(|path| password(key, path)).transpose();
    let passwords = Passwords {
        full: read("password", full)?,
        view: read("view-password", view)?,
        user: user.cloned(),
    };
    let needed = passwords.are_needed();
    ensure!(
        needed || user.is_none(),
        "user={} needs password=FILE",
        user.map_or("", String::as_str)
    );
    ensure!(
        !needed || auth == Auth::Auto,
        "auth=none and a password exclude one another: leave one of them out"
    );
    ensure!(
        passwords.full.is_none() || passwords.full != passwords.view,
        "password and view-password are the same: choose two different passwords"
    );
    Ok(passwords)
}

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

#[cfg(test)]
mod test {
    use std::net::TcpListener;

    use super::*;

    fn outcome(text: &str) -> String {
        let config = host::keyvalue::parse::<Config>(text, Some("to"));
        match config.and_then(|config| Listener::new(&config)) {
            Ok(_) => "fine".into(),
            Err(error) => format!("{error:#}"),
        }
    }

    #[test]
    fn a_port_is_open_to_others_only_when_configured() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, text: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, text).unwrap();
            path.display().to_string()
        };
        let (good, empty) = (file("good", "secret\nnot this\n"), file("empty", "\n"));
        let called = outcome("127.0.0.1:0,user=me,called=VNC_PORT=5900");
        assert!(called.starts_with("VNC_PORT=5900: user=me"), "{called}");
        assert_eq!(outcome("127.0.0.1:0"), "fine");
        assert_eq!(outcome("[::1]:0"), "fine");
        assert_eq!(outcome(&format!("unix:{}", folder.path().join("s").display())), "fine");
        assert_eq!(outcome("0.0.0.0:0,auth=none"), "fine");
        let announced = outcome("127.0.0.1:0,announced");
        assert!(
            announced.contains("needs a Unix socket"),
            "any peer could announce itself: {announced}"
        );
        assert_eq!(outcome(&format!("0.0.0.0:0,password={good}")), "fine");
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
            let outcome = outcome(&text);
            assert!(outcome.contains(words), "{text}: {outcome}");
            assert!(!outcome.contains('\n'), "{outcome}");
        }
    }

    #[test]
    fn a_port_in_use_is_reported_in_one_sentence() {
        let other = TcpListener::bind("127.0.0.1:0").unwrap();
        let outcome = outcome(&other.local_addr().unwrap().to_string());
        assert!(outcome.ends_with("the port is in use by another process"), "{outcome}");
    }
}
