//! A hostile browser: arbitrary requests, forms, cookies, and WebSocket frames.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use host::input::Hub;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use screen::keys::layout::Layout;
use screen::rfb::canvas::Canvas;
use screen::rfb::security::Passwords;
use screen::rfb::{Interfaces, Server};
use screen::web::gate::{Connection, Rules};
use screen::web::routes;
use screen::web::socket::Farewell;
use screen::web::stage::LocalStage;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex, split};
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;

/// The number of kinds of hostile input.
const KINDS: u8 = 6;
/// The server must end every connection within this time.
const TIMEOUT: Duration = Duration::from_secs(20);
const SECRET: &str = "s3cret-that-nobody-guesses";

/// State that is slow to create, shared between all runs.
pub(crate) struct Bench {
    runtime: Runtime,
    layout: Arc<Layout>,
}

impl Bench {
    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        Self { runtime, layout: Layout::named("us").expect("a keyboard") }
    }

    /// The instance for all runs.
    pub(crate) fn shared() -> &'static Self {
        static BENCH: OnceLock<Bench> = OnceLock::new();
        BENCH.get_or_init(Self::new)
    }

    fn server(&self) -> Arc<Server> {
        let hub = Arc::<Hub>::default();
        let canvas = Canvas::new(None, hub.clone());
        let (layout, power) = (self.layout.clone(), Box::new(|_| ()));
        let sound = Arc::default();
        let clipboard = Arc::default();
        let interfaces = Interfaces { hub, layout, clipboard, sound, power };
        Server::new(canvas, interfaces)
    }

    /// Runs one connection from its first byte to its last. Checks that the answer admits no
    /// client, unless no password is needed.
    pub(crate) fn talk(&self, bytes: &[u8]) {
        let Some((kind, bytes)) = bytes.split_first() else { return };
        let kind = kind % KINDS;
        let full = (kind != 5).then(|| SECRET.to_owned());
        let passwords = Passwords { full, ..Passwords::default() };
        let (sent, rules) = (request(kind, bytes), Rules { passwords, ..Rules::default() });
        let server = self.server();
        let own = Arc::new(LocalStage::new(
            server.clone(),
            String::new(),
            Arc::new(|_| Ok(Default::default())),
        ));
        let router = routes::router(own, rules, Farewell::default(), routes::health());
        let answer = self.runtime.block_on(async {
            let (near, far) = duplex(64 << 10);
            let line = Connection { address: "10.0.0.9".parse().ok(), tls: kind == 4 };
            let service = TowerToHyperService::new(router.layer(axum::Extension(line)));
            let serve = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(TIMEOUT)
                .max_buf_size(32 << 10)
                .serve_connection(TokioIo::new(far), service)
                .with_upgrades();
            let (mut reader, mut writer) = split(near);
            let send = async {
                writer.write_all(&sent).await.ok();
                writer.shutdown().await.ok();
            };
            let receive = async {
                let mut all = Vec::new();
                reader.read_to_end(&mut all).await.ok();
                all
            };
            let all = async { tokio::join!(serve, send, receive).2 };
            timeout(TIMEOUT, all).await.expect("the end of the input ends the connection")
        });
        if kind != 5 {
            let answer = String::from_utf8_lossy(&answer).to_lowercase();
            assert!(!answer.contains("101 switching"), "{answer}");
            assert!(!answer.contains("set-cookie: transom=") || answer.contains("max-age=0"));
            assert!(!answer.contains("\"access\""), "{answer}");
        }
    }
}

/// Puts the hostile bytes into a request of this kind.
fn request(kind: u8, bytes: &[u8]) -> Vec<u8> {
    // Without the bytes that would end a header line.
    let line = || -> Vec<u8> {
        bytes.iter().copied().filter(|byte| !matches!(byte, b'\r' | b'\n' | 0)).collect()
    };
    let head = |rest: &str| format!("{rest} HTTP/1.1\r\nHost: vm.example\r\n");
    match kind {
        0 => bytes.to_vec(),
        // A form.
        1 => {
            let origin = "Origin: http://vm.example\r\nConnection: close\r\n";
            let length = format!("Content-Length: {}\r\n\r\n", bytes.len());
            [(head("POST /login") + origin + &length).as_bytes(), bytes].concat()
        }
        // Cookies.
        2 => {
            let rest = b"\r\nConnection: close\r\n\r\n";
            [(head("GET /session") + "Cookie: ").as_bytes(), &line(), rest].concat()
        }
        // A user name and a password.
        3 => {
            let rest = b"\r\nConnection: close\r\n\r\n";
            [(head("GET /") + "Authorization: Basic ").as_bytes(), &line(), rest].concat()
        }
        // An origin.
        4 => {
            let rest = b"\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
            [(head("POST /login") + "Origin: ").as_bytes(), &line(), rest].concat()
        }
        // Frames.
        _ => {
            let host = "10.0.0.1:8006";
            let head = format!(
                "GET /websockify HTTP/1.1\r\nHost: {host}\r\nOrigin: http://{host}\r\n\
                 Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\
                 Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
            );
            [head.as_bytes(), bytes].concat()
        }
    }
}
