//! The system calls that are allowed from now on: one list for all threads. They share their memory
//! anyway, so an attacker could use the lists of all threads.
//!
//! A call on the list is allowed with certain arguments, as far as a filter can see them: numbers,
//! but not memory behind pointers. Calls that a machine does not need are not on its list: no
//! connections without passt, no io_uring without a disk. Existing rings can be used, but no ring
//! can be created or changed in the jail, because a filter cannot see a ring's operations; those of
//! a disk's ring were restricted before. The kernel caches which calls are allowed with any
//! arguments, so most calls cost nothing.

use std::collections::BTreeMap;

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::config::Seccomp;

/// The needs of a machine that not every machine has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// To use the io_uring rings of its disks.
    pub rings: bool,
    /// To connect to Unix sockets again.
    pub connect: bool,
    pub network: bool,
}

/// Calls that are allowed with any arguments.
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
    // Files. Landlock limits which of them can be opened.
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
    // Existing sockets, and clients that connect to them.
    libc::SYS_accept4,
    libc::SYS_getsockname,
    libc::SYS_getpeername,
    libc::SYS_getsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
];

/// Options of an existing socket that may be set: level and name. Others could change the kind of
/// the socket, such as those of TCP Fast Open, with which sending data connects.
const OPTIONS: &[(i32, i32)] = &[
    (libc::SOL_SOCKET, libc::SO_KEEPALIVE),
    (libc::SOL_SOCKET, libc::SO_RCVTIMEO),
    (libc::SOL_SOCKET, libc::SO_SNDTIMEO),
    (libc::IPPROTO_TCP, libc::TCP_NODELAY),
    (libc::IPPROTO_TCP, libc::TCP_KEEPIDLE),
    (libc::IPPROTO_TCP, libc::TCP_KEEPINTVL),
    (libc::IPPROTO_TCP, libc::TCP_KEEPCNT),
];

/// Flags for sending. `MSG_FASTOPEN` is not among them: it connects a socket of the old network
/// namespace, to an address that no filter sees.
const SEND_FLAGS: i32 = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;

/// Calls that create rings of io_uring, and change them.
const RING_SETUP: [i64; 2] = [libc::SYS_io_uring_setup, libc::SYS_io_uring_register];
/// The call by which disks use their rings.
const RING_ENTER: i64 = libc::SYS_io_uring_enter;

/// Mask of the type and number of an ioctl. The rest of its code is the size of its argument, and
/// the direction.
pub(crate) const IOCTL: u64 = 0xffff;

/// The ioctls of a running machine, the most frequent one first.
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
    0xae7c, // GET_CLOCK
    0xae7b, // SET_CLOCK
    0xae89, // SET_MSRS
    0xaea4, // GET_XSAVE
    0xae8e, // GET_LAPIC
    0xae8f, // SET_LAPIC
    0xae98, // GET_MP_STATE
    0xae99, // SET_MP_STATE
    0xae9a, // NMI
    0xaeb7, // SMI
    0xaea5, // SET_XSAVE
    0xaea1, // GET_DEBUGREGS
    0xaea2, // SET_DEBUGREGS, SET_TSC_KHZ
    0xaea3, // GET_TSC_KHZ
    0xaea6, // GET_XCRS
    0xaea7, // SET_XCRS
    0xae71, // REINJECT_CONTROL
    0xaead, // KVMCLOCK_CTRL
    0xaebe, // GET_NESTED_STATE
    0xaebf, // SET_NESTED_STATE
    0xaee1, // SET_DEVICE_ATTR
    0xaee2, // GET_DEVICE_ATTR
];

/// Ioctls of terminals, and of all file descriptors.
pub(crate) const FILES: &[u64] = &[
    0x5401, // TCGETS
    0x5402, // TCSETS
    0x542a, // TCGETS2
    0x542b, // TCSETS2
    0x5413, // TIOCGWINSZ
    0x5421, // FIONBIO
    0x5451, // FIOCLEX
];

/// The ioctl by which the file of a snapshot shares blocks with the one before.
const CLONE_RANGE: u64 = 0x940d;

/// Ioctls of block devices.
const BLOCK: &[u64] = &[
    0x1268, // BLKSSZGET
    0x1272, // BLKGETSIZE64
    0x1277, // BLKDISCARD
    0x127b, // BLKPBSZGET
    0x127f, // BLKZEROOUT
];

/// Ioctls of USB devices of the host (usbfs), each on a device that was opened for this machine.
const USB: &[u64] = &[
    0x550a, // SUBMITURB
    0x550d, // REAPURBNDELAY
    0x550b, // DISCARDURB
    0x5504, // SETINTERFACE
    0x5505, // SETCONFIGURATION
    0x5510, // RELEASEINTERFACE
    0x5512, // IOCTL
    0x5514, // RESET
    0x5515, // CLEAR_HALT
    0x551b, // DISCONNECT_CLAIM
    0x551f, // GET_SPEED
];

/// Ioctls of taps and of vhost-net.
const NETWORK: &[u64] = &[
    0x54d0, // TUNSETOFFLOAD
    0x54d9, // TUNSETQUEUE
    0x54d5, // TUNATTACHFILTER
    0x54d6, // TUNDETACHFILTER
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

/// Mask of the type of a socket. The other bits are flags (`SOCK_TYPE_MASK`).
const SOCKET_TYPE: u64 = 0xf;

/// The allowed calls, each with its rules. A call without rules is allowed with any arguments.
pub(crate) type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// A rule for the lower 32 bits of an argument, which hold all values that are compared here.
pub(crate) fn only(argument: u8, compare: SeccompCmpOp, value: u64) -> anyhow::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// Like `only`, as a condition of a rule.
fn word(argument: u8, compare: SeccompCmpOp, value: i32) -> anyhow::Result<SeccompCondition> {
    Ok(SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, flag(value))?)
}

/// Allows a call whose pointer at this argument is null.
pub(crate) fn null(argument: u8) -> anyhow::Result<Vec<SeccompRule>> {
    let null = SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(vec![SeccompRule::new(vec![null])?])
}

pub(crate) fn one_of(argument: u8, values: &[u64]) -> anyhow::Result<Vec<SeccompRule>> {
    values.iter().map(|value| only(argument, SeccompCmpOp::Eq, *value)).collect()
}

pub(crate) fn bits(argument: u8, mask: u64, value: u64) -> anyhow::Result<Vec<SeccompRule>> {
    Ok(vec![only(argument, SeccompCmpOp::MaskedEq(mask), value)?])
}

/// No flag is negative.
pub(crate) fn flag(bits: i32) -> u64 {
    u64::from(bits.unsigned_abs())
}

/// Allows these calls with any arguments, memory that never becomes executable, threads, and
/// signals to them.
pub(crate) fn in_this_process<'a>(calls: impl Iterator<Item = &'a i64>) -> anyhow::Result<Calls> {
    let mut calls: Calls = calls.map(|call| (*call, Vec::new())).collect();
    calls.insert(libc::SYS_mmap, bits(2, flag(libc::PROT_EXEC), 0)?);
    calls.insert(libc::SYS_mprotect, bits(2, flag(libc::PROT_EXEC), 0)?);
    // Threads, but no processes. seccomp cannot see the flags of clone3, so another filter makes it
    // fail, and the C library uses clone.
    let thread = flag(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND);
    calls.insert(libc::SYS_clone, bits(0, thread, thread)?);
    calls.insert(libc::SYS_clone3, Vec::new());
    calls.insert(libc::SYS_tgkill, one_of(0, &[std::process::id().into()])?);
    Ok(calls)
}

fn allowed(needs: Needs) -> anyhow::Result<Calls> {
    let mut calls = in_this_process(PLAIN.iter())?;
    // Signals, only to this process.
    calls.insert(libc::SYS_kill, one_of(0, &[std::process::id().into()])?);
    let names = [libc::PR_SET_NAME, libc::PR_GET_NAME].map(flag);
    calls.insert(libc::SYS_prctl, one_of(0, &names)?);
    let commands: Vec<_> = FCNTL.iter().map(|command| flag(*command)).collect();
    calls.insert(libc::SYS_fcntl, one_of(1, &commands)?);
    // Only for this process: limits can be read, but not set.
    calls.insert(libc::SYS_prlimit64, null(2)?);
    // A thread may give way to the others.
    let this_thread = [word(0, SeccompCmpOp::Eq, 0)?, word(1, SeccompCmpOp::Eq, 0)?];
    calls.insert(libc::SYS_setpriority, vec![SeccompRule::new(this_thread.to_vec())?]);
    let network = if needs.network { NETWORK } else { &[] };
    let ioctls = [KVM, FILES, &[CLONE_RANGE], BLOCK, USB, network].concat();
    let ioctls = ioctls.iter().map(|code| only(1, SeccompCmpOp::MaskedEq(IOCTL), *code));
    calls.insert(libc::SYS_ioctl, ioctls.collect::<anyhow::Result<_>>()?);
    // Both ends belong to this process: the async runtime wakes itself with a pair. A datagram
    // socket could send to any socket that has a path.
    calls.insert(libc::SYS_socketpair, unix_streams()?);
    if needs.connect {
        calls.insert(libc::SYS_socket, unix_streams()?);
        // Landlock forbids TCP (Linux 6.7): a filter cannot see the address.
        calls.insert(libc::SYS_connect, Vec::new());
    }
    // A filter cannot see the address of a message, but stream sockets ignore it.
    calls.insert(libc::SYS_sendto, to_peer(SEND_FLAGS)?);
    calls.insert(libc::SYS_sendmsg, vec![SeccompRule::new(vec![only_flags(2, SEND_FLAGS)?])?]);
    calls.insert(libc::SYS_setsockopt, socket_options()?);
    // Only of an open file: its path is null.
    calls.insert(libc::SYS_utimensat, null(1)?);
    // A listener that is shut down for reading stops listening, and could then connect.
    calls.insert(libc::SYS_shutdown, one_of(1, &[flag(libc::SHUT_WR)])?);
    // Calls that `absent` makes fail must pass this filter.
    calls.extend(RING_SETUP.into_iter().chain([RING_ENTER]).map(|call| (call, Vec::new())));
    Ok(calls)
}

/// A condition: no other flags than these are set.
fn only_flags(argument: u8, flags: i32) -> anyhow::Result<SeccompCondition> {
    let others = u64::from(!flags.unsigned_abs());
    word(argument, SeccompCmpOp::MaskedEq(others), 0)
}

/// Allows sending to the peer of a connected socket, not to another address.
pub(crate) fn to_peer(flags: i32) -> anyhow::Result<Vec<SeccompRule>> {
    let no_address = SeccompCondition::new(4, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0)?;
    Ok(vec![SeccompRule::new(vec![only_flags(3, flags)?, no_address])?])
}

pub(crate) fn socket_options() -> anyhow::Result<Vec<SeccompRule>> {
    let rule = |(level, name): &(i32, i32)| {
        let [level, name] =
            [(1, *level), (2, *name)].map(|(at, it)| word(at, SeccompCmpOp::Eq, it));
        Ok(SeccompRule::new(vec![level?, name?])?)
    };
    OPTIONS.iter().map(rule).collect()
}

/// Allows Unix stream sockets, with any flags.
fn unix_streams() -> anyhow::Result<Vec<SeccompRule>> {
    let unix = word(0, SeccompCmpOp::Eq, libc::AF_UNIX)?;
    let stream = word(1, SeccompCmpOp::MaskedEq(SOCKET_TYPE), libc::SOCK_STREAM)?;
    Ok(vec![SeccompRule::new(vec![unix, stream])?])
}

/// Calls that fail with ENOSYS. Their callers have a fallback.
fn absent(needs: Needs) -> Calls {
    let unused = (!needs.rings).then_some(RING_ENTER);
    let all = [libc::SYS_clone3].into_iter().chain(RING_SETUP).chain(unused);
    all.map(|call| (call, Vec::new())).collect()
}

/// The filter programs. The strictest result of all programs wins.
pub(crate) fn programs(needs: Needs, mode: Seccomp) -> anyhow::Result<Vec<BpfProgram>> {
    let Some(refusal) = refusal(mode) else { return Ok(Vec::new()) };
    Ok(compile(absent(needs), allowed(needs)?, SeccompAction::Allow, refusal)?.into())
}

/// The answer to a call that is refused, if there is a filter.
pub(crate) fn refusal(mode: Seccomp) -> Option<SeccompAction> {
    match mode {
        Seccomp::Off => None,
        Seccomp::Log => Some(SeccompAction::Log),
        Seccomp::On => Some(SeccompAction::Trap),
    }
}

/// The programs that make the calls of `absent` fail with ENOSYS, and that answer those of `list`
/// with `listed` and all others with `otherwise`.
pub(crate) fn compile(
    absent: Calls,
    list: Calls,
    listed: SeccompAction,
    otherwise: SeccompAction,
) -> anyhow::Result<[BpfProgram; 2]> {
    let arch = TargetArch::x86_64;
    let enosys = SeccompAction::Errno(libc::ENOSYS.unsigned_abs());
    let absent = SeccompFilter::new(absent, SeccompAction::Allow, enosys, arch)?;
    let list = SeccompFilter::new(list, otherwise, listed, arch)?;
    // The list may forbid the call that applies further programs, so it comes last.
    Ok([absent.try_into()?, list.try_into()?])
}

/// Applies the programs to this thread and the threads that it starts. Fails if this kernel has no
/// seccomp filters, or if a container engine forbids them.
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

    /// The environment variable with the action of a test's child process.
    const ACTION: &str = "TRANSOM_TEST_ACTION";

    /// Runs a test of this module again, in a process of its own.
    fn child(test: &str, action: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("filter::test::{test}"), "--nocapture"]);
        command.env(ACTION, action).output().unwrap()
    }

    /// Enters the jail like a machine, and runs an action.
    fn inside(needs: Needs, action: impl FnOnce() + Send) {
        thread::scope(|scope| {
            let inmate = thread::Builder::new().name("inmate".into());
            let body = || {
                kernel::end_on_refusal().unwrap();
                apply(&programs(needs, Seccomp::On).unwrap()).unwrap();
                action();
            };
            inmate.spawn_scoped(scope, body).unwrap().join().unwrap();
        });
    }

    /// A call that is not allowed: name, system call and action, which gets a listener made before.
    type Action = (&'static str, i64, fn(&TcpListener));

    /// A flag that rustix does not have.
    const FAST_OPEN: SendFlags = SendFlags::from_bits_retain(libc::MSG_FASTOPEN.unsigned_abs());

    const FORBIDDEN: &[Action] = &[
        ("socket", libc::SYS_socket, |_| {
            rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok();
        }),
        ("datagrams", libc::SYS_socketpair, |_| {
            std::os::unix::net::UnixDatagram::pair().ok();
        }),
        ("program", libc::SYS_execve, |_| {
            // Executing a program, without a new process.
            drop(std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true")));
        }),
        ("process", libc::SYS_clone, |_| {
            // The call that the C library uses for a new process.
            Command::new("/bin/true").status().ok();
        }),
        ("rights", libc::SYS_setresuid, |_| {
            let id = rustix::thread::Uid::from_raw(1);
            rustix::thread::set_thread_res_uid(id, id, id).ok();
        }),
        ("ioctl", libc::SYS_ioctl, |_| {
            // The ioctl next to TIOCSTI: a terminal's foreground process.
            rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
        }),
        ("priority", libc::SYS_setpriority, |_| {
            rustix::process::setpriority_pgrp(None, 5).ok();
        }),
        ("signal", libc::SYS_kill, |_| {
            let first = rustix::process::Pid::from_raw(1).unwrap();
            rustix::process::test_kill_process(first).ok();
        }),
        // A listener that is shut down becomes an ordinary socket of the old network namespace, and
        // the first bytes sent could connect it.
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
            // rustix has no TCP_FASTOPEN_CONNECT. This option is not allowed either.
            sockopt::set_tcp_quickack(listener, true).ok();
        }),
        ("option", libc::SYS_setsockopt, |listener| {
            // The number of TCP_KEEPCNT, at the socket level.
            sockopt::set_socket_broadcast(listener, true).ok();
        }),
    ];

    #[test]
    fn a_forbidden_system_call_ends_the_process_with_a_message() {
        let test = "a_forbidden_system_call_ends_the_process_with_a_message";
        if let Ok(action) = std::env::var(ACTION) {
            let action = FORBIDDEN.iter().find(|it| it.0 == action).unwrap().2;
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            inside(Needs { network: true, rings: true, connect: false }, || action(&listener));
            return;
        }
        for (name, call, _) in FORBIDDEN {
            let ended = child(test, name);
            let said = String::from_utf8_lossy(&ended.stderr).into_owned();
            if *name == "process" {
                // The C library blocks all signals meanwhile, so there is no message.
                assert!(!ended.status.success(), "{name}: {said}");
                continue;
            }
            assert_eq!(ended.status.code(), Some(STATUS.into()), "{name}: {said}");
            let sentence = format!("the jail forbids system call {call} in thread `inmate`");
            assert!(said.contains(&sentence), "{name}: {said}");
        }
    }

    #[test]
    fn rings_cannot_be_created_and_sockets_reach_only_their_peer() {
        let test = "rings_cannot_be_created_and_sockets_reach_only_their_peer";
        if std::env::var_os(ACTION).is_none() {
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
            // A disk that is opened later works without a ring, and only logs it.
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

    fn rings() -> usize {
        let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let links = links.filter_map(|link| fs::read_link(link.path()).ok());
        links.filter(|link| link.to_string_lossy().contains("io_uring")).count()
    }

    #[test]
    fn threads_and_memory_work_with_the_smallest_list() {
        let test = "threads_and_memory_work_with_the_smallest_list";
        if std::env::var_os(ACTION).is_none() {
            let ended = child(test, "threads");
            assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stderr));
            return;
        }
        inside(Needs::default(), || {
            // The C library tries clone3 first, which is absent.
            let sum = thread::spawn(|| vec![1_u64; 1 << 20].iter().sum::<u64>()).join().unwrap();
            assert_eq!(sum, 1 << 20);
        });
    }
}
