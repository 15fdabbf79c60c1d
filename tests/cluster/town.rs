//! The network of the pods: a bridge in an outside namespace with a resolver and servers, and a
//! namespace for each pod.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket,
};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;
use transom_tests::network::{Service, ip, noise};

/// Limit for an answer; two guests may share one emulated processor.
pub(crate) const SOON: Duration = Duration::from_secs(60);
/// The outside host: router, resolver and servers.
pub(crate) const OUTSIDE: Ipv4Addr = four(1);
/// IPv6 address of the outside host.
pub(crate) const OUTSIDE_6: Ipv6Addr = six(1);
/// MTU of the pods, as in most clusters.
pub(crate) const MTU: u16 = 1450;

/// Port of a server that reports the client's address, by TCP and by UDP.
pub(crate) const WHO: u16 = 8080;
/// Port of a server that sends `data`.
pub(crate) const GIVE: u16 = 8081;
/// Port of a server that reports whether it received `data`.
pub(crate) const TAKE: u16 = 8082;

const RESOLV: &str = "nameserver 10.88.0.1\n\
                      search win.svc.cluster.local svc.cluster.local\n\
                      options ndots:5 timeout:2 attempts:3\n";

/// An IPv4 address of the network.
pub(crate) const fn four(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 88, 0, last)
}

/// An IPv6 address of the network.
pub(crate) const fn six(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0xfd88, 0, 0, 0, 0, 0, 0, last)
}

/// The bytes that are transferred in both directions.
pub(crate) fn data() -> Vec<u8> {
    noise(256 << 10)
}

/// A network namespace, by name; dropping it deletes the namespace.
pub(crate) struct Space(String);

impl Space {
    fn new(name: &str) -> anyhow::Result<Self> {
        let name = format!("transom-pods-{}-{name}", std::process::id());
        ip(&format!("netns add {name}"))?;
        let space = Self(name);
        space.ip("link set lo up")?;
        Ok(space)
    }

    /// Its path.
    pub(crate) fn path(&self) -> PathBuf {
        Path::new("/run/netns").join(&self.0)
    }

    fn ip(&self, words: &str) -> anyhow::Result<String> {
        ip(&format!("-n {} {words}", self.0))
    }

    fn command(&self, words: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.0]).args(words.split_whitespace());
        command
    }

    /// Runs `body` on a thread in this namespace.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        body: impl FnOnce() -> anyhow::Result<T> + Send + 'static,
    ) -> anyhow::Result<T> {
        let file = File::open(self.path()).context("a namespace")?;
        let inside = move || {
            move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
            body()
        };
        let thread = Builder::new().name("within".into()).spawn(inside)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }

    /// Connects from this namespace, sends `words`, and returns all that the other side sends.
    pub(crate) fn ask(
        &self,
        to: impl Into<SocketAddr>,
        words: impl Into<Vec<u8>>,
    ) -> anyhow::Result<Vec<u8>> {
        let (to, words) = (to.into(), words.into());
        self.within(move || {
            let mut stream = TcpStream::connect_timeout(&to, SOON)?;
            stream.set_read_timeout(Some(SOON))?;
            stream.write_all(&words)?;
            let mut said = Vec::new();
            stream.read_to_end(&mut said)?;
            Ok(said)
        })
        .with_context(|| to.to_string())
    }

    /// Sends a datagram until an answer comes.
    pub(crate) fn call(&self, to: (Ipv4Addr, u16), words: &str) -> anyhow::Result<String> {
        let words = words.to_owned();
        self.within(move || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
            socket.connect(to)?;
            socket.set_read_timeout(Some(Duration::from_secs(5)))?;
            let (start, mut room) = (Instant::now(), [0; 1500]);
            loop {
                // An unreachable port is reported as an error of a later call.
                socket.send(words.as_bytes()).ok();
                if let Ok(count) = socket.recv(&mut room) {
                    return Ok(String::from_utf8_lossy(&room[..count]).into_owned());
                }
                ensure!(start.elapsed() < SOON, "no datagram comes back from {to:?}");
                sleep(Duration::from_millis(50));
            }
        })
    }
}

impl Drop for Space {
    fn drop(&mut self) {
        Command::new("ip").args(["netns", "del", &self.0]).status().ok();
    }
}

/// The outside host and its servers.
pub(crate) struct Town {
    /// The namespace of the outside host.
    pub(crate) outside: Space,
    /// Files of the pods; deleted at the end.
    pub(crate) folder: TempDir,
    _resolver: Service,
}

impl Town {
    /// Makes the bridge, and starts the resolver and the servers.
    pub(crate) fn new() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        fs::write(folder.path().join("resolv.conf"), RESOLV)?;
        let outside = Space::new("outside")?;
        outside.ip("link add br0 type bridge forward_delay 0")?;
        outside.ip(&format!("addr add {OUTSIDE}/24 dev br0"))?;
        outside.ip(&format!("addr add {OUTSIDE_6}/64 dev br0 nodad"))?;
        outside.ip("link set br0 up")?;
        let words = format!(
            "dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts \
             --user=root --pid-file --listen-address={OUTSIDE} --bind-interfaces \
             --local=/example/ --local=/cluster.local/ --local=/web/ --local=/other/ \
             --host-record=www.example,{OUTSIDE} \
             --host-record=web.svc.cluster.local,10.88.0.50 \
             --host-record=web.other.svc.cluster.local,10.88.0.51"
        );
        let resolver = Service::start(&mut outside.command(&words))?;
        for address in [OUTSIDE.into(), OUTSIDE_6.into()] {
            serve(&outside, (address, WHO), |mut stream| {
                let Ok(from) = stream.peer_addr() else { return };
                write!(stream, "outside hears {}", from.ip()).ok();
            })?;
        }
        serve(&outside, (OUTSIDE.into(), GIVE), |mut stream| {
            stream.write_all(&data()).ok();
            stream.shutdown(Shutdown::Write).ok();
            // Keep the connection until the guest has received everything.
            stream.read_to_end(&mut Vec::new()).ok();
        })?;
        serve(&outside, (OUTSIDE.into(), TAKE), |mut stream| {
            let mut got = Vec::new();
            let whole = stream.read_to_end(&mut got).is_ok() && got == data();
            write!(stream, "{}", if whole { "all of it" } else { "something else" }).ok();
        })?;
        outside.within(|| {
            let socket = UdpSocket::bind((OUTSIDE, WHO))?;
            Builder::new().name("who".into()).spawn(move || {
                while let Ok((_, from)) = socket.recv_from(&mut [0; 1500]) {
                    let said = format!("outside hears {}", from.ip());
                    socket.send_to(said.as_bytes(), from).ok();
                }
            })?;
            Ok(())
        })?;
        Ok(Self { outside, folder, _resolver: resolver })
    }

    /// Makes the namespace of a pod whose addresses end with `last`.
    pub(crate) fn space(&self, name: &str, last: u8) -> anyhow::Result<Space> {
        let space = Space::new(name)?;
        let ends = format!("veth-{name} mtu {MTU} type veth peer name eth0 mtu {MTU}");
        self.outside.ip(&format!("link add {ends} netns {}", space.0))?;
        self.outside.ip(&format!("link set veth-{name} master br0 up"))?;
        space.ip(&format!("addr add {}/24 dev eth0", four(last)))?;
        space.ip(&format!("addr add {}/64 dev eth0 nodad", six(last.into())))?;
        space.ip("link set eth0 up")?;
        space.ip(&format!("route add default via {OUTSIDE}"))?;
        space.ip(&format!("route add default via {OUTSIDE_6}"))?;
        for (name, value) in sysctls() {
            let path = format!("/proc/sys/{}", name.replace('.', "/"));
            space.within(move || fs::write(&path, value).context(path))?;
        }
        Ok(space)
    }
}

/// The sysctls that the manifest of the restricted profile sets in the pod's network.
fn sysctls() -> impl Iterator<Item = (&'static str, &'static str)> {
    let manifest = include_str!("../../deploy/kubernetes/restricted/deployment.yaml");
    manifest.lines().zip(manifest.lines().skip(1)).filter_map(|(name, value)| {
        let name = name.trim().strip_prefix("- name: ").filter(|it| it.starts_with("net."))?;
        Some((name, value.trim().strip_prefix("value: ")?.trim_matches('\'')))
    })
}

/// Serves connections to a port in a namespace, each with `each`, until this process ends.
fn serve(space: &Space, at: (IpAddr, u16), each: fn(TcpStream)) -> anyhow::Result<()> {
    let (tell, told) = mpsc::channel();
    space.within(move || {
        let listener = TcpListener::bind(at)?;
        Builder::new().name(format!("port-{}", at.1)).spawn(move || {
            tell.send(()).ok();
            for stream in listener.incoming().flatten() {
                std::thread::spawn(move || each(stream));
            }
        })?;
        Ok(())
    })?;
    told.recv_timeout(SOON).context("a server")
}
