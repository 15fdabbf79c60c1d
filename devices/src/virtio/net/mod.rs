//! virtio-net: a network controller (VIRTIO 1.3, 5.1).
//!
//! One thread serves each queue pair, and the first one also serves the control queue. Offloads
//! that the peer does not support are not offered. An idle device uses no CPU time.
//!
//! Threats: `queue.rs` bounds what a driver can do to rings, `inbox.rs` checks buffers and
//! `control.rs` commands. The host's side checks frames. It passes their headers on to the kernel,
//! which checks them like those of any process that has a tap.

mod control;
mod inbox;
mod kernel_rings;
mod pair;
mod sleep;

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use self::control::{Control, Filter};
use self::inbox::{Inbox, ReceiveFeatures};
use self::kernel_rings::KernelRings;
use self::pair::Pair;
use self::sleep::{Orders, Sleep};
use super::{Identity, Queue, Virtio, on_pci};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::Address;
use host::mac::Mac;
use host::memory::{Memory, Piece};
use host::net::link::MIN_MTU;
use host::net::vhost::{self, Mode, Vhost};
use host::net::{self, Backend, Network, Offloads, Port};

/// `--device virtio-net,to=tap:vm0`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The network backend: `tap:NAME`, `macvtap:PATH`, `passt:SOCKET`, `fd:N` (with more queue
    /// pairs `fd:N:N...`) or `none`.
    pub to: Network,
    /// MAC address. Defaults to that of the macvtap, or to one derived from `to` and the slot. A
    /// derived address is stable, but guests on other hosts with the same `to` and slot have the
    /// same one: set it where such guests share a network.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Number of queue pairs, 1 to 16: this many processors can send and receive at once.
    pub pairs: u16,
    /// Maximum packet size (MTU) that is reported to the guest. Defaults to that of the tap.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Offload checksums and segmentation of large packets to the backend, and to the guest, where
    /// the backend supports it.
    pub offloads: bool,
    /// Let the kernel serve a tap's queues (vhost-net): `auto`, which uses it if `/dev/vhost-net`
    /// can be opened, `on` or `off`. `status` reports how many queue pairs the kernel serves now.
    pub vhost: Mode,
    /// PCI slot. Defaults to the first free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
    /// Tests only: replaces vhost-net by a simulation with this seed.
    #[serde(skip)]
    pub simulated_vhost: Option<u64>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            to: Network::None,
            mac: None,
            pairs: 1,
            mtu: None,
            offloads: true,
            vhost: Mode::default(),
            slot: None,
            simulated_vhost: None,
        }
    }
}

impl Config {
    /// The same configuration with a simulation in place of vhost-net, for tests.
    #[must_use]
    pub fn simulate_vhost(self, seed: u64) -> Self {
        Self { simulated_vhost: Some(seed), ..self }
    }
}

/// Feature bits (5.1.3)
const CSUM: u64 = 1 << 0;
const GUEST_CSUM: u64 = 1 << 1;
const CTRL_GUEST_OFFLOADS: u64 = 1 << 2;
const MTU: u64 = 1 << 3;
const MAC: u64 = 1 << 5;
const GUEST_TSO4: u64 = 1 << 7;
const GUEST_TSO6: u64 = 1 << 8;
const GUEST_ECN: u64 = 1 << 9;
const HOST_TSO4: u64 = 1 << 11;
const HOST_TSO6: u64 = 1 << 12;
const HOST_ECN: u64 = 1 << 13;
const MRG_RXBUF: u64 = 1 << 15;
const STATUS: u64 = 1 << 16;
const CTRL_VQ: u64 = 1 << 17;
const CTRL_RX: u64 = 1 << 18;
const CTRL_VLAN: u64 = 1 << 19;
const CTRL_RX_EXTRA: u64 = 1 << 20;
const GUEST_ANNOUNCE: u64 = 1 << 21;
const MQ: u64 = 1 << 22;
const CTRL_MAC_ADDR: u64 = 1 << 23;
const GUEST_USO4: u64 = 1 << 54;
const GUEST_USO6: u64 = 1 << 55;
const HOST_USO: u64 = 1 << 56;
const SPEED_DUPLEX: u64 = 1 << 63;

/// Feature bits that are offered whatever the backend supports.
const ALWAYS: u64 = MAC
    | MRG_RXBUF
    | STATUS
    | CTRL_VQ
    | CTRL_RX
    | CTRL_VLAN
    | CTRL_RX_EXTRA
    | GUEST_ANNOUNCE
    | CTRL_MAC_ADDR
    | SPEED_DUPLEX;

/// Link status bits (5.1.4)
const LINK_UP: u16 = 1;
const ANNOUNCE: u16 = 2;
/// The reported link: speed in Mbit/s, and full duplex.
const SPEED: u32 = 10_000;
const FULL: u8 = 1;

/// Entries of a queue. NetKVM puts up to 64 KiB behind each entry of a receive queue.
const QUEUE_SIZE: u16 = 256;
const CONTROL_QUEUE_SIZE: u16 = 64;
/// Maximum number of queue pairs: NetKVM uses no more.
const MAX_PAIRS: u16 = 16;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let pairs = self.pairs;
        ensure!(
            (1..=MAX_PAIRS).contains(&pairs),
            "pairs={pairs}: a network device has 1 to {MAX_PAIRS} queue pairs"
        );
        if let Some(mtu) = self.mtu {
            ensure!(mtu >= MIN_MTU, "mtu={mtu}: the minimum is {MIN_MTU}");
        }
        let backend = net::open(&self.to, net::Options { pairs, mtu: self.mtu })?;
        grants.shared().links.add(grants.name(), backend.link().clone());
        let memory = &grants.shared().memory;
        let kernel = match self.simulated_vhost {
            None => vhost::open(self.vhost, backend.taps()?, memory)?,
            Some(seed) => {
                crate::testutil::vhost::random_kernels(seed, pairs, &memory.ungated_ram())?
            }
        };
        on_pci(Net::new(&self, &backend, kernel)?, self.slot, grants)
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Network(&self.to)
    }

    fn detach_host_side(&mut self) {
        self.to = Network::None;
    }
}

/// The receive offloads that these feature bits contain.
fn offloads(features: u64) -> Offloads {
    let has = |bits: u64| features & bits == bits;
    Offloads {
        checksum: has(GUEST_CSUM),
        tso4: has(GUEST_TSO4),
        tso6: has(GUEST_TSO6),
        ecn: has(GUEST_ECN),
        // Taps enable both or neither.
        uso: has(GUEST_USO4 | GUEST_USO6),
    }
}

/// The feature bits that are offered.
fn features(backend: &dyn Backend, config: &Config) -> u64 {
    let can = if config.offloads { backend.offloads() } else { Offloads::default() };
    let can = can.and(Offloads::ALL);
    [
        (true, ALWAYS),
        (config.pairs > 1, MQ),
        (backend.link().mtu().is_some(), MTU),
        (can.checksum, CSUM | GUEST_CSUM | CTRL_GUEST_OFFLOADS),
        (can.tso4, HOST_TSO4 | GUEST_TSO4),
        (can.tso6, HOST_TSO6 | GUEST_TSO6),
        (can.ecn && (can.tso4 || can.tso6), HOST_ECN | GUEST_ECN),
        (can.uso, HOST_USO | GUEST_USO4 | GUEST_USO6),
    ]
    .into_iter()
    .fold(0, |sum, (on, bits)| if on { sum | bits } else { sum })
}

/// State shared between the controller and the threads of its queue pairs.
struct Nic {
    backend: Arc<dyn Backend>,
    control: Mutex<Control>,
    /// Number of commands executed. A pair reads the filter again when it changes.
    commands: AtomicU32,
    /// Number of pairs that may receive frames.
    active: AtomicU16,
    mac: Mac,
    pairs: u16,
    /// The negotiated feature bits.
    negotiated: Mutex<u64>,
    /// One for each pair.
    orders: Vec<Orders>,
}

impl Nic {
    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().expect("no device panicked")
    }

    fn filter(&self) -> (Filter, control::Address) {
        let control = self.control();
        (control.filter.clone(), control.mac.unwrap_or(self.mac.0))
    }

    /// Executes a command of the driver.
    fn execute(&self, memory: &Memory, command: &[Piece]) {
        let mut control = self.control();
        let before = control.clone();
        if control.execute(memory, command, self.pairs).is_none() || *control == before {
            return;
        }
        if control.offloads != before.offloads {
            self.set_offloads(&control);
        }
        if control.pairs != before.pairs {
            self.activate(&control);
        }
        drop(control);
        self.commands.fetch_add(1, Ordering::Release);
    }

    fn negotiated(&self) -> u64 {
        *self.negotiated.lock().expect("no device panicked")
    }

    /// Enables exactly the receive offloads that the driver wants.
    fn set_offloads(&self, control: &Control) {
        let wanted = control.offloads.unwrap_or(u64::MAX);
        self.backend.set_offloads(offloads(self.negotiated() & wanted));
    }

    /// Activates the pairs that the driver uses. A driver without MQ uses one.
    fn activate(&self, control: &Control) {
        let pairs = if self.negotiated() & MQ == 0 { 1 } else { control.pairs.min(self.pairs) };
        (0..pairs).for_each(|pair| self.backend.attach(pair.into(), true));
        self.active.store(pairs, Ordering::Release);
        (pairs..self.pairs).for_each(|pair| self.backend.attach(pair.into(), false));
        self.wake();
    }

    fn wake(&self) {
        self.orders.iter().for_each(Orders::wake);
    }

    /// Called when the link has changed.
    fn link_changed(&self) {
        if self.backend.link().is_up() && self.negotiated() & GUEST_ANNOUNCE != 0 {
            self.control().announce = true;
        }
        self.wake();
    }
}

struct Net {
    nic: Arc<Nic>,
    features: u64,
    /// Ports that no thread uses now.
    ports: Vec<Option<Box<dyn Port>>>,
    /// The vhost-net instances of these ports, where the kernel may serve the rings.
    kernel: Vec<Option<Vhost>>,
    threads: Vec<JoinHandle<Option<Pair>>>,
    /// Enabled queues that no thread serves.
    idle: Vec<Queue>,
    /// The link state (plugged in, MTU) when the device last stopped.
    last_link: (bool, Option<u16>),
}

impl Net {
    fn new(
        config: &Config,
        backend: &Arc<dyn Backend>,
        kernel: Vec<Vhost>,
    ) -> anyhow::Result<Self> {
        let words = || {
            let slot = config.slot.map(|slot| slot.to_string()).unwrap_or_default();
            Mac::derived_from(&format!("{} {slot}", config.to))
        };
        let mac = config.mac.or_else(|| backend.mac()).unwrap_or_else(words);
        let orders = (0..config.pairs).map(|_| Orders::new()).collect::<anyhow::Result<_>>()?;
        let nic = Nic {
            control: Mutex::default(),
            commands: AtomicU32::new(0),
            active: AtomicU16::new(1),
            mac,
            pairs: config.pairs,
            negotiated: Mutex::new(0),
            orders,
            backend: backend.clone(),
        };
        Ok(Self {
            nic: Arc::new(nic),
            features: features(&**backend, config),
            ports: backend.ports().into_iter().map(Some).collect(),
            kernel: kernel.into_iter().map(Some).collect(),
            threads: Vec::new(),
            idle: Vec::new(),
            last_link: (backend.link().is_up(), backend.link().mtu()),
        })
    }

    /// The pair that a queue belongs to, and its role: 0 receives, 1 sends, 2 is the control queue.
    fn role(&self, queue: u16, negotiated: u64) -> Option<(usize, u16)> {
        // 5.1.2: without MQ, the control queue follows the first pair.
        let pairs = if negotiated & MQ == 0 { 1 } else { self.nic.pairs };
        match queue {
            _ if queue < 2 * pairs => Some((usize::from(queue / 2), queue % 2)),
            _ if queue == 2 * pairs && negotiated & CTRL_VQ != 0 => Some((0, 2)),
            _ => None,
        }
    }

    /// Starts the thread of a pair.
    fn spawn(
        &mut self,
        number: u16,
        queues: [Option<Queue>; 3],
        features: ReceiveFeatures,
    ) -> anyhow::Result<()> {
        let at = usize::from(number);
        for queue in queues.iter().flatten() {
            queue.memory().watch(&self.nic.orders[at].bell);
        }
        let bells = queues.iter().flatten().map(|queue| queue.bell().clone()).collect();
        let sleep = Sleep::new(&self.nic.orders[at], bells)?;
        let (give, take) = mpsc::channel::<Pair>();
        let nic = self.nic.clone();
        let body = move || take.recv().ok().map(|pair| pair.run(&nic.orders[at]));
        let thread = Builder::new().name(format!("net-{number}")).spawn(body);
        let thread = thread.context("a thread for a queue pair")?;
        let port = self.ports[at].take().context("a port for each queue pair")?;
        let [receive, transmit, control] = queues;
        let kernel_rings = self.kernel_rings(at, control.as_ref())?;
        let pair = Pair {
            number,
            receive,
            transmit,
            control,
            port,
            nic: self.nic.clone(),
            features,
            inbox: Inbox::new(),
            sleep,
            kernel_rings,
            full: false,
            unplugged: false,
        };
        self.nic.orders[at].set_stop(false);
        give.send(pair).ok().context("a thread for a queue pair")?;
        self.threads.push(thread);
        Ok(())
    }

    /// The kernel side of a pair, if the kernel may serve its rings.
    fn kernel_rings(
        &mut self,
        at: usize,
        control: Option<&Queue>,
    ) -> anyhow::Result<Option<KernelRings>> {
        let Some(vhost) = self.kernel.get_mut(at).and_then(Option::take) else { return Ok(None) };
        let (link, features) = (self.nic.backend.link(), self.nic.negotiated());
        let orders = &self.nic.orders[at];
        KernelRings::new(vhost, link, features, orders, control.map(Queue::bell)).map(Some)
    }

    /// Reports link changes to the guest, starting with those since the last stop.
    fn watch(&mut self, signal: Option<Arc<super::Signal>>) {
        let link = self.nic.backend.link();
        let Some(signal) = signal else {
            link.watch(None);
            self.last_link = (link.is_up(), link.mtu());
            return;
        };
        let (nic, notified) = (self.nic.clone(), signal.clone());
        link.watch(Some(Box::new(move || {
            nic.link_changed();
            notified.configuration();
        })));
        if (link.is_up(), link.mtu()) != self.last_link {
            self.nic.link_changed();
            signal.configuration();
        }
    }
}

impl Virtio for Net {
    fn identity(&self) -> Identity {
        let mut queues = vec![QUEUE_SIZE; 2 * usize::from(self.nic.pairs)];
        queues.push(CONTROL_QUEUE_SIZE);
        Identity { id: 1, name: "net", class: 0x02_0000, queues, features: self.features }
    }

    fn config(&self) -> Vec<u8> {
        let (link, control) = (self.nic.backend.link(), self.nic.control());
        let mut status = if link.is_up() { LINK_UP } else { 0 };
        status |= if control.announce { ANNOUNCE } else { 0 };
        let mut config = control.mac.unwrap_or(self.nic.mac.0).to_vec();
        config.extend(status.to_le_bytes());
        config.extend(self.nic.pairs.to_le_bytes());
        config.extend(link.mtu().unwrap_or(0).to_le_bytes());
        config.extend(SPEED.to_le_bytes());
        config.push(FULL);
        config
    }

    fn start(&mut self, queues: Vec<Queue>, negotiated: u64) -> anyhow::Result<()> {
        *self.nic.negotiated.lock().expect("no device panicked") = negotiated;
        {
            let control = self.nic.control();
            self.nic.set_offloads(&control);
            self.nic.activate(&control);
        }
        let signal = queues.first().map(|queue| queue.signal().clone());
        let mut pairs: Vec<[Option<Queue>; 3]> =
            (0..self.nic.pairs).map(|_| [const { None }; 3]).collect();
        for queue in queues {
            match self.role(queue.number(), negotiated) {
                Some((pair, role)) => pairs[pair][usize::from(role)] = Some(queue),
                None => self.idle.push(queue),
            }
        }
        self.watch(signal);
        let features = ReceiveFeatures {
            merge: negotiated & MRG_RXBUF != 0,
            checksum: negotiated & GUEST_CSUM != 0,
            by_vlan: negotiated & CTRL_VLAN != 0,
        };
        for (number, queues) in (0..).zip(pairs) {
            if queues.iter().any(Option::is_some) {
                self.spawn(number, queues, features)?;
            }
        }
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.nic.orders.iter().for_each(|orders| orders.set_stop(true));
        let mut queues = std::mem::take(&mut self.idle);
        for thread in self.threads.drain(..) {
            let Some(pair) = thread.join().expect("a panic ends the process") else { continue };
            queues.extend([pair.receive, pair.transmit, pair.control].into_iter().flatten());
            let at = usize::from(pair.number);
            self.ports[at] = Some(pair.port);
            if let Some(rings) = pair.kernel_rings {
                self.kernel[at] = Some(rings.into_vhost());
            }
        }
        self.watch(None);
        queues
    }

    fn save(&self) -> Saved {
        Saved::of(&*self.nic.control())
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        let control: Control = saved.take()?;
        ensure!(control.filter.is_valid(), "a filter table with too many addresses");
        let pairs = control.pairs;
        ensure!((1..=self.nic.pairs).contains(&pairs), "{pairs} of {} pairs", self.nic.pairs);
        *self.nic.control() = control;
        self.nic.commands.fetch_add(1, Ordering::Release);
        Ok(())
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        // Breaks a reference cycle: the link's callback refers to us, and we refer to the link.
        self.stop();
    }
}

#[cfg(test)]
mod test {
    use std::net::UdpSocket;
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixDatagram;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::device::Kind;
    use crate::testutil::Bench;
    use crate::testutil::driver::{Descriptor, Driver, EVENT_IDX, WRITE};
    use host::net::link::Link;
    use host::net::{
        HEADER_LENGTH, Options, TransferError, Wait, length, read_pieces, write_pieces,
    };
    use host::testutil::tap::{in_namespace, ip, packet, set_addresses};

    const AT: Address = Address::new(3, 0);
    const OWN: [u8; 6] = [2, 0, 0, 0, 0, 1];

    /// A network of datagrams, each a frame behind its header. It records the calls it received.
    struct Lab {
        link: Arc<Link>,
        ends: Mutex<Vec<UnixDatagram>>,
        asked: Arc<Mutex<Vec<String>>>,
        offloads: Offloads,
    }

    impl Lab {
        /// Also returns the far ends of its cables.
        fn new(pairs: usize, offloads: Offloads) -> (Arc<Self>, Vec<UnixDatagram>) {
            let pairs = (0..pairs).map(|_| {
                let (ours, theirs) = UnixDatagram::pair().unwrap();
                ours.set_nonblocking(true).unwrap();
                theirs.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
                (ours, theirs)
            });
            let (ours, theirs) = pairs.unzip();
            let link = Arc::new(Link::new(Some(1450)));
            let asked = Arc::default();
            (Arc::new(Self { link, ends: Mutex::new(ours), asked, offloads }), theirs)
        }
    }

    impl Backend for Lab {
        fn offloads(&self) -> Offloads {
            self.offloads
        }
        fn set_offloads(&self, offloads: Offloads) {
            let Offloads { checksum, tso4, tso6, ecn, uso } = offloads;
            let bits = [checksum, tso4, tso6, ecn, uso].map(u8::from);
            self.asked.lock().unwrap().push(format!("leave {bits:?}"));
        }
        fn attach(&self, port: usize, on: bool) {
            self.asked.lock().unwrap().push(format!("attach {port} {on}"));
        }
        fn link(&self) -> &Arc<Link> {
            &self.link
        }
        fn ports(&self) -> Vec<Box<dyn Port>> {
            let ends = std::mem::take(&mut *self.ends.lock().unwrap());
            ends.into_iter().map(|end| Box::new(Cable(end)) as Box<dyn Port>).collect()
        }
    }

    struct Cable(UnixDatagram);

    impl Port for Cable {
        fn receive(
            &mut self,
            memory: &Memory,
            to: &[Piece],
            rest: &mut [u8],
        ) -> Result<usize, TransferError> {
            let mut frame = vec![0; 70_000];
            let count = self.0.recv(&mut frame).map_err(|_| TransferError::WouldBlock)?;
            let done =
                write_pieces(memory, to, 0, &frame[..count]).map_err(|_| TransferError::Refused)?;
            rest[..count - done].copy_from_slice(&frame[done..count]);
            Ok(count)
        }
        fn send(&mut self, memory: &Memory, from: &[Piece]) -> Result<(), TransferError> {
            let mut frame = vec![0; length(from)];
            if frame.len() < HEADER_LENGTH {
                return Err(TransferError::Refused);
            }
            read_pieces(memory, from, 0, &mut frame).map_err(|_| TransferError::Refused)?;
            self.0.send(&frame).map(drop).map_err(|_| TransferError::WouldBlock)
        }
        fn wait(&mut self) -> Wait<'_> {
            Wait { fd: Some(self.0.as_fd()), ..Wait::default() }
        }
    }

    fn bench(pairs: u16, offloads: Offloads) -> (Bench, Arc<Lab>, Vec<UnixDatagram>) {
        let (lab, ends) = Lab::new(pairs.into(), offloads);
        let mut bench = Bench::new(4 << 20);
        let config = Config {
            pairs,
            mac: Some(Mac(OWN)),
            offloads: true,
            slot: Some(AT),
            ..Config::default()
        };
        let backend: Arc<dyn Backend> = lab.clone();
        bench
            .board
            .add("net", |grants| on_pci(Net::new(&config, &backend, Vec::new())?, Some(AT), grants))
            .unwrap();
        bench.board.run(Vec::new()).unwrap();
        (bench, lab, ends)
    }

    /// A driver that negotiated these features, with its first `queues` queues enabled.
    fn driver(bench: &Bench, features: u64, queues: u16) -> Driver<'_> {
        let mut driver = Driver::find(bench, AT);
        assert!(driver.negotiate(features), "{features:#x} of {:#x}", driver.features());
        (0..queues).for_each(|queue| driver.enable(queue, 64));
        driver.start();
        driver
    }

    /// A frame to or from the guest, behind its header.
    fn frame(seed: u8, length: usize) -> Vec<u8> {
        let payload = (0..length - 14).map(|at| seed.wrapping_add(at.to_le_bytes()[0]));
        [&[0; HEADER_LENGTH][..], &OWN, &[2, 0, 0, 0, 0, seed], &[8, 0]]
            .concat()
            .into_iter()
            .chain(payload)
            .collect()
    }

    /// The frame in the next used buffers, and their number.
    fn content(driver: &mut Driver<'_>, buffers: &[(u64, u32)]) -> (Vec<u8>, usize) {
        let mut bytes = Vec::new();
        let first = driver.wait(0);
        let taken = |driver: &Driver<'_>, used: crate::testutil::driver::Used| {
            let buffer = buffers[usize::try_from(used.head).unwrap() % buffers.len()];
            driver.bytes(buffer.0, used.length as usize)
        };
        bytes.extend(taken(driver, first));
        let count = usize::from(u16::from_le_bytes([bytes[10], bytes[11]]));
        for _ in 1..count {
            // All buffers of a frame are returned at once.
            let used = driver.take(0).expect("a frame comes whole");
            bytes.extend(taken(driver, used));
        }
        (bytes, count)
    }

    /// Adds buffers of this length to queue 0, each as its own chain.
    fn offer(driver: &mut Driver<'_>, count: usize, length: u32) -> Vec<(u64, u32)> {
        let buffers: Vec<_> =
            (0..count).map(|_| (driver.allocate(length.into()), length)).collect();
        for (at, length) in &buffers {
            driver.offer(0, &[(*at, *length, true)]);
        }
        driver.kick(0);
        buffers
    }

    fn is_same(got: &[u8], sent: &[u8]) -> bool {
        got.len() == sent.len() && got[..10] == sent[..10] && got[12..] == sent[12..]
    }

    /// Sends a command and checks that the answer is the one that NetKVM expects.
    fn command(driver: &mut Driver<'_>, queue: u16, words: &[u8]) {
        let at = driver.allocate(words.len() as u64 + 16);
        driver.bench.memory.write(at, words).unwrap();
        driver.bench.memory.write(at + words.len() as u64, &[0xee; 2]).unwrap();
        let length = u32::try_from(words.len()).unwrap();
        let cut = length.min(2);
        let answer = at + u64::from(length);
        let all = [(at, cut, false), (at + u64::from(cut), length - cut, false), (answer, 1, true)];
        let pieces: Vec<_> = all.into_iter().filter(|piece| piece.1 > 0).collect();
        driver.offer(queue, &pieces);
        driver.kick(queue);
        assert_eq!(driver.wait(queue).length, 1, "{words:?}");
        assert_eq!(driver.bytes(answer, 2), [OK, 0xee], "{words:?}");
    }
    use super::control::OK;

    fn wait(what: &str, done: impl Fn() -> bool) {
        let start = Instant::now();
        while !done() {
            assert!(start.elapsed() < Duration::from_secs(10), "{what} never came");
            std::thread::yield_now();
        }
    }

    #[test]
    fn offers_what_the_other_end_can_do_and_says_what_it_is() {
        let (bench, lab, _ends) = bench(2, Offloads::ALL);
        let mut driver = Driver::find(&bench, AT);
        assert_eq!(driver.config(0), [0xf4, 0x1a, 0x41, 0x10]);
        assert_eq!(driver.config(8), [1, 0, 0, 2]);
        let all = 0x8000_0000_0000_0000 | 7 << 54;
        assert_eq!(driver.features() & !0x101_7000_0000 & !(1 << 40), all | 0xff_bbaf);
        assert!(driver.negotiate(all));
        assert_eq!(driver.device(0), OWN);
        assert_eq!(driver.device(6), [1, 0, 2, 0, 0xaa, 5]);
        assert_eq!(driver.device(12), [0x10, 0x27, 0, 0, 1]);
        lab.link.set_mtu(9000).unwrap();
        lab.link.set_plugged(false);
        assert_eq!(driver.device(6), [0, 0, 2, 0, 0x28, 0x23]);
        let (plain, ..) = self::bench(1, Offloads::default());
        let offered = Driver::find(&plain, AT).features();
        assert_eq!(offered & (0x3f87 | 7 << 54 | MQ), 0, "the peer has no offloads");
        assert_eq!(offered & ALWAYS, ALWAYS);
    }

    #[test]
    fn frames_go_both_ways_whole_and_with_interrupts() {
        for features in [MRG_RXBUF | EVENT_IDX, MRG_RXBUF, EVENT_IDX, 0] {
            let (bench, _lab, ends) = bench(1, Offloads::default());
            let mut driver = driver(&bench, features, 2);
            let merge = features & MRG_RXBUF != 0;
            let buffers = offer(&mut driver, 32, if merge { 1526 } else { 10_000 });
            for (seed, length) in [(1, 14), (2, 60), (3, 1514), (4, 1515), (5, 9014), (6, 3038)] {
                let sent = frame(seed, length);
                ends[0].send(&sent).unwrap();
                let (got, count) = content(&mut driver, &buffers);
                assert!(is_same(&got, &sent), "{length} bytes, {features:#x}");
                assert_eq!(count, if merge { sent.len().div_ceil(1526) } else { 1 });
            }
            for (seed, length) in [(1, 14), (2, 1514), (3, 40_000)] {
                let sent = frame(seed, length);
                let at = driver.allocate(sent.len() as u64);
                driver.bench.memory.write(at, &sent).unwrap();
                let whole = u32::try_from(sent.len()).unwrap();
                driver
                    .offer(1, &[(at, 7, false), (at + 7, 9, false), (at + 16, whole - 16, false)]);
                driver.kick(1);
                let mut got = vec![0; 70_000];
                let count = ends[0].recv(&mut got).unwrap();
                assert!(got[..count] == sent, "{length} bytes, {features:#x}");
                assert_eq!(driver.wait(1).length, 0);
            }
            assert_ne!(driver.isr() & 1, 0, "{features:#x}");
        }
    }

    #[test]
    fn a_frame_without_buffers_waits_and_one_that_is_too_long_for_them_is_dropped() {
        let (bench, _lab, ends) = bench(1, Offloads::default());
        let mut driver = driver(&bench, MRG_RXBUF | EVENT_IDX, 2);
        let sent = [frame(1, 4000), frame(2, 60), frame(3, 70)];
        for sent in &sent {
            ends[0].send(sent).unwrap();
        }
        let mut buffers = offer(&mut driver, 1, 1000);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(driver.take(0), None, "a frame is only delivered complete");
        buffers.extend(offer(&mut driver, 3, 1000));
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(driver.take(0), None);
        buffers.extend(offer(&mut driver, 3, 1000));
        let (got, count) = content(&mut driver, &buffers);
        assert!(is_same(&got, &sent[0]) && count == 5);
        for sent in &sent[1..] {
            assert!(is_same(&content(&mut driver, &buffers).0, sent));
        }
        let (bench, _lab, ends) = self::bench(1, Offloads::default());
        let mut driver = self::driver(&bench, 0, 2);
        let buffers = offer(&mut driver, 1, 100);
        ends[0].send(&frame(1, 90)).unwrap();
        ends[0].send(&frame(2, 88)).unwrap();
        assert!(is_same(&content(&mut driver, &buffers).0, &frame(2, 88)));
    }

    #[test]
    fn every_command_of_netkvm_and_any_other_is_answered_with_one_byte() {
        let features = CTRL_VQ | CTRL_RX | CTRL_VLAN | CTRL_MAC_ADDR | CTRL_GUEST_OFFLOADS;
        let checks = GUEST_CSUM | GUEST_TSO4 | GUEST_TSO6 | GUEST_ANNOUNCE;
        for (more, queue) in [(MQ, 8), (0, 2)] {
            let (bench, lab, _ends) = bench(4, Offloads::ALL);
            let mut driver = driver(&bench, features | checks | more, 9);
            let mut ask = |words: &[u8]| command(&mut driver, queue, words);
            ask(&[4, 0, 4, 0]);
            ask(&[4, 1, 0, 0, 0, 0]);
            ask(&[5, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
            ask(&[1, 1, 2, 3, 4, 5, 6, 7]);
            (0..6).for_each(|mode| ask(&[0, mode, 0]));
            ask(&[1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 2, 3, 4, 5, 6]);
            (0..10).for_each(|number| ask(&[2, 0, number, 0]));
            ask(&[2, 1, 5, 0]);
            ask(&[3, 0]);
            for odd in [&[6, 0, 1][..], &[0xff, 0xff], &[1, 0], &[4, 0, 0, 0], &[4, 0, 9, 9], &[0]]
            {
                ask(odd);
            }
            assert_eq!(driver.device(0), [2, 3, 4, 5, 6, 7]);
            let asked = lab.asked.lock().unwrap().clone();
            assert_eq!(asked.iter().any(|it| it == "attach 3 true"), more != 0);
            assert_eq!(asked[0], "leave [1, 1, 1, 0, 0]");
            assert!(asked.iter().any(|it| it == "leave [1, 0, 0, 0, 0]"));
            // A command without room for the answer, and one without readable bytes.
            let (none, room) = (driver.allocate(16), driver.allocate(16));
            driver.offer(queue, &[(none, 2, false)]);
            driver.offer(queue, &[(room, 4, true)]);
            driver.kick(queue);
            assert_eq!([driver.wait(queue).length, driver.wait(queue).length], [0, 1]);
        }
    }

    #[test]
    fn frames_come_by_as_many_pairs_as_the_driver_uses() {
        let (bench, lab, ends) = bench(2, Offloads::default());
        let mut driver = driver(&bench, CTRL_VQ | MQ, 5);
        let buffer = driver.allocate(2000);
        driver.offer(2, &[(buffer, 2000, true)]);
        driver.kick(2);
        ends[1].send(&frame(7, 60)).unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(driver.take(2), None, "one pair is in use");
        command(&mut driver, 4, &[4, 0, 2, 0]);
        assert_eq!(driver.wait(2).length, 72);
        let sent = frame(8, 60);
        bench.memory.write(buffer, &sent).unwrap();
        driver.offer(3, &[(buffer, 72, false)]);
        driver.kick(3);
        let mut got = [0; 100];
        assert_eq!((ends[1].recv(&mut got).unwrap(), &got[..72]), (72, &sent[..]));
        assert_eq!(
            lab.asked.lock().unwrap()[1..],
            ["attach 0 true", "attach 1 false", "attach 0 true", "attach 1 true"]
        );
    }

    #[test]
    fn tells_the_guest_of_a_cable_that_is_pulled_and_plugged_in() {
        let (bench, lab, ends) = bench(1, Offloads::default());
        let mut driver = driver(&bench, CTRL_VQ | STATUS | GUEST_ANNOUNCE | MRG_RXBUF, 3);
        let buffers = offer(&mut driver, 4, 2000);
        driver.isr();
        lab.link.set_plugged(false);
        assert_eq!((driver.isr() & 2, driver.device(6)), (2, [0, 0]));
        ends[0].send(&frame(1, 60)).unwrap();
        let at = driver.allocate(100);
        driver.offer(1, &[(at, 72, false)]);
        driver.kick(1);
        assert_eq!(driver.wait(1).length, 0, "sent, but lost");
        std::thread::sleep(Duration::from_millis(20));
        lab.link.set_plugged(true);
        assert_eq!(
            (driver.isr() & 2, driver.device(6)),
            (2, [3, 0]),
            "link up, and a request to announce"
        );
        command(&mut driver, 2, &[3, 0]);
        assert_eq!(driver.device(6), [1, 0]);
        // There may be no room yet: a socket wakes its sender only when most of it is read, and the
        // guest has four buffers.
        ends[0].set_nonblocking(true).unwrap();
        wait("the old frame's end", || {
            ends[0].send(&frame(2, 61)).ok();
            driver.bytes(buffers[0].0 + 12, 6) == OWN
        });
        assert!(
            is_same(&content(&mut driver, &buffers).0, &frame(2, 61)),
            "frames from before are lost"
        );
        assert!(ends[0].recv(&mut [0; 100]).is_err());
        bench.board.reset().unwrap();
        lab.link.set_mtu(1400).unwrap();
        assert!(lab.link.is_up());
    }

    #[test]
    fn nothing_is_lost_or_doubled_when_the_machine_is_parked_in_between() {
        let (bench, _lab, ends) = bench(1, Offloads::default());
        let features = MRG_RXBUF | EVENT_IDX | CTRL_VQ | CTRL_RX;
        let mut driver = driver(&bench, features, 3);
        command(&mut driver, 2, &[0, 0, 0]);
        let buffers = offer(&mut driver, 63, 200);
        let room = driver.allocate(63 * 100);
        for round in 0..200_u8 {
            let (sent, at) = (frame(round, 60), room + 100 * u64::from(round % 63));
            bench.memory.write(at, &sent).unwrap();
            driver.offer(1, &[(at, 72, false)]);
            driver.kick(1);
            ends[0].send(&sent).unwrap();
            if round % 3 == 0 {
                let saved = bench.board.park();
                bench.board.run(saved.clone()).unwrap();
            }
            let mut got = [0; 100];
            assert_eq!(ends[0].recv(&mut got).unwrap(), 72);
            assert!(got[..72] == sent, "round {round}");
            driver.wait(1);
            let used = driver.wait(0);
            let buffer = buffers[used.head as usize];
            assert!(is_same(&driver.bytes(buffer.0, used.length as usize), &sent), "round {round}");
            let (address, length) = buffer;
            let descriptor = Descriptor { address, length, flags: WRITE, next: 0 };
            driver.write_descriptor(0, u16::try_from(used.head).unwrap(), descriptor);
            driver.publish(0, u16::try_from(used.head).unwrap());
            driver.kick(0);
        }
        let one = bench.board.park();
        bench.board.run(one.clone()).unwrap();
        assert_eq!(bench.board.park(), one);
    }

    #[test]
    fn a_reset_at_any_moment_leaves_a_device_that_works() {
        let (bench, _lab, ends) = bench(2, Offloads::ALL);
        ends[0].set_nonblocking(true).unwrap();
        for round in 0..25_u8 {
            let mut driver = driver(&bench, MRG_RXBUF | CTRL_VQ | MQ | GUEST_CSUM, 5);
            let buffers = offer(&mut driver, 20, 300);
            // Frames in flight in both directions.
            for _ in 0..20 {
                let at = driver.allocate(80);
                driver.bench.memory.write(at, &frame(round, 60)).unwrap();
                driver.offer(1, &[(at, 72, false)]);
            }
            driver.kick(1);
            for _ in 0..2 {
                ends[0].send(&frame(round, 500)).unwrap();
            }
            std::thread::sleep(Duration::from_micros(u64::from(round) * 50));
            driver.set_status(0);
            assert_eq!(driver.status(), 0);
            let index =
                |driver: &Driver<'_>| [0, 1].map(|it| driver.bytes(driver.queues[it].at[2], 4));
            let before = (index(&driver), driver.bytes(buffers[0].0, 300));
            std::thread::sleep(Duration::from_millis(2));
            assert_eq!((index(&driver), driver.bytes(buffers[0].0, 300)), before);
            while ends[0].recv(&mut [0; 1000]).is_ok() {}
        }
        let mut driver = driver(&bench, MRG_RXBUF, 2);
        let buffers = offer(&mut driver, 60, 1000);
        // Frames from before the reset come first.
        let mut frames = 0;
        loop {
            ends[0].send(&frame(99, 77)).ok();
            frames += 1;
            if is_same(&content(&mut driver, &buffers).0, &frame(99, 77)) {
                break;
            }
            assert!(frames < 60, "an endless run of old frames");
        }
    }

    #[test]
    fn buffers_and_frames_that_are_none_go_back_empty() {
        let (bench, _lab, ends) = bench(1, Offloads::default());
        let mut driver = driver(&bench, MRG_RXBUF, 2);
        let at = driver.allocate(4000);
        driver.offer(0, &[(at, 11, true)]);
        driver.offer(0, &[(at, 100, false)]);
        driver.offer(0, &[(4 << 20, 2000, true)]);
        driver.offer(0, &[(at, 2000, true)]);
        driver.kick(0);
        ends[0].send(&frame(1, 60)).unwrap();
        // The valid buffer is returned together with the one outside of memory.
        assert_eq!([(); 4].map(|()| driver.wait(0).length), [0; 4]);
        driver.offer(0, &[(at, 2000, true)]);
        driver.kick(0);
        ends[0].send(&frame(2, 60)).unwrap();
        assert_eq!(driver.wait(0).length, 72);
        for pieces in
            [&[(at, 0, false)][..], &[(at, 11, false)], &[(at, 50, true)], &[(9 << 20, 90, false)]]
        {
            driver.offer(1, pieces);
            driver.kick(1);
            assert_eq!(driver.wait(1).length, 0, "{pieces:?}");
        }
        let crumbs: Vec<_> = (0..50).map(|piece| (at + piece, 1, false)).collect();
        driver.offer(1, &crumbs);
        driver.kick(1);
        assert_eq!(driver.wait(1).length, 0);
        assert_eq!(ends[0].recv(&mut [0; 100]).unwrap(), 50);
        assert_eq!(driver.status() & 64, 0);
    }

    #[test]
    fn an_address_is_always_the_same_for_the_same_words() {
        let address = |to: &str| {
            let config =
                Config { to: Network::try_from(to.to_owned()).unwrap(), ..Config::default() };
            let backend = net::open(&Network::None, Options { pairs: 1, mtu: None }).unwrap();
            Net::new(&Config { pairs: 1, ..config }, &backend, Vec::new())
                .unwrap()
                .nic
                .mac
                .to_string()
        };
        assert_eq!(address("tap:vm0"), "02:4e:a3:44:0f:9f");
        assert_ne!(address("tap:vm0"), address("tap:vm1"));
    }

    /// A driver of a controller on `vm0` with these features, and its receive buffers.
    fn on_tap(bench: &Bench, features: u64) -> (Driver<'_>, Vec<(u64, u32)>) {
        let mut driver = Driver::find(bench, AT);
        assert!(driver.negotiate(features | EVENT_IDX | CTRL_VQ));
        (0..3).for_each(|queue| driver.enable(queue, 64));
        driver.start();
        assert_eq!(driver.device(10), 1500_u16.to_le_bytes());
        // The host notices a plugged cable a moment later.
        wait("the carrier", || ip("-o link show vm0").contains(" state UP "));
        let buffers = offer(&mut driver, 60, 3000);
        (driver, buffers)
    }

    fn tap_bench(offloads: bool, vhost: Mode) -> Bench {
        let mut bench = Bench::new(8 << 20);
        let to = Network::try_from("tap:vm0".to_owned()).unwrap();
        let slot = Some(AT);
        let config = Config { to, pairs: 1, offloads, vhost, slot, ..Config::default() };
        bench.board.add("net", |grants| config.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        bench
    }

    fn host() -> UdpSocket {
        let socket = UdpSocket::bind("10.9.0.1:7").unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket
    }

    /// Sends one datagram from the host to the guest. Returns its frame.
    fn to_guest(
        driver: &mut Driver<'_>,
        buffers: &[(u64, u32)],
        socket: &UdpSocket,
        byte: u8,
    ) -> Vec<u8> {
        socket.send_to(&[byte; 1400], "10.9.0.2:9").unwrap();
        loop {
            let frame = content(driver, buffers).0;
            // The host also sends neighbor discovery frames.
            if frame.len() == HEADER_LENGTH + 42 + 1400 {
                assert_eq!(frame[HEADER_LENGTH + 42..], [byte; 1400]);
                return frame;
            }
        }
    }

    /// Offers one datagram for sending.
    fn send(driver: &mut Driver<'_>, byte: u8) {
        let sent = packet(&[byte; 999], None);
        let at = driver.allocate(sent.len() as u64);
        driver.bench.memory.write(at, &sent).unwrap();
        driver.offer(1, &[(at, u32::try_from(sent.len()).unwrap(), false)]);
        driver.kick(1);
    }

    /// Sends one datagram from the guest to the host.
    fn to_host(driver: &mut Driver<'_>, socket: &UdpSocket, byte: u8) {
        send(driver, byte);
        let mut got = [0; 2000];
        assert_eq!(socket.recv(&mut got).unwrap(), 999);
        assert_eq!(got[..999], [byte; 999]);
        driver.wait(1);
    }

    /// Values of `vhost` that this host supports.
    fn choices() -> &'static [Mode] {
        if std::path::Path::new("/dev/vhost-net").exists() {
            return &[Mode::Off, Mode::On];
        }
        let test = std::thread::current().name().unwrap_or_default().to_owned();
        skip::not_run_in_part(&format!("{test} through vhost-net"), "there is no /dev/vhost-net");
        &[Mode::Off]
    }

    #[test]
    fn a_tap_carries_datagrams_both_ways_with_and_without_offloads() {
        in_namespace(skip::not_run, || {
            ip("tuntap add vm0 mode tap multi_queue");
            set_addresses();
            for vhost in choices() {
                for (offloads, merge) in [(true, MRG_RXBUF), (true, 0), (false, MRG_RXBUF)] {
                    let bench = tap_bench(offloads, *vhost);
                    let agreed = if offloads { CSUM | GUEST_CSUM | GUEST_TSO4 } else { 0 };
                    let (mut driver, buffers) = on_tap(&bench, merge | agreed);
                    let socket = host();
                    for round in 0..20_u8 {
                        let frame = to_guest(&mut driver, &buffers, &socket, round);
                        let partial = u8::from(offloads);
                        assert_eq!(frame[0] & 1, partial, "the checksum is left to the receiver");
                        to_host(&mut driver, &socket, round);
                    }
                }
            }
        });
    }

    #[test]
    fn the_kernel_has_the_rings_while_it_may_and_gives_them_back_as_they_are() {
        in_namespace(skip::not_run, || {
            if choices().len() == 1 {
                return;
            }
            ip("tuntap add vm0 mode tap multi_queue");
            set_addresses();
            let bench = tap_bench(true, Mode::On);
            let link = bench.board.links().find("net").unwrap();
            let (mut driver, buffers) = on_tap(&bench, MRG_RXBUF | CSUM | GUEST_CSUM);
            let socket = host();
            let wait_for_kernel = |count| wait("the rings", || link.kernel_pairs() == count);
            let master =
                |on: u8| bench.write(Kind::Config, AT.config() + 4, &[2 | on << 2, 0, 0, 0]);
            for round in 0..5_u8 {
                wait_for_kernel(1);
                to_guest(&mut driver, &buffers, &socket, round);
                to_host(&mut driver, &socket, round);
                // Frames are lost in both directions while the cable is unplugged.
                link.set_plugged(false);
                wait_for_kernel(0);
                send(&mut driver, 0xee);
                driver.wait(1);
                socket.send_to(&[0xdd; 1400], "10.9.0.2:9").unwrap();
                link.set_plugged(true);
                wait_for_kernel(1);
                to_host(&mut driver, &socket, round + 100);
                to_guest(&mut driver, &buffers, &socket, round + 100);
                master(0);
                wait_for_kernel(0);
                master(1);
                wait_for_kernel(1);
                let saved = bench.board.park();
                assert_eq!(link.kernel_pairs(), 0);
                bench.board.run(saved).unwrap();
            }
            wait_for_kernel(1);
            // An invalid descriptor index breaks the device, whether the kernel or the thread reads
            // it.
            driver.publish(1, 999);
            driver.kick(1);
            wait("the device to break", || driver.status() & 64 != 0);
            assert_eq!(link.kernel_pairs(), 0);
            driver.set_status(0);
            assert_eq!(driver.status(), 0);
            let (mut driver, buffers) = on_tap(&bench, MRG_RXBUF);
            wait_for_kernel(1);
            to_guest(&mut driver, &buffers, &socket, 7);
            driver.set_status(0);
            assert_eq!(link.kernel_pairs(), 0, "nothing is in flight after a reset");
        });
    }

    #[test]
    fn vhost_is_for_taps_alone() {
        let refused = |choice, to: &str| {
            let to = Network::try_from(to.to_owned()).unwrap();
            let config = Config { to, pairs: 1, vhost: choice, ..Config::default() };
            let mut bench = Bench::new(1 << 20);
            bench.board.add("net", |grants| config.build(grants)).err().map(|it| format!("{it:#}"))
        };
        assert!(refused(Mode::On, "none").unwrap().contains("not a tap"));
        assert_eq!(refused(Mode::Auto, "none"), None);
    }
}
