//! The jail of a process that supervises a machine in another process, as `transom pod` does.
//!
//! Each thread enters by itself, because the kernel keeps all of this per thread: threads that
//! serve clients enter when they start, and the thread that prepares the machine enters last. A
//! forbidden call fails with an error and does not end the process, which must go on supervising.

use std::path::PathBuf;

use rustix::process::getpid;
pub use rustix::thread::CapabilitySet as Capabilities;
use seccompiler::{SeccompAction, SeccompCmpOp};

use super::filter::{self, Calls, FCNTL, FILES, IOCTL, PLAIN, flag, in_this_process, one_of, only};
use super::paths::{self, PathAccess, Paths};
use super::user;
pub use super::user::{keep_for_programs, protect_memory};

#[derive(Clone, Debug, Default)]
pub struct FileAccess {
    /// Files and folders for reading.
    pub read: Vec<PathBuf>,
    /// Files for reading and writing.
    pub written: Vec<PathBuf>,
    /// Folders in which files are created and removed.
    pub own: Vec<PathBuf>,
}

/// System calls that a supervisor needs besides those of a machine's process, with any arguments.
const CALLS: &[i64] = &[
    // Sockets to serve on, and to reach the guest's peers.
    libc::SYS_bind,
    libc::SYS_connect,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_socketpair,
    libc::SYS_setsockopt,
    libc::SYS_shutdown,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_recvmmsg,
    libc::SYS_sendmmsg,
    libc::SYS_sendfile,
    // Small files.
    libc::SYS_access,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_readlinkat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_mkdir,
    libc::SYS_mkdirat,
    libc::SYS_rmdir,
    libc::SYS_chmod,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_copy_file_range,
    // Keys for the machine.
    libc::SYS_memfd_create,
    libc::SYS_statfs,
    libc::SYS_dup,
    libc::SYS_dup3,
    libc::SYS_epoll_pwait2,
    // Waiting for the machine's processes.
    libc::SYS_wait4,
    libc::SYS_waitid,
    libc::SYS_pidfd_open,
    // Users, limits and sizes.
    libc::SYS_getuid,
    libc::SYS_geteuid,
    libc::SYS_getgid,
    libc::SYS_getegid,
    libc::SYS_getppid,
    libc::SYS_getrlimit,
    libc::SYS_getrusage,
    libc::SYS_sysinfo,
    libc::SYS_uname,
    // Threads that start later enter the jail themselves. None of these calls lifts a restriction.
    libc::SYS_capget,
    libc::SYS_capset,
    libc::SYS_seccomp,
    libc::SYS_landlock_create_ruleset,
    libc::SYS_landlock_add_rule,
    libc::SYS_landlock_restrict_self,
];

const PRCTL: &[i32] = &[
    libc::PR_SET_NAME,
    libc::PR_GET_NAME,
    libc::PR_SET_NO_NEW_PRIVS,
    libc::PR_GET_NO_NEW_PRIVS,
    libc::PR_CAP_AMBIENT,
    libc::PR_CAPBSET_READ,
    libc::PR_SET_SECCOMP,
    libc::PR_GET_SECCOMP,
];

/// The number of bytes that can be read.
const FIONREAD: u64 = 0x541b;

fn allowed(children: &[u32]) -> anyhow::Result<Calls> {
    let mut calls = in_this_process(PLAIN.iter().chain(CALLS))?;
    let us = u64::from(getpid().as_raw_nonzero().get().unsigned_abs());
    let ours: Vec<_> = [us].into_iter().chain(children.iter().copied().map(u64::from)).collect();
    calls.insert(libc::SYS_kill, one_of(0, &ours)?);
    let families = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6].map(flag);
    calls.insert(libc::SYS_socket, one_of(0, &families)?);
    calls.insert(libc::SYS_prctl, one_of(0, &PRCTL.iter().copied().map(flag).collect::<Vec<_>>())?);
    calls.insert(libc::SYS_fcntl, one_of(1, &FCNTL.iter().copied().map(flag).collect::<Vec<_>>())?);
    calls.insert(libc::SYS_prlimit64, one_of(0, &[0])?);
    let ioctls = FILES.iter().chain([&FIONREAD]);
    let ioctls = ioctls.map(|code| only(1, SeccompCmpOp::MaskedEq(IOCTL), *code));
    calls.insert(libc::SYS_ioctl, ioctls.collect::<anyhow::Result<_>>()?);
    Ok(calls)
}

impl FileAccess {
    /// Enters the jail, for this thread and the threads that it starts. The capabilities `keep`
    /// stay, and signals may be sent to `children`. Returns the restrictions that could not be
    /// applied, each with the reason.
    pub fn enter(&self, keep: Capabilities, children: &[u32]) -> anyhow::Result<Vec<String>> {
        let absent = [(libc::SYS_clone3, Vec::new())].into();
        let otherwise = SeccompAction::Errno(libc::EPERM.unsigned_abs());
        let programs =
            filter::compile(absent, allowed(children)?, SeccompAction::Allow, otherwise)?;
        let mut paths = Paths::default();
        for (all, what) in [
            (&self.read, PathAccess::Read),
            (&self.written, PathAccess::Write),
            (&self.own, PathAccess::Own),
        ] {
            all.iter().for_each(|path| paths.add(path, what));
        }
        let rules = paths.rules_for_files()?;
        // No program is started any more, so no program needs a capability.
        user::prevent_regaining(Capabilities::empty())?;
        user::drop_capabilities(keep)?;
        let restricted = paths::restrict(rules).map(drop);
        let applied = filter::apply(&programs);
        let lacks = [restricted, applied].into_iter().filter_map(Result::err);
        Ok(lacks.map(|error| format!("{error:#}")).collect())
    }
}

/// Drops these capabilities, for this thread and the threads that it starts.
pub fn drop_capabilities(capabilities: Capabilities) -> anyhow::Result<()> {
    user::drop_capabilities(capabilities.complement())
}

#[cfg(test)]
mod test {
    use std::fs::{self, File};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Child, Command};
    use std::thread;

    use rustix::process::{Pid, Signal, kill_process};

    use super::*;

    fn pid(id: u32) -> Pid {
        Pid::from_raw(id.cast_signed()).unwrap()
    }

    #[test]
    fn a_watcher_may_serve_and_write_only_its_own_files() {
        let [own, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::write(other.path().join("read"), "x").unwrap();
        let [mine, theirs] = [&own, &other].map(|folder| folder.path().to_owned());
        // Use another thread: the restrictions of this one would apply to the next test.
        let sleep = || Command::new("sleep").arg("600").spawn().unwrap();
        let (mut ours, mut stray) = ([sleep(), sleep()], sleep());
        let ids = ours.each_ref().map(Child::id);
        let stranger = stray.id();
        let thread = thread::spawn(move || {
            let files = FileAccess { own: vec![mine.clone()], ..FileAccess::default() };
            let lacks = files.enter(Capabilities::empty(), &ids).unwrap();
            assert_eq!(lacks, Vec::<String>::new());
            // Threads enter again.
            let again = move || files.enter(Capabilities::empty(), &[]).unwrap().len();
            assert_eq!(thread::spawn(again).join().unwrap(), 0);
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let [new, last] = ["new", "last"].map(|name| mine.join(name));
            fs::write(&new, "text").unwrap();
            fs::rename(&new, &last).unwrap();
            fs::remove_file(&last).unwrap();
            rustix::fs::memfd_create("key", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
            assert!(File::open(theirs.join("read")).is_err());
            assert!(File::create(theirs.join("new")).is_err());
            assert!(Command::new("/bin/true").status().is_err());
            assert!(rustix::process::test_kill_process(Pid::INIT).is_err());
            for id in ids {
                kill_process(pid(id), Signal::KILL).unwrap();
            }
            assert!(kill_process(pid(stranger), Signal::KILL).is_err());
            let raw = rustix::net::SocketType::RAW;
            assert!(rustix::net::socket(rustix::net::AddressFamily::PACKET, raw, None).is_err());
            let status = fs::read_to_string("/proc/thread-self/status");
            assert!(status.is_err(), "{status:?}");
            let sets = rustix::thread::capabilities(None).unwrap();
            assert!(sets.effective.is_empty() && sets.permitted.is_empty());
        });
        let done = thread.join();
        stray.kill().unwrap();
        stray.wait().unwrap();
        done.unwrap();
        for child in &mut ours {
            assert_eq!(child.wait().unwrap().signal(), Some(9));
        }
        assert!(fs::read(other.path().join("read")).is_ok());
    }
}
