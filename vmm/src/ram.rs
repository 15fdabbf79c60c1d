//! Guest RAM: a memfd, split as Q35 splits it, in pages as large as the host gives.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Once};

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, fstatfs, ftruncate, memfd_create};
use rustix::system::sysinfo;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{
    FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion,
    GuestRegionMmap,
};

use crate::config::Memory;
use crate::signals;
use crate::size::Size;

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
    let file = Arc::new(create(memory, size)?);
    let mut start = 0;
    let mut regions = Vec::new();
    for (guest, length) in ranges {
        let part = FileOffset::from_arc(file.clone(), start);
        let length_here = usize::try_from(*length)?;
        let region = MmapRegionBuilder::new(length_here)
            .with_file_offset(part)
            .with_mmap_prot(libc::PROT_READ | libc::PROT_WRITE)
            .with_mmap_flags(libc::MAP_SHARED | libc::MAP_NORESERVE)
            .with_hugetlbfs(memory.hugepages.is_some())
            .build()
            .with_context(|| format!("--memory {size}"))?;
        if memory.hugepages.is_none() {
            advise(&region, rustix::mm::Advice::LinuxHugepage);
        }
        // What the guest keeps in memory is not for a core dump of ours.
        advise(&region, rustix::mm::Advice::LinuxDontDump);
        let region = GuestRegionMmap::new(region, GuestAddress(*guest));
        regions.push(region.with_context(|| format!("--memory {size} at {guest:#x}"))?);
        start += length;
    }
    Ok(Arc::new(GuestMemoryMmap::from_regions(regions).context("the layout of memory")?))
}

fn create(memory: &Memory, size: Size) -> anyhow::Result<File> {
    let mut flags = MemfdFlags::CLOEXEC;
    if let Some(page) = memory.hugepages {
        flags |= MemfdFlags::HUGETLB;
        flags |= match page.0 >> 20 {
            2 => MemfdFlags::HUGE_2MB,
            1024 => MemfdFlags::HUGE_1GB,
            _ => bail!("--memory {size},hugepages={page}: such pages do not exist: take 2M or 1G"),
        };
        if !size.0.is_multiple_of(page.0) {
            bail!("--memory {size},hugepages={page}: not a multiple");
        }
    }
    let fd = memfd_create("guest-ram", flags).with_context(|| format!("--memory {size}"))?;
    ftruncate(&fd, size.0).map_err(|error| {
        let text = format!("--memory {size}");
        let limit = "memory is a file to the host, and may not be longer than `ulimit -f` says";
        let limited = error == rustix::io::Errno::FBIG;
        anyhow::Error::new(error).context(if limited { format!("{text}: {limit}") } else { text })
    })?;
    if memory.prealloc || memory.hugepages.is_some() {
        // Huge pages are taken now or never: a guest that finds none left is killed.
        set_aside(fd.as_fd(), memory, size)?;
    }
    Ok(File::from(fd))
}

/// So much at once: a moment's work, and whole pages of any size.
const AT_ONCE: u64 = 1 << 30;
const SMALL_AT_ONCE: u64 = 128 << 20;

/// Takes all of it now, which may take long.
fn set_aside(fd: BorrowedFd<'_>, memory: &Memory, size: Size) -> anyhow::Result<()> {
    let step = if memory.hugepages.is_some() { AT_ONCE } else { SMALL_AT_ONCE };
    for start in (0..size.0).step_by(usize::try_from(step)?) {
        if signals::arrived().is_some() {
            bail!("{} of --memory {size} were set aside", Size(start));
        }
        let length = step.min(size.0 - start);
        fallocate(fd, FallocateFlags::empty(), start, length).with_context(|| {
            let pages = memory.hugepages.map_or(String::new(), |page| {
                format!(" (huge pages of {page} are set aside in /proc/sys/vm/nr_hugepages)")
            });
            format!("--memory {size} cannot be set aside{pages}")
        })?;
    }
    Ok(())
}

/// Tells the host how the mapping is used: hints, refused where they are switched off.
#[expect(unsafe_code, reason = "advice takes a raw range")]
fn advise(region: &vm_memory::MmapRegion, advice: rustix::mm::Advice) {
    // SAFETY: the range is that mapping, and advice of this kind changes no contents.
    let advised = unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) };
    if let Err(error) = advised {
        tracing::debug!("guest memory: {advice:?}: {error}");
    }
}

/// Gives guest RAM back to the host, as far as the range is whole pages of the file. It stays
/// mapped, for us and for the guest: who touches it gets new pages, which are zeros.
///
/// With pages of hugetlbfs the host has to keep as many as its machines may want: one that comes
/// back when none is left cannot be had, which ends the machine.
pub fn release(ram: &GuestMemoryMmap, range: Range<u64>) {
    for region in ram.iter() {
        let Some(part) = region.file_offset() else { continue };
        let Some(page) = page_size(part.file()) else { continue };
        // A region begins with a page, in the guest as in the file.
        let first = region.start_addr().0;
        let start = range.start.max(first).checked_next_multiple_of(page);
        let end = range.end.min(first.saturating_add(region.len())) / page * page;
        let Some(start) = start.filter(|start| *start < end) else { continue };
        let hole = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let offset = part.start() + (start - first);
        if let Err(error) = fallocate(part.file(), hole, offset, end - start) {
            static SAID: Once = Once::new();
            SAID.call_once(|| tracing::warn!("guest memory cannot be given back: {error}"));
        }
    }
}

/// The size of the pages that a memory file is made of.
fn page_size(file: &File) -> Option<u64> {
    let size = fstatfs(file).ok().and_then(|found| u64::try_from(found.f_bsize).ok());
    size.filter(|size| size.is_power_of_two())
}

#[cfg(test)]
mod test {
    use vm_memory::Bytes;

    use super::*;

    #[test]
    fn two_pieces_of_one_file_are_where_the_guest_looks() {
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[(0, 1 << 20), (1 << 32, 3 << 20)]).unwrap();
        ram.write_obj(7_u64, GuestAddress((1 << 32) + 8)).unwrap();
        assert_eq!(ram.read_obj::<u64>(GuestAddress(8)).unwrap(), 0);
        assert!(ram.write_obj(7_u64, GuestAddress(1 << 20)).is_err(), "a hole");
    }

    #[test]
    fn what_is_given_back_is_gone_from_the_host_and_reads_as_zeros() {
        use std::os::unix::fs::MetadataExt;
        let memory = Memory { size: Size(4 << 20), ..Memory::default() };
        let ram = map(&memory, &[(0, 1 << 20), (1 << 32, 3 << 20)]).unwrap();
        let high = GuestAddress(1 << 32);
        ram.write_slice(&vec![7; 1 << 20], GuestAddress(0)).unwrap();
        ram.write_slice(&vec![7; 3 << 20], high).unwrap();
        let file = ram.iter().next().unwrap().file_offset().unwrap().clone();
        let resident = || file.file().metadata().unwrap().blocks() * 512;
        assert_eq!(resident(), 4 << 20);
        // Parts of pages, a hole, and what no machine has.
        release(&ram, 0xff001..0xfffff);
        release(&ram, 2 << 20..3 << 20);
        release(&ram, u64::MAX - 4096..u64::MAX);
        #[expect(clippy::reversed_empty_ranges, reason = "somebody may compute one")]
        release(&ram, 0x5000..0x3000);
        assert_eq!(resident(), 4 << 20);
        // The last page below the hole, and two pages above it.
        release(&ram, 0xff000..(1 << 32) + 0x2000);
        assert_eq!(resident(), (4 << 20) - 0x3000);
        let byte = |at: u64| ram.read_obj::<u8>(GuestAddress(at)).unwrap();
        assert_eq!([byte(0xfefff), byte(0xff000), byte(0xfffff)], [7, 0, 0]);
        assert_eq!([byte(high.0), byte(high.0 + 0x1fff), byte(high.0 + 0x2000)], [0, 0, 7]);
        ram.write_obj(9_u8, high).unwrap();
        assert_eq!((byte(high.0), resident()), (9, 4 << 20), "what was touched is there again");
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
