//! A card of the guest's own on the pod's network (`DHCP=Y`): a macvtap in bridge mode on the pod's
//! interface. The guest asks the network's own DHCP server, and all of its ports are at the address
//! that it gets; the pod keeps its own address, and the screen is there.
//!
//! `node` opens the device that its frames go through, `arp` hears which address the guest has.
//!
//! Threats: the guest is on the pod's network as any host there, under any name: who wants less
//! leaves `DHCP` out. What it says by ARP is where the pod asks for a remote desktop, by this
//! interface alone.

pub mod arp;
mod node;

use std::io;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use host::mac::Mac;
use rtnetlink::packet_route::link::InfoKind;

use self::arp::Ear;
pub use self::arp::Heard;
use crate::net::link::{self, Link, Links, Pod};
use crate::net::{nat, right};
use crate::settings::Settings;
use crate::settings::value::Value as _;
use crate::status::{Failure, Status};

/// What is asked besides the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Pairs of queues of the guest's card.
    pub pairs: u16,
    /// What the pod is called.
    pub pod: String,
    /// Where the device's node may be made.
    pub folder: PathBuf,
}

/// What was chosen, before anything is made.
struct Choice {
    uplink: Link,
    mac: Mac,
    mtu: u16,
    /// The pod's address there, if it has one.
    own: Option<IpAddr>,
}

/// The macvtap, while it is there.
pub struct Macvtap {
    choice: Choice,
    index: u32,
    queues: Vec<OwnedFd>,
    ear: Option<Ear>,
    links: Links,
    _owner: UnixListener,
}

impl Macvtap {
    /// Makes it: when this is done, the guest can start.
    ///
    /// # Errors
    ///
    /// When something is missing: what, and what to do. Nothing is left behind then.
    pub async fn start(settings: &Settings, wish: &Wish) -> anyhow::Result<Self> {
        if !right::is_admin() {
            return Err(refusal("a capability is missing: add --cap-add NET_ADMIN"));
        }
        let owner = link::own().await?;
        let links = Links::open()?;
        let name = settings.network.tap.0.as_str();
        links.clear(name).await?;
        nat::forget();
        let choice = Choice::make(settings, wish, &links.look().await?)?;
        let made = links.add_macvtap(name, choice.uplink.index, choice.mac, choice.mtu).await;
        made.map_err(|error| choice.explain(&error))?;
        match choice.set_up(&links, name, wish).await {
            Ok((index, queues)) => {
                let ear = choice.ear();
                Ok(Self { choice, index, queues, ear, links, _owner: owner })
            }
            Err(error) => {
                links.clear(name).await.ok();
                Err(error)
            }
        }
    }

    /// The queues, for `fd:N:N…` of `vmm`: processes that are started inherit them.
    #[must_use]
    pub fn take_queues(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.queues)
    }

    /// The address of the guest's card.
    #[must_use]
    pub fn mac(&self) -> Mac {
        self.choice.mac
    }

    /// The longest packet.
    #[must_use]
    pub fn mtu(&self) -> u16 {
        self.choice.mtu
    }

    /// The pod's interface beside which the guest is.
    #[must_use]
    pub fn uplink(&self) -> &str {
        &self.choice.uplink.name
    }

    /// The address that the guest was heard to have last; nothing where it is never heard.
    #[must_use]
    pub fn heard(&self) -> Option<Heard> {
        self.ear.as_ref().map(Ear::heard)
    }

    /// What there is to say about it, a sentence each.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let (name, mac) = (self.uplink(), self.mac().show());
        let mut notes = vec![format!(
            "the guest is a host of the network behind {name}, as {mac}, and asks for its address \
             there; the screen stays with the pod{}",
            self.choice.own.map(|own| format!(" at {own}")).unwrap_or_default()
        )];
        if self.ear.is_none() {
            let why = match self.choice.uplink.is_bridged {
                true => "without --cap-add NET_RAW the pod does not hear which address it has",
                false => "the pod and its guest do not hear each other on this interface",
            };
            notes.push(format!("{why}: /readyz says that it is ready as soon as it runs"));
        }
        notes
    }

    /// Hears where the guest is, until it is dropped.
    pub async fn serve(&self) {
        match &self.ear {
            Some(ear) => ear.listen().await,
            None => std::future::pending().await,
        }
    }

    /// Takes it away again.
    ///
    /// # Errors
    ///
    /// When it stays.
    pub async fn end(self) -> anyhow::Result<()> {
        drop(self.queues);
        // Somebody may have taken it away before us.
        let pod = self.links.look().await?;
        if !pod.links.iter().any(|link| link.index == self.index) {
            return Ok(());
        }
        self.links.delete(self.index).await
    }
}

impl Choice {
    fn make(settings: &Settings, wish: &Wish, pod: &Pod) -> anyhow::Result<Self> {
        let network = &settings.network;
        let uplink = pod.uplink(network.uplink.as_ref().map(|it| it.0.as_str()))?;
        let Link { name, mtu: room, .. } = uplink;
        if let Some(kind @ (InfoKind::IpVlan | InfoKind::IpVtap)) = &uplink.kind {
            let sentence = format!(
                "DHCP=Y: {name} is an {kind}, whose hosts share one card, so that the guest could \
                 have none of its own: make the network with the driver macvlan, or leave DHCP out"
            );
            return Err(Failure::new(Status::Unsupported, sentence));
        }
        let mtu = network.mtu.map_or(*room, |it| it.0);
        if mtu > *room {
            let sentence = format!("MTU={mtu}: {name} takes {room}: leave MTU out");
            return Err(Failure::new(Status::Network, sentence));
        }
        let own = pod.addresses.iter().find(|it| it.0 == uplink.index && it.1.is_ipv4());
        Ok(Self {
            mac: nat::guest_mac(settings, &wish.pod)?,
            // What virtio can say.
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            own: own.map(|it| it.1),
            uplink: uplink.clone(),
        })
    }

    /// Opens its queues and sets it up.
    async fn set_up(
        &self,
        links: &Links,
        name: &str,
        wish: &Wish,
    ) -> anyhow::Result<(u32, Vec<OwnedFd>)> {
        let pod = links.look().await?;
        let found = pod.find(name).ok_or_else(|| refusal(format!("{name} is gone")))?;
        let queues = node::open(found, &wish.folder, wish.pairs)?;
        links.raise(found.index).await.map_err(|error| self.explain(&error))?;
        Ok((found.index, queues))
    }

    /// Only neighbours on the same card hear each other.
    fn ear(&self) -> Option<Ear> {
        if !self.uplink.is_bridged {
            return None;
        }
        let ear = Ear::open(self.mac, self.uplink.index);
        ear.inspect_err(|error| tracing::debug!("ARP: {error}")).ok()
    }

    /// Why there can be none, and what to do.
    fn explain(&self, error: &io::Error) -> anyhow::Error {
        let name = &self.uplink.name;
        refusal(match error.kind() {
            io::ErrorKind::Unsupported => {
                "the kernel has no macvtap: load the module `macvtap` on the host".to_owned()
            }
            io::ErrorKind::AddrInUse => format!(
                "another one on {name} has the card {}: give each guest a MAC of its own",
                self.mac.show()
            ),
            io::ErrorKind::InvalidInput => format!(
                "{name} is no interface for further cards ({error}): it must be a macvlan or a \
                 card of Ethernet; DEV names another one"
            ),
            io::ErrorKind::ResourceBusy => format!(
                "{name} is part of a bridge, a bond or a passed-through card: DEV names another one"
            ),
            _ => format!("no macvtap on {name}: {error}"),
        })
    }
}

/// One sentence, with the status of the reference.
fn refusal(sentence: impl AsRef<str>) -> anyhow::Error {
    Failure::new(Status::Dhcp, format!("DHCP=Y: {}", sentence.as_ref()))
}

#[cfg(test)]
mod test {
    use super::*;

    fn chosen(kind: Option<InfoKind>, words: &[(&str, &str)]) -> anyhow::Result<Choice> {
        let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let settings = crate::settings::environment::read(&environment)?.settings;
        let eth0 = Link { index: 2, name: "eth0".into(), mtu: 1400, kind, is_bridged: false };
        let addresses = vec![(2, "fe80::1".parse()?, 64), (2, "10.0.0.9".parse()?, 24)];
        let pod = Pod { links: vec![eth0], addresses, default: Some(2), ..Pod::default() };
        let wish = Wish { pairs: 1, pod: "windows".into(), folder: "/".into() };
        Choice::make(&settings, &wish, &pod)
    }

    #[test]
    fn only_an_interface_that_takes_further_cards_will_do() {
        let mac = ("MAC", "02:00:00:00:00:09");
        for kind in [None, Some(InfoKind::MacVlan), Some(InfoKind::Veth)] {
            let choice = chosen(kind, &[mac]).unwrap();
            assert_eq!((choice.mtu, choice.own), (1400, "10.0.0.9".parse().ok()));
        }
        let error = chosen(Some(InfoKind::IpVlan), &[mac]).err().unwrap();
        assert_eq!(Status::of(&error), Status::Unsupported);
        assert!(error.to_string().starts_with("DHCP=Y: eth0 is an ipvlan"), "{error}");
        assert_eq!(chosen(None, &[mac, ("MTU", "1300")]).unwrap().mtu, 1300);
        let error = chosen(None, &[mac, ("MTU", "1500")]).err().unwrap();
        assert!(error.to_string().starts_with("MTU=1500: eth0 takes 1400"), "{error}");
    }
}
