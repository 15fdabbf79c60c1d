//! The first jail of a process that waits for a machine of another one: it starts no program, looks
//! into no process, and changes neither the kernel nor a mount. It still opens files, devices and
//! sockets, which it does when the machine has arrived. Then it enters the whole jail.

use seccompiler::SeccompAction;

use super::config::{Config, Mode};
use super::filter::{self, Calls, bits, flag};
use super::kernel;

/// Calls that are refused.
const REFUSED: &[i64] = &[
    // Programs, and other processes.
    libc::SYS_execve,
    libc::SYS_execveat,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_pidfd_getfd,
    // Mounts and name spaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_setns,
    libc::SYS_open_by_handle_at,
    libc::SYS_mknod,
    libc::SYS_mknodat,
    // The kernel and the host.
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_syslog,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
];

/// The same kernel takes calls of the x32 ABI: their numbers have this bit, and some are others.
const X32: i64 = 0x4000_0000;
/// execve, ptrace, kexec_load, process_vm_readv, process_vm_writev, execveat.
const ONLY_X32: [i64; 6] = [520, 521, 528, 539, 540, 545];

/// Enters the first jail. A kernel without filters is reported when the machine has arrived.
pub fn enter(config: &Config) -> anyhow::Result<()> {
    let refusal = filter::refusal(config.seccomp).filter(|_| config.mode != Mode::Off);
    let Some(refusal) = refusal else { return Ok(()) };
    let mut refused: Calls = ONLY_X32.map(|call| (X32 | call, Vec::new())).into();
    // A filter does not see the flags of clone3. The C library uses `clone` instead.
    let mut absent = Calls::new();
    for abi in [0, X32] {
        refused.extend(REFUSED.iter().map(|call| (abi | call, Vec::new())));
        refused.insert(abi | libc::SYS_clone, bits(0, flag(libc::CLONE_THREAD), 0)?);
        absent.insert(abi | libc::SYS_clone3, Vec::new());
    }
    let programs = filter::compile(absent, refused, refusal, SeccompAction::Allow)?;
    kernel::end_on_refusal()?;
    if let Err(error) = filter::apply(&programs) {
        tracing::debug!("the first jail: {error:#}");
    }
    Ok(())
}

#[cfg(test)]
mod test {
    use std::fs::File;
    use std::net::TcpListener;
    use std::os::unix::process::CommandExt as _;
    use std::process::Command;
    use std::thread;

    use super::*;
    use crate::{Needs, Paths, STATUS};

    /// The environment variable with the action of a test's child process.
    const ACTION: &str = "TRANSOM_TEST_ACTION";

    fn act(action: &str) {
        enter(&Config::default()).unwrap();
        match action {
            "program" => drop(Command::new("/bin/true").exec()),
            "process" => drop(Command::new("/bin/true").status()),
            "root" => drop(std::os::unix::fs::chroot("/")),
            // A machine that has arrived does this.
            _ => {
                File::open("/proc/self/status").unwrap();
                TcpListener::bind("127.0.0.1:0").unwrap();
                thread::spawn(|| ()).join().unwrap();
                crate::enter(&Config::default(), Needs::default(), &Paths::default()).unwrap();
                thread::spawn(|| ()).join().unwrap();
            }
        }
    }

    #[test]
    fn a_process_that_waits_for_a_machine_starts_no_program_and_can_run_the_machine() {
        let test = "a_process_that_waits_for_a_machine_starts_no_program_and_can_run_the_machine";
        if let Ok(action) = std::env::var(ACTION) {
            // Another thread than that of the test's harness, which waits for it.
            thread::spawn(move || act(&action)).join().unwrap();
            return;
        }
        for (action, status) in [("program", 77), ("process", 77), ("root", 77), ("machine", 0)] {
            let mut command = Command::new(std::env::current_exe().unwrap());
            command.args(["--exact", &format!("arrival::test::{test}"), "--nocapture"]);
            let ended = command.env(ACTION, action).output().unwrap();
            let said = String::from_utf8_lossy(&ended.stderr);
            // The C library blocks all signals while it starts a process: there is no status.
            let is_status = ended.status.code().unwrap_or(STATUS.into()) == status;
            assert!(is_status, "{action}: {}: {said}", ended.status);
        }
    }
}
