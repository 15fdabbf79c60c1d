//! A network of a test's own: a namespace, what serves in it, and transfers between it and a guest.

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

/// A namespace by its name; it goes with this value.
struct Namespace(String);

impl Drop for Namespace {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "del", &self.0]).status().ok();
    }
}

/// Runs this in a network namespace of its own, in which only `lo` is, up. All that it starts is in
/// there too: threads, and other programs.
///
/// # Errors
///
/// When there is no namespace, which needs root, or the body fails.
pub fn in_namespace(body: impl FnOnce() -> anyhow::Result<()> + Send) -> anyhow::Result<()> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    let space = Namespace(format!("transom-{}-{number}", std::process::id()));
    ip(&format!("netns add {}", space.0))?;
    let path = Path::new("/run/netns").join(&space.0);
    let file = File::open(&path).with_context(|| path.display().to_string())?;
    let inside = || {
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))
            .with_context(|| path.display().to_string())?;
        ip("link set lo up")?;
        body()
    };
    scope(|scope| {
        let thread = Builder::new().name("network".into()).spawn_scoped(scope, inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Runs `ip` with these words; the answer is what it says.
///
/// # Errors
///
/// When it fails.
pub fn ip(words: &str) -> anyhow::Result<String> {
    said(Command::new("ip").args(words.split(' ')), &format!("ip {words}"))
}

/// Runs a program of the asset `NET_TOOLS` on this host; the answer is what it says.
///
/// # Errors
///
/// When it fails.
pub fn tool(words: &str) -> anyhow::Result<String> {
    let tree = lab::asset("NET_TOOLS")?;
    let libraries = tree.join("usr/lib/x86_64-linux-gnu");
    let (program, words) = words.split_once(' ').unwrap_or((words, ""));
    // From its unpacked packages, with its own libraries.
    let mut command = Command::new(libraries.join("ld-linux-x86-64.so.2"));
    command.arg("--library-path").arg(&libraries).arg(tree.join(program));
    said(command.args(words.split(' ')), &format!("{program} {words}"))
}

fn said(command: &mut Command, name: &str) -> anyhow::Result<String> {
    let output = command.output().with_context(|| name.to_owned())?;
    let complaints = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name}: {}: {complaints}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A program that serves as long as this value is there.
pub struct Service {
    child: Child,
    log: NamedTempFile,
}

impl Service {
    /// Starts it.
    ///
    /// # Errors
    ///
    /// When it cannot be started.
    pub fn start(command: &mut Command) -> anyhow::Result<Self> {
        let log = NamedTempFile::new()?;
        command.stdin(Stdio::null()).stdout(log.reopen()?).stderr(log.reopen()?);
        Ok(Self { child: command.spawn().with_context(|| format!("{command:?}"))?, log })
    }

    /// Waits until a file is there that it makes.
    ///
    /// # Errors
    ///
    /// When it ends, or does not make it in time, with what it said.
    pub fn makes(&mut self, file: &Path, within: Duration) -> anyhow::Result<()> {
        let start = Instant::now();
        while !file.exists() {
            let said = || fs::read_to_string(self.log.path()).unwrap_or_default();
            let ended = self.child.try_wait()?;
            ensure!(ended.is_none(), "{ended:?} before it made {}: {}", file.display(), said());
            ensure!(start.elapsed() < within, "{} does not appear: {}", file.display(), said());
            sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // That it is gone already is fine.
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

/// So many bytes that no one guesses (xorshift64), the same every time.
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

/// Its MD5 sum, as md5sum says it.
///
/// # Errors
///
/// When md5sum fails.
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

/// The kind of a frame that the probe wants back (IEEE 802: for experiments).
const EXPERIMENT: [u8; 2] = [0x88, 0xb5];
/// Bytes of an Ethernet header.
const ETHERNET: usize = 14;

/// Turns a frame of the probe round; false if it is none that is to come back.
fn turn_round(frame: &mut [u8]) -> bool {
    let mine = frame.len() > ETHERNET && frame[12..ETHERNET] == EXPERIMENT;
    if mine {
        let (to, rest) = frame.split_at_mut(6);
        to.swap_with_slice(&mut rest[..6]);
    }
    mine
}

/// Sends the probe's frames back over a socket as passt has one, until its other end is closed.
/// `pass` is asked for each by its number: it may change it, or keep it. Gives how many came.
///
/// # Errors
///
/// When the other end breaks off within a frame.
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

/// Sends the probe's frames back on whatever interface of this namespace they came by, while
/// `body` runs.
///
/// # Errors
///
/// When there is no packet socket, which needs root, or the body fails.
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
        let said = body();
        ended.store(true, Ordering::Relaxed);
        let echoed = echo.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        said.and(echoed)
    })
}

/// How a guest reaches a server on the host.
#[derive(Clone, Copy, Debug)]
pub struct Way {
    /// Where the guest finds the host.
    pub host: Ipv4Addr,
    /// Who the guest then is for the host.
    pub seen: Ipv4Addr,
    /// How long a transfer may take.
    pub within: Duration,
}

/// How long each direction of a transfer took.
#[derive(Clone, Copy, Debug)]
pub struct Took {
    /// To the guest.
    pub there: Duration,
    /// And back.
    pub back: Duration,
}

impl Way {
    /// Sends data to the guest, and has it sent back; what arrives is what was sent, each time.
    ///
    /// # Errors
    ///
    /// When something else arrives, or nothing.
    pub fn carries(&self, booted: &mut Booted, data: &[u8]) -> anyhow::Result<Took> {
        let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, 0)).context("a server")?;
        let (host, port) = (self.host, listener.local_addr()?.port());
        // nc itself reads and writes 1 KiB at once.
        let get = format!("nc {host} {port} -e dd of=/data bs=64k 2> /dev/null");
        let (_, there) = self.transfer(booted, &listener, &get, |mut client| {
            client.write_all(data).context("data for the guest")?;
            client.shutdown(Shutdown::Write)?;
            // Until the guest has all of it.
            client.read_to_end(&mut Vec::new()).context("the guest's end")?;
            Ok(())
        })?;
        let put = format!("md5sum < /data && nc {host} {port} -e dd if=/data bs=64k 2> /dev/null");
        let (sum, back) = self.transfer(booted, &listener, &put, |mut client| {
            let mut block = vec![0; 1 << 20];
            for (number, wanted) in data.chunks(block.len()).enumerate() {
                let got = &mut block[..wanted.len()];
                client.read_exact(got).with_context(|| format!("MiB {number} from the guest"))?;
                ensure!(got == wanted, "MiB {number} came back changed");
            }
            Ok(())
        })?;
        let (sum, wanted) = (first_word(&sum)?, checksum(data)?);
        ensure!(sum == wanted, "the guest has {sum}, not {wanted}");
        Ok(Took { there, back })
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
            let said = booted.run(command, self.within);
            let served = server.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            // What the server saw is the cause, if both have something to say.
            let took = served?;
            Ok((said?, took))
        })
    }
}

/// The next client, but not for ever.
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
        ensure!(start.elapsed() < within, "the guest does not connect");
        sleep(Duration::from_millis(5));
    }
}
