//! The memory of a machine that arrives.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, ensure};
use host::ram::{GuestMemoryMmap, MmapRegion, PAGE};
use vm_memory::{GuestMemoryBackend as _, VolatileMemory as _};

use super::stream::Place;
use crate::snapshot::Received;
use crate::snapshot::memory::is_zero;

/// Limits for the memory of devices.
const MAX_PARTS: usize = 64;
const MAX_DEVICE_MEMORY: u64 = 1 << 30;

/// The memory that is received.
pub struct Parts {
    pub received: Received,
    /// The lengths of the devices' memory.
    devices: Vec<u64>,
}

impl Parts {
    pub fn new(ram: Arc<GuestMemoryMmap>, lengths: &[u64]) -> anyhow::Result<Self> {
        let regions: Vec<_> = ram.iter().map(|it| it.size() as u64).collect();
        let others = lengths.strip_prefix(&regions[..]).with_context(|| {
            format!(
                "its memory has other parts than here ({lengths:?} and {regions:?} bytes): give \
                 `--memory` and `--smm` as they were, or not at all"
            )
        })?;
        let total = others.iter().fold(0, |sum: u64, it| sum.saturating_add(*it));
        ensure!(
            others.len() <= MAX_PARTS && total <= MAX_DEVICE_MEMORY,
            "its devices have {total} bytes of memory, more than a machine has"
        );
        let devices = vec![BTreeMap::new(); others.len()];
        Ok(Self { received: Received { ram, devices }, devices: others.to_vec() })
    }

    pub fn write(&mut self, place: Place, bytes: &[u8]) -> anyhow::Result<()> {
        let (part, offset) = self.find(place, bytes.len())?;
        match part {
            Part::Ram(region) => {
                region.as_volatile_slice().subslice(offset, bytes.len())?.copy_from(bytes);
            }
            Part::Device(pages) => {
                for (at, page) in (offset..).step_by(PAGE).zip(bytes.chunks(PAGE)) {
                    pages.insert(at, page.to_vec());
                }
            }
        }
        Ok(())
    }

    pub fn clear(&mut self, place: Place, length: u64) -> anyhow::Result<()> {
        let length = usize::try_from(length)?;
        let (part, offset) = self.find(place, length)?;
        match part {
            Part::Ram(region) => {
                let whole = region.as_volatile_slice();
                let mut page = [0; PAGE];
                for at in (offset..offset + length).step_by(PAGE) {
                    let count = PAGE.min(offset + length - at);
                    let place = whole.subslice(at, count)?;
                    // A page that was never written has no memory of the host, and stays so.
                    place.copy_to(&mut page[..count]);
                    if !is_zero(&page[..count]) {
                        place.copy_from(&[0; PAGE][..count]);
                    }
                }
            }
            Part::Device(pages) => pages.retain(|at, _| !(offset..offset + length).contains(at)),
        }
        Ok(())
    }

    /// The part of a place, if it has this number of bytes from there on.
    fn find(&mut self, place: Place, length: usize) -> anyhow::Result<(Part<'_>, usize)> {
        let Place { part, offset } = place;
        let outside = || format!("pages at offset {offset} of part {part} are outside of memory");
        let end = offset.checked_add(length as u64).with_context(outside)?;
        let (part, regions) = (part as usize, self.received.ram.num_regions());
        let (found, size) = if part < regions {
            let region = self.received.ram.iter().nth(part).with_context(outside)?;
            (Part::Ram(region), region.size() as u64)
        } else {
            let pages = self.received.devices.get_mut(part - regions).with_context(outside)?;
            (Part::Device(pages), self.devices[part - regions])
        };
        ensure!(end <= size, outside());
        Ok((found, usize::try_from(offset)?))
    }
}

enum Part<'a> {
    Ram(&'a MmapRegion),
    Device(&'a mut BTreeMap<usize, Vec<u8>>),
}
