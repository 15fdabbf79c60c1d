//! Networks under Linux. One guest has four controllers: two on taps, one on a tap that the kernel
//! serves where it can (vhost-net), and one on passt. The test covers DHCP, MTUs, offloads on and
//! off, several queue pairs, pulled cables, and data in both directions.
#![forbid(unsafe_code)]

#[path = "guest_network/intel.rs"]
mod intel;

use std::fs::{self, File, Permissions};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{self, ExitCode};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;
use tempfile::TempDir;
use transom_tests::guest::Guest;
use transom_tests::idle;
use transom_tests::lab::{self, Lab};
use transom_tests::linux::{Booted, Linux};
use transom_tests::network::{Route, Service, TransferTimes, in_namespace, ip, noise, tool};
use transom_tests::program::not_run_in_part;
use transom_tests::say;
use transom_tests::suite::{Suite, Test};
use vmm::control::{Command, LinkState};

const BOOT: Duration = Duration::from_secs(180);
const SOON: Duration = Duration::from_secs(60);

const RELEASES: [&str; 2] = ["12", "13"];
const ASSETS: &[&str] = &[
    "BZIMAGE_12",
    "MODULES_12",
    "BZIMAGE_13",
    "MODULES_13",
    "BZIMAGE_GENERIC",
    "MODULES_GENERIC",
    "BZIMAGE_GENERIC_13",
    "MODULES_GENERIC_13",
    "BUSYBOX",
    "NET_TOOLS",
    "PASST",
];

fn main() -> ExitCode {
    let mut tests = Vec::new();
    for release in RELEASES {
        let name = format!("linux_{release}_reaches_its_networks");
        let test = Test::new(name, move || in_namespace(|| reaches_its_networks(release)));
        tests.push(if release == "13" { test } else { test.thorough() });
        // The kernel for clouds has no e1000e.
        let kernel = if release == "13" { "GENERIC_13" } else { "GENERIC" };
        let name = format!("linux_{release}_uses_intels_card");
        let test = Test::new(name, move || in_namespace(|| intel::uses_intels_card(kernel)));
        tests.push(if release == "13" { test } else { test.thorough() });
    }
    let seconds = if lab::everything() { 7200 } else { 900 };
    Suite { lab: Lab { mib: 6144, seconds, assets: ASSETS }, tests }.main()
}

const MIB: usize = 1 << 20;

/// Bytes of the large transfers. A gibibyte takes minutes on an emulated processor.
fn large() -> usize {
    if lab::everything() { 108 * MIB } else { 3 * MIB }
}

/// A tap of the host with four queues, served by our process.
const FAST: Route = route([10, 9, 0, 1], [10, 9, 0, 2]);
/// A tap that our program makes, without offloads and with large packets.
const PLAIN: Route = route([10, 9, 1, 1], [10, 9, 1, 2]);
/// A tap with four queues, for vhost-net.
const KERNEL: Route = route([10, 9, 3, 1], [10, 9, 3, 2]);
/// passt: the address of the host's router leads to the host itself, which sees passt as the
/// client.
const PASST: Route = route([192, 0, 2, 1], [127, 0, 0, 1]);

const fn route(host: [u8; 4], seen: [u8; 4]) -> Route {
    Route {
        host: Ipv4Addr::new(host[0], host[1], host[2], host[3]),
        seen: Ipv4Addr::new(seen[0], seen[1], seen[2], seen[3]),
        within: Duration::from_secs(600),
    }
}

const DEVICES: [&str; 4] = [
    "virtio-net,to=tap:fast,pairs=4,vhost=off,mac=52:54:00:00:00:01",
    "virtio-net,to=tap:plain,mtu=9000,offloads=off,vhost=off,mac=52:54:00:00:00:02",
    "virtio-net,mac=52:54:00:00:00:03,to=passt:",
    "virtio-net,to=tap:kernel,pairs=4,mac=52:54:00:00:00:04",
];
const MTUS: [u16; 4] = [1450, 9000, 1500, 1450];

/// A controller with all features, and its tap.
struct Card {
    name: &'static str,
    number: usize,
    tap: &'static str,
    route: Route,
}

/// Our process serves the rings of the first card, and the kernel those of the second.
const CARDS: [Card; 2] = [
    Card { name: "a tap", number: 0, tap: "fast", route: FAST },
    Card { name: "vhost-net", number: 3, tap: "kernel", route: KERNEL },
];

/// The cards of the steps that take long. By default vhost-net is left out of them: other steps use
/// it, and `is_pulled` takes the rings from the kernel and gives them back.
fn cards() -> &'static [Card] {
    if lab::everything() { &CARDS } else { &CARDS[..1] }
}

/// The script that udhcpc calls with the lease.
const LEASE: &str = r#"#!/bin/sh
case $1 in
  deconfig) ip link set $interface up ;;
  bound)
    ip addr add $ip/$mask dev $interface
    echo "$interface has $ip/$mask"
    ;;
esac
"#;

/// The host's side and the guest.
struct Lan {
    folder: TempDir,
    booted: Booted,
    passt: Option<Service>,
    /// Whether the host's kernel has vhost-net.
    vhost: bool,
    /// The DHCP servers.
    _dhcp: [Service; 3],
}

/// A step of the test.
type Step = fn(&mut Lan) -> anyhow::Result<()>;

fn reaches_its_networks(release: &str) -> anyhow::Result<()> {
    let mut lan = Lan::start(release)?;
    let steps: [(&str, Step); 11] = [
        ("addresses by DHCP", Lan::gets_addresses),
        ("rings served by vhost-net", Lan::lends_rings),
        ("packets of the largest size", Lan::sends_whole_packets),
        ("configured offloads", Lan::has_the_offloads),
        ("data on all networks", Lan::carries_data),
        ("offloads off and on", Lan::changes_offloads),
        ("pairs of queues", Lan::uses_all_pairs),
        ("a pulled cable", Lan::is_pulled),
        ("a restarted peer", Lan::follows_the_link),
        ("a restarted driver", Lan::survives_its_driver),
        ("an idle network", Lan::sleeps),
    ];
    for (name, step) in steps {
        let start = Instant::now();
        step(&mut lan).with_context(|| name.to_owned())?;
        say!("{name}: {:.1} s", start.elapsed().as_secs_f64());
    }
    // The machine quits while frames are in flight. The guest must not power off instead: Linux
    // breaks its devices before that and can then wait forever for their frames.
    lan.flood(&KERNEL)?;
    lan.booted.running.ask(&Command::Quit)?;
    lan.booted.running.ends_with(0, SOON)
}

/// An interface to other hosts, and passt that uses it.
fn uplink(folder: &Path) -> anyhow::Result<Service> {
    // passt drops root's rights before it makes its socket.
    fs::set_permissions(folder, Permissions::from_mode(0o777))?;
    for words in [
        "link add up0 type veth peer name up1",
        "link set up1 up",
        "link set up0 up",
        "addr add 192.0.2.2/24 dev up0",
        "route add default via 192.0.2.1",
    ] {
        ip(words)?;
    }
    passt(folder)
}

fn passt(folder: &Path) -> anyhow::Result<Service> {
    let socket = folder.join("passt");
    let mut command = lab::unpacked("PASST", "usr/bin/passt")?;
    let words = ["--foreground", "--quiet", "--ipv4-only", "--interface", "up0", "--socket"];
    let mut service = Service::start(command.args(words).arg(&socket))?;
    service.wait_for_file(&socket, SOON)?;
    Ok(service)
}

/// A DHCP server that knows one guest.
fn dhcp(folder: &Path, tap: &str, mac: &str, route: &Route) -> anyhow::Result<Service> {
    let [file, lease, pid] = ["conf", "leases", "pid"].map(|it| folder.join(format!("{tap}.{it}")));
    let guest = route.seen;
    let text = format!(
        "interface {tap}\nstart {guest}\nend {guest}\nmax_leases 1\nopt subnet 255.255.255.0\n\
         static_lease {mac} {guest}\nlease_file {}\npidfile {}\n",
        lease.display(),
        pid.display()
    );
    fs::write(&file, text).and_then(|()| fs::write(&lease, ""))?;
    Service::start(process::Command::new(lab::asset("BUSYBOX")?).args(["udhcpd", "-f"]).arg(&file))
}

/// The guest with its network cards, ethtool, and a ping that can forbid fragments.
fn linux(
    mut guest: Guest,
    devices: &[&str],
    modules: &[&str],
    (folder, kernel): (&Path, &str),
) -> anyhow::Result<Linux> {
    for device in devices {
        let mut words = (*device).to_owned();
        if device.ends_with(':') {
            words += &folder.join("passt").display().to_string();
        }
        guest = guest.word("--device").word(words);
    }
    let linux = Linux::new(guest, &lab::asset(&format!("BZIMAGE_{kernel}"))?);
    let mut linux = linux.modules(&lab::asset(&format!("MODULES_{kernel}"))?, modules);
    let tools = lab::asset("NET_TOOLS")?;
    let libraries = "usr/lib/x86_64-linux-gnu";
    let loader = format!("{libraries}/ld-linux-x86-64.so.2");
    linux = linux.add(&tools.join(loader), "/lib64/ld-linux-x86-64.so.2");
    for name in ["libc.so.6", "libm.so.6", "libmnl.so.0", "libcap.so.2", "libidn2.so.0"] {
        linux = linux.add(&tools.join(libraries).join(name), &format!("/lib/{name}"));
    }
    let name = "libunistring.so.2";
    linux = linux.add(&tools.join(libraries).join(name), &format!("/lib/{name}"));
    linux = linux.add(&tools.join("usr/bin/ping"), "/tools/ping");
    linux = linux.add(&tools.join("usr/sbin/ethtool"), "/tools/ethtool");
    Ok(linux.file("lease.sh", LEASE))
}

impl Lan {
    fn start(release: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        for words in [
            "tuntap add fast mode tap multi_queue",
            "link set fast mtu 1450 up",
            "addr add 10.9.0.1/24 dev fast",
            "tuntap add kernel mode tap multi_queue",
            "link set kernel mtu 1450 up",
            "addr add 10.9.3.1/24 dev kernel",
        ] {
            ip(words)?;
        }
        let passt = uplink(folder.path())?;
        let memory = if lab::everything() { "3G" } else { "512M" };
        // Not with `--jail on`: a restarted passt runs as another user, and root opens that user's
        // socket with a capability that the jail drops.
        let guest = Guest::transom().cpus("4").memory(memory);
        let modules = ["virtio_pci", "virtio_net"];
        let linux = linux(guest, &DEVICES, &modules, (folder.path(), release))?;
        let booted = linux.boot(BOOT)?;
        ip("addr add 10.9.1.1/24 dev plain")?;
        let fast = dhcp(folder.path(), "fast", "52:54:00:00:00:01", &FAST)?;
        let plain = dhcp(folder.path(), "plain", "52:54:00:00:00:02", &PLAIN)?;
        let kernel = dhcp(folder.path(), "kernel", "52:54:00:00:00:04", &KERNEL)?;
        let vhost = File::open("/dev/vhost-net").is_ok();
        if !vhost {
            not_run_in_part("through vhost-net", "there is no /dev/vhost-net");
        }
        Ok(Self { folder, booted, passt: Some(passt), vhost, _dhcp: [fast, plain, kernel] })
    }

    fn run(&mut self, command: &str) -> anyhow::Result<String> {
        self.booted.run(command, SOON)
    }

    /// Sends data to the guest and back, and reports the times.
    fn carry(&mut self, name: &str, route: &Route, length: usize) -> anyhow::Result<()> {
        let carried = route.check_transfer(&mut self.booted, &noise(length));
        let TransferTimes { to_guest, from_guest } = carried.with_context(|| name.to_owned())?;
        let kib = length >> 10;
        say!("{name}: {kib} KiB to the guest in {to_guest:.1?}, and back in {from_guest:.1?}");
        Ok(())
    }

    fn gets_addresses(&mut self) -> anyhow::Result<()> {
        let client = "udhcpc -f -q -n -t 20 -T 1 -s /lease.sh";
        self.run("chmod 755 /lease.sh")?;
        let each = (0..DEVICES.len()).map(|it| format!("{client} -i eth{it} 2>&1 &"));
        let said = self.run(&format!("{} wait", each.collect::<Vec<_>>().join(" ")))?;
        let addresses = ["10.9.0.2", "10.9.1.2", "192.0.2.2", "10.9.3.2"];
        for (card, address) in addresses.iter().enumerate() {
            ensure!(said.contains(&format!("eth{card} has {address}/24")), "{said}");
            let mac = self.run(&format!("cat /sys/class/net/eth{card}/address"))?;
            ensure!(mac.trim() == format!("52:54:00:00:00:0{}", card + 1), "{mac}");
        }
        for route in [FAST, PLAIN, KERNEL] {
            let said = self.run(&format!("ping -A -c 5 -W 5 {}", route.host))?;
            ensure!(said.contains(" 0% packet loss"), "{said}");
        }
        Ok(())
    }

    fn sends_whole_packets(&mut self) -> anyhow::Result<()> {
        for (card, mtu) in MTUS.iter().enumerate() {
            let said = self.run(&format!("cat /sys/class/net/eth{card}/mtu"))?;
            ensure!(said.trim() == mtu.to_string(), "eth{card} has an MTU of {said}");
        }
        for (route, mtu) in [(FAST, MTUS[0]), (PLAIN, MTUS[1]), (KERNEL, MTUS[3])] {
            // Without the headers of IP and ICMP.
            let largest = mtu - 28;
            let ping =
                |size| format!("/tools/ping -M do -c 3 -i 0.2 -W 5 -s {size} {} 2>&1", route.host);
            let said = self.run(&ping(largest))?;
            ensure!(said.contains(" 0% packet loss"), "{said}");
            let more = self.booted.try_run(&ping(largest + 1), SOON)?;
            ensure!(more.status != 0 && more.output.contains("too long"), "{more:?}");
        }
        Ok(())
    }

    /// Checks features in the guest's `ethtool -k`.
    fn offloads_are(&mut self, card: &str, on: bool, names: &[&str]) -> anyhow::Result<()> {
        let said = self.run(&format!("/tools/ethtool -k {card}"))?;
        features_are(&said, on, names).with_context(|| card.to_owned())
    }

    fn has_the_offloads(&mut self) -> anyhow::Result<()> {
        let names = ["tx-checksumming", "tcp-segmentation-offload", "rx-gro-hw"];
        for Card { number, .. } in CARDS {
            self.offloads_are(&format!("eth{number}"), true, &names)?;
            self.offloads_are(&format!("eth{number}"), true, &["rx-checksumming"])?;
        }
        // Linux 6.12 reports `rx-checksumming: on` for every controller, so look at the negotiated
        // features.
        self.offloads_are("eth1", false, &names)?;
        let agreed = self.run("cat /sys/class/net/eth1/device/features")?;
        ensure!(agreed.len() > 64 && agreed.starts_with("00"), "CSUM, GUEST_CSUM: {agreed}");
        // The tap's features on the host show whether the host uses the guest's offloads.
        let names = ["tx-checksumming", "tcp-segmentation-offload"];
        for Card { tap, .. } in CARDS {
            features_are(&tool(&format!("usr/sbin/ethtool -k {tap}"))?, true, &names)?;
        }
        features_are(&tool("usr/sbin/ethtool -k plain")?, false, &names)
    }

    fn carries_data(&mut self) -> anyhow::Result<()> {
        for Card { name, route, .. } in CARDS {
            self.carry(name, &route, large())?;
        }
        self.carry("a tap without offloads, MTU 9000", &PLAIN, large() / 8)?;
        // passt's own work takes most of the time on an emulated processor.
        self.carry("passt", &PASST, large() / 24)
    }

    fn changes_offloads(&mut self) -> anyhow::Result<()> {
        for Card { name, number, tap, route } in cards() {
            let card = format!("eth{number}");
            let switch = |word: &str| {
                let words = ["rx-gro-hw", "tx", "tso", "gso", "gro"];
                let words = words.map(|it| format!("{it} {word}")).join(" ");
                format!("/tools/ethtool -K {card} {words}")
            };
            let names = ["tx-checksumming", "tcp-segmentation-offload", "rx-gro-hw"];
            let host = format!("usr/sbin/ethtool -k {tap}");
            for (word, on) in [("off", false), ("on", true)] {
                self.run(&switch(word))?;
                self.offloads_are(&card, on, &names)?;
                features_are(&tool(&host)?, on, &["tcp-segmentation-offload"])?;
                self.carry(&format!("{name}, offloads switched {word}"), route, MIB / 2)?;
            }
        }
        Ok(())
    }

    /// The name of a controller on its bus.
    fn device(&mut self, card: usize) -> anyhow::Result<String> {
        let said = self.run(&format!("basename $(readlink -f /sys/class/net/eth{card}/device)"))?;
        Ok(said.trim().to_owned())
    }

    /// Interrupts of each receive queue.
    fn interrupts(&mut self, card: usize) -> anyhow::Result<Vec<u64>> {
        let device = self.device(card)?;
        let all = self.run("cat /proc/interrupts")?;
        let name = format!("{device}-input.");
        let lines = all.lines().filter(|line| line.contains(&name));
        let numbers = |line: &str| -> u64 {
            line.split_whitespace().filter_map(|it| it.parse::<u64>().ok()).sum()
        };
        Ok(lines.map(numbers).collect())
    }

    /// Sends many flows to the guest, until `pairs` queues caused interrupts. Returns which ones
    /// did.
    fn interrupting_queues(&mut self, card: &Card, pairs: usize) -> anyhow::Result<Vec<bool>> {
        let before = self.interrupts(card.number)?;
        for _ in 0..64 {
            let socket = UdpSocket::bind((card.route.host, 0))?;
            socket.connect((card.route.seen, 9))?;
            socket.send(b"to any queue")?;
        }
        let start = Instant::now();
        loop {
            sleep(Duration::from_millis(300));
            let after = self.interrupts(card.number)?;
            ensure!(before.len() == after.len(), "{before:?}, then {after:?}");
            let heard: Vec<_> = before.iter().zip(&after).map(|(old, new)| old < new).collect();
            if heard.iter().filter(|it| **it).count() >= pairs || start.elapsed() > SOON {
                return Ok(heard);
            }
        }
    }

    fn uses_all_pairs(&mut self) -> anyhow::Result<()> {
        for card in cards() {
            let number = card.number;
            ensure!(self.pairs(number)? == 4, "not one pair for each processor");
            for pairs in [2, 4] {
                self.run(&format!("/tools/ethtool -L eth{number} combined {pairs}"))?;
                ensure!(self.pairs(number)? == pairs, "not {pairs} pairs");
                self.is_served_by_vhost(card, pairs)?;
                let heard = self.interrupting_queues(card, pairs)?;
                let wanted = [0, 1, 2, 3].map(|it| it < pairs);
                let name = card.name;
                ensure!(heard == wanted, "{name}: with {pairs} pairs, frames came by {heard:?}");
                // Each processor sends on its own queue.
                let ping = format!("taskset -c $cpu ping -c 1 -W 5 {}", card.route.host);
                self.run(&format!("for cpu in 0 1 2 3; do {ping} || exit 1; done"))?;
            }
        }
        Ok(())
    }

    /// The number of queue pairs that the driver uses.
    fn pairs(&mut self, card: usize) -> anyhow::Result<usize> {
        let said = self.run(&format!("/tools/ethtool -l eth{card}"))?;
        let last = said.lines().rfind(|line| line.starts_with("Combined:"));
        let number = last.and_then(|line| line.split_whitespace().nth(1)?.parse().ok());
        number.with_context(|| said)
    }

    /// The state of a controller's link, from `status`.
    fn link(&self, card: usize) -> anyhow::Result<Value> {
        Ok(self.booted.running.ask(&Command::Status)?["links"][card].clone())
    }

    /// Waits until vhost-net serves this number of pairs; 0 for cards that it does not serve.
    fn is_served_by_vhost(&mut self, card: &Card, pairs: usize) -> anyhow::Result<()> {
        let wanted = if self.vhost && card.tap == "kernel" { pairs } else { 0 };
        let start = Instant::now();
        loop {
            let link = self.link(card.number)?;
            if link["vhost"] == wanted {
                return Ok(());
            }
            ensure!(
                start.elapsed() < SOON,
                "{}: vhost-net serves not {wanted} pairs: {link}",
                card.name
            );
            sleep(Duration::from_millis(20));
        }
    }

    fn lends_rings(&mut self) -> anyhow::Result<()> {
        CARDS.iter().try_for_each(|card| self.is_served_by_vhost(card, 4))
    }

    fn carrier(&mut self, card: usize, wanted: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        while self.run(&format!("cat /sys/class/net/eth{card}/carrier"))?.trim() != wanted {
            ensure!(start.elapsed() < SOON, "eth{card}: the carrier is not {wanted}");
            sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Starts sending frames in both directions.
    fn flood(&mut self, route: &Route) -> anyhow::Result<()> {
        let ping = format!("/tools/ping -f -q -s 1400 {}", route.host);
        self.run(&format!("{ping} > /dev/null 2>&1 & echo $! > /flood; sleep 0.5")).map(drop)
    }

    fn stop_flood(&mut self) -> anyhow::Result<()> {
        self.run("kill $(cat /flood)").map(drop)
    }

    fn is_pulled(&mut self) -> anyhow::Result<()> {
        for card in CARDS {
            let name: String = self.link(card.number)?["name"].as_str().context("a name")?.into();
            let plug = |lan: &Self, state| {
                let command = Command::Link { name: name.clone(), state: Some(state), mtu: None };
                lan.booted.running.ask(&command).map(drop)
            };
            self.flood(&card.route)?;
            plug(self, LinkState::Down)?;
            self.is_served_by_vhost(&card, 0)?;
            self.carrier(card.number, "0")?;
            let ping = format!("ping -c 1 -W 1 {}", card.route.host);
            let status = self.booted.try_run(&ping, SOON)?.status;
            ensure!(status != 0, "{}: an answer although the cable is pulled", card.name);
            plug(self, LinkState::Up)?;
            self.carrier(card.number, "1")?;
            self.stop_flood()?;
            self.is_served_by_vhost(&card, 4)?;
            self.carry(&format!("{}, plugged in again", card.name), &card.route, MIB / 2)?;
        }
        Ok(())
    }

    fn follows_the_link(&mut self) -> anyhow::Result<()> {
        self.carrier(2, "1")?;
        self.passt = None;
        self.carrier(2, "0")?;
        fs::remove_file(self.folder.path().join("passt")).ok();
        self.passt = Some(passt(self.folder.path())?);
        self.carrier(2, "1")?;
        self.carry("another passt", &PASST, MIB / 2)
    }

    /// The device is reset with frames in flight, and works with a new driver.
    fn survives_its_driver(&mut self) -> anyhow::Result<()> {
        for card in cards() {
            let (number, device) = (card.number, self.device(card.number)?);
            let folder = "/sys/bus/virtio/drivers/virtio_net";
            self.flood(&card.route)?;
            self.run(&format!("echo {device} > {folder}/unbind"))?;
            self.stop_flood()?;
            self.run(&format!("[ ! -e /sys/class/net/eth{number} ]"))?;
            self.is_served_by_vhost(card, 0)?;
            self.run(&format!("echo {device} > {folder}/bind; ip link set eth{number} up"))?;
            self.run(&format!("ip addr add {}/24 dev eth{number}", card.route.seen))?;
            self.is_served_by_vhost(card, 4)?;
            self.carry(&format!("{}, after a driver restart", card.name), &card.route, MIB / 4)?;
        }
        Ok(())
    }

    /// Threads that poll while there is traffic stop by themselves.
    fn sleeps(&mut self) -> anyhow::Result<()> {
        let part = idle::wait_until_idle(self.booted.running.pid(), "net-", 0.01)?;
        say!("idle: all pairs of queues use {:.2} % of a processor", part * 100.0);
        Ok(())
    }
}

/// Checks that features in the output of `ethtool -k` are on, or off.
fn features_are(said: &str, on: bool, names: &[&str]) -> anyhow::Result<()> {
    for name in names {
        let line = said.lines().find_map(|line| line.trim().strip_prefix(&format!("{name}: ")));
        let value = line.with_context(|| format!("{name} is not in {said}"))?;
        ensure!(value.starts_with(if on { "on" } else { "off" }), "{name} is {value}");
    }
    Ok(())
}
