//! A tap interface of the pod, with address translation. The guest has an address in a small
//! network. All ports of the pod except a few are forwarded to it, and its own connections leave
//! with the pod's address.
//!
//! There is no bridge: the tap interface has the gateway's address. `choice` chooses addresses and
//! ports, `ipv6` is the IPv6 router, `rules` is the nftables table, and `service` has the servers
//! for the guest.
//!
//! Threats: the guest sends any frame, with any source. Frames without its MAC and IP addresses are
//! dropped first. The guest reaches only DHCP, DNS, ping and the shared folder of the pod, and
//! neither its loopback nor the screen nor the kept ports.

mod choice;
mod ipv6;
mod rules;
mod service;

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

use self::choice::{KeptPorts, OLD_MASK, Subnet};
pub use self::choice::{OLD_GATEWAY, guest_mac};
use self::ipv6::{Prefix, Router};
use self::rules::{Rules, Table};
use self::service::Service;
use crate::net::capabilities;
use crate::net::dhcp::Config;
use crate::net::dns::{DOMAIN, LocalNames};
use crate::net::link::{self, Block, Link, Links, PodNetwork};
use crate::net::relay::Relay;
use crate::net::resolv::{File, Resolv};
use crate::settings::Settings;
use crate::shared_folder::Connector;
use crate::status::{Failure, Status};

/// The MTU of Ethernet, in bytes. Guests assume it if DHCP does not set another one.
const DEFAULT_MTU: u32 = 1500;
const MIN_MTU_V6: u32 = 1280;
const FORWARD: &str = "/proc/sys/net/ipv4/ip_forward";

/// Parameters besides the settings.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Number of queue pairs of the guest's card.
    pub pairs: u16,
    pub pod: String,
    /// Folder with the pod's `resolv.conf` and `hosts`.
    pub etc: PathBuf,
    /// The server of the shared folder, at the gateway's addresses.
    pub share: Option<Connector>,
}

/// Addresses and ports, chosen before anything is created.
struct Plan {
    subnet: Subnet,
    mac: Mac,
    gateway_mac: Mac,
    kept: KeptPorts,
    /// Whether the gateway also gets its old address.
    old: bool,
    mtu: u16,
    uplink: Link,
    /// The guest's IPv6 network, if the pod has IPv6.
    prefix: Option<Prefix>,
    notes: Vec<String>,
}

pub struct Nat {
    config: Config,
    plan: Plan,
    tap: Tap,
    service: Service,
    relay: Arc<Relay>,
    links: Links,
    table: Table,
    _owner: UnixListener,
}

/// The tap interface, and everything that is removed with it.
struct Tap {
    name: String,
    index: u32,
    queues: Vec<OwnedFd>,
    /// Set if we have enabled forwarding.
    forwarding: Option<Forwarding>,
    router: Option<Router>,
}

/// Disables IPv4 forwarding when it is dropped.
struct Forwarding(fs::File);

impl Drop for Forwarding {
    fn drop(&mut self) {
        match self.0.write_all_at(b"0", 0) {
            Ok(_) => {}
            // The pod has dropped this privilege. Its network namespace ends with it anyway.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                tracing::debug!("{FORWARD} stays 1: {error}");
            }
            Err(error) => tracing::warn!("IPv4 forwarding stays enabled: {FORWARD}: {error}"),
        }
    }
}

impl Nat {
    /// Creates the network. The guest can start after this. After an error, nothing is left behind.
    pub async fn start(settings: &Settings, parameters: &Parameters) -> anyhow::Result<Self> {
        capabilities::check_tap()?;
        let owner = link::claim_network().await?;
        let links = Links::open()?;
        let name = settings.network.tap.0.as_str();
        links.clear(name).await?;
        let mut plan = Plan::make(settings, parameters, &links.read().await?)?;
        let local = LocalNames {
            gateway: plan.subnet.gateway,
            guest: plan.subnet.guest,
            default_gateway: link::default_gateway(),
            host: settings.account.host.as_ref().map_or(&settings.pod.app.0, |it| &it.0).clone(),
        };
        let relay = Arc::new(Relay::new(local, &parameters.etc));
        let config = plan.config(&relay);
        let mut tap = Tap {
            name: name.to_owned(),
            index: 0,
            queues: host::net::tap::create(name, parameters.pairs, plan.mtu)?,
            forwarding: None,
            router: None,
        };
        let ports = choice::loopback_ports(settings, &plan.kept);
        let set_up = async {
            let table = Table::watch(&owner)?;
            tap.set_up(&links, &mut plan, parameters.share.is_some()).await?;
            let mut service = Service::open(name, plan.subnet, &ports).await?;
            if let Some(connector) = &parameters.share {
                service.share(connector.clone(), plan.old).await;
            }
            Ok((table, service))
        };
        match set_up.await {
            Ok((table, service)) => {
                Ok(Self { config, plan, tap, service, relay, links, table, _owner: owner })
            }
            Err(error) => {
                tap.remove(&links).await.ok();
                Err(error)
            }
        }
    }

    /// Takes the tap's queues, for `fd:N:N…` of `vmm`. Child processes inherit them. The tap exists
    /// as long as a process has one of them open.
    pub fn take_queues(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.tap.queues)
    }

    pub fn mac(&self) -> Mac {
        self.plan.mac
    }

    /// The name of the tap.
    pub fn interface(&self) -> &str {
        &self.tap.name
    }

    pub fn mtu(&self) -> u16 {
        self.plan.mtu
    }

    pub fn guest(&self) -> Ipv4Addr {
        self.plan.subnet.guest
    }

    /// The pod's address, as the guest sees it.
    pub fn gateway(&self) -> Ipv4Addr {
        self.plan.subnet.gateway
    }

    /// Notes for the user, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.plan.notes
    }

    /// Serves the guest, and clients on the pod's loopback, until the future is dropped.
    pub async fn serve(&self) {
        let router = async {
            if let Some(router) = &self.tap.router {
                router.run().await;
            }
        };
        tokio::join!(self.service.run(&self.config, &self.relay), router);
    }

    /// Removes the network.
    pub async fn end(self) -> anyhow::Result<()> {
        drop(self.service);
        let removed = self.tap.remove(&self.links).await;
        self.table.remove().and(removed)
    }
}

/// Removes the rules that a killed predecessor left, before another kind of network starts.
pub(super) fn remove_old_rules() {
    // A pod that may not remove them could not have created them either.
    if let Err(error) = rules::apply(rules::REPLACE) {
        tracing::debug!("{error:#}");
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
        let name = &uplink.name;
        if link::is_card(name) {
            let sentence = format!(
                "{name} is a card of the host: NETWORK=nat does not work on the host's own \
                 network: leave out --network host, or set NETWORK=user"
            );
            return Err(Failure::new(Status::Unsupported, sentence));
        }
        let address = pod.address(uplink).ok_or_else(|| {
            let sentence = format!("{name} has no IPv4 address: set DEV to another interface");
            Failure::new(Status::Network, sentence)
        })?;
        let resolv = File::new(parameters.etc.join("resolv.conf"), Resolv::read).now();
        let used = choice::used(pod, &resolv);
        let subnet = Subnet::choose(network.address, network.mask.0, address, &used)?;
        let mac = guest_mac(settings, &parameters.pod)?;
        let said = network.mtu.map(|it| it.0);
        let mtu = said.unwrap_or(uplink.mtu.min(DEFAULT_MTU));
        let prefix = Prefix::choose(pod, uplink, mac).filter(|_| mtu >= MIN_MTU_V6);
        let kept = KeptPorts::of(settings);
        let mut notes = choice::left_out(settings, &kept);
        if prefix.is_none() && pod.has_ipv6(uplink) {
            notes.push(
                "the guest has IPv4 only: by IPv6, clients reach only its desktop and USER_PORTS"
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
            mtu: (u32::from(self.mtu) != DEFAULT_MTU).then_some(self.mtu),
        }
    }
}

impl Tap {
    /// Adds addresses, rules and forwarding.
    async fn set_up(&mut self, links: &Links, plan: &mut Plan, share: bool) -> anyhow::Result<()> {
        let pod = links.read().await?;
        let link = pod.find(&self.name).with_context(|| format!("{} is gone", self.name))?;
        self.index = link.index;
        let Subnet { gateway, mask, .. } = plan.subnet;
        links.set_mac(self.index, plan.gateway_mac).await?;
        plan.prefix = self.route(links, plan).await;
        if plan.prefix.is_none() {
            // Link-local IPv6 would reach the pod. If this fails, the rules block it.
            let no_ipv6 = format!("/proc/sys/net/ipv6/conf/{}/disable_ipv6", self.name);
            fs::write(no_ipv6, "1").ok();
        }
        links.add(self.index, gateway, mask).await?;
        if plan.old && gateway != OLD_GATEWAY {
            links.add(self.index, OLD_GATEWAY, OLD_MASK).await?;
        }
        let rules = Rules {
            tap: &self.name,
            mac: plan.mac,
            subnet: plan.subnet,
            prefix: plan.prefix,
            kept: &plan.kept,
            share,
        };
        rules::apply(&rules.text())?;
        self.forward(links, plan.uplink.index).await?;
        for queue in &self.queues {
            rustix::io::fcntl_setfd(queue, FdFlags::empty()).context("flags of the tap")?;
        }
        Ok(())
    }

    /// Starts the IPv6 router, if the pod has IPv6 and may forward it.
    async fn route(&mut self, links: &Links, plan: &mut Plan) -> Option<Prefix> {
        let prefix = plan.prefix?;
        let config = ipv6::Config {
            tap: &self.name,
            index: self.index,
            prefix,
            mac: plan.gateway_mac,
            mtu: plan.mtu,
            uplink: &plan.uplink.name,
        };
        match Router::open(links, &config).await {
            Ok(router) => {
                self.router = Some(router);
                let network = prefix.0;
                plan.notes.push(format!("the guest has IPv6 in {network}/{}", ipv6::MASK));
                Some(prefix)
            }
            Err(error) => {
                plan.notes.push(format!("the guest has IPv4 only: {error:#}"));
                None
            }
        }
    }

    /// Enables IPv4 forwarding, if it is not enabled already.
    async fn forward(&mut self, links: &Links, uplink: u32) -> anyhow::Result<()> {
        if fs::read_to_string(FORWARD).is_ok_and(|it| it.trim() == "1") {
            return Ok(());
        }
        let file = fs::OpenOptions::new().write(true).open(FORWARD);
        if let Ok(file) = file
            && file.write_all_at(b"1", 0).is_ok()
        {
            self.forwarding = Some(Forwarding(file));
            return Ok(());
        }
        // The file is read-only, but netlink may enable forwarding for single interfaces.
        for index in [self.index, uplink] {
            links.forward(index).await.map_err(|error| {
                let sentence = format!(
                    "net.ipv4.ip_forward is 0 and cannot be changed ({error:#}): add --sysctl \
                     net.ipv4.ip_forward=1, or set NETWORK=user"
                );
                Failure::new(Status::Network, sentence)
            })?;
        }
        Ok(())
    }

    /// Removes the tap, and everything that `set_up` did.
    async fn remove(self, links: &Links) -> anyhow::Result<()> {
        // Programs that are started from now on do not inherit them.
        drop(self.queues);
        drop(self.router);
        drop(self.forwarding);
        // A child process may still have a queue open, which keeps the tap alive.
        let pod = links.read().await?;
        let remaining = pod.find(&self.name).filter(|link| link.index == self.index);
        match remaining {
            Some(link) => links.delete(link.index).await,
            None => Ok(()),
        }
    }
}
