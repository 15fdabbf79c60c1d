//! Regions that the guest moves: the BARs of PCI functions, the windows of the chip set.
//!
//! A guest moves BARs one by one while other devices work, so windows may overlap for a moment. The
//! map alone decides which of them an access reaches. All else follows the map: a doorbell is
//! connected while a write to it would reach its window, and memory is mapped while no other region
//! hides a part of it. Therefore a move also settles the windows that the moved one overlapped, or
//! overlaps now: two look-ups for each of their doorbells, and a call of the host for those that
//! change.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard};
use std::{fmt, mem};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::{Seat, Space, Spaces, overlap};
use crate::device::{Kind, Region};
use crate::hypervisor::{Backing, Doorbell, Hypervisor};

/// The address space of a window, and its size in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Extent {
    pub(crate) kind: Kind,
    pub(crate) size: u64,
}

/// A region that the guest may move at any time. Its doorbells and its memory move with it.
pub struct Window {
    pub kind: Kind,
    pub size: u64,
    pub region: Region,
    /// The key of its placement.
    key: u64,
    seat: Arc<Seat>,
    spaces: Arc<Spaces>,
    hypervisor: Arc<dyn Hypervisor>,
    /// The address, or [`NOWHERE`]. Apart from the placement, whose lock is held over changes of
    /// memory, which take milliseconds.
    place: AtomicU64,
}

/// No window begins there: its end would be beyond the address space.
const NOWHERE: u64 = u64::MAX;

/// The placements of all windows, under one lock, because a move changes its neighbours.
pub(super) type Placements = BTreeMap<u64, Placement>;

pub(super) struct Placement {
    kind: Kind,
    size: u64,
    region: Region,
    seat: Arc<Seat>,
    at: Option<u64>,
    bells: Vec<Bell>,
    mapping: Option<Mapping>,
}

struct Bell {
    /// The address is an offset in the window.
    bell: Doorbell,
    event: Arc<EventFd>,
    /// The doorbell that the hypervisor has.
    connected: Option<Doorbell>,
}

/// Memory that the guest accesses without an exit.
struct Mapping {
    backing: Arc<dyn Backing>,
    at: Option<u64>,
    /// Whether mapping failed, or would hide another region. It is not tried again until something
    /// there changes.
    refused: bool,
    /// Whether a failure was logged. A guest that maps it over other memory must not fill the log.
    logged: bool,
}

impl Placement {
    fn range(&self) -> Option<Range<u64>> {
        self.at.map(|at| at..at + self.size)
    }

    /// The doorbell at its present address, if a write to it reaches this window.
    ///
    /// A doorbell takes writes of processors in system-management mode too. It must not take those
    /// that are for another device there, such as the flash: the guest chooses the address.
    fn placed(&self, bell: Doorbell, spaces: &Spaces) -> Option<Doorbell> {
        let bell = bell.moved(self.at?);
        let length = u64::from(bell.length);
        let (shortest, longest) = (length.max(1), if length == 0 { 8 } else { length });
        let write = |length| bell.address..bell.address.saturating_add(length);
        let in_smm = self.kind == Kind::Memory && spaces.smm_memory.overlaps(&write(longest));
        let space = spaces.of(self.kind);
        let reached = space.reaches(&write(shortest), self.region, &self.seat);
        (reached && !in_smm).then_some(bell)
    }

    /// Where the memory may be mapped.
    fn free_place(&self, space: &Space) -> Option<u64> {
        self.at.filter(|_| !space.hides(self.region, &self.seat))
    }

    /// Disconnects and unmaps everything that is in the way of another window, or in a wrong place.
    fn withdraw(&mut self, spaces: &Spaces, host: &dyn Hypervisor) {
        let mut bells = mem::take(&mut self.bells);
        for it in &mut bells {
            let wanted = self.placed(it.bell, spaces);
            if let Some(old) = it.connected.take_if(|old| wanted != Some(*old)) {
                host.disconnect_doorbell(old, &it.event);
            }
        }
        self.bells = bells;
        let place = self.free_place(spaces.of(self.kind));
        if let Some(mapping) = &mut self.mapping {
            mapping.refused = false;
            if mapping.at.take_if(|old| place != Some(*old)).is_some() {
                mapping.backing.map(None).ok();
            }
        }
    }

    /// Connects the doorbells that writes reach now.
    fn connect(&mut self, spaces: &Spaces, host: &dyn Hypervisor) {
        let mut bells = mem::take(&mut self.bells);
        for it in bells.iter_mut().filter(|it| it.connected.is_none()) {
            let Some(bell) = self.placed(it.bell, spaces) else { continue };
            match host.connect_doorbell(bell, &it.event) {
                Ok(()) => it.connected = Some(bell),
                // The write reaches the device instead. The next move there tries again.
                Err(error) => self.log_once(&error),
            }
        }
        self.bells = bells;
    }

    fn log_once(&self, error: &anyhow::Error) {
        const LOGGED: u8 = 4;
        if self.seat.logged.fetch_or(LOGGED, Ordering::Relaxed) & LOGGED == 0 {
            let device = &self.seat.name;
            tracing::debug!(device, "a doorbell is slow (logged once): {error:#}");
        }
    }
}

impl Window {
    pub(crate) fn new(
        Extent { kind, size }: Extent,
        region: Region,
        seat: Arc<Seat>,
        spaces: Arc<Spaces>,
        hypervisor: Arc<dyn Hypervisor>,
    ) -> Self {
        let mut windows = spaces.windows.lock().expect("no device panicked");
        let key = windows.last_key_value().map_or(0, |(last, _)| last + 1);
        let (bells, owner) = (Vec::new(), seat.clone());
        let new = Placement { kind, size, region, seat: owner, at: None, bells, mapping: None };
        windows.insert(key, new);
        drop(windows);
        let place = AtomicU64::new(NOWHERE);
        Self { kind, size, region, key, seat, spaces, hypervisor, place }
    }

    fn windows(&self) -> MutexGuard<'_, Placements> {
        self.spaces.windows.lock().expect("no device panicked")
    }

    fn own<'a>(&self, windows: &'a mut Placements) -> &'a mut Placement {
        windows.get_mut(&self.key).expect("a placement lives as long as its window")
    }

    /// The present address, if the window is on the bus.
    pub fn at(&self) -> Option<u64> {
        Some(self.place.load(Ordering::Acquire)).filter(|at| *at != NOWHERE)
    }

    /// Moves the window, or removes it from the bus. It may overlap others.
    pub fn move_to(&self, at: Option<u64>) {
        let at = at.filter(|at| at.checked_add(self.size).is_some());
        let mut windows = self.windows();
        let own = self.own(&mut windows);
        let old = own.range();
        if old.as_ref().map(|old| old.start) == at {
            return;
        }
        own.at = at;
        self.place.store(at.unwrap_or(NOWHERE), Ordering::Release);
        let new = own.range();
        let space = self.spaces.of(self.kind);
        if old.is_some() {
            space.remove(self.region, &self.seat);
        }
        if let Some(new) = new.clone() {
            space.insert(new, self.region, self.seat.clone());
        }
        let changed = |it: &Range<u64>| old.iter().chain(&new).any(|range| overlap(range, it));
        let is_neighbour = |(key, it): &(&u64, &mut Placement)| {
            **key == self.key || it.kind == self.kind && it.range().is_some_and(|it| changed(&it))
        };
        // The hypervisor has at most one doorbell, and one mapping, at an address. So the old ones
        // go first.
        for (_, it) in windows.iter_mut().filter(is_neighbour) {
            it.withdraw(&self.spaces, self.hypervisor.as_ref());
        }
        for (_, it) in windows.iter_mut().filter(is_neighbour) {
            it.connect(&self.spaces, self.hypervisor.as_ref());
        }
    }

    /// Sets the memory that fills the window for the guest once `map_backing` is called.
    pub fn set_backing(&self, backing: Arc<dyn Backing>) {
        let mapping = Mapping { backing, at: None, refused: false, logged: false };
        self.own(&mut self.windows()).mapping = Some(mapping);
    }

    /// The device calls this when an access of the guest to the window reaches it. From now on the
    /// guest accesses the memory set by `set_backing` directly, if the host can map it. Mapping
    /// waits for the first access because a change of memory takes 5 ms on KVM, and firmware often
    /// moves windows and never uses many of them.
    pub fn map_backing(&self) {
        let mut windows = self.windows();
        let own = self.own(&mut windows);
        let place = own.free_place(self.spaces.of(self.kind));
        let is_open = |it: &&mut Mapping| it.at.is_none() && !it.refused;
        let Some(mapping) = own.mapping.as_mut().filter(is_open) else { return };
        mapping.refused = true;
        let Some(at) = place else { return };
        match mapping.backing.map(Some(at)) {
            Ok(()) => mapping.at = Some(at),
            Err(error) if !mem::replace(&mut mapping.logged, true) => {
                let device = &self.seat.name;
                tracing::info!(device, "the guest moved a window over other memory: {error:#}");
            }
            Err(_) => {}
        }
    }

    /// Creates an event that a guest's write to `offset` raises without leaving the kernel. If the
    /// host does not support this, the write reaches the device instead, so the device handles
    /// both.
    pub fn doorbell(
        &self,
        offset: u64,
        length: u32,
        value: Option<u64>,
    ) -> anyhow::Result<Arc<EventFd>> {
        let event = Arc::new(EventFd::new(EFD_NONBLOCK)?);
        self.connect(Doorbell { kind: self.kind, address: offset, length, value }, event.clone());
        Ok(event)
    }

    /// Makes a guest's write of `length` bytes to `offset`, of any value, raise the device's
    /// `event`, until `disconnect_doorbell`. As with a doorbell, the write may reach the device
    /// instead.
    pub fn connect_doorbell(&self, offset: u64, length: u32, event: Arc<EventFd>) {
        let bell = Doorbell { kind: self.kind, address: offset, length, value: None };
        self.connect(bell, event);
    }

    fn connect(&self, bell: Doorbell, event: Arc<EventFd>) {
        let mut windows = self.windows();
        let own = self.own(&mut windows);
        own.bells.push(Bell { bell, event, connected: None });
        own.connect(&self.spaces, self.hypervisor.as_ref());
    }

    /// Disconnects the events at `offset`: writes reach the device from now on.
    pub fn disconnect_doorbell(&self, offset: u64) {
        let mut windows = self.windows();
        let own = self.own(&mut windows);
        for it in own.bells.extract_if(.., |it| it.bell.address == offset) {
            if let Some(bell) = it.connected {
                self.hypervisor.disconnect_doorbell(bell, &it.event);
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.move_to(None);
        // The lock is free again before the placement is dropped.
        let placement = self.windows().remove(&self.key);
        drop(placement);
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({self})")
    }
}

impl fmt::Display for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = self.kind;
        match self.at() {
            Some(at) => write!(f, "{kind} {at:#x}-{:#x} (movable)", at + (self.size - 1)),
            None => write!(f, "{kind} {:#x} bytes, not placed", self.size),
        }
    }
}

#[cfg(test)]
mod test;
