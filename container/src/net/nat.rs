//! A tap of the pod's own, with address translation: the guest has an address of a small network,
//! all ports of the pod but a few are the guest's, and outside everything comes from the pod.
//!
//! The tap has the gateway's address itself; there is no bridge. `choice` says which addresses and
//! ports, `six` is the router of IPv6, `rules` is the table of nftables, `service` answers the
//! guest.
//!
//! Threats: the guest sends any frame, under any name. What has not its card's address and its own
//! is dropped before anything looks at it; of the pod itself it reaches DHCP, DNS and an echo, and
//! nothing of the loopback, the screen, or the ports that are kept.

mod choice;
mod rules;
mod service;
mod six;

use std::fs;
use std::io::ErrorKind;
use std::net::Ipv4Addr;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;

use anyhow::Context;
use host::mac::Mac;
use rustix::io::FdFlags;

pub use self::choice::guest_mac;
use self::choice::{Kept, OLD_GATEWAY, OLD_MASK, Subnet};
use self::rules::{Rules, Table};
use self::service::Service;
use self::six::{Prefix, Router};
use crate::net::dhcp::Config;
use crate::net::dns::{DOMAIN, Local};
use crate::net::link::{self, Block, Link, Links, Pod};
use crate::net::relay::Relay;
use crate::net::resolv::{File, Resolv};
use crate::net::right;
use crate::settings::Settings;
use crate::status::{Failure, Status};

/// The longest packet of Ethernet, which needs no words.
const USUAL_MTU: u32 = 1500;
/// The longest packet of a link with IPv6 is at least this.
const LEAST_V6: u32 = 1280;
/// Whether packets may pass through.
const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// What is asked besides the settings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wish {
    /// Pairs of queues of the guest's card.
    pub pairs: u16,
    /// What the pod is called.
    pub pod: String,
    /// The folder with `resolv.conf` and `hosts`, which name hosts for the pod.
    pub etc: PathBuf,
}

/// What was chosen, before anything is made.
struct Choice {
    subnet: Subnet,
    mac: Mac,
    gateway_mac: Mac,
    kept: Kept,
    /// The gateway may have its old address, too.
    old: bool,
    mtu: u16,
    uplink: Link,
    /// Where the pod has IPv6.
    prefix: Option<Prefix>,
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
    table: Table,
    _owner: UnixListener,
}

/// The tap, and what goes away with it.
struct Tap {
    name: String,
    index: u32,
    queues: Vec<OwnedFd>,
    /// We let packets through, who did not pass before: where that is undone.
    forwards: Option<Forwards>,
    /// By IPv6.
    router: Option<Router>,
}

/// Packets may pass through until it is dropped.
struct Forwards(fs::File);

impl Drop for Forwards {
    fn drop(&mut self) {
        match self.0.write_all_at(b"0", 0) {
            Ok(_) => {}
            // The pod has given up that right, and its network, which is its own, goes with it.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                tracing::debug!("{FORWARD} stays 1: {error}");
            }
            Err(error) => tracing::warn!("something of the network stays: {FORWARD}: {error}"),
        }
    }
}

impl Nat {
    /// Makes it: when this is done, the guest can start.
    ///
    /// # Errors
    ///
    /// When something is missing: what, and what to do. Nothing is left behind then.
    pub async fn start(settings: &Settings, wish: &Wish) -> anyhow::Result<Self> {
        right::check_tap()?;
        let owner = link::own().await?;
        let links = Links::open()?;
        let name = settings.network.tap.0.as_str();
        links.clear(name).await?;
        let mut choice = Choice::make(settings, wish, &links.look().await?)?;
        let local = Local {
            gateway: choice.subnet.gateway,
            guest: choice.subnet.guest,
            outside: link::default_gateway(),
            host: settings.account.host.as_ref().map_or(&settings.pod.app.0, |it| &it.0).clone(),
        };
        let relay = Arc::new(Relay::new(local, &wish.etc));
        let config = choice.config(&relay);
        let mut tap = Tap {
            name: name.to_owned(),
            index: 0,
            queues: host::net::tap::make(name, wish.pairs, choice.mtu)?,
            forwards: None,
            router: None,
        };
        let ports = choice::loopback_ports(settings, &choice.kept);
        let set_up = async {
            let table = Table::watch(&owner)?;
            tap.set_up(&links, &mut choice).await?;
            Ok((table, Service::open(name, choice.subnet, &ports).await?))
        };
        match set_up.await {
            Ok((table, service)) => {
                Ok(Self { config, choice, tap, service, relay, links, table, _owner: owner })
            }
            Err(error) => {
                tap.take_away(&links).await.ok();
                Err(error)
            }
        }
    }

    /// The tap's queues, for `fd:N:N…` of `vmm`: processes that are started inherit them. The tap
    /// is there as long as somebody has one.
    #[must_use]
    pub fn take_queues(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.tap.queues)
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
        let router = async {
            if let Some(router) = &self.tap.router {
                router.run().await;
            }
        };
        tokio::join!(self.service.run(&self.config, &self.relay), router);
    }

    /// Takes everything away again.
    ///
    /// # Errors
    ///
    /// When something stays.
    pub async fn end(self) -> anyhow::Result<()> {
        drop(self.service);
        let gone = self.tap.take_away(&self.links).await;
        self.table.remove().and(gone)
    }
}

/// Takes away the rules that a killed predecessor has left, where there is another network now.
pub(super) fn forget() {
    // Where they cannot be taken away they were not made either.
    if let Err(error) = rules::apply(rules::REPLACE) {
        tracing::debug!("{error:#}");
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
        let resolv = File::new(wish.etc.join("resolv.conf"), Resolv::read).now();
        let used = choice::used(pod, &resolv);
        let subnet = Subnet::choose(network.address, network.mask.0, address, &used)?;
        let mac = guest_mac(settings, &wish.pod)?;
        let said = network.mtu.map(|it| it.0);
        let mtu = said.unwrap_or(uplink.mtu.min(USUAL_MTU));
        let prefix = Prefix::choose(pod, uplink, mac).filter(|_| mtu >= LEAST_V6);
        let kept = Kept::of(settings);
        let mut notes = choice::left_out(settings, &kept);
        if prefix.is_none() && pod.has_ipv6(uplink) {
            notes.push(
                "the guest has IPv4 only: by IPv6 its desktop and USER_PORTS are reached"
                    .to_owned(),
            );
        }
        Ok(Self {
            subnet,
            mac,
            gateway_mac: choice::gateway_mac(mac),
            kept,
            mtu: u16::try_from(mtu).unwrap_or(u16::MAX),
            old: choice::taken(&used, Block::new(OLD_GATEWAY, OLD_MASK)).is_none(),
            uplink: uplink.clone(),
            prefix,
            notes,
        })
    }

    /// What the guest is told.
    fn config(&self, relay: &Relay) -> Config {
        let search = relay.resolv().search.clone();
        Config {
            mac: self.mac,
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
    async fn set_up(&mut self, links: &Links, choice: &mut Choice) -> anyhow::Result<()> {
        let pod = links.look().await?;
        let link = pod.find(&self.name).with_context(|| format!("{} is gone", self.name))?;
        self.index = link.index;
        let Subnet { gateway, mask, .. } = choice.subnet;
        links.set_mac(self.index, choice.gateway_mac).await?;
        choice.prefix = self.route(links, choice).await;
        if choice.prefix.is_none() {
            // It would be another way to the pod; the rules stop it where this fails.
            let no_ipv6 = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name);
            fs::write(no_ipv6, "1").ok();
        }
        links.add(self.index, gateway, mask).await?;
        if choice.old && gateway != OLD_GATEWAY {
            links.add(self.index, OLD_GATEWAY, OLD_MASK).await?;
        }
        let rules = Rules {
            tap: &self.name,
            mac: choice.mac,
            subnet: choice.subnet,
            prefix: choice.prefix,
            kept: &choice.kept,
        };
        rules::apply(&rules.text())?;
        self.forward(links, choice.uplink.index).await?;
        for queue in &self.queues {
            rustix::io::fcntl_setfd(queue, FdFlags::empty()).context("a tap to inherit")?;
        }
        Ok(())
    }

    /// Gives the guest IPv6, if the pod has it and may pass it on.
    async fn route(&mut self, links: &Links, choice: &mut Choice) -> Option<Prefix> {
        let prefix = choice.prefix?;
        let told = (prefix, choice.gateway_mac, choice.mtu);
        let uplink = &choice.uplink.name;
        match Router::open(links, (&self.name, self.index), told, uplink).await {
            Ok(router) => {
                self.router = Some(router);
                let network = prefix.0;
                choice.notes.push(format!("the guest has IPv6 in {network}/{}", six::MASK));
                Some(prefix)
            }
            Err(error) => {
                choice.notes.push(format!("the guest has IPv4 only: {error:#}"));
                None
            }
        }
    }

    /// Lets packets through, if they are not already.
    async fn forward(&mut self, links: &Links, uplink: u32) -> anyhow::Result<()> {
        if fs::read_to_string(FORWARD).is_ok_and(|it| it.trim() == "1") {
            return Ok(());
        }
        let file = fs::OpenOptions::new().write(true).open(FORWARD);
        if let Ok(file) = file
            && file.write_all_at(b"1", 0).is_ok()
        {
            self.forwards = Some(Forwards(file));
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
        drop(self.router);
        drop(self.forwards);
        // Somebody who was started may have a queue still.
        let pod = links.look().await?;
        let left = pod.find(&self.name).filter(|link| link.index == self.index);
        match left {
            Some(link) => links.delete(link.index).await,
            None => Ok(()),
        }
    }
}
