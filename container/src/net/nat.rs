//! A tap of the pod's own, with address translation: the guest has an address of a small network,
//! all ports of the pod but a few are the guest's, and outside everything comes from the pod.
//!
//! The tap has the gateway's address itself; there is no bridge. `choice` says which addresses and
//! ports, `link` sets interfaces up, `rules` is the table of nftables, `service` answers the guest.
//!
//! Threats: the guest sends any frame, under any name. What has not its card's address and its own
//! is dropped before anything looks at it; of the pod itself it reaches DHCP, DNS and an echo, and
//! nothing of the loopback, the screen, or the ports that are kept.

mod choice;
mod link;
mod right;
mod rules;
mod service;

use std::fs;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use rustix::io::FdFlags;

pub use self::choice::guest_mac;
use self::choice::{Block, Kept, OLD_GATEWAY, OLD_MASK, Subnet};
use self::link::{Link, Links, Pod};
use self::rules::Rules;
use self::service::Service;
use crate::net::dhcp::Config;
use crate::net::dns::{DOMAIN, Local};
use crate::net::relay::Relay;
use crate::net::resolv::File;
use crate::settings::Settings;
use crate::settings::words::Mac;
use crate::status::{Failure, Status};

/// The longest packet of Ethernet, which needs no words.
const USUAL_MTU: u32 = 1500;
/// The name under which one of us has the pod's network at a time.
const OWNER: &str = "transom/nat";
/// Whether packets may pass through.
const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// What is asked besides the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Pairs of queues of the guest's card.
    pub pairs: u16,
    /// What the pod is called.
    pub pod: String,
    /// The file that names the pod's resolvers.
    pub resolv: PathBuf,
}

/// What was chosen, before anything is made.
struct Choice {
    subnet: Subnet,
    mac: Mac,
    gateway_mac: Mac,
    kept: Kept,
    mtu: u16,
    uplink: u32,
    notes: Vec<String>,
}

/// The network, while it is there.
pub struct Nat {
    config: Config,
    choice: Choice,
    tap: Tap,
    service: Service,
    relay: Arc<Relay>,
    links: Links,
    _owner: UnixListener,
}

/// The tap, and what goes away with it.
struct Tap {
    name: String,
    index: u32,
    queues: Vec<OwnedFd>,
    /// We let packets through, who did not pass before.
    forwards: bool,
}

impl Nat {
    /// Makes it: when this is done, the guest can start.
    ///
    /// # Errors
    ///
    /// When something is missing: what, and what to do. Nothing is left behind then.
    pub async fn start(settings: &Settings, wish: &Wish) -> anyhow::Result<Self> {
        right::check()?;
        let owner = own()?;
        let links = Links::open()?;
        let name = settings.network.tap.0.as_str();
        clear(&links, name).await?;
        let choice = Choice::make(settings, wish, &links.look().await?)?;
        let file = File::new(&wish.resolv);
        let local = Local {
            gateway: choice.subnet.gateway,
            guest: choice.subnet.guest,
            host: settings.account.host.as_ref().map_or(&settings.pod.app.0, |it| &it.0).clone(),
        };
        let relay = Arc::new(Relay::new(local, file));
        let config = choice.config(&relay);
        let mut tap = Tap {
            name: name.to_owned(),
            index: 0,
            queues: vmm::tap::make(name, wish.pairs, choice.mtu)?,
            forwards: false,
        };
        let ports = choice::loopback_ports(settings, &choice.kept);
        let set_up = async {
            tap.set_up(&links, &choice).await?;
            Service::open(name, choice.subnet, &ports).await
        };
        match set_up.await {
            Ok(service) => Ok(Self { config, choice, tap, service, relay, links, _owner: owner }),
            Err(error) => {
                tap.take_away(&links).await.ok();
                Err(error)
            }
        }
    }

    /// The tap's queues, for `fd:N:N…` of `vmm`: processes that are started inherit them.
    #[must_use]
    pub fn queues(&self) -> &[OwnedFd] {
        &self.tap.queues
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

    /// The guest's address.
    #[must_use]
    pub fn guest(&self) -> Ipv4Addr {
        self.choice.subnet.guest
    }

    /// The pod's address, as the guest sees it.
    #[must_use]
    pub fn gateway(&self) -> Ipv4Addr {
        self.choice.subnet.gateway
    }

    /// What there is to say about it, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.choice.notes
    }

    /// Serves the guest, and who is in the pod, until it is dropped.
    pub async fn serve(&self) {
        self.service.run(&self.config, &self.relay).await;
    }

    /// Takes everything away again.
    ///
    /// # Errors
    ///
    /// When something stays.
    pub async fn end(self) -> anyhow::Result<()> {
        drop(self.service);
        self.tap.take_away(&self.links).await
    }
}

/// One of us at a time has the pod's network. The kernel forgets this name when its owner dies.
fn own() -> anyhow::Result<UnixListener> {
    let name = SocketAddr::from_abstract_name(OWNER).context("the name of the owner")?;
    UnixListener::bind_addr(&name).map_err(|_| {
        Failure::new(
            Status::Network,
            "the pod's network has another Transom already: give each a pod of its own, or say \
             NETWORK=user",
        )
    })
}

/// Takes away what a killed predecessor has left. Its rules are replaced later.
async fn clear(links: &Links, name: &str) -> anyhow::Result<()> {
    let pod = links.look().await?;
    match pod.find(name) {
        None => Ok(()),
        Some(Link { is_tun: true, index, .. }) => links.delete(*index).await,
        Some(_) => {
            let sentence = format!("TAP={name}: the pod has another interface of this name");
            Err(Failure::new(Status::Network, sentence))
        }
    }
}

impl Choice {
    fn make(settings: &Settings, wish: &Wish, pod: &Pod) -> anyhow::Result<Self> {
        let network = &settings.network;
        let uplink = pod.uplink(network.uplink.as_ref().map(|it| it.0.as_str()))?;
        let name = &uplink.name;
        if link::is_card(name) {
            let sentence = format!(
                "{name} is a card of the host: NETWORK=nat is not for the host's own network: \
                 leave out --network host, or say NETWORK=user"
            );
            return Err(Failure::new(Status::Unsupported, sentence));
        }
        let address = pod.address(uplink).ok_or_else(|| {
            let sentence = format!("{name} has no IPv4 address: name another one with DEV");
            Failure::new(Status::Network, sentence)
        })?;
        let used = pod.used();
        let subnet = Subnet::choose(network.address, network.mask.0, address, &used)?;
        let mac = guest_mac(settings, &wish.pod)?;
        let said = network.mtu.map(|it| it.0);
        let mtu = said.unwrap_or(uplink.mtu.min(USUAL_MTU));
        let mut notes = Vec::new();
        if pod.has_ipv6(uplink) {
            notes.push("the guest has IPv4 only: the pod's IPv6 stays with the pod".to_owned());
        }
        Ok(Self {
            subnet,
            mac,
            gateway_mac: choice::gateway_mac(mac),
            kept: Kept::of(settings),
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            uplink: uplink.index,
            notes,
        })
    }

    /// What the guest is told.
    fn config(&self, relay: &Relay) -> Config {
        let search = relay.resolv().search.clone();
        Config {
            mac: self.mac.0,
            address: self.subnet.guest,
            mask: self.subnet.mask,
            gateway: self.subnet.gateway,
            dns: self.subnet.gateway,
            host: relay.host().to_owned(),
            search: if search.is_empty() { vec![DOMAIN.to_owned()] } else { search },
            mtu: (u32::from(self.mtu) != USUAL_MTU).then_some(self.mtu),
        }
    }
}

impl Tap {
    /// Gives the tap its addresses, and packets their rules.
    async fn set_up(&mut self, links: &Links, choice: &Choice) -> anyhow::Result<()> {
        let pod = links.look().await?;
        let link = pod.find(&self.name).with_context(|| format!("{} is gone", self.name))?;
        self.index = link.index;
        let Subnet { gateway, mask, .. } = choice.subnet;
        // Other versions would be another way to the pod; the rules stop them where this fails.
        let no_ipv6 = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name);
        fs::write(no_ipv6, "1").ok();
        links.set_mac(self.index, choice.gateway_mac).await?;
        links.add(self.index, gateway, mask).await?;
        if !pod.uses(Block::new(OLD_GATEWAY, OLD_MASK)) && gateway != OLD_GATEWAY {
            links.add(self.index, OLD_GATEWAY, OLD_MASK).await?;
        }
        let (tap, mac, subnet) = (self.name.as_str(), choice.mac, choice.subnet);
        rules::apply(&Rules { tap, mac, subnet, kept: &choice.kept }.text())?;
        self.forward(links, choice.uplink).await?;
        for queue in &self.queues {
            rustix::io::fcntl_setfd(queue, FdFlags::empty()).context("a tap to inherit")?;
        }
        Ok(())
    }

    /// Lets packets through, if they are not already.
    async fn forward(&mut self, links: &Links, uplink: u32) -> anyhow::Result<()> {
        if fs::read_to_string(FORWARD).is_ok_and(|it| it.trim() == "1") {
            return Ok(());
        }
        if fs::write(FORWARD, "1").is_ok() {
            self.forwards = true;
            return Ok(());
        }
        // What is read-only as a file is a property of these two interfaces all the same.
        for index in [self.index, uplink] {
            links.forward(index).await.map_err(|error| {
                let sentence = format!(
                    "net.ipv4.ip_forward is 0 and cannot be changed ({error:#}): add --sysctl \
                     net.ipv4.ip_forward=1, or say NETWORK=user"
                );
                Failure::new(Status::Network, sentence)
            })?;
        }
        Ok(())
    }

    /// Takes away what was made, as far as it was.
    async fn take_away(self, links: &Links) -> anyhow::Result<()> {
        // The next program does not get them.
        drop(self.queues);
        let rules = rules::remove();
        if self.forwards {
            fs::write(FORWARD, "0").context(FORWARD)?;
        }
        // Somebody who was started may have a queue still.
        let pod = links.look().await?;
        let left = pod.find(&self.name).filter(|link| link.index == self.index);
        let gone = match left {
            Some(link) => links.delete(link.index).await,
            None => Ok(()),
        };
        rules.and(gone)
    }
}
