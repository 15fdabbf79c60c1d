//! Port and memory-mapped accesses, all of them from ring 3.
use core::arch::asm;

macro_rules! ports {
    ($($read:ident $write:ident $type:ty, $register:tt;)*) => {$(
        #[doc = concat!("Reads a ", stringify!($type), " from a port.")]
        pub(crate) fn $read(port: u16) -> $type {
            let value;
            // SAFETY: the I/O bitmap allows all ports; no memory of ours is behind one.
            unsafe {
                asm!(concat!("in ", $register, ", dx"), in("dx") port, out($register) value,
                    options(nomem, nostack, preserves_flags));
            }
            value
        }

        #[doc = concat!("Writes a ", stringify!($type), " to a port.")]
        pub(crate) fn $write(port: u16, value: $type) {
            // SAFETY: as for reading. A device told to write memory is told where by its driver.
            unsafe {
                asm!(concat!("out dx, ", $register), in("dx") port, in($register) value,
                    options(nostack, preserves_flags));
            }
        }
    )*};
}

ports! {
    in8 out8 u8, "al";
    in16 out16 u16, "ax";
    in32 out32 u32, "eax";
}

/// Reads `width` bytes (1, 2, 4 or 8) of device memory, or of RAM that another party also writes.
pub(crate) fn read_memory(address: u64, width: usize) -> u64 {
    let value: u64;
    // SAFETY: the caller names device memory or RAM in the identity map; reading changes neither.
    unsafe {
        match width {
            1 => asm!("movzx {v:e}, byte ptr [{a}]", a = in(reg) address, v = out(reg) value),
            2 => asm!("movzx {v:e}, word ptr [{a}]", a = in(reg) address, v = out(reg) value),
            4 => asm!("mov {v:e}, [{a}]", a = in(reg) address, v = out(reg) value),
            _ => asm!("mov {v}, [{a}]", a = in(reg) address, v = out(reg) value),
        }
    }
    value
}

/// Writes `width` bytes (1, 2, 4 or 8) of device memory, or of RAM that is not ours.
pub(crate) fn write_memory(address: u64, width: usize, value: u64) {
    // SAFETY: the caller names device memory, or RAM outside of this image, in the identity map.
    unsafe {
        match width {
            1 => asm!("mov byte ptr [{a}], {v}", a = in(reg) address, v = in(reg_byte) value as u8),
            2 => asm!("mov word ptr [{a}], {v:x}", a = in(reg) address, v = in(reg) value),
            4 => asm!("mov dword ptr [{a}], {v:e}", a = in(reg) address, v = in(reg) value),
            _ => asm!("mov qword ptr [{a}], {v}", a = in(reg) address, v = in(reg) value),
        }
    }
}

/// Reads 4 bytes of device memory.
pub(crate) fn read32(address: u64) -> u32 {
    read_memory(address, 4) as u32
}

/// Writes 4 bytes of device memory.
pub(crate) fn write32(address: u64, value: u32) {
    write_memory(address, 4, value.into());
}

/// The time stamp counter, after all that comes before it.
pub(crate) fn tsc() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reads a counter; CR4.TSD is clear.
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nomem, nostack)) };
    high << 32 | low
}
