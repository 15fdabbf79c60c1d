//! Connections to the two ports of a screen: VNC, and the web.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use futures_util::{SinkExt as _, StreamExt as _};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, duplex, split};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::time_provider::TimeProvider;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

pub(crate) trait Duplex: AsyncRead + AsyncWrite + Unpin + Send {}

impl<T: AsyncRead + AsyncWrite + Unpin + Send> Duplex for T {}

pub(crate) type Line = Box<dyn Duplex>;

/// Capacity in bytes of the buffer between a client and its WebSocket.
const ROOM: usize = 16 << 10;

/// Where clients connect.
#[derive(Clone)]
pub(crate) enum Door {
    Vnc(PathBuf),
    Web(String),
}

#[derive(Debug)]
struct Then;

impl TimeProvider for Then {
    fn current_time(&self) -> Option<UnixTime> {
        // Within the life of the certificate, whatever the clock of this host says.
        Some(UnixTime::since_unix_epoch(Duration::from_secs(2_000_000_000)))
    }
}

impl Door {
    /// A connection on which RFB begins.
    pub(crate) async fn enter(&self) -> Result<Line> {
        match self {
            Self::Vnc(_) => self.knock().await,
            Self::Web(place) => {
                let secure = secure(self.knock().await?).await?;
                socket(secure, place).await
            }
        }
    }

    /// The bare connection.
    pub(crate) async fn knock(&self) -> Result<Line> {
        Ok(match self {
            Self::Vnc(path) => Box::new(UnixStream::connect(path).await?),
            Self::Web(place) => Box::new(TcpStream::connect(place).await?),
        })
    }

    /// A connection on which HTTP begins; `None` at the VNC port.
    pub(crate) async fn page(&self) -> Result<Option<Line>> {
        match self {
            Self::Vnc(_) => Ok(None),
            Self::Web(_) => secure(self.knock().await?).await.map(Some),
        }
    }
}

/// The head of a request for the WebSocket.
pub(crate) fn upgrade(place: &str) -> String {
    format!(
        "GET /websockify HTTP/1.1\r\nHost: {place}\r\nOrigin: https://{place}\r\nConnection: \
         Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: \
         dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
}

async fn secure(line: Line) -> Result<Line> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CERTIFICATE.as_bytes())?)?;
    let client = ClientConfig::builder_with_details(Arc::new(default_provider()), Arc::new(Then))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost")?;
    let secure = TlsConnector::from(Arc::new(client)).connect(name, line).await;
    Ok(Box::new(secure.context("TLS")?))
}

/// A connection through a WebSocket. Frames are not read faster than the client reads.
async fn socket(mut line: Line, place: &str) -> Result<Line> {
    line.write_all(upgrade(place).as_bytes()).await?;
    line.flush().await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(line.read_u8().await?);
    }
    ensure!(head.starts_with(b"HTTP/1.1 101"), "{}", head.escape_ascii());
    let socket = WebSocketStream::from_raw_socket(line, Role::Client, None).await;
    let (mut to, mut from) = socket.split();
    let (near, far) = duplex(ROOM);
    let (mut said, mut heard) = split(far);
    tokio::spawn(async move {
        let speak = async {
            let mut bytes = vec![0; ROOM];
            while let Ok(count @ 1..) = said.read(&mut bytes).await {
                let message = Message::Binary(bytes[..count].to_vec().into());
                if to.send(message).await.is_err() {
                    return;
                }
            }
        };
        let hear = async {
            while let Some(Ok(message)) = from.next().await {
                if let Message::Binary(bytes) = message
                    && heard.write_all(&bytes).await.is_err()
                {
                    return;
                }
            }
        };
        // End both directions when either ends.
        tokio::select! { () = speak => {} () = hear => {} }
    });
    Ok(Box::new(near))
}

/// A certificate for `localhost`.
pub(crate) const CERTIFICATE: &str = include_str!("../vnc_clients/certificate.pem");
pub(crate) const KEY: &str = include_str!("../vnc_clients/key.pem");
