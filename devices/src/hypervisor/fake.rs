//! A machine without a hypervisor, for `vmm inspect`, tests and fuzzers. It records interrupts,
//! messages and mappings.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::EventFd;

use super::{Backing, Doorbell, GuestAccess, Hypervisor, Message, Pin, Route, Smm};
use crate::pages::Pages;
use host::smram::Smram;

#[derive(Clone, Default)]
pub struct Pins(Arc<Mutex<BTreeMap<u32, (bool, u32)>>>);

impl Pins {
    pub fn is_high(&self, gsi: u32) -> bool {
        self.0.lock().unwrap().get(&gsi).is_some_and(|pin| pin.0)
    }

    /// The number of rising edges of the pin.
    pub fn edges(&self, gsi: u32) -> u32 {
        self.0.lock().unwrap().get(&gsi).map_or(0, |pin| pin.1)
    }
}

pub(crate) struct Levels {
    pins: Pins,
    gsi: u32,
}

impl Levels {
    pub(crate) fn new(pins: &Pins, gsi: u32) -> Self {
        Self { pins: pins.clone(), gsi }
    }
}

impl Pin for Levels {
    fn set(&self, high: bool) {
        let mut pins = self.pins.0.lock().unwrap();
        let pin = pins.entry(self.gsi).or_default();
        pin.1 += u32::from(high && !pin.0);
        pin.0 = high;
    }
}

type Bells = Vec<(Doorbell, Arc<EventFd>)>;

/// The host for tests, fuzzers and `vmm inspect`. It has no hypervisor.
#[derive(Clone, Default)]
pub struct FakeHypervisor {
    pub pins: Pins,
    pub sent: Arc<Mutex<Vec<Message>>>,
    bells: Arc<Mutex<Bells>>,
    /// The ranges of guest RAM that were released, up to a limit.
    pub released: Arc<Mutex<Vec<Range<u64>>>>,
    /// The memory that is mapped now. As on KVM, mappings do not overlap.
    pub mapped: Arc<Mutex<Vec<Range<u64>>>>,
    pub smm: Arc<FakeSmm>,
}

impl FakeHypervisor {
    /// The doorbells that are connected now.
    pub fn bells(&self) -> Vec<Doorbell> {
        self.bells.lock().unwrap().iter().map(|(bell, _)| *bell).collect()
    }

    /// Raises the event that a guest's write raises, like the kernel. Returns false if the write
    /// leaves the guest instead.
    pub fn ring(&self, write: Doorbell) -> bool {
        let bells = self.bells.lock().unwrap();
        let hit = bells.iter().find(|(bell, _)| bell.collides(write));
        hit.is_some_and(|(_, event)| event.write(1).is_ok())
    }
}

/// System-management mode: a record of the latest request of each kind.
#[derive(Default)]
pub struct FakeSmm {
    pub smram: Mutex<Smram>,
    /// The number of interrupts for one processor, and for all.
    pub interrupts: Mutex<(u32, u32)>,
}

impl Smm for FakeSmm {
    fn set_smram(&self, smram: Smram) -> anyhow::Result<()> {
        *self.smram.lock().unwrap() = smram;
        Ok(())
    }
    fn interrupt(&self, everybody: bool) {
        let mut interrupts = self.interrupts.lock().unwrap();
        let count = if everybody { &mut interrupts.1 } else { &mut interrupts.0 };
        *count = count.saturating_add(1);
    }
}

const MAX_RELEASED: usize = 4096;

struct Sender {
    message: Mutex<Message>,
    sent: Arc<Mutex<Vec<Message>>>,
}

impl Route for Sender {
    fn set_message(&self, message: Message) -> anyhow::Result<()> {
        *self.message.lock().unwrap() = message;
        Ok(())
    }
    fn send(&self) {
        self.sent.lock().unwrap().push(*self.message.lock().unwrap());
    }
}

/// A backing that no guest accesses.
struct Plain {
    bytes: Mutex<Vec<u8>>,
    at: Mutex<Option<Range<u64>>>,
    mapped: Arc<Mutex<Vec<Range<u64>>>>,
    changed: Mutex<Pages>,
}

impl Backing for Plain {
    fn map(&self, at: Option<u64>) -> anyhow::Result<()> {
        let (mut mine, mut all) = (self.at.lock().unwrap(), self.mapped.lock().unwrap());
        if let Some(old) = mine.take() {
            all.retain(|other| *other != old);
        }
        if let Some(start) = at {
            let range = start..start + self.bytes.lock().unwrap().len() as u64;
            let overlaps = |it: &Range<u64>| it.start < range.end && range.start < it.end;
            anyhow::ensure!(!all.iter().any(overlaps), "there is memory at {start:#x}");
            all.push(range.clone());
            *mine = Some(range);
        }
        Ok(())
    }
    fn read(&self, offset: u64, data: &mut [u8]) {
        let bytes = self.bytes.lock().unwrap();
        let from = bytes.get(usize::try_from(offset).unwrap_or(usize::MAX)..).unwrap_or_default();
        let length = from.len().min(data.len());
        data[..length].copy_from_slice(&from[..length]);
    }
    fn write(&self, offset: u64, data: &[u8]) {
        let mut bytes = self.bytes.lock().unwrap();
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let Some(to) = bytes.get_mut(start..) else { return };
        let length = to.len().min(data.len());
        to[..length].copy_from_slice(&data[..length]);
        self.changed.lock().unwrap().mark(offset, length);
    }
    fn changed(&self, pages: &mut Vec<u64>) {
        self.changed.lock().unwrap().move_to(pages);
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        self.map(None).ok();
    }
}

impl Hypervisor for FakeHypervisor {
    fn pin(&self, gsi: u32) -> anyhow::Result<Box<dyn Pin>> {
        anyhow::ensure!(gsi < 24, "there is no interrupt pin {gsi}");
        Ok(Box::new(Levels::new(&self.pins, gsi)))
    }
    fn route(&self) -> anyhow::Result<Box<dyn Route>> {
        Ok(Box::new(Sender { message: Mutex::default(), sent: self.sent.clone() }))
    }
    fn connect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>) -> anyhow::Result<()> {
        let mut bells = self.bells.lock().unwrap();
        let taken = bells.iter().any(|(other, _)| other.collides(bell));
        anyhow::ensure!(!taken, "there is a doorbell at {:#x}", bell.address);
        bells.push((bell, event.clone()));
        Ok(())
    }
    fn disconnect_doorbell(&self, bell: Doorbell, event: &Arc<EventFd>) {
        let is_own = |it: &(Doorbell, Arc<EventFd>)| it.0 == bell && Arc::ptr_eq(&it.1, event);
        self.bells.lock().unwrap().retain(|it| !is_own(it));
    }
    fn backing(&self, size: u64, guest: GuestAccess) -> anyhow::Result<Arc<dyn Backing>> {
        let draws = if guest == GuestAccess::Tracked { size } else { 0 };
        Ok(Arc::new(Plain {
            bytes: Mutex::new(vec![0; usize::try_from(size)?]),
            at: Mutex::default(),
            mapped: self.mapped.clone(),
            changed: Mutex::new(Pages::empty(draws)),
        }))
    }
    fn release(&self, range: Range<u64>) {
        let mut released = self.released.lock().unwrap();
        if released.len() < MAX_RELEASED {
            released.push(range);
        }
    }
    fn smm(&self) -> anyhow::Result<Arc<dyn Smm>> {
        Ok(self.smm.clone())
    }
}
