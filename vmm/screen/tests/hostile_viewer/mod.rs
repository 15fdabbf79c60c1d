//! A hostile VNC client: arbitrary bytes before it is admitted, within TLS, and after it is
//! admitted, while the picture changes and a text was copied.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use host::clipboard::MAX_TEXT_BYTES;
use host::display::{Mode, Scanout};
use host::input::Hub;
use host::sound;
use host::testutil::agent::{GuestAgent, LINUX};
use screen::keys::layout::Layout;
use screen::rfb::canvas::Canvas;
use screen::rfb::security::{Passwords, PeerNetwork};
use screen::rfb::{Admission, Duplex, Entry, Interfaces, Rules, Server, Wire, tls};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex, split};
use tokio::runtime::{Builder, Runtime};
use tokio::task::yield_now;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

/// The number of ways to connect.
const WAYS: u8 = 6;
/// The number of bytes that the client sends at once.
const PIECE: usize = 48;
/// The server must end every session within this time.
const TIMEOUT: Duration = Duration::from_secs(20);

/// A picture that differs at each look, and changes its size now and then.
#[derive(Default)]
struct Moving(AtomicU32);

impl Scanout for Moving {
    fn mode(&self) -> Option<Mode> {
        let sizes = [(64, 48), (90, 70), (64, 48), (33, 1), (120, 60)];
        let (width, height) = *sizes.get((self.0.load(Ordering::Relaxed) / 8) as usize % 6)?;
        Some(Mode { width, height, stride: width * 4, start: 0 })
    }

    fn changed(&self, pages: &mut Vec<u64>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        pages.clear();
        pages.push(u64::MAX);
    }

    fn read(&self, offset: u64, data: &mut [u8]) {
        let now = u64::from(self.0.load(Ordering::Relaxed));
        for (at, byte) in (offset..).zip(data) {
            *byte = (at * now / 7).to_le_bytes()[usize::from(at % 64 < 8)];
        }
    }

    fn set_preferred_size(&self, _: u32, _: u32) -> bool {
        true
    }
}

/// A certificate verifier that accepts everything, because the tests are about the bytes after the
/// handshake.
#[derive(Debug)]
struct Trusting;

impl ServerCertVerifier for Trusting {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ECDSA_NISTP256_SHA256]
    }
}

/// State that is slow to create, shared between all runs.
pub(crate) struct Bench {
    runtime: Runtime,
    layout: Arc<Layout>,
    connector: TlsConnector,
    folder: TempDir,
}

impl Bench {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for (name, text) in [("cert", CERTIFICATE), ("key", KEY)] {
            std::fs::write(folder.path().join(name), text).expect("a file");
        }
        let client = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions of TLS")
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Trusting))
            .with_no_client_auth();
        Self {
            runtime: Builder::new_current_thread().enable_all().build().expect("a runtime"),
            layout: Layout::named("de").expect("a keyboard"),
            connector: TlsConnector::from(Arc::new(client)),
            folder,
        }
    }

    /// The instance for all runs.
    pub(crate) fn shared() -> &'static Self {
        static BENCH: OnceLock<Bench> = OnceLock::new();
        BENCH.get_or_init(Self::new)
    }

    /// The server, and an agent in the guest, which takes texts.
    fn server(&self, way: u8) -> (Arc<Server>, Arc<Rules>, Option<GuestAgent>) {
        let passwords = Passwords { full: Some("secret".into()), ..Passwords::default() };
        let file = |name| self.folder.path().join(name);
        let files = || tls::Files::new(Some(&file("cert")), Some(&file("key")));
        let tls = (way == 5).then(|| files().expect("a pair").expect("both"));
        let hub = Arc::<Hub>::default();
        let canvas = Canvas::new(Some(Arc::new(Moving::default())), hub.clone());
        let layout = self.layout.clone();
        let clipboard = Arc::default();
        let agent = (way != 1).then(|| GuestAgent::start(&clipboard, LINUX));
        let (sound, power) = (Arc::<sound::Hub>::default(), Box::new(|_| ()));
        sound.add_card();
        let interfaces = Interfaces { hub, layout, clipboard, sound, power };
        let rules = Rules { passwords, tls, ..Rules::default() };
        (Server::new(canvas, interfaces), Arc::new(rules), agent)
    }

    /// Runs one client from its first byte to its last.
    pub(crate) fn talk(&self, bytes: &[u8]) {
        let Some((way, bytes)) = bytes.split_first() else { return };
        let way = way % WAYS;
        let entry = match way {
            0 => Entry::Authenticate(PeerNetwork::Local),
            1 | 2 => Entry::Authenticated { view_only: false },
            3 => Entry::Authenticated { view_only: true },
            _ => Entry::Authenticate(PeerNetwork::Remote(u128::from(way))),
        };
        let (server, rules, agent) = self.server(way);
        self.runtime.block_on(async {
            let (near, far) = duplex(64 << 10);
            let admission = Admission { peer: "hostile".into(), entry };
            let serve = server.clone().serve(rules, Box::new(far), admission);
            let write = async {
                if let Some(line) = self.begin(way, near).await {
                    send(line, bytes, &server).await;
                }
            };
            let all = async { tokio::join!(serve, write) };
            tokio::select! {
                () = server.canvas.clone().run() => {}
                // The end of the input ends the session. A session that continues hangs.
                ended = timeout(TIMEOUT, all) => drop(ended.expect("the session ends")),
            }
        });
        assert!(server.status().is_empty(), "no client is left");
        let Some(mut agent) = agent else { return };
        agent.serve();
        let longest = agent.texts.iter().map(String::len).max();
        assert!(longest <= Some(MAX_TEXT_BYTES), "a text of {longest:?} bytes");
    }

    /// Sends the valid beginning of a connection.
    async fn begin(&self, way: u8, mut line: DuplexStream) -> Option<Wire> {
        match way {
            1..=3 => line.write_all(b"RFB 003.008\n\x01\x01").await.ok()?,
            // VeNCrypt with X509Plain: the name and the password follow.
            5 => {
                line.write_all(b"RFB 003.008\n\x13\x00\x02\x00\x00\x01\x06").await.ok()?;
                // The version, one type, the version of VeNCrypt, its acceptance, two subtypes, and
                // the acceptance of the first.
                line.read_exact(&mut [0; 12 + 2 + 2 + 1 + 1 + 8 + 1]).await.ok()?;
                let name = ServerName::try_from("localhost").ok()?;
                return Some(Box::new(self.connector.connect(name, line).await.ok()?));
            }
            _ => {}
        }
        Some(Box::new(line))
    }
}

/// Sends the bytes in pieces, so that answers come meanwhile, and reads those.
async fn send<S: Duplex>(line: S, bytes: &[u8], server: &Server) {
    let (mut reader, mut writer) = split(line);
    let write = async {
        for (at, piece) in bytes.chunks(PIECE).enumerate() {
            writer.write_all(piece).await.ok();
            writer.flush().await.ok();
            server.interfaces.sound.play(&[7; 4096]);
            if at == 1 {
                server.copied("Text von drüben €");
            }
            for _ in 0..8 {
                yield_now().await;
            }
        }
        writer.shutdown().await.ok();
    };
    let read = async {
        let mut drain = [0; 4096];
        while reader.read(&mut drain).await.is_ok_and(|count| count > 0) {}
    };
    tokio::join!(write, read);
}

/// A certificate for `localhost`.
const CERTIFICATE: &str = include_str!("../../../../tests/vnc_clients/certificate.pem");
const KEY: &str = include_str!("../../../../tests/vnc_clients/key.pem");
