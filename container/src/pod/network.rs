//! The guest's network: what the settings ask for, or the next best that this pod allows.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::machine::Cable;
use super::room::Room;
use crate::net::macvtap::{self, Heard, Macvtap};
use crate::net::nat::{Nat, Wish, guest_mac};
use crate::net::resolv::Resolv;
use crate::net::user::User;
use crate::settings::environment::Said;
use crate::settings::{Settings, Way};
use crate::story::Story;

/// Where the pod's resolvers are named.
const RESOLV: &str = "/etc/resolv.conf";
/// More queues than this serve no guest better.
const PAIRS: u32 = 8;

/// The network, as long as it is kept.
pub enum Network {
    /// There is none.
    None,
    /// Connections of the pod's own.
    User(User),
    /// A tap with address translation, what answers the guest, and the queues until the machine has
    /// them.
    Nat(Arc<Nat>, JoinHandle<()>, Vec<OwnedFd>),
    /// A card on the pod's own network, what hears its address, and the same queues.
    Macvtap(Arc<Macvtap>, JoinHandle<()>, Vec<OwnedFd>),
}

/// Where we reach the guest ourselves.
#[derive(Debug)]
pub enum Place {
    /// At this address.
    At(IpAddr),
    /// At the address that was heard last, by this interface.
    Heard(Heard, String),
    /// Nowhere: what it does on the network is not seen from here.
    Unseen,
}

impl Network {
    /// Makes it. What cannot be is said in a line, and the next best is taken.
    ///
    /// # Errors
    ///
    /// When the guest cannot be where `DHCP=Y` wants it: nothing is the next best to that.
    pub async fn make(
        said: &Said,
        processors: u32,
        room: &Room,
        story: &Story,
    ) -> anyhow::Result<Self> {
        let settings = &said.settings;
        let wish = settings.network.kind;
        if settings.network.dhcp {
            story.step("Preparing the network…");
            let pairs = pairs(processors);
            let wish = macvtap::Wish { pairs, pod: name(), folder: room.folder().to_owned() };
            let mut card = Macvtap::start(settings, &wish).await?;
            let queues = card.take_queues();
            let card = Arc::new(card);
            card.notes().iter().for_each(|note| story.tell(note));
            let serves = card.clone();
            let served = tokio::spawn(async move { serves.serve().await });
            return Ok(Self::Macvtap(card, served, queues));
        }
        if wish != Way::None && Resolv::read(&names()).servers.is_empty() {
            story.tell(&format!("no name server is in {RESOLV}: the guest finds no names"));
        }
        if wish == Way::Nat {
            story.step("Preparing the network…");
            match nat(settings, processors).await {
                Ok(mut nat) => {
                    nat.notes().iter().for_each(|note| story.tell(note));
                    let (guest, gateway) = (nat.guest(), nat.gateway());
                    story.tell(&format!("the guest is {guest}, its gateway {gateway}"));
                    let queues = nat.take_queues();
                    let nat = Arc::new(nat);
                    let serves = nat.clone();
                    let served = tokio::spawn(async move { serves.serve().await });
                    return Ok(Self::Nat(nat, served, queues));
                }
                Err(error) => {
                    let line = format!("{error:#}; until then it is as with NETWORK=user");
                    let asked_for = said.names.contains("NETWORK");
                    if asked_for { story.warn(&line) } else { story.tell(&line) }
                }
            }
        }
        if wish == Way::None {
            return Ok(Self::None);
        }
        Ok(match User::start(settings, Path::new("/"), room.folder()) {
            Ok(user) => {
                story.tell(user.said());
                Self::User(user)
            }
            Err(error) => {
                story.warn(&format!("the guest has no network: {error:#}"));
                Self::None
            }
        })
    }

    /// The end that the machine holds.
    ///
    /// # Errors
    ///
    /// When the address of the card cannot be remembered.
    pub fn cable(&self, settings: &Settings) -> anyhow::Result<Option<Cable>> {
        Ok(match self {
            Self::None => None,
            Self::User(user) => Some(Cable {
                to: host::net::Network::Passt(user.socket().to_owned()),
                mac: guest_mac(settings, &name())?,
                mtu: Some(user.mtu()),
                pairs: 1,
            }),
            Self::Nat(nat, _, queues) => {
                let (to, pairs) = inherited(queues);
                Some(Cable { to, mac: nat.mac(), mtu: Some(nat.mtu()), pairs })
            }
            Self::Macvtap(card, _, queues) => {
                let (to, pairs) = inherited(queues);
                Some(Cable { to, mac: card.mac(), mtu: Some(card.mtu()), pairs })
            }
        })
    }

    /// Where we reach the guest ourselves.
    pub fn guest(&self) -> Option<Place> {
        match self {
            Self::None => None,
            // By the port that is forwarded.
            Self::User(_) => Some(Place::At(Ipv4Addr::LOCALHOST.into())),
            Self::Nat(nat, ..) => Some(Place::At(nat.guest().into())),
            Self::Macvtap(card, ..) => Some(match card.heard() {
                Some(heard) => Place::Heard(heard, card.uplink().to_owned()),
                None => Place::Unseen,
            }),
        }
    }

    /// The machine has its end of it: the tap goes when the machine does.
    pub fn handed_over(&mut self) {
        if let Self::Nat(_, _, queues) | Self::Macvtap(_, _, queues) = self {
            queues.clear();
        }
    }

    /// Takes it away again.
    pub async fn end(self) {
        let ended = match self {
            Self::None => Ok(()),
            Self::User(user) => {
                user.end();
                Ok(())
            }
            Self::Nat(nat, served, _) => match alone(nat, served).await {
                Some(nat) => nat.end().await,
                None => Ok(()),
            },
            Self::Macvtap(card, served, _) => match alone(card, served).await {
                Some(card) => card.end().await,
                None => Ok(()),
            },
        };
        if let Err(error) = ended {
            tracing::warn!("something of the network stays: {error:#}");
        }
    }
}

/// What was served, once nobody serves it any more.
async fn alone<T>(shared: Arc<T>, served: JoinHandle<()>) -> Option<T> {
    served.abort();
    served.await.ok();
    Arc::into_inner(shared)
}

/// Queues as the other end of a cable, and how many pairs they are.
fn inherited(queues: &[OwnedFd]) -> (host::net::Network, u16) {
    let numbers = queues.iter().map(|queue| queue.as_raw_fd()).collect();
    (host::net::Network::Fd(numbers), u16::try_from(queues.len()).unwrap_or(u16::MAX))
}

/// Pairs of queues for so many processors.
fn pairs(processors: u32) -> u16 {
    u16::try_from(processors.clamp(1, PAIRS)).unwrap_or(1)
}

async fn nat(settings: &Settings, processors: u32) -> anyhow::Result<Nat> {
    let pairs = pairs(processors);
    Nat::start(settings, &Wish { pairs, pod: name(), etc: "/etc".into() }).await
}

/// What names the pod's resolvers.
fn names() -> String {
    std::fs::read_to_string(RESOLV).unwrap_or_default()
}

/// What the pod is called.
fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
