//! Drops the pod's rights. Threads that serve clients have no rights from their first moment. The
//! main thread prepares the machine, and drops its other rights before the guest's first
//! instruction.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{process, thread};

use host::usb::NODES;
use jail::watch::{self, FileAccess};

use crate::status::Status;

pub use jail::watch::Capabilities;

/// How long a thread retries while the kernel is short of memory or descriptors.
const RETRY_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_INTERVAL: Duration = Duration::from_millis(50);

/// Names the pod's resolvers. It may be replaced at any time.
const RESOLV: &str = "/etc/resolv.conf";
/// Readable folders: the host's state, the control group, the resolvers and the time zones.
const READ: [&str; 4] = ["/proc", "/sys/fs/cgroup", "/etc", "/usr/share/zoneinfo"];

static FILES: OnceLock<FileAccess> = OnceLock::new();

/// Sets the folders that belong to the pod. Threads that start later can reach no others.
pub fn build(own: &[&Path]) {
    let resolv = std::fs::canonicalize(RESOLV).ok();
    let resolv = resolv.and_then(|path| path.parent().map(Path::to_owned));
    let read = READ.map(PathBuf::from).into_iter().chain(resolv).collect();
    let own = own.iter().map(|path| path.to_path_buf()).collect();
    FILES.get_or_init(|| FileAccess { read, own, ..FileAccess::default() });
}

/// Jails a thread that serves clients. Does nothing before [`build`] has been called, as in tests.
pub fn serve() {
    if let Some(files) = FILES.get() {
        enter_or_exit(|| files.enter(Capabilities::empty(), &[]));
    }
}

/// Jails a thread that writes to the volume, which may belong to another user.
pub fn serve_volume() {
    if let Some(files) = FILES.get() {
        enter_or_exit(|| files.enter(Capabilities::DAC_OVERRIDE, &[]));
    }
}

/// Jails the thread that opens USB devices of the host.
pub fn open_usb() {
    if FILES.get().is_some() {
        let files = FileAccess {
            read: ["/sys/bus/usb/devices", "/sys/devices"].map(PathBuf::from).into(),
            written: vec![NODES.into()],
            ..FileAccess::default()
        };
        enter_or_exit(|| files.enter(Capabilities::empty(), &[]));
    }
}

/// Jails a thread that needs no files. It works without [`build`].
pub fn seclude() {
    enter_or_exit(|| FileAccess::default().enter(Capabilities::empty(), &[]));
}

/// Ends the process, and the machine with it, if a thread cannot drop its rights: such a thread
/// must not serve. The kernel may be short of memory or descriptors for a moment, so this retries
/// for a while. A host without Landlock or seccomp is not an error. It is the same for all threads,
/// and the main thread reports it.
#[expect(clippy::exit, reason = "no other thread could end the process with this status")]
fn enter_or_exit(enter: impl Fn() -> anyhow::Result<Vec<String>>) {
    let end = Instant::now() + RETRY_TIMEOUT;
    while let Err(error) = enter() {
        if Instant::now() < end {
            thread::sleep(RETRY_INTERVAL);
            continue;
        }
        let name = thread::current().name().unwrap_or("?").to_owned();
        // The thread may be the one that writes the log.
        let line = format!("transom: thread `{name}` cannot give up its rights: {error:#}: end\n");
        io::stderr().write_all(line.as_bytes()).ok();
        process::exit(Status::Failed as i32);
    }
}

/// Jails the main thread. It keeps the rights that the shutdown needs, and may send signals to
/// these processes.
pub fn close(keep: Capabilities, children: &[u32]) -> anyhow::Result<()> {
    watch::protect_memory()?;
    let Some(files) = FILES.get() else { return Ok(()) };
    let lacks = files.enter(keep, children)?;
    if !lacks.is_empty() {
        tracing::warn!("the pod keeps more rights than it needs: {}", lacks.join("; "));
    }
    Ok(())
}

/// Drops rights that [`close`] kept, for this thread and for those that it starts.
pub fn drop_capabilities(capabilities: Capabilities) -> anyhow::Result<()> {
    watch::drop_capabilities(capabilities)
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// Tells the child process of a test which function to call.
    const FUNCTION: &str = "TRANSOM_TEST_DEED";

    #[test]
    fn a_thread_that_cannot_enter_its_jail_does_not_serve() {
        let test = "jail::test::a_thread_that_cannot_enter_its_jail_does_not_serve";
        let Ok(deed) = std::env::var(FUNCTION) else {
            for deed in ["serve", "seclude"] {
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", test, "--nocapture"]).env(FUNCTION, deed);
                let ended = child.output().unwrap();
                let said = String::from_utf8_lossy(&ended.stderr);
                assert_eq!(ended.status.code(), Some(Status::Failed as i32), "{deed}: {said}");
                assert!(said.contains("thread `server` cannot give up its rights: "), "{said}");
            }
            return;
        };
        build(&[Path::new("/tmp")]);
        let limit = getrlimit(Resource::Nofile);
        // No descriptor is left, so that the kernel cannot create the rule set.
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
        let server = thread::Builder::new().name("server".into());
        let enter = if deed == "serve" { serve } else { seclude };
        let serves = server.spawn(enter).unwrap().join();
        unreachable!("it serves: {serves:?}");
    }
}
