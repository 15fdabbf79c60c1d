//! The guest's network: the configured kind, or the next best that this pod allows.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context as _, bail};
use tokio::net::{TcpSocket, TcpStream};
use tokio::task::JoinHandle;

use super::machine::NetworkCard;
use super::runtime_folder::RuntimeFolder;
use crate::net::macvtap::{self, LearnedAddress, Macvtap};
use crate::net::nat::{Nat, Parameters, guest_mac};
use crate::net::resolv::Resolv;
use crate::net::user::UserNetwork;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::{NetworkKind, Settings};
use crate::shared_folder::Connector;
use crate::story::Story;

const RESOLV: &str = "/etc/resolv.conf";
/// Maximum queue pairs. More do not make a guest faster.
const MAX_PAIRS: u32 = 8;

pub enum Network {
    None,
    /// User-mode network: connections of the pod itself.
    User(UserNetwork),
    /// A tap with address translation, the task that answers the guest, and the queues until the
    /// machine has them.
    Nat(Arc<Nat>, JoinHandle<()>, Vec<OwnedFd>),
    /// A card on the pod's own network, the task that learns its address, and the queues.
    Macvtap(Arc<Macvtap>, JoinHandle<()>, Vec<OwnedFd>),
}

/// The guest's address, seen from the pod.
#[derive(Debug)]
pub enum GuestAddress {
    Fixed(IpAddr),
    /// An address that the guest chose, and the interface that reaches it.
    Learned(LearnedAddress, String),
    /// Unknown: the pod does not see the guest's packets.
    Unknown,
}

impl GuestAddress {
    /// Connects to a port of the guest.
    pub async fn connect(&self, port: u16) -> anyhow::Result<TcpStream> {
        let stream = match self {
            Self::Fixed(address) => TcpStream::connect((*address, port)).await?,
            Self::Learned(heard, interface) => {
                let address = *heard.borrow();
                let address = address.context("its address is not known yet")?;
                // The guest chooses its address, so the connection is bound to its interface.
                let socket = TcpSocket::new_v4()?;
                socket.bind_device(Some(interface.as_bytes()))?;
                socket.connect(SocketAddr::new(address.into(), port)).await?
            }
            Self::Unknown => bail!("the guest cannot be reached from the pod"),
        };
        stream.set_nodelay(true)?;
        Ok(stream)
    }
}

impl Network {
    /// Starts the network. If the configured kind is not possible, logs the reason and takes the
    /// next best.
    ///
    /// Fails if `DHCP=Y` is set and not possible: it has no next best.
    pub async fn make(
        input: &ParsedEnvironment,
        processors: u32,
        runtime_folder: &RuntimeFolder,
        story: &Story,
        share: Option<Connector>,
    ) -> anyhow::Result<Self> {
        let settings = &input.settings;
        let kind = settings.network.kind;
        if settings.network.dhcp {
            story.step("Preparing the network…");
            let pairs = pairs(processors);
            let parameters = macvtap::Parameters {
                pairs,
                pod: host_name(),
                folder: runtime_folder.path().to_owned(),
            };
            let mut card = Macvtap::start(settings, &parameters).await?;
            let queues = card.take_queues();
            let card = Arc::new(card);
            card.notes().iter().for_each(|note| story.info(note));
            let serves = card.clone();
            let served = tokio::spawn(async move { serves.serve().await });
            return Ok(Self::Macvtap(card, served, queues));
        }
        if kind != NetworkKind::None && Resolv::read(&resolv_conf()).servers.is_empty() {
            story.info(&format!("no name server is in {RESOLV}: the guest cannot resolve names"));
        }
        if kind == NetworkKind::Nat {
            story.step("Preparing the network…");
            match nat(settings, processors, share.clone()).await {
                Ok(mut nat) => {
                    nat.notes().iter().for_each(|note| story.info(note));
                    let (guest, gateway) = (nat.guest(), nat.gateway());
                    story.info(&format!("the guest is {guest}, its gateway {gateway}"));
                    let queues = nat.take_queues();
                    let nat = Arc::new(nat);
                    let serves = nat.clone();
                    let served = tokio::spawn(async move { serves.serve().await });
                    return Ok(Self::Nat(nat, served, queues));
                }
                Err(error) => {
                    let line = format!("{error:#}: using NETWORK=user instead");
                    let asked_for = input.names.contains("NETWORK");
                    if asked_for { story.warn(&line) } else { story.info(&line) }
                }
            }
        }
        if kind == NetworkKind::None {
            return Ok(Self::None);
        }
        Ok(match UserNetwork::start(settings, Path::new("/"), runtime_folder.path(), share) {
            Ok(user) => {
                story.info(&user.summary);
                Self::User(user)
            }
            Err(error) => {
                story.warn(&format!("the guest has no network: {error:#}"));
                Self::None
            }
        })
    }

    pub fn card(&self, settings: &Settings) -> anyhow::Result<Option<NetworkCard>> {
        Ok(match self {
            Self::None => None,
            Self::User(user) => Some(NetworkCard {
                backend: host::net::Network::Passt(user.socket.clone()),
                mac: guest_mac(settings, &host_name())?,
                mtu: Some(user.mtu),
                pairs: 1,
            }),
            Self::Nat(nat, _, queues) => {
                let (backend, pairs) = inherited(queues);
                Some(NetworkCard { backend, mac: nat.mac(), mtu: Some(nat.mtu()), pairs })
            }
            Self::Macvtap(card, _, queues) => {
                let (backend, pairs) = inherited(queues);
                Some(NetworkCard { backend, mac: card.mac(), mtu: Some(card.mtu()), pairs })
            }
        })
    }

    pub fn guest(&self) -> Option<GuestAddress> {
        match self {
            Self::None => None,
            // Forwarded ports are on the loopback.
            Self::User(_) => Some(GuestAddress::Fixed(Ipv4Addr::LOCALHOST.into())),
            Self::Nat(nat, ..) => Some(GuestAddress::Fixed(nat.guest().into())),
            Self::Macvtap(card, ..) => Some(match card.learned_address() {
                Some(address) => GuestAddress::Learned(address, card.uplink().to_owned()),
                None => GuestAddress::Unknown,
            }),
        }
    }

    /// Closes the pod's copies of the queues: the tap disappears when the machine ends.
    pub fn close_queues(&mut self) {
        if let Self::Nat(_, _, queues) | Self::Macvtap(_, _, queues) = self {
            queues.clear();
        }
    }

    pub async fn end(self) {
        let ended = match self {
            Self::None => Ok(()),
            Self::User(user) => {
                user.end();
                Ok(())
            }
            Self::Nat(nat, served, _) => match stop_serving(nat, served).await {
                Some(nat) => nat.end().await,
                None => Ok(()),
            },
            Self::Macvtap(card, served, _) => match stop_serving(card, served).await {
                Some(card) => card.end().await,
                None => Ok(()),
            },
        };
        if let Err(error) = ended {
            tracing::warn!("a part of the network cannot be removed: {error:#}");
        }
    }
}

/// Stops the serving task and returns the network, which nothing shares any more.
async fn stop_serving<T>(shared: Arc<T>, served: JoinHandle<()>) -> Option<T> {
    served.abort();
    served.await.ok();
    Arc::into_inner(shared)
}

/// The queues as a network of the machine, and the number of pairs.
fn inherited(queues: &[OwnedFd]) -> (host::net::Network, u16) {
    let numbers = queues.iter().map(|queue| queue.as_raw_fd()).collect();
    (host::net::Network::Fd(numbers), u16::try_from(queues.len()).unwrap_or(u16::MAX))
}

fn pairs(processors: u32) -> u16 {
    u16::try_from(processors.clamp(1, MAX_PAIRS)).unwrap_or(1)
}

async fn nat(
    settings: &Settings,
    processors: u32,
    share: Option<Connector>,
) -> anyhow::Result<Nat> {
    let pairs = pairs(processors);
    let etc = "/etc".into();
    Nat::start(settings, &Parameters { pairs, pod: host_name(), etc, share }).await
}

/// Empty if the file cannot be read.
fn resolv_conf() -> String {
    std::fs::read_to_string(RESOLV).unwrap_or_default()
}

fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
