//! Who has which address on the link between the guest and us.
//!
//! The guest has the pod's own address, so that what it says of itself is true outside as well. Its
//! gateway is the pod's, where that is in the same network, else the first address there. Nothing
//! but DHCP, DNS and ping is at the gateway's address: what else is sent to it leaves the pod like
//! anything else, so that no service of the pod is behind it.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::ensure;
use host::mac::Mac;

use crate::net::link::default_gateway;
use crate::settings::Network;
use crate::settings::words::Mask;

/// A pod without a way outside gets these: the addresses that user networks always had.
const NOWHERE: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 0, 2, 15), Ipv4Addr::new(10, 0, 2, 2));
/// The longest packet where nothing is said: the one that every driver takes.
const MTU: u16 = 1500;
/// And the longest that can be said. Connections end here and begin anew outside, so that long
/// packets cost less. A multiple of 8, as passt(1) has it.
const LONGEST: u16 = 65520;
/// The bits of the largest network that a guest is told of.
const LARGEST: u8 = 8;
/// Those of MASK's default.
const USUAL: u8 = 24;
/// Our card, for a guest that is not told otherwise.
pub const GATEWAY_MAC: Mac = Mac([0x02, 0x54, 0x52, 0x4e, 0x53, 0x01]);

/// The link's addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lan {
    /// The guest's.
    pub guest: Ipv4Addr,
    /// The bits of its network.
    pub prefix: u8,
    /// Ours.
    pub gateway: Ipv4Addr,
    /// Our card's.
    pub mac: Mac,
    /// The longest packet.
    pub mtu: u16,
    /// IPv6, where the pod has it.
    pub v6: Option<LanV6>,
}

/// The addresses of IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LanV6 {
    /// The network, 64 bits of it: the pod's own.
    pub prefix: Ipv6Addr,
    /// Ours.
    pub gateway: Ipv6Addr,
}

/// What the pod has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pod {
    /// Its address.
    pub v4: Option<Ipv4Addr>,
    /// Its gateway.
    pub gateway: Option<Ipv4Addr>,
    /// Its IPv6 address.
    pub v6: Option<Ipv6Addr>,
}

impl Pod {
    /// Looks at where packets would leave.
    #[must_use]
    pub fn read() -> Self {
        // Addresses for documentation: nothing is sent, and no route is more special.
        let v4 = source("192.0.2.1:9")
            .and_then(|it| if let IpAddr::V4(it) = it { Some(it) } else { None });
        let v6 = source("[2001:db8::1]:9")
            .and_then(|it| if let IpAddr::V6(it) = it { Some(it) } else { None });
        Self { v4, gateway: default_gateway(), v6: v6.filter(is_global) }
    }
}

/// Whether hosts beyond the link know an address.
fn is_global(address: &Ipv6Addr) -> bool {
    !address.is_unicast_link_local() && !address.is_loopback() && !address.is_unspecified()
}

/// Which address of ours a packet would have.
fn source(to: &str) -> Option<IpAddr> {
    let to: SocketAddr = to.parse().ok()?;
    let any: IpAddr =
        if to.is_ipv4() { Ipv4Addr::UNSPECIFIED.into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).ok()?;
    socket.connect(to).ok()?;
    socket.local_addr().ok().map(|it| it.ip()).filter(|it| !it.is_loopback())
}

impl Lan {
    /// The addresses for these settings.
    ///
    /// # Errors
    ///
    /// When the guest's address is none that a host has.
    pub fn new(network: &Network, pod: &Pod) -> anyhow::Result<Self> {
        let nowhere = network.address.is_none() && pod.v4.is_none();
        let guest = network.address.or(pod.v4).unwrap_or(NOWHERE.0);
        // Two hosts and two addresses that are none: a network has at least so many.
        let said = network.mask.0.clamp(LARGEST, 30);
        // The pod's network may be larger than MASK's default, and its address no edge there.
        let prefix = match network.address.is_none() && network.mask.0 == USUAL {
            true => (LARGEST..=said).rev().find(|it| !Mask(*it).is_edge(guest)).unwrap_or(said),
            false => said,
        };
        let mask = u32::MAX << (32 - prefix);
        let (number, net) = (u32::from(guest), u32::from(guest) & mask);
        let strange = guest.is_loopback() || guest.is_multicast() || guest.is_unspecified();
        ensure!(
            !Mask(prefix).is_edge(guest) && !strange,
            "IP={guest}: a guest cannot have this address in a network of /{prefix}: set another \
             IP or MASK"
        );
        let inside = |it: &Ipv4Addr| u32::from(*it) & mask == net && *it != guest;
        let first = if number == net + 1 { net + 2 } else { net + 1 };
        let gateway = if nowhere { Some(NOWHERE.1) } else { pod.gateway };
        let gateway = gateway.filter(inside).unwrap_or(Ipv4Addr::from(first));
        let mtu =
            network.mtu.map_or(MTU, |mtu| u16::try_from(mtu.0).unwrap_or(LONGEST).min(LONGEST));
        // IPv6 has no links with less (RFC 8200, 5).
        let v6 = pod.v6.filter(|_| mtu >= 1280).map(|address| LanV6 {
            prefix: Ipv6Addr::from(u128::from(address) & (u128::MAX << 64)),
            gateway: link_local(GATEWAY_MAC),
        });
        Ok(Self { guest, prefix, gateway, mac: GATEWAY_MAC, mtu, v6 })
    }

    /// Whether this is the address of a whole network, or of no host.
    #[must_use]
    pub fn is_broadcast(&self, address: Ipv4Addr) -> bool {
        let mask = u32::MAX << (32 - u32::from(self.prefix));
        let inside = (u32::from(address) ^ u32::from(self.guest)) & mask == 0;
        address.is_broadcast() || inside && Mask(self.prefix).is_edge(address)
    }
}

/// The address that a card gives itself (RFC 4291, appendix A).
fn link_local(mac: Mac) -> Ipv6Addr {
    let [a, b, c, d, e, f] = mac.0.map(u16::from);
    Ipv6Addr::new(0xfe80, 0, 0, 0, ((a ^ 2) << 8) | b, (c << 8) | 0xff, 0xfe00 | d, (e << 8) | f)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::net::link::gateway;
    use crate::settings::Settings;

    fn lan(pod: Pod, change: impl FnOnce(&mut Network)) -> anyhow::Result<Lan> {
        let mut network = Settings::unsaid().network;
        change(&mut network);
        Lan::new(&network, &pod)
    }

    fn pod(v4: [u8; 4], gateway: [u8; 4]) -> Pod {
        Pod { v4: Some(v4.into()), gateway: Some(gateway.into()), v6: None }
    }

    #[test]
    fn the_guest_has_the_address_of_the_pod_and_its_gateway() {
        let lan = lan(pod([172, 17, 0, 2], [172, 17, 0, 1]), |_| ()).unwrap();
        assert_eq!(lan.guest, Ipv4Addr::new(172, 17, 0, 2));
        assert_eq!((lan.gateway, lan.prefix), (Ipv4Addr::new(172, 17, 0, 1), 24));
        assert_eq!((lan.mtu, lan.v6), (MTU, None));
    }

    #[test]
    fn a_gateway_that_is_nowhere_near_is_another_address() {
        // Calico's pods have no network of their own.
        let far = lan(pod([10, 244, 1, 5], [169, 254, 1, 1]), |_| ()).unwrap();
        assert_eq!(far.gateway, Ipv4Addr::new(10, 244, 1, 1));
        let first = lan(pod([10, 244, 1, 1], [169, 254, 1, 1]), |_| ()).unwrap();
        assert_eq!(first.gateway, Ipv4Addr::new(10, 244, 1, 2));
    }

    #[test]
    fn a_pod_at_the_edge_of_a_small_network_is_in_a_larger_one() {
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
        // There is none that is large enough, or a mask that was said.
        for (own, mask) in [([10, 0, 0, 0], 24), ([10, 255, 255, 255], 24), ([10, 0, 4, 0], 23)] {
            let refused = lan(pod(own, [10, 0, 0, 1]), |network| network.mask.0 = mask);
            assert!(refused.unwrap_err().to_string().contains("set another IP"), "{own:?}");
        }
    }

    #[test]
    fn what_the_user_says_counts() {
        let said = lan(pod([172, 17, 0, 2], [172, 17, 0, 1]), |network| {
            network.address = Some(Ipv4Addr::new(192, 168, 77, 9));
            network.mask.0 = 16;
            network.mtu = Some(crate::settings::value::Within(1400));
        });
        let said = said.unwrap();
        assert_eq!((said.guest, said.prefix), (Ipv4Addr::new(192, 168, 77, 9), 16));
        assert_eq!((said.gateway, said.mtu), (Ipv4Addr::new(192, 168, 0, 1), 1400));
        for bad in [[192, 168, 77, 0], [192, 168, 77, 255], [127, 0, 0, 2], [224, 0, 0, 5]] {
            let refused = lan(Pod::default(), |network| network.address = Some(bad.into()));
            assert!(refused.unwrap_err().to_string().contains("set another IP"), "{bad:?}");
        }
    }

    #[test]
    fn a_pod_without_a_way_outside_has_a_guest_all_the_same() {
        let lan = lan(Pod::default(), |_| ()).unwrap();
        assert_eq!((lan.guest, lan.gateway), NOWHERE);
    }

    #[test]
    fn the_default_route_is_found_among_others() {
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
    fn ipv6_is_there_where_the_pod_has_it_and_packets_are_long_enough() {
        let there = Pod { v6: Some("2001:db8:1:2:3:4:5:6".parse().unwrap()), ..Pod::default() };
        let v6 = lan(there, |_| ()).unwrap().v6.unwrap();
        assert_eq!(v6.prefix.to_string(), "2001:db8:1:2::");
        assert_eq!(v6.gateway.to_string(), "fe80::54:52ff:fe4e:5301");
        let mtu = |network: &mut Network| network.mtu = Some(crate::settings::value::Within(1279));
        assert_eq!(lan(there, mtu).unwrap().v6, None);
    }
}
