//! A malicious guest and malicious outside hosts: whatever they send, tasks, descriptors and memory
//! of the pod stay within limits, and nobody can end connections of others.

use std::cell::RefCell;
use std::fs::{self, File};
use std::io::{self, BufReader, Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::rc::Rc;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use container::net::dns::LocalNames;
use container::net::relay::Relay;
use container::net::user::lan::{GATEWAY_MAC, Lan, PodAddresses};
use container::net::user::network::{Destination, Network};
use container::net::user::packet::{Datagram, Ends, Frame, ICMP, Packet, Payload, TCP, UDP};
use container::net::user::router::Router;
use container::net::user::segment::{ACK, PSH, RST, SYN, Segment, Seq};
use container::net::user::{UserNetwork, link};
use container::settings::Settings;
use host::mac::Mac;
use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::runtime::Builder;
use tokio::task::{LocalSet, spawn_local};

use super::world::{TIMEOUT, World};
use super::{HOST, MIB, isolated, memory, serve};

const CARD: Mac = Mac([2, 0, 0, 0, 0, 0x77]);
const GUEST: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 2);
const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 1);
const WORLD: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

/// A packet of the guest in a frame, preceded by its length.
fn packet(to: Ipv4Addr, protocol: u8, checksum: usize, header: &[u8], data: &[u8]) -> Vec<u8> {
    let ends = Ends { cards: (CARD, GATEWAY_MAC), addresses: (GUEST.into(), to.into()) };
    let mut frame = Vec::new();
    Payload { protocol, header, checksum, data }.write(&mut frame, &ends);
    frame
}

fn segment(to: Ipv4Addr, segment: &Segment<'_>) -> Vec<u8> {
    packet(to, TCP, 16, segment.header().bytes(), segment.data)
}

fn datagram(to: Ipv4Addr, ports: (u16, u16), data: &[u8]) -> Vec<u8> {
    packet(to, UDP, 6, &Datagram::header(ports.0, ports.1, data.len()), data)
}

/// A frame of a new flow for each number.
fn nuisance(number: u32) -> Vec<u8> {
    let [_, _, high, low] = number.to_be_bytes();
    let port = u16::from_be_bytes([high, low]).max(1000);
    // Half of the addresses refuse immediately, and the others do not answer.
    let host = if number.is_multiple_of(2) { WORLD } else { Ipv4Addr::new(10, 77, 0, 100 | low) };
    let syn = |ports| Segment { ports, flags: SYN, window: 999, ..Segment::default() };
    match number % 5 {
        0 => segment(host, &syn((5000, port))),
        1 => {
            let name = format!("{number:08x}");
            let head = [high, low, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 8];
            let question = [&head[..], name.as_bytes(), b"\x02no\0", &[0, 1, 0, 1]].concat();
            datagram(GATEWAY, (port, 53), &question)
        }
        2 => segment(GATEWAY, &syn((port, 53))),
        3 => datagram(host, (port, 7000), b"hello"),
        _ => packet(host, ICMP, 2, &[8, 0, 0, 0, high, low, 0, 1], b"hello"),
    }
}

/// Maximum tasks, descriptors and bytes of memory seen.
#[derive(Debug, Default)]
struct Most {
    frames: usize,
    tasks: usize,
    descriptors: usize,
    memory: usize,
}

fn descriptors() -> usize {
    fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

fn local(lan: &Lan) -> LocalNames {
    LocalNames {
        gateway: lan.gateway,
        guest: lan.guest,
        default_gateway: None,
        host: "guest".into(),
    }
}

#[test]
fn a_flood_is_limited_in_tasks_descriptors_and_memory() {
    const FRAMES: u32 = 200_000;
    const FILES: usize = 1024;
    isolated(|| {
        let (world, folder) = (World::new(1500)?, tempfile::tempdir()?);
        // An unused address.
        let resolv = "nameserver 10.77.0.200\noptions timeout:1 attempts:1\n";
        fs::write(folder.path().join("resolv.conf"), resolv)?;
        world.pod.enter()?;
        let lan = Lan::new(&Settings::defaults().network, &PodAddresses::read())?;
        ensure!((lan.guest, lan.gateway) == (GUEST, GATEWAY), "{lan:?}");
        let relay = Relay::new(local(&lan), folder.path());
        let router = Rc::new(Router::new(lan, relay, None, FILES));
        let (ours, mut theirs) = UnixStream::pair()?;
        let mut answers = theirs.try_clone()?;
        let reader = std::thread::spawn(move || io::copy(&mut answers, &mut io::sink()));
        let writer = std::thread::spawn(move || -> io::Result<()> {
            for number in 0..FRAMES {
                theirs.write_all(&nuisance(number))?;
            }
            theirs.shutdown(std::net::Shutdown::Write)
        });
        let before = (descriptors(), memory()?);
        let most = Rc::new(RefCell::new(Most::default()));
        let runtime = Builder::new_current_thread().enable_all().build()?;
        LocalSet::new().block_on(&runtime, pour(router, ours, most.clone()))?;
        writer.join().expect("it does not panic")?;
        reader.join().expect("it does not panic")?;
        let most = most.take();
        let descriptors = most.descriptors.saturating_sub(before.0);
        let memory = most.memory.saturating_sub(before.1);
        eprintln!("{most:?}, {descriptors} descriptors, {} KiB", memory >> 10);
        ensure!(most.frames == FRAMES as usize, "{most:?}");
        ensure!(most.tasks > FILES / 8, "too few tasks were started: {most:?}");
        ensure!(most.tasks <= FILES / 2, "{most:?}");
        // More descriptors belong to the runtime.
        ensure!(descriptors <= FILES / 2 + 16, "{descriptors} descriptors");
        ensure!(memory < 64 * MIB, "{} KiB", memory >> 10);
        Ok(())
    });
}

/// Feeds a router with all frames of a socket, as with those of `vmm`, and measures the cost. In
/// the end all tasks must be gone.
async fn pour(
    router: Rc<Router>,
    socket: UnixStream,
    most: Rc<RefCell<Most>>,
) -> anyhow::Result<()> {
    socket.set_nonblocking(true)?;
    let socket = tokio::net::UnixStream::from_std(socket)?;
    router.network.plug();
    let before = Rc::strong_count(&router.network);
    let target = router.clone();
    let handle = move |frame: &[u8]| {
        target.handle(frame);
        let mut most = most.borrow_mut();
        most.frames += 1;
        // Each task has a reference to its network.
        let tasks = Rc::strong_count(&target.network).saturating_sub(before);
        most.tasks = most.tasks.max(tasks);
        if most.frames.is_multiple_of(500) {
            most.descriptors = most.descriptors.max(descriptors());
            most.memory = most.memory.max(memory().unwrap_or(0));
        }
    };
    let link = router.clone();
    let read = spawn_local(async move {
        tokio::select! {
            read = link::read(&socket, handle) => read,
            drained = link.network.link.drain(&socket) => drained,
        }
    });
    read.await??;
    router.unplug();
    let ended = async {
        while Rc::strong_count(&router.network) > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, ended).await.context("tasks that do not end")
}

/// A guest that implements TCP itself.
struct Guest {
    socket: UnixStream,
    segments: Receiver<(SocketAddr, Received)>,
}

/// A segment that the guest received.
#[derive(Debug)]
struct Received {
    port: u16,
    flags: u8,
    next: Seq,
    ack: Seq,
    data: Vec<u8>,
}

impl Guest {
    fn plug(user: &UserNetwork) -> anyhow::Result<Self> {
        let socket = UnixStream::connect(&user.socket)?;
        let (tell, segments) = mpsc::channel();
        let mut input = BufReader::new(socket.try_clone()?);
        std::thread::spawn(move || {
            let (mut length, mut frame) = ([0; 4], Vec::new());
            while input.read_exact(&mut length).is_ok() {
                frame.resize(u32::from_be_bytes(length) as usize, 0);
                if input.read_exact(&mut frame).is_err() {
                    return;
                }
                let Some(received) = Self::read(&frame) else { continue };
                if tell.send(received).is_err() {
                    return;
                }
            }
        });
        Ok(Self { socket, segments })
    }

    /// Parses a segment of an outside host, not of the gateway.
    fn read(frame: &[u8]) -> Option<(SocketAddr, Received)> {
        let frame = Frame::read(frame)?;
        let packet = Packet::read(frame.kind, frame.payload)?;
        if packet.protocol != TCP || packet.from != IpAddr::V4(WORLD) {
            return None;
        }
        let it = Segment::read(&packet)?;
        let next = it.seq.plus(it.length());
        let (port, flags, ack, data) = (it.ports.1, it.flags, it.ack, it.data.to_vec());
        let from = SocketAddr::new(packet.from, it.ports.0);
        Some((from, Received { port, flags, next, ack, data }))
    }

    fn send(&mut self, it: &Segment<'_>) -> anyhow::Result<()> {
        Ok(self.socket.write_all(&segment(WORLD, it))?)
    }

    /// Waits for a segment to a port that satisfies a condition. A reset is an error.
    fn wait(&self, port: u16, what: impl Fn(&Received) -> bool) -> anyhow::Result<(u16, Received)> {
        loop {
            let (from, received) = self.segments.recv_timeout(TIMEOUT).context("an answer")?;
            if received.port != port {
                continue;
            }
            if received.flags & RST != 0 {
                bail!("the connection of port {port} was ended: {received:?}");
            }
            if what(&received) {
                return Ok((from.port(), received));
            }
        }
    }

    /// Sends data, and waits for the same data.
    fn ask(
        &mut self,
        ports: (u16, u16),
        before: &Received,
        data: &[u8],
    ) -> anyhow::Result<Received> {
        let (seq, ack) = (before.ack, before.next);
        let plain = Segment { ports, seq, ack, window: 999, flags: ACK, ..Segment::default() };
        self.send(&Segment { flags: ACK | PSH, data, ..plain })?;
        let received = self.wait(ports.0, |received| received.data == data)?.1;
        self.send(&Segment { seq: received.ack, ack: received.next, ..plain })?;
        Ok(received)
    }
}

#[test]
fn incoming_connections_do_not_evict_those_of_others() {
    isolated(|| {
        let (world, folder) = (World::new(1500)?, tempfile::tempdir()?);
        world.pod.enter()?;
        let user = UserNetwork::start(&Settings::defaults(), folder.path(), folder.path(), None)?;
        let mut guest = Guest::plug(&user)?;
        serve(&world.outside, HOST, 7, |mut stream| {
            let mut byte = [0];
            while stream.read_exact(&mut byte).and_then(|()| stream.write_all(&byte)).is_ok() {}
        })?;
        // The guest's own connection.
        let own = (5000, 7);
        let syn = Segment { ports: own, flags: SYN, window: 999, ..Segment::default() };
        guest.send(&syn)?;
        let answer = guest.wait(5000, |received| received.flags & SYN != 0)?.1;
        let mut last = guest.ask(own, &answer, b"a")?;
        // A connection of another outside host to a server in the guest.
        let tell = world.outside.spawn(|| {
            let kind = SocketType::STREAM;
            let socket = rustix::net::socket(AddressFamily::INET, kind, None)?;
            rustix::net::bind(&socket, &SocketAddr::new(WORLD.into(), 0))?;
            rustix::net::connect(&socket, &SocketAddr::new(GUEST.into(), 3389))?;
            Ok(TcpStream::from(socket))
        })?;
        let (port, asked) = guest.wait(3389, |received| received.flags & SYN != 0)?;
        let ports = (3389, port);
        guest.send(&Segment { ports, ack: asked.next, flags: SYN | ACK, ..syn })?;
        let mut other = tell.join().expect("it does not panic")?;
        // One host that connects repeatedly.
        let flood = world.outside.spawn(|| {
            for number in 0..3000 {
                let stream = TcpStream::connect((GUEST, 3389));
                drop(stream.with_context(|| format!("connection {number}"))?);
            }
            Ok(())
        })?;
        flood.join().expect("it does not panic")?;
        last = guest.ask(own, &last, b"b")?;
        other.set_nonblocking(true)?;
        let read = other.read(&mut [0]);
        let lives = read.as_ref().is_err_and(|it| it.kind() == io::ErrorKind::WouldBlock);
        ensure!(lives, "the other host's connection has ended: {read:?}");
        guest.ask(own, &last, b"c")?;
        Ok(())
    });
}

#[test]
fn without_descriptors_no_foreign_address_is_claimed() {
    const CHILD: &str = "TRANSOM_TEST_WITHOUT_DESCRIPTORS";
    if std::env::var_os(CHILD).is_none() {
        // The limit applies to the whole process, so this needs a child process.
        let name = "flood::without_descriptors_no_foreign_address_is_claimed";
        let mut child = Command::new(std::env::current_exe().expect("it runs"));
        let status = child.args(["--exact", name, "--nocapture"]).env(CHILD, "1").status();
        return assert!(status.expect("it starts").success());
    }
    isolated(|| {
        let world = World::new(1500)?;
        world.pod.enter()?;
        let mut settings = Settings::defaults();
        settings.network.address = Some(Ipv4Addr::new(10, 77, 0, 99));
        let lan = Lan::new(&settings.network, &PodAddresses::read())?;
        let relay = Relay::new(local(&lan), "/nowhere".as_ref());
        let network = Network::new(lan, relay, None);
        let own: [IpAddr; 2] = [GUEST.into(), "fd77::2".parse()?];
        let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
        for files in [1024, 256, 64] {
            setrlimit(Resource::Nofile, Rlimit { current: Some(files), maximum })?;
            let mut all = Vec::new();
            while let Ok(file) = File::open("/dev/null") {
                all.push(file);
            }
            let destinations = own.map(|address| network.destination(address));
            let outside = network.destination(WORLD.into());
            drop(all);
            ensure!(destinations == [Destination::Forbidden; 2], "{destinations:?} of {own:?}");
            ensure!(outside == Destination::Forbidden, "{outside:?}");
            ensure!(network.destination(WORLD.into()) == Destination::Outside, "it stays closed");
            ensure!(
                own.map(|address| network.destination(address)) == [Destination::Forbidden; 2],
                "it is open"
            );
        }
        Ok(())
    });
}
