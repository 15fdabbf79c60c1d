//! Guest RAM for devices: copies in and out, never a reference, and only while DMA is allowed.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::ram::GuestMemoryMmap;
use serde::{Deserialize, Serialize};
use vm_memory::bitmap::Bitmap as _;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend as _};
use vmm_sys_util::eventfd::EventFd;

use crate::smram::{self, TSEG_MIB};

/// A handle to guest RAM. A closed gate (bus mastering off, device parked) makes every access fail,
/// as does an address that is not RAM. The guest causes both.
#[derive(Clone, Debug)]
pub struct Memory {
    views: Arc<Views>,
    gate: Arc<Gate>,
}

/// The RAM that devices access, for each size of TSEG, which is hidden from them.
#[derive(Debug)]
struct Views {
    /// Without TSEG, then in the order of `TSEG_MIB`. A machine without SMM has only the first.
    each: Vec<Arc<GuestMemoryMmap>>,
    chosen: AtomicUsize,
}

impl Views {
    fn now(&self) -> &Arc<GuestMemoryMmap> {
        &self.each[self.chosen.load(Ordering::Acquire).min(self.each.len() - 1)]
    }
}

#[derive(Debug, Default)]
struct Gate {
    open: AtomicBool,
    /// Events that are signaled on each change of `open`.
    bells: Mutex<Vec<Weak<EventFd>>>,
}

/// A range of guest memory as the guest gave it, unchecked. Each access checks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Guest-physical address.
    pub address: u64,
    /// In bytes.
    pub length: u32,
}

/// The address is not RAM, or the gate is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

impl Memory {
    /// The gate is open.
    pub fn new(ram: Arc<GuestMemoryMmap>) -> Self {
        Self::of_views(vec![ram])
    }

    /// The gate is open. The RAM of segment A is hidden, and TSEG as [`Self::hide_tseg`] selects.
    /// The regions of `ram` must be those of [`smram::parts`].
    pub fn with_smram(ram: &GuestMemoryMmap) -> Self {
        let sizes = [0].into_iter().chain(TSEG_MIB);
        Self::of_views(sizes.map(|size| Arc::new(smram::for_devices(ram, size))).collect())
    }

    fn of_views(each: Vec<Arc<GuestMemoryMmap>>) -> Self {
        let gate = Gate { open: AtomicBool::new(true), ..Gate::default() };
        let views = Views { each, chosen: AtomicUsize::new(0) };
        Self { views: Arc::new(views), gate: Arc::new(gate) }
    }

    /// Hides a TSEG of this size, one of `TSEG_MIB` or 0, from all handles to this RAM.
    pub fn hide_tseg(&self, mib: u16) {
        let size = TSEG_MIB.iter().position(|size| *size == mib);
        self.views.chosen.store(size.map_or(0, |at| at + 1), Ordering::Release);
    }

    /// A handle to the same RAM with a gate of its own, which is closed.
    pub fn gated(&self) -> Self {
        Self { views: self.views.clone(), gate: Arc::default() }
    }

    /// Opens or closes the gate for this handle and its clones.
    pub fn set_open(&self, open: bool) {
        if self.gate.open.swap(open, Ordering::AcqRel) != open {
            let mut bells = self.gate.bells.lock().expect("no device panicked");
            bells.retain(|bell| bell.upgrade().is_some_and(|bell| bell.write(1).is_ok()));
        }
    }

    /// Signals `bell` whenever the gate opens or closes, until `bell` is dropped. Calling this
    /// again with the same bell changes nothing.
    pub fn watch(&self, bell: &Arc<EventFd>) {
        let (bell, mut bells) =
            (Arc::downgrade(bell), self.gate.bells.lock().expect("no device panicked"));
        if !bells.iter().any(|other| other.ptr_eq(&bell)) {
            bells.push(bell);
        }
    }

    /// The RAM, whether the gate is open or closed, without the largest TSEG: vhost-net keeps it
    /// from before firmware chooses one. The caller (vhost) must watch the gate itself.
    pub fn ungated_ram(&self) -> Arc<GuestMemoryMmap> {
        self.views.each.last().expect("there is a view").clone()
    }

    /// The RAM, while the gate is open.
    pub fn ram(&self) -> Result<&GuestMemoryMmap, NoMemory> {
        if self.gate.open.load(Ordering::Acquire) { Ok(self.views.now()) } else { Err(NoMemory) }
    }

    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), NoMemory> {
        self.ram()?.read_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
    }

    /// After an error, a part of the range may have been written.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), NoMemory> {
        self.ram()?.write_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
    }

    /// Whether the pages are recorded that this process writes.
    pub fn records_writes(&self) -> bool {
        self.views.now().iter().next().is_some_and(|first| first.get_mmap().bitmap().records())
    }

    /// Records that the kernel has written these pieces for this process, perhaps in part, and
    /// perhaps before the gate closed.
    pub fn wrote(&self, pieces: &[Piece]) {
        if !self.records_writes() {
            return;
        }
        for piece in pieces {
            let (start, length) = (GuestAddress(piece.address), piece.length as usize);
            // The kernel wrote nothing from the first address on that is no memory.
            for slice in self.views.now().get_slices(start, length).map_while(Result::ok) {
                slice.bitmap().mark_dirty(0, slice.len());
            }
        }
    }

    /// Fills `data` from the pieces, in order. Also fails if they are shorter than `data`.
    pub fn gather(&self, pieces: &[Piece], data: &mut [u8]) -> Result<(), NoMemory> {
        let mut rest = data;
        for piece in pieces {
            let length = rest.len().min(piece.length as usize);
            let (now, later) = rest.split_at_mut(length);
            self.read(piece.address, now)?;
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(NoMemory) }
    }

    /// Copies `data` into the pieces, in order. Also fails if they are shorter than `data`.
    pub fn scatter(&self, pieces: &[Piece], data: &[u8]) -> Result<(), NoMemory> {
        let mut rest = data;
        for piece in pieces {
            let (now, later) = rest.split_at(rest.len().min(piece.length as usize));
            self.write(piece.address, now)?;
            rest = later;
        }
        if rest.is_empty() { Ok(()) } else { Err(NoMemory) }
    }
}

/// The pieces of the range that begins after `skip` bytes and is at most `length` bytes long.
pub fn subrange(pieces: &[Piece], skip: u64, length: u64) -> Vec<Piece> {
    let (mut skip, mut left, mut found) = (skip, length, Vec::new());
    for piece in pieces {
        let size = u64::from(piece.length);
        let before = skip.min(size);
        skip -= before;
        let taken = left.min(size - before);
        left -= taken;
        if let (Ok(length @ 1..), Some(address)) =
            (u32::try_from(taken), piece.address.checked_add(before))
        {
            found.push(Piece { address, length });
        }
        if left == 0 {
            break;
        }
    }
    found
}

#[cfg(test)]
mod test {
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    use super::*;

    #[test]
    fn no_handle_reaches_segment_a_and_the_hidden_tseg() {
        const LOW: u64 = 64 << 20;
        let region = |part: std::ops::Range<u64>| {
            (GuestAddress(part.start), usize::try_from(part.end - part.start).unwrap())
        };
        let mut regions: Vec<_> = smram::parts(LOW).into_iter().map(region).collect();
        regions.push((GuestAddress(1 << 32), 4096));
        let memory = Memory::with_smram(&GuestMemoryMmap::from_ranges(&regions).unwrap());
        let (gated, older) = (memory.gated(), memory.clone());
        gated.set_open(true);
        for mib in [0, 16, 1, 8, 2, 0] {
            memory.hide_tseg(mib);
            let end = LOW - (u64::from(mib) << 20);
            for handle in [&memory, &gated, &older] {
                assert!(handle.write(end - 4, &[1; 4]).is_ok());
                let mut data = [0; 4];
                assert!(handle.read(end - 2, &mut data).is_err(), "across the start of TSEG");
                assert_eq!(handle.read(LOW - 4, &mut data).is_ok(), mib == 0, "{mib} MiB");
                assert!(
                    handle.write(0xa_0000, &[0]).is_err() && handle.write(0xb_ffff, &[0]).is_err()
                );
                assert!(
                    handle.write(0x9_ffff, &[0]).is_ok() && handle.write(0xc_0000, &[0]).is_ok()
                );
                assert!(handle.write(1 << 32, &[0]).is_ok());
                for at in [LOW - 1, LOW - (16 << 20), 0xa_0000] {
                    assert!(!handle.ungated_ram().address_in_range(GuestAddress(at)), "{at:#x}");
                }
            }
        }
    }

    #[test]
    fn the_kernels_writes_are_recorded_while_asked() {
        let ranges = [(GuestAddress(0), 64 * 4096), (GuestAddress(1 << 32), 64 * 4096)];
        let memory = Memory::new(Arc::new(GuestMemoryMmap::from_ranges(&ranges).unwrap()));
        let piece = |address, length| Piece { address, length };
        let written = || {
            memory.wrote(&[piece(4096, 4097), piece(62 * 4096, 4 * 4096), piece(u64::MAX, 9)]);
            let regions = memory.views.now().iter();
            regions.map(|it| it.get_mmap().bitmap().take()).collect::<Vec<_>>()
        };
        assert_eq!(written(), [Vec::<u64>::new(), Vec::new()]);
        memory.views.now().iter().for_each(|it| it.get_mmap().bitmap().record(true));
        assert_eq!(written(), [[0b11 << 62 | 0b110], [0]]);
    }

    #[test]
    fn a_gate_watcher_is_notified_of_each_change_until_dropped() {
        let memory = Memory::new(Arc::default()).gated();
        let bell = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        memory.watch(&bell);
        memory.clone().watch(&bell);
        for open in [true, true, false] {
            memory.set_open(open);
        }
        assert_eq!(bell.read().unwrap(), 2);
        memory.set_open(false);
        assert!(bell.read().is_err(), "nothing changed");
        drop(bell);
        memory.set_open(true);
        assert!(memory.gate.bells.lock().unwrap().is_empty());
    }
}
