//! Pings of the guest, by sockets that can only send echoes (datagram sockets of `IPPROTO_ICMP`).
//! They need no privilege, only a group in the range of `net.ipv4.ping_group_range`.
//!
//! Threats: floods of pings with changing addresses. When slots are scarce, a new flow replaces
//! the least recently used one. Without a free slot, no flow is opened.

use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto};
use tokio::net::UdpSocket;
use tokio::sync::Notify;
use tokio::task::spawn_local;

use super::icmp::{self, Echo, HEADER, IcmpError};
use super::network::Network;
use super::packet::Packet;
use super::quota::{Slot, Slots};

/// The maximum time for an answer.
const IDLE: Duration = Duration::from_secs(30);
/// The maximum size of an answer, in bytes.
const MAX_MESSAGE: usize = 65535;
/// The maximum number of answers of one flow before other tasks run.
const MAX_BURST: usize = 32;

/// Source, destination, and identifier of the guest's program.
type Key = (IpAddr, IpAddr, [u8; 2]);

#[derive(Debug)]
pub struct Echoes {
    flows: RefCell<HashMap<Key, Rc<Flow>>>,
    slots: Slots,
}

#[derive(Debug)]
struct Flow {
    key: Key,
    /// An ICMP socket, whose messages are sent and received like UDP datagrams.
    socket: UdpSocket,
    used: Cell<Instant>,
    end: Notify,
    /// Released after the socket.
    _slot: Slot,
}

impl Echoes {
    pub fn new(slots: usize) -> Self {
        Self { flows: RefCell::default(), slots: Slots::new(slots) }
    }

    pub fn end(&self) {
        self.flows.borrow().values().for_each(|flow| flow.end.notify_one());
    }

    pub fn send(self: &Rc<Self>, network: &Rc<Network>, packet: &Packet<'_>, echo: &Echo<'_>) {
        let key = (packet.from, packet.to, echo.ident);
        let back = (packet.to, packet.from);
        let known = self.flows.borrow().get(&key).cloned();
        let flow = known.map_or_else(|| self.open(network, key), |it| Ok(Some(it)));
        let sent = flow.and_then(|flow| {
            let Some(flow) = flow else { return Ok(0) };
            flow.used.set(Instant::now());
            Ok(rustix::net::send(&flow.socket, echo.message, SendFlags::DONTWAIT)?)
        });
        let Err(error) = sent else { return };
        let reason = IcmpError::of(&error);
        if reason == Some(IcmpError::Prohibited) {
            network.warn_once("ping", || {
                "the guest cannot ping, because the pod may not send echoes: set its sysctl \
                 net.ipv4.ping_group_range to \"0 2147483647\""
                    .to_owned()
            });
        }
        if let Some(reason) = reason {
            network.refuse(back, reason, packet.quoted());
        }
    }

    /// Opens a flow. Nothing without a free slot.
    fn open(self: &Rc<Self>, network: &Rc<Network>, key: Key) -> io::Result<Option<Rc<Flow>>> {
        let Some(slot) = self.slots.take() else { return Ok(None) };
        let (family, protocol) = match key.1 {
            IpAddr::V4(_) => (AddressFamily::INET, ipproto::ICMP),
            IpAddr::V6(_) => (AddressFamily::INET6, ipproto::ICMPV6),
        };
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let kind = SocketType::DGRAM;
        let socket = rustix::net::socket_with(family, kind, flags, Some(protocol))?;
        rustix::net::connect(&socket, &network.outside(SocketAddr::new(key.1, 0)))?;
        let socket = UdpSocket::from_std(socket.into())?;
        let (used, end) = (Cell::new(Instant::now()), Notify::new());
        let flow = Rc::new(Flow { key, socket, used, end, _slot: slot });
        let mut flows = self.flows.borrow_mut();
        if self.slots.are_scarce() {
            let oldest = flows.iter().min_by_key(|(_, flow)| flow.used.get()).map(|(key, _)| *key);
            if let Some(flow) = oldest.and_then(|key| flows.remove(&key)) {
                flow.end.notify_one();
            }
        }
        flows.insert(key, flow.clone());
        let (all, network, task) = (self.clone(), network.clone(), flow.clone());
        spawn_local(async move {
            task.run(&network).await;
            all.remove(&task);
        });
        Ok(Some(flow))
    }

    fn remove(&self, flow: &Rc<Flow>) {
        let mut flows = self.flows.borrow_mut();
        if flows.get(&flow.key).is_some_and(|it| Rc::ptr_eq(it, flow)) {
            flows.remove(&flow.key);
        }
    }
}

impl Flow {
    /// Runs until the flow is idle or ended.
    async fn run(&self, network: &Network) {
        loop {
            let due = self.used.get() + IDLE;
            tokio::select! {
                ready = self.socket.readable() => {
                    if ready.is_err() {
                        return;
                    }
                    self.receive(network);
                    tokio::task::yield_now().await;
                }
                () = self.end.notified() => return,
                () = tokio::time::sleep_until(due.into()) => {
                    if self.used.get() + IDLE <= Instant::now() {
                        return;
                    }
                }
            }
        }
    }

    fn receive(&self, network: &Network) {
        let mut buffer = vec![0; MAX_MESSAGE];
        for _ in 0..MAX_BURST {
            match self.socket.try_recv(&mut buffer) {
                Ok(count) => self.send_to_guest(network, &buffer[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return,
                // An error of an earlier request.
                Err(_) => {}
            }
        }
    }

    /// Passes an answer to the guest, with the guest's identifier in place of the kernel's.
    fn send_to_guest(&self, network: &Network, message: &[u8]) {
        let (guest, peer, ident) = self.key;
        let Some((header, data)) = message.split_first_chunk::<HEADER>() else { return };
        let mut header = *header;
        let v4 = guest.is_ipv4();
        if header[0] != icmp::echo_types(v4).1 {
            return;
        }
        header[icmp::CHECKSUM..icmp::CHECKSUM + 2].fill(0);
        header[4..6].copy_from_slice(&ident);
        network.send((peer, guest), &icmp::payload(v4, &header, data));
    }
}
