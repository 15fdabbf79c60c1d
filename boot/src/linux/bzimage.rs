//! A compressed Linux kernel (Linux, `Documentation/arch/x86/boot.rst`).

use anyhow::{Context, Result, ensure};
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::{Entrance, KERNEL_MIN, Kernel, Source, check_range, read_up_to};
use crate::layout::Ram;

/// Offset of the 64-bit entry in the protected-mode part.
const ENTRY64: u64 = 0x200;
/// The first version whose header has a flag for the 64-bit entry.
const VERSION_MIN: u16 = 0x020C;
/// The kernel has a 64-bit entry.
const XLF_KERNEL_64: u16 = 1 << 0;
/// The unit of the real-mode part's length, in bytes.
const SECTOR: u64 = 512;
/// The unit of `syssize`, in bytes.
const PARAGRAPH: u64 = 16;

/// The start of the file. The header's fields begin at 0x1F1.
struct Header([u8; 0x26C]);

impl Header {
    fn number<const N: usize>(&self, at: usize) -> u64 {
        let mut bytes = [0; 8];
        bytes[..N].copy_from_slice(&self.0[at..at + N]);
        u64::from_le_bytes(bytes)
    }

    /// Length in bytes of the real-mode part, which we do not load.
    fn setup_length(&self) -> u64 {
        let sectors = self.number::<1>(0x1F1);
        // 0 means 4, and the boot sector is not included.
        (if sectors == 0 { 4 } else { sectors } + 1) * SECTOR
    }

    /// Start and end of the memory that the kernel uses while it unpacks itself.
    fn runtime(&self) -> Result<(u64, u64)> {
        let alignment = self.number::<4>(0x230).max(1);
        let (preferred, size) = (self.number::<8>(0x258), self.number::<4>(0x260));
        ensure!(alignment.is_power_of_two(), "a bzImage with alignment {alignment:#x}");
        let start = KERNEL_MIN.next_multiple_of(alignment).max(preferred);
        let end = start
            .checked_add(size)
            .with_context(|| format!("a bzImage that runs at {start:#x} with {size:#x} bytes"))?;
        Ok((start, end))
    }
}

/// Loads the kernel of `length` bytes at 1 MiB. The kernel then moves itself to its final address.
pub(super) fn load<F: Source>(
    memory: &impl GuestMemoryBackend,
    file: &mut F,
    length: u64,
    ram: Ram,
) -> Result<Kernel> {
    let mut header = Header([0; 0x26C]);
    read_up_to(file, &mut header.0).context("header of the bzImage")?;
    let version = u16::try_from(header.number::<2>(0x206))?;
    let flags = u16::try_from(header.number::<2>(0x236))?;
    ensure!(
        version >= VERSION_MIN && flags & XLF_KERNEL_64 != 0,
        "a bzImage without a 64-bit entry (boot protocol {}.{:02})",
        version >> 8,
        version & 0xFF
    );
    let setup = header.setup_length();
    ensure!(
        length > setup + ENTRY64,
        "a bzImage that ends after {length} bytes, but its real-mode part alone has {setup}"
    );
    // `syssize` is in paragraphs, and the last paragraph may be incomplete.
    let payload = header.number::<4>(0x1F4) * PARAGRAPH;
    ensure!(
        length + PARAGRAPH > setup + payload,
        "a bzImage that ends after {length} bytes, but its header announces {}",
        setup + payload
    );
    let (_, end) = header.runtime()?;
    let footprint = KERNEL_MIN..end.max(KERNEL_MIN + (length - setup));
    check_range("the kernel", &footprint, ram)?;

    let loaded =
        BzImage::load(memory, Some(GuestAddress(KERNEL_MIN)), file, None).context("the bzImage")?;
    let setup_header = loaded.setup_header.context("a bzImage without a header")?;
    Ok(Kernel {
        entry: Entrance::Linux64 { rip: KERNEL_MIN + ENTRY64, header: Box::new(setup_header) },
        footprint,
        command_line_max: header.number::<4>(0x238),
        initrd_last: header.number::<4>(0x22C),
    })
}
