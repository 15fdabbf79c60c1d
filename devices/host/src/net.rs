//! Networks: the interface between a network controller and its backend.
//!
//! A controller opens a [`Backend`] and takes one [`Port`] for each pair of its queues. Each frame
//! follows a `virtio_net_hdr_v1` (VIRTIO 1.3, 5.1.6) and is read from or written to the guest's own
//! memory.
//!
//! Threats: the guest chooses where a frame lies and what its header contains. The kernel checks
//! the header, and a frame that it refuses is lost. The peer chooses what arrives and when. Lengths
//! are checked, at most one frame is kept, and nothing here blocks.

pub mod arrivals;
pub mod inherited;
pub mod link;
pub mod packet;
pub mod passt;
pub mod tap;
pub mod vhost;

use std::fmt;
use std::fs::File;
use std::os::fd::BorrowedFd;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use self::inherited::Inherited;
use self::link::Link;
use crate::mac::Mac;
use crate::memory::{Memory, NoMemory, Piece};

/// The `virtio_net_hdr_v1` before each frame.
pub const HEADER_LENGTH: usize = 12;
/// Maximum bytes of a frame: the longest IP packet, an Ethernet header and a VLAN tag.
pub const MAX_FRAME: usize = 65535 + 14 + 4;
/// Minimum bytes of a frame: an Ethernet header.
pub const MIN_FRAME: usize = 14;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Network {
    /// The link is down.
    #[default]
    None,
    /// A tap interface of the host, by its name. It is created if it does not exist.
    Tap(String),
    /// The character device of a macvtap, `/dev/tapN`.
    Macvtap(PathBuf),
    /// Inherited file descriptors: one tap for each pair of queues, or one socket.
    Fd(Vec<i32>),
    /// The socket on which `passt` listens.
    Passt(PathBuf),
}

impl FromStr for Network {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number = |text: &str| text.parse().ok().filter(|fd| *fd > 2);
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            Some(("tap", name)) if is_tap_name(name) => Ok(Self::Tap(name.to_owned())),
            Some(("tap", name)) => Err(format!(
                "`{name}` is not an interface name: write 1 to 15 letters, without `/`, `:`, `%` \
                 and spaces"
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

/// Whether the kernel accepts `name` for an interface. With `%` it would choose a number.
fn is_tap_name(name: &str) -> bool {
    let odd = |byte: u8| !byte.is_ascii_graphic() || b"/:%".contains(&byte);
    (1..16).contains(&name.len()) && !name.bytes().any(odd) && name != "." && name != ".."
}

crate::as_text!(Network);

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

/// Offloads: work that the sender may leave to the receiver of a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Offloads {
    pub checksum: bool,
    pub tso4: bool,
    pub tso6: bool,
    /// TCP segments with ECN bits.
    pub ecn: bool,
    /// UDP over IPv4 and IPv6.
    pub uso: bool,
}

impl Offloads {
    pub const ALL: Self = Self { checksum: true, tso4: true, tso6: true, ecn: true, uso: true };

    /// The offloads that are in both. Segmentation requires checksums, so without them it is off.
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
}

/// A network backend, shared by all pairs of queues of a controller.
pub trait Backend: Send + Sync {
    /// The supported offloads, in both directions.
    fn offloads(&self) -> Offloads;
    /// Enables exactly these receive offloads: the backend may leave this work to the guest.
    fn set_offloads(&self, offloads: Offloads);
    /// Enables or disables the delivery of frames to the guest by this port.
    fn attach(&self, port: usize, on: bool);
    /// The address that the guest must use to receive frames, if the backend requires one.
    fn mac(&self) -> Option<Mac> {
        None
    }
    fn link(&self) -> &Arc<Link>;
    /// The ports, one for each pair of queues. Called once.
    fn ports(&self) -> Vec<Box<dyn Port>>;
    /// A file for each port that vhost-net can serve. Empty if the backend does not support that.
    fn taps(&self) -> anyhow::Result<Vec<File>> {
        Ok(Vec::new())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TransferError {
    /// No frame has arrived, or none can be sent now (see [`Port::wait`]).
    WouldBlock,
    /// The guest's fault: a buffer outside its memory, or an invalid frame.
    Refused,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Wait<'a> {
    /// Readable when a frame has arrived, and writable when one can be sent.
    pub fd: Option<BorrowedFd<'a>>,
    /// Number of the connection. A new one may have the same file descriptor.
    pub connection: u32,
    /// The last frame could not be sent, so wait for room too.
    pub full: bool,
    /// The latest time to look again.
    pub due: Option<Instant>,
}

pub trait Port: Send {
    /// Writes the next frame, after its header, to the guest's memory. Bytes that do not fit there
    /// go to `rest`, which has room for any frame. If the memory does not exist, the frame is lost.
    /// Returns the length of header and frame.
    fn receive(
        &mut self,
        memory: &Memory,
        to: &[Piece],
        rest: &mut [u8],
    ) -> Result<usize, TransferError>;
    /// Without a peer, the frame is lost as on any cable.
    fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), TransferError>;
    /// The port also reconnects here and flushes its output.
    fn wait(&mut self) -> Wait<'_>;
}

/// The guest's `pieces` without their first `skip` bytes.
#[derive(Clone, Copy)]
struct GuestBytes<'a> {
    memory: &'a Memory,
    pieces: &'a [Piece],
    skip: usize,
}

pub fn length(pieces: &[Piece]) -> usize {
    pieces.iter().fold(0, |sum, piece| sum.saturating_add(piece.length as usize))
}

/// Copies `data` into the pieces, from offset `at` on. Returns the number of bytes that fit.
pub fn write_pieces(
    memory: &Memory,
    pieces: &[Piece],
    at: usize,
    data: &[u8],
) -> Result<usize, NoMemory> {
    let mut done = 0;
    each(pieces, at, data.len(), |address, length| {
        memory.write(address, &data[done..done + length])?;
        done += length;
        Ok(())
    })?;
    Ok(done)
}

/// Copies from the pieces into `data`, from offset `at` on. Returns the number of copied bytes.
pub fn read_pieces(
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

/// Calls `run` with the address and length of each part of `length` bytes, from offset `at` on.
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

/// A controller's requirements for its network.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Pairs of queues.
    pub pairs: u16,
    /// The MTU to report, instead of the network's own.
    pub mtu: Option<u16>,
}

pub fn open(network: &Network, options: Options) -> anyhow::Result<Arc<dyn Backend>> {
    Ok(match network {
        Network::None => Arc::new(Disconnected::new(options)),
        Network::Tap(name) => Arc::new(tap::Tap::open(name, options)?),
        Network::Macvtap(path) => Arc::new(tap::Tap::open_device(path, options)?),
        Network::Passt(path) => Arc::new(passt::Passt::new(path, options)?),
        Network::Fd(list) => match inherited::inherit(list)? {
            Inherited::Taps(queues) => Arc::new(tap::Tap::from_queues(queues, options)?),
            Inherited::Stream(stream) => Arc::new(passt::Passt::from_stream(stream, options)?),
        },
    })
}

struct Disconnected {
    link: Arc<Link>,
    pairs: u16,
}

impl Disconnected {
    fn new(options: Options) -> Self {
        let link = Link::new(options.mtu);
        link.set_connected(false);
        Self { link: Arc::new(link), pairs: options.pairs }
    }
}

impl Backend for Disconnected {
    fn offloads(&self) -> Offloads {
        Offloads::default()
    }
    fn set_offloads(&self, _: Offloads) {}
    fn attach(&self, _: usize, _: bool) {}
    fn link(&self) -> &Arc<Link> {
        &self.link
    }
    fn ports(&self) -> Vec<Box<dyn Port>> {
        (0..self.pairs).map(|_| Box::new(DisconnectedPort) as Box<dyn Port>).collect()
    }
}

/// Drops all frames.
struct DisconnectedPort;

impl Port for DisconnectedPort {
    fn receive(&mut self, _: &Memory, _: &[Piece], _: &mut [u8]) -> Result<usize, TransferError> {
        Err(TransferError::WouldBlock)
    }
    fn send(&mut self, _: &Memory, _: &[Piece]) -> Result<(), TransferError> {
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
    fn a_network_reads_back_as_printed() {
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
    fn segmentation_offloads_need_checksum_offload() {
        let blind = Offloads { checksum: false, ..Offloads::ALL };
        assert_eq!(blind.and(Offloads::ALL), Offloads::default());
        let some = Offloads { tso4: false, ..Offloads::ALL };
        assert_eq!(Offloads::ALL.and(some), some);
    }

    #[test]
    fn a_card_without_a_network_has_no_link_and_drops_frames() {
        let backend = open(&Network::None, Options { pairs: 2, mtu: None }).unwrap();
        assert!(!backend.link().is_up());
        let mut ports = backend.ports();
        assert_eq!(ports.len(), 2);
        let memory = Memory::new(Arc::default());
        assert_eq!(ports[1].send(&memory, &[]), Ok(()));
        assert_eq!(ports[1].receive(&memory, &[], &mut []), Err(TransferError::WouldBlock));
        assert!(ports[1].wait().fd.is_none());
    }
}
