//! Locks on files that two machines must not have at once, and who holds them.
//!
//! Open file description locks over the whole file: they work over NFS, between containers of one
//! node, and against QEMU, whose own are of this kind. They end when the file is closed, however
//! the process ends. The lock of a block device is one of its name: `claim` has the device itself.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};

/// How long a holder may take to let go: one that was just killed, or a child that has not yet
/// replaced itself by another program, which has all of its parent's files until then.
const GRACE: Duration = Duration::from_millis(300);
/// The same where no process is seen that holds it: the kernel lets go of what a ring had some time
/// after its process has ended, a busy one later.
const UNSEEN: Duration = Duration::from_secs(3);
const AGAIN: Duration = Duration::from_millis(10);

/// Takes the file, which is open for writing, for this process alone, for as long as it is open.
///
/// # Errors
///
/// When another holds it: the text says who. When the file system has no locks.
pub fn exclusive(file: &File, path: &Path) -> anyhow::Result<()> {
    take(file, path, libc::F_WRLCK)
}

/// Takes the file together with others that only read it.
///
/// # Errors
///
/// When another holds it for itself: the text says who. When the file system has no locks.
pub fn shared(file: &File, path: &Path) -> anyhow::Result<()> {
    take(file, path, libc::F_RDLCK)
}

/// Opens a block device for writing, for this process alone: whatever its name is in another
/// container, and not while the host itself uses it. It may be opened again meanwhile, but not so.
///
/// # Errors
///
/// As the system says; when it is in use, with who uses it.
pub fn claim(device: &Path) -> io::Result<File> {
    let end = Instant::now() + GRACE;
    loop {
        let mut options = OpenOptions::new();
        match options.read(true).write(true).custom_flags(libc::O_EXCL).open(device) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                if Instant::now() >= end {
                    let unseen = "the host (mounted, or a part of something) or another container";
                    let user = user(device).unwrap_or_else(|| unseen.to_owned());
                    let text = format!("{} is in use by {user}", device.display());
                    return Err(io::Error::new(error.kind(), text));
                }
                std::thread::sleep(AGAIN);
            }
            other => return other,
        }
    }
}

/// A process that may write a block device.
fn user(device: &Path) -> Option<String> {
    let wanted = fs::metadata(device).ok()?.rdev();
    process(|pid| {
        let Ok(files) = fs::read_dir(format!("/proc/{pid}/fd")) else { return false };
        files.flatten().any(|entry| {
            let found = fs::metadata(entry.path());
            let same =
                found.is_ok_and(|it| it.file_type().is_block_device() && it.rdev() == wanted);
            // The link has the rights of the open file.
            same && fs::symlink_metadata(entry.path()).is_ok_and(|it| it.mode() & 0o200 != 0)
        })
    })
}

fn take(file: &File, path: &Path, kind: i32) -> anyhow::Result<()> {
    // From the start, and as far as a file can reach.
    let whole = libc::flock {
        l_type: i16::try_from(kind)?,
        l_whence: i16::try_from(libc::SEEK_SET)?,
        l_start: 0,
        l_len: 0,
        l_pid: 0,
    };
    let start = Instant::now();
    loop {
        match fcntl(file, FcntlArg::F_OFD_SETLK(&whole)) {
            Ok(_) => return Ok(()),
            Err(Errno::EAGAIN | Errno::EACCES) => {}
            Err(error) => {
                return Err(error).with_context(|| format!("a lock on {}", path.display()));
            }
        }
        let waited = start.elapsed();
        if waited >= GRACE {
            if let Some(holder) = holder(file) {
                bail!("{} is in use by {holder}", path.display());
            }
            // It may be in another container or on another machine, whose processes are not seen.
            ensure!(waited < UNSEEN, "{} is in use by another process", path.display());
        }
        std::thread::sleep(AGAIN.max(waited / 10));
    }
}

/// The kernel does not tell whose such a lock is, but each process' files tell which they hold.
fn holder(file: &File) -> Option<String> {
    let inode = file.metadata().ok()?.ino();
    process(|pid| holds(pid, inode))
}

/// The first process of which this is true, with its name.
fn process(is: impl Fn(u32) -> bool) -> Option<String> {
    let processes = fs::read_dir("/proc").ok()?;
    let mut pids =
        processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok());
    let pid = pids.find(|pid| is(*pid))?;
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
    Some(format!("process {pid} ({})", name.trim_end()))
}

fn holds(pid: u32, inode: u64) -> bool {
    let Ok(files) = fs::read_dir(format!("/proc/{pid}/fdinfo")) else { return false };
    files.flatten().any(|entry| {
        fs::read_to_string(entry.path()).is_ok_and(|info| info.lines().any(|it| locks(it, inode)))
    })
}

/// `lock:  1: OFDLCK  ADVISORY  WRITE -1 08:01:5678 0 EOF`. The device numbers are left alone:
/// those of an overlay are not the ones that `stat` tells.
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
    fn finds_a_lock_in_what_the_kernel_tells_of_a_file() {
        assert!(locks("lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:1f:42 0 EOF", 42));
        assert!(!locks("lock:\t1: OFDLCK  ADVISORY  WRITE -1 00:1f:43 0 EOF", 42));
        assert!(!locks("lock:\t1: FLOCK  ADVISORY  WRITE 7 00:1f:42 0 EOF", 42));
        assert!(!locks("pos:\t0", 42));
        assert!(!locks("lock:\t1: OFDLCK", 42));
    }

    #[test]
    fn readers_share_and_a_writer_is_told_their_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || OpenOptions::new().read(true).write(true).open(file.path()).unwrap();
        let (one, two) = (open(), open());
        shared(&one, file.path()).unwrap();
        shared(&two, file.path()).unwrap();
        let error = exclusive(&open(), file.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
        drop((one, two));
        exclusive(&open(), file.path()).unwrap();
    }
}
