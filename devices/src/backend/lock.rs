//! Locks on files that two machines must not have at once, and who holds them.

use std::fs::{self, File, TryLockError};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, bail};

/// Takes the file for this process alone, for as long as it is open.
///
/// # Errors
///
/// When another holds it: the text says who. When the file system has no locks.
pub fn exclusive(file: &File, path: &Path) -> anyhow::Result<()> {
    check(file.try_lock(), file, path)
}

/// Takes the file together with others that only read it.
///
/// # Errors
///
/// When another holds it for itself: the text says who. When the file system has no locks.
pub fn shared(file: &File, path: &Path) -> anyhow::Result<()> {
    check(file.try_lock_shared(), file, path)
}

fn check(answer: Result<(), TryLockError>, file: &File, path: &Path) -> anyhow::Result<()> {
    match answer {
        Ok(()) => Ok(()),
        Err(TryLockError::WouldBlock) => {
            bail!("{} is in use by {}", path.display(), holder(file))
        }
        Err(TryLockError::Error(error)) => {
            Err(error).with_context(|| format!("a lock on {}", path.display()))
        }
    }
}

fn holder(file: &File) -> String {
    let found = file.metadata().ok().and_then(|it| {
        let locks = fs::read_to_string("/proc/locks").ok()?;
        let pid = pid_in(&locks, it.ino())?;
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).ok()?;
        Some(format!("process {pid} ({})", name.trim_end()))
    });
    // It may be in another container, whose processes are not seen here.
    found.unwrap_or_else(|| "another process".to_owned())
}

/// `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`. The device numbers are left alone: those of
/// an overlay are not the ones that `stat` tells.
fn pid_in(locks: &str, inode: u64) -> Option<u32> {
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(1);
        // A line with an arrow is of one who waits.
        if words.next()? != "FLOCK" {
            return None;
        }
        let pid = words.nth(2)?.parse().ok().filter(|pid| *pid > 0)?;
        let (_, held) = words.next()?.rsplit_once(':')?;
        (held.parse() == Ok(inode)).then_some(pid)
    })
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn finds_who_holds_a_lock_and_not_who_waits_for_it() {
        let locks = "1: POSIX  ADVISORY  WRITE 7 00:1f:42 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 0 00:1f:42 0 EOF\n\
                     3: -> FLOCK  ADVISORY  WRITE 8 00:1f:42 0 EOF\n\
                     4: FLOCK  ADVISORY  READ 9 00:1f:42 0 EOF\n\
                     5: FLOCK";
        assert_eq!(pid_in(locks, 42), Some(9));
        assert_eq!(pid_in(locks, 43), None);
    }

    #[test]
    fn readers_share_and_a_writer_is_told_their_process() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let open = || File::open(file.path()).unwrap();
        let (one, two) = (open(), open());
        shared(&one, file.path()).unwrap();
        shared(&two, file.path()).unwrap();
        let error = exclusive(&open(), file.path()).unwrap_err().to_string();
        assert!(error.contains(&format!("in use by process {} (", std::process::id())), "{error}");
        drop((one, two));
        exclusive(&open(), file.path()).unwrap();
    }
}
