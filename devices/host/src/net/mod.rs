//! Networks: what a network controller asks of the other end of its cable, whatever that is.
//!
//! A controller opens a [`Side`] and takes one [`Port`] for each pair of its queues. Frames travel
//! behind a `virtio_net_hdr_v1` (VIRTIO 1.3, 5.1.6), from and into the guest's own memory.
//!
//! Threats: the guest chooses where a frame lies and what its header says; the kernel checks the
//! header, and what it refuses is a frame that is lost. The peer chooses what arrives and when:
//! lengths are checked, one frame at most is kept, and nothing here ever waits.

pub mod inherited;
pub mod link;
mod packet;
pub mod passt;
pub mod tap;
pub mod vhost;

use std::fmt;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use self::inherited::Inherited;
use self::link::Link;
use crate::mac::Mac;
use crate::memory::{Memory, NoMemory, Piece};

/// Bytes of the header before each frame.
pub const HEADER: usize = 12;
/// Most bytes of a frame: the longest IP packet, an Ethernet header and a VLAN tag.
pub const FRAME: usize = 65535 + 14 + 4;
/// Least bytes of a frame: an Ethernet header.
pub const RUNT: usize = 14;

/// What is behind a network controller.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    /// Nothing: the link is down.
    #[default]
    None,
    /// A tap interface of the host by its name; it is made if there is none.
    Tap(String),
    /// A macvtap's character device, `/dev/tapN`.
    Macvtap(PathBuf),
    /// What we inherited: taps, one for each pair of queues, or one socket.
    Fd(Vec<i32>),
    /// The socket on which `passt` listens.
    Passt(PathBuf),
}

impl TryFrom<String> for Network {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|fd| *fd > 2);
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            Some(("tap", name)) if tap::is_name(name) => Ok(Self::Tap(name.to_owned())),
            Some(("tap", name)) => Err(format!(
                "`{name}` is no name of an interface: 1 to 15 letters, without `/`, `:`, `%` and \
                 spaces"
            )),
            Some(("macvtap", path)) if !path.is_empty() => Ok(Self::Macvtap(path.into())),
            Some(("passt", path)) if !path.is_empty() => Ok(Self::Passt(path.into())),
            Some(("fd", list)) => {
                list.split(':').map(number).collect::<Option<_>>().map(Self::Fd).ok_or_else(|| {
                    format!("`{list}` names no inherited file descriptor, 3 or above")
                })
            }
            _ => Err(format!(
                "`{text}` is not a network: write `tap:NAME`, `macvtap:PATH`, `passt:SOCKET`, \
                 `fd:N` (with more pairs of queues `fd:N:N...`) or `none`"
            )),
        }
    }
}

impl From<Network> for String {
    fn from(network: Network) -> Self {
        network.to_string()
    }
}

impl fmt::Display for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_str("none"),
            Self::Tap(name) => write!(f, "tap:{name}"),
            Self::Macvtap(path) => write!(f, "macvtap:{}", path.display()),
            Self::Passt(path) => write!(f, "passt:{}", path.display()),
            Self::Fd(list) => {
                f.write_str("fd")?;
                list.iter().try_for_each(|fd| write!(f, ":{fd}"))
            }
        }
    }
}

/// What may be left to the one who receives a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    /// To compute a checksum.
    pub checksum: bool,
    /// To cut a large TCP segment over IPv4.
    pub tso4: bool,
    /// To cut one over IPv6.
    pub tso6: bool,
    /// To cut one with ECN bits.
    pub ecn: bool,
    /// To cut a large UDP datagram, over IPv4 and IPv6.
    pub uso: bool,
}

impl Offloads {
    /// All of them.
    pub const ALL: Self = Self { checksum: true, tso4: true, tso6: true, ecn: true, uso: true };

    /// Those that are in both. Nothing is cut by one who computes no checksums.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        let checksum = self.checksum && other.checksum;
        Self {
            checksum,
            tso4: checksum && self.tso4 && other.tso4,
            tso6: checksum && self.tso6 && other.tso6,
            ecn: checksum && self.ecn && other.ecn,
            uso: checksum && self.uso && other.uso,
        }
    }

    /// Whether frames may be longer than the link's MTU allows.
    pub fn is_large(self) -> bool {
        self.tso4 || self.tso6 || self.uso
    }
}

/// The other end of a cable: what all pairs of queues of a controller share.
pub trait Side: Send + Sync {
    /// What it can do, in both directions.
    fn offloads(&self) -> Offloads;
    /// From now on it may leave this to the guest, and nothing else.
    fn leave(&self, offloads: Offloads);
    /// Whether frames for the guest may come by this port.
    fn attach(&self, port: usize, on: bool);
    /// The address that the guest must have for frames to reach it, where that is so.
    fn mac(&self) -> Option<Mac> {
        None
    }
    /// Whether it is there at all, and its MTU.
    fn link(&self) -> &Arc<Link>;
    /// A way for each pair of queues, once.
    fn ports(&self) -> Vec<Box<dyn Port>>;
    /// A file for each port that the kernel can serve in our place, where that is so.
    fn taps(&self) -> anyhow::Result<Vec<File>> {
        Ok(Vec::new())
    }
}

/// Why no frame went through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Nothing has arrived, or nothing more can be sent: see [`Port::wait`].
    Wait,
    /// The guest's memory is not there, or its frame is none: the guest's doing.
    Refused,
}

/// What a thread sleeps on until there may be something to do.
#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'a> {
    /// Readable when a frame has arrived, and writable when one can be sent.
    pub fd: Option<BorrowedFd<'a>>,
    /// Counts the connections: another one may have the same file descriptor.
    pub connection: u32,
    /// The last frame could not be sent: wait for that too.
    pub full: bool,
    /// Look again at this moment in any case.
    pub due: Option<Instant>,
}

/// The way of one pair of queues.
pub trait Port: Send {
    /// Puts the next frame behind its header into the guest's memory, and what does not fit there
    /// into `rest`, which is as long as any frame. Gives the length of both together, with header.
    ///
    /// # Errors
    ///
    /// When there is none, or the memory is not there: the frame is lost then.
    fn receive(&mut self, memory: &Memory, to: &[Piece], rest: &mut [u8]) -> Result<usize, Stop>;
    /// Sends the frame behind its header. Where nobody is, it is lost like on any cable.
    ///
    /// # Errors
    ///
    /// When it must be tried again, or is no frame.
    fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), Stop>;
    /// What to sleep on. This is also where a port does what does not belong to a frame.
    fn wait(&mut self) -> Wait<'_>;
}

/// Bytes of these pieces together.
#[must_use]
pub fn length(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length as usize))
}

/// Copies into these pieces from a place in them on; gives how much there was room for.
///
/// # Errors
///
/// When they are not memory.
pub fn put(memory: &Memory, pieces: &[Piece], at: usize, data: &[u8]) -> Result<usize, NoMemory> {
    let mut done = 0;
    each(pieces, at, data.len(), |address, length| {
        memory.write(address, &data[done..done + length])?;
        done += length;
        Ok(())
    })?;
    Ok(done)
}

/// Copies out of these pieces from a place in them on; gives how much there was.
///
/// # Errors
///
/// When they are not memory.
pub fn get(
    memory: &Memory,
    pieces: &[Piece],
    at: usize,
    data: &mut [u8],
) -> Result<usize, NoMemory> {
    let (mut done, most) = (0, data.len());
    each(pieces, at, most, |address, length| {
        memory.read(address, &mut data[done..done + length])?;
        done += length;
        Ok(())
    })?;
    Ok(done)
}

/// Walks `length` bytes of these pieces.
fn each(
    pieces: &[Piece],
    at: usize,
    length: usize,
    mut run: impl FnMut(u64, usize) -> Result<(), NoMemory>,
) -> Result<(), NoMemory> {
    let (mut skip, mut left) = (at, length);
    for piece in pieces {
        if left == 0 {
            break;
        }
        let whole = piece.length as usize;
        let cut = skip.min(whole);
        skip -= cut;
        let now = left.min(whole - cut);
        if now > 0 {
            run(piece.address.checked_add(cut as u64).ok_or(NoMemory)?, now)?;
            left -= now;
        }
    }
    Ok(())
}

/// What is asked of a network when it is opened.
#[derive(Clone, Copy, Debug)]
pub struct Wish {
    /// Pairs of queues.
    pub pairs: u16,
    /// The MTU, where the network's own is not to be told.
    pub mtu: Option<u16>,
}

/// Opens a network.
///
/// # Errors
///
/// When it cannot be had: what is missing, and the way out.
pub fn open(network: &Network, wish: Wish) -> anyhow::Result<Arc<dyn Side>> {
    Ok(match network {
        Network::None => Arc::new(Nothing::new(wish)),
        Network::Tap(name) => Arc::new(tap::Tap::open(name, wish)?),
        Network::Macvtap(path) => Arc::new(tap::Tap::open_device(path, wish)?),
        Network::Passt(path) => Arc::new(passt::Passt::new(path, wish)?),
        Network::Fd(list) => match inherited::inherit(list)? {
            Inherited::Taps(queues) => Arc::new(tap::Tap::of(queues, wish)?),
            Inherited::Stream(stream) => Arc::new(passt::Passt::of(stream, wish)?),
        },
    })
}

/// No network.
struct Nothing {
    link: Arc<Link>,
    pairs: u16,
}

impl Nothing {
    fn new(wish: Wish) -> Self {
        let link = Link::new(wish.mtu);
        link.connect(false);
        Self { link: Arc::new(link), pairs: wish.pairs }
    }
}

impl Side for Nothing {
    fn offloads(&self) -> Offloads {
        Offloads::default()
    }
    fn leave(&self, _: Offloads) {}
    fn attach(&self, _: usize, _: bool) {}
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
    fn ports(&self) -> Vec<Box<dyn Port>> {
        (0..self.pairs).map(|_| Box::new(Nobody) as Box<dyn Port>).collect()
    }
}

/// A cable whose other end lies on the floor.
struct Nobody;

impl Port for Nobody {
    fn receive(&mut self, _: &Memory, _: &[Piece], _: &mut [u8]) -> Result<usize, Stop> {
        Err(Stop::Wait)
    }
    fn send(&mut self, _: &Memory, _: &[Piece]) -> Result<(), Stop> {
        Ok(())
    }
    fn wait(&mut self) -> Wait<'_> {
        Wait::default()
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_network_is_read_as_it_is_printed() {
        for text in ["none", "tap:vm0", "macvtap:/dev/tap7", "passt:/run/p:1", "fd:3", "fd:4:5"] {
            let network = Network::try_from(text.to_owned()).unwrap();
            assert_eq!(String::from(network), text);
        }
        for bad in ["", "tap", "tap:", "tap:a/b", "tap:a%d", "tap:0123456789abcdef", "fd:2"] {
            assert!(Network::try_from(bad.to_owned()).is_err(), "{bad}");
        }
        for bad in ["fd:", "fd:-1", "fd:3:", "fd:x", "passt:", "macvtap:", "bridge:br0", "None"] {
            assert!(Network::try_from(bad.to_owned()).is_err(), "{bad}");
        }
    }

    #[test]
    fn nothing_is_cut_by_one_who_computes_no_checksums() {
        let blind = Offloads { checksum: false, ..Offloads::ALL };
        assert_eq!(blind.and(Offloads::ALL), Offloads::default());
        let some = Offloads { tso4: false, ..Offloads::ALL };
        assert_eq!(Offloads::ALL.and(some), some);
    }

    #[test]
    fn a_cable_without_another_end_is_down_and_takes_everything() {
        let side = open(&Network::None, Wish { pairs: 2, mtu: None }).unwrap();
        assert!(!side.link().is_up());
        let mut ports = side.ports();
        assert_eq!(ports.len(), 2);
        let memory = Memory::new(Arc::default());
        assert_eq!(ports[1].send(&memory, &[]), Ok(()));
        assert_eq!(ports[1].receive(&memory, &[], &mut []), Err(Stop::Wait));
        assert!(ports[1].wait().fd.is_none());
    }
}
