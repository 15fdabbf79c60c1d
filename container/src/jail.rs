//! What the pod gives up. Who serves others has no rights from the first moment of its thread; the
//! main thread prepares the machine, and gives up the rest before the guest's first instruction.

use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};
use std::{process, thread};

use jail::watch::{self, Walls};

use crate::status::Status;

pub use jail::watch::Rights;

/// So long a thread waits for a kernel that is short of something.
const PATIENCE: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(50);

/// Where the pod's resolvers are named. The file may be replaced at any time.
const RESOLV: &str = "/etc/resolv.conf";
/// How the host is, and the control group; zones, and who the resolvers are.
const READ: [&str; 4] = ["/proc", "/sys/fs/cgroup", "/etc", "/usr/share/zoneinfo"];

static WALLS: OnceLock<Walls> = OnceLock::new();

/// Says which folders are the pod's own: threads that start from now on reach no others.
pub fn build(own: &[&Path]) {
    let resolv = std::fs::canonicalize(RESOLV).ok();
    let resolv = resolv.and_then(|path| path.parent().map(Path::to_owned));
    let read = READ.map(PathBuf::from).into_iter().chain(resolv).collect();
    let own = own.iter().map(|path| path.to_path_buf()).collect();
    WALLS.get_or_init(|| Walls { read, own, ..Walls::default() });
}

/// The jail of a thread that serves. Without walls, as in tests, it is as free as its program.
pub fn serve() {
    if let Some(walls) = WALLS.get() {
        insist(|| walls.enter(Rights::empty(), &[]));
    }
}

/// The jail of a thread that reaches no file at all, from its first moment: it does not wait for
/// walls.
pub fn seclude() {
    insist(|| Walls::default().enter(Rights::empty(), &[]));
}

/// A thread that keeps its rights must not serve: the process ends, and its machine with it. The
/// kernel may be short of memory or descriptors for a moment, which is waited for. A host without
/// Landlock or seccomp is no mistake, the same for all threads, and the main thread says so.
#[expect(clippy::exit, reason = "no other thread could end the process with this status")]
fn insist(enter: impl Fn() -> anyhow::Result<Vec<String>>) {
    let end = Instant::now() + PATIENCE;
    while let Err(error) = enter() {
        if Instant::now() < end {
            thread::sleep(AGAIN);
            continue;
        }
        let name = thread::current().name().unwrap_or("?").to_owned();
        // The thread may be the one that writes the log.
        let line = format!("transom: thread `{name}` cannot give up its rights: {error:#}: end\n");
        io::stderr().write_all(line.as_bytes()).ok();
        process::exit(Status::Failed as i32);
    }
}

/// The jail of the main thread, which keeps what the end needs: these rights, and signals to
/// these processes.
///
/// # Errors
///
/// When the kernel refuses what it should not.
pub fn close(keep: Rights, children: &[u32]) -> anyhow::Result<()> {
    watch::hide()?;
    let Some(walls) = WALLS.get() else { return Ok(()) };
    let lacks = walls.enter(keep, children)?;
    if !lacks.is_empty() {
        tracing::warn!("the pod keeps more rights than it needs: {}", lacks.join("; "));
    }
    Ok(())
}

/// Gives up rights that were kept, for this thread and those that it starts.
///
/// # Errors
///
/// When the kernel refuses, which it should not.
pub fn give_up(rights: Rights) -> anyhow::Result<()> {
    watch::give_up(rights)
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

    use super::*;

    /// What the child of a test is to do.
    const DEED: &str = "TRANSOM_TEST_DEED";

    #[test]
    fn a_thread_that_cannot_enter_its_jail_serves_nobody() {
        let test = "jail::test::a_thread_that_cannot_enter_its_jail_serves_nobody";
        let Ok(deed) = std::env::var(DEED) else {
            for deed in ["serve", "seclude"] {
                let mut child = Command::new(std::env::current_exe().unwrap());
                child.args(["--exact", test, "--nocapture"]).env(DEED, deed);
                let ended = child.output().unwrap();
                let said = String::from_utf8_lossy(&ended.stderr);
                assert_eq!(ended.status.code(), Some(Status::Failed as i32), "{deed}: {said}");
                assert!(said.contains("thread `server` cannot give up its rights: "), "{said}");
            }
            return;
        };
        build(&[Path::new("/tmp")]);
        let limit = getrlimit(Resource::Nofile);
        // No descriptor is left: the kernel gives none for the rules.
        setrlimit(Resource::Nofile, Rlimit { current: Some(3), ..limit }).unwrap();
        let server = thread::Builder::new().name("server".into());
        let enter = if deed == "serve" { serve } else { seclude };
        let serves = server.spawn(enter).unwrap().join();
        unreachable!("it serves: {serves:?}");
    }
}
