//! Which system calls there are from now on: a list for all threads, since they share one memory
//! anyway, so that the smallest list would be the sum of all.
//!
//! A call is on the list with those of its arguments that are let through, as far as a filter can
//! see them: numbers, not what pointers point to. What a machine does not have is not on it: no
//! connections without passt, no rings of io_uring without a disk. The kernel remembers which calls
//! are allowed whatever their arguments, so that most of them cost nothing.

use std::collections::BTreeMap;

use anyhow::Context;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};

use super::words::Seccomp;

/// What a machine needs besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Needs {
    /// Rings for its disks.
    pub(super) rings: bool,
    /// To connect to Unix sockets again.
    pub(super) connect: bool,
    /// A network, or a tap.
    pub(super) network: bool,
}

/// Calls whatever their arguments.
pub(super) const PLAIN: &[i64] = &[
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
    libc::SYS_setsockopt,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendto,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
];

/// Calls of disks that have a ring.
const RINGS: &[i64] =
    &[libc::SYS_io_uring_setup, libc::SYS_io_uring_enter, libc::SYS_io_uring_register];

/// The kind and number of an ioctl; the rest of its code is the size of what it takes.
pub(super) const IOCTL: u64 = 0xffff;

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
pub(super) const FILES: &[u64] = &[
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

pub(super) const FCNTL: &[i32] = &[
    libc::F_DUPFD_CLOEXEC,
    libc::F_GETFD,
    libc::F_SETFD,
    libc::F_GETFL,
    libc::F_SETFL,
    libc::F_OFD_GETLK,
    libc::F_OFD_SETLK,
];

/// The list.
pub(super) type Calls = BTreeMap<i64, Vec<SeccompRule>>;

/// A rule about the lower half of an argument, in which all numbers that we look at lie.
pub(super) fn only(argument: u8, compare: SeccompCmpOp, value: u64) -> anyhow::Result<SeccompRule> {
    let condition = SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?;
    Ok(SeccompRule::new(vec![condition])?)
}

/// One of these values.
pub(super) fn one_of(argument: u8, values: &[u64]) -> anyhow::Result<Vec<SeccompRule>> {
    values.iter().map(|value| only(argument, SeccompCmpOp::Eq, *value)).collect()
}

/// These bits, of those that the mask has.
pub(super) fn bits(argument: u8, mask: u64, value: u64) -> anyhow::Result<Vec<SeccompRule>> {
    Ok(vec![only(argument, SeccompCmpOp::MaskedEq(mask), value)?])
}

/// A flag's bits, which no flag has the sign in.
pub(super) fn flag(bits: i32) -> u64 {
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
    let unix = [flag(libc::AF_UNIX)];
    // Both ends are ours: the runtime of the screen wakes itself so.
    calls.insert(libc::SYS_socketpair, one_of(0, &unix)?);
    if needs.connect {
        calls.insert(libc::SYS_socket, one_of(0, &unix)?);
        calls.insert(libc::SYS_connect, Vec::new());
    }
    // Without a disk that has them, they are not there either.
    calls.extend(RINGS.iter().map(|call| (*call, Vec::new())));
    Ok(calls)
}

/// What those who ask are told is not there, and which they do without.
fn absent(needs: Needs) -> Calls {
    let rings = if needs.rings { &[] } else { RINGS };
    [&[libc::SYS_clone3], rings].concat().into_iter().map(|call| (call, Vec::new())).collect()
}

/// The programs for the kernel, of which the strictest wins.
pub(super) fn programs(needs: Needs, mode: Seccomp) -> anyhow::Result<Vec<BpfProgram>> {
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
pub(super) fn apply(programs: &[BpfProgram]) -> anyhow::Result<()> {
    programs.iter().try_for_each(|program| apply_filter(program)).context("seccomp")
}

#[cfg(test)]
mod test {
    use std::process::{Command, Output};
    use std::thread;

    use rustix::net::{AddressFamily, SocketType};

    use super::super::kernel;
    use super::*;
    use crate::status::Status;

    /// What the child of a test is to do.
    const DEED: &str = "TRANSOM_TEST_DEED";

    /// Runs a test of this module again, in a process of its own.
    fn child(test: &str, deed: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", &format!("jail::filter::test::{test}"), "--nocapture"]);
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

    /// A call that is not allowed.
    type Deed = (&'static str, i64, fn());

    const FORBIDDEN: &[Deed] = &[
        ("socket", libc::SYS_socket, || {
            rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).ok();
        }),
        ("program", libc::SYS_execve, || {
            // The process that it would run in is one thing, and what it runs another.
            drop(std::os::unix::process::CommandExt::exec(&mut Command::new("/bin/true")));
        }),
        ("process", libc::SYS_clone, || {
            // Whichever call it is that the C library makes for it.
            Command::new("/bin/true").status().ok();
        }),
        ("rights", libc::SYS_setresuid, || {
            let id = rustix::thread::Uid::from_raw(1);
            rustix::thread::set_thread_res_uid(id, id, id).ok();
        }),
        ("ioctl", libc::SYS_ioctl, || {
            // TIOCSTI's neighbour: a terminal's foreground.
            rustix::termios::tcgetpgrp(rustix::stdio::stdin()).ok();
        }),
        ("signal", libc::SYS_kill, || {
            let first = rustix::process::Pid::from_raw(1).unwrap();
            rustix::process::test_kill_process(first).ok();
        }),
    ];

    #[test]
    fn what_is_not_on_the_list_ends_the_process_with_a_sentence() {
        let test = "what_is_not_on_the_list_ends_the_process_with_a_sentence";
        if let Ok(deed) = std::env::var(DEED) {
            let deed = FORBIDDEN.iter().find(|it| it.0 == deed).unwrap().2;
            inside(Needs { network: true, rings: true, connect: false }, deed);
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
            assert_eq!(ended.status.code(), Some(Status::Jail as i32), "{name}: {said}");
            let sentence = format!("the jail forbids system call {call} in thread `inmate`");
            assert!(said.contains(&sentence), "{name}: {said}");
        }
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
