//! Safe access to files on volumes where others write too: a link cannot redirect a write, a pipe
//! cannot block the pod, and a long file cannot fill its memory.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read as _};
use std::ops::Deref;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _, fchown};
use std::path::{Component, Path, PathBuf};

use anyhow::bail;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};
use rustix::io::Errno;
use tempfile::NamedTempFile;

const MAX_TEXT: u64 = 4096;

/// Opens a file or a block device, and follows links. Never blocks: pipes are refused.
pub fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open_as(path, options, OFlags::NONBLOCK)
}

/// Opens a file or a block device. Does not follow links, whose target may belong to others.
pub fn open_itself(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    open_as(path, options, OFlags::NONBLOCK | OFlags::NOFOLLOW)
}

fn open_as(path: &Path, options: &mut OpenOptions, flags: OFlags) -> io::Result<File> {
    let file = options.custom_flags(flags.bits().cast_signed()).open(path)?;
    check(&file.metadata()?)?;
    Ok(file)
}

/// Opens what has this path below a folder. Follows no link, and never blocks.
pub fn open_within(folder: &Path, path: &Path) -> anyhow::Result<File> {
    let (folder, name) = walk(folder, path)?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    match openat(&folder, name, flags, Mode::empty()) {
        Err(Errno::LOOP) => bail!("it is a symbolic link, which is not followed"),
        opened => Ok(opened?.into()),
    }
}

/// Opens the folder of a path below a folder. A link on the way fails with `ENOTDIR`.
fn walk<'a>(folder: &Path, path: &'a Path) -> io::Result<(OwnedFd, &'a OsStr)> {
    let wrong = |why| io::Error::new(ErrorKind::InvalidInput, why);
    let way = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let mut folder = openat(CWD, folder, way, Mode::empty())?;
    let mut parts = path.components().peekable();
    while let Some(part) = parts.next() {
        let Component::Normal(name) = part else {
            return Err(wrong("`..` is not allowed in the path"));
        };
        if parts.peek().is_none() {
            return Ok((folder, name));
        }
        folder = openat(&folder, name, way | OFlags::NOFOLLOW, Mode::empty())?;
    }
    Err(wrong("it is not a regular file"))
}

/// The path of an open file or folder, for this process and for those that inherit it.
pub fn path_of(file: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A path whose folder is open: it stays the same when others replace a folder by a link.
#[derive(Debug)]
pub struct Held {
    path: PathBuf,
    _folder: OwnedFd,
}

impl Held {
    /// Holds a path below a folder. Follows no link on the way; its last part may be anything.
    pub fn new(folder: &Path, path: &Path) -> io::Result<Self> {
        let (folder, name) = walk(folder, path)?;
        let path = path_of(&folder).join(name);
        Ok(Self { path, _folder: folder })
    }
}

impl Deref for Held {
    type Target = Path;

    fn deref(&self) -> &Path {
        &self.path
    }
}

impl AsRef<Path> for Held {
    fn as_ref(&self) -> &Path {
        &self.path
    }
}

/// Opens a folder. Does not follow a link.
pub fn open_folder(path: &Path) -> io::Result<File> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW;
    File::options().read(true).custom_flags(flags.bits().cast_signed()).open(path)
}

/// Checks that this is a file or a block device.
pub fn check(metadata: &Metadata) -> io::Result<()> {
    let kind = metadata.file_type();
    if kind.is_file() || kind.is_block_device() {
        return Ok(());
    }
    Err(io::Error::new(ErrorKind::InvalidInput, "it is not a file or a block device"))
}

/// A file that is longer than 4 KiB, or not text, is an error.
pub fn read(path: &Path) -> io::Result<String> {
    read_text(open(path, File::options().read(true))?)
}

/// Like [`read()`], but does not follow a link, which could lead to a file of the pod.
pub fn read_itself(path: &Path) -> io::Result<String> {
    read_text(open_itself(path, File::options().read(true))?)
}

fn read_text(file: File) -> io::Result<String> {
    let mut text = String::new();
    file.take(MAX_TEXT + 1).read_to_string(&mut text)?;
    if text.len() as u64 > MAX_TEXT {
        return Err(io::Error::new(ErrorKind::InvalidData, "it is too long"));
    }
    Ok(text)
}

/// Atomically writes a file that only its owner may read. Replaces what has this name; a link
/// itself, not its target.
pub fn write(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    beside(path, fill)?.persist(path)?;
    sync_folder(path)
}

/// Like [`write()`], and gives the file to the owner of its folder, if possible: a pod may run as
/// another user the next time.
pub fn write_for_owner(
    path: &Path,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let owner = fs::metadata(path.parent().ok_or(ErrorKind::InvalidInput)?)?;
    write(path, |file| {
        // Only root may give it away.
        fchown(&*file, Some(owner.uid()), Some(owner.gid())).ok();
        fill(file)
    })
}

/// Like [`write()`], but fails if the name is taken. After another error, it may be there.
pub fn make(path: &Path, fill: impl FnOnce(&mut File) -> io::Result<()>) -> io::Result<()> {
    match beside(path, fill)?.persist_noclobber(path) {
        // Some file systems cannot rename without replacing.
        Err(error) if error.error.kind() != ErrorKind::AlreadyExists && !path.exists() => {
            error.file.persist(path)?;
        }
        made => drop(made?),
    }
    sync_folder(path)
}

/// Makes a new, changed or removed name durable.
pub fn sync_folder(path: &Path) -> io::Result<()> {
    path.parent().map_or(Ok(()), host::sync_folder::sync_folder)
}

/// Locks a file that only pods lock. Returns false if another one has it.
pub fn try_lock(file: &File) -> io::Result<bool> {
    match flock(file, FlockOperation::NonBlockingLockExclusive) {
        Err(Errno::WOULDBLOCK) => Ok(false),
        locked => locked.map(|()| true).map_err(io::Error::from),
    }
}

/// `None` if there is no such file, or no folder for it.
pub fn if_there<T>(found: io::Result<T>) -> io::Result<Option<T>> {
    match found {
        Err(error) if [ErrorKind::NotFound, ErrorKind::NotADirectory].contains(&error.kind()) => {
            Ok(None)
        }
        found => found.map(Some),
    }
}

/// Writes and syncs a temporary file beside `path`, to be renamed.
fn beside(
    path: &Path,
    fill: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<NamedTempFile> {
    let folder = path.parent().ok_or(ErrorKind::InvalidInput)?;
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().ok_or(ErrorKind::InvalidInput)?);
    prefix.push(".new-");
    sweep(folder, &prefix);
    let mut made = loop {
        let made = tempfile::Builder::new().prefix(&prefix).tempfile_in(folder)?;
        // The lock keeps `sweep` of other processes away, unless one came before. Without locks,
        // `sweep` removes nothing.
        let taken = try_lock(made.as_file()).is_ok_and(|locked| !locked);
        let swept = taken || made.as_file().metadata()?.nlink() == 0;
        if !swept {
            break made;
        }
    };
    fill(made.as_file_mut())?;
    made.as_file().sync_all()?;
    Ok(made)
}

/// Removes temporary files of processes that were stopped while they wrote: such a file is
/// unlocked.
fn sweep(folder: &Path, prefix: &OsStr) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        if !entry.file_name().as_bytes().starts_with(prefix.as_bytes()) {
            continue;
        }
        let Ok(file) = open_itself(&entry.path(), File::options().write(true)) else { continue };
        if try_lock(&file).is_ok_and(|locked| locked) {
            // A file that cannot be removed does no harm.
            fs::remove_file(entry.path()).ok();
        }
    }
}

#[cfg(test)]
mod test {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn foreign_files_are_neither_written_to_nor_block() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let text = |file: &mut File| file.write_all(b"new");
        fs::write(place("theirs"), "old").unwrap();
        symlink(place("theirs"), place("link")).unwrap();
        mknodat(CWD, place("pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
        fs::write(place("long"), [b'x'; 5000]).unwrap();
        assert_eq!(read(&place("link")).unwrap(), "old");
        for name in ["pipe", "long", "none", "."] {
            assert!(read(&place(name)).is_err(), "{name}");
        }
        let mut both = File::options();
        let both = both.read(true).write(true);
        assert!(open(&place("pipe"), both).is_err());
        assert!(open(&place("link"), both).is_ok() && open_itself(&place("link"), both).is_err());
        // Either nothing is replaced, or the link itself.
        for name in ["link", "pipe", "theirs"] {
            assert_eq!(make(&place(name), text).unwrap_err().kind(), ErrorKind::AlreadyExists);
        }
        write(&place("link"), text).unwrap();
        make(&place("made"), text).unwrap();
        let metadata = fs::symlink_metadata(place("link")).unwrap();
        assert!(metadata.is_file() && metadata.mode() & 0o777 == 0o600, "{metadata:?}");
        assert_eq!(
            ["link", "made", "theirs"].map(|it| read(&place(it)).unwrap()),
            ["new", "new", "old"]
        );
        // A failed write leaves nothing behind.
        let all = || fs::read_dir(folder.path()).unwrap().count();
        let count = all();
        write(&place("made"), |_| Err(ErrorKind::StorageFull.into())).unwrap_err();
        assert_eq!((all(), read(&place("made")).unwrap().as_str()), (count, "new"));
    }

    #[test]
    fn a_held_path_stays_where_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        for name in ["ours", "theirs"] {
            fs::create_dir(place(name)).unwrap();
        }
        let hold = |path: &str| Held::new(folder.path(), Path::new(path));
        let held = hold("ours/file").unwrap();
        fs::rename(place("ours"), place("moved")).unwrap();
        symlink(place("theirs"), place("ours")).unwrap();
        write(&held, |file| file.write_all(b"new")).unwrap();
        assert_eq!(read(&place("moved/file")).unwrap(), "new");
        assert_eq!(fs::read_dir(place("theirs")).unwrap().count(), 0);
        assert_eq!(hold("ours/file").unwrap_err().kind(), ErrorKind::NotADirectory);
        assert!(open_folder(&place("ours")).is_err() && open_folder(&place("moved")).is_ok());
        for path in ["../file", "theirs/../../file", "", "/file"] {
            assert_eq!(hold(path).unwrap_err().kind(), ErrorKind::InvalidInput, "{path}");
        }
    }

    #[test]
    fn removes_stale_temporary_files_and_keeps_those_in_use() {
        let folder = tempfile::tempdir().unwrap();
        let place = |name: &str| folder.path().join(name);
        let text = |file: &mut File| file.write_all(b"new");
        let living = beside(&place("made"), text).unwrap();
        for name in [".made.new-000000", ".other.new-000000", "theirs"] {
            fs::write(place(name), "half").unwrap();
        }
        symlink(place("theirs"), place(".made.new-link")).unwrap();
        make(&place("made"), text).unwrap();
        let names = fs::read_dir(folder.path()).unwrap();
        let mut names: Vec<_> = names.map(|it| it.unwrap().file_name()).collect();
        names.sort();
        let mut left =
            [".made.new-link", ".other.new-000000", "made", "theirs"].map(OsString::from).to_vec();
        left.push(living.path().file_name().unwrap().to_owned());
        left.sort();
        assert_eq!(names, left);
        assert_eq!(read(&place("theirs")).unwrap(), "half");
    }
}
