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

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, mpsc};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use self::control::{Control, Filter};
use self::inbox::{Inbox, ReceiveFeatures};
use self::kernel_rings::KernelRings;
use self::pair::Pair;

use super::{Identity, Queue, Virtio, on_pci};
use crate::device::{Device, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::Address;
use crate::sleep::{Orders, Sleep};
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
    negotiated: Mutex<u64>,
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

    /// A driver without MQ uses one pair.
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
    /// The link (plugged in, MTU) that the guest knows; `None` if it knows one of another process.
    known_link: Option<(bool, Option<u16>)>,
    /// It has not started yet.
    is_new: bool,
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
            known_link: Some((backend.link().is_up(), backend.link().mtu())),
            is_new: true,
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

    fn spawn(
        &mut self,
        number: u16,
        queues: [Option<Queue>; 3],
        features: ReceiveFeatures,
    ) -> anyhow::Result<()> {
        let at = usize::from(number);
        for queue in queues.iter().flatten() {
            queue.memory.watch(&self.nic.orders[at].bell);
        }
        let bells = queues.iter().flatten().map(|queue| queue.bell.clone()).collect();
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

    fn kernel_rings(
        &mut self,
        at: usize,
        control: Option<&Queue>,
    ) -> anyhow::Result<Option<KernelRings>> {
        let Some(vhost) = self.kernel.get_mut(at).and_then(Option::take) else { return Ok(None) };
        let (link, features) = (self.nic.backend.link(), self.nic.negotiated());
        let orders = &self.nic.orders[at];
        KernelRings::new(vhost, link, features, orders, control.map(|queue| &queue.bell)).map(Some)
    }

    /// Reports link changes to the guest, starting with those since the last stop.
    fn watch(&mut self, signal: Option<Arc<super::Signal>>) {
        let link = self.nic.backend.link();
        let Some(signal) = signal else {
            link.watch(None);
            self.known_link = Some((link.is_up(), link.mtu()));
            return;
        };
        let (nic, notified) = (self.nic.clone(), signal.clone());
        link.watch(Some(Box::new(move || {
            nic.link_changed();
            notified.configuration();
        })));
        if self.known_link != Some((link.is_up(), link.mtu())) {
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
        self.is_new = false;
        {
            let control = self.nic.control();
            self.nic.set_offloads(&control);
            self.nic.activate(&control);
        }
        let signal = queues.first().map(|queue| queue.signal.clone());
        let mut pairs: Vec<[Option<Queue>; 3]> =
            (0..self.nic.pairs).map(|_| [const { None }; 3]).collect();
        for queue in queues {
            match self.role(queue.number, negotiated) {
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
                self.kernel[at] = Some(rings.vhost);
            }
        }
        self.watch(None);
        queues
    }

    fn save(&self) -> Saved {
        let mut control = self.nic.control().clone();
        // Its driver keeps this address, even if the machine goes on with another default.
        control.mac.get_or_insert(self.nic.mac.0);
        Saved::of(&control)
    }

    fn restore(&mut self, saved: Saved) -> anyhow::Result<()> {
        if self.is_new && saved != Saved::default() {
            // The guest may come from another process, at another place of the network.
            self.known_link = None;
        }
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
mod test;
