//! A disk whose writes stay in memory: without a base for tests, or over a disk image that must not
//! change.

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use anyhow::{Context, ensure};

use super::medium::Medium;
use super::threads::Threaded;
use super::{Geometry, Image};

const PAGE_BYTES: usize = 4096;
const PAGE: u64 = PAGE_BYTES as u64;

/// A disk of zeros, in memory only, with sectors of 512 bytes. Requests are complete when `submit`
/// returns.
pub fn memory(size: u64) -> Arc<dyn Image> {
    Arc::new(Threaded::inline("memory", Arc::new(Overlay::empty(size))))
}

/// Written pages over an optional base.
pub(super) struct Overlay {
    base: Option<Arc<dyn Medium>>,
    state: RwLock<State>,
}

struct State {
    geometry: Geometry,
    /// Written pages by number. `None` is a page of zeros, which hides the base's page.
    pages: BTreeMap<u64, Option<Box<[u8; PAGE_BYTES]>>>,
}

impl State {
    fn new(geometry: Geometry) -> Self {
        Self { geometry, pages: BTreeMap::new() }
    }
}

impl Overlay {
    pub(super) fn empty(size: u64) -> Self {
        let geometry = Geometry {
            size: size - size % 512,
            logical_block: 512,
            physical_block: 4096,
            discard: 4096,
            read_only: false,
        };
        Self { base: None, state: RwLock::new(State::new(geometry)) }
    }

    /// An overlay over `base`, which is never written.
    pub(super) fn over(base: Arc<dyn Medium>, read_only: bool) -> Self {
        let geometry = Geometry { read_only, discard: 4096, ..base.geometry() };
        Self { base: Some(base), state: RwLock::new(State::new(geometry)) }
    }

    /// Reads the base; zeros without one and beyond its end.
    fn read_base(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let Some(base) = &self.base else {
            buffer.fill(0);
            return Ok(());
        };
        // The overlay may have grown beyond its base.
        let there = base.geometry().size.saturating_sub(offset);
        let there = usize::try_from(there).map_or(buffer.len(), |it| it.min(buffer.len()));
        let (within, beyond) = buffer.split_at_mut(there);
        beyond.fill(0);
        if within.is_empty() { Ok(()) } else { base.read(within, offset) }
    }

    /// Writes within one page. A new page gets its other bytes from the base.
    fn put(&self, state: &mut State, at: u64, part: &[u8]) -> io::Result<()> {
        let (number, start) = split(at);
        let page = match state.pages.get_mut(&number) {
            Some(Some(page)) => page,
            Some(none) => none.insert(Box::new([0; PAGE_BYTES])),
            None => {
                let mut page = Box::new([0; PAGE_BYTES]);
                if part.len() < PAGE_BYTES {
                    self.read_base(page.as_mut_slice(), number * PAGE)?;
                }
                state.pages.entry(number).or_default().insert(page)
            }
        };
        page[start..start + part.len()].copy_from_slice(part);
        Ok(())
    }
}

/// The number of the page, and the offset in it.
fn split(at: u64) -> (u64, usize) {
    (at / PAGE, usize::try_from(at % PAGE).expect("below 4096"))
}

/// Cuts a range at page borders: the offset and length of each part.
fn parts(offset: u64, length: u64) -> impl Iterator<Item = (u64, u64)> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        let part = (PAGE - at % PAGE).min(end - at);
        let found = (part > 0).then_some((at, part));
        at += part;
        found
    })
}

impl Medium for Overlay {
    fn geometry(&self) -> Geometry {
        self.state.read().unwrap_or_else(PoisonError::into_inner).geometry.clone()
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
        let mut at = 0;
        // Adjacent pages that were not written are read from the base in one go.
        let mut missing = 0..0;
        for (position, length) in parts(offset, buffer.len() as u64) {
            let length = usize::try_from(length).expect("at most a page");
            let (number, start) = split(position);
            if let Some(page) = state.pages.get(&number) {
                match page {
                    Some(page) => {
                        buffer[at..at + length].copy_from_slice(&page[start..start + length]);
                    }
                    None => buffer[at..at + length].fill(0),
                }
                self.read_base(&mut buffer[missing.clone()], offset + missing.start as u64)?;
                missing = at + length..at + length;
            } else {
                missing.end = at + length;
            }
            at += length;
        }
        let start = missing.start as u64;
        self.read_base(&mut buffer[missing], offset + start)
    }

    fn write(&self, buffer: &[u8], offset: u64, _: bool) -> io::Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let mut rest = buffer;
        for (at, length) in parts(offset, buffer.len() as u64) {
            let (part, after) = rest.split_at(usize::try_from(length).expect("at most a page"));
            self.put(&mut state, at, part)?;
            rest = after;
        }
        Ok(())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    /// Frees written pages. Over a base, a page of zeros takes their place: otherwise the guest
    /// would read the base's data, which is older than its own.
    fn discard(&self, offset: u64, length: u64) -> io::Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let pages = offset.div_ceil(PAGE)..(offset + length) / PAGE;
        if pages.is_empty() {
            return Ok(());
        }
        let inside: Vec<u64> = state.pages.range(pages).map(|(number, _)| *number).collect();
        for number in inside {
            if self.base.is_none() {
                state.pages.remove(&number);
            } else {
                state.pages.insert(number, None);
            }
        }
        Ok(())
    }

    fn zero(&self, offset: u64, length: u64, _: bool) -> io::Result<()> {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        for (at, length) in parts(offset, length) {
            let number = at / PAGE;
            if length < PAGE {
                let zeros = [0; PAGE_BYTES];
                let length = usize::try_from(length).expect("at most a page");
                self.put(&mut state, at, &zeros[..length])?;
            } else if self.base.is_none() {
                state.pages.remove(&number);
            } else {
                state.pages.insert(number, None);
            }
        }
        Ok(())
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        let size = size.context(
            "the disk's writes stay in memory, so its file cannot tell the new size: give a size",
        )?;
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        let now = state.geometry.size;
        ensure!(size >= now, "the disk has {now} bytes and cannot shrink to {size}");
        let block = u64::from(state.geometry.logical_block);
        ensure!(size.is_multiple_of(block), "{size} bytes are not whole sectors of {block}");
        state.geometry.size = size;
        Ok(())
    }
}

#[cfg(test)]
mod test {
    use super::super::driver::{Driver, piece};
    use super::super::{Fault, Operation};
    use super::*;

    #[test]
    fn returns_written_data_and_zeros_elsewhere() {
        let image = memory(1 << 20);
        let mut driver = Driver::new(&image);
        driver.write(512, &[7; 1024]).unwrap();
        driver.write(8 * 4096 - 512, &[9; 4096]).unwrap();
        let mut wanted = vec![0; 1 << 20];
        wanted[512..1536].fill(7);
        wanted[8 * 4096 - 512..9 * 4096 - 512].fill(9);
        // Another channel sees the same disk.
        assert!(Driver::new(&image).read(0, 1 << 20).unwrap() == wanted);
        driver.execute(Operation::Discard, 4096 * 7, 4096 * 2, &[]).unwrap();
        driver.execute(Operation::WriteZeroes { unmap: false }, 512, 512, &[]).unwrap();
        wanted[512..1024].fill(0);
        wanted[4096 * 7..4096 * 9].fill(0);
        assert!(driver.read(0, 1 << 20).unwrap() == wanted);
        driver.flush().unwrap();
    }

    #[test]
    fn refuses_accesses_outside_the_disk_and_invalid_requests() {
        let image = memory(1 << 20);
        let mut driver = Driver::new(&image);
        for (operation, (offset, length), pieces) in [
            (Operation::Read, (1 << 20, 512), vec![piece(0, 512)]),
            (Operation::Read, ((1 << 20) - 512, 1024), vec![piece(0, 1024)]),
            (Operation::Read, (u64::MAX - 511, 512), vec![piece(0, 512)]),
            (Operation::Read, (100, 512), vec![piece(0, 512)]),
            (Operation::Read, (0, 100), vec![piece(0, 100)]),
            (Operation::Read, (0, 1024), vec![piece(0, 512)]),
            (Operation::Read, (0, 512), vec![piece(16 << 20, 512)]),
            (Operation::Write { durable: true }, (0, 512), vec![piece((16 << 20) - 256, 512)]),
            (Operation::Write { durable: false }, (0, 512), vec![piece(u64::MAX - 3, 512)]),
            (Operation::Discard, (0, 2 << 20), vec![]),
            (Operation::WriteZeroes { unmap: true }, (1, 512), vec![]),
        ] {
            let answer = driver.execute(operation, offset, length, &pieces);
            assert_eq!(answer, Err(Fault::Refused), "{operation:?} {offset} {length}");
        }
        assert_eq!(driver.read(0, 1 << 20).unwrap(), vec![0; 1 << 20]);
    }

    #[test]
    fn grows_and_never_shrinks() {
        let image = memory(4096);
        image.grow(Some(8192)).unwrap();
        assert_eq!(image.geometry().size, 8192);
        let mut driver = Driver::new(&image);
        driver.write(7680, &[1; 512]).unwrap();
        let error = image.grow(Some(4096)).unwrap_err().to_string();
        assert_eq!(error, "the disk has 8192 bytes and cannot shrink to 4096");
        assert!(image.grow(Some(8193)).is_err() && image.grow(None).is_err());
    }
}
