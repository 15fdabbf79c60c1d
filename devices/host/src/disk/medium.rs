//! Images that are read and written one request at a time, from buffers of our own.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::{Fault, Geometry, Operation, Request};
use crate::memory::Memory;

/// How much is copied at once, whatever a guest asks for.
const CHUNK: usize = 1 << 20;
/// What direct I/O wants of a buffer, everywhere.
const ALIGNMENT: usize = 4096;

/// What [`super::threads`] makes an image of. Ranges are whole blocks within the size; buffers are
/// aligned to 4096 bytes.
pub(super) trait Medium: Send + Sync {
    /// What it is now.
    fn geometry(&self) -> Geometry;
    /// Fills the buffer.
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// Takes all of the buffer.
    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()>;
    /// What was written before survives a loss of power.
    fn flush(&self) -> io::Result<()>;
    /// Forgets, where that frees something.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;
    /// Makes it zeros, and frees the room if it may.
    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()>;
    /// Makes it longer; without a size, as long as its file or device is now.
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()>;
}

/// No room on the volume, or none for this user.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Says once per disk why something was not done.
pub(super) struct Report {
    name: String,
    said: AtomicBool,
}

impl Report {
    pub(super) fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), said: AtomicBool::new(false) }
    }

    /// What the guest is told, and in the log what it is not told.
    pub(super) fn fault(&self, request: &Request, error: &io::Error) -> Fault {
        match Errno::from_io_error(error) {
            _ if is_full(error) && request.operation != Operation::Read => Fault::Full,
            Some(Errno::OPNOTSUPP) => Fault::Unsupported,
            _ => {
                if !self.said.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        disk = self.name,
                        offset = request.offset,
                        length = request.length,
                        "{:?}: {error}: the guest is told; further errors of this disk are not \
                         logged",
                        request.operation
                    );
                }
                Fault::Broken
            }
        }
    }
}

/// A buffer that direct I/O takes, made when it is needed and kept.
#[derive(Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    pub(super) fn take(&mut self, length: usize) -> &mut [u8] {
        let needed = length + ALIGNMENT;
        if self.0.len() < needed {
            self.0 = vec![0; needed];
        }
        let start = self.0.as_ptr().align_offset(ALIGNMENT);
        &mut self.0[start..start + length]
    }
}

/// Does one request.
pub(super) fn perform(
    medium: &dyn Medium,
    request: &Request,
    memory: &Memory,
    buffer: &mut Buffer,
    report: &Report,
) -> Result<(), Fault> {
    request.check(&medium.geometry())?;
    let (offset, length) = (request.offset, request.length);
    let done = match request.operation {
        Operation::Read => return read(medium, request, memory, buffer, report),
        Operation::Write { durable } => {
            return write(medium, request, (memory, durable), buffer, report);
        }
        Operation::Flush => medium.flush(),
        Operation::Discard | Operation::WriteZeroes { .. } if length == 0 => Ok(()),
        Operation::Discard => medium.discard(offset, length),
        Operation::WriteZeroes { unmap } => medium.zero(offset, length, unmap),
    };
    done.map_err(|error| report.fault(request, &error))
}

fn read(
    medium: &dyn Medium,
    request: &Request,
    memory: &Memory,
    buffer: &mut Buffer,
    report: &Report,
) -> Result<(), Fault> {
    let mut pieces = Cursor::new(request);
    for (offset, length) in chunks(request) {
        let chunk = buffer.take(length);
        medium.read(chunk, offset).map_err(|error| report.fault(request, &error))?;
        pieces.each(chunk.len(), |address, range| memory.write(address, &chunk[range]))?;
    }
    Ok(())
}

fn write(
    medium: &dyn Medium,
    request: &Request,
    (memory, durable): (&Memory, bool),
    buffer: &mut Buffer,
    report: &Report,
) -> Result<(), Fault> {
    let mut pieces = Cursor::new(request);
    for (offset, length) in chunks(request) {
        let chunk = buffer.take(length);
        pieces.each(chunk.len(), |address, range| memory.read(address, &mut chunk[range]))?;
        medium.write(chunk, offset, durable).map_err(|error| report.fault(request, &error))?;
    }
    Ok(())
}

/// Offsets and lengths of at most [`CHUNK`] bytes.
fn chunks(request: &Request) -> impl Iterator<Item = (u64, usize)> + use<> {
    let (offset, length) = (request.offset, request.length);
    (0..length).step_by(CHUNK).map(move |at| {
        let rest = usize::try_from(length - at).unwrap_or(usize::MAX);
        (offset + at, rest.min(CHUNK))
    })
}

/// Where in the guest's pieces the next bytes are.
struct Cursor<'a> {
    request: &'a Request,
    piece: usize,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(request: &'a Request) -> Self {
        Self { request, piece: 0, at: 0 }
    }

    /// Calls with guest addresses and ranges that cover `0..length`.
    fn each<E>(
        &mut self,
        length: usize,
        mut copy: impl FnMut(u64, std::ops::Range<usize>) -> Result<(), E>,
    ) -> Result<(), Fault> {
        let mut done = 0;
        while done < length {
            let piece = self.request.pieces.get(self.piece).ok_or(Fault::Refused)?;
            let (address, size) = (piece.address, piece.length as usize);
            let part = (size - self.at).min(length - done);
            let address = address.checked_add(self.at as u64).ok_or(Fault::Refused)?;
            copy(address, done..done + part).map_err(|_| Fault::Refused)?;
            done += part;
            self.at += part;
            if self.at == size {
                (self.piece, self.at) = (self.piece + 1, 0);
            }
        }
        Ok(())
    }
}
