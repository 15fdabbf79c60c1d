//! The namespaces of the tests: the outside host, and pods with a guest behind each.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _};
use std::net::UdpSocket;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use tempfile::TempDir;

use crate::pod;

/// Limit for events that are immediate on an idle host.
const SOON: Duration = Duration::from_secs(30);
/// Length in bytes of a file that takes many packets.
pub(crate) const LARGE: usize = 1 << 20;
/// A command prefix that makes a program's /proc/sys read-only, as container engines do.
pub(crate) const READ_ONLY: &str = "sh ro.sh";

/// A command prefix that gives a program a /dev with only a few nodes, as container engines do.
pub(crate) const OWN_DEV: &str = "sh dev.sh";

const DEV_SH: &str = "mount -t tmpfs dev /dev && mkdir /dev/net\n\
                      mknod /dev/null c 1 3 && mknod /dev/net/tun c 10 200\n\
                      exec \"$@\"\n";
const RO_SH: &str = "mount --bind /proc/sys /proc/sys && mount -o remount,bind,ro /proc/sys\n\
                     exec \"$@\"\n";

/// The script that both DHCP clients run: it stores the lease's variables, and applies the lease.
const LEASE_SH: &str = r#"#!/bin/sh
if [ -n "$1" ]; then
  [ "$1" = bound ] || exit 0
  address=$ip/$mask router=$router
else
  case $reason in BOUND|REBOOT|RENEW) ;; *) exit 0 ;; esac
  address=$new_ip_address/24 router=$new_routers
fi
set > "$SAID.new"
sed -i "s/='\(.*\)'$/=\1/" "$SAID.new"
ip address replace "$address" dev eth0
ip route replace default via "$router"
mv "$SAID.new" "$SAID"
"#;

const WHO_SH: &str =
    "#!/bin/sh\nprintf 'Content-Type: text/plain\\r\\n\\r\\n%s\\n' \"$REMOTE_ADDR\"\n";

/// The namespaces and the programs in them; dropping it ends and deletes all of them.
pub(crate) struct Town {
    folder: TempDir,
    number: u32,
    /// Killed before their namespaces are deleted.
    programs: RefCell<Vec<Child>>,
    spaces: RefCell<Vec<String>>,
}

/// Runs a command in a namespace; returns its output.
pub(crate) fn run(space: &str, words: &str) -> anyhow::Result<String> {
    let output = within(space, words).output().with_context(|| words.to_owned())?;
    let [said, complaints] = [&output.stdout, &output.stderr].map(|it| String::from_utf8_lossy(it));
    ensure!(output.status.success(), "{words}: {}: {said}{complaints}", output.status);
    Ok(said.into_owned())
}

/// Like `run`, for a command that must fail.
pub(crate) fn fails(space: &str, words: &str) -> anyhow::Result<()> {
    match run(space, words) {
        Ok(said) => bail!("{words}: should fail, but succeeds: {said}"),
        Err(_) => Ok(()),
    }
}

/// Whether a command's output is `wanted`.
pub(crate) fn says(space: &str, words: &str, wanted: &str) -> bool {
    run(space, words).is_ok_and(|said| said.trim() == wanted)
}

pub(crate) fn within(space: &str, words: &str) -> Command {
    let mut command = Command::new("ip");
    command.args(["netns", "exec", space]).args(arguments(words)).stdin(Stdio::null());
    command
}

/// Splits a command at blanks.
fn arguments(words: &str) -> Vec<&str> {
    words.split(' ').filter(|word| !word.is_empty()).collect()
}

/// Waits until `is_so` returns true.
pub(crate) fn until(what: &str, mut is_so: impl FnMut() -> bool) -> anyhow::Result<()> {
    let start = Instant::now();
    while !is_so() {
        ensure!(start.elapsed() < SOON, "{what}: not within {SOON:?}");
        sleep(Duration::from_millis(10));
    }
    Ok(())
}

impl Town {
    /// Makes the outside host: a network, a name server, an HTTP server.
    pub(crate) fn new() -> anyhow::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let town = Self {
            folder: TempDir::new()?,
            number,
            programs: RefCell::default(),
            spaces: RefCell::default(),
        };
        let folder = town.folder.path();
        for (name, text) in [("lease.sh", LEASE_SH), ("ro.sh", RO_SH), ("dev.sh", DEV_SH)] {
            fs::write(folder.join(name), text)?;
            fs::set_permissions(folder.join(name), fs::Permissions::from_mode(0o755))?;
        }
        let resolv = "nameserver 10.77.0.99\nnameserver 10.77.0.1\n\
                      search win.svc.cluster.local svc.cluster.local\n\
                      options ndots:5 timeout:1 attempts:3\n";
        fs::write(folder.join("resolv.conf"), resolv)?;
        fs::write(folder.join("hosts"), "127.0.0.1 localhost\n10.77.0.55 files share.example\n")?;
        town.add(&town.ns())?;
        let outside = town.ns();
        run(&outside, "ip link add br0 type bridge forward_delay 0")?;
        run(&outside, "ip address add 10.77.0.1/24 dev br0")?;
        run(&outside, "ip link set br0 up")?;
        town.serve(&outside, "10.77.0.1:8080", "outside")?;
        let long: String = (0..5).fold(String::new(), |mut all, number| {
            write!(all, ",{number}{}", "x".repeat(200)).ok();
            all
        });
        town.start(
            &outside,
            &format!(
                "dnsmasq --keep-in-foreground --conf-file=/dev/null --no-resolv --no-hosts \
                 --user=root --pid-file --listen-address=10.77.0.1 --bind-interfaces \
                 --local=/example/ --local=/cluster.local/ --local=/other/ --local=/arpa/ \
                 --host-record=www.example,10.77.0.1 --txt-record=long.example{long} \
                 --host-record=web.other.svc.cluster.local,10.77.0.50"
            ),
        )?;
        until("the name server", || {
            says(&outside, "dig @10.77.0.1 +short +time=1 +tries=1 www.example", "10.77.0.1")
        })?;
        Ok(town)
    }

    /// The namespace of the outside host.
    pub(crate) fn ns(&self) -> String {
        format!("transom-nat-{}-{}", std::process::id(), self.number)
    }

    /// The namespace of a pod.
    pub(crate) fn pod_ns(&self, last: u8) -> String {
        format!("{}-pod-{last}", self.ns())
    }

    fn add(&self, name: &str) -> anyhow::Result<()> {
        let added = Command::new("ip").args(["netns", "add", name]).output().context("ip")?;
        let said = String::from_utf8_lossy(&added.stderr);
        ensure!(added.status.success(), "cannot make a namespace, which needs root: {said}");
        self.spaces.borrow_mut().push(name.to_owned());
        run(name, "ip link set lo up").map(drop)
    }

    /// Starts a program that runs until this value is dropped.
    fn start(&self, space: &str, words: &str) -> anyhow::Result<()> {
        let log = File::create(self.folder.path().join("log"))?;
        let mut command = within(space, words);
        command.stdout(log.try_clone()?).stderr(log);
        self.programs.borrow_mut().push(command.spawn().with_context(|| words.to_owned())?);
        Ok(())
    }

    /// Starts an HTTP server whose page is `word`.
    pub(crate) fn serve(&self, space: &str, at: &str, word: &str) -> anyhow::Result<()> {
        let root = self.folder.path().join(format!("{space}-{word}"));
        if !root.exists() {
            fs::create_dir_all(root.join("cgi-bin"))?;
            fs::write(root.join("index.html"), word)?;
            fs::write(root.join("large"), vec![b'x'; LARGE])?;
            fs::write(root.join("cgi-bin/who"), WHO_SH)?;
            let mode = fs::Permissions::from_mode(0o755);
            fs::set_permissions(root.join("cgi-bin/who"), mode)?;
        }
        self.start(space, &format!("busybox httpd -f -p {at} -h {}", root.display()))?;
        let port = at.rsplit(':').next().unwrap_or(at);
        let listens = |space: &str| run(space, "ss -Hltn").unwrap_or_default();
        let mark = format!(":{port} ");
        until(&format!("a server at {at}"), || listens(space).contains(&mark))
    }

    /// Starts a pod whose address ends with `last`, and its network.
    pub(crate) fn pod(&self, last: u8, settings: &[(&str, &str)]) -> anyhow::Result<Pod<'_>> {
        self.pod_in(last, "", settings)
    }

    /// Like `pod`, with a command prefix.
    pub(crate) fn pod_in(
        &self,
        last: u8,
        around: &str,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<Pod<'_>> {
        let (space, guest) = (self.pod_ns(last), format!("{}-guest-{last}", self.ns()));
        if !self.spaces.borrow().contains(&space) {
            self.place(last, false)?;
        }
        let volume = self.volume(last, "");
        fs::create_dir_all(&volume)?;
        let script = |name: &str| self.folder.path().join(name).to_string_lossy().into_owned();
        let around = around.replace("ro.sh", &script("ro.sh")).replace("dev.sh", &script("dev.sh"));
        let mut command = within(&space, &around);
        command.arg(std::env::current_exe()?).arg(pod::WORD).arg(&guest);
        command.arg(self.folder.path());
        command.arg(format!("STORAGE={}", volume.display()));
        command.args(settings.iter().map(|(name, value)| format!("{name}={value}")));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        let mut lines = BufReader::new(child.stdout.take().context("its output")?);
        lines.read_line(&mut line)?;
        let ready = line.trim().strip_prefix("ready ").and_then(|rest| rest.split_once(' '));
        let Some((mac, mtu)) = ready else {
            let output = child.wait_with_output()?;
            bail!("{}", String::from_utf8_lossy(&output.stderr));
        };
        run(&guest, &format!("ip link set eth0 address {mac}"))?;
        run(&guest, "ip link set eth0 up")?;
        let card = (mac.to_lowercase(), mtu.parse()?);
        Ok(Pod { town: self, last, child, lines, guest, card })
    }

    /// A file on the volume of a pod.
    pub(crate) fn volume(&self, last: u8, name: &str) -> PathBuf {
        self.folder.path().join(format!("volume{last}")).join(name)
    }

    /// Makes the namespaces of a pod and its guest. The pod has its own interface on the bridge or,
    /// if `shared`, one of a macvlan network.
    pub(crate) fn place(&self, last: u8, shared: bool) -> anyhow::Result<()> {
        let (space, outside) = (self.pod_ns(last), self.ns());
        self.add(&space)?;
        self.add(&format!("{outside}-guest-{last}"))?;
        let veth = |name: &str| format!("veth{last} mtu 1450 type veth peer name {name} mtu 1450");
        if shared {
            run(&outside, &format!("ip link add {}", veth("up0")))?;
            run(&outside, "ip link set up0 up")?;
            let card = format!("eth0 netns {space} type macvlan mode bridge");
            run(&outside, &format!("ip link add link up0 name {card}"))?;
        } else {
            run(&outside, &format!("ip link add {} netns {space}", veth("eth0")))?;
        }
        run(&outside, &format!("ip link set veth{last} master br0 up"))?;
        run(&space, &format!("ip address add 10.77.0.{last}/24 dev eth0"))?;
        run(&space, "ip link set eth0 up")?;
        run(&space, "busybox sysctl -q -w net.ipv4.ip_forward=0")?;
        run(&space, "ip route add default via 10.77.0.1").map(drop)
    }

    /// Starts a DHCP server for hosts on the bridge; returns the file with its leases.
    pub(crate) fn lease_addresses(&self) -> anyhow::Result<PathBuf> {
        let leases = self.folder.path().join("leases.outside");
        self.start(
            &self.ns(),
            &format!(
                "dnsmasq --keep-in-foreground --conf-file=/dev/null --port=0 --user=root \
                 --pid-file --interface=br0 --bind-interfaces \
                 --dhcp-range=10.77.0.100,10.77.0.150,1h \
                 --dhcp-authoritative --no-ping --dhcp-leasefile={}",
                leases.display()
            ),
        )?;
        let space = self.ns();
        until("the DHCP server", || {
            run(&space, "ss -Hlun").is_ok_and(|said| said.contains(":67 "))
        })?;
        Ok(leases)
    }

    /// Captures the first packet that passes the bridge during `meanwhile`, as tcpdump prints it.
    pub(crate) fn sniff(
        &self,
        filter: &str,
        meanwhile: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<String> {
        let mut command = within(&self.ns(), "tcpdump -n -l -U -i br0 -c 1");
        let mut child =
            command.arg(filter).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
        let mut errors = BufReader::new(child.stderr.take().context("its errors")?);
        let mut line = String::new();
        // tcpdump reports when it listens.
        while !line.contains("listening on") {
            line.clear();
            ensure!(errors.read_line(&mut line)? > 0, "tcpdump ended");
        }
        let done = meanwhile();
        let mut said = String::new();
        if done.is_err() {
            child.kill()?;
        }
        child.stdout.take().context("its output")?.read_to_string(&mut said)?;
        child.wait()?;
        done.map(|()| said)
    }

    /// Sends a datagram from outside to a port of the pod. If `heard`, it must reach the guest and
    /// its answer must come back; otherwise it must not reach the guest.
    pub(crate) fn echo(&self, pod: &Pod<'_>, port: u16, heard: bool) -> anyhow::Result<()> {
        let patience = if heard { SOON } else { Duration::from_secs(2) };
        let socket = |space: String, at: String| {
            let inside = move || {
                let file = File::open(Path::new("/run/netns").join(space))?;
                move_into_link_name_space(file.as_fd(), Some(LinkNameSpaceType::Network))?;
                let socket = UdpSocket::bind(at)?;
                socket.set_read_timeout(Some(patience))?;
                anyhow::Ok(socket)
            };
            thread::spawn(inside).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        let guest = socket(pod.guest_ns(), format!("0.0.0.0:{port}"))?;
        let outside = socket(self.ns(), "10.77.0.1:0".into())?;
        outside.send_to(b"hello", format!("10.77.0.{}:{port}", pod.last))?;
        let mut word = [0; 16];
        let came = guest.recv_from(&mut word);
        ensure!(came.is_ok() == heard, "a datagram to port {port}: {came:?}");
        let Ok((length, from)) = came else { return Ok(()) };
        guest.send_to(&word[..length], from)?;
        let (length, from) = outside.recv_from(&mut word).context("no datagram comes back")?;
        ensure!(&word[..length] == b"hello" && from.port() == port, "{from} sends {word:?}");
        Ok(())
    }
}

impl Drop for Town {
    fn drop(&mut self) {
        for child in self.programs.borrow_mut().iter_mut() {
            child.kill().ok();
            child.wait().ok();
        }
        for space in self.spaces.borrow().iter() {
            Command::new("ip").args(["netns", "del", space]).status().ok();
        }
    }
}

/// A pod with a complete network.
pub(crate) struct Pod<'a> {
    town: &'a Town,
    last: u8,
    child: Child,
    lines: BufReader<ChildStdout>,
    guest: String,
    /// MAC address and MTU of the guest's card.
    pub(crate) card: (String, u16),
}

impl Pod<'_> {
    /// The pod's namespace.
    pub(crate) fn ns(&self) -> String {
        self.town.pod_ns(self.last)
    }

    /// The guest's namespace.
    pub(crate) fn guest_ns(&self) -> String {
        self.guest.clone()
    }

    /// The rest of the pod's next line that begins with `word`.
    pub(crate) fn told(&mut self, word: &str) -> anyhow::Result<String> {
        loop {
            let mut line = String::new();
            ensure!(self.lines.read_line(&mut line)? > 0, "the pod ended without `{word}`");
            if let Some(rest) = line.trim().strip_prefix(word) {
                return Ok(rest.trim().to_owned());
            }
        }
    }

    /// Runs a command in the guest; returns its output.
    pub(crate) fn guest(&self, words: &str) -> anyhow::Result<String> {
        run(&self.guest, words)
    }

    /// Leases an address with udhcpc; returns the variables that its script received.
    pub(crate) fn lease(&self) -> anyhow::Result<String> {
        let script = self.town.folder.path().join("lease.sh");
        let options = "-O search -O mtu -O hostname -O domain -O broadcast -O lease";
        let words = format!("busybox udhcpc -f -q -n -t 10 -T 1 -i eth0 {options}");
        self.said(within(&self.guest, &words).arg("-s").arg(script))
    }

    /// Like `lease`, with dhclient.
    pub(crate) fn dhclient(&self) -> anyhow::Result<String> {
        let folder = self.town.folder.path();
        let config = "timeout 20;\nrequest subnet-mask, routers, domain-name, \
                      domain-name-servers, domain-search, interface-mtu, host-name, \
                      dhcp-lease-time, dhcp-renewal-time, dhcp-rebinding-time;\n";
        fs::write(folder.join("dhclient.conf"), config)?;
        let mut command = within(&self.guest, "dhclient -1 -d -4");
        for (word, name) in
            [("-cf", "dhclient.conf"), ("-lf", "leases"), ("-pf", "pid"), ("-sf", "lease.sh")]
        {
            command.arg(word).arg(folder.join(name));
        }
        let said = self.said_file();
        fs::remove_file(&said).ok();
        let said_before = said.clone();
        // dhclient passes no other environment to its script.
        command
            .arg("-e")
            .arg(format!("SAID={}", said.display()))
            .arg("eth0")
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let mut child = command.spawn().context("dhclient")?;
        let leased = until("dhclient's lease", || said_before.exists());
        child.kill()?;
        child.wait()?;
        leased?;
        Ok(fs::read_to_string(said)?)
    }

    fn said_file(&self) -> PathBuf {
        self.town.folder.path().join(format!("said-{}", self.last))
    }

    fn said(&self, command: &mut Command) -> anyhow::Result<String> {
        let file = self.said_file();
        fs::remove_file(&file).ok();
        let output = command.env("SAID", &file).output().context("a DHCP client")?;
        let complaints = String::from_utf8_lossy(&output.stderr);
        fs::read_to_string(&file).with_context(|| format!("no lease: {complaints}"))
    }

    /// Ends the pod cleanly.
    pub(crate) fn end(&mut self) -> anyhow::Result<()> {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.child.stderr.take().context("its errors")?.read_to_string(&mut said)?;
        let status = self.child.wait()?;
        ensure!(status.success() && said.is_empty(), "{status}: {said}");
        Ok(())
    }

    /// Kills the pod, which leaves its remains behind.
    pub(crate) fn kill(&mut self) -> anyhow::Result<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }
}

impl Drop for Pod<'_> {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}
