//! Ports with a client, without one, and with a client that does not read.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use super::*;
use crate::testutil::Bench;
use crate::testutil::driver::{Descriptor, Driver, EVENT_IDX, WRITE};
use host::testutil::noise::Noise;

const AT: Address = Address::new(3, 0);
const RAM: u64 = 1 << 20;
const CONTROL_TO_GUEST: u16 = CONTROL;
const CONTROL_FROM_GUEST: u16 = CONTROL + 1;
const INPUT: u16 = PORT_1;
const OUTPUT: u16 = PORT_1 + 1;
const AGENT: &str = "org.qemu.guest_agent.0";

fn bench(name: Option<&str>, to: Stream) -> Bench {
    let mut bench = Bench::new(usize::try_from(RAM).unwrap());
    let config = Config { slot: Some(AT), name: name.map(str::to_owned), to };
    bench.board.add("virtio-serial", |grants| config.build(grants)).unwrap();
    bench.board.run(Vec::new()).unwrap();
    bench
}

/// A folder with a socket, and a named port that listens on it.
fn agent() -> (tempfile::TempDir, PathBuf, Bench) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("agent");
    let bench = bench(Some(AGENT), Stream::Socket(path.clone()));
    (folder, path, bench)
}

fn connect(path: &Path) -> UnixStream {
    let client = UnixStream::connect(path).unwrap();
    client.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    client
}

/// Starts a driver with all queues.
fn driver<'a>(bench: &'a Bench, features: u64) -> Driver<'a> {
    let mut driver = Driver::find(bench, AT);
    assert!(driver.negotiate(features));
    for queue in 0..u16::try_from(driver.queues.len()).unwrap() {
        driver.enable(queue, 16);
    }
    driver.start();
    assert_eq!(driver.status(), 15);
    driver
}

fn put(driver: &mut Driver<'_>, bytes: &[u8]) -> (u64, u32, bool) {
    let at = driver.allocate(bytes.len() as u64);
    driver.bench.memory.write(at, bytes).unwrap();
    (at, u32::try_from(bytes.len()).unwrap(), false)
}

/// Sends bytes and waits until the device has taken them.
fn send(driver: &mut Driver<'_>, queue: u16, bytes: &[u8]) {
    let piece = put(driver, bytes);
    driver.offer(queue, &[piece]);
    driver.kick(queue);
    driver.wait(queue);
}

/// Offers a buffer and waits until it is returned.
fn receive(driver: &mut Driver<'_>, queue: u16, room: u32) -> Vec<u8> {
    let at = driver.allocate(room.into());
    driver.offer(queue, &[(at, room, true)]);
    driver.kick(queue);
    let length = driver.wait(queue).length;
    driver.bytes(at, length as usize)
}

/// A control message.
fn message(port: u32, event: u16, value: u16) -> Vec<u8> {
    [&port.to_le_bytes()[..], &event.to_le_bytes(), &value.to_le_bytes()].concat()
}

fn send_message(driver: &mut Driver<'_>, event: u16, value: u16) {
    send(driver, CONTROL_FROM_GUEST, &message(1, event, value));
}

fn receive_message(driver: &mut Driver<'_>) -> Vec<u8> {
    receive(driver, CONTROL_TO_GUEST, 64)
}

/// Starts a driver that has opened the agent's port.
fn open<'a>(bench: &'a Bench, features: u64) -> Driver<'a> {
    let mut driver = driver(bench, features | MULTIPORT);
    send_message(&mut driver, DEVICE_READY, 1);
    assert_eq!(receive_message(&mut driver), message(1, DEVICE_ADD, 1));
    send_message(&mut driver, PORT_READY, 1);
    let named = [&message(1, PORT_NAME, 1), AGENT.as_bytes(), &[0]].concat();
    assert_eq!(receive_message(&mut driver), named);
    send_message(&mut driver, PORT_OPEN, 1);
    driver
}

#[test]
fn a_console_needs_no_control_queue() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("console");
    let bench = bench(None, Stream::Socket(path.clone()));
    let mut driver = driver(&bench, EVENT_IDX);
    assert_eq!(driver.queues.len(), 4);
    assert_eq!(driver.device(4), 1_u32.to_le_bytes(), "one port");
    let mut client = connect(&path);
    for round in 0..5_u8 {
        client.write_all(&[b'a', round]).unwrap();
        assert_eq!(receive(&mut driver, 0, 100), [b'a', round]);
        send(&mut driver, 1, &[b'b', round, b'c']);
        let mut got = [0; 3];
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, [b'b', round, b'c']);
    }
    // Without a client the console continues.
    drop(client);
    send(&mut driver, 1, b"lost");
    let mut client = connect(&path);
    client.write_all(b"again").unwrap();
    assert_eq!(receive(&mut driver, 0, 3), b"aga");
    assert_eq!(receive(&mut driver, 0, 3), b"in");
}

#[test]
fn a_console_is_announced_as_always_open() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let bench = bench(None, Stream::File(file.path().to_owned()));
    let mut driver = driver(&bench, MULTIPORT);
    send(&mut driver, CONTROL_FROM_GUEST, &message(0, DEVICE_READY, 1));
    assert_eq!(receive_message(&mut driver), message(0, DEVICE_ADD, 1));
    send(&mut driver, CONTROL_FROM_GUEST, &message(0, PORT_READY, 1));
    assert_eq!(receive_message(&mut driver), message(0, CONSOLE_PORT, 1));
    assert_eq!(receive_message(&mut driver), message(0, PORT_OPEN, 1));
    send(&mut driver, 1, b"hello\n");
    send(&mut driver, 1, &[b'x'; 3 * MAX_TRANSFER]);
    let written = std::fs::read(file.path()).unwrap();
    assert_eq!(written, [b"hello\n".as_slice(), &[b'x'; 3 * MAX_TRANSFER]].concat());
}

#[test]
fn the_guest_is_notified_of_each_client() {
    let (_folder, path, bench) = agent();
    let mut driver = open(&bench, 0);
    assert_eq!(driver.device(4), 2_u32.to_le_bytes(), "port 0, which is not there, and port 1");
    for word in ["one", "two"] {
        let mut client = connect(&path);
        assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
        client.write_all(word.as_bytes()).unwrap();
        assert_eq!(receive(&mut driver, INPUT, 100), word.as_bytes());
        send(&mut driver, OUTPUT, word.as_bytes());
        let mut got = [0; 3];
        client.read_exact(&mut got).unwrap();
        assert_eq!(got, word.as_bytes());
        drop(client);
        assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 0));
        send(&mut driver, OUTPUT, b"nothing reads this");
    }
    // Data from a client that disconnects at once still arrives, followed by the disconnect.
    connect(&path).write_all(b"bye").unwrap();
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    assert_eq!(receive(&mut driver, INPUT, 2), b"by");
    assert_eq!(receive(&mut driver, INPUT, 2), b"e");
    driver.offer(INPUT, &[(0x1000, 1, true)]);
    driver.kick(INPUT);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 0));
}

#[test]
fn the_agent_of_the_clipboard_is_there_while_it_has_the_port_open() {
    let bench = bench(None, Stream::Clipboard);
    let clipboard = bench.board.shared.clipboard.clone();
    let mut driver = driver(&bench, MULTIPORT);
    send_message(&mut driver, PORT_READY, 1);
    let named = [&message(1, PORT_NAME, 1), &b"com.redhat.spice.0\0"[..]].concat();
    assert_eq!(receive_message(&mut driver), named);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    let words = |words: &[u32]| words.iter().flat_map(|it| it.to_le_bytes()).collect::<Vec<_>>();
    let announces = |driver: &mut Driver<'_>| {
        send_message(driver, PORT_OPEN, 1);
        assert_eq!(receive(driver, INPUT, 256)[..16], words(&[1, 28, 1, 6]));
        assert!(!clipboard.has_agent());
        send(driver, OUTPUT, &words(&[1, 28, 1, 6, 0, 0, 8, 0, 1 << 5]));
        assert!(clipboard.has_agent());
    };
    announces(&mut driver);
    clipboard.offer("text");
    assert_eq!(receive(&mut driver, INPUT, 256), words(&[1, 24, 1, 7, 0, 0, 4, 1]));
    // The machine pauses, the agent ends, the driver is unloaded.
    let saved = bench.board.park();
    bench.board.run(saved).unwrap();
    assert!(clipboard.has_agent());
    send_message(&mut driver, PORT_OPEN, 0);
    assert!(!clipboard.has_agent());
    announces(&mut driver);
    driver.set_status(0);
    assert!(!clipboard.has_agent());
}

#[test]
fn a_half_closed_client_still_receives_the_answer() {
    let (_folder, path, bench) = agent();
    let mut driver = open(&bench, EVENT_IDX);
    let mut client = connect(&path);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    client.write_all(b"question").unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    assert_eq!(receive(&mut driver, INPUT, 100), b"question");
    driver.offer(INPUT, &[(0x1000, 1, true)]);
    driver.kick(INPUT);
    send(&mut driver, OUTPUT, b"answer");
    let mut got = [0; 6];
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"answer");
}

/// Writes without blocking until there is no room. Returns the number of bytes written.
fn fill(client: &mut UnixStream, byte: impl Fn(usize) -> u8) -> usize {
    client.set_nonblocking(true).unwrap();
    let mut count = 0;
    let mut quiet = Instant::now();
    while quiet.elapsed() < Duration::from_millis(200) {
        match client.write(&[byte(count)]) {
            Ok(written) => (count, quiet) = (count + written, Instant::now()),
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    count
}

#[test]
fn unread_input_stays_with_the_client() {
    let (_folder, path, bench) = agent();
    let mut client = connect(&path);
    let mut driver = open(&bench, 0);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    send_message(&mut driver, PORT_OPEN, 0);
    driver.offer(INPUT, &[(0x1000, 64, true)]);
    driver.kick(INPUT);
    let pattern = |at: usize| u8::try_from(at % 251).unwrap();
    let count = fill(&mut client, pattern);
    assert_eq!(driver.take(INPUT), None, "no program reads");
    send_message(&mut driver, PORT_OPEN, 1);
    let first = driver.wait(INPUT).length as usize;
    let mut got = driver.bytes(0x1000, first);
    let room = driver.allocate(8192);
    while got.len() < count {
        driver.offer(INPUT, &[(room, 3000, true), (room + 3000, 5000, true)]);
        driver.kick(INPUT);
        let length = driver.wait(INPUT).length as usize;
        assert!(length <= MAX_TRANSFER);
        got.extend(driver.bytes(room, length));
    }
    assert!(got.iter().enumerate().all(|(at, byte)| *byte == pattern(at)));
}

#[test]
fn unsent_output_stays_in_the_guest_through_a_park() {
    let (_folder, path, bench) = agent();
    let mut driver = open(&bench, EVENT_IDX);
    let mut client = connect(&path);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    // Offers buffers of odd length until the device stops returning them.
    let pattern: Vec<u8> = (0..=255).cycle().take(50_001).collect();
    let (at, length, _) = put(&mut driver, &pattern);
    let offer = |driver: &mut Driver<'_>| {
        driver.offer(OUTPUT, &[(at, 101, false), (at + 101, length - 101, false)]);
        driver.kick(OUTPUT);
    };
    // The first buffer fits.
    offer(&mut driver);
    driver.wait(OUTPUT);
    let (mut offered, mut used) = (1, 1);
    while offered - used < 8 {
        offer(&mut driver);
        offered += 1;
        std::thread::sleep(Duration::from_millis(20));
        used += std::iter::from_fn(|| driver.take(OUTPUT)).count();
    }
    // Control messages are still answered.
    send_message(&mut driver, DEVICE_READY, 1);
    assert_eq!(receive_message(&mut driver), message(1, DEVICE_ADD, 1));
    let mut got: Vec<u8> = Vec::new();
    let mut buffer = vec![0; 30_000];
    while got.len() < offered * pattern.len() {
        let saved = bench.board.park();
        bench.board.run(saved).unwrap();
        let count = client.read(&mut buffer).unwrap();
        got.extend(&buffer[..count]);
    }
    assert!(got.chunks(pattern.len()).all(|chunk| chunk == pattern), "data is lost or duplicated");
    while used < offered {
        driver.wait(OUTPUT);
        used += 1;
    }
}

#[test]
fn an_unread_console_does_not_block_the_guest() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("console");
    let bench = bench(None, Stream::Socket(path.clone()));
    let mut driver = driver(&bench, EVENT_IDX);
    let mut client = connect(&path);
    client.write_all(b"x").unwrap();
    assert_eq!(receive(&mut driver, 0, 1), b"x", "it is connected");
    let pattern: Vec<u8> = (0..=255).cycle().take(30_000).collect();
    let piece = put(&mut driver, &pattern);
    let start = Instant::now();
    for _ in 0..100 {
        driver.offer(1, &[piece]);
        driver.kick(1);
        driver.wait(1);
    }
    let took = start.elapsed();
    // A timeout for each buffer would take twice as long.
    assert!(took >= CONSOLE_TIMEOUT && took < 50 * CONSOLE_TIMEOUT, "{took:?}");
    // The client gets what fit before the stall, and then what came after it.
    client.set_nonblocking(true).unwrap();
    let mut got = 0;
    while let Ok(count) = client.read(&mut [0; 4096]) {
        got += count;
    }
    assert!((30_000..3_000_000).contains(&got), "{got}");
    client.set_nonblocking(false).unwrap();
    send(&mut driver, 1, b"back");
    let mut word = [0; 4];
    client.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"back");
}

#[test]
fn a_client_that_disconnects_unblocks_the_guest() {
    let (_folder, path, bench) = agent();
    let mut driver = open(&bench, 0);
    let client = connect(&path);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    let piece = put(&mut driver, &[7; 50_000]);
    let mut offered = 0;
    while driver.take(OUTPUT).is_some() || offered < 12 {
        driver.offer(OUTPUT, &[piece]);
        driver.kick(OUTPUT);
        offered += 1;
        std::thread::sleep(Duration::from_millis(20));
    }
    drop(client);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 0));
    while driver.take(OUTPUT).is_some() {}
    send(&mut driver, OUTPUT, b"dropped");
    let mut client = connect(&path);
    assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
    send(&mut driver, OUTPUT, b"new");
    let mut got = [0; 3];
    client.read_exact(&mut got).unwrap();
    assert_eq!(&got, b"new", "without data for the earlier client");
}

#[test]
fn a_restarted_driver_is_notified_again() {
    let (_folder, path, bench) = agent();
    let _client = connect(&path);
    for _ in 0..2 {
        let mut driver = open(&bench, 0);
        assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
        // Messages wait for buffers, in order, and only once each.
        for _ in 0..20 {
            send_message(&mut driver, DEVICE_READY, 1);
            send_message(&mut driver, PORT_READY, 1);
        }
        assert_eq!(receive(&mut driver, CONTROL_TO_GUEST, 7), b"", "no room for any");
        assert_eq!(receive_message(&mut driver), message(1, DEVICE_ADD, 1));
        assert_eq!(receive_message(&mut driver)[4..6], PORT_NAME.to_le_bytes());
        assert_eq!(receive_message(&mut driver), message(1, PORT_OPEN, 1));
        driver.offer(CONTROL_TO_GUEST, &[(0x1000, 64, true)]);
        driver.kick(CONTROL_TO_GUEST);
        // Messages for other ports, unknown events, and short messages.
        send(&mut driver, CONTROL_FROM_GUEST, &message(0, PORT_READY, 1));
        send(&mut driver, CONTROL_FROM_GUEST, &message(1, 99, 1));
        send(&mut driver, CONTROL_FROM_GUEST, &[1, 0]);
        assert_eq!(driver.take(CONTROL_TO_GUEST), None);
    }
}

#[test]
fn refuses_port_names_that_guests_cannot_use() {
    for bad in ["", "a b", "a/b", "ä", &"x".repeat(129)] {
        let mut bench = Bench::new(4096);
        let config = Config { name: Some(bad.into()), ..Config::default() };
        let error = bench.board.add("x", |grants| config.build(grants)).unwrap_err();
        assert!(format!("{error:#}").contains("a port's name"), "{error:#}");
    }
}

/// Chains of any shape on any queue, while a client connects, sends and disconnects.
#[test]
fn survives_a_hostile_driver() {
    let (_folder, path, bench) = agent();
    let mut noise = Noise::new(1);
    let mut byte = || noise.next().unwrap();
    for round in 0..40_u32 {
        let mut client = (round % 3 > 0).then(|| connect(&path));
        let features = if round % 2 == 0 { MULTIPORT } else { EVENT_IDX | MULTIPORT };
        let mut driver =
            if round % 5 == 0 { driver(&bench, features) } else { driver(&bench, EVENT_IDX) };
        let room = driver.allocate(0x4000);
        for _ in 0..100 {
            let queue = u16::from(byte() % 6);
            let address = match byte() & 7 {
                0 => u64::MAX - u64::from(byte()),
                1 => RAM - u64::from(byte()),
                _ => room + u64::from(byte()) * 16,
            };
            bench
                .memory
                .write(room + u64::from(byte()) * 16, &message(1, u16::from(byte() & 7), 1))
                .unwrap();
            let length = u32::from(byte()) << (byte() & 15);
            let (flags, index) = (u16::from(byte()) & (WRITE | 1), u16::from(byte() & 15));
            let descriptor = Descriptor { address, length, flags, next: 3 };
            driver.write_descriptor(queue, index, descriptor);
            driver.publish(queue, u16::from(byte() & 31));
            driver.kick(queue);
            if let Some(client) = &mut client {
                client.set_nonblocking(true).unwrap();
                // Writes as much as fits and reads what is available.
                client.write_all(&[byte(); 100]).ok();
                client.read_exact(&mut [0; 100]).ok();
            }
            match byte() {
                0..8 => {
                    let saved = bench.board.park();
                    bench.board.run(saved).unwrap();
                }
                8..16 => client = None,
                _ => {}
            }
        }
        driver.set_status(0);
        assert_eq!(driver.status(), 0);
    }
    // The device still works.
    let mut driver = open(&bench, 0);
    let mut client = connect(&path);
    while receive_message(&mut driver) != message(1, PORT_OPEN, 1) {}
    // Earlier clients may have connected and disconnected without having been accepted. Output for
    // them is lost, and their input is read first, as with any guest that has the port open.
    client.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let (room, mut got) = (driver.allocate(4096), [0; 4]);
    driver.offer(INPUT, &[(room, 4096, true)]);
    let arrived = (0..100).any(|_| {
        driver.kick(INPUT);
        while driver.take(INPUT).is_some() {
            driver.offer(INPUT, &[(room, 4096, true)]);
            driver.kick(INPUT);
        }
        send(&mut driver, OUTPUT, b"well");
        client.read_exact(&mut got).is_ok()
    });
    assert!(arrived && &got == b"well", "{got:?}");
}
