//! Guest RAM for devices: copies in and out, never a reference, and only while DMA is allowed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::EventFd;

/// A handle to guest RAM. A closed gate (bus mastering off, device parked) makes every access fail,
/// as does an address that is not RAM. The guest causes both.
#[derive(Clone, Debug)]
pub struct Memory {
    ram: Arc<GuestMemoryMmap>,
    gate: Arc<Gate>,
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
        let gate = Gate { open: AtomicBool::new(true), ..Gate::default() };
        Self { ram, gate: Arc::new(gate) }
    }

    /// A handle to the same RAM with a gate of its own, which is closed.
    pub fn gated(&self) -> Self {
        Self { ram: self.ram.clone(), gate: Arc::default() }
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

    /// All RAM, whether the gate is open or closed. The caller (vhost) must watch the gate itself.
    pub fn ungated_ram(&self) -> Arc<GuestMemoryMmap> {
        self.ram.clone()
    }

    /// The RAM, while the gate is open.
    pub fn ram(&self) -> Result<&GuestMemoryMmap, NoMemory> {
        if self.gate.open.load(Ordering::Acquire) { Ok(&self.ram) } else { Err(NoMemory) }
    }

    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), NoMemory> {
        self.ram()?.read_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
    }

    /// After an error, a part of the range may have been written.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), NoMemory> {
        self.ram()?.write_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
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
