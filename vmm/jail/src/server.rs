//! The jail of a process that serves folders to the guest, and nothing else: it gets connected
//! sockets from another process.
//!
//! A guest that takes over this process reaches what it reaches anyway, the files of the folders.
//! The process has no capability, can open nothing else, makes no sockets and starts no programs.
//! It enters while it has one thread; threads inherit all of it. A forbidden call fails with an
//! error.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use anyhow::Context;
use rustix::process::{getgroups, getuid};
use rustix::thread::{
    CapabilitySet, Gid, Uid, set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use seccompiler::{SeccompAction, SeccompCmpOp};
use vmm_sys_util::signal::block_signal;

use super::filter::{
    self, Calls, FCNTL, FILES, IOCTL, PLAIN, bits, flag, in_this_process, null, one_of, only,
    socket_options, to_peer,
};
use super::paths::{self, PathAccess, Paths};
use super::user;

/// A folder to serve.
#[derive(Clone, Copy, Debug)]
pub struct Served<'a> {
    pub path: &'a Path,
    pub read_only: bool,
}

/// System calls besides those of a machine's process, with any arguments.
const CALLS: &[i64] = &[
    // The folders. The server resolves names with `openat2` only.
    libc::SYS_openat2,
    libc::SYS_mkdirat,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_copy_file_range,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_rm_watch,
    libc::SYS_dup,
    // Connected sockets.
    libc::SYS_shutdown,
];

/// System calls of a machine's process that the server does not need, all with paths.
const UNUSED: &[i64] = &[
    libc::SYS_open,
    libc::SYS_stat,
    libc::SYS_lstat,
    libc::SYS_readlink,
    libc::SYS_unlink,
    libc::SYS_getcwd,
];

/// Events of watched directories: no access to files.
const EVENTS: u32 =
    libc::IN_CREATE | libc::IN_DELETE | libc::IN_MOVE | libc::IN_MODIFY | libc::IN_ATTRIB;

fn allowed() -> anyhow::Result<Calls> {
    let needed = PLAIN.iter().filter(|call| !UNUSED.contains(call));
    let mut calls = in_this_process(needed.chain(CALLS))?;
    // Landlock covers neither times nor watches. Times are set only of open files, and only
    // directories are watched: a filter cannot see of which path.
    calls.insert(libc::SYS_utimensat, null(1)?);
    let others = u64::from(!EVENTS);
    calls.insert(libc::SYS_inotify_add_watch, bits(2, others, u64::from(libc::IN_ONLYDIR))?);
    // A set-uid program in the folder would have the rights of the folder's owner on the host. The
    // kernel takes the bit away from a file that this process writes.
    calls.insert(libc::SYS_fchmod, bits(1, 0o7000, 0)?);
    calls.insert(libc::SYS_sendto, to_peer(libc::MSG_NOSIGNAL | libc::MSG_MORE)?);
    calls.insert(libc::SYS_setsockopt, socket_options()?);
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(flag);
    calls.insert(libc::SYS_prctl, one_of(0, &names)?);
    calls.insert(libc::SYS_fcntl, one_of(1, &FCNTL.iter().copied().map(flag).collect::<Vec<_>>())?);
    let ioctls = FILES.iter().map(|code| only(1, SeccompCmpOp::MaskedEq(IOCTL), *code));
    calls.insert(libc::SYS_ioctl, ioctls.collect::<anyhow::Result<_>>()?);
    Ok(calls)
}

/// Enters the jail for good. As root, the process becomes the owner of the first folder, so that
/// files belong to that user, and keeps its groups and those of all folders. Returns the
/// restrictions that could not be applied, each with the reason.
pub fn enter(folders: &[Served<'_>]) -> anyhow::Result<Vec<String>> {
    // Without SIGXFSZ, a file that reaches its size limit fails one request, not the process.
    block_signal(libc::SIGXFSZ).ok();
    let absent = [(libc::SYS_clone3, Vec::new())].into();
    let otherwise = SeccompAction::Errno(libc::EPERM.unsigned_abs());
    let programs = filter::compile(absent, allowed()?, SeccompAction::Allow, otherwise)?;
    let mut paths = Paths::default();
    for folder in folders {
        let access = if folder.read_only { PathAccess::Read } else { PathAccess::Serve };
        paths.add(folder.path, access);
    }
    let rules = paths.rules(true)?;
    let mut lacks = Vec::new();
    user::prevent_regaining(CapabilitySet::empty())?;
    if getuid().is_root()
        && let Err(error) = become_owner(folders)
    {
        lacks.push(format!("the server of the shared folder stays root: {error:#}"));
    }
    user::drop_capabilities(CapabilitySet::empty())?;
    user::protect_memory()?;
    let restricted = paths::restrict(rules).map(drop);
    let applied = filter::apply(&programs);
    lacks.extend(
        [restricted, applied].into_iter().filter_map(|it| Some(format!("{:#}", it.err()?))),
    );
    Ok(lacks)
}

fn become_owner(folders: &[Served<'_>]) -> anyhow::Result<()> {
    let mut owners = Vec::new();
    for folder in folders {
        let found = fs::metadata(folder.path).with_context(|| folder.path.display().to_string())?;
        owners.push((Uid::from_raw(found.uid()), Gid::from_raw(found.gid())));
    }
    // If that is root, its groups stay: where a container keeps those of its user, none can be set.
    let Some((user, group)) = owners.first().copied().filter(|it| !it.0.is_root()) else {
        return Ok(());
    };
    let mut groups = getgroups().context("groups")?;
    groups.extend(owners.iter().map(|(_, group)| *group));
    set_thread_groups(&groups).context("groups: add --cap-add SETGID")?;
    set_thread_res_gid(group, group, group).context("the folder's group: add --cap-add SETGID")?;
    set_thread_res_uid(user, user, user).context("the folder's owner: add --cap-add SETUID")
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::io::{Read as _, Write as _};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::fs::chown;
    use std::os::unix::net::UnixStream;
    use std::process::Command;
    use std::sync::mpsc;
    use std::thread;

    use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
    use rustix::fs::{AtFlags, CWD, Mode, Timespec, Timestamps, mkdirat, renameat};
    use rustix::io::Errno;
    use rustix::net::{SendFlags, SocketAddrUnix, sockopt};

    use super::*;

    #[test]
    fn a_server_reaches_its_folders_and_nothing_else() {
        let [shared, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let root = getuid().is_root();
        if root {
            chown(shared.path(), Some(4242), Some(4343)).unwrap();
        }
        fs::write(other.path().join("read"), "x").unwrap();
        let [mine, theirs] = [&shared, &other].map(|folder| folder.path().to_owned());
        let (mut near, mut far) = UnixStream::pair().unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        let ((tell, told), (go, wait)) = (mpsc::channel(), mpsc::channel());
        // Use another thread: the restrictions of this one would apply to the next test.
        let thread = thread::spawn(move || {
            let lacks = enter(&[Served { path: &mine, read_only: false }]).unwrap();
            assert_eq!(lacks, Vec::<String>::new());
            let [new, folder] = ["new", "folder"].map(|name| mine.join(name));
            fs::write(&new, "text").unwrap();
            mkdirat(CWD, &folder, Mode::from_raw_mode(0o777)).unwrap();
            renameat(CWD, &new, CWD, folder.join("moved")).unwrap();
            if root {
                let found = fs::metadata(folder.join("moved")).unwrap();
                assert_eq!((found.uid(), found.gid()), (4242, 4343));
            }
            far.write_all(b"it").unwrap();
            assert!(File::open(theirs.join("read")).is_err());
            assert!(File::create(theirs.join("new")).is_err());
            assert!(renameat(CWD, folder.join("moved"), CWD, theirs.join("moved")).is_err());
            assert!(File::open("/proc/self/status").is_err());
            assert!(std::os::unix::fs::symlink("/", mine.join("link")).is_err());
            assert!(Command::new("/bin/true").status().is_err());
            assert!(TcpStream::connect(to).is_err());
            assert!(UnixStream::pair().is_err());
            assert!(rustix::process::test_kill_process(rustix::process::Pid::INIT).is_err());
            tell.send(rustix::thread::gettid()).unwrap();
            wait.recv().unwrap();
        });
        if let Ok(number) = told.recv() {
            let path = format!("/proc/self/task/{}/status", number.as_raw_nonzero());
            let status = fs::read_to_string(path).unwrap();
            for name in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
                let none = status.contains(&format!("{name}:\t0000000000000000\n"));
                assert!(none || name == "CapBnd" && !root, "{status}");
            }
            go.send(()).unwrap();
        }
        thread.join().unwrap();
        let mut said = [0; 2];
        near.read_exact(&mut said).unwrap();
        assert!(&said == b"it" && fs::read(other.path().join("read")).is_ok());
    }

    /// A call is refused by the filter.
    fn is_refused<T>(result: rustix::io::Result<T>) -> bool {
        result.err() == Some(Errno::PERM)
    }

    #[test]
    fn calls_that_landlock_does_not_cover_are_limited_to_open_files() {
        let [shared, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let [mine, theirs] = [&shared, &other].map(|folder| folder.path().to_owned());
        let file = theirs.join("file");
        fs::write(&file, "x").unwrap();
        let before = fs::metadata(&file).unwrap().mtime();
        let (mut near, far) = UnixStream::pair().unwrap();
        let thread = thread::spawn(move || {
            enter(&[Served { path: &mine, read_only: false }]).unwrap();
            let own = mine.join("own");
            let open = File::create(&own).unwrap();
            let time = Timespec { tv_sec: 1, tv_nsec: 0 };
            let times = Timestamps { last_access: time, last_modification: time };
            rustix::fs::futimens(&open, &times).unwrap();
            assert_eq!(fs::metadata(&own).unwrap().mtime(), 1);
            for path in [&own, &file] {
                let none = AtFlags::empty();
                assert!(is_refused(rustix::fs::utimensat(CWD, path, &times, none)));
            }
            let inotify = inotify::init(CreateFlags::CLOEXEC).unwrap();
            let events = WatchFlags::CREATE | WatchFlags::MOVE | WatchFlags::ONLYDIR;
            inotify::add_watch(&inotify, &mine, events).unwrap();
            for more in [WatchFlags::OPEN, WatchFlags::ACCESS, WatchFlags::MASK_ADD] {
                assert!(is_refused(inotify::add_watch(&inotify, &mine, events | more)));
            }
            assert!(is_refused(inotify::add_watch(&inotify, &file, WatchFlags::MODIFY)));
            rustix::fs::fchmod(&open, Mode::from_raw_mode(0o640)).unwrap();
            for bit in [0o4755, 0o2755, 0o1755] {
                assert!(is_refused(rustix::fs::fchmod(&open, Mode::from_raw_mode(bit))));
            }
            let send = |flags| rustix::net::send(&far, b"it", flags);
            send(SendFlags::NOSIGNAL | SendFlags::MORE).unwrap();
            let fast_open = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.unsigned_abs());
            assert!(is_refused(send(SendFlags::NOSIGNAL | fast_open)));
            let to = SocketAddrUnix::new("/nowhere").unwrap();
            assert!(is_refused(rustix::net::sendto(&far, b"it", SendFlags::NOSIGNAL, &to)));
            assert!(is_refused(sockopt::set_socket_broadcast(&far, true)));
            sockopt::set_socket_keepalive(&far, true).unwrap();
        });
        thread.join().unwrap();
        let mut said = Vec::new();
        near.read_to_end(&mut said).unwrap();
        assert_eq!(said, b"it");
        assert_eq!(fs::metadata(other.path().join("file")).unwrap().mtime(), before);
    }

    #[test]
    fn a_read_only_folder_is_only_read() {
        let shared = tempfile::tempdir().unwrap();
        fs::write(shared.path().join("file"), "x").unwrap();
        let mine = shared.path().to_owned();
        let thread = thread::spawn(move || {
            enter(&[Served { path: &mine, read_only: true }]).unwrap();
            assert!(fs::read(mine.join("file")).is_ok() && fs::read_dir(&mine).is_ok());
            for refused in [
                fs::write(mine.join("new"), "y"),
                fs::write(mine.join("file"), "y"),
                fs::remove_file(mine.join("file")),
            ] {
                assert!(refused.is_err());
            }
            assert!(mkdirat(CWD, mine.join("folder"), Mode::from_raw_mode(0o777)).is_err());
        });
        thread.join().unwrap();
    }
}
