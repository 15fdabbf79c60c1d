//! Four network namespaces: the guest, the wire, the pod, and outside hosts. The wire carries
//! frames between the guest's card and the socket of the user-mode network.

use std::fs::{self, File};
use std::io::{BufReader, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketAddrAny, SocketType, recvfrom, sendto,
    sockopt,
};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

/// Timeout of every step.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(60);

/// A network namespace. It is removed when this is dropped.
pub(crate) struct Space(String);

impl Space {
    fn new(name: &str) -> anyhow::Result<Self> {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let space = Self(format!("transom-{name}-{}-{number}", std::process::id()));
        run(Command::new("ip").args(["netns", "add", &space.0]))?;
        space.ip("link set lo up")?;
        Ok(space)
    }

    /// Moves the calling thread, and the programs it starts, into the namespace.
    pub(crate) fn enter(&self) -> anyhow::Result<()> {
        let path = Path::new("/run/netns").join(&self.0);
        let file = File::open(&path).with_context(|| path.display().to_string())?;
        move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(())
    }

    /// Runs a function on a thread in the namespace.
    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        body: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<JoinHandle<anyhow::Result<T>>> {
        let space = Self(self.0.clone());
        Ok(Builder::new().spawn(move || {
            let entered = space.enter();
            // The original value removes the namespace.
            std::mem::forget(space);
            entered.and_then(|()| body())
        })?)
    }

    /// A command that runs in the namespace.
    pub(crate) fn command(&self, words: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0, "timeout", "-k", "1", "60"]);
        command.args(["sh", "-c", words]);
        command
    }

    /// Runs a shell script in the namespace, and returns its output.
    pub(crate) fn run(&self, words: &str) -> anyhow::Result<String> {
        run(&mut self.command(words))
    }

    /// Like [`Self::run`] for scripts that may fail: returns the status and all output.
    pub(crate) fn attempt(&self, words: &str) -> anyhow::Result<(Option<i32>, String)> {
        let output = self.command(words).stdin(Stdio::null()).output()?;
        Ok((output.status.code(), texts(&output)))
    }

    fn ip(&self, words: &str) -> anyhow::Result<String> {
        run(Command::new("ip").args(["-n", &self.0]).args(words.split(' ')))
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "del", &self.0]).status().ok();
    }
}

fn texts(output: &Output) -> String {
    [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it)).concat()
}

fn run(command: &mut Command) -> anyhow::Result<String> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, texts(&output));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A program that runs until this is dropped.
pub(crate) struct Service(Child);

impl Service {
    /// Starts the program in a namespace.
    pub(crate) fn start(space: &Space, words: &str) -> anyhow::Result<Self> {
        let mut command = space.command(&format!("exec {words}"));
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self(child.spawn()?))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        // `timeout` forwards the signal.
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id().cast_signed()) {
            rustix::process::kill_process(pid, rustix::process::Signal::TERM).ok();
        }
        self.0.wait().ok();
    }
}

/// Waits until a condition holds.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    while !is_so() {
        ensure!(start.elapsed() < TIMEOUT, "{what}: not in a minute");
        sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// All namespaces.
pub(crate) struct World {
    /// The stand-in for the guest, with a card.
    pub(crate) guest: Space,
    /// The namespace of the network's own sockets.
    pub(crate) pod: Space,
    /// Other hosts.
    pub(crate) outside: Space,
    wire: Space,
}

impl World {
    /// Creates the namespaces, with this MTU between guest and pod.
    pub(crate) fn new(mtu: u16) -> anyhow::Result<Self> {
        let [guest, pod, outside, wire] = ["guest", "pod", "outside", "wire"].map(Space::new);
        let world = Self { guest: guest?, pod: pod?, outside: outside?, wire: wire? };
        let (guest, pod, outside) = (&world.guest, &world.pod, &world.outside);
        guest.ip(&format!("link add g0 type veth peer name w0 netns {}", world.wire.0))?;
        guest.ip("link set g0 address 02:00:00:00:00:77")?;
        guest.ip(&format!("link set g0 mtu {mtu}"))?;
        world.wire.ip(&format!("link set w0 mtu {mtu}"))?;
        // A virtual wire would leave checksums and segmentation to the receiver, so disable that.
        guest.run("ethtool -K g0 tx off tso off gso off gro off > /dev/null")?;
        world.wire.run("echo 1 > /proc/sys/net/ipv6/conf/w0/disable_ipv6")?;
        world.wire.ip("link set w0 up")?;
        pod.ip(&format!("link add p0 type veth peer name o0 netns {}", outside.0))?;
        pod.ip("addr add 10.77.0.2/24 dev p0")?;
        pod.ip("addr add fd77::2/64 dev p0 nodad")?;
        outside.ip("addr add 10.77.0.1/24 dev o0")?;
        outside.ip("addr add fd77::1/64 dev o0 nodad")?;
        pod.ip("link set p0 up")?;
        outside.ip("link set o0 up")?;
        pod.ip("route add default via 10.77.0.1")?;
        pod.ip("route add default via fd77::1")?;
        outside.ip("addr add 192.0.2.1/32 dev lo")?;
        outside.ip("addr add 2001:db8::1/128 dev lo nodad")?;
        outside.ip("route add unreachable 198.51.100.0/24")?;
        outside.run("echo 1 > /proc/sys/net/ipv4/ip_forward")?;
        pod.run("echo 0 2147483647 > /proc/sys/net/ipv4/ping_group_range")?;
        Ok(world)
    }

    /// Carries frames between the guest's card and this socket until the result is dropped.
    pub(crate) fn plug(&self, socket: &Path) -> anyhow::Result<Wire> {
        let stream = UnixStream::connect(socket).context("the network's socket")?;
        let ended = Arc::new(AtomicBool::new(false));
        let (ours, theirs, stop) = (stream.try_clone()?, stream.try_clone()?, ended.clone());
        let carried = self.wire.spawn(move || relay(&ours, theirs, &stop))?;
        until("the wire", || carried.is_finished() || self.guest.ip("link set g0 up").is_ok())?;
        Ok(Wire { stream, ended, carried: Some(carried) })
    }
}

/// A connected wire.
pub(crate) struct Wire {
    stream: UnixStream,
    ended: Arc<AtomicBool>,
    carried: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Drop for Wire {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        self.stream.shutdown(std::net::Shutdown::Both).ok();
        if let Some(carried) = self.carried.take() {
            carried.join().ok();
        }
    }
}

/// Size of the longest frame.
const FRAME: usize = 65535 + 18;

fn relay(stream: &UnixStream, theirs: UnixStream, ended: &AtomicBool) -> anyhow::Result<()> {
    // ETH_P_ALL in network byte order.
    let all = Protocol::from_raw(u32::from(3_u16.to_be()).try_into()?);
    let packets = rustix::net::socket(AddressFamily::PACKET, SocketType::RAW, Some(all))?;
    // Larger than TCP windows: like a guest's rings, the socket should not lose frames.
    sockopt::set_socket_recv_buffer_size_force(&packets, 16 << 20)?;
    sockopt::set_socket_send_buffer_size_force(&packets, 16 << 20)?;
    let pause = Some(Duration::from_millis(50));
    sockopt::set_socket_timeout(&packets, sockopt::Timeout::Recv, pause)?;
    let card: OnceLock<SocketAddrAny> = OnceLock::new();
    std::thread::scope(|scope| {
        let back = scope.spawn(|| -> anyhow::Result<()> {
            let mut input = BufReader::with_capacity(256 << 10, theirs);
            let (mut length, mut frame) = ([0; 4], vec![0; FRAME]);
            while input.read_exact(&mut length).is_ok() {
                let length = usize::try_from(u32::from_be_bytes(length))?;
                let Some(frame) = frame.get_mut(..length) else { bail!("{length} bytes") };
                input.read_exact(frame)?;
                // The first frame tells which card it is.
                let Some(card) = card.get() else { continue };
                sendto(&packets, frame, SendFlags::empty(), card)?;
            }
            Ok(())
        });
        let mut frame = vec![0; 4 + FRAME];
        let mut stream = stream;
        while !ended.load(Ordering::Relaxed) && !back.is_finished() {
            match recvfrom(&packets, &mut frame[4..], RecvFlags::empty()) {
                Ok((count, _, from)) => {
                    if let Some(from) = from {
                        card.get_or_init(|| from);
                    }
                    frame[..4].copy_from_slice(&u32::try_from(count)?.to_be_bytes());
                    if stream.write_all(&frame[..4 + count]).is_err() {
                        break;
                    }
                }
                Err(Errno::AGAIN | Errno::INTR) => {}
                Err(error) => return Err(error).context("a packet socket"),
            }
        }
        stream.shutdown(std::net::Shutdown::Both).ok();
        back.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// A script for the guest's DHCP client.
pub(crate) fn lease_script(folder: &Path) -> anyhow::Result<PathBuf> {
    let path = folder.join("lease.sh");
    fs::write(
        &path,
        "#!/bin/sh\n[ \"$1\" = bound ] || exit 0\n\
         ip addr add $ip/$mask dev $interface\nip route add default via $router\n\
         echo \"ip=$ip mask=$mask router=$router dns=$dns mtu=$mtu domain=$domain\"\n\
         echo \"search=$search lease=$lease\"\n",
    )?;
    run(Command::new("chmod").arg("755").arg(&path))?;
    Ok(path)
}
