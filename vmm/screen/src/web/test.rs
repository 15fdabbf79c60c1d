//! Tests of the web server over real sockets: pages, cookies, refusals, the WebSocket, TLS.

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::Request;
use axum::routing::{get, post};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::{SinkExt as _, StreamExt as _};
use host::input::{Event, Hub, Sink};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::time_provider::TimeProvider;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::protocol::Role;

use super::listen::Listener;
use super::socket::Farewell;
use super::{Config, line_socket, routes};
use crate::keys::layout::Layout;
use crate::rfb::canvas::Canvas;
use crate::rfb::security::{Access, PeerNetwork};
use crate::rfb::testing::{
    CERTIFICATE, FakeDisplay, KEY, OTHER_CERTIFICATE, OTHER_KEY, THIRD_KEY, lock_out,
};
use crate::rfb::{Interfaces, Server, Wire};
use crate::web::gate::{Connection, Rules};
use crate::web::stage::{Button, ExtraRoutes, LocalStage};
use host::keyvalue;

const TIMEOUT: Duration = Duration::from_secs(20);

/// A keyboard that records its events.
#[derive(Default)]
struct Board(Mutex<Vec<Event>>);

impl Sink for Board {
    fn take(&self, event: Event) -> bool {
        self.0.lock().unwrap().push(event);
        true
    }
}

struct Bench {
    address: String,
    /// The path prefix of all pages.
    base: &'static str,
    server: Arc<Server>,
    board: Arc<Board>,
}

fn server() -> (Arc<Server>, Arc<Board>) {
    let fake = FakeDisplay::new(64, 48);
    fake.paint(1);
    let (hub, board) = (Arc::<Hub>::default(), Arc::<Board>::default());
    hub.register(board.clone());
    let canvas = Canvas::new(Some(fake), hub.clone());
    let interfaces = Interfaces {
        hub,
        layout: Layout::named("us").unwrap(),
        clipboard: Arc::default(),
        sound: Arc::default(),
        power: Box::new(|_| {}),
    };
    tokio::spawn(canvas.clone().run());
    (Server::new(canvas, interfaces), board)
}

/// A machine that can be paused, and cannot be reset.
fn obeys(button: Option<Button>) -> anyhow::Result<serde_json::Value> {
    match button {
        None => Ok(serde_json::json!({ "state": "paused", "clipboard": true, "pid": 1 })),
        Some(Button::Reset) => anyhow::bail!("no reset"),
        Some(_) => Ok(serde_json::json!({})),
    }
}

fn own(server: &Arc<Server>) -> Arc<LocalStage> {
    Arc::new(LocalStage::new(server.clone(), "a test".into(), Arc::new(obeys)))
}

/// Additional routes, like those of a container.
fn more() -> ExtraRoutes {
    let lines = get(|request: Request| async {
        line_socket::open(request, async |socket| socket.close().await)
    });
    let health = routes::health();
    let more = ExtraRoutes { open: axum::Router::new().route("/lines", lines), ..health };
    let power = get(|| async { "on" }).post(|| async { "off" });
    let waits = get(|| async { sleep(TIMEOUT * 3).await });
    let echo = post(|body: String| async { body });
    let inside = axum::Router::new().route("/power", power).route("/waits", waits);
    let inside = inside.route("/echo", echo);
    ExtraRoutes { inside, ..more }
}

/// Listens at `--web 127.0.0.1:0` with these further options.
fn bench(words: &str) -> Bench {
    let words = format!("127.0.0.1:0,name=a test{words}");
    let config: Config = keyvalue::parse(&words, Some("to")).expect("a configuration");
    let listener = Listener::new(&config).expect("a port");
    let url = listener.url();
    let address = url.split('/').nth(2).expect("an address").to_owned();
    let (server, board) = server();
    let shown = own(&server);
    tokio::spawn(async { listener.run(shown, more()).await });
    Bench { address, base: "", server, board }
}

/// Writes a password file.
fn secret(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

struct Answer {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Answer {
    fn read(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|it| it == b"\r\n\r\n").expect("a head");
        let head = String::from_utf8_lossy(&bytes[..end]).to_lowercase();
        let status = head.split(' ').nth(1).and_then(|it| it.parse().ok()).expect("a status");
        Self { status, head, body: bytes[end + 4..].to_vec() }
    }

    fn header(&self, name: &str) -> &str {
        let mut lines = self.head.lines().filter_map(|it| it.split_once(": "));
        lines.find(|(key, _)| *key == name).map_or("", |it| it.1)
    }

    fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The cookie as a request header.
    fn cookie(&self) -> String {
        format!("Cookie: {}", self.header("set-cookie").split(';').next().unwrap())
    }
}

async fn say<S: crate::rfb::Duplex>(mut stream: S, request: &str) -> Answer {
    let request = request.trim_start().replace('\n', "\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("an answer").ok();
    Answer::read(&bytes)
}

impl Bench {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.address).await.unwrap()
    }

    async fn ask(&self, line: &str, headers: &[&str]) -> Answer {
        let address = &self.address;
        let headers: String = headers.iter().map(|it| format!("{it}\n")).collect();
        let host = if headers.contains("Host:") { "" } else { &format!("Host: {address}\n") };
        let text = format!("{line} HTTP/1.1\n{host}Connection: close\n{headers}\n");
        say(self.connect().await, &text).await
    }

    /// The status of the answer, if there is one. Where many connect at once, a connection whose
    /// request has not been read may give way to a newer one.
    async fn tries(&self, line: &str) -> Option<u16> {
        let mut stream = self.connect().await;
        let text =
            format!("{line} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address);
        stream.write_all(text.as_bytes()).await.ok()?;
        let mut bytes = Vec::new();
        timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("an end").ok();
        (!bytes.is_empty()).then(|| Answer::read(&bytes).status)
    }

    fn origin(&self) -> String {
        format!("Origin: http://{}", self.address)
    }

    async fn log_in(&self, origin: &str, body: &str) -> Answer {
        let text = format!(
            "POST /login HTTP/1.1\nHost: {}\nConnection: close\n{origin}\nContent-Type: \
             application/x-www-form-urlencoded\nContent-Length: {}\n\n{body}",
            self.address,
            body.len()
        );
        say(self.connect().await, &text).await
    }

    async fn knock(&self, headers: &[&str]) -> (TcpStream, Answer) {
        self.knock_at("websockify", headers).await
    }

    async fn knock_at(&self, page: &str, headers: &[&str]) -> (TcpStream, Answer) {
        let mut stream = self.connect().await;
        let headers: String = headers.iter().map(|it| format!("{it}\n")).collect();
        let host =
            if headers.contains("Host:") { "" } else { &format!("Host: {}\n", self.address) };
        let text = format!(
            "GET {}/{page} HTTP/1.1\n{host}Connection: keep-alive, Upgrade\nUpgrade: \
             websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: \
             dGhlIHNhbXBsZSBub25jZQ==\nSec-WebSocket-Protocol: binary\n{headers}\n",
            self.base
        );
        stream.write_all(text.replace('\n', "\r\n").as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            let byte =
                timeout(TIMEOUT, stream.read_u8()).await.expect("an answer").expect("a head");
            bytes.push(byte);
        }
        (stream, Answer::read(&bytes))
    }

    async fn status(&self, headers: &[&str]) -> u16 {
        self.knock(headers).await.1.status
    }

    /// Connects as noVNC does.
    async fn look(&self, headers: &[&str]) -> Viewer {
        let (stream, answer) = self.knock(headers).await;
        assert_eq!(answer.status, 101, "{}", answer.head);
        assert_eq!(answer.header("sec-websocket-accept"), "s3pplmbitxaq9kygzzhzrbk+xoo=");
        assert_eq!(answer.header("sec-websocket-protocol"), "binary");
        let socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
        let mut viewer = Viewer { socket, came: Vec::new() };
        assert_eq!(viewer.read(12).await, b"RFB 003.008\n");
        viewer.say(b"RFB 003.008\n").await;
        assert_eq!(viewer.read(2).await, [1, 1], "no password is needed");
        viewer.say(&[1]).await;
        assert_eq!(viewer.read(4).await, [0; 4]);
        viewer.say(&[1]).await;
        let init = viewer.read(24).await;
        assert_eq!(init[..4], [0, 64, 0, 48]);
        assert_eq!(viewer.read(init[23].into()).await, b"a test");
        viewer
    }

    /// Waits until the connected viewers have exactly these rights.
    async fn access(&self, wanted: &[&str]) {
        let mut found = Vec::new();
        for _ in 0..200 {
            let shown = self.server.status();
            found = shown.iter().map(|it| it["access"].as_str().unwrap().to_owned()).collect();
            if found == wanted {
                return;
            }
            sleep(Duration::from_millis(20)).await;
        }
        panic!("{found:?} in place of {wanted:?}");
    }
}

struct Viewer {
    socket: WebSocketStream<TcpStream>,
    came: Vec<u8>,
}

impl Viewer {
    async fn say(&mut self, bytes: &[u8]) {
        self.socket.send(Message::Binary(bytes.to_vec().into())).await.unwrap();
    }

    async fn read(&mut self, count: usize) -> Vec<u8> {
        while self.came.len() < count {
            let message = timeout(TIMEOUT, self.socket.next()).await.expect("bytes");
            match message.expect("more").expect("a message") {
                Message::Binary(bytes) => self.came.extend(bytes),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
        self.came.drain(..count).collect()
    }

    /// Whether the server closes the connection.
    async fn ends(mut self) -> bool {
        let end = async {
            while let Some(Ok(message)) = self.socket.next().await {
                if matches!(message, Message::Close(_)) {
                    break;
                }
            }
        };
        timeout(TIMEOUT, end).await.is_ok()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_and_its_files_are_served_with_security_headers() {
    let bench = bench("");
    let page = bench.ask("GET /", &[]).await;
    assert_eq!(page.status, 200);
    assert!(page.header("content-type").starts_with("text/html"));
    assert_eq!(page.header("cache-control"), "no-store");
    for name in ["x-content-type-options", "referrer-policy", "x-frame-options"] {
        assert_ne!(page.header(name), "", "{name}");
    }
    let policy = page.header("content-security-policy");
    assert!(policy.contains("frame-ancestors 'self'") && !policy.contains("unsafe"), "{policy}");
    let text = page.text();
    let script = text.split('"').find(|it| it.ends_with("viewer.js")).expect("a script");
    let plain = bench.ask(&format!("GET /{script}"), &[]).await;
    assert_eq!((plain.status, plain.header("content-encoding")), (200, ""));
    assert!(plain.header("content-type").starts_with("text/javascript"));
    assert!(plain.header("cache-control").contains("immutable"));
    assert!(plain.text().contains("websockify"));
    let packed = bench.ask(&format!("GET /{script}"), &["Accept-Encoding: br, gzip"]).await;
    assert_eq!(packed.header("content-encoding"), "gzip");
    assert!(packed.body.starts_with(&[0x1f, 0x8b]) && packed.body.len() < plain.body.len());
    let rfb = script.replace("viewer.js", "novnc/core/rfb.js");
    assert_eq!(bench.ask(&format!("GET /{rfb}"), &[]).await.status, 200);
    for (line, status) in [
        ("GET /healthz", 200),
        ("GET /session", 200),
        ("GET /login", 303),
        ("GET /nothing", 404),
        ("GET /files/0/viewer.js", 404),
        ("GET /files/../../etc/passwd", 404),
        ("POST /", 405),
        ("GET /logout", 405),
        ("GET /websockify", 403),
    ] {
        let answer = bench.ask(line, &[]).await;
        assert_eq!(answer.status, status, "{line}");
        assert_ne!(answer.header("content-security-policy"), "", "{line}");
    }
    let answer = bench.ask("GET /websockify", &[&bench.origin()]).await;
    assert_eq!(answer.status, 426, "{}", answer.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sound_is_for_those_who_may_see_the_screen() {
    let folder = tempfile::tempdir().unwrap();
    let password = secret(folder.path(), "password", "a long word");
    let guarded = bench(&format!(",password={password}"));
    let sound = &guarded.server.interfaces.sound;
    sound.add_card();
    assert_eq!(guarded.knock_at("audio", &[&guarded.origin()]).await.1.status, 401);
    let bench = bench("");
    let origin = bench.origin();
    let without = bench.knock_at("audio", &[&origin]).await.1;
    assert_eq!(without.status, 404, "no sound card: {}", without.text());
    let sound = bench.server.interfaces.sound.clone();
    sound.add_card();
    for other in ["Origin: http://evil.example", "Origin: null"] {
        assert_eq!(bench.knock_at("audio", &[other]).await.1.status, 403, "{other}");
    }
    assert_eq!(bench.knock_at("audio", &[]).await.1.status, 101, "a program");
    let (mut line, answer) = bench.knock_at("audio", &[&origin]).await;
    assert_eq!(answer.status, 101, "{}", answer.text());
    let play = async {
        for number in 1_u32.. {
            sound.play(&number.to_le_bytes());
            sleep(Duration::from_millis(1)).await;
        }
    };
    let hear = async {
        let mut heard = Vec::new();
        while heard.len() < 100 {
            // A binary frame with a short length.
            assert_eq!(line.read_u8().await.unwrap(), 0x82);
            let length = line.read_u8().await.unwrap();
            assert!(length < 126 && length.is_multiple_of(4), "{length}");
            for _ in 0..length / 4 {
                heard.push(line.read_u32_le().await.unwrap());
            }
        }
        heard
    };
    let heard = tokio::select! {
        () = play => unreachable!("it plays forever"),
        heard = timeout(TIMEOUT, hear) => heard.expect("sound"),
    };
    assert!(heard[1..].windows(2).all(|two| two[0] + 1 == two[1]), "{heard:?}");
    // Each listener is a viewer, and leaves with its connection.
    assert_eq!(bench.server.status()[0]["access"], "view");
    drop(line);
    let gone = async {
        while !bench.server.status().is_empty() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, gone).await.expect("it leaves");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_password_only_same_origin_pages_get_the_screen() {
    let bench = bench("");
    let origin = bench.origin();
    let mut viewer = bench.look(&[&origin]).await;
    bench.access(&["full"]).await;
    // The A key goes down, and the whole picture arrives.
    viewer.say(&[4, 1, 0, 0, 0, 0, 0, b'a']).await;
    viewer.say(&[3, 0, 0, 0, 0, 0, 0, 64, 0, 48]).await;
    let update = viewer.read(4).await;
    assert_eq!(update[0], 0);
    let pixels = viewer.read(12 + 64 * 48 * 4).await;
    assert!(pixels[12..].iter().any(|byte| *byte != 0));
    let keys = bench.board.0.lock().unwrap().len();
    assert_eq!(keys, 1);
    assert_eq!(bench.status(&[]).await, 403, "no origin");
    assert_eq!(bench.status(&["Origin: http://evil.example"]).await, 403);
    assert_eq!(bench.status(&["Origin: null"]).await, 403);
    // A foreign name that resolves to our address.
    let rebound = ["Host: evil.example:6080", "Origin: http://evil.example:6080"];
    assert_eq!(bench.status(&rebound).await, 403);
    let page = bench.ask("GET /", &rebound[..1]).await;
    assert_eq!(page.status, 403);
    assert!(page.text().contains("origin="), "{}", page.text());
    // Text frames are refused.
    viewer.socket.send(Message::Text("hello".into())).await.unwrap();
    assert!(viewer.ends().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_line_socket_is_refused_to_foreign_pages() {
    let bench = bench(",auth=none");
    let ours = bench.origin();
    let rebound = ["Host: evil.example:6080", "Origin: http://evil.example:6080"];
    for (headers, status) in [
        (&[&*ours][..], 101),
        (&[], 101),
        (&["Origin: http://evil.example"], 403),
        (&["Origin: null"], 403),
        (&rebound, 403),
    ] {
        let (_, answer) = bench.knock_at("lines", headers).await;
        assert_eq!(answer.status, status, "{headers:?}");
    }
    assert_eq!(bench.ask("GET /healthz", &rebound).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_open_screen_refuses_pages_under_foreign_host_names() {
    let bench = bench(",auth=none,origin=http://vm.example");
    let rebound = ["Host: evil.example:6080", "Origin: http://evil.example:6080"];
    assert_eq!(bench.status(&rebound).await, 403);
    // Reads are refused, too, with an explanation.
    for path in ["/", "/power", "/session", "/login", "/lines", "/files/x", "/nothing"] {
        let answer = bench.ask(&format!("GET {path}"), &rebound[..1]).await;
        assert_eq!(answer.status, 403, "{path}");
        assert!(answer.text().contains("origin="), "{}", answer.text());
    }
    assert_eq!(bench.ask("GET /healthz", &rebound[..1]).await.status, 200);
    // A foreign page that came by TLS proves this for itself, not for its connection to us.
    let elsewhere = ["Host: evil.example", "Origin: https://evil.example"];
    assert_eq!(bench.ask("GET /power", &elsewhere).await.status, 403);
    assert_eq!(bench.status(&elsewhere).await, 403);
    let by_tls = ["Host: evil.example", "Sec-Fetch-Site: none"];
    assert_eq!(bench.ask("GET /power", &by_tls).await.status, 200);
    let session = bench.ask("GET /session", &by_tls).await;
    assert!(session.header("set-cookie").ends_with("; secure"), "{}", session.head);
    let proven = format!("Origin: https://evil.example\n{}", session.cookie());
    for own in [
        ["Host: evil.example", &proven],
        ["Host: evil.example", "Origin: https://evil.example\nSec-Fetch-Site: same-origin"],
        ["Host: vm.example", "Origin: http://vm.example"],
        ["Host: nas.local:6080", "Origin: http://nas.local:6080"],
    ] {
        assert_eq!(bench.status(&own).await, 101, "{own:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_with_several_hosts_is_refused() {
    for bench in [bench(",auth=none"), bench(",proxy=127.0.0.1"), bench("")] {
        for hosts in [
            &["Host: evil.example,localhost"][..],
            &["Host: localhost, evil.example"],
            &["Host: evil.example", "Host: localhost"],
            &["Host: localhost", "Host: localhost"],
            &["Host: evil.example@localhost"],
            &["Host: localhost/evil.example"],
            &["Host: localhost:80:80"],
            &["Host: [::1"],
        ] {
            let answer = bench.ask("GET /power", hosts).await;
            assert_eq!(answer.status, 400, "{hosts:?}");
            assert!(answer.text().contains("Host"), "{}", answer.text());
            assert_eq!(bench.status(hosts).await, 400, "{hosts:?}");
        }
        assert_eq!(bench.ask("GET /power", &["Host: [::1]:8006"]).await.status, 200);
    }
    let bench = bench(",proxy=127.0.0.1");
    let forwarded = |host: &str| format!("X-Forwarded-Host: {host}");
    let [own, other] = [forwarded("evil.example, localhost"), forwarded("localhost, evil.example")];
    assert_eq!(bench.ask("GET /power", &["Host: inside", &own]).await.status, 200);
    assert_eq!(bench.ask("GET /power", &["Host: localhost", &other]).await.status, 403);
    // A page can send this header to its own name, and some proxies pass it on.
    let rebound = ["Host: evil.example", &forwarded("localhost"), "X-Forwarded-Proto: https"];
    assert_eq!(bench.ask("GET /power", &rebound[..2]).await.status, 403);
    assert_eq!(bench.ask("GET /power", &rebound).await.status, 403);
    let strange = forwarded("evil.example@localhost");
    assert_eq!(bench.ask("GET /power", &["Host: localhost", &strange]).await.status, 400);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_opens_the_page_and_logout_closes_it() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "f u+ll");
    let view = secret(folder.path(), "view", "look");
    let bench = bench(&format!(",password={full},view-password={view},user=me"));
    let origin = bench.origin();
    let page = bench.ask("GET /", &[]).await;
    assert_eq!((page.status, page.header("location")), (303, "login"));
    assert_eq!(bench.ask("GET /session", &[]).await.status, 401);
    assert_eq!(bench.status(&[&origin]).await, 401, "no cookie");
    let form = bench.ask("GET /login", &[]).await;
    assert!(form.status == 200 && form.text().contains("class=\"named\""), "{}", form.text());
    let good = "user=me&password=f+u%2Bll";
    assert_eq!(bench.log_in("Origin: http://evil.example", good).await.status, 403);
    assert_eq!(bench.log_in("Accept: */*", good).await.status, 403, "no origin");
    let long = format!("password={}", "x".repeat(5000));
    assert_eq!(bench.log_in(&origin, &long).await.status, 413);
    let entered = bench.log_in(&origin, good).await;
    assert_eq!((entered.status, entered.header("location")), (303, "./"));
    let set_cookie = entered.header("set-cookie");
    assert!(set_cookie.ends_with("; httponly; samesite=strict"), "{set_cookie}");
    let cookie = entered.cookie();
    assert_eq!(bench.ask("GET /", &[&cookie]).await.status, 200);
    let session = bench.ask("GET /session", &[&cookie]).await;
    let session: serde_json::Value = serde_json::from_str(&session.text()).unwrap();
    assert_eq!((&session["access"], &session["logout"]), (&"full".into(), &true.into()));
    assert_eq!(bench.status(&["Origin: http://evil.example", &cookie]).await, 403);
    let viewer = bench.look(&[&origin, &cookie]).await;
    let watcher = bench.log_in(&origin, "user=me&password=look").await.cookie();
    let _watching = bench.look(&[&origin, &watcher]).await;
    bench.access(&["full", "view"]).await;
    let out = bench.ask("POST /logout", &["Origin: http://evil.example", &cookie]).await;
    assert_eq!(out.status, 403);
    let out = bench.ask("POST /logout", &[&origin, &cookie]).await;
    assert_eq!((out.status, out.header("location")), (303, "login"));
    assert!(viewer.ends().await, "open connections are closed");
    assert_eq!(bench.status(&[&origin, &cookie]).await, 401);
    // Other viewers stay connected.
    bench.access(&["view"]).await;
    // Programs send the password with each request.
    let basic = format!("Authorization: Basic {}", BASE64_STANDARD.encode("me:f u+ll"));
    bench.look(&[&basic]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_cause_delays_at_every_endpoint() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let bench = bench(&format!(",password={full}"));
    let origin = bench.origin();
    let wrong = bench.log_in(&origin, "password=nope").await;
    assert_eq!((wrong.status, wrong.header("set-cookie")), (401, ""));
    assert!(wrong.text().contains("The password is wrong."));
    let basic = format!("Authorization: Basic {}", BASE64_STANDARD.encode("me:nope"));
    assert_eq!(bench.status(&[&basic]).await, 401);
    let (limiter, network) =
        (bench.server.login_limiter(), PeerNetwork::of("127.0.0.1".parse().unwrap()));
    // VNC clients share the counters of wrong passwords.
    lock_out(limiter, network, 2);
    let early = bench.log_in(&origin, "password=full").await;
    assert_eq!(early.status, 429, "even with the right one");
    assert_ne!(early.header("retry-after"), "");
    limiter.logged_in(network, Access::Full);
    assert_eq!(bench.log_in(&origin, "password=full").await.status, 303);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn additional_routes_are_behind_the_gate() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let view = secret(folder.path(), "view", "view");
    let bench = bench(&format!(",password={full},view-password={view}"));
    let ours = bench.origin();
    let [full, view] = ["full", "view"].map(|word| {
        format!("Authorization: Basic {}", BASE64_STANDARD.encode(format!("x:{word}")))
    });
    let other = "Origin: http://elsewhere.example".to_owned();
    for (line, headers, status) in [
        ("GET /healthz", vec![], 200),
        ("GET /power", vec![], 401),
        ("GET /power", vec![&*full], 200),
        ("GET /power", vec![&*view], 200),
        ("POST /power", vec![&*ours], 401),
        ("POST /power", vec![&*full], 200),
        ("POST /power", vec![&*full, &*ours], 200),
        ("POST /power", vec![&*full, &*other], 403),
        ("POST /power", vec![&*view, &*ours], 403),
    ] {
        assert_eq!(bench.ask(line, &headers).await.status, status, "{line} {headers:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_password_programs_may_act_without_an_origin() {
    let bench = bench(",auth=none");
    let json = "Content-Type: application/json";
    for (headers, status) in [
        (&[json][..], 200),
        (&[json, "Cookie: a=b"], 403),
        (&[json, "Sec-Fetch-Site: cross-site"], 403),
        (&[json, "Origin: http://elsewhere.example"], 403),
        (&[json, "Host: evil.example"], 403),
        (&["Content-Type: text/plain"], 403),
        (&[], 403),
    ] {
        let answer = bench.ask("POST /power", headers).await;
        assert_eq!(answer.status, status, "{headers:?}: {}", answer.text());
        assert!(!answer.text().contains("``"), "{}", answer.text());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_of_many_addresses_are_limited_together() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let bench = bench(&format!(",password={full},proxy=127.0.0.1"));
    let try_it = async |address: &str, password: &str| {
        let basic = BASE64_STANDARD.encode(format!("me:{password}"));
        let headers =
            [format!("X-Forwarded-For: {address}"), format!("Authorization: Basic {basic}")];
        bench.ask("GET /power", &[&headers[0], &headers[1]]).await.status
    };
    assert_eq!(try_it("10.0.0.1", "full").await, 200);
    let mut checked = 0;
    for number in 0..200 {
        let status = try_it(&format!("2001:db8:{number:x}::1"), "guess").await;
        assert!(status == 401 || status == 429, "{status}");
        checked += u32::from(status == 401);
    }
    // One more for each ten seconds that this took.
    assert!((64..100).contains(&checked), "{checked} of 200 guesses were checked");
    assert_eq!(
        try_it("10.0.0.1", "full").await,
        200,
        "an address that was admitted before is not limited"
    );
    let limiter = bench.server.login_limiter();
    let vnc = PeerNetwork::of("10.0.0.9".parse().unwrap());
    assert!(limiter.locked_for(vnc).is_some(), "VNC clients share the limit");
    let near = bench.log_in(&bench.origin(), "password=full").await;
    assert_eq!(near.status, 303, "this host is not limited");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buttons_work_for_same_origin_pages_with_full_access() {
    let bench = bench(",auth=none");
    let origin = bench.origin();
    let ours = [&*origin];
    const STATE: &str = r#"{"clipboard":true,"state":"paused"}"#;
    assert_eq!(bench.ask("GET /machine", &[]).await.text(), STATE);
    for (button, status, text) in [
        ("pause", 200, STATE),
        ("off", 200, r#"{"state":"off"}"#),
        ("reset", 409, "no reset\n"),
        ("explode", 404, "There is no such button.\n"),
    ] {
        let answer = bench.ask(&format!("POST /machine/{button}"), &ours).await;
        assert_eq!((answer.status, &*answer.text()), (status, text), "{button}");
    }
    let elsewhere = ["Origin: http://evil.example"];
    assert_eq!(bench.ask("POST /machine/off", &elsewhere).await.status, 403);
    let session = bench.ask("GET /session", &ours).await.text();
    let session: serde_json::Value = serde_json::from_str(&session).unwrap();
    assert_eq!((&session["keyboard"], &session["usb"]), (&"us".into(), &false.into()));
    let characters = session["characters"].as_str().unwrap();
    assert!(characters.contains('a') && !characters.contains('ä'));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_routes_can_be_nested_below_a_path() {
    let (server, board) = server();
    let rules = Rules { name: "a test".into(), ..Rules::default() };
    let router = routes::router(own(&server), rules, Farewell::default(), more());
    let router = axum::Router::new().nest("/vm/one/", router);
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = socket.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, peer)) = socket.accept().await {
            let line = Connection { address: Some(peer.ip()), tls: false };
            let service = TowerToHyperService::new(router.clone().layer(axum::Extension(line)));
            let io = TokioIo::new(Box::new(stream) as Wire);
            let connection = http1::Builder::new().serve_connection(io, service);
            tokio::spawn(connection.with_upgrades());
        }
    });
    let bench = Bench { address, base: "/vm/one", server, board };
    let page = bench.ask("GET /vm/one/", &[]).await;
    assert_eq!(page.status, 200, "{}", page.head);
    let text = page.text();
    assert!(text.contains("action=\"logout\""), "{text}");
    let script = text.split('"').find(|it| it.ends_with("viewer.js")).expect("a script");
    assert_eq!(bench.ask(&format!("GET /vm/one/{script}"), &[]).await.status, 200);
    bench.look(&[&bench.origin()]).await;
    assert_eq!(bench.status(&["Origin: http://evil.example"]).await, 403);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_are_too_long_or_too_many_are_refused() {
    let bench = bench("");
    let mut talker = bench.connect().await;
    talker.write_all(b"GET / HTTP/1.1\r\nCookie: ").await.unwrap();
    let talks = async {
        // Until the server stops reading, which is long before the time limit of the head.
        while talker.write_all(&[b'x'; 4096]).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(5), talks).await.expect("an end");
    // Idle clients give way to active ones.
    let mut idle = Vec::new();
    for _ in 0..300 {
        idle.push(bench.connect().await);
        if idle.len() % 100 == 0 {
            assert_eq!(bench.ask("GET /healthz", &[]).await.status, 200);
        }
    }
    drop(idle);
    // If all slots are busy, only health checks are answered.
    let mut busy = Vec::new();
    let crowded = async {
        // A connection whose request was not read yet gave way to ours.
        while busy.len() < 256 || bench.tries("GET /session").await != Some(503) {
            let mut stream = bench.connect().await;
            stream.write_all(b"GET /waits HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
            busy.push(stream);
        }
    };
    timeout(TIMEOUT, crowded).await.expect("all slots are busy");
    assert_eq!(bench.ask("GET /healthz", &[]).await.status, 200);
    drop(busy);
    let open = async { while bench.tries("GET /session").await != Some(200) {} };
    timeout(TIMEOUT, open).await.expect("slots are free again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_requests_block_no_other_client() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let bench = bench(&format!(",password={full}"));
    let head = "POST /login HTTP/1.1\nHost: localhost\nContent-Length: 100\nTransfer-Encoding: ";
    let plain = head.replace("\nTransfer-Encoding: ", "");
    let mut unfinished = Vec::new();
    for number in 0..300 {
        let head = if number % 2 == 0 { &plain } else { &format!("{head}chunked") };
        let text = format!("{head}\nOrigin: http://localhost\n\n9\npassword=");
        let mut stream = bench.connect().await;
        stream.write_all(text.replace('\n', "\r\n").as_bytes()).await.unwrap();
        unfinished.push(stream);
        if number > 250 {
            assert_eq!(bench.ask("GET /login", &[]).await.status, 200, "{number}");
        }
    }
    let origin = bench.origin();
    assert_eq!(bench.log_in(&origin, "password=full").await.status, 303);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_request_bodies_are_refused() {
    let bench = bench(",auth=none");
    let text = format!(
        "POST /echo HTTP/1.1\nHost: {}\nContent-Type: application/json\nConnection: close\n\
         Content-Length: 9\n\n",
        bench.address
    );
    assert_eq!(say(bench.connect().await, &format!("{text}123456789")).await.text(), "123456789");
    assert_eq!(say(bench.connect().await, &format!("{text}1234")).await.status, 408);
    let text = text.replace(": 9", ": 99999");
    let long = say(bench.connect().await, &format!("{text}{}", "1".repeat(99_999))).await;
    assert_eq!(long.status, 413);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn viewers_per_address_are_limited_and_refused_with_a_reason() {
    let bench = bench(",proxy=127.0.0.1");
    let origin = bench.origin();
    let (one, other) = ("X-Forwarded-For: 10.0.0.1", "X-Forwarded-For: 10.0.0.2");
    let mut there = Vec::new();
    for _ in 0..16 {
        there.push(bench.look(&[&origin, one]).await);
    }
    let (_, refused) = bench.knock(&[&origin, one]).await;
    assert_eq!(refused.status, 503);
    assert_ne!(refused.header("retry-after"), "");
    assert_eq!(bench.status(&[&origin, other]).await, 101);
    drop(there);
    let again = async { while bench.status(&[&origin, one]).await != 101 {} };
    timeout(TIMEOUT, again).await.expect("disconnected viewers free their slots");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_loopback_addresses_share_one_login_limit() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let bench = bench(&format!(",password={full}"));
    let address = bench.address.parse().unwrap();
    let basic = |password| BASE64_STANDARD.encode(format!("me:{password}"));
    let text = |password| {
        format!(
            "GET /power HTTP/1.1\nHost: localhost\nConnection: close\nAuthorization: Basic {}\n\n",
            basic(password)
        )
    };
    let mut checked = 0;
    for number in 0..600_u16 {
        let [high, low] = number.to_be_bytes();
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind((Ipv4Addr::new(127, 1, high, low), 0).into()).unwrap();
        let answer = say(socket.connect(address).await.unwrap(), &text("guess")).await;
        assert!([401, 429].contains(&answer.status), "{}", answer.status);
        checked += u32::from(answer.status == 401);
    }
    // Two at once, then the time between guesses doubles.
    assert!((2..20).contains(&checked), "{checked} of 600 guesses were checked");
    // Other addresses are not affected.
    let network = PeerNetwork::of("10.0.0.1".parse().unwrap());
    assert_eq!(bench.server.login_limiter().locked_for(network), None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_on_a_unix_socket_is_trusted() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("web");
    let full = secret(folder.path(), "full", "full");
    let words = format!("unix:{},password={full}", path.display());
    let listener = Listener::new(&keyvalue::parse(&words, Some("to")).unwrap()).unwrap();
    let (server, _board) = server();
    let shown = own(&server);
    tokio::spawn(async { listener.run(shown, routes::health()).await });
    let text = "POST /login HTTP/1.1\nHost: backend\nConnection: close\nX-Forwarded-For: \
                10.0.0.7\nX-Forwarded-Host: vm.example\nX-Forwarded-Proto: https\nOrigin: \
                https://vm.example\nContent-Length: 13\n\npassword=nope";
    for _ in 0..2 {
        let line = tokio::net::UnixStream::connect(&path).await.unwrap();
        assert_eq!(say(line, text).await.status, 401);
    }
    let network = |text: &str| PeerNetwork::of(text.parse().unwrap());
    assert_eq!(
        server.login_limiter().failed(network("10.0.0.7")),
        3,
        "this address is slowed down"
    );
    assert!(server.login_limiter().locked_for(network("10.0.0.8")).is_none(), "others are not");
    let text = text.replace("10.0.0.7", "10.0.0.8").replace("=nope", "=full");
    let line = tokio::net::UnixStream::connect(&path).await.unwrap();
    let entered = say(line, &text).await;
    assert_eq!(entered.status, 303);
    assert!(entered.header("set-cookie").ends_with("; secure"), "the browser uses TLS");
}

#[derive(Debug)]
struct FixedTime;

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        // Within the life of the certificates, whatever the clock of this host says.
        Some(UnixTime::since_unix_epoch(Duration::from_secs(2_000_000_000)))
    }
}

/// Returns the server's certificate and the answer to a request.
async fn over_tls(bench: &Bench, path: &str) -> (CertificateDer<'static>, Answer) {
    let mut roots = RootCertStore::empty();
    for text in [CERTIFICATE, OTHER_CERTIFICATE] {
        roots.add(CertificateDer::from_pem_slice(text.as_bytes()).unwrap()).unwrap();
    }
    let client =
        ClientConfig::builder_with_details(Arc::new(default_provider()), Arc::new(FixedTime))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let connector = TlsConnector::from(Arc::new(client));
    let stream = connector.connect(name, bench.connect().await).await.unwrap();
    let shown = stream.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned();
    let text = format!("GET {path} HTTP/1.1\nHost: localhost\nConnection: close\n\n");
    (shown, say(stream, &text).await)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_can_be_replaced_at_run_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path(), name, text);
    let (cert, key) = (file("cert", CERTIFICATE), file("key", KEY));
    let bench = bench(&format!(",tls-cert={cert},tls-key={key}"));
    let is = |text: &str| CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
    let (shown, answer) = over_tls(&bench, "/").await;
    assert_eq!((shown, answer.status), (is(CERTIFICATE), 200));
    // A key that matches neither certificate.
    file("key", OTHER_KEY);
    sleep(Duration::from_millis(1100)).await;
    assert_eq!(over_tls(&bench, "/").await.0, is(CERTIFICATE), "the old one stays");
    file("cert", OTHER_CERTIFICATE);
    file("key", THIRD_KEY);
    sleep(Duration::from_millis(1100)).await;
    let (shown, answer) = over_tls(&bench, "/healthz").await;
    assert_eq!((shown, answer.status), (is(OTHER_CERTIFICATE), 200));
    // Plain HTTP gets an explanation.
    let mut plain = bench.connect().await;
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut bytes = Vec::new();
    timeout(TIMEOUT, plain.read_to_end(&mut bytes)).await.expect("an end").ok();
    let answer = Answer::read(&bytes);
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("https://"));
}

#[test]
fn a_port_is_open_to_others_only_when_configured() {
    let outcome = |text: &str| {
        let config = keyvalue::parse::<Config>(text, Some("to"));
        match config.and_then(|config| Listener::new(&config)) {
            Ok(_) => "fine".into(),
            Err(error) => format!("{error:#}"),
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let good = secret(folder.path(), "good", "secret");
    assert_eq!(outcome("127.0.0.1:0"), "fine");
    assert_eq!(outcome("0.0.0.0:0,auth=none"), "fine");
    assert_eq!(outcome(&format!("0.0.0.0:0,password={good},user=me")), "fine");
    assert_eq!(outcome("127.0.0.1:0,origin=https://vm.example:8443,proxy=10.0.0.1"), "fine");
    for (text, words) in [
        ("0.0.0.0:0".to_owned(), "auth=none"),
        ("127.0.0.1:0,user=me".to_owned(), "needs password"),
        (format!("127.0.0.1:0,password={good},auth=none"), "leave one of them out"),
        (format!("127.0.0.1:0,tls-cert={good}"), "tls-key"),
        ("127.0.0.1:0,origin=vm.example".to_owned(), "https://example.org"),
        ("127.0.0.1:0,origin=https://vm.example/path".to_owned(), "without a path"),
        ("127.0.0.1:0,proxy=vm".to_owned(), "IP address"),
        ("127.0.0.1:0,shared".to_owned(), "shared"),
    ] {
        let outcome = outcome(&text);
        assert!(outcome.contains(words) && outcome != "fine", "{text}: {outcome}");
        assert!(!outcome.contains('\n'), "{outcome}");
    }
}
