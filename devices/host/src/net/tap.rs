//! Tap interfaces (Documentation/networking/tuntap.rst of Linux) and macvtap devices, opened here
//! or inherited. Each frame follows a `virtio_net_hdr_v1`.
//!
//! Each pair of queues has its own file descriptor; the kernel distributes flows among those that
//! are attached. One system call moves a frame directly from or to the guest's memory.
//!
//! Threats: the kernel checks the guest's header. This file checks lengths and pieces: it refuses
//! a frame that is too short, too long, or has more pieces than a vector takes, and never passes
//! memory to the kernel that is not the guest's.
#![expect(unsafe_code, reason = "ioctls, and vectors of guest memory, which has no safe slices")]

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};

use anyhow::{Context, anyhow, ensure};
use rustix::net::{AddressFamily, SocketType};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::arrivals::{self, Arrivals};
use super::link::Link;
use super::{
    Backend, GuestBytes, HEADER_LENGTH, MAX_FRAME, MIN_FRAME, Offloads, Options, Port,
    TransferError, Wait, is_tap_name,
};
use crate::mac::Mac;
use crate::memory::{Memory, NoMemory, Piece, subrange};

/// Maximum entries of a vector (UIO_MAXIOV). One of them is for our own buffer.
const MAX_VECTORS: usize = 1024;

/// linux/if_tun.h.
const IFF_TAP: u16 = 0x0002;
const IFF_MULTI_QUEUE: u16 = 0x0100;
const IFF_ATTACH_QUEUE: u16 = 0x0200;
const IFF_DETACH_QUEUE: u16 = 0x0400;
const IFF_NO_PI: u16 = 0x1000;
const IFF_VNET_HDR: u16 = 0x4000;
const TUNSETIFF: u64 = 0x4004_54ca;
const TUNSETOFFLOAD: u64 = 0x4004_54d0;
const TUNGETIFF: u64 = 0x8004_54d2;
const TUNSETVNETHDRSZ: u64 = 0x4004_54d8;
const TUNSETQUEUE: u64 = 0x4004_54d9;
const TUNSETVNETLE: u64 = 0x4004_54dc;
/// linux/sockios.h.
const SIOCGIFFLAGS: u64 = 0x8913;
const SIOCSIFFLAGS: u64 = 0x8914;
const SIOCGIFMTU: u64 = 0x8921;
const SIOCSIFMTU: u64 = 0x8922;
const SIOCGIFHWADDR: u64 = 0x8927;
/// linux/if.h.
const IFF_UP: u16 = 1;

/// Bits of TUNSETOFFLOAD: TUN_F_CSUM and so on.
const CSUM: usize = 0x01;
const TSO4: usize = 0x02;
const TSO6: usize = 0x04;
const TSO_ECN: usize = 0x08;
const USO: usize = 0x20 | 0x40;

/// `struct ifreq`: a name, and a union of 24 bytes.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Request {
    name: [u8; 16],
    value: [u8; 24],
}

impl Request {
    fn of(name: &str) -> Self {
        let mut request = Self::default();
        // Longer names were refused before. The last byte stays zero.
        for (to, from) in request.name.iter_mut().take(15).zip(name.bytes()) {
            *to = from;
        }
        request
    }

    fn short(&self) -> u16 {
        u16::from_ne_bytes([self.value[0], self.value[1]])
    }

    fn with(mut self, bytes: &[u8]) -> Self {
        self.value[..bytes.len()].copy_from_slice(bytes);
        self
    }

    fn name(&self) -> String {
        let end = self.name.iter().position(|byte| *byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..end]).into_owned()
    }
}

fn request(fd: BorrowedFd<'_>, code: u64, request: &mut Request) -> io::Result<()> {
    // SAFETY: all callers pass a code that takes a `struct ifreq`, which has these 40 bytes.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), code, std::ptr::from_mut(request)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// An ioctl whose argument is a pointer to a number.
fn set_int(fd: BorrowedFd<'_>, code: u64, value: i32) -> io::Result<()> {
    // SAFETY: TUNSETVNETHDRSZ and TUNSETVNETLE read an `int`.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), code, std::ptr::from_ref(&value)) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_offload(fd: BorrowedFd<'_>, bits: usize) -> io::Result<()> {
    // SAFETY: TUNSETOFFLOAD takes a number and no pointer.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), TUNSETOFFLOAD, bits) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

pub(super) fn duplicate(number: i32) -> anyhow::Result<OwnedFd> {
    // SAFETY: the descriptor is only borrowed for this one call, which does not need it to be open.
    let copy = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 3) };
    ensure!(copy >= 0, "file descriptor {number} is not open: was it inherited?");
    // SAFETY: the kernel has just created it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(copy) })
}

/// `struct iovec`. Its address is a number so that it is `Send`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Vector {
    start: usize,
    length: usize,
}

/// A vector that is refilled for each frame.
#[derive(Default)]
pub(super) struct Vectors(Vec<Vector>);

impl Vectors {
    /// Returns the number of bytes.
    fn add_guest(&mut self, from: GuestBytes<'_>) -> Result<usize, NoMemory> {
        let (ram, mut skip, mut total) = (from.memory.ram()?, from.skip, 0);
        for piece in from.pieces {
            let length = piece.length as usize;
            let cut = skip.min(length);
            skip -= cut;
            let start = piece.address.checked_add(cut as u64).ok_or(NoMemory)?;
            for slice in GuestMemoryBackend::get_slices(ram, GuestAddress(start), length - cut) {
                let slice = slice.map_err(|_| NoMemory)?;
                let start = slice.ptr_guard_mut().as_ptr().expose_provenance();
                self.0.push(Vector { start, length: slice.len() });
                total += slice.len();
            }
        }
        if self.0.len() < MAX_VECTORS { Ok(total) } else { Err(NoMemory) }
    }

    fn add_ours(&mut self, start: *const u8, length: usize) {
        self.0.push(Vector { start: start.expose_provenance(), length });
    }

    fn count(&self) -> i32 {
        // At most MAX_VECTORS.
        i32::try_from(self.0.len()).unwrap_or(i32::MAX)
    }

    /// Reads into the guest's pieces, and then into `rest`.
    fn read(
        &mut self,
        fd: BorrowedFd<'_>,
        memory: &Memory,
        pieces: &[Piece],
        rest: &mut [u8],
    ) -> Result<io::Result<usize>, NoMemory> {
        self.0.clear();
        self.add_guest(GuestBytes { memory, pieces, skip: 0 })?;
        self.add_ours(rest.as_mut_ptr(), rest.len());
        let vectors = self.0.as_ptr().cast();
        // SAFETY: each entry was added just now: guest memory, which stays mapped as long as
        // `memory` and to which there are no references, and `rest`, which we hold alone.
        let count = unsafe { libc::readv(fd.as_raw_fd(), vectors, self.count()) };
        let count = usize::try_from(count).map_err(|_| io::Error::last_os_error());
        if let (Ok(count), true) = (&count, memory.records_writes()) {
            memory.wrote(&subrange(pieces, 0, *count as u64));
        }
        Ok(count)
    }

    fn write(
        &mut self,
        fd: BorrowedFd<'_>,
        memory: &Memory,
        pieces: &[Piece],
    ) -> Result<io::Result<usize>, NoMemory> {
        self.0.clear();
        self.add_guest(GuestBytes { memory, pieces, skip: 0 })?;
        let vectors = self.0.as_ptr().cast();
        // SAFETY: each entry is guest memory that was added just now, and stays mapped as long as
        // `memory`; the kernel only reads it.
        let count = unsafe { libc::writev(fd.as_raw_fd(), vectors, self.count()) };
        Ok(usize::try_from(count).map_err(|_| io::Error::last_os_error()))
    }

    /// Sends `prefix` and the guest's bytes on a socket. A peer that is gone causes an error, but
    /// no SIGPIPE.
    pub(super) fn send(
        &mut self,
        socket: BorrowedFd<'_>,
        prefix: &[u8],
        from: GuestBytes<'_>,
    ) -> Result<io::Result<usize>, NoMemory> {
        self.0.clear();
        self.add_ours(prefix.as_ptr(), prefix.len());
        self.add_guest(from)?;
        let message = libc::msghdr {
            msg_name: std::ptr::null_mut(),
            msg_namelen: 0,
            msg_iov: self.0.as_mut_ptr().cast(),
            msg_iovlen: self.0.len(),
            msg_control: std::ptr::null_mut(),
            msg_controllen: 0,
            msg_flags: 0,
        };
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: the message has no name and no control data, and each entry of its vector was
        // added just now: `prefix`, and guest memory, which stays mapped as long as `from.memory`.
        let count = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
        Ok(usize::try_from(count).map_err(|_| io::Error::last_os_error()))
    }
}

/// An interface with one kernel queue for each pair of the controller's queues.
pub struct Tap {
    queues: Vec<Arc<Queue>>,
    offloads: Offloads,
    mac: Option<Mac>,
    link: Arc<Link>,
    /// Errors of the kernel are logged once: a guest can cause any number.
    warned: Once,
}

struct Queue {
    fd: OwnedFd,
    /// A detached queue receives no frames, and reading it is an error.
    attached: AtomicBool,
}

impl Tap {
    /// Opens an interface by its name, or creates it. A created interface is set up, and the kernel
    /// deletes it when it is closed.
    pub fn open(name: &str, options: Options) -> anyhow::Result<Self> {
        let control = control()?;
        let exists = request(control.as_fd(), SIOCGIFFLAGS, &mut Request::of(name)).is_ok();
        let device = Path::new("/dev/net/tun");
        let open = || anyhow::Ok(OwnedFd::from(character(device)?));
        let first = open()?;
        let mut multi = options.pairs > 1;
        if let Err(error) = attach(&first, name, multi) {
            // A multi-queue interface does not accept a request without IFF_MULTI_QUEUE.
            multi = true;
            let single = options.pairs == 1 && error.raw_os_error() == Some(libc::EINVAL);
            if !single || attach(&first, name, true).is_err() {
                return Err(explain(&error, name, options.pairs));
            }
        }
        let mut queues = vec![first];
        for _ in 1..options.pairs {
            let queue = open()?;
            attach(&queue, name, multi).map_err(|error| explain(&error, name, options.pairs))?;
            queues.push(queue);
        }
        if !exists {
            if let Some(mtu) = options.mtu {
                let mut wanted = Request::of(name).with(&i32::from(mtu).to_ne_bytes());
                request(control.as_fd(), SIOCSIFMTU, &mut wanted)
                    .with_context(|| format!("mtu {mtu} for {name}"))?;
            }
            set_up(control.as_fd(), name).with_context(|| format!("{name} cannot be set up"))?;
        }
        Self::from_queues(queues, options)
    }

    /// Opens the device of a macvtap, once for each queue.
    pub fn open_device(path: &Path, options: Options) -> anyhow::Result<Self> {
        let queue = || {
            let queue = OwnedFd::from(character(path)?);
            // The device belongs to one interface, so the kernel uses the flags only.
            attach(&queue, "", options.pairs > 1)
                .with_context(|| format!("{} is not a macvtap", path.display()))?;
            anyhow::Ok(queue)
        };
        let queues = (0..options.pairs).map(|_| queue()).collect::<anyhow::Result<_>>()?;
        Self::from_queues(queues, options)
    }

    /// The queues must be of a tap, with `IFF_NO_PI` and `IFF_VNET_HDR`.
    pub fn from_queues(queues: Vec<OwnedFd>, options: Options) -> anyhow::Result<Self> {
        let (count, pairs) = (queues.len(), options.pairs);
        ensure!(
            count == usize::from(pairs),
            "{pairs} pairs of queues need {pairs} taps: got {count}"
        );
        let mut interface = Request::default();
        for queue in &queues {
            request(queue.as_fd(), TUNGETIFF, &mut interface).context("not a tap")?;
            let (name, flags) = (interface.name(), interface.short());
            ensure!(flags & IFF_TAP != 0, "{name} is a tun, not a tap");
            ensure!(flags & IFF_NO_PI != 0, "{name} was opened without IFF_NO_PI");
            ensure!(flags & IFF_VNET_HDR != 0, "{name} was opened without IFF_VNET_HDR");
            let header = i32::try_from(HEADER_LENGTH).expect("twelve");
            set_int(queue.as_fd(), TUNSETVNETHDRSZ, header)
                .with_context(|| format!("{name}: a header of {HEADER_LENGTH} bytes"))?;
            set_int(queue.as_fd(), TUNSETVNETLE, 1)
                .with_context(|| format!("{name}: a little-endian header"))?;
            rustix::io::ioctl_fionbio(queue, true).context("a non-blocking tap")?;
        }
        let first = queues[0].as_fd();
        let offloads = offloads(first);
        set_offload(first, 0).with_context(|| format!("{}: no offloads", interface.name()))?;
        let mtu = options.mtu.or_else(|| mtu(&interface));
        // A macvtap only receives frames for its own address.
        let mac = if is_macvtap(first) { address(first) } else { None };
        let queue = |fd| Arc::new(Queue { fd, attached: AtomicBool::new(true) });
        let queues = queues.into_iter().map(queue).collect::<Vec<_>>();
        let link = Arc::new(Link::with_arrivals(mtu, Arc::new(Queues(queues.clone()))));
        Ok(Self { queues, offloads, mac, link, warned: Once::new() })
    }
}

/// All queues of an interface.
struct Queues(Vec<Arc<Queue>>);

impl Arrivals for Queues {
    fn filter(&self, on: bool) -> io::Result<()> {
        self.0.first().map_or(Ok(()), |queue| arrivals::filter(queue.fd.as_fd(), on))
    }

    fn files(&self) -> io::Result<Vec<OwnedFd>> {
        let attached = self.0.iter().filter(|queue| queue.attached.load(Ordering::Acquire));
        attached.map(|queue| queue.fd.try_clone()).collect()
    }
}

/// Creates an interface for another process, which inherits its queues: one file for each pair.
/// The kernel deletes the interface when the last one is closed.
pub fn create(name: &str, pairs: u16, mtu: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let found = request(control()?.as_fd(), SIOCGIFFLAGS, &mut Request::of(name)).is_ok();
    ensure!(is_tap_name(name) && !found, "{name} exists already, or is not an interface name");
    let tap = Tap::open(name, Options { pairs, mtu: Some(mtu) })?;
    Ok(tap.taps()?.into_iter().map(OwnedFd::from).collect())
}

/// Opens a macvtap's device for another process, which inherits its queues: one file for each pair.
pub fn open_macvtap(path: &Path, pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let tap = Tap::open_device(path, Options { pairs, mtu: None })?;
    Ok(tap.taps()?.into_iter().map(OwnedFd::from).collect())
}

/// A socket for ioctls about interfaces.
fn control() -> anyhow::Result<OwnedFd> {
    rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None).context("a socket")
}

fn character(path: &Path) -> anyhow::Result<File> {
    let flags = libc::O_NONBLOCK;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    file.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => anyhow!(
            "{} does not exist: load the module `tun`, or pass it to the container",
            path.display()
        ),
        io::ErrorKind::PermissionDenied => anyhow!(
            "{}: permission denied: run as root, or allow the device in the container",
            path.display()
        ),
        _ => anyhow!("{}: {error}", path.display()),
    })
}

/// Makes an open file a queue of the interface.
fn attach(queue: &OwnedFd, name: &str, multi: bool) -> io::Result<()> {
    let more = if multi { IFF_MULTI_QUEUE } else { 0 };
    let flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR | more;
    request(queue.as_fd(), TUNSETIFF, &mut Request::of(name).with(&flags.to_ne_bytes()))
}

fn explain(error: &io::Error, name: &str, pairs: u16) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::EPERM) => anyhow!(
            "tap {name} needs CAP_NET_ADMIN, or an interface that was created for this user: `ip \
             tuntap add {name} mode tap user NAME`"
        ),
        Some(libc::EBUSY) => anyhow!("tap {name} is in use by another process"),
        Some(libc::EINVAL) if pairs > 1 => anyhow!(
            "{name} is not a multi-queue tap: create it with `multi_queue`, or use one queue pair"
        ),
        Some(libc::EINVAL) => anyhow!("{name} is another kind of interface, not a tap"),
        Some(libc::E2BIG) => anyhow!("tap {name} has too few queues for {pairs} pairs"),
        _ => anyhow!("tap {name}: {error}"),
    }
}

fn set_up(control: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let mut flags = Request::of(name);
    request(control, SIOCGIFFLAGS, &mut flags)?;
    let up = flags.short() | IFF_UP;
    request(control, SIOCSIFFLAGS, &mut Request::of(name).with(&up.to_ne_bytes()))
}

/// The offloads of this kernel. Kernels since 6.2 segment UDP too.
fn offloads(queue: BorrowedFd<'_>) -> Offloads {
    let old = CSUM | TSO4 | TSO6 | TSO_ECN;
    let known = [old | USO, old, CSUM].into_iter().find(|bits| set_offload(queue, *bits).is_ok());
    let known = known.unwrap_or(0);
    Offloads {
        checksum: known & CSUM != 0,
        tso4: known & TSO4 != 0,
        tso6: known & TSO6 != 0,
        ecn: known & TSO_ECN != 0,
        uso: known & USO != 0,
    }
}

/// The interface's MTU; `None` when the interface is in another network namespace.
fn mtu(interface: &Request) -> Option<u16> {
    let mut asked = Request { value: [0; 24], ..*interface };
    request(control().ok()?.as_fd(), SIOCGIFMTU, &mut asked).ok()?;
    let mtu = i32::from_ne_bytes([asked.value[0], asked.value[1], asked.value[2], asked.value[3]]);
    u16::try_from(mtu).ok()
}

/// `/dev/net/tun`, the device of all taps, is 10:200. Each macvtap has a number of its own.
fn is_macvtap(queue: BorrowedFd<'_>) -> bool {
    let device = rustix::fs::fstat(queue).map(|it| it.st_rdev);
    device.is_ok_and(|it| (rustix::fs::major(it), rustix::fs::minor(it)) != (10, 200))
}

fn address(queue: BorrowedFd<'_>) -> Option<Mac> {
    let mut asked = Request::default();
    request(queue, SIOCGIFHWADDR, &mut asked).ok()?;
    asked.value[2..8].try_into().ok().map(Mac)
}

impl Backend for Tap {
    fn offloads(&self) -> Offloads {
        self.offloads
    }

    fn set_offloads(&self, offloads: Offloads) {
        let offloads = offloads.and(self.offloads);
        let bit = |on: bool, bit: usize| if on { bit } else { 0 };
        let bits = bit(offloads.checksum, CSUM)
            | bit(offloads.tso4, TSO4)
            | bit(offloads.tso6, TSO6)
            | bit(offloads.ecn && (offloads.tso4 || offloads.tso6), TSO_ECN)
            | bit(offloads.uso, USO);
        for queue in &self.queues {
            // EBADFD: the interface was deleted, or the queue is detached. It needs no offloads.
            if let Err(error) = set_offload(queue.fd.as_fd(), bits)
                && error.raw_os_error() != Some(libc::EBADFD)
            {
                self.warned.call_once(|| {
                    tracing::warn!("tap: the kernel refuses offloads {bits:#x}: {error}");
                });
            }
        }
    }

    fn attach(&self, port: usize, on: bool) {
        let Some(queue) = self.queues.get(port).filter(|_| self.queues.len() > 1) else { return };
        if queue.attached.load(Ordering::Acquire) == on {
            return;
        }
        // The flag is cleared before the queue is detached, and set after it is attached.
        if !on {
            queue.attached.store(false, Ordering::Release);
        }
        let flag = if on { IFF_ATTACH_QUEUE } else { IFF_DETACH_QUEUE };
        let mut wanted = Request::default().with(&flag.to_ne_bytes());
        match request(queue.fd.as_fd(), TUNSETQUEUE, &mut wanted) {
            Ok(()) => queue.attached.store(on, Ordering::Release),
            Err(error) => {
                self.warned.call_once(|| {
                    tracing::warn!("tap: queue {port} cannot be attached or detached: {error}");
                });
                queue.attached.store(!on, Ordering::Release);
            }
        }
    }

    fn mac(&self) -> Option<Mac> {
        self.mac
    }

    fn link(&self) -> &Arc<Link> {
        &self.link
    }

    fn ports(&self) -> Vec<Box<dyn Port>> {
        let port = |queue: &Arc<Queue>| TapPort {
            queue: queue.clone(),
            link: self.link.clone(),
            vectors: Vectors::default(),
            full: false,
            gone: false,
        };
        self.queues.iter().map(|queue| Box::new(port(queue)) as Box<dyn Port>).collect()
    }

    fn taps(&self) -> anyhow::Result<Vec<File>> {
        let file = |queue: &Arc<Queue>| queue.fd.try_clone().map(File::from);
        self.queues.iter().map(file).collect::<io::Result<_>>().context("a tap for the kernel")
    }
}

struct TapPort {
    queue: Arc<Queue>,
    link: Arc<Link>,
    vectors: Vectors,
    full: bool,
    /// The interface was deleted on the host.
    gone: bool,
}

impl TapPort {
    fn is_alive(&self) -> bool {
        !self.gone && self.queue.attached.load(Ordering::Acquire)
    }

    /// Handles an error of the kernel; true when the operation can be tried again later.
    fn should_retry(&mut self, error: &io::Error) -> bool {
        match error.raw_os_error() {
            Some(libc::EAGAIN) => return true,
            // The interface is gone for good. Polling its queue would return at once, every time.
            Some(libc::EBADFD | libc::ENODEV) if self.is_alive() => {
                self.gone = true;
                tracing::warn!("the tap was deleted on the host: the link is down for good");
                self.link.set_connected(false);
            }
            // The kernel refuses the frame, or the interface is down: the frame is lost.
            _ => tracing::trace!("tap: {error}"),
        }
        false
    }
}

impl Port for TapPort {
    fn receive(
        &mut self,
        memory: &Memory,
        to: &[Piece],
        rest: &mut [u8],
    ) -> Result<usize, TransferError> {
        if !self.is_alive() {
            return Err(TransferError::WouldBlock);
        }
        loop {
            let read = self.vectors.read(self.queue.fd.as_fd(), memory, to, rest);
            match read.map_err(|NoMemory| TransferError::Refused)? {
                Ok(length) if length >= HEADER_LENGTH => return Ok(length),
                Ok(_) => return Err(TransferError::WouldBlock),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() == Some(libc::EFAULT) => {
                    return Err(TransferError::Refused);
                }
                Err(error) => {
                    self.should_retry(&error);
                    return Err(TransferError::WouldBlock);
                }
            }
        }
    }

    fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), TransferError> {
        if !(HEADER_LENGTH + MIN_FRAME..=HEADER_LENGTH + MAX_FRAME).contains(&super::length(from)) {
            return Err(TransferError::Refused);
        }
        self.full = false;
        if !self.is_alive() {
            return Ok(());
        }
        let written = self.vectors.write(self.queue.fd.as_fd(), memory, from);
        match written.map_err(|NoMemory| TransferError::Refused)? {
            Err(error) if self.should_retry(&error) => {
                self.full = true;
                Err(TransferError::WouldBlock)
            }
            _ => Ok(()),
        }
    }

    fn wait(&mut self) -> Wait<'_> {
        let fd = self.is_alive().then(|| self.queue.fd.as_fd());
        Wait { fd, full: self.full, ..Wait::default() }
    }
}

#[cfg(test)]
mod test;
