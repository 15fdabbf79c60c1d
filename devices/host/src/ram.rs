//! Guest memory that records which of its pages this process writes, while a migration asks for it.
//!
//! KVM records those that the guest writes. A write through `vm_memory` is recorded by itself; code
//! that gives addresses to the kernel calls `Memory::wrote` afterwards.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use vm_memory::bitmap::{Bitmap, NewBitmap, RefSlice, WithBitmapSlice};

pub type GuestMemoryMmap = vm_memory::GuestMemoryMmap<Written>;
pub type GuestRegionMmap = vm_memory::GuestRegionMmap<Written>;
pub type MmapRegion = vm_memory::MmapRegion<Written>;

/// The size of a page in bytes.
pub const PAGE: usize = 4096;

/// The pages of a region that were written, each one bit.
#[derive(Debug, Default)]
pub struct Written {
    on: AtomicBool,
    /// Created when it is first needed.
    pages: OnceLock<Vec<AtomicU64>>,
    /// The length of the region in bytes.
    length: usize,
}

impl Written {
    fn words(&self) -> &[AtomicU64] {
        self.pages.get().map_or(&[], Vec::as_slice)
    }

    /// Begins or ends recording, without pages. Nobody may write meanwhile: a write that has begun
    /// is not seen.
    pub fn record(&self, on: bool) {
        if on {
            let count = self.length.div_ceil(PAGE).div_ceil(64);
            self.pages.get_or_init(|| (0..count).map(|_| AtomicU64::new(0)).collect());
        }
        self.words().iter().for_each(|word| word.store(0, Ordering::Relaxed));
        self.on.store(on, Ordering::SeqCst);
    }

    pub fn records(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    /// Adds the pages of KVM's list.
    pub fn add(&self, pages: &[u64]) {
        for (word, more) in self.words().iter().zip(pages).filter(|(_, more)| **more != 0) {
            word.fetch_or(*more, Ordering::AcqRel);
        }
    }

    /// The number of recorded pages.
    pub fn count(&self) -> u64 {
        let words = self.words().iter();
        words.map(|word| u64::from(word.load(Ordering::Relaxed).count_ones())).sum()
    }

    /// Takes the recorded pages: those that are written from now on are recorded again.
    pub fn take(&self) -> Vec<u64> {
        self.words().iter().map(|word| word.swap(0, Ordering::AcqRel)).collect()
    }
}

impl<'a> WithBitmapSlice<'a> for Written {
    type S = RefSlice<'a, Self>;
}

impl Bitmap for Written {
    fn mark_dirty(&self, offset: usize, length: usize) {
        if !self.records() || length == 0 {
            return;
        }
        let last = offset.saturating_add(length - 1) / PAGE;
        for page in offset / PAGE..=last {
            if let Some(word) = self.words().get(page / 64) {
                word.fetch_or(1 << (page % 64), Ordering::AcqRel);
            }
        }
    }

    fn dirty_at(&self, offset: usize) -> bool {
        let page = offset / PAGE;
        let word = self.words().get(page / 64);
        word.is_some_and(|word| word.load(Ordering::Acquire) & 1 << (page % 64) != 0)
    }

    fn slice_at(&self, offset: usize) -> RefSlice<'_, Self> {
        RefSlice::new(self, offset)
    }
}

impl NewBitmap for Written {
    fn with_len(length: usize) -> Self {
        Self { length, ..Self::default() }
    }
}

#[cfg(test)]
mod test {
    use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _};

    use super::*;

    const SIZE: usize = 200 * PAGE;

    fn ram() -> GuestMemoryMmap {
        let ranges = [(GuestAddress(0), SIZE), (GuestAddress(1 << 32), SIZE)];
        GuestMemoryMmap::from_ranges(&ranges).unwrap()
    }

    fn pages(ram: &GuestMemoryMmap) -> Vec<usize> {
        let mut pages = Vec::new();
        for (number, region) in ram.iter().enumerate() {
            for (index, word) in region.get_mmap().bitmap().take().into_iter().enumerate() {
                let set = (0..64).filter(|bit| word & 1 << bit != 0);
                pages.extend(set.map(|bit| number * 1000 + index * 64 + bit));
            }
        }
        pages
    }

    #[test]
    fn pages_are_recorded_once_and_only_while_asked() {
        let ram = ram();
        ram.write_slice(&[1; 9], GuestAddress(0)).unwrap();
        assert!(pages(&ram).is_empty());
        ram.iter().for_each(|region| region.get_mmap().bitmap().record(true));
        ram.write_slice(&[1; 9], GuestAddress(70 * 4096 - 4)).unwrap();
        ram.write_obj(7_u16, GuestAddress((1 << 32) + 199 * 4096)).unwrap();
        ram.store(7_u32, GuestAddress(3 * 4096), Ordering::Release).unwrap();
        ram.read_slice(&mut [0; 9000], GuestAddress(8 * 4096)).unwrap();
        assert_eq!(pages(&ram), [3, 69, 70, 1199]);
        assert!(pages(&ram).is_empty());
        ram.iter().next().unwrap().get_mmap().bitmap().add(&[1 << 63]);
        assert_eq!(pages(&ram), [63]);
        ram.iter().for_each(|region| region.get_mmap().bitmap().record(false));
        ram.write_slice(&[1; 9], GuestAddress(0)).unwrap();
        assert!(pages(&ram).is_empty());
    }
}
