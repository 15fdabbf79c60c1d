//! Chooses the guest's MAC address, its network, and the ports that stay with the pod. The rules
//! are those of the reference image, so that existing installations of Windows recognize their
//! network.

use std::collections::BTreeSet;
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr};
use std::path::Path;

use anyhow::Context;
use host::mac::Mac;

use crate::files;
use crate::net::link::{Block, PodNetwork};
use crate::net::resolv::Resolv;
use crate::settings::value::Value as _;
use crate::settings::version::Version;
use crate::settings::words::{Ports, Protocol};
use crate::settings::{RDP, Settings};
use crate::status::{Failure, Status};

/// The gateway's former address, which old installations may have stored.
pub const OLD_GATEWAY: Ipv4Addr = Ipv4Addr::new(20, 20, 20, 1);
/// Prefix length of its network.
pub(super) const OLD_MASK: u8 = 24;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Subnet {
    pub(super) guest: Ipv4Addr,
    pub(super) gateway: Ipv4Addr,
    pub(super) mask: u8,
}

impl Subnet {
    /// The network of the `wanted` address of the guest, else one that is derived from the pod's
    /// address. It must not overlap with the `used` ones.
    pub(super) fn choose(
        wanted: Option<Ipv4Addr>,
        mask: u8,
        pod: Ipv4Addr,
        used: &[Block],
    ) -> anyhow::Result<Self> {
        let taken = |guest| taken(used, Block::new(guest, mask));
        if let Some(wanted) = wanted {
            let [a, b, c, last] = wanted.octets();
            // The first address is the gateway's.
            let guest = Ipv4Addr::new(a, b, c, if (2..=254).contains(&last) { last } else { 2 });
            return match taken(guest) {
                None => Ok(Self::of(guest, mask)),
                Some(block) => Err(Failure::new(
                    Status::Network,
                    format!(
                        "IP={wanted}: the network {}/{} is already in use in the pod: choose an \
                         address of another network, or leave IP out",
                        block.address, block.mask
                    ),
                )),
            };
        }
        let [first, second, third, _] = pod.octets();
        let start = if (first, second) == (172, 30) { 31 } else { 30 };
        let guest = (start..=254).chain(30..start).map(|it| Ipv4Addr::new(172, it, third, 2));
        let guest = guest.into_iter().find(|guest| taken(*guest).is_none());
        let guest = guest.ok_or_else(|| {
            Failure::new(
                Status::Network,
                format!(
                    "all networks from 172.30.{third}.0 to 172.254.{third}.0 are in use: set IP"
                ),
            )
        })?;
        Ok(Self::of(guest, mask))
    }

    fn of(guest: Ipv4Addr, mask: u8) -> Self {
        let [a, b, c, _] = guest.octets();
        Self { guest, gateway: Ipv4Addr::new(a, b, c, 1), mask }
    }
}

/// Networks that the guest cannot have: those of the pod, and the addresses of its name servers,
/// which may be behind the default route.
pub(super) fn used(pod: &PodNetwork, resolv: &Resolv) -> Vec<Block> {
    let servers = resolv.servers.iter().filter_map(|server| match server {
        IpAddr::V4(server) => Some(Block::new(*server, 32)),
        IpAddr::V6(_) => None,
    });
    pod.used().into_iter().chain(servers).collect()
}

/// The first of the `used` networks that overlaps with this one. The default route does not count.
pub(super) fn taken(used: &[Block], network: Block) -> Option<&Block> {
    used.iter().find(|block| !block.is_default() && block.overlaps(network))
}

/// The MAC address that the reference image derives from a text, with `echo TEXT | md5sum`.
fn derived_mac(text: &str) -> Mac {
    let md5::Digest(sum) = md5::compute(format!("{text}\n"));
    Mac([2, sum[0], sum[1], sum[2], sum[3], sum[4]])
}

/// The gateway's MAC address, by which Windows recognizes its network.
pub(super) fn gateway_mac(guest: Mac) -> Mac {
    derived_mac(&guest.show())
}

/// The guest's MAC address: that of the settings, else that on the volume (an error if it is
/// invalid), else one that is derived from the pod's name and stored on the volume.
pub fn guest_mac(settings: &Settings, host: &str) -> anyhow::Result<Mac> {
    if let Some(mac) = settings.network.mac {
        return Ok(mac);
    }
    let name = format!("{}.mac", settings.pod.process());
    let path = settings.storage.folder.join(name);
    if let Some(stored) = stored_mac(&path)? {
        return Ok(stored);
    }
    let mac = derived_mac(host.split('.').next().unwrap_or(host));
    // The probe stores nothing.
    if settings.windows.version == Version::Probe {
        return Ok(mac);
    }
    files::write_for_owner(&path, |file| writeln!(file, "{}", mac.show())).with_context(|| {
        format!(
            "{} cannot be written: the guest's MAC address would change at every start",
            path.display()
        )
    })?;
    Ok(mac)
}

/// Nothing if the file is missing or empty.
fn stored_mac(path: &Path) -> anyhow::Result<Option<Mac>> {
    let text = match files::read(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| path.display().to_string()),
    };
    let text: String = text.chars().take(64).filter(char::is_ascii_graphic).collect();
    if text.is_empty() {
        return Ok(None);
    }
    let mac = Mac::read(&text).map_err(|error| {
        let sentence = format!("{}: {error:#}, or remove the file", path.display());
        Failure::new(Status::Address, sentence)
    })?;
    Ok(Some(mac))
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct KeptPorts {
    pub(super) tcp: BTreeSet<u16>,
    pub(super) udp: BTreeSet<u16>,
}

impl KeptPorts {
    pub(super) fn of(settings: &Settings) -> Self {
        let mut kept = Self::default();
        for (port, protocol, _) in settings.kept_ports() {
            match protocol {
                Protocol::Tcp => kept.tcp.insert(port),
                Protocol::Udp => kept.udp.insert(port),
            };
        }
        kept
    }
}

/// TCP ports that are also forwarded from the pod's loopback: Remote Desktop, and USER_PORTS.
pub(super) fn loopback_ports(settings: &Settings, kept: &KeptPorts) -> BTreeSet<u16> {
    let ports = settings.network.user_ports.0.iter();
    let ports = ports.filter(|(_, protocol)| *protocol == Protocol::Tcp).map(|(port, _)| *port);
    ports.chain([RDP]).filter(|port| !kept.tcp.contains(port)).collect()
}

/// Notes on ports of USER_PORTS that are not forwarded from the loopback.
pub(super) fn left_out(settings: &Settings, kept: &KeptPorts) -> Vec<String> {
    let is_kept = |(port, protocol): &(u16, Protocol)| match protocol {
        Protocol::Tcp => kept.tcp.contains(port),
        Protocol::Udp => kept.udp.contains(port),
    };
    let ports = settings.network.user_ports.0.iter().copied();
    let (stay, go): (Vec<_>, Vec<_>) = ports.partition(is_kept);
    let udp = go.into_iter().filter(|(_, protocol)| *protocol == Protocol::Udp).collect();
    let [stay, udp] = [stay, udp].map(Ports);
    let sentences = [
        (&stay, "stays with the pod: it is in HOST_PORTS, or the pod uses it"),
        (
            &udp,
            "is forwarded to the guest, but not from the loopback or by IPv6, where only TCP is",
        ),
    ];
    let sentences = sentences.into_iter().filter(|(ports, _)| !ports.0.is_empty());
    sentences.map(|(ports, what)| format!("USER_PORTS={} {what}", ports.show())).collect()
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::translate::Display;
    use crate::settings::translate::monitor::Monitor;

    fn address(text: &str) -> Ipv4Addr {
        text.parse().unwrap()
    }

    #[test]
    fn the_subnet_matches_the_reference_image() {
        let choose = |wanted: Option<&str>, pod: &str, used: &[(&str, u8)]| {
            let used: Vec<_> =
                used.iter().map(|(at, mask)| Block::new(address(at), *mask)).collect();
            Subnet::choose(wanted.map(address), 24, address(pod), &used).map(|it| it.guest)
        };
        assert_eq!(choose(None, "10.244.7.9", &[]).unwrap(), address("172.30.7.2"));
        assert_eq!(choose(None, "172.30.7.9", &[]).unwrap(), address("172.31.7.2"));
        let routes = [("0.0.0.0", 0), ("172.30.0.0", 16), ("172.31.7.128", 25)];
        assert_eq!(choose(None, "10.244.7.9", &routes).unwrap(), address("172.32.7.2"));
        // The address of a name server is in use.
        let resolv = Resolv::read("nameserver 172.30.7.10\nnameserver fd00::a\n");
        let chosen =
            Subnet::choose(None, 24, address("10.244.7.9"), &used(&PodNetwork::default(), &resolv));
        assert_eq!(chosen.unwrap().guest, address("172.31.7.2"));
        assert!(choose(None, "10.0.0.1", &[("172.0.0.0", 8)]).is_err());
        assert_eq!(choose(Some("10.9.8.1"), "10.0.0.1", &[]).unwrap(), address("10.9.8.2"));
        let error = choose(Some("10.0.0.77"), "10.0.0.1", &[("10.0.0.0", 16)]).unwrap_err();
        assert!(error.to_string().starts_with("IP=10.0.0.77: "), "{error}");
        let subnet = Subnet::choose(Some(address("10.9.8.7")), 20, address("10.0.0.1"), &[]);
        assert_eq!(subnet.unwrap().gateway, address("10.9.8.1"));
    }

    #[test]
    fn mac_addresses_match_the_reference_image() {
        // `echo windows | md5sum`, and the same of the upper-case address.
        let guest = derived_mac("windows");
        assert_eq!(guest.show(), "02:B4:75:56:AA:E8");
        assert_eq!(gateway_mac(guest).show(), "02:8A:9B:F3:62:E7");
    }

    #[test]
    fn the_mac_address_is_stored_on_the_volume() {
        let folder = tempfile::tempdir().unwrap();
        let mut settings = Settings::defaults();
        settings.storage.folder = folder.path().to_owned();
        let file = folder.path().join("windows.mac");
        let made = guest_mac(&settings, "windows.example.org").unwrap();
        assert_eq!(made, derived_mac("windows"));
        assert_eq!(std::fs::read_to_string(&file).unwrap(), format!("{}\n", made.show()));
        assert_eq!(guest_mac(&settings, "another").unwrap(), made);
        std::fs::write(&file, "02-11-22-33-44-55\r\n").unwrap();
        assert_eq!(guest_mac(&settings, "another").unwrap().show(), "02:11:22:33:44:55");
        std::fs::write(&file, "nonsense").unwrap();
        let error = guest_mac(&settings, "another").unwrap_err();
        assert_eq!(Status::of(&error), Status::Address);
        settings.network.mac = Some(Mac([2, 0, 0, 0, 0, 9]));
        assert_eq!(guest_mac(&settings, "another").unwrap(), Mac([2, 0, 0, 0, 0, 9]));
    }

    #[test]
    fn ports_that_the_pod_serves_are_not_forwarded() {
        let mut settings = Settings::defaults();
        let kept = KeptPorts::of(&settings);
        assert_eq!(kept.tcp, [8006].into(), "without VNC its port is the guest's");
        settings.screen.display.value = Display::Vnc;
        let kept = KeptPorts::of(&settings);
        assert_eq!(kept.tcp, [5900, 8006].into());
        assert_eq!(loopback_ports(&settings, &kept), [3389].into());
        settings.network.host_ports.0 = vec![(3389, Protocol::Tcp), (161, Protocol::Udp)];
        settings.network.user_ports.0 = vec![(22, Protocol::Tcp), (53, Protocol::Udp)];
        settings.screen.web = false;
        settings.screen.display.value = Display::None;
        let kept = KeptPorts::of(&settings);
        assert_eq!((&kept.tcp, &kept.udp), (&[3389].into(), &[161].into()));
        assert_eq!(loopback_ports(&settings, &kept), [22].into());
        settings.pod.qmp = Some(Monitor::read("tcp:0.0.0.0:22,server").unwrap());
        let kept = KeptPorts::of(&settings);
        assert_eq!(kept.tcp, [22, 3389].into());
        assert_eq!(loopback_ports(&settings, &kept), [].into());
    }

    #[test]
    fn ports_that_are_not_forwarded_are_reported() {
        let mut settings = Settings::defaults();
        settings.screen.display.value = Display::Vnc;
        let mut notes = |ports| {
            settings.network.user_ports = Ports::read(ports).unwrap();
            left_out(&settings, &KeptPorts::of(&settings))
        };
        assert_eq!(notes("22,2222"), [""; 0]);
        let notes = notes("22,5900,5000/udp,5900/udp,8006");
        assert!(notes[0].starts_with("USER_PORTS=5900,8006 stays with the pod"), "{notes:?}");
        assert!(notes[1].starts_with("USER_PORTS=5000/udp,5900/udp is forwarded"), "{notes:?}");
        assert_eq!(notes.len(), 2);
    }
}
