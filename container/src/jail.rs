//! What the pod gives up. Who serves others has no rights from the first moment of its thread; the
//! main thread prepares the machine, and gives up the rest before the guest's first instruction.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use vmm::jail::watch::{self, Walls};

pub use vmm::jail::watch::Rights;

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
    enter(Rights::empty(), &[]);
}

/// The jail of a thread that reaches no file at all, from its first moment: it does not wait for
/// walls.
pub fn seclude() {
    // What could not be had is told once, by the main thread, for which it is the same.
    Walls::default().enter(Rights::empty(), &[]).ok();
}

/// The jail of the main thread, which keeps what the end needs: these rights, and signals to
/// these processes.
///
/// # Errors
///
/// When the kernel refuses what it should not.
pub fn close(keep: Rights, children: &[u32]) -> anyhow::Result<()> {
    watch::hide()?;
    let lacks = enter(keep, children);
    if !lacks.is_empty() {
        tracing::warn!("the pod keeps more rights than it needs: {}", lacks.join("; "));
    }
    Ok(())
}

fn enter(keep: Rights, children: &[u32]) -> Vec<String> {
    let Some(walls) = WALLS.get() else { return Vec::new() };
    // What could not be had is told once, by the main thread, for which it is the same.
    walls.enter(keep, children).unwrap_or_else(|error| vec![format!("{error:#}")])
}
