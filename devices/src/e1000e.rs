//! e1000e: Intel's 82574L Gigabit Ethernet controller ("82574 GbE Controller Family Datasheet",
//! revision 3.4), which Windows and Linux have a driver for.
//!
//! It has two queues in each direction, checksums, segmentation, VLAN tags, receive side scaling,
//! and INTx, MSI or MSI-X. Wake-up, flow control, time stamps, loopback and management are absent:
//! their registers keep what is written. A received CRC is zero.
//!
//! Threats: a driver may program any ring, buffer, offset and length. `card.rs` checks rings,
//! `segments.rs` offsets in packets, `receive.rs` buffers; `frame.rs` reads headers of the peer.
//! Frames are copied before they are looked at. The thread serves a bounded number of frames, then
//! its orders.

mod card;
mod engine;
mod frame;
mod nvm;
mod phy;
mod receive;
mod registers;
mod segments;
mod signals;
mod transmit;

use std::sync::{Arc, Mutex};
use std::thread::{Builder, JoinHandle};

use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};

use self::card::{Card, State};
use self::engine::{Engine, Queues, lock};
use self::signals::{Signals, VECTORS};
use crate::alarm::Alarm;
use crate::device::{Access, Device, Region, Saved};
use crate::grants::{Build, Grants, HostSide};
use crate::pci::{Address, Bar, Id, Identity};
use crate::sleep::{Orders, Sleep};
use host::mac::Mac;
use host::memory::Memory;
use host::net::link::{Link, MIN_MTU};
use host::net::{self, Network, Options};

/// `--device e1000e,to=tap:vm0`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// The network backend: `tap:NAME`, `macvtap:PATH`, `passt:SOCKET`, `fd:N` or `none`.
    pub to: Network,
    /// MAC address. Defaults to that of the macvtap, or to one derived from `to` and the slot, as
    /// for virtio-net.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mac: Option<Mac>,
    /// Maximum packet size (MTU) of a tap that is created. The guest cannot read it from this card.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Leave checksums and segmentation of large packets to the backend, where it supports that.
    pub offloads: bool,
    /// PCI slot. Defaults to the first free one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

impl Default for Config {
    fn default() -> Self {
        Self { to: Network::None, mac: None, mtu: None, offloads: true, slot: None }
    }
}

const ID: Id =
    Id { vendor: 0x8086, device: 0x10d3, class: 0x02_0000, revision: 0, subsystem: (0x8086, 0) };
// The BARs: registers, flash (which is empty), and ports for both.
const REGISTERS: u8 = 0;
const FLASH: u8 = 1;
const PORTS: u8 = 2;
const TABLE: u8 = 3;
const BAR_SIZE: u64 = 128 << 10;
/// The ports: an offset, and the register there (10.1.2).
const IOADDR: u64 = 0;
const IODATA: u64 = 4;
const PORTS_SIZE: u64 = 32;
/// PCI Express, version 1: an endpoint that is integrated into the root complex, at 2.5 GT/s.
const EXPRESS: (u8, [u8; 18]) =
    (0x10, [0x91, 0, 0, 0x80, 0, 0, 0, 0x20, 0, 0, 0x11, 0, 0, 0, 0, 0, 0x11, 0]);

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        if let Some(mtu) = self.mtu {
            ensure!(mtu >= MIN_MTU, "mtu={mtu}: the minimum is {MIN_MTU}");
        }
        let backend = net::open(&self.to, Options { pairs: 1, mtu: self.mtu })?;
        grants.shared().links.add(grants.name(), backend.link().clone());
        let identity = Identity {
            at: self.slot,
            bars: vec![
                (REGISTERS, Bar::Memory32(BAR_SIZE)),
                (FLASH, Bar::Memory32(BAR_SIZE)),
                (PORTS, Bar::Port(PORTS_SIZE)),
            ],
            msix: Some((VECTORS, TABLE)),
            msi: true,
            pin: Some(0),
            capabilities: vec![(EXPRESS.0, EXPRESS.1.to_vec())],
            ..Identity::new(ID)
        };
        let slot = grants.pci(identity)?;
        let words = || {
            let slot = self.slot.map(|slot| slot.to_string()).unwrap_or_default();
            Mac::derived_from(&format!("{} {slot}", self.to))
        };
        let address = self.mac.or_else(|| backend.mac()).unwrap_or_else(words).0;
        let orders = Arc::new(Orders::new()?);
        let signals = Signals::new(slot.interrupt.clone());
        let card = Card::new(address, signals, backend.link().clone(), orders.clone());
        let card = Arc::new(Mutex::new(card));
        let engine =
            Engine::new(card.clone(), backend.clone(), slot.memory.clone(), self.offloads)?;
        let device = E1000e {
            card,
            address,
            link: backend.link().clone(),
            memory: slot.memory.clone(),
            orders,
            regions: [REGISTERS, FLASH, PORTS].map(|bar| slot.bar(bar).region),
            port_address: 0,
            engine: Some(engine),
            thread: None,
            last_link: backend.link().is_up(),
            parked: None,
        };
        Ok(slot.wrap(Box::new(device)))
    }

    fn host_side(&self) -> HostSide<'_> {
        HostSide::Network(&self.to)
    }

    fn detach_host_side(&mut self) {
        self.to = Network::None;
    }
}

struct E1000e {
    card: Arc<Mutex<Card>>,
    /// The MAC address at power-on.
    address: [u8; 6],
    link: Arc<Link>,
    memory: Memory,
    orders: Arc<Orders>,
    /// Registers, flash, ports.
    regions: [Region; 3],
    port_address: u32,
    /// Present while no thread runs.
    engine: Option<Engine>,
    thread: Option<JoinHandle<Engine>>,
    /// Whether the link was up when the device last stopped.
    last_link: bool,
    /// The state when it was parked.
    parked: Option<Saved>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SavedState {
    card: State,
    port_address: u32,
    #[serde(default)]
    queues: Queues,
}

impl E1000e {
    /// The register that an access to BAR 0 or 2 means.
    fn target(&self, region: Region, offset: u64) -> Option<u32> {
        let [registers, _, ports] = self.regions;
        match offset {
            _ if region == registers => u32::try_from(offset).ok(),
            IODATA if region == ports => Some(self.port_address),
            _ => None,
        }
    }

    fn stop(&mut self) {
        self.link.watch(None);
        if let Some(thread) = self.thread.take() {
            self.orders.set_stop(true);
            self.engine = Some(thread.join().expect("a panic ends the process"));
        }
        let alarm = lock(&self.card).signals().set_alarm(None);
        // Its callback may wait for the lock, so the lock must be free.
        drop(alarm);
        self.last_link = self.link.is_up();
    }

    fn start(&mut self) -> anyhow::Result<()> {
        let Some(engine) = self.engine.take() else { return Ok(()) };
        self.memory.watch(&self.orders.bell);
        let card = self.card.clone();
        let alarm = Alarm::spawn("net-throttle", move || lock(&card).send_due())?;
        lock(&self.card).signals().set_alarm(Some(alarm));
        let mut sleep = Sleep::new(&self.orders, Vec::new())?;
        let orders = self.orders.clone();
        orders.set_stop(false);
        let body = move || engine.run(&orders, &mut sleep);
        let thread = Builder::new().name("net-e1000e".into()).spawn(body);
        self.thread = Some(thread.context("a thread for a network card")?);
        let card = self.card.clone();
        self.link.watch(Some(Box::new(move || lock(&card).link_changed())));
        if self.link.is_up() != self.last_link {
            lock(&self.card).link_changed();
        }
        Ok(())
    }
}

impl Device for E1000e {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        if region == self.regions[1] {
            data.fill(0xff);
            return Access::Done;
        }
        if region == self.regions[2] && offset == IOADDR && data.len() == 4 {
            data.copy_from_slice(&self.port_address.to_le_bytes());
            return Access::Done;
        }
        let Some(register) = self.target(region, offset) else { return Access::Ignored };
        // Narrow reads return a part of the register.
        let skip = (register % 4) as usize;
        let Some(value) = lock(&self.card).read(register & !3) else {
            data.fill(0);
            return Access::Done;
        };
        match value.to_le_bytes().get(skip..skip + data.len()) {
            Some(bytes) => data.copy_from_slice(bytes),
            None => return Access::Ignored,
        }
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        let Ok(value) = <[u8; 4]>::try_from(data).map(u32::from_le_bytes) else {
            return Access::Ignored;
        };
        if region == self.regions[2] && offset == IOADDR {
            self.port_address = value;
            return Access::Done;
        }
        let register = self.target(region, offset).filter(|it| it % 4 == 0);
        match register.and_then(|it| lock(&self.card).write(it, value)) {
            Some(()) => Access::Done,
            None => Access::Ignored,
        }
    }

    fn park(&mut self) -> Saved {
        self.stop();
        let card = lock(&self.card);
        let queues = self.engine.as_ref().map(|it| it.queues(card.resets)).unwrap_or_default();
        let state = SavedState { card: card.save(), port_address: self.port_address, queues };
        drop(card);
        let saved = Saved::of(&state);
        self.parked = Some(saved.clone());
        saved
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        // After a pause, the card is as it was, with the frames that are on their way.
        if self.parked.take().as_ref() == Some(&saved) {
            return self.start();
        }
        // Otherwise it is reset, or comes from elsewhere.
        let arrives = saved != Saved::default();
        let state: SavedState = saved.take().context("e1000e")?;
        self.port_address = state.port_address;
        lock(&self.card).restore(state.card, self.address)?;
        if let Some(engine) = &mut self.engine {
            engine.restore(state.queues);
            if arrives {
                engine.announce();
            }
        }
        self.start()
    }
}

impl Drop for E1000e {
    fn drop(&mut self) {
        self.stop();
    }
}

#[cfg(test)]
mod test;
