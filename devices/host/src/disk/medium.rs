//! Images that are read and written one request at a time, with our own buffers.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::io::Errno;

use super::{Fault, Geometry, Operation, Request};
use crate::memory::Memory;

/// Maximum bytes to copy at once, whatever a guest requests.
const CHUNK: usize = 1 << 20;
/// Buffer alignment in bytes that suffices for direct I/O on every host.
const ALIGNMENT: usize = 4096;

/// The base of an image from [`super::threads`]. Ranges are whole blocks within the size. Buffers
/// are aligned to 4096 bytes.
pub(super) trait Medium: Send + Sync {
    fn geometry(&self) -> Geometry;
    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()>;
    /// `durable`: the write survives a loss of power.
    fn write(&self, buffer: &[u8], offset: u64, durable: bool) -> io::Result<()>;
    fn flush(&self) -> io::Result<()>;
    /// Discards a range, if that frees anything.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()>;
    /// Makes a range zeros. `unmap`: its space may be freed.
    fn zero(&self, offset: u64, length: u64, unmap: bool) -> io::Result<()>;
    /// Grows to `size`, or to the current length of the file or device if `size` is `None`.
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()>;
}

/// Whether the volume is full, or the user's quota is exceeded.
pub(super) fn is_full(error: &io::Error) -> bool {
    matches!(Errno::from_io_error(error), Some(Errno::NOSPC | Errno::DQUOT))
}

/// Logs the first error of a disk.
pub(super) struct Report {
    name: String,
    reported: AtomicBool,
}

impl Report {
    pub(super) fn new(name: impl Into<String>) -> Self {
        Self { name: name.into(), reported: AtomicBool::new(false) }
    }

    /// The fault that the guest sees. The first error is logged in full.
    pub(super) fn fault(&self, request: &Request, error: &io::Error) -> Fault {
        match Errno::from_io_error(error) {
            _ if is_full(error) && request.operation != Operation::Read => Fault::Full,
            Some(Errno::OPNOTSUPP) => Fault::Unsupported,
            _ => {
                if !self.reported.swap(true, Ordering::Relaxed) {
                    tracing::error!(
                        disk = self.name,
                        offset = request.offset,
                        length = request.length,
                        "{:?}: {error}: the guest sees the error; further errors of this disk are \
                         not logged",
                        request.operation
                    );
                }
                Fault::Broken
            }
        }
    }
}

/// A buffer with the alignment of direct I/O. It is allocated when needed and kept.
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
        Operation::Write { .. } => return write(medium, request, memory, buffer, report),
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
    memory: &Memory,
    buffer: &mut Buffer,
    report: &Report,
) -> Result<(), Fault> {
    let durable = request.operation == Operation::Write { durable: true };
    let mut pieces = Cursor::new(request);
    for (offset, length) in chunks(request) {
        let chunk = buffer.take(length);
        pieces.each(chunk.len(), |address, range| memory.read(address, &mut chunk[range]))?;
        medium.write(chunk, offset, durable).map_err(|error| report.fault(request, &error))?;
    }
    Ok(())
}

/// Splits a request into offsets and lengths of at most [`CHUNK`] bytes.
fn chunks(request: &Request) -> impl Iterator<Item = (u64, usize)> + use<> {
    let (offset, length) = (request.offset, request.length);
    (0..length).step_by(CHUNK).map(move |at| {
        let rest = usize::try_from(length - at).unwrap_or(usize::MAX);
        (offset + at, rest.min(CHUNK))
    })
}

/// A position in the guest's pieces.
struct Cursor<'a> {
    request: &'a Request,
    piece: usize,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn new(request: &'a Request) -> Self {
        Self { request, piece: 0, at: 0 }
    }

    /// Calls `copy` with guest addresses and the ranges of `0..length` that belong there.
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
