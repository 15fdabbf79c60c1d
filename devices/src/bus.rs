//! Maps an address to a device, its region and an offset, in each address space.
//!
//! The map's lock is held only during the lookup. A device is called under its own lock only, so
//! that a register write may move a window. Lock order: device, then map.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::hypervisor::{Backing, Doorbell, Hypervisor};

pub(crate) struct Seat {
    pub(crate) name: String,
    pub(crate) device: Mutex<Box<dyn Device>>,
    /// Bits for the kinds of invalid access already logged. Each is logged once, so that a guest
    /// cannot fill the log.
    logged: AtomicU8,
}

impl Seat {
    pub(crate) fn new(name: String) -> Self {
        Self { name, device: Mutex::new(vacant()), logged: AtomicU8::new(0) }
    }

    fn log_once(&self, kind: u8, verb: &str, hit: &Hit, length: usize) {
        if self.logged.fetch_or(kind, Ordering::Relaxed) & kind == 0 {
            tracing::debug!(
                device = self.name,
                "the guest {verb} {length} bytes at an invalid register: region {}, \
                 offset {:#x} (logged once)",
                hit.region.0,
                hit.offset
            );
        }
    }
}

/// Returns the placeholder in a seat before its device is built and after it is removed.
pub(crate) fn vacant() -> Box<dyn Device> {
    Box::new(Inert(()))
}

/// A device without registers and state. It holds a value until it is removed.
pub(crate) struct Inert<T>(pub(crate) T);

impl<T: Send> Device for Inert<T> {
    fn read(&mut self, _: Region, _: u64, _: &mut [u8]) -> Access {
        Access::Ignored
    }
    fn write(&mut self, _: Region, _: u64, _: &[u8]) -> Access {
        Access::Ignored
    }
    fn park(&mut self) -> Saved {
        Saved::default()
    }
    fn run(&mut self, _: Saved) -> anyhow::Result<()> {
        Ok(())
    }
}

#[derive(Clone)]
struct Entry {
    range: Range<u64>,
    region: Region,
    seat: Arc<Seat>,
}

struct Hit {
    seat: Arc<Seat>,
    region: Region,
    offset: u64,
}

#[derive(Default)]
pub struct Space {
    /// Sorted by start, larger ranges first, so that a backward search finds the innermost range
    /// first.
    map: RwLock<Vec<Entry>>,
}

impl Space {
    /// Fills `data` from the device at `address`. All bits are ones if there is no device.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        // Devices may leave bytes unchanged, and firmware detects an absent device by all-ones.
        data.fill(0xff);
        let Some(hit) = self.find(address, data.len()) else {
            tracing::trace!("read {address:#x}: no device");
            return;
        };
        let access =
            hit.seat.device.lock().expect("no device panicked").read(hit.region, hit.offset, data);
        if access == Access::Ignored {
            data.fill(0xff);
            hit.seat.log_once(1, "read", &hit, data.len());
        }
        tracing::trace!(device = hit.seat.name, "read {address:#x}: {data:02x?}");
    }

    /// Passes `data` to the device at `address`. The write is ignored if there is no device.
    pub fn write(&self, address: u64, data: &[u8]) {
        tracing::trace!("write {address:#x}: {data:02x?}");
        let Some(hit) = self.find(address, data.len()) else { return };
        let access =
            hit.seat.device.lock().expect("no device panicked").write(hit.region, hit.offset, data);
        if access == Access::Ignored {
            hit.seat.log_once(2, "wrote", &hit, data.len());
        }
    }

    /// Finds the innermost range that contains the whole access.
    fn find(&self, address: u64, length: usize) -> Option<Hit> {
        let last = address.checked_add(length as u64 - 1)?;
        let map = self.map.read().expect("no device panicked");
        let after = map.partition_point(|entry| entry.range.start <= address);
        let entry = map[..after].iter().rev().find(|entry| last < entry.range.end)?;
        Some(Hit {
            seat: entry.seat.clone(),
            region: entry.region,
            offset: address - entry.range.start,
        })
    }

    fn overlaps(&self, range: &Range<u64>) -> bool {
        let map = self.map.read().expect("no device panicked");
        map.iter().any(|it| it.range.start < range.end && range.start < it.range.end)
    }

    pub(crate) fn insert(&self, range: Range<u64>, region: Region, seat: Arc<Seat>) {
        let mut map = self.map.write().expect("no device panicked");
        let at = map.partition_point(|entry| {
            (entry.range.start, u64::MAX - entry.range.end) <= (range.start, u64::MAX - range.end)
        });
        map.insert(at, Entry { range, region, seat });
    }

    fn remove(&self, region: Region, seat: &Arc<Seat>) {
        let mut map = self.map.write().expect("no device panicked");
        map.retain(|entry| entry.region != region || !Arc::ptr_eq(&entry.seat, seat));
    }
}

#[derive(Default)]
pub struct Spaces {
    pub port: Space,
    pub memory: Space,
    pub smm_memory: Space,
    pub config: Space,
}

impl Spaces {
    /// The space of an access to memory by a processor, in or outside of system-management mode.
    pub fn memory_of(&self, in_smm: bool, address: u64, length: usize) -> &Space {
        let special = in_smm && self.smm_memory.find(address, length).is_some();
        if special { &self.smm_memory } else { &self.memory }
    }

    pub fn of(&self, kind: Kind) -> &Space {
        match kind {
            Kind::Port => &self.port,
            Kind::Memory => &self.memory,
            Kind::SmmMemory => &self.smm_memory,
            Kind::Config => &self.config,
        }
    }
}

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
    seat: Arc<Seat>,
    spaces: Arc<Spaces>,
    hypervisor: Arc<dyn Hypervisor>,
    state: Mutex<Placement>,
}

#[derive(Default)]
struct Placement {
    at: Option<u64>,
    bells: Vec<(Doorbell, Arc<EventFd>)>,
    mapping: Option<Mapping>,
}

/// Memory that the guest accesses without an exit.
struct Mapping {
    backing: Arc<dyn Backing>,
    /// Whether the host was asked to map the memory at the window's present address.
    tried: bool,
    /// Whether a failure was logged. A guest that maps it over other memory must not fill the log.
    logged: bool,
}

impl Window {
    pub(crate) fn new(
        Extent { kind, size }: Extent,
        region: Region,
        seat: Arc<Seat>,
        spaces: Arc<Spaces>,
        host: Arc<dyn Hypervisor>,
    ) -> Self {
        Self { kind, size, region, seat, spaces, hypervisor: host, state: Mutex::default() }
    }

    /// The present address, if the window is on the bus.
    pub fn at(&self) -> Option<u64> {
        self.state.lock().expect("no device panicked").at
    }

    /// Moves the window, or removes it from the bus. It may overlap others: guests move BARs one by
    /// one, so two may be at one address for a moment.
    pub fn move_to(&self, at: Option<u64>) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = at.filter(|at| at.checked_add(self.size).is_some());
        if state.at == at {
            return;
        }
        if let Some(mapping) = state.mapping.as_mut().filter(|mapping| mapping.tried) {
            mapping.tried = false;
            mapping.backing.map(None).ok();
        }
        if let Some(old) = state.at.take() {
            self.spaces.of(self.kind).remove(self.region, &self.seat);
            for (bell, event) in &state.bells {
                self.hypervisor.disconnect_doorbell(bell.moved(old), event);
            }
        }
        if let Some(new) = at {
            self.spaces.of(self.kind).insert(new..new + self.size, self.region, self.seat.clone());
            for (bell, event) in &state.bells {
                self.connect_at(bell.moved(new), event);
            }
        }
        state.at = at;
    }

    /// A doorbell takes writes of processors in system-management mode too. It must not take those
    /// that are for another device there, such as the flash: the guest chooses the address.
    fn connect_at(&self, bell: Doorbell, event: &Arc<EventFd>) {
        let length = if bell.length == 0 { 8 } else { u64::from(bell.length) };
        let writes = bell.address..bell.address.saturating_add(length);
        if self.kind != Kind::Memory || !self.spaces.smm_memory.overlaps(&writes) {
            self.hypervisor.connect_doorbell(bell, event);
        }
    }

    /// Sets the memory that fills the window for the guest once `map_backing` is called.
    pub fn set_backing(&self, backing: Arc<dyn Backing>) {
        let mapping = Mapping { backing, tried: false, logged: false };
        self.state.lock().expect("no device panicked").mapping = Some(mapping);
    }

    /// The device calls this when an access of the guest to the window reaches it. From now on the
    /// guest accesses the memory set by `set_backing` directly, if the host can map it. Mapping
    /// waits for the first access because a change of memory takes 5 ms on KVM, and firmware often
    /// moves windows and never uses many of them.
    pub fn map_backing(&self) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = state.at;
        let Some(mapping) = state.mapping.as_mut().filter(|it| !it.tried) else { return };
        mapping.tried = true;
        if let Some(at) = at
            && let Err(error) = mapping.backing.map(Some(at))
            && !std::mem::replace(&mut mapping.logged, true)
        {
            let device = &self.seat.name;
            tracing::info!(device, "the guest moved a window over other memory: {error:#}");
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
        let mut state = self.state.lock().expect("no device panicked");
        if let Some(at) = state.at {
            self.connect_at(bell.moved(at), &event);
        }
        state.bells.push((bell, event));
    }

    /// Disconnects the events at `offset`: writes reach the device from now on.
    pub fn disconnect_doorbell(&self, offset: u64) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = state.at;
        for (bell, event) in state.bells.extract_if(.., |(bell, _)| bell.address == offset) {
            if let Some(at) = at {
                self.hypervisor.disconnect_doorbell(bell.moved(at), &event);
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.move_to(None);
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
mod test {
    use super::*;
    use crate::hypervisor::fake::FakeHypervisor;

    /// Fills every read with its own number.
    struct Number(u8);

    impl Device for Number {
        fn read(&mut self, _: Region, _: u64, data: &mut [u8]) -> Access {
            data.fill(self.0);
            if self.0 == 0 { Access::Ignored } else { Access::Done }
        }
        fn write(&mut self, _: Region, _: u64, _: &[u8]) -> Access {
            Access::Done
        }
        fn park(&mut self) -> Saved {
            Saved::default()
        }
        fn run(&mut self, _: Saved) -> anyhow::Result<()> {
            Ok(())
        }
    }

    fn seat(number: u8) -> Arc<Seat> {
        let seat = Seat::new(format!("number {number}"));
        *seat.device.lock().unwrap() = Box::new(Number(number));
        Arc::new(seat)
    }

    fn read(space: &Space, address: u64) -> u8 {
        let mut data = [0];
        space.read(address, &mut data);
        data[0]
    }

    #[test]
    fn unmapped_and_ignored_reads_return_all_ones() {
        let space = Space::default();
        space.insert(0x10..0x20, Region(0), seat(0));
        assert_eq!(read(&space, 0xf), 0xff);
        assert_eq!(read(&space, 0x10), 0xff);
        assert_eq!(read(&space, u64::MAX), 0xff);
        space.write(u64::MAX, &[0; 8]);
    }

    #[test]
    fn a_device_for_system_management_mode_is_found_only_there() {
        let spaces = Spaces::default();
        spaces.memory.insert(0x10..0x30, Region(0), seat(1));
        spaces.smm_memory.insert(0x20..0x30, Region(0), seat(2));
        let byte = |in_smm, at| read(spaces.memory_of(in_smm, at, 1), at);
        assert_eq!([byte(false, 0x20), byte(true, 0x20), byte(true, 0x10)], [1, 2, 1]);
        assert_eq!(byte(true, 0x30), 0xff);
    }

    #[test]
    fn no_doorbell_takes_writes_for_system_management_mode() {
        let (spaces, host) = (Arc::new(Spaces::default()), Arc::new(FakeHypervisor::default()));
        spaces.smm_memory.insert(0x1_0000..0x2_0000, Region(0), seat(1));
        let extent = |kind| Extent { kind, size: 0x1000 };
        let window =
            |kind| Window::new(extent(kind), Region(1), seat(2), spaces.clone(), host.clone());
        let connected = |kind, at: u64| {
            let window = window(kind);
            let _early = window.doorbell(0xff8, 0, None).unwrap();
            window.move_to(Some(at));
            let _late = window.doorbell(4, 4, Some(1)).unwrap();
            host.bells.lock().unwrap().len()
        };
        assert_eq!(connected(Kind::Memory, 0xe000), 2);
        assert_eq!(connected(Kind::Memory, 0xf004), 1, "the first is across the start");
        assert_eq!(connected(Kind::Memory, 0x1_0000), 0);
        assert_eq!(connected(Kind::Memory, 0x1_f800), 1, "the first is behind the end");
        assert_eq!(connected(Kind::Memory, 0x2_0000), 2);
        assert_eq!(connected(Kind::Port, 0x1_0000), 2, "another address space");
    }

    #[test]
    fn the_innermost_range_that_covers_the_access_handles_it() {
        let space = Space::default();
        space.insert(0xcf9..0xcfa, Region(0), seat(2));
        space.insert(0xcf8..0xd00, Region(0), seat(1));
        assert_eq!(read(&space, 0xcf8), 1);
        assert_eq!(read(&space, 0xcf9), 2);
        let mut wide = [0; 4];
        space.read(0xcf9, &mut wide);
        assert_eq!(wide, [1; 4], "too wide for the inner range");
        space.read(0xcfe, &mut wide);
        assert_eq!(wide, [0xff; 4], "runs over the end of both");
    }
}
