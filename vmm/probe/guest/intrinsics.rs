//! Functions that the compiler calls by name. They use string instructions, so that the compiler
//! cannot turn them into calls of themselves.
use core::arch::asm;

#[unsafe(no_mangle)]
unsafe extern "C" fn memcpy(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    // SAFETY: the caller guarantees both ranges.
    unsafe {
        asm!("rep movsb", inout("rcx") length => _, inout("rdi") to => _, inout("rsi") from => _,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memmove(to: *mut u8, from: *const u8, length: usize) -> *mut u8 {
    if (to as usize).wrapping_sub(from as usize) >= length {
        // SAFETY: the caller guarantees both ranges; copying upwards never overwrites unread bytes.
        return unsafe { memcpy(to, from, length) };
    }
    let (last_to, last_from) = (to.wrapping_add(length), from.wrapping_add(length));
    // SAFETY: the caller guarantees both ranges; copying downwards never overwrites unread bytes.
    unsafe {
        asm!("std", "rep movsb", "cld", inout("rcx") length => _,
            inout("rdi") last_to.wrapping_sub(1) => _, inout("rsi") last_from.wrapping_sub(1) => _,
            options(nostack));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memset(to: *mut u8, value: i32, length: usize) -> *mut u8 {
    // SAFETY: the caller guarantees the range.
    unsafe {
        asm!("rep stosb", inout("rcx") length => _, inout("rdi") to => _, in("al") value as u8,
            options(nostack, preserves_flags));
    }
    to
}

#[unsafe(no_mangle)]
unsafe extern "C" fn memcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    let (a, b): (u32, u32);
    // SAFETY: the caller guarantees both ranges; with length 0 nothing is read.
    unsafe {
        asm!(
            "xor {a:e}, {a:e}", "xor {b:e}, {b:e}", "test rcx, rcx", "jz 2f", "repe cmpsb",
            "movzx {a:e}, byte ptr [rsi - 1]", "movzx {b:e}, byte ptr [rdi - 1]", "2:",
            a = out(reg) a, b = out(reg) b, inout("rcx") length => _,
            inout("rsi") left => _, inout("rdi") right => _, options(nostack, readonly),
        );
    }
    a as i32 - b as i32
}

#[unsafe(no_mangle)]
unsafe extern "C" fn bcmp(left: *const u8, right: *const u8, length: usize) -> i32 {
    // SAFETY: the same contract.
    unsafe { memcmp(left, right, length) }
}
