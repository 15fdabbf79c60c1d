//! Address to (device, region, offset): three spaces of one kind.
//!
//! The map's lock is held for the look-up alone; the device is called under its own lock only, so
//! that a register write may move a window. Lock order: device, then map.

use std::fmt;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::hypervisor::{Backing, Doorbell, Host};

/// A device in its place on the board.
pub(crate) struct Seat {
    pub(crate) name: String,
    pub(crate) device: Mutex<Box<dyn Device>>,
    /// Which kinds of mistake were logged: once each, a guest must not fill the log.
    logged: AtomicU8,
}

impl Seat {
    pub(crate) fn new(name: String) -> Self {
        Self { name, device: Mutex::new(vacant()), logged: AtomicU8::new(0) }
    }

    fn note(&self, what: u8, verb: &str, hit: &Hit, length: usize) {
        if self.logged.fetch_or(what, Ordering::Relaxed) & what == 0 {
            tracing::debug!(
                device = self.name,
                "the guest {verb} {length} bytes where there is no such register: region {}, \
                 offset {:#x} (said once)",
                hit.region.0,
                hit.offset
            );
        }
    }
}

/// What sits in a seat until its device is built, and after it is gone.
pub(crate) fn vacant() -> Box<dyn Device> {
    Box::new(Vacant)
}

struct Vacant;

impl Device for Vacant {
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

/// One address space.
#[derive(Default)]
pub struct Space {
    /// By start, larger first: going backwards from an address meets the innermost range first.
    map: RwLock<Vec<Entry>>,
}

impl Space {
    /// Fills `data` from the device at `address`; what nobody answers is all-ones.
    pub fn read(&self, address: u64, data: &mut [u8]) {
        // Devices may leave bytes alone, and firmware tells an absent device by all-ones.
        data.fill(0xff);
        let Some(hit) = self.find(address, data.len()) else {
            tracing::trace!("read {address:#x}: nobody answers");
            return;
        };
        let access =
            hit.seat.device.lock().expect("no device panicked").read(hit.region, hit.offset, data);
        if access == Access::Ignored {
            data.fill(0xff);
            hit.seat.note(1, "read", &hit, data.len());
        }
        tracing::trace!(device = hit.seat.name, "read {address:#x}: {data:02x?}");
    }

    /// Gives `data` to the device at `address`; what nobody takes is dropped.
    pub fn write(&self, address: u64, data: &[u8]) {
        tracing::trace!("write {address:#x}: {data:02x?}");
        let Some(hit) = self.find(address, data.len()) else { return };
        let access =
            hit.seat.device.lock().expect("no device panicked").write(hit.region, hit.offset, data);
        if access == Access::Ignored {
            hit.seat.note(2, "wrote", &hit, data.len());
        }
    }

    /// The innermost range that holds the whole access.
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

/// The address spaces of one machine.
#[derive(Default)]
pub struct Spaces {
    /// `in` and `out`.
    pub port: Space,
    /// Guest-physical addresses that are not RAM.
    pub memory: Space,
    /// PCI configuration space.
    pub config: Space,
}

impl Spaces {
    /// The space of a kind.
    pub fn of(&self, kind: Kind) -> &Space {
        match kind {
            Kind::Port => &self.port,
            Kind::Memory => &self.memory,
            Kind::Config => &self.config,
        }
    }
}

/// A region that the guest may move at any time; its doorbells and its memory move along.
pub struct Window {
    kind: Kind,
    size: u64,
    region: Region,
    seat: Arc<Seat>,
    spaces: Arc<Spaces>,
    host: Arc<dyn Host>,
    state: Mutex<Placed>,
}

#[derive(Default)]
struct Placed {
    at: Option<u64>,
    bells: Vec<(Doorbell, Arc<EventFd>)>,
    lent: Option<Lent>,
}

/// Memory for the guest to reach without us.
struct Lent {
    backing: Arc<dyn Backing>,
    /// The host was asked to put it where the window is.
    tried: bool,
    /// A guest that aims it at what is there already must not fill the log.
    told: bool,
}

impl Window {
    pub(crate) fn new(
        (kind, size): (Kind, u64),
        region: Region,
        seat: Arc<Seat>,
        spaces: Arc<Spaces>,
        host: Arc<dyn Host>,
    ) -> Self {
        Self { kind, size, region, seat, spaces, host, state: Mutex::default() }
    }

    /// The region that its device is told.
    pub fn region(&self) -> Region {
        self.region
    }

    /// Ports or memory.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its length in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where it is now.
    pub fn at(&self) -> Option<u64> {
        self.state.lock().expect("no device panicked").at
    }

    /// Moves the window, or takes it off the bus. It may overlap others: guests shuffle BARs one
    /// by one, and for a moment two lie on one address.
    pub fn place(&self, at: Option<u64>) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = at.filter(|at| at.checked_add(self.size).is_some());
        if state.at == at {
            return;
        }
        if let Some(lent) = state.lent.as_mut().filter(|lent| lent.tried) {
            lent.tried = false;
            lent.backing.place(None).ok();
        }
        if let Some(old) = state.at.take() {
            self.spaces.of(self.kind).remove(self.region, &self.seat);
            for (bell, event) in &state.bells {
                self.host.unring(bell.moved(old), event);
            }
        }
        if let Some(new) = at {
            self.spaces.of(self.kind).insert(new..new + self.size, self.region, self.seat.clone());
            for (bell, event) in &state.bells {
                self.host.ring(bell.moved(new), event);
            }
        }
        state.at = at;
    }

    /// Memory that the guest finds in all of the window, once it has been `touched`.
    pub fn lend(&self, backing: Arc<dyn Backing>) {
        let lent = Lent { backing, tried: false, told: false };
        self.state.lock().expect("no device panicked").lent = Some(lent);
    }

    /// The guest's access to the window came to its device: from now on it finds the lent memory
    /// there, if the host can have it so. Until then a window may be moved for nothing, and on KVM
    /// each change of memory is 5 ms: firmware moves windows often, and many are never used.
    pub fn touched(&self) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = state.at;
        let Some(lent) = state.lent.as_mut().filter(|lent| !lent.tried) else { return };
        lent.tried = true;
        if let Some(at) = at
            && let Err(error) = lent.backing.place(Some(at))
            && !std::mem::replace(&mut lent.told, true)
        {
            let device = &self.seat.name;
            tracing::info!(device, "the guest put memory where there is other: {error:#}");
        }
    }

    /// An event that a guest's write to `offset` raises without leaving the kernel. Where the host
    /// cannot do that the write reaches the device as any other, so the device handles both.
    ///
    /// # Errors
    ///
    /// When the host is out of file descriptors.
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

    /// Has a guest's write of this length to `offset`, whatever its value, raise an event that the
    /// device has, until `silence`. As with a doorbell, the write may reach the device instead.
    pub fn ring(&self, (offset, length): (u64, u32), event: Arc<EventFd>) {
        let bell = Doorbell { kind: self.kind, address: offset, length, value: None };
        self.connect(bell, event);
    }

    fn connect(&self, bell: Doorbell, event: Arc<EventFd>) {
        let mut state = self.state.lock().expect("no device panicked");
        if let Some(at) = state.at {
            self.host.ring(bell.moved(at), &event);
        }
        state.bells.push((bell, event));
    }

    /// From now on writes to `offset` reach the device.
    pub fn silence(&self, offset: u64) {
        let mut state = self.state.lock().expect("no device panicked");
        let at = state.at;
        for (bell, event) in state.bells.extract_if(.., |(bell, _)| bell.address == offset) {
            if let Some(at) = at {
                self.host.unring(bell.moved(at), &event);
            }
        }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        self.place(None);
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

    /// Answers every read with its own number.
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
    fn nobody_home_reads_all_ones_and_so_does_an_ignored_access() {
        let space = Space::default();
        space.insert(0x10..0x20, Region(0), seat(0));
        assert_eq!(read(&space, 0xf), 0xff);
        assert_eq!(read(&space, 0x10), 0xff);
        assert_eq!(read(&space, u64::MAX), 0xff);
        space.write(u64::MAX, &[0; 8]);
    }

    #[test]
    fn the_innermost_range_that_holds_the_whole_access_answers() {
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
