//! Guest RAM: a memfd, split as Q35 splits it, in pages as large as the host gives.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, ftruncate, memfd_create};
use rustix::system::sysinfo;
use vm_memory::mmap::MmapRegionBuilder;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap};

use crate::config::Memory;
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
            want_huge_pages(&region);
        }
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
    ftruncate(&fd, size.0).with_context(|| format!("--memory {size}"))?;
    if memory.prealloc || memory.hugepages.is_some() {
        // Huge pages are taken now or never: a guest that finds none left is killed.
        fallocate(fd.as_fd(), FallocateFlags::empty(), 0, size.0).with_context(|| {
            let pages = memory.hugepages.map_or(String::new(), |page| {
                format!(" (huge pages of {page} are set aside in /proc/sys/vm/nr_hugepages)")
            });
            format!("--memory {size} cannot be set aside{pages}")
        })?;
    }
    Ok(File::from(fd))
}

/// Asks for transparent huge pages: a hint, and refused where they are switched off.
#[expect(unsafe_code, reason = "advice takes a raw range")]
fn want_huge_pages(region: &vm_memory::MmapRegion) {
    // SAFETY: the range is that mapping, and this advice changes no contents.
    let advised = unsafe {
        rustix::mm::madvise(
            region.as_ptr().cast(),
            region.size(),
            rustix::mm::Advice::LinuxHugepage,
        )
    };
    if let Err(error) = advised {
        tracing::debug!("no transparent huge pages: {error}");
    }
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
    fn refuses_more_than_the_host_has_and_pages_that_do_not_exist() {
        let memory = Memory { size: Size(1 << 50), ..Memory::default() };
        let error = map(&memory, &[(0, 1 << 50)]).unwrap_err().to_string();
        assert!(error.contains("more than this host has"), "{error}");
        let memory = Memory { hugepages: Some(Size(3 << 20)), ..Memory::default() };
        let error = map(&memory, &[(0, 6 << 20)]).unwrap_err().to_string();
        assert!(error.contains("take 2M or 1G"), "{error}");
    }
}
