//! The contents of memory, as they are sent: all at first, then what was written since.

use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use host::ram::{MmapRegion, PAGE};
use serde_json::{Value, json};
use vm_memory::VolatileMemory as _;

use super::stream::{MAX_PAGES, Message, Place, Writer};
use crate::ram;
use crate::snapshot::memory::{Limit, Pages, is_zero};

/// All parts of memory, with what was sent of them.
pub struct Outgoing {
    ram: Vec<Arc<MmapRegion>>,
    /// The memory of each device, and what was sent of it. Their pages are compared, because KVM's
    /// lists of writes to them belong to the devices.
    devices: Vec<(Arc<MmapRegion>, Vec<u8>)>,
    /// Tells memory that was never touched: reading it would allocate it.
    pages: Arc<Pages>,
    pub meter: Meter,
}

/// Counts what is sent, within a limit.
pub struct Meter {
    pub sent: u64,
    /// The bytes that were sent, and those of pages that became zeros. They tell how fast memory
    /// is sent that the guest writes.
    pub moved: u64,
    pub progress: Arc<Progress>,
    pub limit: Limit,
}

/// The numbers of a migration that the operator sees.
#[derive(Default)]
pub struct Progress {
    pub sent: AtomicU64,
    /// The bytes of memory that must still be sent.
    pub left: AtomicU64,
    pub rounds: AtomicU64,
    /// The percentage of time in which the processors stand.
    pub throttle: AtomicU64,
}

impl Progress {
    pub fn show(&self) -> Value {
        let read = |it: &AtomicU64| it.load(Ordering::Relaxed);
        json!({
            "sent_bytes": read(&self.sent),
            "left_bytes": read(&self.left),
            "rounds": read(&self.rounds),
            "throttle_percent": read(&self.throttle),
        })
    }
}

impl Meter {
    /// `passed` of memory needs not be sent any more, for which this was sent.
    fn count(&mut self, passed: u64, Sent { bytes, zeros }: Sent) -> anyhow::Result<()> {
        self.sent += bytes;
        self.moved += bytes + zeros;
        let left = self.progress.left.load(Ordering::Relaxed);
        self.progress.left.store(left.saturating_sub(passed), Ordering::Relaxed);
        self.progress.sent.store(self.sent, Ordering::Relaxed);
        self.limit.check()
    }
}

impl Outgoing {
    pub fn new(
        ram: Vec<Arc<MmapRegion>>,
        devices: Vec<Arc<MmapRegion>>,
        pages: Arc<Pages>,
    ) -> Self {
        let unsent = |it: Arc<MmapRegion>| (it.clone(), vec![0; it.size()]);
        let devices = devices.into_iter().map(unsent).collect();
        let (progress, limit) = (Arc::default(), Limit::new(None));
        let meter = Meter { sent: 0, moved: 0, progress, limit };
        Self { ram, devices, pages, meter }
    }

    /// The bytes of RAM that were written since they were sent.
    pub fn written(&self) -> u64 {
        self.ram.iter().map(|it| it.bitmap().count() * PAGE as u64).sum()
    }

    /// Sends what is not zero. The other end has only zeros.
    pub fn send_all<W: Write>(&mut self, to: &mut Writer<W>) -> anyhow::Result<()> {
        let mut buffer = vec![0; MAX_PAGES];
        let total = self.ram.iter().map(|it| it.size() as u64).sum();
        self.meter.progress.left.store(total, Ordering::Relaxed);
        for (part, region) in (0..).zip(&self.ram) {
            let mut passed = 0;
            for (offset, length) in touched(region, &self.pages) {
                let bytes = &mut buffer[..length];
                region.as_volatile_slice().subslice(offset, length)?.copy_to(bytes);
                let sent = send(to, (part, offset), bytes, Zeros::Known)?;
                self.meter.count((offset + length - passed) as u64, sent)?;
                passed = offset + length;
            }
            self.meter.count((region.size() - passed) as u64, Sent::default())?;
        }
        self.send_devices(to)
    }

    /// Sends what was written since it was sent last.
    pub fn send_written<W: Write>(&mut self, to: &mut Writer<W>) -> anyhow::Result<()> {
        let mut buffer = vec![0; MAX_PAGES];
        for (part, region) in (0..).zip(&self.ram) {
            for (first, count) in runs(&region.bitmap().take()) {
                let length = (count * PAGE).min(region.size() - first * PAGE);
                let bytes = &mut buffer[..length];
                region.as_volatile_slice().subslice(first * PAGE, length)?.copy_to(bytes);
                let sent = send(to, (part, first * PAGE), bytes, Zeros::New)?;
                self.meter.count(length as u64, sent)?;
            }
        }
        self.send_devices(to)
    }

    fn send_devices<W: Write>(&mut self, to: &mut Writer<W>) -> anyhow::Result<()> {
        let mut buffer = vec![0; MAX_PAGES];
        for (part, (region, sent)) in (self.ram.len()..).zip(&mut self.devices) {
            for (start, length) in touched(region, &self.pages) {
                let now = &mut buffer[..length];
                region.as_volatile_slice().subslice(start, length)?.copy_to(now);
                let before = &mut sent[start..start + length];
                for (number, page) in now.chunks(PAGE).enumerate() {
                    let old = &mut before[number * PAGE..][..page.len()];
                    if page != old {
                        old.copy_from_slice(page);
                        let place = (u32::try_from(part)?, start + number * PAGE);
                        let sent = send(to, place, page, Zeros::New)?;
                        self.meter.count(0, sent)?;
                    }
                }
            }
        }
        Ok(())
    }
}

/// The pieces of a region, each of which fits a message, that may have other contents than zeros.
fn touched(region: &MmapRegion, pages: &Pages) -> impl Iterator<Item = (usize, usize)> {
    let fresh = region.file_offset().is_none() && !ram::is_saved(region);
    let pieces = (0..region.size()).step_by(MAX_PAGES);
    let pieces = pieces.map(|start| (start, MAX_PAGES.min(region.size() - start)));
    pieces.filter(move |(start, length)| {
        !fresh || !pages.unchanged(region.as_ptr().addr() + start, *length)
    })
}

/// Whether the other end has zeros where nothing was sent.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Zeros {
    Known,
    New,
}

/// The bytes of pages that were sent, and of those that became zeros.
#[derive(Clone, Copy, Default)]
struct Sent {
    bytes: u64,
    zeros: u64,
}

/// Sends pages.
fn send<W: Write>(
    to: &mut Writer<W>,
    (part, start): (u32, usize),
    bytes: &[u8],
    zeros: Zeros,
) -> anyhow::Result<Sent> {
    let (mut at, mut sent) = (0, Sent::default());
    let pages: Vec<_> = bytes.chunks(PAGE).collect();
    for run in pages.chunk_by(|one, next| is_zero(one) == is_zero(next)) {
        let length: usize = run.iter().map(|page| page.len()).sum();
        let place = Place { part, offset: (start + at) as u64 };
        if !is_zero(run[0]) {
            to.send(&Message::Pages { place, bytes: &bytes[at..at + length] })?;
            sent.bytes += length as u64;
        } else if zeros == Zeros::New {
            to.send(&Message::Zeros { place, length: length as u64 })?;
            sent.zeros += length as u64;
        }
        at += length;
    }
    Ok(sent)
}

/// The runs of bits that are set: the first, and their number, of at most one message.
fn runs(words: &[u64]) -> Vec<(usize, usize)> {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for (index, mut word) in words.iter().copied().enumerate() {
        while word != 0 {
            let skip = word.trailing_zeros();
            let count = (word >> skip).trailing_ones();
            let first = index * 64 + skip as usize;
            match runs.last_mut() {
                Some((start, length))
                    if *start + *length == first
                        && (*length + count as usize) * PAGE <= MAX_PAGES =>
                {
                    *length += count as usize;
                }
                _ => runs.push((first, count as usize)),
            }
            let used = u64::MAX.checked_shl(skip + count).unwrap_or(0);
            word &= used;
        }
    }
    runs
}

#[cfg(test)]
mod test {
    use super::super::stream::Reader;
    use super::*;

    #[test]
    fn runs_are_all_bits_that_are_set_and_fit_a_message() {
        assert_eq!(runs(&[0, 0]), []);
        assert_eq!(runs(&[0b1011, 1 << 63, 1, u64::MAX]), [(0, 2), (3, 1), (127, 2), (192, 64)]);
        let long = runs(&[u64::MAX; 9]);
        assert_eq!(long, [(0, 256), (256, 256), (512, 64)]);
    }

    /// Does as the other end with these messages.
    fn apply(bytes: &[u8], parts: &mut [Vec<u8>]) {
        let mut reader = Reader::new(bytes);
        while let Ok(message) = reader.receive() {
            match message {
                Message::Pages { place, bytes } => {
                    let at = usize::try_from(place.offset).unwrap();
                    parts[place.part as usize][at..at + bytes.len()].copy_from_slice(bytes);
                }
                Message::Zeros { place, length } => {
                    let at = usize::try_from(place.offset).unwrap();
                    let length = usize::try_from(length).unwrap();
                    parts[place.part as usize][at..at + length].fill(0);
                }
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn the_other_end_has_what_was_written_meanwhile() {
        let [ram, screen] = [3 << 20, 5 * PAGE].map(|it| Arc::new(MmapRegion::new(it).unwrap()));
        let write = |region: &MmapRegion, at: usize, byte: u8, length: usize| {
            let noise = vec![byte; length];
            region.as_volatile_slice().subslice(at, length).unwrap().copy_from(&noise);
        };
        let mut parts = [vec![0; ram.size()], vec![0; screen.size()]];
        let check = |parts: &[Vec<u8>]| {
            for (region, part) in [&ram, &screen].into_iter().zip(parts) {
                let mut bytes = vec![0; region.size()];
                region.as_volatile_slice().copy_to(&mut bytes);
                assert!(bytes == *part);
            }
        };
        let mut contents =
            Outgoing::new(vec![ram.clone()], vec![screen.clone()], Arc::new(Pages::open()));
        ram.bitmap().record(true);
        write(&ram, 5 * PAGE, 1, 3 * PAGE);
        write(&ram, (2 << 20) - 1, 2, 2);
        write(&screen, PAGE, 3, 2 * PAGE);
        let mut bytes = Vec::new();
        contents.send_all(&mut Writer::new(&mut bytes).unwrap()).unwrap();
        assert_eq!(contents.meter.sent, (3 + 2 + 2) * PAGE as u64);
        apply(&bytes, &mut parts);
        check(&parts);
        ram.bitmap().take();
        write(&ram, 6 * PAGE, 0, PAGE);
        write(&ram, ram.size() - 1, 9, 1);
        write(&screen, 4 * PAGE, 7, PAGE);
        write(&screen, PAGE, 0, PAGE);
        assert_eq!(contents.written(), 2 * PAGE as u64);
        let mut bytes = Vec::new();
        contents.send_written(&mut Writer::new(&mut bytes).unwrap()).unwrap();
        apply(&bytes, &mut parts);
        check(&parts);
        assert_eq!((contents.written(), contents.meter.sent), (0, 9 * PAGE as u64));
    }
}
