//! Attaches the guest directly to the pod's network (`DHCP=Y`), with a macvtap in bridge mode on
//! the pod's interface. The guest gets its address from the network's DHCP server, and all of its
//! ports are at this address. The pod keeps its own address, which has the screen.
//!
//! `node` opens the macvtap's device, `arp` finds out the guest's address.
//!
//! Threats: the guest is a host of the pod's network, and can send any frame there. Users who do
//! not want that leave `DHCP` out. The pod connects to the address that the guest announces by ARP
//! to find out whether its desktop is ready, but through this interface only.

pub mod arp;
mod node;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use host::mac::Mac;
use rtnetlink::packet_route::link::InfoKind;

pub use self::arp::LearnedAddress;
use self::arp::Listener;
use crate::net::link::{self, Link, Links, PodNetwork};
use crate::net::{capabilities, nat};
use crate::settings::Settings;
use crate::settings::value::Value as _;
use crate::status::{Failure, Status};

/// Parameters besides the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Parameters {
    /// Number of queue pairs of the guest's card.
    pub pairs: u16,
    pub pod: String,
    /// Folder in which the device node may be created.
    pub folder: PathBuf,
}

/// Addresses and interface, chosen before anything is created.
struct Plan {
    uplink: Link,
    mac: Mac,
    mtu: u16,
    /// The pod's own address, if it has one.
    own: Option<IpAddr>,
}

pub struct Macvtap {
    plan: Plan,
    index: u32,
    queues: Vec<OwnedFd>,
    /// Nothing if the pod cannot receive the guest's ARP.
    arp: Option<Listener>,
    links: Links,
    _owner: UnixListener,
}

impl Macvtap {
    /// Creates the macvtap. The guest can start after this. After an error, nothing is left behind.
    pub async fn start(settings: &Settings, parameters: &Parameters) -> anyhow::Result<Self> {
        if !capabilities::is_admin() {
            return Err(refusal("a capability is missing: add --cap-add NET_ADMIN"));
        }
        let owner = link::claim_network().await?;
        let links = Links::open()?;
        let name = settings.network.tap.0.as_str();
        links.clear(name).await?;
        nat::remove_old_rules();
        let plan = Plan::make(settings, parameters, &links.read().await?)?;
        let made = links.add_macvtap(name, plan.uplink.index, plan.mac, plan.mtu).await;
        made.map_err(|error| plan.explain(&error))?;
        match plan.set_up(&links, name, parameters).await {
            Ok((index, queues)) => {
                let arp = plan.listen();
                Ok(Self { plan, index, queues, arp, links, _owner: owner })
            }
            Err(error) => {
                links.clear(name).await.ok();
                Err(error)
            }
        }
    }

    /// Takes the queues, for `fd:N:N…` of `vmm`. Child processes inherit them.
    pub fn take_queues(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.queues)
    }

    pub fn mac(&self) -> Mac {
        self.plan.mac
    }

    pub fn mtu(&self) -> u16 {
        self.plan.mtu
    }

    /// The pod's interface that the macvtap is on.
    pub fn uplink(&self) -> &str {
        &self.plan.uplink.name
    }

    /// Nothing if the pod cannot receive the guest's ARP.
    pub fn learned_address(&self) -> Option<LearnedAddress> {
        self.arp.as_ref().map(Listener::learned_address)
    }

    /// Notes for the user, one sentence each.
    pub fn notes(&self) -> Vec<String> {
        let (name, mac) = (self.uplink(), self.mac().show());
        let mut notes = vec![format!(
            "the guest is a host of the network behind {name}, with the MAC address {mac}, and \
             gets its address there; the screen stays with the pod{}",
            self.plan.own.map(|own| format!(" at {own}")).unwrap_or_default()
        )];
        if self.arp.is_none() {
            let why = match self.plan.uplink.is_bridged {
                true => "without --cap-add NET_RAW the pod cannot find out the guest's address",
                false => "the pod and its guest cannot reach each other on this interface",
            };
            notes.push(format!("{why}: /readyz reports ready as soon as the machine runs"));
        }
        notes
    }

    /// Learns the guest's address, until the future is dropped.
    pub async fn serve(&self) {
        match &self.arp {
            Some(arp) => arp.listen().await,
            None => std::future::pending().await,
        }
    }

    /// Removes the macvtap.
    pub async fn end(self) -> anyhow::Result<()> {
        drop(self.queues);
        // Another program may have removed it already.
        let pod = self.links.read().await?;
        if !pod.links.iter().any(|link| link.index == self.index) {
            return Ok(());
        }
        self.links.delete(self.index).await
    }
}

impl Plan {
    fn make(
        settings: &Settings,
        parameters: &Parameters,
        pod: &PodNetwork,
    ) -> anyhow::Result<Self> {
        let network = &settings.network;
        let uplink = pod.uplink(network.uplink.as_ref().map(|it| it.0.as_str()))?;
        let Link { name, mtu: room, .. } = uplink;
        if let Some(kind @ (InfoKind::IpVlan | InfoKind::IpVtap)) = &uplink.kind {
            let sentence = format!(
                "DHCP=Y: {name} is an {kind}, whose hosts share one MAC address, and the guest \
                 needs its own: create the network with the driver macvlan, or leave DHCP out"
            );
            return Err(Failure::new(Status::Unsupported, sentence));
        }
        let mtu = network.mtu.map_or(*room, |it| it.0);
        if mtu > *room {
            let sentence = format!("MTU={mtu}: {name} has an MTU of {room}: leave MTU out");
            return Err(Failure::new(Status::Network, sentence));
        }
        let own = pod.addresses.iter().find(|it| it.0 == uplink.index && it.1.is_ipv4());
        Ok(Self {
            mac: nat::guest_mac(settings, &parameters.pod)?,
            // The MTU field of virtio-net has 16 bits.
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            own: own.map(|it| it.1),
            uplink: uplink.clone(),
        })
    }

    /// Opens the queues and sets the interface up.
    async fn set_up(
        &self,
        links: &Links,
        name: &str,
        parameters: &Parameters,
    ) -> anyhow::Result<(u32, Vec<OwnedFd>)> {
        let pod = links.read().await?;
        let found = pod.find(name).ok_or_else(|| refusal(format!("{name} is gone")))?;
        let queues = node::open(found, &parameters.folder, parameters.pairs)?;
        links.raise(found.index).await.map_err(|error| self.explain(&error))?;
        Ok((found.index, queues))
    }

    /// Only macvlan interfaces in bridge mode receive each other's frames.
    fn listen(&self) -> Option<Listener> {
        if !self.uplink.is_bridged {
            return None;
        }
        let listener = Listener::open(self.mac, self.uplink.index);
        listener.inspect_err(|error| tracing::debug!("ARP: {error}")).ok()
    }

    /// The reason why the kernel refuses a macvtap, and the way out.
    fn explain(&self, error: &io::Error) -> anyhow::Error {
        let name = &self.uplink.name;
        refusal(match error.kind() {
            io::ErrorKind::Unsupported => {
                "the kernel has no macvtap: load the module `macvtap` on the host".to_owned()
            }
            io::ErrorKind::AddrInUse => format!(
                "another guest on {name} has the MAC address {}: give each guest its own MAC",
                self.mac.show()
            ),
            io::ErrorKind::InvalidInput => format!(
                "{name} does not support macvtap ({error}): it must be a macvlan or an Ethernet \
                 card: set DEV to another interface"
            ),
            io::ErrorKind::ResourceBusy => format!(
                "{name} is part of a bridge, a bond or a pass-through: set DEV to another interface"
            ),
            _ => format!("no macvtap can be created on {name}: {error}"),
        })
    }
}

/// An error with the exit status of the reference image.
fn refusal(sentence: impl AsRef<str>) -> anyhow::Error {
    Failure::new(Status::Dhcp, format!("DHCP=Y: {}", sentence.as_ref()))
}

#[cfg(test)]
mod test {
    use super::*;

    fn chosen(kind: Option<InfoKind>, words: &[(&str, &str)]) -> anyhow::Result<Plan> {
        let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let settings = crate::settings::environment::read(&environment)?.settings;
        let eth0 = Link { index: 2, name: "eth0".into(), mtu: 1400, kind, is_bridged: false };
        let addresses = vec![(2, "fe80::1".parse()?, 64), (2, "10.0.0.9".parse()?, 24)];
        let pod =
            PodNetwork { links: vec![eth0], addresses, default: Some(2), ..PodNetwork::default() };
        let parameters = Parameters { pairs: 1, pod: "windows".into(), folder: "/".into() };
        Plan::make(&settings, &parameters, &pod)
    }

    #[test]
    fn only_an_interface_that_supports_macvtap_is_accepted() {
        let mac = ("MAC", "02:00:00:00:00:09");
        for kind in [None, Some(InfoKind::MacVlan), Some(InfoKind::Veth)] {
            let plan = chosen(kind, &[mac]).unwrap();
            assert_eq!((plan.mtu, plan.own), (1400, "10.0.0.9".parse().ok()));
        }
        let error = chosen(Some(InfoKind::IpVlan), &[mac]).err().unwrap();
        assert_eq!(Status::of(&error), Status::Unsupported);
        assert!(error.to_string().starts_with("DHCP=Y: eth0 is an ipvlan"), "{error}");
        assert_eq!(chosen(None, &[mac, ("MTU", "1300")]).unwrap().mtu, 1300);
        let error = chosen(None, &[mac, ("MTU", "1500")]).err().unwrap();
        assert!(error.to_string().starts_with("MTU=1500: eth0 has an MTU of 1400"), "{error}");
    }
}
