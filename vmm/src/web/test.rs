//! A browser's way in, over real sockets: pages, cookies, refusals, the WebSocket, TLS.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::Request;
use axum::routing::get;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use devices::input::{Event, Hub, Sink};
use futures_util::{SinkExt as _, StreamExt as _};
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
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
use super::{Config, routes, talk};
use crate::keys::layout::Layout;
use crate::keyvalue;
use crate::rfb::canvas::Canvas;
use crate::rfb::security::{Door, Right};
use crate::rfb::testing::{
    CERTIFICATE, Fake, KEY, OTHER_CERTIFICATE, OTHER_KEY, THIRD_KEY, lock_out,
};
use crate::rfb::{Outside, Server, Wire};
use crate::web::gate::{Line, Rules};
use crate::web::stage::{More, Own};

const LONG: Duration = Duration::from_secs(20);

/// A keyboard that remembers.
#[derive(Default)]
struct Board(Mutex<Vec<Event>>);

impl Sink for Board {
    fn take(&self, event: Event) -> bool {
        self.0.lock().unwrap().push(event);
        true
    }
}

struct Bench {
    place: String,
    /// The path that all others are below.
    base: &'static str,
    server: Arc<Server>,
    board: Arc<Board>,
}

fn server() -> (Arc<Server>, Arc<Board>) {
    let fake = Fake::new(64, 48);
    fake.paint(1);
    let (hub, board) = (Arc::<Hub>::default(), Arc::<Board>::default());
    hub.register(board.clone());
    let canvas = Canvas::new(Some(fake), hub.clone());
    let outside = Outside {
        hub,
        layout: Layout::named("us").unwrap(),
        clipboard: None,
        power: Box::new(|_| {}),
    };
    tokio::spawn(canvas.clone().run());
    (Server::new(canvas, outside), board)
}

/// A stage for it.
fn own(server: &Arc<Server>) -> Arc<Own> {
    Arc::new(Own::new(server.clone(), "a test".into()))
}

/// What is served besides, as a container does it.
fn more() -> More {
    let told =
        get(|request: Request| async { talk::open(request, async |talk| talk.close().await) });
    let health = routes::health();
    let more = More { open: health.open.route("/told", told), ..health };
    let inside =
        axum::Router::new().route("/power", get(|| async { "on" }).post(|| async { "off" }));
    More { inside, ..more }
}

/// Listens as `--web 127.0.0.1:0` and these words say.
fn bench(words: &str) -> Bench {
    let words = format!("127.0.0.1:0,name=a test{words}");
    let config: Config = keyvalue::parse(&words, Some("to")).expect("a configuration");
    let listener = Listener::new(&config).expect("a port");
    let place = listener.place();
    let place = place.split('/').nth(2).expect("a place").to_owned();
    let (server, board) = server();
    let shown = own(&server);
    tokio::spawn(async { listener.run(shown, more()).await });
    Bench { place, base: "", server, board }
}

/// A file with a password.
fn secret(folder: &Path, name: &str, text: &str) -> String {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

/// What a request is answered with.
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

    /// The pair of a cookie.
    fn cookie(&self) -> String {
        format!("Cookie: {}", self.header("set-cookie").split(';').next().unwrap())
    }
}

async fn say<S: crate::rfb::Duplex>(mut stream: S, request: &str) -> Answer {
    let request = request.trim_start().replace('\n', "\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut bytes = Vec::new();
    timeout(LONG, stream.read_to_end(&mut bytes)).await.expect("an answer").ok();
    Answer::read(&bytes)
}

impl Bench {
    async fn connect(&self) -> TcpStream {
        TcpStream::connect(&self.place).await.unwrap()
    }

    async fn ask(&self, line: &str, headers: &[&str]) -> Answer {
        let place = &self.place;
        let headers: String = headers.iter().map(|it| format!("{it}\n")).collect();
        let host = if headers.contains("Host:") { "" } else { &format!("Host: {place}\n") };
        let text = format!("{line} HTTP/1.1\n{host}Connection: close\n{headers}\n");
        say(self.connect().await, &text).await
    }

    fn origin(&self) -> String {
        format!("Origin: http://{}", self.place)
    }

    async fn log_in(&self, origin: &str, body: &str) -> Answer {
        let text = format!(
            "POST /login HTTP/1.1\nHost: {}\nConnection: close\n{origin}\nContent-Type: \
             application/x-www-form-urlencoded\nContent-Length: {}\n\n{body}",
            self.place,
            body.len()
        );
        say(self.connect().await, &text).await
    }

    /// Asks for the WebSocket.
    async fn knock(&self, headers: &[&str]) -> (TcpStream, Answer) {
        self.knock_at("websockify", headers).await
    }

    async fn knock_at(&self, page: &str, headers: &[&str]) -> (TcpStream, Answer) {
        let mut stream = self.connect().await;
        let headers: String = headers.iter().map(|it| format!("{it}\n")).collect();
        let host = if headers.contains("Host:") { "" } else { &format!("Host: {}\n", self.place) };
        let text = format!(
            "GET {}/{page} HTTP/1.1\n{host}Connection: keep-alive, Upgrade\nUpgrade: \
             websocket\nSec-WebSocket-Version: 13\nSec-WebSocket-Key: \
             dGhlIHNhbXBsZSBub25jZQ==\nSec-WebSocket-Protocol: binary\n{headers}\n",
            self.base
        );
        stream.write_all(text.replace('\n', "\r\n").as_bytes()).await.unwrap();
        let mut bytes = Vec::new();
        while !bytes.ends_with(b"\r\n\r\n") {
            let byte = timeout(LONG, stream.read_u8()).await.expect("an answer").expect("a head");
            bytes.push(byte);
        }
        (stream, Answer::read(&bytes))
    }

    async fn status(&self, headers: &[&str]) -> u16 {
        self.knock(headers).await.1.status
    }

    /// Comes in, as noVNC does.
    async fn look(&self, headers: &[&str]) -> Viewer {
        let (stream, answer) = self.knock(headers).await;
        assert_eq!(answer.status, 101, "{}", answer.head);
        assert_eq!(answer.header("sec-websocket-accept"), "s3pplmbitxaq9kygzzhzrbk+xoo=");
        assert_eq!(answer.header("sec-websocket-protocol"), "binary");
        let socket = WebSocketStream::from_raw_socket(stream, Role::Client, None).await;
        let mut viewer = Viewer { socket, came: Vec::new() };
        assert_eq!(viewer.read(12).await, b"RFB 003.008\n");
        viewer.say(b"RFB 003.008\n").await;
        assert_eq!(viewer.read(2).await, [1, 1], "nothing more is asked");
        viewer.say(&[1]).await;
        assert_eq!(viewer.read(4).await, [0; 4]);
        viewer.say(&[1]).await;
        let init = viewer.read(24).await;
        assert_eq!(init[..4], [0, 64, 0, 48]);
        assert_eq!(viewer.read(init[23].into()).await, b"a test");
        viewer
    }

    /// Waits until this is what those who are there may do.
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
            let message = timeout(LONG, self.socket.next()).await.expect("bytes");
            match message.expect("more").expect("a message") {
                Message::Binary(bytes) => self.came.extend(bytes),
                Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        }
        self.came.drain(..count).collect()
    }

    /// Whether the server lets go.
    async fn ends(mut self) -> bool {
        let end = async {
            while let Some(Ok(message)) = self.socket.next().await {
                if matches!(message, Message::Close(_)) {
                    break;
                }
            }
        };
        timeout(LONG, end).await.is_ok()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_page_and_its_files_are_there_and_safe() {
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
    let said = bench.ask("GET /websockify", &[&bench.origin()]).await;
    assert_eq!(said.status, 426, "{}", said.text());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_password_only_pages_of_ours_reach_the_screen() {
    let bench = bench("");
    let origin = bench.origin();
    let mut viewer = bench.look(&[&origin]).await;
    bench.access(&["full"]).await;
    // The A key goes down, and the whole picture comes.
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
    // A name of somebody else's that leads here.
    let rebound = ["Host: evil.example:6080", "Origin: http://evil.example:6080"];
    assert_eq!(bench.status(&rebound).await, 403);
    let page = bench.ask("GET /", &rebound[..1]).await;
    assert_eq!(page.status, 403);
    assert!(page.text().contains("origin="), "{}", page.text());
    // Text is not for this line.
    viewer.socket.send(Message::Text("hello".into())).await.unwrap();
    assert!(viewer.ends().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_everybody_is_told_is_told_to_no_page_of_others() {
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
        let (_, answer) = bench.knock_at("told", headers).await;
        assert_eq!(answer.status, status, "{headers:?}");
    }
    assert_eq!(bench.ask("GET /healthz", &rebound).await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_everybody_may_come_pages_of_anybodys_name_do_not_reach_the_screen() {
    let bench = bench(",auth=none,origin=http://vm.example");
    let rebound = ["Host: evil.example:6080", "Origin: http://evil.example:6080"];
    assert_eq!(bench.status(&rebound).await, 403);
    // Its page says why.
    let page = "Referer: http://evil.example:6080/";
    let session = bench.ask("GET /session", &[rebound[0], page]).await;
    assert_eq!(session.status, 403);
    assert!(session.text().contains("origin="), "{}", session.text());
    for own in [
        ["Host: evil.example", "Origin: https://evil.example"],
        ["Host: vm.example", "Origin: http://vm.example"],
        ["Host: nas.local:6080", "Origin: http://nas.local:6080"],
    ] {
        assert_eq!(bench.status(&own).await, 101, "{own:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_opens_the_page_and_logging_out_closes_it() {
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
    let said = entered.header("set-cookie");
    assert!(said.ends_with("; httponly; samesite=strict"), "{said}");
    let cookie = entered.cookie();
    assert_eq!(bench.ask("GET /", &[&cookie]).await.status, 200);
    let session = bench.ask("GET /session", &[&cookie]).await;
    assert_eq!(session.text(), r#"{"access":"full","logout":true}"#);
    assert_eq!(bench.status(&["Origin: http://evil.example", &cookie]).await, 403);
    let viewer = bench.look(&[&origin, &cookie]).await;
    let watcher = bench.log_in(&origin, "user=me&password=look").await.cookie();
    let _watching = bench.look(&[&origin, &watcher]).await;
    bench.access(&["full", "view"]).await;
    let out = bench.ask("POST /logout", &["Origin: http://evil.example", &cookie]).await;
    assert_eq!(out.status, 403);
    let out = bench.ask("POST /logout", &[&origin, &cookie]).await;
    assert_eq!((out.status, out.header("location")), (303, "login"));
    assert!(viewer.ends().await, "what was open is closed");
    assert_eq!(bench.status(&[&origin, &cookie]).await, 401);
    // Others stay.
    bench.access(&["view"]).await;
    // Programs say it with each request.
    let basic = format!("Authorization: Basic {}", BASE64_STANDARD.encode("me:f u+ll"));
    bench.look(&[&basic]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_passwords_cost_time_at_every_door() {
    let folder = tempfile::tempdir().unwrap();
    let full = secret(folder.path(), "full", "full");
    let bench = bench(&format!(",password={full}"));
    let origin = bench.origin();
    let wrong = bench.log_in(&origin, "password=nope").await;
    assert_eq!((wrong.status, wrong.header("set-cookie")), (401, ""));
    assert!(wrong.text().contains("That is not the password."));
    let basic = format!("Authorization: Basic {}", BASE64_STANDARD.encode("me:nope"));
    assert_eq!(bench.status(&[&basic]).await, 401);
    let (doors, door) = (bench.server.doors(), Door::of("127.0.0.1".parse().unwrap()));
    // VNC clients wait at the same door.
    lock_out(doors, door, 2);
    let early = bench.log_in(&origin, "password=full").await;
    assert_eq!(early.status, 429, "even with the right one");
    assert_ne!(early.header("retry-after"), "");
    doors.opened(door, Right::Full);
    assert_eq!(bench.log_in(&origin, "password=full").await.status, 303);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_served_besides_is_behind_the_gate() {
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
async fn it_can_be_a_part_of_something_else_below_a_path() {
    let (server, board) = server();
    let rules = Rules { name: "a test".into(), ..Rules::default() };
    let router = routes::router(own(&server), rules, Farewell::default(), more());
    let router = axum::Router::new().nest("/vm/one/", router);
    let socket = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = socket.local_addr().unwrap().to_string();
    tokio::spawn(async move {
        while let Ok((stream, peer)) = socket.accept().await {
            let line = Line { address: Some(peer.ip()), tls: false };
            let service = TowerToHyperService::new(router.clone().layer(axum::Extension(line)));
            let io = TokioIo::new(Box::new(stream) as Wire);
            let connection = http1::Builder::new().serve_connection(io, service);
            tokio::spawn(connection.with_upgrades());
        }
    });
    let bench = Bench { place, base: "/vm/one", server, board };
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
async fn what_is_too_long_or_too_many_is_turned_away() {
    let bench = bench("");
    let mut talker = bench.connect().await;
    talker.write_all(b"GET / HTTP/1.1\r\nCookie: ").await.unwrap();
    let talks = async {
        // Until nobody listens any more, which is long before a head takes too long.
        while talker.write_all(&[b'x'; 4096]).await.is_ok() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(5), talks).await.expect("an end");
    let mut idle = Vec::new();
    for _ in 0..256 {
        idle.push(bench.connect().await);
    }
    let is_served = async || {
        let mut stream = bench.connect().await;
        stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: a\r\n\r\n").await.ok();
        stream.read_u8().await.is_ok()
    };
    let closed = async { while is_served().await {} };
    timeout(Duration::from_secs(8), closed).await.expect("no place is left");
    drop(idle);
    let open = async { while !is_served().await {} };
    timeout(LONG, open).await.expect("and then there are places again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_proxy_at_a_unix_socket_says_for_whom_it_asks() {
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
    let door = |text: &str| Door::of(text.parse().unwrap());
    assert_eq!(server.doors().failed(door("10.0.0.7")), 3, "this one waits");
    assert!(server.doors().closed(door("10.0.0.8")).is_none(), "and no other");
    let text = text.replace("10.0.0.7", "10.0.0.8").replace("=nope", "=full");
    let line = tokio::net::UnixStream::connect(&path).await.unwrap();
    let entered = say(line, &text).await;
    assert_eq!(entered.status, 303);
    assert!(entered.header("set-cookie").ends_with("; secure"), "the browser's line is TLS");
}

#[derive(Debug)]
struct Then;

impl TimeProvider for Then {
    fn current_time(&self) -> Option<UnixTime> {
        // Within the life of the certificates, whatever the clock of this host says.
        Some(UnixTime::since_unix_epoch(Duration::from_secs(2_000_000_000)))
    }
}

/// The certificate that is shown, and the answer to a request.
async fn over_tls(bench: &Bench, path: &str) -> (CertificateDer<'static>, Answer) {
    let mut roots = RootCertStore::empty();
    for text in [CERTIFICATE, OTHER_CERTIFICATE] {
        roots.add(CertificateDer::from_pem_slice(text.as_bytes()).unwrap()).unwrap();
    }
    let client = ClientConfig::builder_with_details(Arc::new(default_provider()), Arc::new(Then))
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
async fn certificates_can_be_replaced_while_it_runs() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret(folder.path(), name, text);
    let (cert, key) = (file("cert", CERTIFICATE), file("key", KEY));
    let bench = bench(&format!(",tls-cert={cert},tls-key={key}"));
    let is = |text: &str| CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
    let (shown, answer) = over_tls(&bench, "/").await;
    assert_eq!((shown, answer.status), (is(CERTIFICATE), 200));
    // A key that is for neither.
    file("key", OTHER_KEY);
    sleep(Duration::from_millis(1100)).await;
    assert_eq!(over_tls(&bench, "/").await.0, is(CERTIFICATE), "the old one stays");
    file("cert", OTHER_CERTIFICATE);
    file("key", THIRD_KEY);
    sleep(Duration::from_millis(1100)).await;
    let (shown, answer) = over_tls(&bench, "/healthz").await;
    assert_eq!((shown, answer.status), (is(OTHER_CERTIFICATE), 200));
    // Who speaks no TLS is told.
    let mut plain = bench.connect().await;
    plain.write_all(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut bytes = Vec::new();
    timeout(LONG, plain.read_to_end(&mut bytes)).await.expect("an end").ok();
    let answer = Answer::read(&bytes);
    assert_eq!(answer.status, 400);
    assert!(answer.text().contains("https://"));
}

#[test]
fn a_port_is_open_to_others_only_when_that_was_said() {
    let said = |text: &str| {
        let config = keyvalue::parse::<Config>(text, Some("to"));
        match config.and_then(|config| Listener::new(&config)) {
            Ok(_) => "fine".into(),
            Err(error) => format!("{error:#}"),
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let good = secret(folder.path(), "good", "secret");
    assert_eq!(said("127.0.0.1:0"), "fine");
    assert_eq!(said("0.0.0.0:0,auth=none"), "fine");
    assert_eq!(said(&format!("0.0.0.0:0,password={good},user=me")), "fine");
    assert_eq!(said("127.0.0.1:0,origin=https://vm.example:8443,proxy=10.0.0.1"), "fine");
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
        let said = said(&text);
        assert!(said.contains(words) && said != "fine", "{text}: {said}");
        assert!(!said.contains('\n'), "{said}");
    }
}
