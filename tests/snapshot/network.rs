//! Two hosts, each a network namespace with a bridge and a tap, and a third one that talks with the
//! guest. The guest moves from one to the other, through TCP.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use transom_tests::guest::{Guest, Running};
use transom_tests::lab;
use transom_tests::linux::{Booted, Linux};
use transom_tests::network::{Namespace, Service, ip};
use transom_tests::program::said;
use transom_tests::say;

use super::{BOOT, SOON, migrated_to};

const GUEST: &str = "10.9.9.2";
const MAC: &str = "52:54:00:00:09:02";
const OURS: &str = "52:54:00:00:09:01";
/// The guest sends back what comes here.
const ECHO: u16 = 7;
/// A host takes a guest here.
const ARRIVALS: u16 = 4444;
/// Without an announcement, the switch would look for a silent guest at the old host, for minutes.
const GAP: Duration = Duration::from_secs(15);

/// The guest sends nothing on its own: it has no IPv6, and knows our address for ever.
const CONFIGURE: &str = "echo 1 > /proc/sys/net/ipv6/conf/eth0/disable_ipv6; ip link set eth0 up \
                         && ip addr add GUEST/24 dev eth0 && arp -s 10.9.9.1 OURS";

/// A host that is connected to the switch `lan` of this namespace.
pub(crate) struct Host {
    pub(crate) space: Namespace,
    port: String,
    address: String,
}

/// The switch of this namespace, with our address, and two hosts at it.
pub(crate) fn hosts() -> anyhow::Result<[Host; 2]> {
    ip(&format!("link add lan address {OURS} type bridge forward_delay 0"))?;
    ip("addr add 10.9.9.1/24 dev lan")?;
    ip("link set lan up")?;
    Ok([Host::new(1)?, Host::new(2)?])
}

impl Host {
    fn new(number: u8) -> anyhow::Result<Self> {
        let (space, port) = (Namespace::new()?, format!("port{number}"));
        ip(&format!("link add {port} type veth peer name uplink netns {}", space.name()))?;
        ip(&format!("link set {port} master lan up"))?;
        let address = format!("10.9.9.{}", 10 + number);
        space.run(|| {
            ip("link add inside type bridge forward_delay 0")?;
            ip("tuntap add guest mode tap vnet_hdr")?;
            for link in ["uplink", "guest"] {
                ip(&format!("link set {link} master inside up"))?;
            }
            ip(&format!("addr add {address}/24 dev inside"))?;
            ip("link set inside up")
        })?;
        Ok(Self { space, port, address })
    }

    /// Waits for a guest at this socket, and passes connections from the network on to it.
    fn expects(&self, socket: &Path) -> anyhow::Result<(Running, Service)> {
        let (listen, connect) = (
            format!("TCP-LISTEN:{ARRIVALS},reuseaddr"),
            format!("UNIX-CONNECT:{}", socket.display()),
        );
        let both = self.space.run(|| {
            let relay = Service::start(process::Command::new("socat").args([&listen, &connect]))?;
            Ok((Guest::arriving(socket).start()?, relay))
        })?;
        let start = Instant::now();
        let listens = format!(":{ARRIVALS:04X} 00000000:0000 0A");
        let table = || Ok(std::fs::read_to_string("/proc/thread-self/net/tcp")?);
        while !(socket.exists() && self.space.run(table)?.contains(&listens)) {
            ensure!(start.elapsed() < SOON, "{}{}", both.0.stderr(), both.1.said());
            sleep(Duration::from_millis(20));
        }
        Ok(both)
    }

    /// Moves a guest from this host to another one.
    fn sends(&self, guest: Booted, to: &Self, folder: &Path) -> anyhow::Result<Booted> {
        let [near, far] = ["near", "far"].map(|name| folder.join(name));
        for socket in [&near, &far] {
            std::fs::remove_file(socket).ok();
        }
        let (there, _far_relay) = to.expects(&far)?;
        let listen = format!("UNIX-LISTEN:{}", near.display());
        let connect = format!("TCP:{}:{ARRIVALS}", to.address);
        let _relay = self
            .space
            .run(|| Service::start(process::Command::new("socat").args([&listen, &connect])))?;
        Ok(Booted { running: migrated_to(guest.running, there, near)? })
    }

    /// Whether the switch sends the guest's frames to this host.
    fn has_the_guest(&self) -> anyhow::Result<bool> {
        let mut bridge = process::Command::new("bridge");
        Ok(said(bridge.args(["fdb", "show", "dev", &self.port]))?.contains(MAC))
    }
}

/// A connection of the guest goes on when the guest has moved: while nothing is sent, so that only
/// an announcement can tell the switch, and while data is under way.
pub(crate) fn keeps_a_connection(card: &str) -> anyhow::Result<()> {
    let folder = tempfile::tempdir().context("a folder")?;
    let [here, there] = hosts()?;
    let guest = Guest::transom().memory("256M").word("--device").word(device(card));
    // The kernel for clouds has no e1000e.
    let linux = Linux::new(guest, &lab::asset("BZIMAGE_GENERIC_13")?)
        .modules(&lab::asset("MODULES_GENERIC_13")?, &["virtio_pci", "virtio_net", "e1000e"]);
    let mut booted = here.space.run(|| linux.boot(BOOT))?;
    let mut line = connects(&mut booted)?;
    let mut next = echoes(&mut line, 0, || false)?.0;
    ensure!(here.has_the_guest()? && !there.has_the_guest()?, "the guest is elsewhere");
    booted = here.sends(booted, &there, folder.path())?;
    let start = Instant::now();
    while !there.has_the_guest()? {
        ensure!(start.elapsed() < GAP, "the guest was not announced: {}", booted.running.stderr());
        sleep(Duration::from_millis(20));
    }
    say!("announced {:?} after the move", start.elapsed());
    next = echoes(&mut line, next, || false)?.0;
    let moved = AtomicBool::new(false);
    let (back, (count, gap)) = scope(|scope| {
        let echo = scope.spawn(|| echoes(&mut line, next, || !moved.load(Ordering::Relaxed)));
        let back = there.sends(booted, &here, folder.path());
        moved.store(true, Ordering::Relaxed);
        let echoed = echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        anyhow::Ok((back?, echoed?))
    })?;
    say!("{} numbers came back meanwhile, the longest after {gap:?}", count - next);
    ensure!(here.has_the_guest()? && !there.has_the_guest()?, "the guest is elsewhere");
    booted = back;
    booted.running.send("poweroff -f")?;
    booted.running.ends_with(0, SOON)
}

/// A card at a host's tap.
pub(crate) fn device(card: &str) -> String {
    format!("{card},to=tap:guest,mac={MAC}")
}

/// Connects to a guest, which sends back what it gets.
pub(crate) fn connects(booted: &mut Booted) -> anyhow::Result<TcpStream> {
    booted.run(&CONFIGURE.replace("OURS", OURS).replace("GUEST", GUEST), SOON)?;
    booted.run(&format!("(nc -ll -p {ECHO} -e cat &)"), SOON)?;
    let start = Instant::now();
    let line = loop {
        match TcpStream::connect((GUEST, ECHO)) {
            Ok(line) => break line,
            Err(error) => ensure!(start.elapsed() < SOON, "{error}"),
        }
        sleep(Duration::from_millis(100));
    };
    line.set_nodelay(true)?;
    line.set_read_timeout(Some(SOON))?;
    Ok(line)
}

/// Has numbers sent back, one by one: ten of them after the last time that `goes_on`. Returns the
/// next one, and the longest time that one took.
pub(crate) fn echoes(
    line: &mut TcpStream,
    first: u64,
    goes_on: impl Fn() -> bool,
) -> anyhow::Result<(u64, Duration)> {
    let (mut next, mut rest, mut longest) = (first, 10, Duration::ZERO);
    while rest > 0 {
        rest = if goes_on() { 10 } else { rest - 1 };
        let start = Instant::now();
        line.write_all(&next.to_be_bytes())?;
        let mut back = [0; 8];
        line.read_exact(&mut back).with_context(|| format!("number {next} does not come back"))?;
        ensure!(back == next.to_be_bytes(), "{back:?} instead of {next}");
        longest = longest.max(start.elapsed());
        next += 1;
    }
    Ok((next, longest))
}
