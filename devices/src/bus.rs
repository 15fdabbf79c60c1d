//! Maps an address to a device, its region and an offset, in each address space.
//!
//! The map's lock is held only during the lookup. A device is called under its own lock only, so
//! that a register write may move a window. Lock order: device, then windows, then map.

mod window;

use std::ops::Range;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, RwLock};

use crate::device::{Access, Device, Kind, Region, Saved};
pub(crate) use window::Extent;
use window::Placements;
pub use window::Window;

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

fn overlap(one: &Range<u64>, other: &Range<u64>) -> bool {
    one.start < other.end && other.start < one.end
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

    /// Finds the innermost range that contains the whole access. If ranges are equal, the newest
    /// one wins.
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
        map.iter().any(|it| overlap(&it.range, range))
    }

    /// Whether an access to `range` reaches this region.
    fn reaches(&self, range: &Range<u64>, region: Region, seat: &Arc<Seat>) -> bool {
        let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX);
        let hit = self.find(range.start, length);
        hit.is_some_and(|hit| hit.region == region && Arc::ptr_eq(&hit.seat, seat))
    }

    /// Whether accesses to a part of this region reach another one.
    fn hides(&self, region: Region, seat: &Arc<Seat>) -> bool {
        let map = self.map.read().expect("no device panicked");
        // `find` prefers later entries.
        let mut later = map.iter();
        let own = later.find(|it| it.region == region && Arc::ptr_eq(&it.seat, seat));
        own.is_none_or(|own| later.any(|it| overlap(&it.range, &own.range)))
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
    windows: Mutex<Placements>,
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
            host.bells().len()
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
