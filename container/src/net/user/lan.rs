//! Addresses on the link between the guest and us.
//!
//! The guest has the pod's own address, so that other hosts can use the address that the guest
//! reports. Its gateway has the address of the pod's gateway if that is in the same network, else
//! the first address there. We serve only DHCP, DNS and ping at the gateway's address. All other
//! packets to it leave the pod, so that no service of the pod is reachable there.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::ensure;
use host::mac::Mac;

use crate::net::link::default_gateway;
use crate::settings::Network;
use crate::settings::words::{KeptAddress, MAX_PREFIX, MIN_PREFIX, Mask};

/// Addresses of guest and gateway if the pod has no route: those of QEMU's user networks.
const ISOLATED: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 0, 2, 15), Ipv4Addr::new(10, 0, 2, 2));
/// The default MTU in bytes, which every driver supports.
const DEFAULT_MTU: u16 = 1500;
/// The maximum MTU. Large packets are cheaper, and connections are terminated here, so that the MTU
/// outside does not matter. A multiple of 8, as in passt(1).
const MAX_MTU: u16 = 65520;
/// The prefix length of MASK's default.
const DEFAULT_PREFIX: u8 = 24;
pub const GATEWAY_MAC: Mac = Mac([0x02, 0x54, 0x52, 0x4e, 0x53, 0x01]);

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lan {
    pub guest: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
    /// MAC address of the gateway.
    pub mac: Mac,
    pub mtu: u16,
    /// Set if the pod has IPv6.
    pub v6: Option<LanV6>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanV6 {
    /// The network of the guest, a /64.
    pub prefix: Ipv6Addr,
    /// Link-local address of the gateway.
    pub gateway: Ipv6Addr,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PodAddresses {
    pub v4: Option<Ipv4Addr>,
    pub gateway: Option<Ipv4Addr>,
    /// Global IPv6 address.
    pub v6: Option<Ipv6Addr>,
}

impl PodAddresses {
    /// Reads the addresses from which packets to the Internet would be sent.
    pub fn read() -> Self {
        // Addresses for documentation, which only the default route matches. Nothing is sent.
        let v4 = source("192.0.2.1:9")
            .and_then(|it| if let IpAddr::V4(it) = it { Some(it) } else { None });
        let v6 = source("[2001:db8::1]:9")
            .and_then(|it| if let IpAddr::V6(it) = it { Some(it) } else { None });
        Self { v4, gateway: default_gateway(), v6: v6.filter(is_global) }
    }
}

/// Whether an address is valid beyond the link.
fn is_global(address: &Ipv6Addr) -> bool {
    !address.is_unicast_link_local() && !address.is_loopback() && !address.is_unspecified()
}

/// The source address that the kernel chooses for this destination.
fn source(to: &str) -> Option<IpAddr> {
    let to: SocketAddr = to.parse().ok()?;
    let any: IpAddr =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|it| it.ip()).filter(|it| !it.is_loopback())
}

impl Lan {
    pub fn new(network: &Network, pod: &PodAddresses) -> anyhow::Result<Self> {
        let isolated = network.address.is_none() && pod.v4.is_none();
        let kept = network.kept.filter(|_| network.address.is_none());
        let guest = network.address.or(kept.map(|it| it.guest)).or(pod.v4).unwrap_or(ISOLATED.0);
        let bits = network.mask.0.clamp(MIN_PREFIX, MAX_PREFIX);
        // The pod's network may be larger than MASK's default. Its address may be reserved in the
        // small network, but not in the large one.
        let prefix = match network.address.is_none() && network.mask.0 == DEFAULT_PREFIX {
            true => (MIN_PREFIX..=bits).rev().find(|it| !Mask(*it).is_edge(guest)).unwrap_or(bits),
            false => bits,
        };
        let prefix = kept.map_or(prefix, |it| it.prefix);
        let mask = u32::MAX << (32 - prefix);
        let (number, net) = (u32::from(guest), u32::from(guest) & mask);
        let strange = guest.is_loopback() || guest.is_multicast() || guest.is_unspecified();
        ensure!(
            !Mask(prefix).is_edge(guest) && !strange,
            "IP={guest}: the address is reserved in its /{prefix} network: set another IP or MASK"
        );
        let inside = |it: &Ipv4Addr| u32::from(*it) & mask == net && *it != guest;
        let first = if number == net + 1 { net + 2 } else { net + 1 };
        let gateway = if isolated { Some(ISOLATED.1) } else { pod.gateway };
        let gateway = kept.map(|it| it.gateway).or(gateway);
        let gateway = gateway.filter(inside).unwrap_or(Ipv4Addr::from(first));
        let mtu = network
            .mtu
            .map_or(DEFAULT_MTU, |mtu| u16::try_from(mtu.0).unwrap_or(MAX_MTU).min(MAX_MTU));
        // IPv6 needs an MTU of at least 1280 (RFC 8200, 5).
        let v6 = pod.v6.filter(|_| mtu >= 1280).map(|address| LanV6 {
            prefix: Ipv6Addr::from(u128::from(address) & (u128::MAX << 64)),
            gateway: link_local(GATEWAY_MAC),
        });
        Ok(Self { guest, prefix, gateway, mac: GATEWAY_MAC, mtu, v6 })
    }

    pub fn kept(&self) -> KeptAddress {
        KeptAddress { guest: self.guest, prefix: self.prefix, gateway: self.gateway }
    }

    /// Whether an address is a broadcast address, or the first address of the guest's network.
    pub fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        let mask = u32::MAX << (32 - u32::from(self.prefix));
        let inside = (u32::from(address) ^ u32::from(self.guest)) & mask == 0;
        address.is_broadcast() || inside && Mask(self.prefix).is_edge(address)
    }
}

/// The link-local address of a MAC address (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0.map(u16::from);
    Ipv6Addr::new(0xfe80, 0, 0, 0, ((a ^ 2) << 8) | b, (c << 8) | 0xff, 0xfe00 | d, (e << 8) | f)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::net::link::gateway;
    use crate::settings::Settings;

    fn lan(pod: PodAddresses, change: impl FnOnce(&mut Network)) -> anyhow::Result<Lan> {
        let mut network = Settings::defaults().network;
        change(&mut network);
        Lan::new(&network, &pod)
    }

    fn pod(v4: [u8; 4], gateway: [u8; 4]) -> PodAddresses {
        PodAddresses { v4: Some(v4.into()), gateway: Some(gateway.into()), v6: None }
    }

    #[test]
    fn a_guest_that_goes_on_keeps_address_and_gateway() {
        let here = pod([10, 9, 1, 5], [10, 9, 1, 200]);
        let first = lan(here, |_| ()).unwrap();
        let text = first.kept().to_string();
        assert_eq!(text, "10.9.1.5/24 10.9.1.200");
        for there in [pod([10, 9, 2, 6], [10, 9, 2, 1]), PodAddresses::default()] {
            let then = lan(there, |it| it.kept = Some(text.parse().unwrap())).unwrap();
            assert_eq!(then, first);
        }
        let isolated = lan(PodAddresses::default(), |_| ()).unwrap();
        let kept = Some(isolated.kept());
        assert_eq!(lan(PodAddresses::default(), |it| it.kept = kept).unwrap(), isolated);
        let set = lan(here, |it| (it.kept, it.address) = (kept, Some([10, 9, 1, 7].into())));
        assert_eq!(set.unwrap().guest, Ipv4Addr::new(10, 9, 1, 7));
        for wrong in ["", "10.9.1.5", "10.9.1.5/24", "10.9.1.5/31 10.9.1.1", "::1/24 10.9.1.1"] {
            assert!(wrong.parse::<KeptAddress>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_guest_has_the_address_of_the_pod_and_its_gateway() {
        let lan = lan(pod([172, 17, 0, 2], [172, 17, 0, 1]), |_| ()).unwrap();
        assert_eq!(lan.guest, Ipv4Addr::new(172, 17, 0, 2));
        assert_eq!((lan.gateway, lan.prefix), (Ipv4Addr::new(172, 17, 0, 1), 24));
        assert_eq!((lan.mtu, lan.v6), (DEFAULT_MTU, None));
    }

    #[test]
    fn an_unreachable_gateway_is_replaced() {
        // Calico's pods have no network of their own.
        let far = lan(pod([10, 244, 1, 5], [169, 254, 1, 1]), |_| ()).unwrap();
        assert_eq!(far.gateway, Ipv4Addr::new(10, 244, 1, 1));
        let first = lan(pod([10, 244, 1, 1], [169, 254, 1, 1]), |_| ()).unwrap();
        assert_eq!(first.gateway, Ipv4Addr::new(10, 244, 1, 2));
    }

    #[test]
    fn an_edge_address_gets_a_larger_network() {
        for (own, prefix, gateway) in [
            ([10, 0, 3, 0], 23, [10, 0, 2, 1]),
            ([10, 0, 3, 255], 21, [10, 0, 0, 1]),
            ([10, 0, 2, 255], 23, [10, 0, 2, 1]),
            ([192, 168, 0, 0], 12, [192, 160, 0, 1]),
        ] {
            let lan = lan(pod(own, [169, 254, 1, 1]), |_| ()).unwrap();
            assert_eq!((lan.guest.octets(), lan.prefix), (own, prefix));
            assert_eq!(lan.gateway.octets(), gateway, "{own:?}");
            assert!(!lan.is_broadcast(lan.guest) && !lan.is_broadcast(lan.gateway), "{own:?}");
        }
        let docker = lan(pod([172, 17, 3, 0], [172, 17, 2, 1]), |_| ()).unwrap();
        assert_eq!((docker.prefix, docker.gateway), (23, Ipv4Addr::new(172, 17, 2, 1)));
        // No network is large enough, or the mask is set.
        for (own, mask) in [([10, 0, 0, 0], 24), ([10, 255, 255, 255], 24), ([10, 0, 4, 0], 23)] {
            let refused = lan(pod(own, [10, 0, 0, 1]), |network| network.mask.0 = mask);
            assert!(refused.unwrap_err().to_string().contains("set another IP"), "{own:?}");
        }
    }

    #[test]
    fn configured_addresses_win() {
        let chosen = lan(pod([172, 17, 0, 2], [172, 17, 0, 1]), |network| {
            network.address = Some(Ipv4Addr::new(192, 168, 77, 9));
            network.mask.0 = 16;
            network.mtu = Some(crate::settings::value::Within(1400));
        });
        let chosen = chosen.unwrap();
        assert_eq!((chosen.guest, chosen.prefix), (Ipv4Addr::new(192, 168, 77, 9), 16));
        assert_eq!((chosen.gateway, chosen.mtu), (Ipv4Addr::new(192, 168, 0, 1), 1400));
        for bad in [[192, 168, 77, 0], [192, 168, 77, 255], [127, 0, 0, 2], [224, 0, 0, 5]] {
            let refused =
                lan(PodAddresses::default(), |network| network.address = Some(bad.into()));
            assert!(refused.unwrap_err().to_string().contains("set another IP"), "{bad:?}");
        }
    }

    #[test]
    fn a_pod_without_a_network_has_an_isolated_lan() {
        let lan = lan(PodAddresses::default(), |_| ()).unwrap();
        assert_eq!((lan.guest, lan.gateway), ISOLATED);
    }

    #[test]
    fn finds_the_default_route() {
        let head = "Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\n";
        let route = |to: [u8; 4], by: [u8; 4], mask: [u8; 4]| {
            let [to, by, mask] = [to, by, mask].map(u32::from_ne_bytes);
            format!("eth0\t{to:08X}\t{by:08X}\t0003\t0\t0\t0\t{mask:08X}\t0\t0\t0\n")
        };
        let near = route([172, 17, 0, 0], [0; 4], [255, 255, 0, 0]);
        let routes = [head.to_owned(), near, route([0; 4], [172, 17, 0, 1], [0; 4])].concat();
        assert_eq!(gateway(&routes), Some(Ipv4Addr::new(172, 17, 0, 1)));
        assert_eq!(gateway(head), None);
    }

    #[test]
    fn ipv6_needs_a_pod_address_and_a_sufficient_mtu() {
        let there = PodAddresses {
            v6: Some("2001:db8:1:2:3:4:5:6".parse().unwrap()),
            ..PodAddresses::default()
        };
        let v6 = lan(there, |_| ()).unwrap().v6.unwrap();
        assert_eq!(v6.prefix.to_string(), "2001:db8:1:2::");
        assert_eq!(v6.gateway.to_string(), "fe80::54:52ff:fe4e:5301");
        let mtu = |network: &mut Network| network.mtu = Some(crate::settings::value::Within(1279));
        assert_eq!(lan(there, mtu).unwrap().v6, None);
    }
}
