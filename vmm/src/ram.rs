//! Guest RAM, split like that of a Q35 machine. It is private memory, which hosts back with huge
//! pages by themselves (for memory files only if an administrator enabled it), or a file of
//! hugetlbfs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, Once};

use anyhow::{Context, bail};
use host::ram::{GuestMemoryMmap, GuestRegionMmap, MmapRegion, Written};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstatfs, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use rustix::mm::{mmap, mmap_anonymous, mremap_fixed};
use rustix::system::sysinfo;
use vm_memory::bitmap::{Bitmap as _, NewBitmap as _};
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

use crate::config::Memory;
use crate::signals;
use host::size::Size;

/// The size of the smallest huge page, in bytes. Host and guest can both use one page if the
/// mapping is aligned to it.
const HUGE: usize = 2 << 20;

/// Maps a region for each of these ranges of guest addresses. Ranges that touch are one mapping of
/// the host, so that huge pages can span them.
///
/// With `saved`, the memory has the contents of this file, in the order of the ranges. The host
/// reads a page when it is first used, and copies it when it is first written: the file never
/// changes, and machines from the same file share the pages that they only read.
pub fn map(
    memory: &Memory,
    ranges: &[Range<u64>],
    saved: Option<&File>,
) -> anyhow::Result<Arc<GuestMemoryMmap>> {
    let size = Size(ranges.iter().map(|range| range.end - range.start).sum());
    let host = sysinfo();
    let has = (host.totalram as u64 + host.totalswap as u64) * u64::from(host.mem_unit);
    if size.0 > has {
        bail!("--memory {size} is more than this host has ({} MiB with swap)", has >> 20);
    }
    let file = memory.hugepages.map(|page| create(page, size).map(Arc::new)).transpose()?;
    let mut start = 0;
    let mut regions = Vec::new();
    for together in ranges.chunk_by(|one, next| one.end == next.start) {
        let guest = together[0].start;
        let length = together[together.len() - 1].end - guest;
        let length_here = usize::try_from(length)?;
        let region = match &file {
            Some(file) => shared(FileOffset::from_arc(file.clone(), start), length_here),
            None => private(length_here, saved.map(|file| (file, start))),
        };
        let region = region.with_context(|| format!("--memory {size}"))?;
        // Keep the guest's memory out of core dumps and child processes.
        hint(&region, Advice::LinuxDontDump);
        hint(&region, Advice::LinuxDontFork);
        if memory.prealloc && file.is_none() {
            in_steps(start..start + length, size, SMALL_STEP_BYTES, |part| {
                let part = part.start - start..part.end - start;
                advise(&region, part, Advice::LinuxPopulateWrite)
                    .with_context(|| format!("--memory {size} cannot be allocated"))
            })?;
        }
        start += length;
        for (range, region) in divide(region, guest, together)? {
            let region = GuestRegionMmap::new(region, GuestAddress(range.start));
            regions.push(region.with_context(|| format!("--memory {size} at {:#x}", range.start))?);
        }
    }
    Ok(Arc::new(GuestMemoryMmap::from_regions(regions).context("the layout of memory")?))
}

/// Divides a mapping, which begins at the guest address `first`, into a mapping for each range. The
/// parts stay valid until the process ends.
#[expect(unsafe_code, reason = "mappings are raw addresses")]
fn divide(
    region: MmapRegion,
    first: u64,
    ranges: &[Range<u64>],
) -> anyhow::Result<Vec<(Range<u64>, MmapRegion)>> {
    if let [range] = ranges {
        return Ok(vec![(range.clone(), region)]);
    }
    let mut parts = Vec::new();
    for range in ranges {
        let (offset, length) = (range.start - first, usize::try_from(range.end - range.start)?);
        let builder =
            recorded(length).with_mmap_prot(region.prot()).with_mmap_flags(region.flags());
        let builder = match region.file_offset() {
            Some(file) => {
                let part = FileOffset::from_arc(file.arc().clone(), file.start() + offset);
                builder.with_file_offset(part).with_hugetlbfs(true)
            }
            None => builder,
        };
        let start = region.as_ptr().wrapping_add(usize::try_from(offset)?);
        // SAFETY: the range lies within `region`, which is forgotten below and so stays mapped.
        let part = unsafe { builder.with_raw_mmap_pointer(start) }.build()?;
        parts.push((range.clone(), part));
    }
    std::mem::forget(region);
    Ok(parts)
}

fn recorded(length: usize) -> MmapRegionBuilder<Written> {
    MmapRegionBuilder::new_with_bitmap(length, Written::with_len(length))
}

fn shared(part: FileOffset, length: usize) -> anyhow::Result<MmapRegion> {
    let builder = recorded(length).with_file_offset(part).with_hugetlbfs(true);
    let builder = builder.with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    Ok(builder.with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE).build()?)
}

/// Maps private memory, aligned to a huge page. The mapping stays until the process ends, because
/// threads of devices may use it until then.
#[expect(unsafe_code, reason = "mappings are raw addresses")]
fn private(length: usize, saved: Option<(&File, u64)>) -> anyhow::Result<MmapRegion> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let longer = length.checked_add(HUGE).context("more than the address space")?;
    // SAFETY: the kernel chooses a free range for the mapping, so no other mapping changes.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), longer, access, flags | MapFlags::NORESERVE)? };
    // The unaligned parts in front and behind are never touched and cost nothing.
    let start = start.cast::<u8>().wrapping_add(start.cast::<u8>().align_offset(HUGE));
    let mut kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    if let Some((file, offset)) = saved {
        kind = libc::MAP_PRIVATE;
        let flags = flags | MapFlags::NORESERVE | MapFlags::FIXED;
        // SAFETY: this range lies within the mapping above, which nobody uses yet.
        unsafe { mmap(start.cast(), length, access, flags, file, offset)? };
    }
    let builder = recorded(length).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let builder = builder.with_mmap_flags(kind);
    // SAFETY: this range lies within the mapping above, which is never unmapped.
    let region = unsafe { builder.with_raw_mmap_pointer(start) }.build()?;
    hint(&region, Advice::LinuxHugepage);
    Ok(region)
}

/// Creates a file of huge pages and allocates all of it at once: the host kills a guest that
/// touches a huge page when none is left.
fn create(page: Size, size: Size) -> anyhow::Result<File> {
    let kind = match page.0 >> 20 {
        2 => MemfdFlags::HUGE_2MB,
        1024 => MemfdFlags::HUGE_1GB,
        _ => bail!("--memory {size},hugepages={page}: unsupported page size: take 2M or 1G"),
    };
    if !size.0.is_multiple_of(page.0) {
        bail!("--memory {size},hugepages={page}: the size is not a multiple of the page size");
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | kind;
    let fd = memfd_create("guest-ram", flags).with_context(|| format!("--memory {size}"))?;
    ftruncate(&fd, size.0).map_err(|error| {
        let text = format!("--memory {size}");
        let limit = "memory in huge pages is a file, whose size `ulimit -f` limits";
        let limited = error == rustix::io::Errno::FBIG;
        anyhow::Error::new(error).context(if limited { format!("{text}: {limit}") } else { text })
    })?;
    allocate(fd.as_fd(), page, size)?;
    Ok(File::from(fd))
}

/// Bytes allocated at once, between checks for a signal: quick enough, and a multiple of all page
/// sizes.
const HUGE_STEP_BYTES: u64 = 1 << 30;
const SMALL_STEP_BYTES: u64 = 128 << 20;

/// Allocates all pages of the file, which may take long.
fn allocate(fd: BorrowedFd<'_>, page: Size, size: Size) -> anyhow::Result<()> {
    in_steps(0..size.0, size, HUGE_STEP_BYTES, |part| {
        fallocate(fd, FallocateFlags::empty(), part.start, part.end - part.start).with_context(
            || {
                format!(
                    "--memory {size} cannot be allocated: reserve huge pages of {page} in \
                     /proc/sys/vm/nr_hugepages"
                )
            },
        )
    })
}

/// Calls `work` for each step of `part`, and stops at a signal that ends the machine. `size` is
/// that of all memory, for the message.
fn in_steps(
    part: Range<u64>,
    size: Size,
    step: u64,
    mut work: impl FnMut(Range<u64>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for start in part.clone().step_by(usize::try_from(step)?) {
        if signals::arrived().is_some() {
            bail!("{} of --memory {size} were allocated", Size(start));
        }
        work(start..part.end.min(start.saturating_add(step)))?;
    }
    Ok(())
}

/// Advises the kernel how a mapping is used. Ignores a refusal: the feature may be off.
fn hint(region: &MmapRegion, advice: Advice) {
    if let Err(error) = advise(region, 0..region.size() as u64, advice) {
        tracing::debug!("guest memory: {advice:?}: {error:#}");
    }
}

#[expect(unsafe_code, reason = "advice takes a raw range")]
fn advise(region: &MmapRegion, part: Range<u64>, advice: Advice) -> anyhow::Result<()> {
    let (start, end) = (usize::try_from(part.start)?, usize::try_from(part.end)?);
    let length = end.min(region.size()).saturating_sub(start);
    // SAFETY: the range is in that mapping, which only guests and volatile accesses read: whatever
    // this does to its contents, they take memory as they find it.
    unsafe { rustix::mm::madvise(region.as_ptr().wrapping_add(start).cast(), length, advice)? };
    Ok(())
}

/// Returns guest RAM to the host: the whole pages in this range. The range stays mapped, for this
/// process and for the guest, and reads as zeros until it is written. Pages that cannot be returned
/// keep their contents.
///
/// With hugetlbfs, the host must reserve enough pages for its machines: if the guest touches a
/// returned page and no page is free, the machine is killed.
pub fn release(ram: &GuestMemoryMmap, range: Range<u64>) {
    for region in ram.iter() {
        let part = region.file_offset();
        let Some(page) = part.map_or(Some(PAGE), |part| page_size(part.file())) else { continue };
        // Regions begin at a page boundary, in the guest and in the host.
        let first = region.start_addr().0;
        let start = range.start.max(first).checked_next_multiple_of(page);
        let end = range.end.min(first.saturating_add(region.len())) / page * page;
        let Some(start) = start.filter(|start| *start < end) else { continue };
        let released = match part {
            Some(part) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let offset = part.start() + (start - first);
                fallocate(part.file(), hole, offset, end - start).map_err(anyhow::Error::from)
            }
            None if is_saved(region) => replace(region, start - first..end - first),
            None => advise(region, start - first..end - first, Advice::LinuxDontNeed),
        };
        if let Err(error) = released {
            static LOGGED: Once = Once::new();
            LOGGED.call_once(|| tracing::warn!("cannot return memory to the host: {error:#}"));
        }
        let part = [start - first, end - start].map(usize::try_from);
        if let [Ok(offset), Ok(length)] = part {
            region.get_mmap().bitmap().mark_dirty(offset, length);
        }
    }
}

/// Whether the region has the contents of a saved machine.
pub fn is_saved(region: &MmapRegion) -> bool {
    let mapped = || SLEPT.lock().expect("no thread panicked").contains(&region.as_ptr().addr());
    region.file_offset().is_none() && (region.flags() & libc::MAP_ANONYMOUS == 0 || mapped())
}

/// The addresses here of regions that have the contents of a saved machine since it slept.
static SLEPT: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

/// Replaces a mapping of guest memory by a part of a file.
#[expect(unsafe_code, reason = "mappings are raw addresses")]
fn move_here(start: *mut u8, length: usize, file: &File, offset: u64) -> anyhow::Result<()> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    // A file that cannot be mapped leaves nothing of what it replaces: map it elsewhere first.
    // SAFETY: the kernel chooses a free range for the mapping, so no other mapping changes.
    let new = unsafe {
        mmap(ptr::null_mut(), length, access, flags | MapFlags::NORESERVE, file, offset)?
    };
    // SAFETY: nobody uses the new mapping yet. The range that it replaces is guest memory, which
    // only guests and volatile accesses use: they take memory as they find it.
    unsafe { mremap_fixed(new, length, length, MremapFlags::MAYMOVE, start.cast())? };
    Ok(())
}

/// Returns all memory to the host, after it was saved to this file: a page has its contents again
/// when it is used. The machine must be parked, so that nothing changes the memory meanwhile.
///
/// After an error, the memory has its contents, too.
pub fn sleep(ram: &GuestMemoryMmap, saved: &File) -> anyhow::Result<()> {
    let mut offset = 0;
    for region in ram.iter() {
        let (start, length) = (region.as_ptr(), region.size());
        let addresses = start.addr()..start.addr() + length;
        let mut replaced = REPLACED.lock().expect("no thread panicked");
        move_here(start, length, saved, offset)?;
        replaced.retain(|part, _| !addresses.contains(part));
        if replaced.is_empty() {
            MAPPINGS.store(0, Ordering::Relaxed);
        }
        SLEPT.lock().expect("no thread panicked").insert(addresses.start);
        for advice in [Advice::LinuxDontDump, Advice::LinuxDontFork, Advice::LinuxHugepage] {
            hint(region, advice);
        }
        offset += length as u64;
    }
    Ok(())
}

/// The parts of saved machines' memory that were returned, by their addresses here: each part's
/// start, and its end. Parts that touch are one.
static REPLACED: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());
/// The number of mappings for them. The kernel limits the mappings of a process (65530 by default),
/// and the guest must not use them up.
static MAPPINGS: AtomicUsize = AtomicUsize::new(0);
const MAX_REPLACED: usize = 16384;

/// Returns a part of a saved machine's memory, which would otherwise have its saved contents again.
/// If that takes too many mappings, the part stays as it is, which no guest notices.
#[expect(unsafe_code, reason = "mappings are raw addresses")]
fn replace(region: &MmapRegion, part: Range<u64>) -> anyhow::Result<()> {
    let (first, length) = (usize::try_from(part.start)?, usize::try_from(part.end - part.start)?);
    let start = region.as_ptr().wrapping_add(first);
    let mut replaced = REPLACED.lock().expect("no thread panicked");
    let addresses = start.addr()..start.addr() + length;
    if replaced.range(..=addresses.start).next_back().is_some_and(|it| *it.1 >= addresses.end) {
        return advise(region, part, Advice::LinuxDontNeed);
    }
    // Parts that touch may still be two mappings of the kernel: all count.
    let count = MAPPINGS.fetch_add(1, Ordering::Relaxed);
    if count >= MAX_REPLACED {
        MAPPINGS.store(MAX_REPLACED, Ordering::Relaxed);
        bail!("the guest returns too many parts of a restored machine's memory");
    }
    let whole = joined(&replaced, addresses);
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let flags = flags | MapFlags::NORESERVE | MapFlags::FIXED;
    // SAFETY: the range is in that mapping, which only guests and volatile accesses use: they take
    // memory as they find it.
    unsafe { mmap_anonymous(start.cast(), length, access, flags)? };
    replaced.retain(|start, _| !whole.contains(start));
    replaced.insert(whole.start, whole.end);
    Ok(())
}

/// A range with all parts that it touches.
fn joined(parts: &BTreeMap<usize, usize>, range: Range<usize>) -> Range<usize> {
    let touching = parts.range(..=range.end).rev().take_while(|it| *it.1 >= range.start);
    touching.fold(range.clone(), |all, (start, end)| all.start.min(*start)..all.end.max(*end))
}

/// Whether a part of this memory was returned, so that it does not have its saved contents.
pub fn is_replaced(addresses: Range<usize>) -> bool {
    let replaced = REPLACED.lock().expect("no thread panicked");
    replaced.range(..addresses.end).next_back().is_some_and(|it| *it.1 > addresses.start)
}

/// The size of a page without hugetlbfs, in bytes.
const PAGE: u64 = 4096;

/// The size of the pages of a memory file, in bytes.
fn page_size(file: &File) -> Option<u64> {
    let size = fstatfs(file).ok().and_then(|found| u64::try_from(found.f_bsize).ok());
    size.filter(|size| size.is_power_of_two())
}

#[cfg(test)]
mod test {
    use vm_memory::{Bytes, MemoryRegionAddress};

    use super::*;

    /// The bytes of a region that the host backs with memory.
    fn resident(region: &GuestRegionMmap) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", region.as_ptr().addr());
        let ours = maps.lines().skip_while(|line| !line.starts_with(&start));
        let kib = ours.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
        kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn two_ranges_are_mapped_at_their_addresses() {
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[0..1 << 20, 1 << 32..(1 << 32) + (3 << 20)], None).unwrap();
        ram.write_obj(7_u64, GuestAddress((1 << 32) + 8)).unwrap();
        assert_eq!(ram.read_obj::<u64>(GuestAddress(8)).unwrap(), 0);
        assert!(ram.write_obj(7_u64, GuestAddress(1 << 20)).is_err(), "a hole");
    }

    #[test]
    fn ranges_that_touch_are_regions_of_one_mapping() {
        let memory = Memory { size: Size(8 << 20), ..Memory::default() };
        let ranges =
            [0..0xa_0000, 0xa_0000..0xc_0000, 0xc_0000..4 << 20, 1 << 32..(1 << 32) + 4096];
        let ram = map(&memory, &ranges, None).unwrap();
        assert_eq!(ram.iter().map(host::smram::range).collect::<Vec<_>>(), ranges);
        let starts: Vec<_> = ram.iter().take(3).map(|region| region.as_ptr().addr()).collect();
        assert_eq!(starts, [0, 0xa_0000, 0xc_0000].map(|offset| starts[0] + offset));
        ram.write_slice(&[7; 64], GuestAddress(0xc_0000 - 32)).unwrap();
        assert_eq!(ram.read_obj::<u8>(GuestAddress(0xc_0000 + 31)).unwrap(), 7);
        release(&ram, 0x9_f000..0xc_1000);
        assert_eq!(ram.read_obj::<u64>(GuestAddress(0xc_0000)).unwrap(), 0);
    }

    #[test]
    fn released_memory_is_freed_on_the_host_and_reads_as_zeros() {
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[0..1 << 20, 1 << 32..(1 << 32) + (3 << 20)], None).unwrap();
        let high = GuestAddress(1 << 32);
        ram.write_slice(&vec![7; 1 << 20], GuestAddress(0)).unwrap();
        ram.write_slice(&vec![7; 3 << 20], high).unwrap();
        let resident = || ram.iter().map(resident).sum::<u64>();
        assert_eq!(resident(), 4 << 20);
        // Parts of pages, a hole, and addresses that no machine has.
        release(&ram, 0xff001..0xfffff);
        release(&ram, 2 << 20..3 << 20);
        release(&ram, u64::MAX - 4096..u64::MAX);
        #[expect(clippy::reversed_empty_ranges, reason = "a guest may cause one")]
        release(&ram, 0x5000..0x3000);
        assert_eq!(resident(), 4 << 20);
        let byte = |at: u64| ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        let gives_back = || {
            // The last page below the hole, and two pages above it.
            release(&ram, 0xff000..(1 << 32) + 0x2000);
            let gone = resident() == (4 << 20) - 0x3000;
            assert_eq!([byte(0xfefff), byte(0xff000), byte(0xfffff)], [7, 0, 0]);
            assert_eq!([byte(high.0), byte(high.0 + 0x1fff), byte(high.0 + 0x2000)], [0, 0, 7]);
            ram.write_obj(9_u8, high).unwrap();
            assert_eq!(byte(high.0), 9, "what was written is there again");
            gone && resident() == (4 << 20) - 0x2000
        };
        // The host's kernel may merge the surrounding pages into a huge page at any moment.
        assert!((0..20).any(|_| gives_back()), "{} bytes are there", resident());
    }

    #[test]
    fn memory_of_a_snapshot_is_its_file_until_it_is_written_or_returned() {
        let file = tempfile::tempfile().unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &vec![7; 4 << 20], 0).unwrap();
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[0..1 << 20, 1 << 32..(1 << 32) + (3 << 20)], Some(&file)).unwrap();
        let high = 1 << 32;
        let byte = |at: u64| ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        ram.write_obj(9_u8, GuestAddress(high)).unwrap();
        assert_eq!([byte(0), byte(high), byte(high + 4096)], [7, 9, 7]);
        let address = |page: usize| {
            let region = ram.iter().nth(1).unwrap();
            let start = region.as_ptr().addr() + page * 4096;
            start..start + 4096
        };
        // The same pages again and again, pages next to them, and pages between them.
        for range in [0..2, 0..2, 1..2, 5..6, 2..3, 3..5, 0..6] {
            release(&ram, high + range.start * 4096..high + range.end * 4096);
            assert_eq!(byte(high + range.start * 4096), 0);
            ram.write_obj(5_u8, GuestAddress(high + range.start * 4096)).unwrap();
            let parts = REPLACED.lock().unwrap().clone();
            let ours = parts.range(address(0).start..address(20).start).count();
            assert!(ours <= 2, "{range:?}: {parts:?}");
        }
        assert!((0..6).all(|page| is_replaced(address(page))));
        assert!(!is_replaced(address(6)));
        assert_eq!([byte(high + 6 * 4096), byte(0)], [7, 7]);
        let mut same = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut same, 1 << 20).unwrap();
        assert_eq!(same, [7], "the file of the snapshot");
    }

    /// The bytes of all mappings within a region that the host backs with memory.
    fn resident_parts(region: &GuestRegionMmap) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (start, end) = (region.as_ptr().addr(), region.as_ptr().addr() + region.size());
        let (mut inside, mut sum) = (false, 0);
        for line in maps.lines() {
            let first = line.split(' ').next().unwrap();
            let address = |text: &str| usize::from_str_radix(text, 16).ok();
            if let Some((from, to)) = first.split_once('-') {
                inside = address(from) >= Some(start) && address(to).is_some_and(|to| to <= end);
            } else if let Some(kib) = line.strip_prefix("Rss:").filter(|_| inside) {
                sum += kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10;
            }
        }
        sum
    }

    #[test]
    fn memory_that_sleeps_is_its_file_and_can_be_returned_again() {
        const PAGES: u64 = 256;
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[0..1 << 20, 1 << 32..(1 << 32) + (3 << 20)], None).unwrap();
        let high = GuestAddress(1 << 32);
        ram.write_slice(&vec![7; 1 << 20], GuestAddress(0)).unwrap();
        ram.write_slice(&vec![8; 3 << 20], high).unwrap();
        let byte = |page: u64| ram.read_obj::<u8>(GuestAddress(page * PAGE)).unwrap();
        let first = ram.iter().next().unwrap();
        let address = |page: usize| first.as_ptr().addr() + page * 4096;
        for round in 0..3 {
            let file = tempfile::tempfile().unwrap();
            for (at, region) in [0, 1 << 20].into_iter().zip(ram.iter()) {
                let mut contents = vec![0; region.size()];
                region.read_slice(&mut contents, MemoryRegionAddress(0)).unwrap();
                std::os::unix::fs::FileExt::write_all_at(&file, &contents, at).unwrap();
            }
            sleep(&ram, &file).unwrap();
            assert_eq!(ram.iter().map(resident_parts).sum::<u64>(), 0);
            assert!(ram.iter().all(|region| is_saved(region)));
            assert!(!is_replaced(address(0)..address(256)), "{round}");
            let wanted = [7, if round == 0 { 7 } else { 0 }, 7];
            assert_eq!([4, 5, 6].map(byte), wanted);
            // The balloon: a page does not get its saved contents again.
            release(&ram, 5 * PAGE..6 * PAGE);
            assert_eq!([4, 5, 6].map(byte), [7, 0, 7]);
            assert!(is_replaced(address(5)..address(6)) && !is_replaced(address(6)..address(7)));
            // All pages are used and changed again.
            (0..PAGES).for_each(|page| {
                ram.write_obj(byte(page), GuestAddress(page * PAGE)).unwrap();
            });
            assert_eq!(resident_parts(first), 1 << 20);
        }
        let empty = File::open("/dev/null").unwrap();
        sleep(&ram, &empty).unwrap_err();
        assert_eq!([4, 5, 6].map(byte), [7, 0, 7]);
        assert_eq!(ram.read_obj::<u8>(high).unwrap(), 8);
    }

    #[test]
    fn refuses_more_memory_than_the_host_has_and_missing_huge_pages() {
        let memory = Memory { size: Size(1 << 50), ..Memory::default() };
        let error = map(&memory, &[0..1 << 50; 1], None).unwrap_err().to_string();
        assert!(error.contains("more than this host has"), "{error}");
        let memory = Memory { hugepages: Some(Size(3 << 20)), ..Memory::default() };
        let error = map(&memory, &[0..6 << 20; 1], None).unwrap_err().to_string();
        assert!(error.contains("take 2M or 1G"), "{error}");
    }
}
