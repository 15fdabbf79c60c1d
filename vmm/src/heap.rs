//! Configures the allocator to return large buffers to the kernel when they are freed.
//!
//! By default, glibc raises its threshold with each large buffer that is freed, and keeps the next
//! ones: after many viewers have disconnected, their pictures would stay in memory.

/// Buffers of at least this size, in bytes, are returned when they are freed. Most buffers of a
/// viewer are larger.
const LARGE: libc::c_int = 256 << 10;

#[expect(unsafe_code, reason = "the allocator is set by a function of C's")]
pub fn return_large_buffers() {
    // The allocators of other C libraries have no such threshold.
    #[cfg(target_env = "gnu")]
    // SAFETY: this sets one number of the allocator, under its own lock.
    let _taken = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, LARGE) };
}
