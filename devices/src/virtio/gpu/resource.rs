//! Resources: pictures in the guest's pages.

use std::collections::BTreeMap;

use anyhow::ensure;
use host::display::PAGE_BYTES;
use serde::{Deserialize, Serialize};

/// Linux creates one for each frame buffer of a program, and some for pointers.
pub(super) const MAX_RESOURCES: usize = 1024;
/// Limit for the lists of all resources together: 512 MiB of single pages, or any number of
/// adjacent ones. An extent takes 24 bytes.
pub(super) const MAX_EXTENTS: usize = 128 << 10;
/// Maximum width and height.
const MAX_SIDE: u32 = 8192;
pub(super) const PIXEL: u64 = 4;

/// The answer to a command that did nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Failure {
    Unspecified,
    OutOfMemory,
    Scanout,
    Resource,
    Parameter,
}

impl Failure {
    /// The type of the answer (5.7.6.7).
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Unspecified => 0x1200,
            Self::OutOfMemory => 0x1201,
            Self::Scanout => 0x1202,
            Self::Resource => 0x1203,
            Self::Parameter => 0x1205,
        }
    }
}

/// A rectangle, in pixels.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Rectangle {
    pub(super) x: u32,
    pub(super) y: u32,
    pub(super) width: u32,
    pub(super) height: u32,
}

impl Rectangle {
    fn is_within(self, width: u32, height: u32) -> bool {
        let fits = |start: u32, length: u32, limit: u32| {
            start.checked_add(length).is_some_and(|end| end <= limit)
        };
        fits(self.x, self.width, width) && fits(self.y, self.height, height)
    }

    pub(super) fn is_empty(self) -> bool {
        self.width == 0 || self.height == 0
    }

    /// The common part, which may be empty. Both must be within a resource.
    pub(super) fn common(self, other: Self) -> Self {
        let span = |one: u32, length: u32, two: u32, other: u32| {
            let start = one.max(two);
            (start, (one + length).min(two + other).saturating_sub(start))
        };
        let (x, width) = span(self.x, self.width, other.x, other.width);
        let (y, height) = span(self.y, self.height, other.y, other.height);
        Self { x, y, width, height }
    }
}

/// A part of the guest's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Extent {
    /// Offset in the resource.
    start: u64,
    address: u64,
    length: u64,
}

/// The memory of a resource, as the guest gave it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub(super) struct Extents(Vec<Extent>);

impl Extents {
    /// Adds memory at the end. Returns false if the address is invalid.
    pub(super) fn push(&mut self, address: u64, length: u64) -> bool {
        let last = self.0.last().copied();
        let start = last.map_or(0, |it| it.start + it.length);
        if address.checked_add(length).is_none() || start.checked_add(length).is_none() {
            return false;
        }
        match self.0.last_mut() {
            _ if length == 0 => {}
            Some(last) if last.address + last.length == address => last.length += length,
            _ => self.0.push(Extent { start, address, length }),
        }
        true
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }

    /// Whether a picture has few parts: those between the first and the last are whole pages or
    /// more, as with all drivers.
    pub(super) fn is_coarse(&self) -> bool {
        let middle = self.0.get(1..self.0.len().saturating_sub(1)).unwrap_or_default();
        middle.iter().all(|it| it.length >= PAGE_BYTES)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Calls `copy` for each part of `data`, which starts at this offset, with its address. The
    /// part beyond the end is left out.
    pub(super) fn read(&self, offset: u64, data: &mut [u8], mut copy: impl FnMut(u64, &mut [u8])) {
        let (mut at, mut rest) = (offset, data);
        let first = self.0.partition_point(|it| it.start + it.length <= offset);
        for extent in &self.0[first..] {
            let skip = at - extent.start;
            let length = usize::try_from(extent.length - skip).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at_mut(length.min(rest.len()));
            copy(extent.address + skip, now);
            at += now.len() as u64;
            if later.is_empty() {
                return;
            }
            rest = later;
        }
    }
}

impl From<Extents> for Vec<(u64, u64)> {
    fn from(extents: Extents) -> Self {
        extents.0.iter().map(|it| (it.address, it.length)).collect()
    }
}

impl TryFrom<Vec<(u64, u64)>> for Extents {
    type Error = anyhow::Error;

    fn try_from(list: Vec<(u64, u64)>) -> anyhow::Result<Self> {
        let mut extents = Self::default();
        for (address, length) in list {
            ensure!(extents.push(address, length), "{length:#x} bytes at {address:#x}");
        }
        Ok(extents)
    }
}

/// Where the blue, green and red bytes of a pixel are, by format (5.7.6.7,
/// `enum virtio_gpu_formats`).
const FORMATS: [(u32, [usize; 3]); 8] = [
    (1, [0, 1, 2]),   // B8G8R8A8
    (2, [0, 1, 2]),   // B8G8R8X8
    (3, [3, 2, 1]),   // A8R8G8B8
    (4, [3, 2, 1]),   // X8R8G8B8
    (67, [2, 1, 0]),  // R8G8B8A8
    (68, [1, 2, 3]),  // X8B8G8R8
    (121, [1, 2, 3]), // A8B8G8R8
    (134, [2, 1, 0]), // R8G8B8X8
];

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Resource {
    pub(super) width: u32,
    pub(super) height: u32,
    format: u32,
    pub(super) extents: Extents,
}

impl Resource {
    /// Bytes of a line.
    pub(super) fn stride(&self) -> u64 {
        u64::from(self.width) * PIXEL
    }

    /// The offset of the first pixel of a rectangle.
    pub(super) fn offset(&self, at: Rectangle) -> u64 {
        u64::from(at.y) * self.stride() + u64::from(at.x) * PIXEL
    }

    pub(super) fn contains(&self, rectangle: Rectangle) -> bool {
        rectangle.is_within(self.width, self.height)
    }

    /// Changes pixels of this resource to blue, green, red and an unused byte.
    pub(super) fn convert(&self, data: &mut [u8]) {
        let format = FORMATS.iter().find(|it| it.0 == self.format);
        let Some((_, [blue, green, red])) = format.filter(|it| it.1 != [0, 1, 2]) else { return };
        for pixel in data.chunks_exact_mut(4) {
            let from = [pixel[*blue], pixel[*green], pixel[*red]];
            pixel[..3].copy_from_slice(&from);
        }
    }

    fn check(&self, limit: u64) -> Result<(), Failure> {
        let sides = (1..=MAX_SIDE).contains(&self.width) && (1..=MAX_SIDE).contains(&self.height);
        if !sides || !FORMATS.iter().any(|it| it.0 == self.format) {
            return Err(Failure::Parameter);
        }
        let fits = self.stride() * u64::from(self.height) <= limit;
        if fits { Ok(()) } else { Err(Failure::OutOfMemory) }
    }
}

/// All resources by their identifiers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub(super) struct Resources(BTreeMap<u32, Resource>);

impl Resources {
    /// `limit` is the maximum size of a picture in bytes.
    pub(super) fn create(
        &mut self,
        id: u32,
        [format, width, height]: [u32; 3],
        limit: u64,
    ) -> Result<(), Failure> {
        if id == 0 || self.0.contains_key(&id) {
            return Err(Failure::Resource);
        }
        let resource = Resource { width, height, format, extents: Extents::default() };
        resource.check(limit)?;
        if self.0.len() >= MAX_RESOURCES {
            return Err(Failure::OutOfMemory);
        }
        self.0.insert(id, resource);
        Ok(())
    }

    pub(super) fn remove(&mut self, id: u32) -> Result<(), Failure> {
        self.0.remove(&id).map(drop).ok_or(Failure::Resource)
    }

    pub(super) fn get(&self, id: u32) -> Result<&Resource, Failure> {
        self.0.get(&id).ok_or(Failure::Resource)
    }

    /// Replaces the memory of a resource.
    pub(super) fn set_extents(&mut self, id: u32, extents: Extents) -> Result<(), Failure> {
        let resource = self.0.get_mut(&id).ok_or(Failure::Resource)?;
        if !extents.is_coarse() {
            return Err(Failure::Parameter);
        }
        resource.extents = extents;
        Ok(())
    }

    /// The number of extents that can still be added.
    pub(super) fn room(&self) -> usize {
        MAX_EXTENTS.saturating_sub(self.0.values().map(|it| it.extents.count()).sum())
    }

    /// Checks a saved state.
    pub(super) fn check(&self, limit: u64) -> anyhow::Result<()> {
        let count = self.0.len();
        ensure!(count <= MAX_RESOURCES && !self.0.contains_key(&0), "{count} resources");
        let extents: usize = self.0.values().map(|it| it.extents.count()).sum();
        ensure!(extents <= MAX_EXTENTS, "{extents} extents");
        for (id, resource) in &self.0 {
            let Resource { width, height, .. } = resource;
            ensure!(resource.check(limit).is_ok(), "resource {id}: {width}x{height}");
        }
        Ok(())
    }
}
