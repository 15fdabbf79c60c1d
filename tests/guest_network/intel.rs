//! Intel's 82574L under Linux' e1000e driver, with virtio-net in the same machine: every kind of
//! interrupt, offloads by the backend and here, large packets, VLANs, a pulled cable and a restart.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;
use transom_tests::guest::Guest;
use transom_tests::idle;
use transom_tests::lab;
use transom_tests::linux::Booted;
use transom_tests::network::{Route, Service, TransferTimes, ip, noise};
use transom_tests::say;
use vmm::control::{Command, LinkState};

use super::{BOOT, MIB, PASST, SOON, features_are, large, linux, route, uplink};

/// A tap whose kernel completes checksums and cuts packets.
const INTEL: Route = route([10, 9, 4, 1], [10, 9, 4, 2]);
/// A tap without offloads, where our process does this work, with large packets.
const SOFT: Route = route([10, 9, 5, 1], [10, 9, 5, 2]);
/// virtio-net beside them.
const BESIDE: Route = route([10, 9, 6, 1], [10, 9, 6, 2]);
/// A VLAN on the first card.
const VLAN: Route = route([10, 9, 7, 1], [10, 9, 7, 2]);

const DEVICES: [&str; 4] = [
    "e1000e,to=tap:intel,mac=52:54:00:00:01:01",
    "e1000e,to=tap:soft,mtu=9000,offloads=off,mac=52:54:00:00:01:02",
    "e1000e,mac=52:54:00:00:01:03,to=passt:",
    "virtio-net,to=tap:beside,vhost=off,mac=52:54:00:00:01:04",
];
/// The driver is loaded first, so that its cards are the first ones.
const MODULES: [&str; 4] = ["e1000e", "virtio_pci", "virtio_net", "8021q"];

/// The driver's parameter for the interrupts of its three cards, and their names.
const MODES: [(&str, [&str; 3]); 2] =
    [("2,2,2", ["MSI-X", "MSI-X", "MSI-X"]), ("0,1,2", ["INTx", "MSI", "MSI-X"])];

struct Lan {
    booted: Booted,
    _folder: TempDir,
    _passt: Service,
}

pub(crate) fn uses_intels_card(kernel: &str) -> anyhow::Result<()> {
    let mut lan = Lan::start(kernel)?;
    let steps: [(&str, Step); 7] = [
        ("the driver's view", Lan::is_known),
        ("data on all networks", Lan::carries_data),
        ("offloads off and on", Lan::changes_offloads),
        ("large packets and a VLAN", Lan::sends_special_frames),
        ("a pulled cable", Lan::is_pulled),
        ("every kind of interrupt", Lan::uses_each_interrupt),
        ("an idle network", Lan::sleeps),
    ];
    for (name, step) in steps {
        let start = Instant::now();
        step(&mut lan).with_context(|| name.to_owned())?;
        say!("{name}: {:.1} s", start.elapsed().as_secs_f64());
    }
    lan.run(&format!("/tools/ping -f -q -s 1400 {} > /dev/null 2>&1 & sleep 0.5", INTEL.host))?;
    lan.booted.running.ask(&Command::Quit)?;
    lan.booted.running.ends_with(0, SOON)
}

type Step = fn(&mut Lan) -> anyhow::Result<()>;

impl Lan {
    fn start(kernel: &str) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        for words in [
            "tuntap add intel mode tap",
            "link set intel up",
            "addr add 10.9.4.1/24 dev intel",
            "link add link intel name tagged type vlan id 5",
            "link set tagged up",
            "addr add 10.9.7.1/24 dev tagged",
            "tuntap add beside mode tap",
            "link set beside up",
            "addr add 10.9.6.1/24 dev beside",
        ] {
            ip(words)?;
        }
        let passt = uplink(folder.path())?;
        let memory = if lab::everything() { "3G" } else { "512M" };
        let guest = Guest::transom().cpus("2").memory(memory);
        let booted = linux(guest, &DEVICES, &MODULES, (folder.path(), kernel))?.boot(BOOT)?;
        ip("addr add 10.9.5.1/24 dev soft")?;
        let mut lan = Self { booted, _folder: folder, _passt: passt };
        lan.set_up()?;
        lan.set_address(3, BESIDE)?;
        Ok(lan)
    }

    fn run(&mut self, command: &str) -> anyhow::Result<String> {
        self.booted.run(command, SOON)
    }

    fn set_address(&mut self, card: usize, route: Route) -> anyhow::Result<()> {
        self.run(&format!("ip addr add {}/24 dev eth{card}; ip link set eth{card} up", route.seen))
            .map(drop)
    }

    /// Gives Intel's cards their addresses.
    fn set_up(&mut self) -> anyhow::Result<()> {
        self.set_address(0, INTEL)?;
        self.set_address(1, SOFT)?;
        self.run("chmod 755 /lease.sh; ip link set eth2 up")?;
        (0..3).try_for_each(|card| self.carrier(card, "1"))?;
        let said = self.run("udhcpc -f -q -n -t 20 -T 1 -s /lease.sh -i eth2 2>&1")?;
        ensure!(said.contains("eth2 has 192.0.2.2/24"), "{said}");
        Ok(())
    }

    fn carrier(&mut self, card: usize, wanted: &str) -> anyhow::Result<()> {
        let start = Instant::now();
        while self.run(&format!("cat /sys/class/net/eth{card}/carrier"))?.trim() != wanted {
            ensure!(start.elapsed() < SOON, "eth{card}: the carrier is not {wanted}");
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Sends data to the guest and back, and reports the times.
    fn carry(&mut self, name: &str, route: &Route, length: usize) -> anyhow::Result<()> {
        let carried = route.check_transfer(&mut self.booted, &noise(length));
        let TransferTimes { to_guest, from_guest } = carried.with_context(|| name.to_owned())?;
        let kib = length >> 10;
        say!("{name}: {kib} KiB to the guest in {to_guest:.1?}, and back in {from_guest:.1?}");
        Ok(())
    }

    /// A counter in the driver's `ethtool -S`.
    fn counter(&mut self, card: usize, name: &str) -> anyhow::Result<u64> {
        let said = self.run(&format!("/tools/ethtool -S eth{card}"))?;
        let value = said.lines().find_map(|it| it.trim().strip_prefix(&format!("{name}: ")));
        value.and_then(|it| it.parse().ok()).with_context(|| format!("{name}: {said}"))
    }

    fn is_known(&mut self) -> anyhow::Result<()> {
        for card in 0..3 {
            let said =
                self.run(&format!("/tools/ethtool -i eth{card}; /tools/ethtool eth{card}"))?;
            for wanted in ["driver: e1000e", "Speed: 1000Mb/s", "Duplex: Full"] {
                ensure!(said.contains(wanted), "{wanted} is not in {said}");
            }
            let mac = self.run(&format!("cat /sys/class/net/eth{card}/address"))?;
            ensure!(mac.trim() == format!("52:54:00:00:01:0{}", card + 1), "{mac}");
        }
        let said = self.run("dmesg | grep -i -e e1000e")?;
        for bad in ["NVM Checksum", "Hardware Error", "Tx Unit Hang", "invalid"] {
            ensure!(!said.contains(bad), "{said}");
        }
        Ok(())
    }

    fn carries_data(&mut self) -> anyhow::Result<()> {
        // Together a gibibyte, of which a part fits in the guest's memory.
        let rounds = if lab::everything() { 10 } else { 1 };
        (0..rounds).try_for_each(|_| self.carry("e1000e", &INTEL, large()))?;
        self.carry("e1000e without offloads", &SOFT, large() / 8)?;
        self.carry("e1000e on passt", &PASST, large() / 24)?;
        self.carry("virtio-net beside it", &BESIDE, large() / 8)?;
        ensure!(self.counter(0, "rx_csum_offload_good")? > 100, "no checksum was checked");
        ensure!(self.counter(0, "tx_tcp_seg_good")? > 10, "nothing was segmented");
        for card in 0..3 {
            for name in ["rx_csum_offload_errors", "rx_errors", "tx_errors", "tx_timeout_count"] {
                let count = self.counter(card, name)?;
                ensure!(count == 0, "eth{card}: {name}: {count}");
            }
        }
        Ok(())
    }

    fn changes_offloads(&mut self) -> anyhow::Result<()> {
        for (word, on) in [("off", false), ("on", true)] {
            for (card, route) in [(0, INTEL), (1, SOFT)] {
                let words = ["rx", "tx", "tso", "gso", "gro", "sg"];
                let words = words.map(|it| format!("{it} {word}")).join(" ");
                self.run(&format!("/tools/ethtool -K eth{card} {words}"))?;
                self.carrier(card, "1")?;
                let said = self.run(&format!("/tools/ethtool -k eth{card}"))?;
                let names = ["tx-checksumming", "rx-checksumming", "tcp-segmentation-offload"];
                features_are(&said, on, &names)?;
                self.carry(&format!("eth{card}, offloads switched {word}"), &route, MIB / 2)?;
            }
        }
        Ok(())
    }

    fn sends_special_frames(&mut self) -> anyhow::Result<()> {
        let ping = |size: u16, route: Route| {
            format!("/tools/ping -M do -c 3 -i 0.2 -W 5 -s {size} {}", route.host)
        };
        // With up to three pages for a packet the driver splits headers from data, then not.
        for mtu in [9000, 4000, 1500] {
            self.run(&format!("ip link set eth1 mtu {mtu}"))?;
            self.carrier(1, "1")?;
            self.run(&ping(mtu - 28, SOFT))?;
            self.carry(&format!("an MTU of {mtu}"), &SOFT, MIB / 2)?;
        }
        self.run("ip link add link eth0 name tagged type vlan id 5; ip link set tagged up")?;
        self.run(&format!("ip addr add {}/24 dev tagged", VLAN.seen))?;
        self.run(&ping(1472, VLAN))?;
        self.carry("a VLAN", &VLAN, MIB / 2)?;
        self.run("/tools/ethtool -K eth0 rxvlan off txvlan off")?;
        self.carry("a VLAN without offloads", &VLAN, MIB / 2)?;
        self.run("/tools/ethtool -K eth0 rxvlan on txvlan on; ip link del tagged").map(drop)
    }

    fn is_pulled(&mut self) -> anyhow::Result<()> {
        let plug = |lan: &Self, state| {
            let command = Command::Link { name: "e1000e".into(), state: Some(state), mtu: None };
            lan.booted.running.ask(&command).map(drop)
        };
        plug(self, LinkState::Down)?;
        self.carrier(0, "0")?;
        let status = self.booted.try_run(&format!("ping -c 1 -W 1 {}", INTEL.host), SOON)?.status;
        ensure!(status != 0, "an answer although the cable is pulled");
        plug(self, LinkState::Up)?;
        self.carrier(0, "1")?;
        self.carry("plugged in again", &INTEL, MIB / 2)
    }

    /// Restarts the driver while frames are in flight, with other interrupts.
    fn uses_each_interrupt(&mut self) -> anyhow::Result<()> {
        // The driver begins with the first one.
        let modes = if lab::everything() { &MODES[..] } else { &MODES[1..] };
        for (parameter, names) in modes {
            let ping = format!("/tools/ping -f -q -s 1400 {}", INTEL.host);
            self.run(&format!("{ping} > /dev/null 2>&1 & echo $! > /flood; sleep 0.5"))?;
            self.run("rmmod e1000e; kill $(cat /flood)")?;
            self.run(&format!("insmod /modules/e1000e.ko IntMode={parameter}"))?;
            self.set_up()?;
            let interrupts = self.run("cat /proc/interrupts")?;
            for (card, (name, route)) in names.iter().zip([INTEL, SOFT, PASST]).enumerate() {
                let mut lines = interrupts.lines().filter(|it| it.contains(&format!("eth{card}")));
                let found = match *name {
                    "INTx" => lines.all(|it| it.contains("fasteoi")),
                    "MSI" => lines.count() == 1,
                    _ => lines.count() == 3,
                };
                ensure!(found, "eth{card} has no {name}: {interrupts}");
                self.carry(&format!("eth{card} with {name}"), &route, MIB / 4)?;
            }
        }
        Ok(())
    }

    /// A thread that polls while there is traffic stops by itself.
    fn sleeps(&mut self) -> anyhow::Result<()> {
        let part = idle::wait_until_idle(self.booted.running.pid(), "net-", 0.01)?;
        say!("idle: all cards use {:.2} % of a processor", part * 100.0);
        Ok(())
    }
}
