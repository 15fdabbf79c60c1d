//! Port and memory-mapped I/O, all from ring 3.
use core::arch::asm;

macro_rules! ports {
    ($($read:ident $write:ident $type:ty, $register:tt;)*) => {$(
        #[doc = concat!("Reads a ", stringify!($type), " from a port.")]
        pub(crate) fn $read(port: u16) -> $type {
            let value;
            // SAFETY: the I/O bitmap allows all ports, and reading one changes no memory.
            unsafe {
                asm!(concat!("in ", $register, ", dx"), in("dx") port, out($register) value,
                    options(nomem, nostack, preserves_flags));
            }
            value
        }

        #[doc = concat!("Writes a ", stringify!($type), " to a port.")]
        pub(crate) fn $write(port: u16, value: $type) {
            // SAFETY: as for reading. A driver that starts DMA chooses memory that is free for it.
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

macro_rules! memory {
    ($($read:ident $write:ident $type:ty, $load:tt, $store:tt, $class:ident;)*) => {$(
        #[doc = concat!("Reads a ", stringify!($type), " of device memory, aligned or not.")]
        pub(crate) fn $read(address: u64) -> $type {
            let value;
            // SAFETY: the caller passes mapped device memory or RAM; reading changes neither.
            unsafe { asm!($load, a = in(reg) address, v = out($class) value, options(nostack)) };
            value
        }

        #[doc = concat!("Writes a ", stringify!($type), " of device memory, aligned or not.")]
        pub(crate) fn $write(address: u64, value: $type) {
            // SAFETY: the caller passes device memory, or RAM that holds no variable.
            unsafe { asm!($store, a = in(reg) address, v = in($class) value, options(nostack)) };
        }
    )*};
}

memory! {
    read8 write8 u8, "mov {v}, [{a}]", "mov [{a}], {v}", reg_byte;
    read16 write16 u16, "mov {v:x}, [{a}]", "mov [{a}], {v:x}", reg;
    read32 write32 u32, "mov {v:e}, [{a}]", "mov [{a}], {v:e}", reg;
    read64 write64 u64, "mov {v}, [{a}]", "mov [{a}], {v}", reg;
}

/// Reads `width` bytes: 1, 2, 4 or 8.
pub(crate) fn read_memory(address: u64, width: usize) -> u64 {
    match width {
        1 => read8(address).into(),
        2 => read16(address).into(),
        4 => read32(address).into(),
        _ => read64(address),
    }
}

/// Writes the low `width` bytes of `value`: 1, 2, 4 or 8.
pub(crate) fn write_memory(address: u64, width: usize, value: u64) {
    match width {
        1 => write8(address, value as u8),
        2 => write16(address, value as u16),
        4 => write32(address, value as u32),
        _ => write64(address, value),
    }
}

/// The time stamp counter, read after all earlier instructions.
pub(crate) fn tsc() -> u64 {
    let (low, high): (u64, u64);
    // SAFETY: reads a counter; CR4.TSD is clear.
    unsafe { asm!("lfence", "rdtsc", out("eax") low, out("edx") high, options(nomem, nostack)) };
    high << 32 | low
}
