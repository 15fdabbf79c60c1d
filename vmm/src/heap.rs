//! The allocator, which shall not keep what was large.
//!
//! Left to itself, glibc learns from each large buffer that is freed to keep the next ones for
//! later: after a crowd of viewers has left, their pictures would stay.

/// Buffers from this size on are the kernel's again when they are freed: 256 KiB, as most that a
/// viewer costs has more.
const LARGE: libc::c_int = 256 << 10;

/// Gives large buffers back from now on.
#[expect(unsafe_code, reason = "the allocator is set by a function of C's")]
pub fn give_back() {
    // Other libraries do not learn.
    #[cfg(target_env = "gnu")]
    // SAFETY: this sets one number of the allocator, under its own lock.
    let _taken = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}
