//! The guest's network: what the settings ask for, or the next best that this pod allows.

use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::AsRawFd as _;
use std::path::Path;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::machine::Cable;
use super::room::Room;
use crate::net::nat::{Nat, Wish, guest_mac};
use crate::net::user::User;
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
    /// A tap with address translation, and what answers the guest.
    Nat(Arc<Nat>, JoinHandle<()>),
}

impl Network {
    /// Makes it. What cannot be is said in a line, and the next best is taken.
    pub async fn make(settings: &Settings, processors: u32, room: &Room, story: &Story) -> Self {
        let wish = settings.network.kind;
        if wish == Way::Nat {
            story.step("Preparing the network…");
            match nat(settings, processors).await {
                Ok(nat) => {
                    nat.notes().iter().for_each(|note| story.tell(note));
                    let (guest, gateway) = (nat.guest(), nat.gateway());
                    story.tell(&format!("the guest is {guest}, its gateway {gateway}"));
                    let nat = Arc::new(nat);
                    let serves = nat.clone();
                    let served = tokio::spawn(async move { serves.serve().await });
                    return Self::Nat(nat, served);
                }
                Err(error) => {
                    story.tell(&format!("{error:#}; until then it is as with NETWORK=user"));
                }
            }
        }
        if wish == Way::None {
            return Self::None;
        }
        match User::start(settings, Path::new("/"), room.folder()) {
            Ok(user) => {
                story.tell(user.said());
                Self::User(user)
            }
            Err(error) => {
                story.tell(&format!("the guest has no network: {error:#}"));
                Self::None
            }
        }
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
                to: format!("passt:{}", user.socket().display()),
                mac: guest_mac(settings, &name())?,
                mtu: Some(user.mtu()),
                pairs: 1,
            }),
            Self::Nat(nat, _) => {
                let mut to = "fd".to_owned();
                for queue in nat.queues() {
                    to.push_str(&format!(":{}", queue.as_raw_fd()));
                }
                let pairs = u16::try_from(nat.queues().len())?;
                Some(Cable { to, mac: nat.mac(), mtu: Some(nat.mtu()), pairs })
            }
        })
    }

    /// Where we reach the guest ourselves.
    pub fn guest(&self) -> Option<IpAddr> {
        match self {
            Self::None => None,
            // By the port that is forwarded.
            Self::User(_) => Some(Ipv4Addr::LOCALHOST.into()),
            Self::Nat(nat, _) => Some(nat.guest().into()),
        }
    }

    /// Takes it away again.
    pub async fn end(self) {
        match self {
            Self::None => {}
            Self::User(user) => user.end(),
            Self::Nat(nat, served) => {
                served.abort();
                served.await.ok();
                let Some(nat) = Arc::into_inner(nat) else { return };
                if let Err(error) = nat.end().await {
                    tracing::warn!("something of the network stays: {error:#}");
                }
            }
        }
    }
}

async fn nat(settings: &Settings, processors: u32) -> anyhow::Result<Nat> {
    let pairs = u16::try_from(processors.clamp(1, PAIRS))?;
    Nat::start(settings, &Wish { pairs, pod: name(), resolv: RESOLV.into() }).await
}

/// What the pod is called.
fn name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}
