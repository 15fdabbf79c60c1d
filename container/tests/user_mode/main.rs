//! The user-mode network with Debian's programs at both ends: a network namespace instead of a
//! guest, whose frames are carried to the network's socket as `vmm` does, and outside hosts.
//!
//! It needs root, for the namespaces.
#![forbid(unsafe_code)]

mod flood;
mod share;
mod world;

use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use container::net::user::UserNetwork;
use container::settings::Settings;
use container::settings::value::{Value as _, Within};
use container::settings::words::Ports;
use container::shared_folder::Connector;
use tempfile::TempDir;

use self::world::{Service, Space, TIMEOUT, World, until};

const MIB: usize = 1 << 20;
/// Another host, as the guest sees it.
const HOST: &str = "192.0.2.1";

/// A network with a guest.
struct Net {
    // Fields are dropped in this order.
    _wire: world::Wire,
    user: UserNetwork,
    world: World,
    folder: TempDir,
}

impl Net {
    fn start(mtu: u16, change: impl FnOnce(&mut Settings)) -> anyhow::Result<Self> {
        Self::with_share(mtu, change, None)
    }

    fn with_share(
        mtu: u16,
        change: impl FnOnce(&mut Settings),
        share: Option<Connector>,
    ) -> anyhow::Result<Self> {
        let (world, folder) = (World::new(mtu)?, tempfile::tempdir()?);
        let mut settings = Settings::defaults();
        settings.network.mtu = Some(Within(mtu.into()));
        change(&mut settings);
        fs::create_dir_all(folder.path().join("etc"))?;
        let resolv = format!("nameserver {HOST}\nsearch test.example\n");
        fs::write(folder.path().join("etc/resolv.conf"), resolv)?;
        world.pod.enter()?;
        let user = UserNetwork::start(&settings, folder.path(), folder.path(), share)?;
        let wire = world.plug(&user.socket)?;
        let net = Self { _wire: wire, user, world, folder };
        net.address()?;
        Ok(net)
    }

    /// Lets the guest ask for its address.
    fn address(&self) -> anyhow::Result<String> {
        let script = world::lease_script(self.folder.path())?;
        let client = "udhcpc -f -q -n -t 20 -T 1 -O search -O mtu -i g0";
        self.guest(&format!("{client} -s {} 2> /dev/null", script.display()))
    }

    fn guest(&self, words: &str) -> anyhow::Result<String> {
        self.world.guest.run(words)
    }
}

/// Runs a test on a thread of its own, so that its namespaces do not affect others.
fn isolated(body: impl FnOnce() -> anyhow::Result<()> + Send + 'static) {
    // One test at a time, since they measure.
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let outcome = std::thread::spawn(body).join();
    drop(turn);
    outcome.unwrap().unwrap();
}

/// Serves connections to a port in a namespace with this function, forever.
fn serve(
    space: &Space,
    address: &'static str,
    port: u16,
    each: impl Fn(TcpStream) + Clone + Send + 'static,
) -> anyhow::Result<()> {
    let (tell, told) = mpsc::channel();
    space.spawn(move || {
        let listener = TcpListener::bind((address, port))?;
        tell.send(())?;
        for stream in listener.incoming().flatten() {
            let each = each.clone();
            std::thread::spawn(move || each(stream));
        }
        Ok(())
    })?;
    told.recv_timeout(TIMEOUT).context("a server")
}

/// Sends a datagram between two addresses, and waits for the whole answer.
fn answers(
    space: &Space,
    (from, to): (&str, &str),
    words: &str,
    wanted: &str,
) -> anyhow::Result<()> {
    let [from, to, words, wanted] = [from, to, words, wanted].map(str::to_owned);
    let ask = move || {
        let socket = UdpSocket::bind(from)?;
        socket.set_read_timeout(Some(TIMEOUT))?;
        socket.connect(to)?;
        socket.send(words.as_bytes())?;
        let (mut said, mut part) = (Vec::new(), vec![0; 1 << 16]);
        while said.len() < wanted.len() {
            let count =
                socket.recv(&mut part).with_context(|| format!("after {} bytes", said.len()))?;
            said.extend(&part[..count]);
        }
        ensure!(said == wanted.as_bytes(), "{}", String::from_utf8_lossy(&said));
        Ok(())
    };
    space.spawn(ask)?.join().expect("no test panics")
}

/// A web server: sends a number of bytes, or takes bytes and answers with their number. The data
/// are always the same noise.
fn web(mut stream: TcpStream, noise: &[u8]) {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") && stream.read_exact(&mut byte).is_ok() {
        head.extend(byte);
    }
    let head = String::from_utf8_lossy(&head).to_ascii_lowercase();
    let ok = "HTTP/1.1 200 OK\r\nConnection: close\r\n";
    if head.starts_with("get") {
        write!(stream, "{ok}Content-Length: {}\r\n\r\n", noise.len()).ok();
        stream.write_all(noise).ok();
        return;
    }
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    let mut body = vec![0; length.map_or(0, |it| it.trim().parse().unwrap())];
    let same = stream.read_exact(&mut body).is_ok() && body == noise;
    let said = if same { "all of it" } else { "something else" };
    write!(stream, "{ok}Content-Length: {}\r\n\r\n{said}", said.len()).ok();
}

/// Pseudo-random bytes (xorshift64), the same every time.
fn noise(length: usize) -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let word = std::iter::from_fn(|| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        Some(state.to_le_bytes())
    });
    word.take(length / 8).flatten().collect()
}

#[test]
fn pings_and_connections_succeed_or_fail_as_expected() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        let said = net.guest("ping -c 3 -i 0.2 -W 5 10.77.0.1")?;
        ensure!(said.contains(" 0% packet loss"), "{said}");
        // With fragments, in both directions.
        let said = net.guest(&format!("ping -c 3 -i 0.2 -W 5 -s 4000 {HOST}"))?;
        ensure!(said.contains(" 0% packet loss"), "{said}");
        let said = net.world.guest.attempt(&format!("ping -c 1 -W 5 -t 1 {HOST}"))?.1;
        ensure!(said.contains("Time to live exceeded"), "{said}");
        let start = Instant::now();
        for (to, why) in [(HOST, "refused"), ("198.51.100.1", "No route to host")] {
            let (status, said) = net.world.guest.attempt(&format!("nc -nvz -w 30 {to} 81"))?;
            ensure!(status == Some(1) && said.contains(why), "{status:?} {said}");
        }
        ensure!(start.elapsed() < Duration::from_secs(30), "that took {:?}", start.elapsed());
        Ok(())
    });
}

#[test]
fn large_files_arrive_whole_in_both_directions() {
    isolated(|| {
        for mtu in [1500, 65520] {
            let net = Net::start(mtu, |_| ())?;
            let data = Arc::new(noise(128 * MIB));
            let file = net.folder.path().join("file");
            fs::write(&file, &*data)?;
            serve(&net.world.outside, HOST, 80, move |stream| web(stream, &data))?;
            let (file, start) = (file.display(), Instant::now());
            let same = format!("curl -sS http://{HOST}/ | cmp - {file}");
            net.guest(&same)?;
            let there = start.elapsed();
            let said = net.guest(&format!("curl -sS -T {file} http://{HOST}/"))?;
            ensure!(said == "all of it", "{said}");
            let back = start.elapsed() - there;
            eprintln!("MTU {mtu}: 128 MiB to the guest in {there:.2?}, from it in {back:.2?}");
        }
        Ok(())
    });
}

#[test]
fn iperf_measures_the_throughput() {
    isolated(|| {
        for mtu in [1500, 65520] {
            let net = Net::start(mtu, |_| ())?;
            let _server = Service::start(&net.world.outside, "iperf3 -s")?;
            let there = format!("iperf3 -J -t 1 -c {HOST}");
            until("iperf3", || net.world.pod.run("iperf3 -n 1K -c 192.0.2.1").is_ok())?;
            for (words, what) in [("", "from the guest"), ("-R", "to the guest")] {
                for (who, space) in [("the guest", &net.world.guest), ("the pod", &net.world.pod)] {
                    let said = space.run(&format!("{there} {words}"))?;
                    let said: serde_json::Value = serde_json::from_str(&said)?;
                    let bits = said["end"]["sum_received"]["bits_per_second"].as_f64();
                    let mib = bits.context("no figure")? / 8.0 / 1048576.0;
                    eprintln!("MTU {mtu}: {who}, {what}: {mib:.0} MiB/s");
                    ensure!(mib > 5.0, "{mib} MiB/s");
                }
            }
        }
        Ok(())
    });
}

#[test]
fn datagrams_and_their_answers_arrive() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        let _echo = Service::start(
            &net.world.outside,
            "socat -b 65536 UDP4-RECVFROM:7,fork,bind=192.0.2.1 EXEC:cat",
        )?;
        let word = format!("echo hello | socat -t 3 -T 3 - UDP4:{HOST}:7");
        until("an echo", || net.guest(&word).is_ok_and(|said| said == "hello\n"))?;
        // With fragments, in both directions.
        let long = "x".repeat(20_000);
        answers(&net.world.guest, ("0.0.0.0:0", &format!("{HOST}:7")), &long, &long)?;
        // Nobody listens there: the program gets the error.
        let start = Instant::now();
        let ask = "python3 -c \"import socket; s=socket.socket(2,2); \
                      s.connect(('192.0.2.1',9)); s.send(b'x'); s.settimeout(20); s.recv(9)\"";
        let (status, said) = net.world.guest.attempt(ask)?;
        ensure!(status == Some(1) && said.contains("ConnectionRefusedError"), "{said}");
        ensure!(start.elapsed() < Duration::from_secs(20), "that took {:?}", start.elapsed());
        Ok(())
    });
}

#[test]
fn a_half_closed_connection_still_receives() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        serve(&net.world.outside, HOST, 7, |mut stream| {
            let mut all = Vec::new();
            stream.read_to_end(&mut all).ok();
            stream.write_all(&all).ok();
        })?;
        let said = net.guest(&format!("head -c 300000 /dev/zero | nc -N {HOST} 7 | wc -c"))?;
        ensure!(said.trim() == "300000", "{said}");
        // The other direction.
        let (tell, told) = mpsc::channel();
        let tell = Arc::new(Mutex::new(tell));
        serve(&net.world.outside, HOST, 8, move |mut stream| {
            stream.write_all(b"ask").ok();
            stream.shutdown(Shutdown::Write).ok();
            let mut all = Vec::new();
            stream.read_to_end(&mut all).ok();
            tell.lock().unwrap().send(all).ok();
        })?;
        net.guest(&format!("socat -t 10 TCP:{HOST}:8 SYSTEM:'cat; sleep 1; echo answer'"))?;
        let all = told.recv_timeout(TIMEOUT)?;
        ensure!(all == b"askanswer\n", "{}", String::from_utf8_lossy(&all));
        Ok(())
    });
}

#[test]
fn a_reconnecting_machine_is_served_and_an_end_closes_all() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        let (gone, went) = mpsc::channel();
        serve(&net.world.outside, HOST, 7, move |mut stream| {
            let greeted = stream.write_all(b"hello");
            // The machine's connections break. The first call after that reports it, and only that.
            let ended = greeted.and_then(|()| stream.read_to_end(&mut Vec::new()));
            gone.send(ended.is_err()).ok();
        })?;
        let _open = Service::start(&net.world.guest, &format!("socat -u TCP:{HOST}:7 STDOUT"))?;
        until("a connection", || {
            let all = net.world.guest.run("ss -Htn state established");
            all.is_ok_and(|all| all.contains(HOST))
        })?;
        let Net { _wire: wire, user, world, folder } = net;
        drop(wire);
        ensure!(went.recv_timeout(TIMEOUT)?, "it ended in order");
        let wire = world.plug(&user.socket)?;
        let said = world.guest.run("ping -c 3 -i 0.2 -W 5 10.77.0.1")?;
        ensure!(said.contains(" 0% packet loss"), "{said}");
        let socket = user.socket.clone();
        ensure!(TcpListener::bind("0.0.0.0:3389").is_err(), "nobody listens");
        user.end();
        ensure!(!socket.exists(), "the socket stays");
        TcpListener::bind("0.0.0.0:3389").context("the port stays")?;
        drop((wire, folder));
        Ok(())
    });
}

#[test]
fn many_connections_at_once_are_all_served() {
    isolated(|| {
        const MANY: usize = 400;
        let net = Net::start(1500, |_| ())?;
        let (open, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let seen = most.clone();
        serve(&net.world.outside, HOST, 7, move |mut stream| {
            let now = open.fetch_add(1, Ordering::SeqCst) + 1;
            seen.fetch_max(now, Ordering::SeqCst);
            let mut buffer = [0; 64];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                stream.write_all(&buffer[..count]).ok();
            }
            open.fetch_sub(1, Ordering::SeqCst);
        })?;
        let script = format!(
            "import socket\n\
             all=[socket.create_connection(('{HOST}',7),30) for _ in range({MANY})]\n\
             [s.sendall(b'%d'%i) for i,s in enumerate(all)]\n\
             print(all and sum(s.recv(9)==b'%d'%i for i,s in enumerate(all)))\n"
        );
        let path = net.folder.path().join("many.py");
        fs::write(&path, script)?;
        let said = net.guest(&format!("python3 {}", path.display()))?;
        ensure!(said.trim() == MANY.to_string(), "{said}");
        ensure!(most.load(Ordering::SeqCst) == MANY, "{most:?}");
        Ok(())
    });
}

/// Memory of this process, in bytes.
fn memory() -> anyhow::Result<usize> {
    let text = fs::read_to_string("/proc/self/statm")?;
    let pages: usize = text.split(' ').nth(1).context("no field")?.parse()?;
    Ok(pages * 4096)
}

#[test]
fn a_stalled_reader_costs_no_memory() {
    isolated(|| {
        let net = Net::start(65520, |_| ())?;
        // One reader outside that pauses, and one in the guest.
        let (wake, sleep) = mpsc::channel::<()>();
        let sleep = Arc::new(Mutex::new(sleep));
        serve(&net.world.outside, HOST, 7, move |_stream| {
            sleep.lock().unwrap().recv().ok();
        })?;
        serve(
            &net.world.outside,
            HOST,
            8,
            |mut stream| {
                while stream.write_all(&[0; 65536]).is_ok() {}
            },
        )?;
        let before = memory()?;
        let flood = format!("timeout 3 socat -u /dev/zero TCP:{HOST}:7");
        net.world.guest.attempt(&flood)?;
        let stalled = format!("timeout 3 socat -u TCP:{HOST}:8 SYSTEM:'sleep 9'");
        net.world.guest.attempt(&stalled)?;
        let grown = memory()?.saturating_sub(before);
        drop(wake);
        ensure!(grown < 32 * MIB, "{} KiB more", grown >> 10);
        Ok(())
    });
}

#[test]
fn forwarded_ports_reach_the_guest_and_reserved_ports_do_not() {
    isolated(|| {
        let net = Net::start(1500, |settings| {
            settings.network.user_ports = Ports::read("7000,7001,7002/udp,8006").unwrap();
            settings.network.host_ports = Ports::read("7001").unwrap();
        })?;
        ensure!(
            net.user.summary.contains("forwarded: 3389,3389/udp,7000,7002/udp"),
            "{}",
            net.user.summary
        );
        let log = net.folder.path().join("log");
        let serve = format!(
            "socat -d -d TCP4-LISTEN:3389,fork,reuseaddr SYSTEM:'echo $SOCAT_PEERADDR; cat' 2> {}",
            log.display()
        );
        let _rdp = Service::start(&net.world.guest, &serve)?;
        let _udp = Service::start(
            &net.world.guest,
            "socat UDP4-RECVFROM:3389,fork SYSTEM:'echo $SOCAT_PEERADDR; cat'",
        )?;
        let ask = |to: &str| format!("echo hello | nc -N -w 5 {to} 3389");
        // From another host: the guest sees its address.
        until("a server", || {
            net.world.outside.run(&ask("10.77.0.2")).is_ok_and(|it| !it.is_empty())
        })?;
        let said = net.world.outside.run(&ask("10.77.0.2"))?;
        ensure!(said == "10.77.0.1\nhello\n", "{said}");
        let said = net.world.outside.run("echo hello | nc -s 192.0.2.1 -N -w 5 10.77.0.2 3389")?;
        ensure!(said == "192.0.2.1\nhello\n", "{said}");
        // From the pod itself, like `kubectl port-forward`.
        for to in ["127.0.0.1", "::1", "10.77.0.2"] {
            let said = net.world.pod.run(&ask(to))?;
            ensure!(said == "10.77.0.1\nhello\n", "{to}: {said}");
        }
        let word = "echo hello | socat -t 3 -T 3 - UDP4:10.77.0.2:3389";
        until("an echo", || net.world.outside.run(word).is_ok_and(|it| !it.is_empty()))?;
        let way = ("192.0.2.1:0", "10.77.0.2:3389");
        answers(&net.world.outside, way, "hello\n", "192.0.2.1\nhello\n")?;
        let way = ("127.0.0.1:0", "127.0.0.1:3389");
        answers(&net.world.pod, way, "hello\n", "10.77.0.1\nhello\n")?;
        // Nobody listens in the guest: the connection breaks.
        let (status, said) = net.world.outside.attempt("nc -w 5 10.77.0.2 7000 < /dev/zero")?;
        ensure!(status == Some(0) || status == Some(1), "{status:?} {said}");
        for port in [7001, 8006] {
            let (status, said) =
                net.world.outside.attempt(&format!("nc -zv -w 5 10.77.0.2 {port}"))?;
            ensure!(status == Some(1) && said.contains("refused"), "{status:?} {said}");
        }
        Ok(())
    });
}

#[test]
fn the_guest_reaches_no_service_of_the_pod() {
    isolated(|| {
        let net = Net::start(1500, |settings| {
            settings.network.address = Some(Ipv4Addr::new(10, 77, 0, 99));
        })?;
        serve(&net.world.pod, "0.0.0.0", 7, |mut stream| drop(stream.write_all(b"secret")))?;
        serve(&net.world.outside, HOST, 7, |mut stream| drop(stream.write_all(b"public")))?;
        let said = net.guest(&format!("nc -w 5 {HOST} 7"))?;
        ensure!(said == "public", "{said}");
        net.guest("ip route add 127.0.0.2 via 10.77.0.1")?;
        net.guest("echo 1 > /proc/sys/net/ipv4/conf/all/route_localnet")?;
        for address in ["10.77.0.2", "127.0.0.2", "0.0.0.1"] {
            let (status, said) = net.world.guest.attempt(&format!("nc -v -w 5 {address} 7"))?;
            ensure!(status == Some(1) && !said.contains("secret"), "{address}: {status:?} {said}");
        }
        Ok(())
    });
}

#[test]
fn the_guest_gets_the_pods_addresses_and_names() {
    isolated(|| {
        let net = Net::start(1400, |_| ())?;
        net.guest("ip addr flush dev g0")?;
        let said = net.address()?;
        let lease = "ip=10.77.0.2 mask=24 router=10.77.0.1 dns=10.77.0.1 mtu=1400";
        ensure!(said.contains(lease) && said.contains("search=test.example lease=3600"), "{said}");
        let _names = Service::start(
            &net.world.outside,
            "dnsmasq -k -R -h --user=root -a 192.0.2.1 -z --address=/name.test.example/192.0.2.77 \
             --txt-record=long.test.example,$(head -c 250 /dev/zero | tr '\\0' x),\
             $(head -c 250 /dev/zero | tr '\\0' y),$(head -c 250 /dev/zero | tr '\\0' z)",
        )?;
        let dig = |words: &str| format!("dig +short +tries=1 +time=20 @10.77.0.1 {words}");
        let asked = dig("+time=2 name.test.example");
        until("a name server", || net.guest(&asked).is_ok_and(|said| said.trim() == "192.0.2.77"))?;
        // Programs in the pod find this name with its search list.
        let said = net.guest(&dig("name | tail -n 1"))?;
        ensure!(said.trim() == "192.0.2.77", "{said}");
        let said = net.guest(&dig("+tcp name.test.example"))?;
        ensure!(said.trim() == "192.0.2.77", "{said}");
        // Too long for a datagram: dig asks again with TCP.
        let said = net.guest(&dig("+noedns +bufsize=512 long.test.example TXT"))?;
        ensure!(said.contains("yyyy") && said.contains("zzzz"), "{said}");
        let said = net.guest(&dig("host.lan"))?;
        ensure!(said.trim() == "10.77.0.1", "{said}");
        Ok(())
    });
}

#[test]
fn ipv6_works_like_ipv4() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        let address = "ip -6 -o addr show dev g0 scope global | grep -v tentative";
        until("an address", || net.world.guest.attempt(address).is_ok_and(|it| it.0 == Some(0)))?;
        let said = net.guest(address)?;
        ensure!(said.contains("fd77::"), "{said}");
        let host = "2001:db8::1";
        let said = net.guest(&format!("ping -6 -c 3 -i 0.2 -W 5 -s 4000 {host}"))?;
        ensure!(said.contains(" 0% packet loss"), "{said}");
        let (status, said) = net.world.guest.attempt(&format!("nc -nvz -w 30 {host} 81"))?;
        ensure!(status == Some(1) && said.contains("refused"), "{status:?} {said}");
        let data = Arc::new(noise(4 * MIB));
        let file = net.folder.path().join("file");
        fs::write(&file, &*data)?;
        serve(&net.world.outside, host, 80, move |stream| web(stream, &data))?;
        let file = file.display();
        net.guest(&format!("curl -sS http://[{host}]/ | cmp - {file}"))?;
        let said = net.guest(&format!("curl -sS -T {file} http://[{host}]/"))?;
        ensure!(said == "all of it", "{said}");
        let echo = format!("socat -b 65536 UDP6-RECVFROM:7,fork,bind=[{host}] EXEC:cat");
        let _echo = Service::start(&net.world.outside, &echo)?;
        let ask = format!("head -c 9000 /dev/zero | socat -T 2 -b 65536 - UDP6:[{host}]:7 | wc -c");
        until("an echo", || net.guest(&ask).is_ok_and(|said| said.trim() == "9000"))?;
        // The pod's address is not the guest's here, and it is closed.
        serve(&net.world.pod, "::", 7, |mut stream| drop(stream.write_all(b"secret")))?;
        for closed in ["fd77::2", "::ffff:127.0.0.1"] {
            let said = net.world.guest.attempt(&format!("nc -v -w 5 {closed} 7"))?.1;
            ensure!(!said.contains("secret"), "{closed}: {said}");
        }
        let rdp = "socat TCP6-LISTEN:3389,fork,reuseaddr SYSTEM:'echo $SOCAT_PEERADDR; cat'";
        let _rdp = Service::start(&net.world.guest, rdp)?;
        let ask = "echo hello | nc -N -w 5 fd77::2 3389";
        until("a server", || net.world.outside.run(ask).is_ok_and(|it| !it.is_empty()))?;
        let said = net.world.outside.run(ask)?;
        ensure!(said == "[fd77:0000:0000:0000:0000:0000:0000:0001]\nhello\n", "{said}");
        Ok(())
    });
}

/// Processor time of the network's thread in ticks, and how often it ran.
fn ran() -> anyhow::Result<Vec<u64>> {
    for thread in fs::read_dir("/proc/self/task")?.flatten() {
        let read = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        if read("comm").trim() == "network" {
            let switches = |line: &&str| line.contains("ctxt_switches");
            let status = read("status");
            let numbers = status.lines().filter(switches);
            return numbers
                .map(|line| Ok(line.split_whitespace().last().context("a number")?.parse()?))
                .collect();
        }
    }
    anyhow::bail!("no thread of the network")
}

#[test]
fn a_network_without_traffic_sleeps() {
    isolated(|| {
        let net = Net::start(1500, |_| ())?;
        serve(&net.world.outside, HOST, 7, |mut stream| drop(stream.read(&mut [0])))?;
        // An open connection without traffic.
        let _open = Service::start(&net.world.guest, &format!("socat -u TCP:{HOST}:7 STDOUT"))?;
        net.guest("ping -c 1 -W 5 10.77.0.1")?;
        // The guest's system may still send packets of its own.
        until("sleep", || {
            let before = ran();
            std::thread::sleep(Duration::from_secs(2));
            ran().is_ok_and(|after| before.is_ok_and(|before| before == after))
        })
    });
}
