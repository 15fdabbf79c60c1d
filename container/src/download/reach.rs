//! Where an address leads: everywhere, into an inner network, or to the machine itself.
//!
//! Threats: a server can redirect to an address that it cannot reach itself, such as the metadata
//! service of a cloud. So a redirection leads no further inside than the address of the user, and
//! connections go to the addresses that were judged, whatever a name means a moment later.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use tokio::net::lookup_host;

use super::address::Address;
use super::fault::Fault;

/// From outside to inside.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Reach {
    Internet,
    /// A private network.
    Inner,
    /// The machine itself, and services for it alone.
    Host,
}

impl Reach {
    pub(super) fn of(ip: IpAddr) -> Self {
        match ip {
            IpAddr::V4(ip) => Self::of_v4(ip),
            IpAddr::V6(ip) => {
                // Those for translators (RFC 6052) mean an address of IPv4, too.
                let [a, b, zeros @ .., high, low] = ip.segments();
                let translated = (a, b) == (0x64, 0xff9b) && zeros == [0; 4];
                let [w, x] = high.to_be_bytes();
                let [y, z] = low.to_be_bytes();
                match ip.to_ipv4_mapped().or(translated.then(|| Ipv4Addr::new(w, x, y, z))) {
                    Some(ip) => Self::of_v4(ip),
                    None if ip.is_loopback() || ip.is_unspecified() => Self::Host,
                    None if ip.is_unicast_link_local() || ip.is_multicast() => Self::Host,
                    None if ip.is_unique_local() => Self::Inner,
                    None => Self::Internet,
                }
            }
        }
    }

    fn of_v4(ip: Ipv4Addr) -> Self {
        match ip.octets() {
            // This network, and protocol assignments, among them a metadata service.
            [0, ..] | [192, 0, 0, _] => Self::Host,
            _ if ip.is_loopback() || ip.is_link_local() => Self::Host,
            _ if ip.is_multicast() || ip.is_broadcast() => Self::Host,
            // Between a provider and its customers (RFC 6598).
            [100, 64..=127, ..] => Self::Inner,
            _ if ip.is_private() => Self::Inner,
            _ => Self::Internet,
        }
    }

    /// The addresses of a host that are no further inside than `self`, and how far the first is.
    pub(super) async fn find(self, to: &Address) -> Result<(Vec<SocketAddr>, Self), Fault> {
        let host = to.host_header();
        let found = lookup_host((&*to.host, to.port)).await;
        let found: Vec<_> = found
            .map_err(|error| Fault::passing(format!("{host} cannot be reached: {error}")))?
            .collect();
        let first = found.first().map_or(Self::Internet, |it| Self::of(it.ip()));
        let allowed = found.iter().copied().filter(|it| Self::of(it.ip()) <= self);
        let allowed: Vec<_> = allowed.collect();
        match found.first().filter(|_| allowed.is_empty()) {
            Some(refused) => Err(Self::refusal(&host, refused.ip())),
            None => Ok((allowed, first)),
        }
    }

    /// Checks a host that a proxy connects to, and returns how far inside it is: only addresses
    /// show that, because the proxy finds names by itself.
    pub(super) fn check(self, to: &Address) -> Result<Self, Fault> {
        let Ok(ip) = to.host.parse() else { return Ok(Self::Internet) };
        let reach = Self::of(ip);
        if reach > self { Err(Self::refusal(&to.host_header(), ip)) } else { Ok(reach) }
    }

    fn refusal(host: &str, ip: IpAddr) -> Fault {
        let inside = match Self::of(ip) {
            Self::Host => "of this machine alone",
            _ => "of an inner network",
        };
        Fault::last(format!(
            "the server redirects to {host}, an address {inside} ({ip}): if this is right, give \
             that address itself"
        ))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn every_special_address_is_inside() {
        for (reach, addresses) in [
            (
                Reach::Internet,
                "1.1.1.1 100.63.0.1 172.32.0.1 192.0.2.1 2606:4700::1 64:ff9b::808:808",
            ),
            (Reach::Inner, "10.0.0.1 172.16.9.9 192.168.1.1 100.64.0.1 fd00::1 ::ffff:10.0.0.1"),
            (
                Reach::Host,
                "127.0.0.1 0.0.0.0 169.254.169.254 192.0.0.192 224.0.0.1 255.255.255.255 ::1 :: \
                 fe80::1 ff02::1 ::ffff:169.254.169.254 64:ff9b::a9fe:a9fe 64:ff9b::7f00:1",
            ),
        ] {
            for address in addresses.split_whitespace() {
                assert_eq!(Reach::of(address.parse().unwrap()), reach, "{address}");
            }
        }
        assert!(Reach::Internet < Reach::Inner && Reach::Inner < Reach::Host);
    }

    #[tokio::test]
    async fn a_redirection_leads_no_further_inside() {
        let find = async |reach: Reach, url: &str| reach.find(&Address::read(url).unwrap()).await;
        let (found, reach) = find(Reach::Host, "http://127.0.0.1:81/").await.unwrap();
        assert_eq!((found, reach), (vec!["127.0.0.1:81".parse().unwrap()], Reach::Host));
        for (from, url) in [
            (Reach::Internet, "http://169.254.169.254/latest"),
            (Reach::Internet, "http://10.0.0.1/"),
            (Reach::Inner, "http://localhost/"),
            (Reach::Inner, "http://[::ffff:169.254.169.254]/"),
            (Reach::Inner, "http://2852039166/"),
        ] {
            let error = find(from, url).await.unwrap_err().to_string();
            assert!(error.contains("redirects to") && error.contains("give that"), "{error}");
        }
        assert!(find(Reach::Inner, "http://10.0.0.1/").await.is_ok());
        let by_proxy = |url: &str| Reach::Internet.check(&Address::read(url).unwrap());
        assert!(by_proxy("http://192.168.0.1/").is_err());
        assert_eq!(by_proxy("http://a.example/").unwrap(), Reach::Internet);
        let near = Address::read("http://192.168.0.1/").unwrap();
        assert_eq!(Reach::Host.check(&near).unwrap(), Reach::Inner);
    }
}
