//! Guest RAM for devices: copies in and out, never a reference, and only while it may be used.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// A handle to guest RAM. A closed gate (bus mastering off, device parked) makes every access fail,
/// as does an address that is not RAM: both are the guest's doing.
#[derive(Clone, Debug)]
pub struct Memory {
    ram: Arc<GuestMemoryMmap>,
    gate: Arc<AtomicBool>,
}

/// A range of guest memory that a guest named. It is checked when it is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Piece {
    /// Guest-physical.
    pub address: u64,
    /// Bytes.
    pub length: u32,
}

/// The guest named memory that is not there, or that the device may not use now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoMemory;

impl Memory {
    /// The machine's RAM, open.
    pub fn new(ram: Arc<GuestMemoryMmap>) -> Self {
        Self { ram, gate: Arc::new(AtomicBool::new(true)) }
    }

    /// A handle with a gate of its own, closed.
    #[must_use]
    pub(crate) fn gated(&self) -> Self {
        Self { ram: self.ram.clone(), gate: Arc::default() }
    }

    /// Opens or closes the gate for this handle and its clones.
    pub(crate) fn open(&self, open: bool) {
        self.gate.store(open, Ordering::Release);
    }

    /// The RAM itself, while the gate is open.
    ///
    /// # Errors
    ///
    /// When the gate is closed.
    pub fn ram(&self) -> Result<&GuestMemoryMmap, NoMemory> {
        if self.gate.load(Ordering::Acquire) { Ok(&self.ram) } else { Err(NoMemory) }
    }

    /// Copies guest memory out.
    ///
    /// # Errors
    ///
    /// When a part of the range is not RAM.
    pub fn read(&self, address: u64, data: &mut [u8]) -> Result<(), NoMemory> {
        self.ram()?.read_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
    }

    /// Copies into guest memory.
    ///
    /// # Errors
    ///
    /// When a part of the range is not RAM; the part before it may have been written.
    pub fn write(&self, address: u64, data: &[u8]) -> Result<(), NoMemory> {
        self.ram()?.write_slice(data, GuestAddress(address)).map_err(|_| NoMemory)
    }

    /// Copies out the first bytes of these pieces.
    ///
    /// # Errors
    ///
    /// When they are fewer than `data`, or not RAM.
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

    /// Copies into the first bytes of these pieces.
    ///
    /// # Errors
    ///
    /// When they are fewer than `data`, or not RAM.
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
