//! `vmm doctor --net TAP`: measures how fast a tap takes frames, and how fast this host answers on
//! it. The frames have an address that bridges do not forward: they do not leave this host.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, UdpSocket};
use std::path::Path;

use anyhow::{Context, ensure};
use host::net::Network;

use super::machine::Limits;
use super::trial::{self, Trial};

/// Frames of the maximum size of most links, and enough of them to take some tenths of a second.
const SENT: &str = "size=1514,depth=256,count=200000";
/// ARP round trips.
const ASKED: &str = "count=2000,patience=2";
/// IFF_UP
const UP: u32 = 1;

pub(super) fn measure(name: &str, limits: Limits) -> anyhow::Result<Trial> {
    let name = name.strip_prefix("tap:").unwrap_or(name);
    Network::try_from(format!("tap:{name}")).map_err(anyhow::Error::msg)?;
    let known = fs::read_to_string("/proc/net/dev").context("/proc/net/dev")?;
    let is_known = known.lines().any(|line| line.trim_start().starts_with(&format!("{name}:")));
    ensure!(
        is_known,
        "there is no tap {name}: create it with `ip tuntap add {name} mode tap`, \
         and enable it with `ip link set {name} up`"
    );
    let folder = Path::new("/sys/class/net").join(name);
    check(&folder, name)?;
    let mut words = vec![format!("net=send,{SENT}")];
    let host = address(&folder, name);
    words.extend(host.map(|host| format!("net=arp,host={host},{ASKED}")));
    let device = format!("virtio-net,to=tap:{name}");
    let mut parts = trial::run(&device, "net", &words, limits)?.parts;
    let silent = host.is_some() && parts.last().is_some_and(|part| !part.is_answered());
    // A report is sent to others.
    let host = host.filter(|_| !limits.is_short());
    let says = match host {
        None if words.len() > 1 => "frames and ARP requests went to this host".to_owned(),
        Some(host) if silent => format!("this host has {host}, but does not answer for it there"),
        Some(host) => format!("frames went to this host, which received ARP requests for {host}"),
        None => "frames went to this host, which has no IPv4 address there for ARP requests".into(),
    };
    // Not answering ARP is no failure: the host may be configured so.
    parts.retain(|part| !silent || part.is_answered());
    let works = parts.iter().all(|part| part.works);
    Ok(Trial { name: name.to_owned(), says, works, parts })
}

/// Detects mistakes that would otherwise show only as lost frames. If `/sys` belongs to another
/// network namespace, it does not know the tap, and the check is skipped.
fn check(folder: &Path, name: &str) -> anyhow::Result<()> {
    if !folder.exists() {
        return Ok(());
    }
    ensure!(folder.join("tun_flags").exists(), "{name} is a network interface, but not a tap");
    let flags = fs::read_to_string(folder.join("flags")).with_context(|| name.to_owned())?;
    let flags = u32::from_str_radix(flags.trim().trim_start_matches("0x"), 16);
    ensure!(flags.is_ok_and(|it| it & UP != 0), "{name} is down: `ip link set {name} up`");
    Ok(())
}

/// The IPv4 address of this host on the tap, or on the bridge of the tap.
fn address(folder: &Path, name: &str) -> Option<Ipv4Addr> {
    let bridge = fs::canonicalize(folder.join("master")).ok();
    let bridge = bridge.as_ref().and_then(|path| path.file_name()?.to_str());
    let routes = fs::read_to_string("/proc/net/route").ok()?;
    let neighbour = neighbour(&routes, bridge.unwrap_or(name))?;
    // Use the source address that the kernel chooses for a peer there. Nothing is sent.
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).ok()?;
    socket.connect((neighbour, 9)).ok()?;
    match socket.local_addr().ok()?.ip() {
        IpAddr::V4(address) if !address.is_loopback() => Some(address),
        _ => None,
    }
}

/// A possible address of a peer on an interface, from the routing table (proc_net_route).
fn neighbour(routes: &str, interface: &str) -> Option<Ipv4Addr> {
    routes.lines().skip(1).find_map(|line| {
        let words: Vec<_> = line.split_ascii_whitespace().collect();
        let number = |at: usize| u32::from_str_radix(words.get(at)?, 16).ok();
        // The kernel prints the numbers in memory order.
        let [network, gateway, mask] = [number(1)?, number(2)?, number(7)?].map(u32::from_le);
        let [network, mask] = [network, mask].map(|it| u32::from_be_bytes(it.to_le_bytes()));
        let mine = words.first() == Some(&interface) && gateway == 0 && mask != 0;
        (mine && mask < u32::MAX - 1).then(|| Ipv4Addr::from_bits(network | 1))
    })
}

#[cfg(test)]
mod test {
    use super::*;

    const ROUTES: &str = "\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010A0A0A\t0003\t0\t0\t0\t00000000\t0\t0\t0
tap0\t0008090A\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
";

    #[test]
    fn a_neighbour_is_in_the_network_of_the_interface() {
        assert_eq!(neighbour(ROUTES, "tap0"), Some(Ipv4Addr::new(10, 9, 8, 1)));
        assert_eq!(neighbour(ROUTES, "tap"), None);
        assert_eq!(neighbour(ROUTES, "eth0"), None, "a default route names no network");
        assert_eq!(neighbour("Iface\nx y", "x"), None);
    }

    #[test]
    fn an_interface_that_is_not_a_tap_is_refused_with_its_name() {
        let error = |name| measure(name, Limits::PATIENT).unwrap_err().to_string();
        assert!(error("a/b").contains("not an interface name"));
        assert!(error("tap:transom-gone").contains("ip tuntap add transom-gone"));
        assert!(error("lo").contains("not a tap"));
    }
}
