//! Copies files whole, sparse, and with the time of their change: as a clone that shares the blocks
//! of the file (Btrfs, XFS with reflinks), or byte by byte.

use std::fs::{File, FileTimes, Metadata};
use std::io::{self, ErrorKind, IsTerminal as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::bail;
use rustix::fs::{IFlags, SeekFrom, ioctl_ficlone, ioctl_getflags, ioctl_setflags, seek};
use rustix::io::Errno;

use crate::settings::host::free_space;
use crate::settings::value::in_mib;

/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;
/// Bytes that stay free on the volume.
const RESERVE: u64 = 64 << 20;
const SHOW_INTERVAL: Duration = Duration::from_millis(200);

/// Makes an empty file a clone of another one. Fails at once if the file system cannot.
pub fn clone(from: &File, to: &File) -> io::Result<()> {
    // Btrfs clones between files with and without checksums never. A new file may still change.
    if let (Ok(wanted), Ok(flags)) = (ioctl_getflags(from), ioctl_getflags(to))
        && wanted.contains(IFlags::NOCOW) != flags.contains(IFlags::NOCOW)
    {
        ioctl_setflags(to, flags ^ IFlags::NOCOW).ok();
    }
    Ok(ioctl_ficlone(to, from)?)
}

/// Copies all data to an empty file. Holes and zeros become holes.
pub fn copy(from: &File, to: &File, progress: &mut Progress) -> io::Result<()> {
    let length = from.metadata()?.len();
    to.set_len(length)?;
    let mut chunk = vec![0; CHUNK];
    let mut at = 0;
    while at < length {
        let (start, end) = data(from, at, length)?;
        at = start;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(CHUNK).min(CHUNK);
            from.read_exact_at(&mut chunk[..count], at)?;
            if chunk[..count].iter().any(|byte| *byte != 0) {
                to.write_all_at(&chunk[..count], at)?;
            }
            at += count as u64;
            progress.add(count as u64);
        }
    }
    Ok(())
}

/// Start and end of the next data, at this offset or behind it.
fn data(file: &File, at: u64, length: u64) -> io::Result<(u64, u64)> {
    let start = match seek(file, SeekFrom::Data(at)) {
        Ok(start) => start,
        Err(Errno::NXIO) => return Ok((length, length)),
        // This file system knows no holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP) => return Ok((at, length)),
        Err(error) => return Err(error.into()),
    };
    let end = seek(file, SeekFrom::Hole(start))?;
    Ok((start.min(length), end.min(length)))
}

/// Gives a file this time of its last change.
pub fn set_time(file: &File, (seconds, nanoseconds): (i64, u32)) -> io::Result<()> {
    let since = Duration::new(seconds.unsigned_abs(), nanoseconds);
    let time = match seconds {
        0.. => UNIX_EPOCH.checked_add(since),
        // Before 1970, they are counted up from the second before.
        _ => UNIX_EPOCH
            .checked_sub(Duration::from_secs(seconds.unsigned_abs()))
            .and_then(|time| time.checked_add(Duration::from_nanos(nanoseconds.into()))),
    };
    let time: SystemTime = time.ok_or(ErrorKind::InvalidData)?;
    file.set_times(FileTimes::new().set_modified(time))
}

pub fn changed(found: &Metadata) -> (i64, u32) {
    (found.mtime(), u32::try_from(found.mtime_nsec()).unwrap_or_default())
}

/// Fails if the volume has no room for this number of bytes.
pub fn check_room(folder: &Path, needs: u64) -> anyhow::Result<()> {
    let needs = needs.saturating_add(RESERVE);
    if let Some(free) = free_space(folder).filter(|free| *free < needs) {
        let [needs, free] = [needs, free].map(in_mib);
        bail!(
            "{}: it needs {needs}, but {free} are free: enlarge the volume, or delete a snapshot",
            folder.display()
        );
    }
    Ok(())
}

/// Shows on a terminal how much is copied.
pub struct Progress {
    total: u64,
    done: u64,
    shown: Option<Instant>,
    terminal: bool,
}

impl Progress {
    pub fn new(total: u64) -> Self {
        Self { total, done: 0, shown: None, terminal: io::stderr().is_terminal() }
    }

    fn add(&mut self, bytes: u64) {
        self.done += bytes;
        let due = self.shown.is_none_or(|shown| shown.elapsed() >= SHOW_INTERVAL);
        if self.terminal && due && self.total > 0 {
            self.shown = Some(Instant::now());
            let percent = self.done.saturating_mul(100) / self.total.max(1);
            let total = in_mib(self.total);
            write!(io::stderr(), "\r{:3} % of {total}", percent.min(100)).ok();
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.shown.is_some() {
            write!(io::stderr(), "\r{:30}\r", "").ok();
        }
    }
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;

    #[test]
    fn a_copy_has_the_bytes_holes_and_time_of_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        let from = File::create_new(path("from")).unwrap();
        from.set_len(64 << 20).unwrap();
        from.write_all_at(b"first", 3).unwrap();
        from.write_all_at(&[7; 5000], 20 << 20).unwrap();
        from.write_all_at(&vec![0; 4 << 20], 30 << 20).unwrap();
        from.write_all_at(b"last", (64 << 20) - 4).unwrap();
        let from = File::open(path("from")).unwrap();
        let to = File::create_new(path("to")).unwrap();
        copy(&from, &to, &mut Progress::new(1)).unwrap();
        set_time(&to, (1_700_000_000, 123_456_789)).unwrap();
        assert!(fs::read(path("from")).unwrap() == fs::read(path("to")).unwrap());
        let found = to.metadata().unwrap();
        assert_eq!(changed(&found), (1_700_000_000, 123_456_789));
        assert!(found.blocks() * 512 < 4 << 20, "{} blocks", found.blocks());
    }
}
