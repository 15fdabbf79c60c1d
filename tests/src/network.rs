//! A network for a test: a namespace, services in it, and transfers between it and a guest.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::num::NonZero;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::{Builder, scope, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketType, recvfrom, sendto, sockopt,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::NamedTempFile;

use crate::lab;
use crate::linux::Booted;

/// A network namespace. Dropping it deletes its name.
pub struct Namespace(String);

impl Namespace {
    /// A new one that has only `lo`, up. Needs root.
    pub fn new() -> anyhow::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let space = Self(format!("transom-{}-{number}", std::process::id()));
        ip(&format!("netns add {}", space.0))?;
        space.run(|| ip("link set lo up"))?;
        Ok(space)
    }

    pub fn name(&self) -> &str {
        &self.0
    }

    /// Runs `body` in it. Threads and programs that `body` starts are in the namespace too.
    pub fn run<T: Send>(
        &self,
        body: impl FnOnce() -> anyhow::Result<T> + Send,
    ) -> anyhow::Result<T> {
        let path = Path::new("/run/netns").join(&self.0);
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        let inside = || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
                .with_context(|| path.display().to_string())?;
            body()
        };
        scope(|scope| {
            let thread = Builder::new().name("network".into()).spawn_scoped(scope, inside)?;
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "del", &self.0]).status().ok();
    }
}

/// Runs `body` in a new network namespace. Needs root.
pub fn in_namespace(body: impl FnOnce() -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    Namespace::new()?.run(body)
}

pub fn ip(words: &str) -> anyhow::Result<String> {
    output_of(Command::new("ip").args(words.split(' ')), &format!("ip {words}"))
}

/// Runs a program of the asset `NET_TOOLS` on this host and returns its output.
pub fn tool(words: &str) -> anyhow::Result<String> {
    let (program, words) = words.split_once(' ').unwrap_or((words, ""));
    let mut command = lab::unpacked("NET_TOOLS", program)?;
    output_of(command.args(words.split(' ')), &format!("{program} {words}"))
}

fn output_of(command: &mut Command, name: &str) -> anyhow::Result<String> {
    let output = command.output().with_context(|| name.to_owned())?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}: {complaints}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A server program. Dropping it kills the process.
pub struct Service {
    child: Child,
    log: NamedTempFile,
}

impl Service {
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let log = NamedTempFile::new()?;
        command.stdin(Stdio::null()).stdout(log.reopen()?).stderr(log.reopen()?);
        Ok(Self { child: command.spawn().with_context(|| format!("{command:?}"))?, log })
    }

    /// The program's output so far.
    pub fn said(&self) -> String {
        fs::read_to_string(self.log.path()).unwrap_or_default()
    }

    /// Waits until the program has made a file. The error has the program's output.
    pub fn wait_for_file(&mut self, file: &Path, within: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        while !file.exists() {
            let ended = self.child.try_wait()?;
            let (name, said) = (file.display(), self.said());
            ensure!(ended.is_none(), "{ended:?} before {name} appeared: {said}");
            ensure!(start.elapsed() < within, "{name} does not appear: {said}");
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // It may have ended already.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// Returns `length` pseudorandom bytes (xorshift64), the same every time.
pub fn noise(length: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(length + 8);
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    while bytes.len() < length {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend(state.to_le_bytes());
    }
    bytes.truncate(length);
    bytes
}

/// The MD5 sum as md5sum prints it.
pub fn checksum(data: &[u8]) -> anyhow::Result<String> {
    let mut command = Command::new("md5sum");
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
    child.stdin.take().context("no input")?.write_all(data)?;
    let output = child.wait_with_output()?;
    ensure!(output.status.success(), "md5sum: {}", output.status);
    first_word(&String::from_utf8_lossy(&output.stdout))
}

fn first_word(text: &str) -> anyhow::Result<String> {
    Ok(text.split_whitespace().next().context("no word")?.to_owned())
}

/// The EtherType of frames that the probe wants back (IEEE 802: for experiments).
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];
/// The length of an Ethernet header.
const ETHERNET: usize = 14;

/// Swaps the addresses of a frame that the probe wants back. Other frames stay, and it returns
/// false.
fn turn_round(frame: &mut [u8]) -> bool {
    let mine = frame.len() > ETHERNET && frame[12..ETHERNET] == EXPERIMENT;
    if mine {
        let (to, rest) = frame.split_at_mut(6);
        to.swap_with_slice(&mut rest[..6]);
    }
    mine
}

/// Sends the probe's frames back over a socket with passt's framing, until the other end closes it.
/// `pass` gets each frame and its index; it may change the frame, or return false to drop it.
/// Returns the number of frames that came. Fails if the other end closes the socket within a frame.
pub fn reflect(
    mut socket: UnixStream,
    mut pass: impl FnMut(u64, &mut [u8]) -> bool,
) -> anyhow::Result<u64> {
    let mut input = BufReader::with_capacity(128 << 10, socket.try_clone()?);
    let (mut count, mut length, mut answers) = (0, [0; 4], Vec::new());
    while !input.fill_buf()?.is_empty() {
        input.read_exact(&mut length)?;
        let mut frame = vec![0; usize::try_from(u32::from_be_bytes(length))?];
        input.read_exact(&mut frame).context("the rest of a frame")?;
        if turn_round(&mut frame) && pass(count, &mut frame) {
            answers.extend(length);
            answers.extend(frame);
        }
        count += 1;
        // All that has come is answered at once.
        if input.buffer().is_empty() {
            socket.write_all(&std::mem::take(&mut answers))?;
        }
    }
    Ok(count)
}

/// Sends the probe's frames back on the interface of this namespace that they came by, while `body`
/// runs. Needs root.
pub fn while_reflecting(body: impl FnOnce() -> anyhow::Result<()>) -> anyhow::Result<()> {
    let kind = u32::from(u16::from_ne_bytes(EXPERIMENT));
    let kind = NonZero::new(kind).map(Protocol::from_raw);
    let socket = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, kind)?;
    let pause = Some(Duration::from_millis(100));
    sockopt::set_socket_timeout(&socket, sockopt::Timeout::Recv, pause)?;
    let ended = AtomicBool::new(false);
    let echo = || -> anyhow::Result<()> {
        let mut room = vec![0; 64 << 10];
        while !ended.load(Ordering::Relaxed) {
            match recvfrom(&socket, room.as_mut_slice(), RecvFlags::empty()) {
                // The address is the interface.
                Ok((count, _, Some(from))) if turn_round(&mut room[..count]) => {
                    sendto(&socket, &room[..count], SendFlags::empty(), &from)?;
                }
                Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error).context("a packet socket"),
            }
        }
        Ok(())
    };
    scope(|scope| {
        let echo = Builder::new().name("echo".into()).spawn_scoped(scope, echo)?;
        let result = body();
        ended.store(true, Ordering::Relaxed);
        let echoed = echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        result.and(echoed)
    })
}

/// Sends data to the guest over each route and back, over all of them and in both directions at the
/// same time, and checks it. Returns how long each route took.
pub fn exchange(
    routes: &[Route],
    booted: &mut Booted,
    data: &[u8],
) -> anyhow::Result<Vec<Duration>> {
    let bind = |route: &Route| TcpListener::bind((route.host, 0)).context("a server");
    let listeners = routes.iter().map(bind).collect::<anyhow::Result<Vec<_>>>()?;
    let mut command = String::new();
    for (route, listener) in routes.iter().zip(&listeners) {
        let port = listener.local_addr()?.port();
        let Route { host, within, .. } = route;
        let within = within.as_secs();
        command += &format!("timeout {within} nc {host} {port} -e tee /{host} 2> /dev/null & ");
    }
    command += "wait";
    let within = routes.iter().map(|route| route.within).max().context("no route")?;
    let times = scope(|scope| {
        let servers: Vec<_> = routes
            .iter()
            .zip(&listeners)
            .map(|(route, listener)| scope.spawn(move || route.serve(listener, data)))
            .collect();
        let ran = booted.run(&command, within);
        let times = servers
            .into_iter()
            .map(|server| server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        let times = times.collect::<anyhow::Result<Vec<_>>>();
        // If both fail, the server's error is the cause.
        times.and_then(|times| ran.map(|_| times))
    })?;
    let starts = times.iter().map(|it| it.0).max();
    let ends = times.iter().map(|it| it.1).min();
    ensure!(starts < ends, "the transfers were not at the same time: {times:?}");
    let wanted = checksum(data)?;
    for Route { host, .. } in routes {
        let sum = first_word(&booted.run(&format!("md5sum /{host}; rm /{host}"), within)?)?;
        ensure!(sum == wanted, "{host}: the guest's data has MD5 sum {sum}, not {wanted}");
    }
    Ok(times.iter().map(|(start, end)| end.duration_since(*start)).collect())
}

/// The addresses between a guest and a server on the host.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The host's address in the guest's network.
    pub host: Ipv4Addr,
    /// The guest's address as the host's server sees it.
    pub seen: Ipv4Addr,
    /// Limit for one direction of a transfer.
    pub within: Duration,
}

#[derive(Clone, Copy, Debug)]
pub struct TransferTimes {
    pub to_guest: Duration,
    pub from_guest: Duration,
}

impl Route {
    /// Sends data to the guest and back, and checks it in both directions.
    pub fn check_transfer(
        &self,
        booted: &mut Booted,
        data: &[u8],
    ) -> anyhow::Result<TransferTimes> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("a server")?;
        let (host, port) = (self.host, listener.local_addr()?.port());
        // With dd, because nc alone reads and writes 1 KiB at a time.
        let get = format!("nc {host} {port} -e dd of=/data bs=64k 2> /dev/null");
        let (_, to_guest) = self.transfer(booted, &listener, &get, |mut client| {
            client.write_all(data).context("data for the guest")?;
            client.shutdown(Shutdown::Write)?;
            // The guest closes its end once it has all data.
            client.read_to_end(&mut Vec::new()).context("the guest's end")?;
            Ok(())
        })?;
        // The server sends an empty line first, and the guest waits for it. passt of 2023-03-09
        // (Debian 12) resets a connection after 24 s if the server sends nothing: it misses that
        // the guest acknowledged its SYN, and counts ACK timeouts. Fixed by its commit
        // 4e73e9bd655c.
        let send = "read -r line && exec dd if=/data bs=64k";
        let put = format!("md5sum < /data && nc {host} {port} -e sh -c '{send}' 2> /dev/null");
        let (sum, from_guest) = self.transfer(booted, &listener, &put, |mut client| {
            client.write_all(b"\n").context("a line for the guest")?;
            compare(&client, data)
        })?;
        let (sum, wanted) = (first_word(&sum)?, checksum(data)?);
        ensure!(sum == wanted, "the guest's data has MD5 sum {sum}, not {wanted}");
        Ok(TransferTimes { to_guest, from_guest })
    }

    /// Sends data to a client that echoes it, and checks what comes back meanwhile. Returns when
    /// that began and ended.
    fn serve(&self, listener: &TcpListener, data: &[u8]) -> anyhow::Result<(Instant, Instant)> {
        let (client, from) = accept(listener, self.within)?;
        ensure!(from.ip() == self.seen, "a client at {from}, not at {}", self.seen);
        client.set_read_timeout(Some(self.within))?;
        client.set_write_timeout(Some(self.within))?;
        let start = Instant::now();
        scope(|scope| {
            let writer = scope.spawn(|| -> anyhow::Result<()> {
                (&client).write_all(data).context("data for the guest")?;
                Ok(client.shutdown(Shutdown::Write)?)
            });
            let read = compare(&client, data);
            let written = writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            read.and(written)
        })?;
        Ok((start, Instant::now()))
    }

    /// Serves one connection while the guest runs a command.
    fn transfer(
        &self,
        booted: &mut Booted,
        listener: &TcpListener,
        command: &str,
        serve: impl FnOnce(TcpStream) -> anyhow::Result<()> + Send,
    ) -> anyhow::Result<(String, Duration)> {
        scope(|scope| {
            let server = scope.spawn(|| {
                let (client, from) = accept(listener, self.within)?;
                ensure!(from.ip() == self.seen, "a client at {from}, not at {}", self.seen);
                client.set_read_timeout(Some(self.within))?;
                client.set_write_timeout(Some(self.within))?;
                let start = Instant::now();
                serve(client)?;
                anyhow::Ok(start.elapsed())
            });
            let output = booted.run(command, self.within);
            let served = server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // If both fail, the server's error is the cause.
            let took = served?;
            Ok((output?, took))
        })
    }
}

/// Reads data that the guest sends back.
fn compare(mut client: &TcpStream, data: &[u8]) -> anyhow::Result<()> {
    let mut block = vec![0; 1 << 20];
    for (number, wanted) in data.chunks(block.len()).enumerate() {
        let got = &mut block[..wanted.len()];
        client.read_exact(got).with_context(|| format!("MiB {number} from the guest"))?;
        ensure!(got == wanted, "MiB {number} came back changed");
    }
    Ok(())
}

fn accept(listener: &TcpListener, within: Duration) -> anyhow::Result<(TcpStream, SocketAddr)> {
    listener.set_nonblocking(true)?;
    let start = Instant::now();
    loop {
        match listener.accept() {
            Ok((client, from)) => {
                client.set_nonblocking(false)?;
                return Ok((client, from));
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error).context("a client"),
        }
        ensure!(start.elapsed() < within, "the guest has not connected within {within:?}");
        sleep(Duration::from_millis(5));
    }
}
