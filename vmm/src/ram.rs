//! Guest RAM, split as Q35 splits it, in pages as large as the host gives: memory of the process'
//! own, which hosts make of huge pages by themselves (memory files only where an administrator
//! said so), or a file of hugetlbfs.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::ptr;
use std::sync::{Arc, Once};

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstatfs, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, mmap_anonymous};
use rustix::system::sysinfo;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap, MmapRegion,
};

use crate::config::Memory;
use crate::signals;
use host::size::Size;

/// The smallest huge page: guest and host can share one that begins with a page for both.
const HUGE: usize = 2 << 20;

/// Maps RAM at these addresses.
///
/// # Errors
///
/// When the host does not have as much, or not in pages of that size.
pub fn map(memory: &Memory, ranges: &[(u64, u64)]) -> anyhow::Result<Arc<GuestMemoryMmap>> {
    let size = Size(ranges.iter().map(|range| range.1).sum());
    let host = sysinfo();
    let has = (host.totalram as u64 + host.totalswap as u64) * u64::from(host.mem_unit);
    if size.0 > has {
        bail!("--memory {size} is more than this host has ({} MiB with swap)", has >> 20);
    }
    let file = memory.hugepages.map(|page| create(page, size).map(Arc::new)).transpose()?;
    let mut start = 0;
    let mut regions = Vec::new();
    for (guest, length) in ranges {
        let length_here = usize::try_from(*length)?;
        let region = match &file {
            Some(file) => shared(FileOffset::from_arc(file.clone(), start), length_here),
            None => private(length_here),
        };
        let region = region.with_context(|| format!("--memory {size}"))?;
        // What the guest keeps in memory is not for a core dump of ours, nor for our children.
        hint(&region, Advice::LinuxDontDump);
        hint(&region, Advice::LinuxDontFork);
        if memory.prealloc && file.is_none() {
            in_steps((start..start + length, size), SMALL_AT_ONCE, |part| {
                let part = part.start - start..part.end - start;
                advise(&region, part, Advice::LinuxPopulateWrite)
                    .with_context(|| format!("--memory {size} cannot be set aside"))
            })?;
        }
        let region = GuestRegionMmap::new(region, GuestAddress(*guest));
        regions.push(region.with_context(|| format!("--memory {size} at {guest:#x}"))?);
        start += length;
    }
    Ok(Arc::new(GuestMemoryMmap::from_regions(regions).context("the layout of memory")?))
}

/// A part of a file.
fn shared(part: FileOffset, length: usize) -> anyhow::Result<MmapRegion> {
    let builder = MmapRegionBuilder::new(length).with_file_offset(part).with_hugetlbfs(true);
    let builder = builder.with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    Ok(builder.with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE).build()?)
}

/// Memory of our own, which begins where a huge page does. It stays until the process ends: a
/// thread of a device may have it for as long.
#[expect(unsafe_code, reason = "mappings are raw addresses")]
fn private(length: usize) -> anyhow::Result<MmapRegion> {
    let (access, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE);
    let longer = length.checked_add(HUGE).context("more than an address can say")?;
    // SAFETY: a mapping where the kernel has room for it touches nothing that there is.
    let start =
        unsafe { mmap_anonymous(ptr::null_mut(), longer, access, flags | MapFlags::NORESERVE)? };
    // What is left in front and behind is never touched, and costs nothing.
    let start = start.cast::<u8>().wrapping_add(start.cast::<u8>().align_offset(HUGE));
    let builder = MmapRegionBuilder::new(length).with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE);
    let builder = builder.with_mmap_flags(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: so many bytes from there on are in the mapping above, which is never taken away.
    let region = unsafe { builder.with_raw_mmap_pointer(start) }.build()?;
    hint(&region, Advice::LinuxHugepage);
    Ok(region)
}

/// Sets a file of huge pages aside: they are taken now or never, for a guest that finds none left
/// is killed.
fn create(page: Size, size: Size) -> anyhow::Result<File> {
    let kind = match page.0 >> 20 {
        2 => MemfdFlags::HUGE_2MB,
        1024 => MemfdFlags::HUGE_1GB,
        _ => bail!("--memory {size},hugepages={page}: such pages do not exist: take 2M or 1G"),
    };
    if !size.0.is_multiple_of(page.0) {
        bail!("--memory {size},hugepages={page}: not a multiple");
    }
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::HUGETLB | kind;
    let fd = memfd_create("guest-ram", flags).with_context(|| format!("--memory {size}"))?;
    ftruncate(&fd, size.0).map_err(|error| {
        let text = format!("--memory {size}");
        let limit = "memory is a file to the host, and may not be longer than `ulimit -f` says";
        let limited = error == rustix::io::Errno::FBIG;
        anyhow::Error::new(error).context(if limited { format!("{text}: {limit}") } else { text })
    })?;
    set_aside(fd.as_fd(), page, size)?;
    Ok(File::from(fd))
}

/// So much at once: a moment's work, and whole pages of any size.
const AT_ONCE: u64 = 1 << 30;
const SMALL_AT_ONCE: u64 = 128 << 20;

/// Takes all of it now, which may take long.
fn set_aside(fd: BorrowedFd<'_>, page: Size, size: Size) -> anyhow::Result<()> {
    in_steps((0..size.0, size), AT_ONCE, |part| {
        fallocate(fd, FallocateFlags::empty(), part.start, part.end - part.start).with_context(
            || {
                format!(
                    "--memory {size} cannot be set aside (huge pages of {page} are set aside in \
                     /proc/sys/vm/nr_hugepages)"
                )
            },
        )
    })
}

/// Does something to each step of a part of all memory, until somebody wants us to end.
fn in_steps(
    (part, size): (Range<u64>, Size),
    step: u64,
    mut work: impl FnMut(Range<u64>) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    for start in part.clone().step_by(usize::try_from(step)?) {
        if signals::arrived().is_some() {
            bail!("{} of --memory {size} were set aside", Size(start));
        }
        work(start..part.end.min(start.saturating_add(step)))?;
    }
    Ok(())
}

/// Tells the host how a mapping is used, which may be refused where it is switched off.
fn hint(region: &MmapRegion, advice: Advice) {
    if let Err(error) = advise(region, 0..region.size() as u64, advice) {
        tracing::debug!("guest memory: {advice:?}: {error:#}");
    }
}

/// Has the host do something with a part of a mapping.
#[expect(unsafe_code, reason = "advice takes a raw range")]
fn advise(region: &MmapRegion, part: Range<u64>, advice: Advice) -> anyhow::Result<()> {
    let (start, end) = (usize::try_from(part.start)?, usize::try_from(part.end)?);
    let length = end.min(region.size()).saturating_sub(start);
    // SAFETY: the range is in that mapping, which only guests and volatile accesses read: whatever
    // this does to its contents, they take memory as they find it.
    unsafe { rustix::mm::madvise(region.as_ptr().wrapping_add(start).cast(), length, advice)? };
    Ok(())
}

/// Gives guest RAM back to the host, as far as the range is whole pages of it. It stays mapped,
/// for us and for the guest: who touches it gets new pages, which are zeros.
///
/// With pages of hugetlbfs the host has to keep as many as its machines may want: one that comes
/// back when none is left cannot be had, which ends the machine.
pub fn release(ram: &GuestMemoryMmap, range: Range<u64>) {
    for region in ram.iter() {
        let part = region.file_offset();
        let Some(page) = part.map_or(Some(PAGE), |part| page_size(part.file())) else { continue };
        // A region begins with a page, in the guest as in the host.
        let first = region.start_addr().0;
        let start = range.start.max(first).checked_next_multiple_of(page);
        let end = range.end.min(first.saturating_add(region.len())) / page * page;
        let Some(start) = start.filter(|start| *start < end) else { continue };
        let given = match part {
            Some(part) => {
                let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                let offset = part.start() + (start - first);
                fallocate(part.file(), hole, offset, end - start).map_err(anyhow::Error::from)
            }
            None => advise(region, start - first..end - first, Advice::LinuxDontNeed),
        };
        if let Err(error) = given {
            static SAID: Once = Once::new();
            SAID.call_once(|| tracing::warn!("guest memory cannot be given back: {error:#}"));
        }
    }
}

/// The size of a page, where nothing else is said.
const PAGE: u64 = 4096;

/// The size of the pages that a memory file is made of.
fn page_size(file: &File) -> Option<u64> {
    let size = fstatfs(file).ok().and_then(|found| u64::try_from(found.f_bsize).ok());
    size.filter(|size| size.is_power_of_two())
}

#[cfg(test)]
mod test {
    use vm_memory::Bytes;

    use super::*;

    /// Bytes of a region that the host has memory for.
    fn resident(region: &GuestRegionMmap) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let start = format!("{:x}-", region.as_ptr().addr());
        let ours = maps.lines().skip_while(|line| !line.starts_with(&start));
        let kib = ours.skip(1).find_map(|line| line.strip_prefix("Rss:")).unwrap();
        kib.trim().trim_end_matches(" kB").parse::<u64>().unwrap() << 10
    }

    #[test]
    fn two_pieces_are_where_the_guest_looks() {
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[(0, 1 << 20), (1 << 32, 3 << 20)]).unwrap();
        ram.write_obj(7_u64, GuestAddress((1 << 32) + 8)).unwrap();
        assert_eq!(ram.read_obj::<u64>(GuestAddress(8)).unwrap(), 0);
        assert!(ram.write_obj(7_u64, GuestAddress(1 << 20)).is_err(), "a hole");
    }

    #[test]
    fn what_is_given_back_is_gone_from_the_host_and_reads_as_zeros() {
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[(0, 1 << 20), (1 << 32, 3 << 20)]).unwrap();
        let high = GuestAddress(1 << 32);
        ram.write_slice(&vec![7; 1 << 20], GuestAddress(0)).unwrap();
        ram.write_slice(&vec![7; 3 << 20], high).unwrap();
        let resident = || ram.iter().map(resident).sum::<u64>();
        assert_eq!(resident(), 4 << 20);
        // Parts of pages, a hole, and what no machine has.
        release(&ram, 0xff001..0xfffff);
        release(&ram, 2 << 20..3 << 20);
        release(&ram, u64::MAX - 4096..u64::MAX);
        #[expect(clippy::reversed_empty_ranges, reason = "somebody may compute one")]
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
        // The host's kernel may make a huge page of what is around it at any moment.
        assert!((0..20).any(|_| gives_back()), "{} bytes are there", resident());
    }

    #[test]
    fn refuses_more_than_the_host_has_and_pages_that_do_not_exist() {
        let memory = Memory { size: Size(1 << 50), ..Memory::default() };
        let error = map(&memory, &[(0, 1 << 50)]).unwrap_err().to_string();
        assert!(error.contains("more than this host has"), "{error}");
        let memory = Memory { hugepages: Some(Size(3 << 20)), ..Memory::default() };
        let error = map(&memory, &[(0, 6 << 20)]).unwrap_err().to_string();
        assert!(error.contains("take 2M or 1G"), "{error}");
    }
}
