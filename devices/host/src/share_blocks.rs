//! Files that share blocks, on file systems such as XFS and Btrfs (linux/fs.h).
#![expect(unsafe_code, reason = "an ioctl takes the address of a range")]

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::AsRawFd as _;

/// Gives `to`, from `at` on, the contents of a range of `from`, without copying them. Holes stay
/// holes. Fails if the file system cannot do that, or if `from` does not have the whole range.
pub fn share_blocks(from: &File, range: Range<u64>, to: &File, at: u64) -> io::Result<()> {
    // A length of zero would mean the rest of the file.
    if range.is_empty() {
        return Ok(());
    }
    let argument = libc::file_clone_range {
        src_fd: from.as_raw_fd().into(),
        src_offset: range.start,
        src_length: range.end - range.start,
        dest_offset: at,
    };
    // SAFETY: the kernel only reads the argument, which lives longer than the call.
    let answer = unsafe { libc::ioctl(to.as_raw_fd(), libc::FICLONERANGE, &raw const argument) };
    if answer == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
