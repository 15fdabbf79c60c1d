//! Locks on files that two machines must not use at the same time.
//!
//! These are open file description locks over the whole file. They work over NFS, between
//! containers of one node, and against QEMU, which takes locks of the same kind. The kernel
//! releases them when the file is closed, however the process ends. On a block device such a lock
//! covers only the device node that was opened; [`open_exclusive`] takes the device itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// How long a visible holder may take to release its lock. It may be a process that was just
/// killed, or a child that has not called `exec` yet and until then has all of its parent's files.
const GRACE: Duration = Duration::from_millis(300);
/// How long a lock may last whose holder is not found: the kernel closes the files of an io_uring
/// some time after its process has ended, and later if it is busy.
const UNSEEN_GRACE: Duration = Duration::from_secs(3);
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Takes an exclusive lock, which lasts until `file` is closed. `file` must be open for writing. If
/// another process holds a lock, the error names it.
pub fn exclusive(file: &File, path: &Path) -> anyhow::Result<()> {
    take(file, path, libc::F_WRLCK)
}

/// Takes a shared lock, for a process that only reads. If another process holds an exclusive lock,
/// the error names it.
pub fn shared(file: &File, path: &Path) -> anyhow::Result<()> {
    take(file, path, libc::F_RDLCK)
}

/// Gives an exclusive lock up, for a machine that continues elsewhere.
pub fn release(file: &File) -> io::Result<()> {
    set(file, libc::F_UNLCK).map_err(io::Error::from)
}

/// Takes an exclusive lock again. Returns false if another machine holds one.
pub fn take_again(file: &File) -> io::Result<bool> {
    match set(file, libc::F_WRLCK) {
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        taken => taken.map(|()| true).map_err(io::Error::from),
    }
}

/// Whether another machine has locked this file, which is not a device.
pub fn is_taken(path: &Path) -> io::Result<bool> {
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    Ok(!take_again(&file)?)
}

/// Opens a block device for writing and with `O_EXCL`. This excludes other claims under any device
/// node, also in other containers, and claims of the host itself (a mount). It does not exclude
/// processes that open the device without `O_EXCL`. If the device is in use, the error names the
/// user.
pub fn open_exclusive(device: &Path) -> io::Result<File> {
    let deadline = Instant::now() + GRACE;
    loop {
        let mut options = OpenOptions::new();
        match options.read(true).write(true).custom_flags(libc::O_EXCL).open(device) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                if Instant::now() >= deadline {
                    let unseen = "the host (mounted, or part of a RAID or LVM volume) or another \
                                  container";
                    let user = user(device).unwrap_or_else(|| unseen.to_owned());
                    let text = format!("{} is in use by {user}", device.display());
                    return Err(io::Error::new(error.kind(), text));
                }
                std::thread::sleep(RETRY_INTERVAL);
            }
            other => return other,
        }
    }
}

/// A process that has the block device open for writing.
fn user(device: &Path) -> Option<String> {
    let wanted = fs::metadata(device).ok()?.rdev();
    process(|pid| {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        files.flatten().any(|entry| {
            let found = fs::metadata(entry.path());
            let same =
                found.is_ok_and(|it| it.file_type().is_block_device() && it.rdev() == wanted);
            // The mode of the link in /proc is the access mode of the open file.
            same && fs::symlink_metadata(entry.path()).is_ok_and(|it| it.mode() & 0o200 != 0)
        })
    })
}

fn set(file: &File, kind: i32) -> Result<(), Errno> {
    // The kinds are small numbers. Length 0 means: to the end, also when the file grows.
    let [l_type, l_whence] = [kind, libc::SEEK_SET].map(|it| i16::try_from(it).unwrap_or(i16::MAX));
    let whole = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    fcntl(file, FcntlArg::F_OFD_SETLK(&whole)).map(drop)
}

fn take(file: &File, path: &Path, kind: i32) -> anyhow::Result<()> {
    let start = Instant::now();
    loop {
        match set(file, kind) {
            Ok(()) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(error) => {
                return Err(io::Error::from(error))
                    .with_context(|| format!("lock on {}", path.display()));
            }
        }
        let waited = start.elapsed();
        if waited >= GRACE {
            if let Some(holder) = holder(file) {
                bail!("{} is in use by {holder}", path.display());
            }
            // The holder may be in another container or on another host, whose processes are not
            // visible in /proc.
            ensure!(waited < UNSEEN_GRACE, "{} is in use by another process", path.display());
        }
        std::thread::sleep(RETRY_INTERVAL.max(waited / 10));
    }
}

/// Finds the process that holds a lock on the file. `F_OFD_GETLK` does not report the process, but
/// `/proc/PID/fdinfo` lists the locks of each open file.
fn holder(file: &File) -> Option<String> {
    let inode = file.metadata().ok()?.ino();
    process(|pid| holds(pid, inode))
}

/// The first process that matches, as `process PID (NAME)`.
fn process(matches: impl Fn(u32) -> bool) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?;
    let mut pids =
        processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(|pid| matches(*pid))?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("process {pid} ({})", name.trim_end()))
}

fn holds(pid: u32, inode: u64) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    files.flatten().any(|entry| {
        fs::read_to_string(entry.path()).is_ok_and(|info| info.lines().any(|it| locks(it, inode)))
    })
}

/// Whether a line of `fdinfo` is an open file description lock on this inode:
/// `lock:  1: OFDLCK  ADVISORY  WRITE -1 08:01:5678 0 EOF`. The device numbers are not compared:
/// on overlayfs they differ from those that `stat` reports.
fn locks(line: &str, inode: u64) -> bool {
    let mut words = line.split_whitespace();
    let kind = words.next() == Some("lock:") && words.nth(1) == Some("OFDLCK");
    let held = words.nth(3).and_then(|word| word.rsplit_once(':'));
    kind && held.is_some_and(|(_, held)| held.parse() == Ok(inode))
}

#[cfg(test)]
mod test {
    use std::fs::OpenOptions;

    use super::*;

    #[test]
    fn finds_a_lock_in_kernel_fdinfo() {
        assert!(locks("lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:1f:42 0 EOF", 42));
        assert!(!locks("lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:1f:43 0 EOF", 42));
        assert!(!locks("lock:\t1: FLOCK  ADVISORY  WRITE 7 00:1f:42 0 EOF", 42));
        assert!(!locks("pos:\t0", 42));
        assert!(!locks("lock:\t1: OFDLCK", 42));
    }

    #[test]
    fn readers_share_a_lock_and_a_writer_gets_their_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(file.path()).unwrap();
        let (one, two) = (open(), open());
        shared(&one, file.path()).unwrap();
        shared(&two, file.path()).unwrap();
        let error = exclusive(&open(), file.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
        drop((one, two));
        let (one, two) = (open(), open());
        exclusive(&one, file.path()).unwrap();
        assert!(!take_again(&two).unwrap());
        release(&one).unwrap();
        assert!(take_again(&two).unwrap() && !take_again(&one).unwrap());
    }
}
