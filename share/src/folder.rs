//! The shared folder of the host. Every open goes through [`open_in`], one name at a time.
//!
//! Threats: the client names anything, and other programs change the folder meanwhile. The kernel
//! refuses to leave a directory (`RESOLVE_BENEATH`) and to follow a symbolic link, so links are not
//! visible. Only regular files and directories are opened: a FIFO cannot block us, and no device
//! is touched.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    AtFlags, Dir, FileType, Mode, OFlags, RenameFlags, ResolveFlags, Stat, StatVfs, Statx,
    StatxFlags,
};
use rustix::io::Errno;

use crate::names;
use crate::status::{Answer, Status};

/// The maximum number of names that a search for another spelling reads.
const MAX_SEARCHED: usize = 100_000;

pub struct Folder {
    root: OwnedFd,
}

/// Where a name is, whether or not it exists.
pub struct Place {
    pub parent: OwnedFd,
    /// The host's names, from the folder. None for the folder itself.
    pub path: Vec<String>,
    /// The existing file.
    pub found: Option<Stat>,
}

impl Place {
    pub fn name(&self) -> &str {
        self.path.last().map_or(".", String::as_str)
    }
}

impl Folder {
    /// `root` is an open directory.
    pub fn new(root: OwnedFd) -> Self {
        Self { root }
    }

    /// Finds a path. Its directories must exist, in any case of letters.
    pub fn find(&self, names: &[String]) -> Answer<Place> {
        let mut parent = open_in(self.root.as_fd(), ".", OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
        let Some((last, directories)) = names.split_last() else {
            let found = Some(rustix::fs::fstat(&parent)?);
            return Ok(Place { parent, path: Vec::new(), found });
        };
        let mut path = Vec::with_capacity(names.len());
        for name in directories {
            let Some((name, stat)) = lookup(parent.as_fd(), name)? else {
                return Err(Status::OBJECT_PATH_NOT_FOUND);
            };
            if !is_directory(&stat) {
                return Err(Status::OBJECT_PATH_NOT_FOUND);
            }
            parent = open_in(parent.as_fd(), &name, OFlags::RDONLY | OFlags::DIRECTORY, 0)?;
            path.push(name);
        }
        let (name, found) = match lookup(parent.as_fd(), last)? {
            Some((name, stat)) => (name, Some(stat)),
            None => (last.clone(), None),
        };
        path.push(name);
        Ok(Place { parent, path, found })
    }

    pub fn volume(&self) -> Answer<StatVfs> {
        Ok(rustix::fs::fstatvfs(&self.root)?)
    }

    /// A number that stays the same for the folder.
    pub fn serial(&self) -> u32 {
        let stat = rustix::fs::fstat(&self.root).map_or(0, |it| it.st_dev ^ it.st_ino);
        u32::try_from(stat & 0xffff_ffff).unwrap_or(0)
    }
}

/// Opens a name in a directory.
pub fn open_in(
    directory: BorrowedFd<'_>,
    name: &str,
    flags: OFlags,
    mode: u32,
) -> Result<OwnedFd, Errno> {
    let always = OFlags::CLOEXEC | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY;
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    rustix::fs::openat2(directory, name, flags | always, Mode::from_raw_mode(mode), resolve)
}

/// Opens a file or directory that [`Folder::find`] found.
pub fn open(place: &Place, flags: OFlags) -> Answer<OwnedFd> {
    let flags = if place.found.as_ref().is_some_and(is_directory) {
        OFlags::RDONLY | OFlags::DIRECTORY
    } else {
        flags
    };
    let file = open_in(place.parent.as_fd(), place.name(), flags, 0)?;
    // Another program may have replaced it since.
    if is_visible(&rustix::fs::fstat(&file)?) { Ok(file) } else { Err(Status::ACCESS_DENIED) }
}

/// Makes a file or directory that does not exist.
pub fn create(place: &Place, directory: bool) -> Answer<OwnedFd> {
    if directory {
        rustix::fs::mkdirat(&place.parent, place.name(), Mode::from_raw_mode(0o777))?;
        return Ok(open_in(
            place.parent.as_fd(),
            place.name(),
            OFlags::RDONLY | OFlags::DIRECTORY,
            0,
        )?);
    }
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
    Ok(open_in(place.parent.as_fd(), place.name(), flags, 0o666)?)
}

/// Removes a file, if the name is still that file.
pub fn remove(place: &Place, file: BorrowedFd<'_>) -> Answer<()> {
    let stat = rustix::fs::fstat(file)?;
    if place.path.is_empty() || !place.found.is_some_and(|it| is_same(&it, &stat)) {
        return Err(Status::ACCESS_DENIED);
    }
    let flags = if is_directory(&stat) { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    Ok(rustix::fs::unlinkat(&place.parent, place.name(), flags)?)
}

/// Renames a file to a name that does not exist, or replaces another file.
pub fn rename(from: &Place, to: &Place, replace: bool) -> Answer<()> {
    let flags = if replace { RenameFlags::empty() } else { RenameFlags::NOREPLACE };
    let (old, new) = (from.name(), to.name());
    match rustix::fs::renameat_with(&from.parent, old, &to.parent, new, flags) {
        // File systems without this flag: the name was just looked up.
        Err(Errno::INVAL) if !replace => {
            Ok(rustix::fs::renameat(&from.parent, old, &to.parent, new)?)
        }
        other => Ok(other?),
    }
}

/// The spelling on the volume, and the file. Links, devices, FIFOs and sockets are not found.
fn lookup(directory: BorrowedFd<'_>, name: &str) -> Answer<Option<(String, Stat)>> {
    if let Some(stat) = stat_in(directory, name)? {
        return Ok(Some((name.to_owned(), stat)));
    }
    for entry in Dir::read_from(directory)?.take(MAX_SEARCHED) {
        let entry = entry?;
        let Ok(other) = entry.file_name().to_str() else { continue };
        if names::same(name, other)
            && let Some(stat) = stat_in(directory, other)?
        {
            return Ok(Some((other.to_owned(), stat)));
        }
    }
    Ok(None)
}

fn stat_in(directory: BorrowedFd<'_>, name: &str) -> Answer<Option<Stat>> {
    match rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) if is_visible(&stat) => Ok(Some(stat)),
        Ok(_) => Err(Status::ACCESS_DENIED),
        Err(Errno::NOENT) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

pub fn is_directory(stat: &Stat) -> bool {
    FileType::from_raw_mode(stat.st_mode) == FileType::Directory
}

fn is_visible(stat: &Stat) -> bool {
    matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Directory)
}

pub fn is_same(a: &Stat, b: &Stat) -> bool {
    (a.st_dev, a.st_ino) == (b.st_dev, b.st_ino)
}

/// Facts of a file, as Windows knows them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Facts {
    /// FILETIMEs: creation, last access, last write, change.
    pub times: [u64; 4],
    pub size: u64,
    pub allocated: u64,
    pub attributes: u32,
    pub inode: u64,
    pub links: u32,
    pub directory: bool,
}

pub const READ_ONLY: u32 = 0x1;
pub const HIDDEN: u32 = 0x2;
pub const DIRECTORY: u32 = 0x10;
pub const ARCHIVE: u32 = 0x20;
pub const NORMAL: u32 = 0x80;
pub const SPARSE: u32 = 0x200;

/// Facts of an open file.
pub fn facts(file: BorrowedFd<'_>, name: &str) -> Answer<Facts> {
    let facts = statx(file, "", name, AtFlags::EMPTY_PATH)?;
    facts.ok_or(Status::ACCESS_DENIED)
}

/// Facts of a name in a directory. None if it is not visible, or gone.
pub fn facts_in(directory: BorrowedFd<'_>, name: &str) -> Answer<Option<Facts>> {
    match statx(directory, name, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Status::OBJECT_NAME_NOT_FOUND) => Ok(None),
        other => other,
    }
}

fn statx(file: BorrowedFd<'_>, path: &str, name: &str, flags: AtFlags) -> Answer<Option<Facts>> {
    let wanted = StatxFlags::BASIC_STATS | StatxFlags::BTIME;
    let stat = rustix::fs::statx(file, path, flags, wanted)?;
    let directory = match FileType::from_raw_mode(stat.stx_mode.into()) {
        FileType::Directory => true,
        FileType::RegularFile => false,
        _ => return Ok(None),
    };
    Ok(Some(from_statx(&stat, directory, name)))
}

fn from_statx(stat: &Statx, directory: bool, name: &str) -> Facts {
    let time = |it: rustix::fs::StatxTimestamp| filetime(it.tv_sec, it.tv_nsec);
    let change = time(stat.stx_ctime);
    let write = time(stat.stx_mtime);
    let born = StatxFlags::from_bits_retain(stat.stx_mask).contains(StatxFlags::BTIME);
    let creation = if born { time(stat.stx_btime).min(write) } else { write.min(change) };
    let allocated = stat.stx_blocks.saturating_mul(512);
    let mut attributes = if directory { DIRECTORY } else { ARCHIVE };
    if name.starts_with('.') && name.len() > 1 {
        attributes |= HIDDEN;
    }
    if !directory && stat.stx_mode & 0o200 == 0 {
        attributes |= READ_ONLY;
    }
    if !directory && allocated < stat.stx_size {
        attributes |= SPARSE;
    }
    Facts {
        times: [creation, time(stat.stx_atime), write, change],
        size: if directory { 0 } else { stat.stx_size },
        allocated: if directory { 0 } else { allocated },
        attributes,
        inode: stat.stx_ino,
        links: stat.stx_nlink,
        directory,
    }
}

/// The attribute `read-only` is the owner's right to write.
pub fn set_read_only(file: BorrowedFd<'_>, read_only: bool) -> Answer<()> {
    let mode = rustix::fs::fstat(file)?.st_mode & 0o777;
    let wanted = match (read_only, mode & 0o200 == 0) {
        (true, false) => mode & !0o222,
        (false, true) => mode | 0o200,
        _ => return Ok(()),
    };
    Ok(rustix::fs::fchmod(file, Mode::from_raw_mode(wanted))?)
}

/// Seconds from 1601 to 1970.
const TO_UNIX: i64 = 11_644_473_600;

/// A time of the host in units of 100 ns since 1601.
pub fn filetime(seconds: i64, nanoseconds: u32) -> u64 {
    let units = seconds.saturating_add(TO_UNIX).saturating_mul(10_000_000);
    u64::try_from(units).unwrap_or(0).saturating_add(u64::from(nanoseconds / 100))
}

/// A FILETIME as seconds and nanoseconds of the host.
pub fn unix_time(filetime: u64) -> (i64, u32) {
    let seconds = i64::try_from(filetime / 10_000_000).expect("a tenth of a million fits");
    let rest = u32::try_from(filetime % 10_000_000).expect("less than ten million");
    (seconds - TO_UNIX, rest * 100)
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    fn folder(root: &std::path::Path) -> Folder {
        Folder::new(fs::File::open(root).unwrap().into())
    }

    fn find(folder: &Folder, path: &str) -> Answer<Option<String>> {
        let place = folder.find(&path.split('/').map(str::to_owned).collect::<Vec<_>>())?;
        Ok(place.found.map(|_| place.path.join("/")))
    }

    #[test]
    fn names_are_found_in_any_case_and_exact_ones_first() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("Bücher")).unwrap();
        for name in ["Eins.txt", "zwei", "ZWEI"] {
            fs::write(root.path().join("Bücher").join(name), name).unwrap();
        }
        let folder = folder(root.path());
        assert_eq!(find(&folder, "BÜCHER/eins.TXT"), Ok(Some("Bücher/Eins.txt".into())));
        assert_eq!(find(&folder, "bücher/ZWEI"), Ok(Some("Bücher/ZWEI".into())));
        assert_eq!(find(&folder, "bücher/zwei"), Ok(Some("Bücher/zwei".into())));
        assert_eq!(find(&folder, "bücher/drei"), Ok(None));
        assert_eq!(find(&folder, "none/drei"), Err(Status::OBJECT_PATH_NOT_FOUND));
    }

    #[test]
    fn links_pipes_and_parents_lead_nowhere() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("secret"), "x").unwrap();
        let root = tempfile::tempdir().unwrap();
        symlink(outside.path(), root.path().join("out")).unwrap();
        symlink(outside.path().join("secret"), root.path().join("file")).unwrap();
        symlink("/proc/self/root", root.path().join("magic")).unwrap();
        let mode = Mode::from_raw_mode(0o666);
        rustix::fs::mkfifoat(rustix::fs::CWD, root.path().join("fifo"), mode).unwrap();
        let folder = folder(root.path());
        for path in ["out/secret", "OUT/secret", "file", "magic/etc", "fifo", "magic"] {
            assert_eq!(find(&folder, path), Err(Status::ACCESS_DENIED), "{path}");
        }
        // Even if names were checked badly.
        assert!(find(&folder, "../secret").is_err());
        let name = outside.path().join("secret");
        let name = name.to_str().unwrap();
        assert!(open_in(folder.root.as_fd(), name, OFlags::RDONLY, 0).is_err());
        assert!(open_in(folder.root.as_fd(), "..", OFlags::RDONLY, 0).is_err());
        assert!(open_in(folder.root.as_fd(), "out", OFlags::RDONLY, 0).is_err());
    }

    #[test]
    fn times_are_those_of_windows() {
        assert_eq!(filetime(0, 0), 116_444_736_000_000_000);
        assert_eq!(unix_time(filetime(1_700_000_000, 123_456_700)), (1_700_000_000, 123_456_700));
        assert_eq!(filetime(i64::MIN, 0), 0);
        assert_eq!(unix_time(u64::MAX).1, 955_161_500);
    }
}
