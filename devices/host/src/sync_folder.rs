//! Durable names.

use std::fs::File;
use std::io;
use std::path::Path;

use nix::errno::Errno;

/// Makes new, changed and removed names in a folder durable. Some file systems cannot, and have no
/// need, and a folder may be one that is only written.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    let synced = File::open(folder).and_then(|folder| folder.sync_all());
    let error = synced.as_ref().err().and_then(io::Error::raw_os_error).map(Errno::from_raw);
    match error {
        Some(
            Errno::EINVAL
            | Errno::EOPNOTSUPP
            | Errno::ENOSYS
            | Errno::EBADF
            | Errno::EACCES
            | Errno::EPERM
            | Errno::EROFS,
        ) => Ok(()),
        _ => synced,
    }
}
