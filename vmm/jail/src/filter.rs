//! Which system calls there are from now on: a list for all threads, since they share one memory
//! anyway, so that the smallest list would be the sum of all.
//!
//! A call is on the list with those of its arguments that are let through, as far as a filter can
//! see them: numbers, not what pointers point to. What a machine does not have is not on it: no
//! connections without passt, no rings of io_uring without a disk. A ring is used and never made or
//! changed here: no filter sees its operations, and those of a disk's rings were restricted before.
//! The kernel remembers which calls are allowed whatever their arguments, so that most of them cost
//! nothing.

use std::collections::BTreeMap;

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::words::Seccomp;

/// What a machine needs besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// To use the rings of its disks.
    pub rings: bool,
    /// To connect to Unix sockets again.
    pub connect: bool,
    /// A network, or a tap.
    pub network: bool,
}

/// Calls whatever their arguments.
pub(crate) const PLAIN: &[i64] = &[
    // Memory.
    libc::SYS_brk,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_madvise,
    // Threads, locks and time.
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_membarrier,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_nanosleep,
    libc::SYS_gettimeofday,
    libc::SYS_getrandom,
    libc::SYS_restart_syscall,
    // Signals.
    libc::SYS_sigaltstack,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    // Files. Which of them may be opened is Landlock's to say.
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_pread64,
    libc::SYS_pwrite64,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_preadv2,
    libc::SYS_pwritev2,
    libc::SYS_lseek,
    libc::SYS_close,
    libc::SYS_open,
    libc::SYS_openat,
    libc::SYS_stat,
    libc::SYS_fstat,
    libc::SYS_newfstatat,
    libc::SYS_lstat,
    libc::SYS_statx,
    libc::SYS_fstatfs,
    libc::SYS_readlink,
    libc::SYS_getdents64,
    libc::SYS_getcwd,
    libc::SYS_flock,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_unlink,
    libc::SYS_unlinkat,
    // Events.
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_wait,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_timerfd_create,
    libc::SYS_timerfd_settime,
    libc::SYS_timerfd_gettime,
    libc::SYS_pipe,
    libc::SYS_pipe2,
    // Sockets that are there, and those who come by them.
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

/// What is set of a socket that is there. No other: some of them make it another socket's kind, as
/// those of TCP Fast Open do, by which data alone connects.
const OPTIONS: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];

/// How data is sent. `MSG_FASTOPEN` is not among these: it connects a socket of the network that
/// was left, to an address that no filter sees.
const SENDING: i32 = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;

/// What makes rings of io_uring, and changes them.
const MAKES_RINGS: [i64; 2] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_register];
/// What disks ask their rings by.
const USES_RINGS: i64 = libc::SYS_io_uring_enter;

/// The kind and number of an ioctl; the rest of its code is the size of what it takes.
pub(crate) const IOCTL: u64 = 0xffff;

/// Those of a machine that runs, the most frequent one first.
const KVM: &[u64] = &[
    0xae80, // RUN
    0xae61, // IRQ_LINE
    0xae42, // GET_DIRTY_LOG
    0xae46, // SET_USER_MEMORY_REGION
    0xae76, // IRQFD
    0xae79, // IOEVENTFD
    0xae6a, // SET_GSI_ROUTING
    0xae03, // CHECK_EXTENSION
    0xae62, // GET_IRQCHIP
    0xae63, // SET_IRQCHIP
    0xae9f, // GET_PIT2, GET_VCPU_EVENTS
    0xaea0, // SET_PIT2, SET_VCPU_EVENTS
    0xae81, // GET_REGS
    0xae82, // SET_REGS
    0xae83, // GET_SREGS
    0xae84, // SET_SREGS
    0xae88, // GET_MSRS
    0xae89, // SET_MSRS
    0xae8c, // GET_FPU
    0xae8d, // SET_FPU
    0xae8e, // GET_LAPIC
    0xae8f, // SET_LAPIC
    0xae98, // GET_MP_STATE
    0xae99, // SET_MP_STATE
    0xae9a, // NMI
    0xaea1, // GET_DEBUGREGS
    0xaea2, // SET_DEBUGREGS
    0xaea6, // GET_XCRS
    0xaea7, // SET_XCRS
    0xaead, // KVMCLOCK_CTRL
];

/// Terminals, and file descriptors of any kind.
pub(crate) const FILES: &[u64] = &[
    0x5401, // TCGETS
    0x5402, // TCSETS
    0x542a, // TCGETS2
    0x542b, // TCSETS2
    0x5413, // TIOCGWINSZ
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
];

/// Block devices.
const BLOCK: &[u64] = &[
    0x1268, // BLKSSZGET
    0x1272, // BLKGETSIZE64
    0x1277, // BLKDISCARD
    0x127b, // BLKPBSZGET
    0x127f, // BLKZEROOUT
];

/// Taps, and the kernel's side of their rings.
const NETWORK: &[u64] = &[
    0x54d0, // TUNSETOFFLOAD
    0x54d9, // TUNSETQUEUE
    0xaf00, // VHOST_GET_FEATURES, VHOST_SET_FEATURES
    0xaf03, // VHOST_SET_MEM_TABLE
    0xaf10, // VHOST_SET_VRING_NUM
    0xaf11, // VHOST_SET_VRING_ADDR
    0xaf12, // VHOST_SET_VRING_BASE, VHOST_GET_VRING_BASE
    0xaf20, // VHOST_SET_VRING_KICK
    0xaf21, // VHOST_SET_VRING_CALL
    0xaf22, // VHOST_SET_VRING_ERR
    0xaf30, // VHOST_NET_SET_BACKEND
];

pub(crate) const FCNTL: &[i32] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
];

/// The type of a socket; the rest of that word is flags (`SOCK_TYPE_MASK`).
const SOCKET_TYPE: u64 = 0xf;

/// The list.
pub(crate) type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// A rule about the lower half of an argument, in which all numbers that we look at lie.
pub(crate) fn only(argument: u8, compare: SeccompCmpOp, value: u64) -> anyhow::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// The same as a part of a rule.
fn word(argument: u8, compare: SeccompCmpOp, value: i32) -> anyhow::Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, flag(value))?)
}

/// One of these values.
pub(crate) fn one_of(argument: u8, values: &[u64]) -> anyhow::Result<Vec<SeccompRule>> {
    values.iter().map(|value| only(argument, SeccompCmpOp::Eq, *value)).collect()
}

/// These bits, of those that the mask has.
pub(crate) fn bits(argument: u8, mask: u64, value: u64) -> anyhow::Result<Vec<SeccompRule>> {
    Ok(vec![only(argument, SeccompCmpOp::MaskedEq(mask), value)?])
}

/// A flag's bits, which no flag has the sign in.
pub(crate) fn flag(bits: i32) -> u64 {
    u64::from(bits.unsigned_abs())
}

fn allowed(needs: Needs) -> anyhow::Result<Calls> {
    let mut calls: Calls = PLAIN.iter().map(|call| (*call, Vec::new())).collect();
    // Memory is never made a program.
    calls.insert(libc::SYS_mmap, bits(2, flag(libc::PROT_EXEC), 0)?);
    calls.insert(libc::SYS_mprotect, bits(2, flag(libc::PROT_EXEC), 0)?);
    // Threads, and no processes. The kind of call whose flags cannot be seen is not there
    // (`absent`), and the C library takes the other one.
    let thread = flag(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND);
    calls.insert(libc::SYS_clone, bits(0, thread, thread)?);
    calls.insert(libc::SYS_clone3, Vec::new());
    // Signals, to ourselves alone.
    let us = u64::from(std::process::id());
    calls.insert(libc::SYS_kill, one_of(0, &[us])?);
    calls.insert(libc::SYS_tgkill, one_of(0, &[us])?);
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(flag);
    calls.insert(libc::SYS_prctl, one_of(0, &names)?);
    let commands: Vec<_> = FCNTL.iter().map(|command| flag(*command)).collect();
    calls.insert(libc::SYS_fcntl, one_of(1, &commands)?);
    // Ours alone: a limit is read, and none is set.
    let nothing = SeccompCondition::new(2, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    calls.insert(libc::SYS_prlimit64, vec![SeccompRule::new(vec![nothing])?]);
    let network = if needs.network { NETWORK } else { &[] };
    let ioctls = [KVM, FILES, BLOCK, network].concat();
    let ioctls = ioctls.iter().map(|code| only(1, SeccompCmpOp::MaskedEq(IOCTL), *code));
    calls.insert(libc::SYS_ioctl, ioctls.collect::<anyhow::Result<_>>()?);
    // Both ends are ours: the runtime of the screen wakes itself so. A pair for datagrams could
    // send to any socket that has a path.
    calls.insert(libc::SYS_socketpair, unix_streams()?);
    if needs.connect {
        calls.insert(libc::SYS_socket, unix_streams()?);
        // Not by TCP, which Landlock says (Linux 6.7): no filter sees an address.
        calls.insert(libc::SYS_connect, Vec::new());
    }
    // To the peer that a socket has, and to no other address. That of a message is not seen; a
    // socket of streams does not look at it.
    let others = u64::from(!SENDING.unsigned_abs());
    let plain = |argument| word(argument, SeccompCmpOp::MaskedEq(others), 0);
    let nobody = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    calls.insert(libc::SYS_sendto, vec![SeccompRule::new(vec![plain(3)?, nobody])?]);
    calls.insert(libc::SYS_sendmsg, vec![SeccompRule::new(vec![plain(2)?])?]);
    calls.insert(libc::SYS_setsockopt, options()?);
    // A listener whose reading ends is no listener any more, and could be connected.
    calls.insert(libc::SYS_shutdown, one_of(1, &[flag(libc::SHUT_WR)])?);
    // Those that are not there either are for the other filter.
    calls.extend(MAKES_RINGS.into_iter().chain([USES_RINGS]).map(|call| (call, Vec::new())));
    Ok(calls)
}

/// What of a socket may be set: its level, and the name there.
fn options() -> anyhow::Result<Vec<SeccompRule>> {
    let rule = |(level, name): &(i32, i32)| {
        let [level, name] =
            [(1, *level), (2, *name)].map(|(at, it)| word(at, SeccompCmpOp::Eq, it));
        Ok(SeccompRule::new(vec![level?, name?])?)
    };
    OPTIONS.iter().map(rule).collect()
}

/// Unix sockets of streams, whatever their other flags.
fn unix_streams() -> anyhow::Result<Vec<SeccompRule>> {
    let unix = word(0, SeccompCmpOp::Eq, libc::AF_UNIX)?;
    let stream = word(1, SeccompCmpOp::MaskedEq(SOCKET_TYPE), libc::SOCK_STREAM)?;
    Ok(vec![SeccompRule::new(vec![unix, stream])?])
}

/// What those who ask are told is not there, and which they do without.
fn absent(needs: Needs) -> Calls {
    let unused = (!needs.rings).then_some(USES_RINGS);
    let all = [libc::SYS_clone3].into_iter().chain(MAKES_RINGS).chain(unused);
    all.map(|call| (call, Vec::new())).collect()
}

/// The programs for the kernel, of which the strictest wins.
pub(crate) fn programs(needs: Needs, mode: Seccomp) -> anyhow::Result<Vec<BpfProgram>> {
    let otherwise = match mode {
        Seccomp::Off => return Ok(Vec::new()),
        Seccomp::Log => SeccompAction::Log,
        Seccomp::On => SeccompAction::Trap,
    };
    let arch = TargetArch::x86_64;
    let enosys = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let absent = SeccompFilter::new(absent(needs), SeccompAction::Allow, enosys, arch)?;
    let list = SeccompFilter::new(allowed(needs)?, otherwise, SeccompAction::Allow, arch)?;
    // The last one to be applied must let the call pass that applies it, so the list comes last.
    Ok(vec![absent.try_into()?, list.try_into()?])
}

/// Applies them, for this thread and those that it starts.
///
/// # Errors
///
/// When this kernel has no filters, or a container engine forbids them.
pub(crate) fn apply(programs: &[BpfProgram]) -> anyhow::Result<()> {
    programs.iter().try_for_each(|program| apply_filter(program)).context("seccomp")
}

#[cfg(test)]
mod test {
    use std::fs::{self, File};
    use std::io::{IoSlice, Read as _};
    use std::net::{Shutdown, TcpListener};
    use std::os::unix::net::UnixStream;
    use std::process::{Command, Output};
    use std::thread;
    use std::time::Duration;

    use host::disk::{Config, open};
    use rustix::net::{AddressFamily, SendAncillaryBuffer, SendFlags, SocketType, sockopt};

    use super::super::kernel;
    use super::*;
    use crate::STATUS;

    /// What the child of a test is to do.
    const DEED: &str = "TRANSOM_TEST_DEED";

    /// Runs a test of this module again, in a process of its own.
    fn child(test: &str, deed: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("filter::test::{test}"), "--nocapture"]);
        command.env(DEED, deed).output().unwrap()
    }

    /// Goes in, as a machine does, and does it.
    fn inside(needs: Needs, deed: impl FnOnce() + Send) {
        thread::scope(|scope| {
            let inmate = thread::Builder::new().name("inmate".into());
            let body = || {
                kernel::end_on_refusal().unwrap();
                apply(&programs(needs, Seccomp::On).unwrap()).unwrap();
                deed();
            };
            inmate.spawn_scoped(scope, body).unwrap().join().unwrap();
        });
    }

    /// A call that is not allowed, with a listener that was there before.
    type Deed = (&'static str, i64, fn(&TcpListener));

    /// A flag that is none of the standard's.
    const FAST_OPEN: SendFlags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.unsigned_abs());

    const FORBIDDEN: &[Deed] = &[
        ("socket", libc::SYS_socket, |_| {
            rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok();
        }),
        ("datagrams", libc::SYS_socketpair, |_| {
            std::os::unix::net::UnixDatagram::pair().ok();
        }),
        ("program", libc::SYS_execve, |_| {
            // The process that it would run in is one thing, and what it runs another.
            drop(std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true")));
        }),
        ("process", libc::SYS_clone, |_| {
            // Whichever call it is that the C library makes for it.
            Command::new("/bin/true").status().ok();
        }),
        ("rights", libc::SYS_setresuid, |_| {
            let id = rustix::thread::Uid::from_raw(1);
            rustix::thread::set_thread_res_uid(id, id, id).ok();
        }),
        ("ioctl", libc::SYS_ioctl, |_| {
            // TIOCSTI's neighbour: a terminal's foreground.
            rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
        }),
        ("signal", libc::SYS_kill, |_| {
            let first = rustix::process::Pid::from_raw(1).unwrap();
            rustix::process::test_kill_process(first).ok();
        }),
        // A listener that hangs up is a socket again, of the network that it was made in, and its
        // first bytes would connect it.
        ("hang up", libc::SYS_shutdown, |listener| {
            rustix::net::shutdown(listener, rustix::net::Shutdown::Both).ok();
        }),
        ("stop listening", libc::SYS_shutdown, |listener| {
            rustix::net::shutdown(listener, rustix::net::Shutdown::Read).ok();
        }),
        ("connect by a message", libc::SYS_sendmsg, |listener| {
            let (to, data) = (listener.local_addr().unwrap(), [IoSlice::new(b"x")]);
            let mut rights = SendAncillaryBuffer::default();
            rustix::net::sendmsg_addr(listener, &to, &data, &mut rights, FAST_OPEN).ok();
        }),
        ("connect by data", libc::SYS_sendto, |listener| {
            rustix::net::send(listener, b"x", FAST_OPEN).ok();
        }),
        ("connect later", libc::SYS_setsockopt, |listener| {
            // TCP_FASTOPEN_CONNECT has no name here; this one is as little ours.
            sockopt::set_tcp_quickack(listener, true).ok();
        }),
        ("option", libc::SYS_setsockopt, |listener| {
            // TCP_KEEPCNT's number, at the level of sockets.
            sockopt::set_socket_broadcast(listener, true).ok();
        }),
    ];

    #[test]
    fn what_is_not_on_the_list_ends_the_process_with_a_sentence() {
        let test = "what_is_not_on_the_list_ends_the_process_with_a_sentence";
        if let Ok(deed) = std::env::var(DEED) {
            let deed = FORBIDDEN.iter().find(|it| it.0 == deed).unwrap().2;
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            inside(Needs { network: true, rings: true, connect: false }, || deed(&listener));
            return;
        }
        for (name, call, _) in FORBIDDEN {
            let ended = child(test, name);
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            if *name == "process" {
                // The C library lets no signal through meanwhile, and then there is no sentence.
                assert!(!ended.status.success(), "{name}: {said}");
                continue;
            }
            assert_eq!(ended.status.code(), Some(STATUS.into()), "{name}: {said}");
            let sentence = format!("the jail forbids system call {call} in thread `inmate`");
            assert!(said.contains(&sentence), "{name}: {said}");
        }
    }

    #[test]
    fn no_ring_is_made_or_changed_and_a_socket_reaches_its_peer_alone() {
        let test = "no_ring_is_made_or_changed_and_a_socket_reaches_its_peer_alone";
        if std::env::var_os(DEED).is_none() {
            let ended = child(test, "rings");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let [first, later] = ["first", "later"].map(|name| {
            let path = folder.path().join(name);
            File::create(&path).unwrap().set_len(1 << 20).unwrap();
            open(&Config::new(path.clone()), None).map(|image| (path, image)).unwrap()
        });
        drop(later.1);
        let before = rings();
        inside(Needs { rings: true, ..Needs::default() }, || {
            // A disk that comes later does without, and says so in the log alone.
            let image = open(&Config::new(&later.0), None).unwrap();
            assert_eq!((rings(), image.geometry().size), (before, 1 << 20));
            let pair = UnixStream::pair().unwrap();
            rustix::net::send(&pair.0, b"x", SendFlags::empty()).unwrap();
            let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
            let (data, mut rights) = ([IoSlice::new(b"y")], SendAncillaryBuffer::default());
            rustix::net::sendmsg(&pair.0, &data, &mut rights, flags).unwrap();
            pair.1.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            pair.0.shutdown(Shutdown::Write).unwrap();
            let mut text = String::new();
            (&pair.1).read_to_string(&mut text).unwrap();
            assert_eq!(text, "xy");
        });
        drop(first);
        assert!(rings() < before || before == 0, "{before} rings of a disk that was there before");
    }

    /// How many rings this process has.
    fn rings() -> usize {
        let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let links = links.filter_map(|link| fs::read_link(link.path()).ok());
        links.filter(|link| link.to_string_lossy().contains("io_uring")).count()
    }

    #[test]
    fn threads_and_memory_are_there_with_the_smallest_list() {
        let test = "threads_and_memory_are_there_with_the_smallest_list";
        if std::env::var_os(DEED).is_none() {
            let ended = child(test, "threads");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        }
        inside(Needs::default(), || {
            // The C library asks for the call that is absent first.
            let sum = thread::spawn(|| vec![1_u64; 1 << 20].iter().sum::<u64>()).join().unwrap();
            assert_eq!(sum, 1 << 20);
        });
    }
}
