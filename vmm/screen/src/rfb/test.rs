//! Whole sessions over in-memory connections.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use des::Des;
use des::cipher::{Block, BlockCipherEncrypt as _, KeyInit as _};
use host::display::Mode;
use host::input::{Event, Hub, Key, Lights, Sink};
use host::testutil::agent::{GuestAgent, LINUX};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::time_provider::TimeProvider;
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::canvas::Canvas;
use super::clipboard::{self, ClipboardMessage};
use super::listen::Listener;
use super::lobby::Lobby;
use super::picture::Area;
use super::security::{LoginLimiter, Passwords, PeerNetwork};
use super::testing::{
    CERTIFICATE, FakeDisplay, KEY, OTHER_CERTIFICATE, OTHER_KEY, Random, Received, THIRD_KEY,
    TestClient, draw_randomly, lock_out,
};
use super::{Admission, BUDGET, Entry, Interfaces, MAX_CLIENTS, Power, Rules, Server, tls};
use crate::keys::layout::Layout;
use crate::rfb::format::PixelFormat;

const LONG: Duration = Duration::from_secs(20);

/// A keyboard that records events.
#[derive(Default)]
struct Board {
    events: std::sync::Mutex<Vec<Event>>,
    lights: std::sync::Mutex<Option<Lights>>,
    /// The guest reads no keys.
    full: std::sync::atomic::AtomicBool,
}

impl Sink for Board {
    fn take(&self, event: Event) -> bool {
        let wanted = !matches!(event, Event::Position(_));
        if wanted {
            self.events.lock().unwrap().push(event);
        }
        wanted
    }
    fn lights(&self) -> Option<Lights> {
        *self.lights.lock().unwrap()
    }
    fn has_room(&self) -> bool {
        !self.full.load(Ordering::Relaxed)
    }
}

struct Bench {
    server: Arc<Server>,
    fake: Arc<FakeDisplay>,
    board: Arc<Board>,
    clipboard: Arc<host::clipboard::Hub>,
    power: Arc<std::sync::Mutex<Vec<Power>>>,
    /// The tasks of all clients.
    served: std::sync::Mutex<Vec<JoinHandle<()>>>,
    rules: Arc<Rules>,
}

fn bench(rules: Rules) -> Bench {
    let fake = FakeDisplay::new(320, 200);
    fake.paint(1);
    let (hub, board) = (Arc::<Hub>::default(), Arc::<Board>::default());
    hub.register(board.clone());
    let canvas = Canvas::new(Some(fake.clone()), hub.clone());
    let power = Arc::<std::sync::Mutex<Vec<Power>>>::default();
    let clipboard = Arc::<host::clipboard::Hub>::default();
    let pressed = power.clone();
    let interfaces = Interfaces {
        hub,
        layout: Layout::named("us").unwrap(),
        clipboard: clipboard.clone(),
        sound: Arc::default(),
        power: Box::new(move |wish| pressed.lock().unwrap().push(wish)),
    };
    tokio::spawn(canvas.clone().run());
    let server = Server::new(canvas, interfaces);
    let rules = Arc::new(rules);
    Bench { server, fake, board, clipboard, power, served: Default::default(), rules }
}

impl Bench {
    fn connect(&self, entry: Entry) -> DuplexStream {
        let (near, far) = duplex(64 << 10);
        let admission = Admission { peer: "test".into(), entry };
        let served =
            tokio::spawn(self.server.clone().serve(self.rules.clone(), Box::new(far), admission));
        self.served.lock().unwrap().push(served);
        near
    }

    async fn viewer(&self) -> TestClient {
        let line = self.connect(Entry::Authenticated { view_only: false });
        timeout(LONG, TestClient::open(Box::new(line), true)).await.unwrap().unwrap()
    }

    /// Requests changes until the client's picture equals the display's.
    async fn sees_all(&self, viewer: &mut TestClient) {
        let look = async {
            while viewer.pixels != self.fake.pixels() {
                viewer.request(true).await;
                viewer.receive_update().await.unwrap();
            }
        };
        timeout(LONG, look).await.expect("the picture arrives");
    }

    async fn everybody_left(&self) {
        let left = async {
            while self.served.lock().unwrap().iter().any(|it| !it.is_finished()) {
                sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, left).await.expect("clients leave");
        assert_eq!(self.server.lobby.slots.available_permits(), MAX_CLIENTS);
    }
}

fn rules(passwords: Passwords) -> Rules {
    Rules { passwords, name: "Prüfung".into(), ..Rules::default() }
}

fn both() -> Passwords {
    Passwords { full: Some("full".into()), view: Some("view".into()), user: None }
}

fn network(last: u8) -> Entry {
    Entry::Authenticate(PeerNetwork::of(IpAddr::V4(Ipv4Addr::new(10, 0, 0, last))))
}

/// Plays the frames 1, 2, 3 and so on until it is dropped.
async fn play(sound: Arc<host::sound::Hub>) {
    for number in 1_u32.. {
        sound.play(&number.to_le_bytes());
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_with_qemus_extension_hears_the_guest() {
    let bench = bench(rules(Passwords::default()));
    let sound = bench.server.interfaces.sound.clone();
    sound.add_card();
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[0, -259]).await;
    timeout(LONG, viewer.receive_update()).await.unwrap().unwrap();
    assert_eq!(viewer.signs, [(-259, [0; 4], vec![])]);
    // An invalid format changes nothing. 16 bits, signed, stereo at 48 kHz.
    viewer.send(&[255, 1, 0, 2, 9, 9, 9, 9, 9, 9]).await;
    viewer.send(&[255, 1, 0, 2, 3, 2, 0, 0, 0xbb, 0x80]).await;
    viewer.send(&[255, 1, 0, 0]).await;
    let hear = async {
        let mut begin = [0; 4];
        viewer.stream.read_exact(&mut begin).await.unwrap();
        assert_eq!(begin, [255, 1, 0, 1]);
        let mut heard = Vec::new();
        while heard.len() < 100 {
            let mut data = [0; 4];
            viewer.stream.read_exact(&mut data).await.unwrap();
            assert_eq!(data, [255, 1, 0, 2]);
            for _ in 0..viewer.stream.read_u32().await.unwrap() / 4 {
                heard.push(viewer.stream.read_u32_le().await.unwrap());
            }
        }
        heard
    };
    let heard = tokio::select! {
        () = play(sound) => unreachable!("it plays forever"),
        heard = timeout(LONG, hear) => heard.expect("sound"),
    };
    assert_eq!(heard[0], 0, "the resampler needs two frames");
    assert!(heard[1..].windows(2).all(|two| two[0] + 1 == two[1]), "{heard:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_picture_and_its_changes_arrive_unchanged() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    assert_eq!((viewer.size, viewer.name.as_str()), ((320, 200), "Prüfung"));
    viewer.encodings(&[0, -224]).await;
    viewer.request(false).await;
    viewer.receive_update().await.unwrap();
    assert!(viewer.pixels == bench.fake.pixels(), "the first update is the whole picture");
    for seed in 2..6 {
        bench.fake.paint(seed);
        bench.sees_all(&mut viewer).await;
    }
    bench.fake.draw(300, 199, 0x00ff_0000);
    bench.sees_all(&mut viewer).await;
    let start = Instant::now();
    viewer.request(true).await;
    let quiet = timeout(Duration::from_millis(200), viewer.receive()).await;
    assert!(quiet.is_err() && start.elapsed() >= Duration::from_millis(200), "nothing changed");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_request_gets_the_current_picture() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[0, -224]).await;
    for seed in 2..12 {
        bench.fake.paint(seed);
        viewer.request(false).await;
        timeout(LONG, viewer.receive_update()).await.unwrap().unwrap();
        assert!(viewer.pixels == bench.fake.pixels(), "an older picture, seed {seed}");
    }
}

/// `SetDesktopSize` to 640x480.
const WISH: [u8; 24] =
    [251, 0, 2, 128, 1, 224, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 128, 1, 224, 0, 0, 0, 0];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sizes_reach_clients_and_resize_requests_reach_the_display() {
    let bench = bench(rules(Passwords::default()));
    let (mut extended, mut plain, mut old) =
        (bench.viewer().await, bench.viewer().await, bench.viewer().await);
    extended.encodings(&[0, -223, -308]).await;
    plain.encodings(&[0, -223]).await;
    old.encodings(&[0]).await;
    for viewer in [&mut extended, &mut plain, &mut old] {
        viewer.request(false).await;
        bench.sees_all(viewer).await;
    }
    let screens = |viewer: &TestClient| viewer.signs.iter().filter(|it| it.0 == -308).count();
    assert_eq!(screens(&extended), 1, "the answer to a full request");
    extended.send(&WISH).await;
    extended.receive_update().await.unwrap();
    let (_, area, _) = extended.signs.last().unwrap();
    assert_eq!(*area, [1, 4, 320, 200], "forwarded to the guest");
    assert_eq!(bench.fake.preferred(), Some((640, 480)));
    extended
        .send(&[251, 0, 4, 0, 4, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 4, 0, 0, 0, 0, 0])
        .await;
    extended.receive_update().await.unwrap();
    assert_eq!(extended.signs.last().unwrap().1, [1, 2, 320, 200], "no memory for a megapixel");
    // A client that cannot parse the reply may request sizes too.
    plain.send(&WISH).await;
    plain.request(false).await;
    plain.receive_update().await.unwrap();
    assert!(plain.signs.is_empty(), "{:?}", plain.signs);
    bench.fake.set(Some(Mode { width: 640, height: 480, stride: 2560, start: 0 }));
    bench.fake.paint(9);
    bench.sees_all(&mut extended).await;
    bench.sees_all(&mut plain).await;
    assert_eq!((extended.size, plain.size), ((640, 480), (640, 480)));
    // A client that does not support resizing sees the corner of its size.
    let corner = |picture: &[u32], stride: usize| -> Vec<u32> {
        (0..200).flat_map(|y| picture[y * stride..y * stride + 320].to_vec()).collect()
    };
    let wanted = corner(&bench.fake.pixels(), 640);
    while old.pixels != wanted {
        old.request(true).await;
        timeout(LONG, old.receive_update()).await.unwrap().unwrap();
    }
    bench.fake.set(Some(Mode { width: 100, height: 50, stride: 400, start: 0 }));
    bench.fake.paint(10);
    let small = bench.fake.pixels();
    let pixel = |at: usize| match (at % 320, at / 320) {
        (x @ 0..100, y @ 0..50) => small[y * 100 + x],
        _ => 0,
    };
    let wanted: Vec<u32> = (0..320 * 200).map(pixel).collect();
    while old.pixels != wanted {
        old.request(true).await;
        timeout(LONG, old.receive_update()).await.unwrap().unwrap();
    }
    bench.fake.set(Some(Mode { width: 640, height: 480, stride: 2560, start: 0 }));
    bench.sees_all(&mut extended).await;
    bench.fake.set(None);
    extended.request(true).await;
    while extended.pixels.iter().any(|pixel| *pixel != 0) {
        timeout(LONG, extended.receive_update()).await.unwrap().unwrap();
        extended.request(true).await;
    }
    assert_eq!(extended.size, (640, 480), "a display without a mode is black and keeps its size");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn extensions_are_confirmed_and_answered() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    *bench.board.lights.lock().unwrap() = Some(Lights { caps: true, num: false, scroll: true });
    viewer
        .encodings(&[0, -224, -257, -258, -261, -307, -309, -312, -313, -316, -1_063_131_698])
        .await;
    assert_eq!(viewer.receive().await.unwrap(), Received::Fence(1 << 31, vec![0; 8]));
    assert_eq!(viewer.receive().await.unwrap(), Received::EndOfContinuous);
    assert_eq!(viewer.receive().await.unwrap(), Received::Power(1));
    let Received::Clipboard(caps) = viewer.receive().await.unwrap() else { panic!("no caps") };
    assert_eq!(
        clipboard::read(&caps).unwrap(),
        ClipboardMessage::Caps { request: true, notify: true }
    );
    viewer.send(&[248, 0, 0, 0, 0x80, 0, 0x10, 3, 2, 7, 8]).await;
    viewer.request(false).await;
    let (mut fence, mut lights) = (false, false);
    while !(fence && lights) {
        viewer.request(true).await;
        match timeout(LONG, viewer.receive()).await.unwrap().unwrap() {
            Received::Fence(3, payload) => fence = payload == [7, 8],
            Received::Fence(flags, payload) => {
                assert_eq!((flags, payload.len()), (1 << 31 | 1, 8), "a milestone");
            }
            _ => lights = viewer.signs.iter().any(|it| it.0 == -261),
        }
        bench.fake.draw(0, 0, u32::from(viewer.signs.len() % 2 == 0));
    }
    let signs: BTreeSet<i32> = viewer.signs.iter().map(|it| it.0).collect();
    assert!([-258, -307, -316].iter().all(|it| signs.contains(it)), "{signs:?}");
    assert_eq!(viewer.signs.iter().find(|it| it.0 == -261).unwrap().2, [0b101]);
    for code in [2, 4, 3] {
        viewer.send(&[250, 0, 1, code]).await;
    }
    while viewer.receive().await.unwrap() != Received::Power(0) {}
    assert_eq!(*bench.power.lock().unwrap(), [Power::Off, Power::Reset]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_gets_an_invisible_pointer_once() {
    let bench = bench(rules(Passwords::default()));
    let bytes = |count: usize| Some(vec![0; count]);
    for (numbers, wanted) in [
        (&[0, -224][..], [None, None]),
        (&[0, -239, -314], [bytes(5), None]),
        // A client without LastRect, so that its rectangles are counted.
        (&[2, -314], [None, bytes(8)]),
    ] {
        let mut viewer = bench.viewer().await;
        viewer.encodings(numbers).await;
        for seed in 0..3 {
            bench.fake.paint(seed);
            viewer.request(false).await;
            bench.sees_all(&mut viewer).await;
        }
        let content = |number: i32| {
            let mut found = viewer.signs.iter().filter(|it| it.0 == number);
            let first = found.next();
            assert!(found.next().is_none(), "once is enough");
            first.map(|(_, area, content)| {
                assert_eq!(*area, [0, 0, 1, 1]);
                content.clone()
            })
        };
        assert_eq!([-239, -314].map(content), wanted, "{numbers:?}");
    }
    // The pixel of the pointer has the client's format of two bytes, whenever the client sets it.
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[0, -239]).await;
    let early = timeout(Duration::from_millis(100), viewer.receive()).await;
    assert!(early.is_err(), "it goes with pixels: {early:?}");
    viewer.send(&[0, 0, 0, 0, 16, 16, 0, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0]).await;
    viewer.request(false).await;
    let mut start = [0; 4 + 12 + 3];
    timeout(LONG, viewer.stream.read_exact(&mut start)).await.unwrap().unwrap();
    assert_eq!(start[4..], [0, 0, 0, 0, 0, 1, 0, 1, 0xff, 0xff, 0xff, 0x11, 0, 0, 0]);
    let mut next = [0; 12];
    timeout(LONG, viewer.stream.read_exact(&mut next)).await.unwrap().unwrap();
    assert_eq!(next[8..], [0; 4], "Raw follows");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn continuous_updates_arrive_until_disabled() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[0, -224, -312, -313]).await;
    viewer.send(&[150, 1, 0, 0, 0, 0, 1, 64, 0, 200]).await;
    let mut updates = 0;
    for seed in 0..20 {
        bench.fake.paint(seed + 10);
        while viewer.pixels != bench.fake.pixels() {
            match timeout(LONG, viewer.receive()).await.unwrap().unwrap() {
                Received::Update => updates += 1,
                Received::Fence(_, payload) => {
                    let mut answer = vec![248, 0, 0, 0, 0, 0, 0, 1, 8];
                    answer.extend(payload);
                    viewer.send(&answer).await;
                }
                _ => {}
            }
        }
    }
    assert!(updates >= 20);
    viewer.send(&[150, 0, 0, 0, 0, 0, 1, 64, 0, 200]).await;
    while timeout(LONG, viewer.receive()).await.unwrap().unwrap() != Received::EndOfContinuous {}
    bench.fake.paint(99);
    assert!(timeout(Duration::from_millis(200), viewer.receive()).await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_reach_the_guest_and_are_released_on_disconnect() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    viewer.send(&[4, 1, 0, 0, 0, 0, 0xff, 0xe1]).await;
    viewer.send(&[4, 1, 0, 0, 0, 0, 0, b'A']).await;
    viewer.send(&[4, 0, 0, 0, 0, 0, 0, b'a']).await;
    viewer.send(&[255, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0x9d]).await;
    viewer.send(&[5, 1, 0, 4, 0, 3]).await;
    let count = || bench.board.events.lock().unwrap().len();
    while count() < 5 {
        sleep(Duration::from_millis(5)).await;
    }
    drop(viewer);
    bench.everybody_left().await;
    let key = |code, down| Event::Key(Key::new(code).unwrap(), down);
    while count() < 8 {
        sleep(Duration::from_millis(5)).await;
    }
    let events = bench.board.events.lock().unwrap();
    assert_eq!(
        events[..4],
        [key(0x2a, true), key(0x1e, true), key(0x1e, false), key(0xe01d, true)]
    );
    assert!(events[5..].contains(&key(0x2a, false)) && events[5..].contains(&key(0xe01d, false)));
    assert!(matches!(events[7], Event::Motion(motion) if motion.buttons == 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn typing_faster_than_the_guest_delays_only_the_typist() {
    let bench = bench(rules(Passwords::default()));
    *bench.board.lights.lock().unwrap() = Some(Lights::default());
    let full = |full| bench.board.full.store(full, Ordering::Relaxed);
    full(true);
    let (mut typist, mut other) = (bench.viewer().await, bench.viewer().await);
    for letter in b'a'..=b'z' {
        typist.send(&[4, 1, 0, 0, 0, 0, 0, letter]).await;
        typist.send(&[4, 0, 0, 0, 0, 0, 0, letter]).await;
    }
    // A client that does not type is served all the time.
    other.send(&[5, 0, 0, 4, 0, 3]).await;
    bench.sees_all(&mut other).await;
    let keys = || {
        let events = bench.board.events.lock().unwrap();
        events.iter().filter(|it| matches!(it, Event::Key(..))).count()
    };
    assert_eq!(keys(), 0, "a key was pressed although the queue is full");
    full(false);
    let typed = async {
        while keys() < 52 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, typed).await.expect("all of them arrive");
    let events = std::mem::take(&mut *bench.board.events.lock().unwrap());
    let downs = events.iter().filter(|it| matches!(it, Event::Key(_, true))).count();
    assert_eq!((keys(), downs), (0, 26));
}

/// The next text that arrives in the guest.
async fn text(guest: &mut GuestAgent) -> String {
    loop {
        guest.serve();
        match guest.texts.pop_front() {
            Some(text) => return text,
            None => sleep(Duration::from_millis(5)).await,
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clipboard_texts_go_both_ways() {
    let bench = bench(rules(Passwords::default()));
    let mut guest = GuestAgent::start(&bench.clipboard, LINUX);
    let (mut new, mut old) = (bench.viewer().await, bench.viewer().await);
    new.encodings(&[0, -1_063_131_698]).await;
    assert!(matches!(new.receive().await.unwrap(), Received::Clipboard(_)));
    old.send(b"\x06\0\0\0\0\0\0\x02h\xe4").await;
    assert_eq!(text(&mut guest).await, "hä");
    let mut provide = Vec::new();
    clipboard::provide("€\n", &mut provide);
    provide[0] = 6;
    new.send(&provide).await;
    assert_eq!(text(&mut guest).await, "€\n");
    // The text is too long, but the message behind it is read.
    old.send(&[6, 0, 0, 0, 0, 32, 0, 0]).await;
    for _ in 0..64 {
        old.send(&vec![b'x'; 32 << 10]).await;
    }
    old.send(b"\x06\0\0\0\0\0\0\x03end").await;
    assert_eq!(text(&mut guest).await, "end");
    guest.copy("ö€".as_bytes());
    assert_eq!(old.receive().await.unwrap(), Received::Text(b"\xf6?".to_vec()));
    let Received::Clipboard(notify) = new.receive().await.unwrap() else {
        panic!("no notification")
    };
    assert_eq!(clipboard::read(&notify).unwrap(), ClipboardMessage::Notify(true));
    new.send(&[6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1]).await;
    let Received::Clipboard(text) = new.receive().await.unwrap() else { panic!("no text") };
    assert_eq!(clipboard::read(&text).unwrap(), ClipboardMessage::Provide("ö€".into()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_exclusive_client_disconnects_others_but_not_for_view_only() {
    let bench = bench(rules(Passwords::default()));
    let mut first = bench.viewer().await;
    let looker = bench.connect(Entry::Authenticated { view_only: true });
    let looker = TestClient::open(Box::new(looker), false).await.unwrap();
    let both = async {
        while bench.server.status().len() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, both).await.expect("a view-only client disconnects no other");
    let alone = bench.connect(Entry::Authenticated { view_only: false });
    let _alone = TestClient::open(Box::new(alone), false).await.unwrap();
    assert!(timeout(LONG, first.receive()).await.unwrap().is_err(), "gone");
    let late = bench.connect(Entry::Authenticated { view_only: false });
    let mut late = TestClient::open(Box::new(late), true).await.unwrap();
    assert!(
        timeout(LONG, late.receive()).await.unwrap().is_err(),
        "another client has exclusive access"
    );
    drop(looker);
}

/// Sends a version, and performs VNC authentication. Returns the result.
async fn vnc(line: &mut DuplexStream, version: &[u8; 12], password: &str) -> anyhow::Result<u32> {
    let mut greeting = [0; 12];
    line.read_exact(&mut greeting).await?;
    assert_eq!(&greeting, b"RFB 003.008\n");
    line.write_all(version).await?;
    if version == b"RFB 003.003\n" {
        anyhow::ensure!(line.read_u32().await? == 2, "refused");
    } else {
        let count = line.read_u8().await?;
        anyhow::ensure!(count == 1, "refused");
        assert_eq!(line.read_u8().await?, 2);
        line.write_all(&[2]).await?;
    }
    let mut challenge = [0; 16];
    line.read_exact(&mut challenge).await?;
    let mut key = [0; 8];
    key.iter_mut().zip(password.bytes()).for_each(|(key, byte)| *key = byte.reverse_bits());
    for block in challenge.chunks_exact_mut(8) {
        let mut eight = Block::<Des>::default();
        eight.copy_from_slice(block);
        Des::new(&key.into()).encrypt_block(&mut eight);
        block.copy_from_slice(&eight);
    }
    line.write_all(&challenge).await?;
    Ok(line.read_u32().await?)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn passwords_are_required_in_every_version() {
    let bench = bench(rules(both()));
    for version in [b"RFB 003.003\n", b"RFB 003.007\n", b"RFB 003.008\n"] {
        let mut line = bench.connect(network(1));
        assert_eq!(vnc(&mut line, version, "full").await.unwrap(), 0);
        let viewer = TestClient::init(Box::new(line), true).await.unwrap();
        assert_eq!(viewer.size, (320, 200));
    }
    let mut line = bench.connect(network(1));
    assert_eq!(vnc(&mut line, b"RFB 003.008\n", "view").await.unwrap(), 0);
    let mut looker = TestClient::init(Box::new(line), true).await.unwrap();
    looker.send(&[4, 1, 0, 0, 0, 0, 0, b'a', 250, 0, 1, 4]).await;
    assert_eq!(
        looker.receive().await.unwrap(),
        Received::Power(0),
        "a view-only client may not press buttons"
    );
    looker.encodings(&[0, -308]).await;
    looker.request(true).await;
    looker.send(&WISH).await;
    while looker.signs.last().is_none_or(|it| it.1 != [1, 1, 320, 200]) {
        let update = timeout(LONG, looker.receive_update()).await;
        update.expect("resizing is prohibited for it, too").unwrap();
    }
    assert_eq!(bench.fake.preferred(), None);
    assert!(bench.board.events.lock().unwrap().is_empty());
    for _ in 0..2 {
        let mut line = bench.connect(network(2));
        assert_eq!(vnc(&mut line, b"RFB 003.008\n", "wrong").await.unwrap(), 1);
        let mut reason = vec![0; line.read_u32().await.unwrap() as usize];
        line.read_exact(&mut reason).await.unwrap();
        assert_eq!(reason, b"wrong password");
    }
    let Entry::Authenticate(peer_network) = network(2) else { panic!("it is asked") };
    lock_out(bench.server.login_limiter(), peer_network, 2);
    let mut line = bench.connect(network(2));
    assert!(vnc(&mut line, b"RFB 003.008\n", "full").await.is_err(), "too many guesses");
    let mut line = bench.connect(network(3));
    assert_eq!(
        vnc(&mut line, b"RFB 003.008\n", "full").await.unwrap(),
        0,
        "other addresses may log in"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn relayed_viewers_have_their_announced_names() {
    let bench = bench(rules(Passwords::default()));
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("screen");
    let words = format!("unix:{},announced,name=Prüfung", path.display());
    let listener = Listener::new(&host::keyvalue::parse(&words, Some("to")).unwrap()).unwrap();
    let server = bench.server.clone();
    let serve = move |rules, stream, who| server.clone().serve(rules, stream, who);
    tokio::spawn(async { listener.run(serve).await });
    // This is the other process.
    let limiter = Arc::<LoginLimiter>::default();
    let lobby = Arc::new(Lobby::new(limiter.clone()));
    let connect = |peer: &'static str, entry| {
        let (near, far) = duplex(64 << 10);
        let (lobby, path) = (lobby.clone(), path.clone());
        tokio::spawn(async move {
            let who = Admission { peer: peer.into(), entry };
            let entrant = lobby.admit(&rules(both()), Box::new(far), &who).await?;
            let machine = tokio::net::UnixStream::connect(path).await.unwrap();
            entrant.relay(peer, machine).await.ok()
        });
        near
    };
    let mut line = connect("10.0.0.1:7", network(1));
    assert_eq!(vnc(&mut line, b"RFB 003.003\n", "full").await.unwrap(), 0);
    let mut viewer = TestClient::init(Box::new(line), true).await.unwrap();
    assert_eq!((viewer.size, viewer.name.as_str()), ((320, 200), "Prüfung"));
    viewer.encodings(&[0, -224]).await;
    viewer.request(false).await;
    bench.sees_all(&mut viewer).await;
    let shown = bench.server.status();
    assert_eq!((&shown[0]["peer"], &shown[0]["access"]), (&"10.0.0.1:7".into(), &"full".into()));
    let mut line = connect("10.0.0.2:7", network(2));
    assert_eq!(vnc(&mut line, b"RFB 003.008\n", "wrong").await.unwrap(), 1);
    let Entry::Authenticate(peer_network) = network(2) else { panic!("it is asked") };
    lock_out(&limiter, peer_network, 1);
    assert_eq!(bench.server.status().len(), 1);
}

#[derive(Debug)]
struct FixedTime;

impl TimeProvider for FixedTime {
    fn current_time(&self) -> Option<UnixTime> {
        // A time at which the certificate is valid, whatever the clock of this host says.
        Some(UnixTime::since_unix_epoch(Duration::from_secs(2_000_000_000)))
    }
}

/// Performs the handshake of a viewer with X509Plain. Returns the server's certificate, the
/// connection, and the result of authentication.
async fn over_tls(
    bench: &Bench,
    password: &str,
) -> (CertificateDer<'static>, TlsStream<DuplexStream>, u32) {
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
    let mut line = bench.connect(network(1));
    line.read_exact(&mut [0; 12]).await.unwrap();
    line.write_all(b"RFB 003.008\n").await.unwrap();
    let mut types = [0; 2];
    line.read_exact(&mut types).await.unwrap();
    assert_eq!(types, [1, 19], "nothing without TLS");
    line.write_all(&[19]).await.unwrap();
    assert_eq!(line.read_u16().await.unwrap(), 2);
    line.write_all(&[0, 2]).await.unwrap();
    assert_eq!(line.read_u8().await.unwrap(), 0);
    assert_eq!(line.read_u8().await.unwrap(), 1, "a name is asked for: X509Plain alone");
    assert_eq!(line.read_u32().await.unwrap(), 262);
    line.write_u32(262).await.unwrap();
    assert_eq!(line.read_u8().await.unwrap(), 1);
    let name = ServerName::try_from("localhost").unwrap();
    let mut secure = TlsConnector::from(Arc::new(client)).connect(name, line).await.unwrap();
    let shown = secure.get_ref().1.peer_certificates().unwrap()[0].clone().into_owned();
    secure.write_all(&[0, 0, 0, 2, 0, 0, 0, 4]).await.unwrap();
    secure.write_all(format!("me{password}").as_bytes()).await.unwrap();
    secure.flush().await.unwrap();
    let result = secure.read_u32().await.unwrap();
    assert_eq!(secure.get_ref().1.tls13_tickets_received(), 0, "TigerVNC cannot handle tickets");
    (shown, secure, result)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logins_go_through_tls_with_a_replaceable_certificate() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let (cert, key) = (file("cert", CERTIFICATE), file("key", KEY));
    let error = tls::load(&cert, &file("other", OTHER_KEY)).err().unwrap();
    assert!(format!("{error:#}").contains("is not for tls-key="), "{error:#}");
    let passwords = Passwords { user: Some("me".into()), ..both() };
    let tls = tls::Files::new(Some(&cert), Some(&key)).unwrap();
    let bench = bench(Rules { tls, ..rules(passwords) });
    let is = |text: &str| CertificateDer::from_pem_slice(text.as_bytes()).unwrap();
    let (shown, line, result) = over_tls(&bench, "full").await;
    assert_eq!((shown, result), (is(CERTIFICATE), 0));
    let mut viewer = TestClient::init(Box::new(line), true).await.unwrap();
    viewer.request(false).await;
    bench.sees_all(&mut viewer).await;
    file("cert", OTHER_CERTIFICATE);
    file("key", THIRD_KEY);
    sleep(Duration::from_millis(1100)).await;
    let (shown, _line, result) = over_tls(&bench, "nope").await;
    assert_eq!((shown, result), (is(OTHER_CERTIFICATE), 1));
    // A connected client is not affected.
    bench.fake.paint(2);
    bench.sees_all(&mut viewer).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_listener_has_its_own_rules() {
    let bench = bench(Rules { view_only: true, ..rules(Passwords::default()) });
    let looker = bench.viewer().await;
    let (near, far) = duplex(64 << 10);
    let entry = Entry::Authenticated { view_only: false };
    let admission = Admission { peer: "next door".into(), entry };
    let next = Arc::new(Rules { name: "next".into(), ..Rules::default() });
    tokio::spawn(bench.server.clone().serve(next, Box::new(far), admission));
    let neighbour = timeout(LONG, TestClient::open(Box::new(near), true)).await.unwrap().unwrap();
    assert_eq!((looker.name.as_str(), neighbour.name.as_str()), ("Prüfung", "next"));
    // Clients are registered after they got the size.
    let seated = async {
        while bench.server.status().len() < 2 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, seated).await.expect("both are connected");
    let access = |it: serde_json::Value| it["access"].as_str().unwrap().to_owned();
    let access: BTreeSet<_> = bench.server.status().into_iter().map(access).collect();
    assert_eq!(access, ["full", "view"].map(ToOwned::to_owned).into());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http_is_answered_and_noise_is_closed() {
    let bench = bench(rules(Passwords::default()));
    let mut line = bench.connect(network(1));
    line.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    timeout(LONG, line.read_to_string(&mut answer)).await.unwrap().unwrap();
    assert!(answer.starts_with("HTTP/1.1 400 ") && answer.contains("VNC viewer"), "{answer}");
    for noise in [&b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03xxxx"[..], b"SSH-2.0-OpenSSH\r\n"] {
        let mut line = bench.connect(network(1));
        line.write_all(noise).await.unwrap();
        let mut answer = Vec::new();
        timeout(LONG, line.read_to_end(&mut answer)).await.unwrap().ok();
        assert!(answer.is_empty() || answer == b"RFB 003.008\n");
    }
    let mut viewer = bench.viewer().await;
    viewer.send(&[77]).await;
    assert!(
        timeout(LONG, viewer.receive()).await.unwrap().is_err(),
        "the client was not disconnected"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_with_a_colour_map_receive_one() {
    let bench = bench(rules(Passwords::default()));
    let mut viewer = bench.viewer().await;
    let mut format = PixelFormat::OURS.write();
    (format[0], format[1], format[3]) = (8, 8, 0);
    viewer.send(&[&[0, 0, 0, 0][..], &format].concat()).await;
    assert_eq!(viewer.receive().await.unwrap(), Received::Colours);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_clients_are_refused_with_a_reason() {
    let bench = bench(rules(Passwords::default()));
    let mut viewers = Vec::new();
    for _ in 0..MAX_CLIENTS {
        viewers.push(bench.viewer().await);
    }
    let mut line = bench.connect(network(1));
    line.write_all(b"RFB 003.008\n").await.unwrap();
    let mut answer = Vec::new();
    timeout(LONG, line.read_to_end(&mut answer)).await.unwrap().unwrap();
    let text = String::from_utf8_lossy(&answer);
    assert!(text.contains("too many clients: at most 64"), "{text}");
    viewers.pop();
    let again = async {
        while bench.server.lobby.slots.available_permits() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        bench.viewer().await
    };
    timeout(LONG, again).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silent_clients_do_not_block_clients_with_a_password() {
    let bench = bench(rules(both()));
    // Nor do silent clients take slots of admitted ones.
    let mut viewers = Vec::new();
    for _ in 0..MAX_CLIENTS - 8 {
        viewers.push(bench.viewer().await);
    }
    let mut silent = Vec::new();
    for number in 0..40 {
        let mut line = bench.connect(network(number % 4));
        line.read_exact(&mut [0; 12]).await.ok();
        silent.push(line);
    }
    for last in [1, 9] {
        let mut line = bench.connect(network(last));
        assert_eq!(vnc(&mut line, b"RFB 003.008\n", "full").await.unwrap(), 0);
        viewers.push(TestClient::init(Box::new(line), true).await.unwrap());
    }
    drop(viewers);
}

/// Random bytes of clients, before and after authentication. They may disconnect only the client
/// that sent them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_bytes_disconnect_only_their_own_client() {
    let bench = bench(rules(both()));
    let mut noise = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move || {
        noise ^= noise << 13;
        noise ^= noise >> 7;
        noise ^= noise << 17;
        noise
    };
    const KINDS: [u8; 12] = [0, 2, 3, 4, 5, 6, 150, 248, 250, 251, 255, 77];
    for round in 0..300 {
        let entry =
            if round % 10 == 0 { network(9) } else { Entry::Authenticated { view_only: false } };
        let mut line = bench.connect(entry);
        let mut bytes = b"RFB 003.008\n\x01\x01".to_vec();
        for _ in 0..random() % 40 {
            bytes.push(KINDS[usize::try_from(random() % 12).unwrap()]);
            // Mostly zeros, so that lengths are short and more of a message is parsed.
            let byte = |it: u64| if it.is_multiple_of(3) { it.to_le_bytes()[1] } else { 0 };
            bytes.extend((0..random() % 20).map(|_| byte(random())));
        }
        tokio::spawn(async move {
            let (mut reader, mut writer) = tokio::io::split(&mut line);
            let read = async {
                let mut drain = [0; 4096];
                while reader.read(&mut drain).await.is_ok_and(|count| count > 0) {}
            };
            let write = async {
                writer.write_all(&bytes).await.ok();
                sleep(Duration::from_millis(20)).await;
            };
            tokio::select! { () = read => {} () = write => {} }
        });
        if round % 20 == 19 {
            bench.everybody_left().await;
        }
    }
    let mut viewer = bench.viewer().await;
    viewer.request(false).await;
    bench.sees_all(&mut viewer).await;
}

/// A client without LastRect gets an update in parts too. The number of rectangles equals the
/// announced one, even if the mode changes meanwhile. Areas that the new picture does not cover
/// become black.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_update_is_completed_even_if_the_mode_changes() {
    let mode = |width, height| Some(Mode { width, height, stride: 4 * width, start: 0 });
    for encoding in [0, 2] {
        let bench = bench(rules(Passwords::default()));
        bench.fake.set(mode(1600, 900));
        bench.fake.paint(1);
        let (mut old, mut new) = (bench.viewer().await, bench.viewer().await);
        old.encodings(&[encoding]).await;
        old.request(false).await;
        // The update has begun, and the connection cannot hold all of it.
        let mut first = [0; 4];
        timeout(LONG, old.stream.read_exact(&mut first)).await.unwrap().unwrap();
        assert!(u16::from_be_bytes([first[2], first[3]]) > 2, "{first:?}");
        new.encodings(&[0, -223]).await;
        new.request(false).await;
        bench.sees_all(&mut new).await;
        bench.fake.set(mode(640, 480));
        bench.fake.paint(2);
        bench.sees_all(&mut new).await;
        let rest = old.rectangles(u16::from_be_bytes([first[2], first[3]]));
        timeout(LONG, rest).await.unwrap().unwrap();
        let small = bench.fake.pixels();
        let pixel = |at: usize| match (at % 1600, at / 1600) {
            (x @ 0..640, y @ 0..480) => small[y * 640 + x],
            _ => 0,
        };
        let wanted: Vec<u32> = (0..1600 * 900).map(pixel).collect();
        while old.pixels != wanted {
            old.request(true).await;
            timeout(LONG, old.receive_update()).await.unwrap().unwrap();
        }
    }
}

/// Clients that do not read occupy the budget, and must not block others that need it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_clients_with_large_updates_leave_memory_for_others() {
    let bench = bench(rules(Passwords::default()));
    let size = (2200, 1900);
    bench.fake.set(Some(Mode { width: 2200, height: 1900, stride: 8800, start: 0 }));
    bench.fake.paint(1);
    let mut slow = Vec::new();
    // More clients with Tight and without LastRect than the budget allows.
    for _ in 0..BUDGET * 1024 / (2200 * 1900 * 4) + 2 {
        let mut viewer = bench.viewer().await;
        assert_eq!(viewer.size, size);
        viewer.encodings(&[7]).await;
        viewer.request(false).await;
        slow.push(viewer);
    }
    let taken = async {
        while bench.server.budget.available_permits() >= 2200 * 1900 * 4 / 1024 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, taken).await.expect("clients occupy the budget");
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[7]).await;
    viewer.request(false).await;
    // The update is sent in Raw.
    timeout(LONG, viewer.receive_update()).await.expect("an update").unwrap();
    assert!(viewer.pixels == bench.fake.pixels());
}

/// A client sends requests with long replies and reads none: memory is bounded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_does_not_read_is_not_read_from_either() {
    let bench = bench(rules(Passwords::default()));
    bench.server.copied(&"a text ".repeat(100_000));
    let mut viewer = bench.viewer().await;
    viewer.encodings(&[0, -312, -1_063_131_698]).await;
    bench.server.copied(&"a text ".repeat(100_000));
    let mapped = [0, 0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let text = [6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1];
    let (mut reader, mut writer) = tokio::io::split(viewer.stream);
    let flood = async {
        let all = [&mapped[..], &text].concat().repeat(100);
        while writer.write_all(&all).await.is_ok() {}
    };
    assert!(timeout(Duration::from_secs(1), flood).await.is_err(), "the client was disconnected");
    let client = bench.server.all().pop().expect("the client is connected");
    let waits = client.state(|state| state.replies.len());
    assert!(waits < (64 << 10) + (64 << 10), "{waits} bytes wait");
    // The server continues when the client reads.
    let read = async { while reader.read(&mut [0; 65536]).await.is_ok_and(|count| count > 0) {} };
    let more = async { writer.write_all(&[0; 1 << 20]).await.ok() };
    timeout(LONG, async {
        tokio::select! { () = read => {} _ = more => {} }
    })
    .await
    .unwrap();
}

/// Fifty clients: good ones keep seeing the picture while others stall, read slowly, send noise,
/// and reconnect. In the end, all clients are gone and the picture is freed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_clients_do_not_disturb_good_ones() {
    let bench = bench(rules(Passwords::default()));
    let alone = frames(&bench).await;
    let mut bad = tokio::task::JoinSet::new();
    for kind in 0..40 {
        let line = bench.connect(Entry::Authenticated { view_only: kind % 2 == 0 });
        bad.spawn(misbehave(kind, line));
    }
    // Other load on the host makes some rounds slower and none faster. A client that blocks others
    // would make all of them far slower than this limit.
    let mut together = 0.0_f64;
    for _ in 0..3 {
        together = together.max(frames(&bench).await);
        if together * 4.0 >= alone {
            break;
        }
    }
    assert!(together * 4.0 >= alone, "{alone} updates a second without, {together} with");
    bad.shutdown().await;
    bench.everybody_left().await;
    let forgotten = async {
        while bench.server.canvas.with_picture(|picture| picture.pixels.capacity()) > 0 {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, forgotten).await.expect("without clients there is no picture");
}

const GOOD: u32 = 10;

/// Number of updates per second that good clients see of a changing picture. Measures two seconds,
/// and longer until there were some.
async fn frames(bench: &Bench) -> f64 {
    let seen = Arc::new(AtomicU32::new(0));
    let mut good = tokio::task::JoinSet::new();
    for _ in 0..GOOD {
        let (mut viewer, seen) = (bench.viewer().await, seen.clone());
        good.spawn(async move {
            viewer.encodings(&[0, -224]).await;
            loop {
                viewer.request(true).await;
                viewer.receive_update().await.unwrap();
                seen.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    let start = Instant::now();
    let mut seed = 1000;
    while start.elapsed() < Duration::from_secs(2) || seen.load(Ordering::Relaxed) < GOOD {
        assert!(start.elapsed() < LONG, "{seen:?} updates");
        bench.fake.paint(seed);
        seed += 1;
        sleep(Duration::from_millis(10)).await;
    }
    let rate = f64::from(seen.load(Ordering::Relaxed)) / start.elapsed().as_secs_f64();
    good.shutdown().await;
    rate
}

async fn misbehave(kind: u32, line: DuplexStream) {
    let Ok(mut viewer) = TestClient::open(Box::new(line), true).await else { return };
    match kind % 4 {
        // Requests the whole picture all the time and never reads.
        0 => loop {
            let full = [3, 0, 0, 0, 0, 0, 1, 64, 0, 200];
            if viewer.stream.write_all(&full).await.is_err() {
                return;
            }
            sleep(Duration::from_millis(1)).await;
        },
        // Reads a byte from time to time.
        1 => {
            viewer.request(false).await;
            while viewer.stream.read_u8().await.is_ok() {
                sleep(Duration::from_millis(20)).await;
            }
        }
        // Sends noise.
        2 => {
            let noise: Vec<u8> = (0..255_u32).map(|it| (it * kind + 7).to_le_bytes()[0]).collect();
            while viewer.stream.write_all(&noise).await.is_ok() {}
        }
        // Disconnects in the middle of an update.
        _ => viewer.request(false).await,
    }
}

/// Shows scrolling content to a client with these encodings. Returns the numbers of pixels that it
/// moved and received.
async fn scrolls(bench: &Bench, encodings: &[i32]) -> (usize, usize) {
    let mut viewer = bench.viewer().await;
    viewer.encodings(encodings).await;
    viewer.request(false).await;
    bench.sees_all(&mut viewer).await;
    (viewer.moved, viewer.drawn) = (0, 0);
    let mut random = Random::new(3);
    for _ in 0..10 {
        bench.fake.redraw(|pixels, width| {
            pixels.copy_within(10 * width.., 0);
            let start = pixels.len() - 10 * width;
            pixels[start..].iter_mut().for_each(|pixel| *pixel = random.colour());
        });
        bench.sees_all(&mut viewer).await;
    }
    (viewer.moved, viewer.drawn)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrolled_areas_are_moved_for_clients_with_copyrect() {
    let bench = bench(rules(Passwords::default()));
    let all = 320 * 200;
    let (moved, drawn) = scrolls(&bench, &[0]).await;
    assert!(moved == 0 && drawn >= 10 * all, "{drawn} pixels");
    for encodings in [&[0, 1][..], &[1, 0, -224], &[1, 0, -223, -308]] {
        // A scan may run in the middle of a write, and then finds less.
        let (moved, drawn) = scrolls(&bench, encodings).await;
        assert!(moved > 5 * all && drawn < 7 * all, "{moved} pixels moved, {drawn} sent");
    }
}

/// Requests updates of parts, of everything, with delays, or of changes as they come.
async fn request_randomly(mut viewer: TestClient, seed: u32) -> TestClient {
    let mut random = Random::new(seed);
    let mut numbers = vec![0, -223];
    numbers.extend([1].iter().filter(|_| seed > 0));
    numbers.extend([-224].iter().filter(|_| seed.is_multiple_of(2)));
    viewer.encodings(&numbers).await;
    viewer.request(false).await;
    for _ in 0..60 {
        if seed > 1 && random.below(3) == 0 {
            sleep(Duration::from_millis(random.below(40).into())).await;
        }
        if seed > 2 {
            let Area { x, y, width, height } = random.area(viewer.size);
            viewer.request_area(random.below(9) > 0, [x, y, width, height]).await;
            sleep(Duration::from_millis(random.below(4).into())).await;
        }
        viewer.request(random.below(30) > 0).await;
        timeout(LONG, viewer.receive_update())
            .await
            .expect("something is drawn all the time")
            .unwrap();
    }
    viewer
}

/// All kinds of clients at once. In the end, clients with and without CopyRect see the picture of
/// the display.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_clients_converge_to_the_same_picture() {
    let bench = bench(rules(Passwords::default()));
    let mut clients = tokio::task::JoinSet::new();
    for seed in 0..6 {
        clients.spawn(request_randomly(bench.viewer().await, seed));
    }
    let mut random = Random::new(11);
    let mut viewers = Vec::new();
    while !clients.is_empty() {
        if random.below(100) == 0 {
            let (width, height) = (320 + 32 * u32::from(random.below(3)), 200);
            bench.fake.set(Some(Mode { width, height, stride: 4 * width, start: 0 }));
        }
        bench.fake.redraw(|pixels, width| {
            let height = u16::try_from(pixels.len() / width).unwrap();
            draw_randomly(pixels, (u16::try_from(width).unwrap(), height), &mut random);
        });
        sleep(Duration::from_millis(random.below(12).into())).await;
        while let Some(viewer) = clients.try_join_next() {
            viewers.push(viewer.unwrap());
        }
    }
    let mut moved = Vec::new();
    for viewer in &mut viewers {
        bench.sees_all(viewer).await;
        moved.push(viewer.moved);
    }
    moved.sort_unstable();
    eprintln!("pixels that each client moved: {moved:?}");
    assert!(moved[0] == 0 && moved[1..].iter().all(|it| *it > 320 * 200), "{moved:?}");
}
