//! The board that holds all devices: it grants resources, records the grants, and parks and runs
//! the devices.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use anyhow::{Context, bail};

use crate::bus::{Extent, Seat, Window, vacant};
use crate::device::{Device, Kind, Region, Saved};
use crate::grants::{Claim, Events, Grants, Shared};
use crate::hypervisor::Hypervisor;
use crate::line::{Line, Wire};
use crate::pci;
use crate::registry;
use crate::resources::Resources;
use host::memory::Memory;

struct Occupied {
    seat: Arc<Seat>,
    claims: Vec<Claim>,
}

pub struct Board {
    pub shared: Shared,
    /// See `Grants::goes_on`.
    pub goes_on: bool,
    seats: Vec<Occupied>,
    wires: BTreeMap<u32, Arc<Wire>>,
    functions: BTreeMap<pci::Address, String>,
}

impl Board {
    pub fn new(memory: Memory, host: Arc<dyn Hypervisor>, events: Events) -> Self {
        let shared = Shared {
            memory,
            hypervisor: host,
            events,
            spaces: Arc::default(),
            buttons: Arc::default(),
            input: Arc::default(),
            screens: Arc::default(),
            sound: Arc::default(),
            clipboard: Arc::default(),
            disks: Arc::default(),
            links: Arc::default(),
            balloon: Arc::default(),
            smi: Arc::default(),
            usb: Arc::default(),
            time: Arc::default(),
        };
        let (wires, functions) = (BTreeMap::new(), BTreeMap::new());
        Self { shared, goes_on: false, seats: Vec::new(), wires, functions }
    }

    /// The device stays parked until `run`.
    pub fn add(
        &mut self,
        kind: &str,
        build: impl FnOnce(&mut dyn Grants) -> anyhow::Result<Box<dyn Device>>,
    ) -> anyhow::Result<()> {
        let name = self.name(kind);
        let seat = Arc::new(Seat::new(name.clone()));
        let mut grants =
            BoardGrants { board: self, seat: seat.clone(), claims: Vec::new(), regions: 0 };
        let device = build(&mut grants).context(name)?;
        let claims = grants.claims;
        *seat.device.lock().expect("no device panicked") = device;
        self.seats.push(Occupied { seat, claims });
        Ok(())
    }

    /// Only USB devices can be unplugged: no other device refers to their seats.
    pub fn unplug(&mut self, name: &str) -> anyhow::Result<()> {
        self.shared.usb.unplug(name)?;
        self.vacate(name);
        Ok(())
    }

    /// Removes devices of the host that were unplugged there, and returns their names.
    pub fn remove_retired(&mut self) -> Vec<String> {
        let retired = self.shared.usb.take_retired();
        retired.iter().for_each(|name| self.vacate(name));
        retired
    }

    fn vacate(&mut self, name: &str) {
        if let Some(at) = self.seats.iter().position(|it| it.seat.name == name) {
            let gone = self.seats.remove(at);
            let device = gone.seat.device.lock().map(|mut seat| mem::replace(&mut *seat, vacant()));
            drop(device);
        }
    }

    /// Returns a free name for a device: `serial`, or `serial.2` for the second one.
    fn name(&self, kind: &str) -> String {
        let taken = |name: &String| self.seats.iter().any(|other| other.seat.name == *name);
        let mut count = 1;
        loop {
            let name = registry::name(kind, count);
            if !taken(&name) {
                return name;
            }
            count += 1;
        }
    }

    pub fn claims(&self) -> impl Iterator<Item = (&str, &[Claim])> {
        self.seats.iter().map(|it| (it.seat.name.as_str(), it.claims.as_slice()))
    }

    /// Prepares a snapshot. Before `park`; the processors must be stopped.
    pub fn gather(&self) -> anyhow::Result<()> {
        for it in &self.seats {
            let mut device = it.seat.device.lock().expect("no device panicked");
            device.gather().with_context(|| it.seat.name.clone())?;
        }
        Ok(())
    }

    /// Parks all devices in the order in which they were added. The processors must be stopped.
    pub fn park(&self) -> Vec<(String, Saved)> {
        let park = |it: &Occupied| {
            let saved = it.seat.device.lock().expect("no device panicked").park();
            (it.seat.name.clone(), saved)
        };
        self.seats.iter().map(park).collect()
    }

    /// Resumes all devices from `saved`. A device without an entry starts from power-on. An entry
    /// without a device is an error.
    pub fn run(&self, saved: Vec<(String, Saved)>) -> anyhow::Result<()> {
        let mut saved: BTreeMap<String, Saved> = saved.into_iter().collect();
        for it in &self.seats {
            let state = saved.remove(&it.seat.name).unwrap_or_default();
            let mut device = it.seat.device.lock().expect("no device panicked");
            device.run(state).with_context(|| it.seat.name.clone())?;
        }
        if let Some((name, _)) = saved.pop_first() {
            bail!("the saved state has a device `{name}`, which this machine does not have");
        }
        Ok(())
    }

    pub fn reset(&self) -> anyhow::Result<()> {
        self.park();
        self.run(Vec::new())
    }

    /// Finds the device whose fixed range overlaps this range.
    ///
    /// A range that lies completely inside another one is allowed: it is a finer decoder, like
    /// 0xCF9 in 0xCF8-0xCFF.
    fn holder(&self, kind: Kind, range: &Range<u64>) -> Option<(&str, Range<u64>)> {
        self.claims().find_map(|(name, claims)| {
            claims.iter().find_map(|claim| match claim {
                Claim::Fixed(its, held)
                    if *its == kind
                        && held.start < range.end
                        && range.start < held.end
                        && !encloses(held, range) =>
                {
                    Some((name, held.clone()))
                }
                _ => None,
            })
        })
    }
}

fn encloses(outer: &Range<u64>, inner: &Range<u64>) -> bool {
    outer.start <= inner.start && inner.end <= outer.end && outer != inner
}

impl Drop for Board {
    /// A device's windows refer to its seat, and the seat to the device. Removing the devices
    /// breaks this reference cycle, and ends their threads, wires and doorbells.
    fn drop(&mut self) {
        for it in self.seats.drain(..) {
            let device = it.seat.device.lock().map(|mut seat| mem::replace(&mut *seat, vacant()));
            drop(device);
        }
    }
}

/// The board's side of [`Grants`] for one device, while it is built.
struct BoardGrants<'a> {
    board: &'a mut Board,
    seat: Arc<Seat>,
    claims: Vec<Claim>,
    regions: u16,
}

impl BoardGrants<'_> {
    fn region(&mut self) -> Region {
        self.regions += 1;
        Region(self.regions - 1)
    }
}

impl Resources for BoardGrants<'_> {
    fn claim(&mut self, kind: Kind, range: Range<u64>) -> anyhow::Result<Region> {
        if range.is_empty() {
            bail!("the requested range at {:#x} is empty", range.start);
        }
        if let Some((name, held)) = self.board.holder(kind, &range) {
            bail!(
                "no free {kind} at {:#x}-{:#x}: `{name}` has {:#x}-{:#x}",
                range.start,
                range.end - 1,
                held.start,
                held.end - 1
            );
        }
        let region = self.region();
        self.board.shared.spaces.of(kind).insert(range.clone(), region, self.seat.clone());
        self.claims.push(Claim::Fixed(kind, range));
        Ok(region)
    }

    fn window(&mut self, kind: Kind, size: u64) -> Arc<Window> {
        let region = self.region();
        let Shared { spaces, hypervisor: host, .. } = self.board.shared.clone();
        let window = Window::new(Extent { kind, size }, region, self.seat.clone(), spaces, host);
        let window = Arc::new(window);
        self.claims.push(Claim::Window(window.clone()));
        window
    }

    fn line(&mut self, gsi: u32) -> anyhow::Result<Arc<Line>> {
        let wire = match self.board.wires.get(&gsi) {
            Some(wire) => wire.clone(),
            None => {
                let wire = Arc::new(Wire::new(self.board.shared.hypervisor.pin(gsi)?));
                self.board.wires.insert(gsi, wire.clone());
                wire
            }
        };
        self.claims.push(Claim::Line(gsi));
        Ok(Arc::new(Line::new(wire)))
    }
}

impl Grants for BoardGrants<'_> {
    fn pci(&mut self, identity: pci::Identity) -> anyhow::Result<pci::Slot> {
        let taken = &self.board.functions;
        let at = match identity.at {
            Some(at) => at,
            None => pci::Address::first_free(taken).context("all 32 PCI slots are taken")?,
        };
        if let Some(name) = taken.get(&at) {
            bail!("PCI slot {at} is taken by `{name}`");
        }
        self.board.functions.insert(at, self.seat.name.clone());
        self.claims.push(Claim::Pci(at, identity.id));
        let Shared { hypervisor: host, memory, .. } = self.board.shared.clone();
        pci::Slot::new(at, identity, self, host.as_ref(), &memory)
    }

    fn acpi(&mut self, hid: &'static str) {
        self.claims.push(Claim::Acpi(hid));
    }

    fn name(&self) -> &str {
        &self.seat.name
    }

    fn goes_on(&self) -> bool {
        self.board.goes_on
    }

    fn shared(&self) -> &Shared {
        &self.board.shared
    }
}
