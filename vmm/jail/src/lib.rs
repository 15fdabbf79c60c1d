//! The jail: the privileges that this process gives up once its files and sockets are open, before
//! the guest's first instruction.
//!
//! A guest that breaks out of a device controls this process and gets its privileges, so they
//! should be few. `user` changes the user and drops capabilities, `paths` limits the files that can
//! be opened (Landlock), `filter` limits the system calls (seccomp), and `kernel` leaves the
//! network namespace and prints the message for a forbidden call. All of this applies to one thread
//! and the threads that it starts, so it is done while there is only one. `watch` is the jail of a
//! process that supervises a machine from outside, `server` that of one that serves folders, and
//! `arrival` the first jail of a process that waits for a machine.
//!
//! No restriction is silently missing. Each one that this host does not support appears in the log
//! and in `vmm ctl status`, and ends the process with `--jail must`.

pub mod arrival;
mod config;
mod filter;
mod kernel;
mod paths;
pub mod server;
mod user;
pub mod watch;

use std::io::ErrorKind;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{anyhow, bail};
use rustix::process::{getgid, getuid};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

pub use self::config::{Config, Folders, Landlock, Mode, Seccomp, User};
pub use self::filter::Needs;
pub use self::paths::{PathAccess, Paths};

/// Time for a thread to disappear from /proc after it has ended.
const THREAD_EXIT_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug, Default)]
pub struct Restrictions {
    mode: Mode,
    user: u32,
    group: u32,
    /// Whether the process has an empty network namespace of its own.
    network: bool,
    /// Whether connecting to Unix sockets is still allowed.
    connects: bool,
    landlock: Option<paths::Enforced>,
    files: bool,
    seccomp: Seccomp,
    capabilities: bool,
    /// Restrictions that could not be applied, each with the reason.
    lacks: Vec<String>,
}

impl Restrictions {
    /// Records the user and group: the calls are forbidden later.
    fn record_user(&mut self) {
        (self.user, self.group) = (getuid().as_raw(), getgid().as_raw());
    }

    /// The network that new sockets would have, as shown by `vmm ctl status`.
    fn network(&self) -> &'static str {
        match (self.network, self.mode, self.seccomp) {
            (true, ..) => "none",
            (false, Mode::Off, _) | (.., Seccomp::Off | Seccomp::Log) => "as it was",
            (false, _, Seccomp::On) if self.connects => "unix sockets",
            (false, _, Seccomp::On) => "no new sockets",
        }
    }

    /// The state of the jail, for `vmm ctl status`.
    pub fn status(&self) -> Value {
        let on = self.mode != Mode::Off;
        let capabilities = match (on, self.capabilities) {
            (false, _) => "as they were",
            (true, true) => "dac_override",
            (true, false) => "none",
        };
        let landlock = self
            .landlock
            .map(|it| json!({ "abi": it.abi, "whole": it.whole, "files": self.files }));
        json!({
            "mode": self.mode,
            "user": self.user,
            "group": self.group,
            "capabilities": capabilities,
            "network": self.network(),
            "landlock": landlock,
            "seccomp": if on { self.seccomp } else { Seccomp::Off },
            "lacks": self.lacks,
        })
    }

    /// Adds an explanation to an error, if the jail may be the reason that a file cannot be opened.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let refused = |cause: &(dyn std::error::Error + 'static)| {
            let cause = cause.downcast_ref::<std::io::Error>();
            cause.is_some_and(|it| it.kind() == ErrorKind::PermissionDenied)
        };
        if !error.chain().any(refused) {
            return error;
        }
        match (self.files, self.mode) {
            (true, _) => anyhow!("{error:#}: {ONLY_FOLDERS}"),
            (false, Mode::Auto) if self.user == 0 => anyhow!(
                "{error:#}: in its jail root has no capabilities, and can open only files that \
                 root or everybody may open: give the file to root, or start the machine as its \
                 owner"
            ),
            _ => error,
        }
    }
}

/// The end of an error about a file that the jail may hide. A pod says its own way out instead.
pub const ONLY_FOLDERS: &str = "in its jail the machine can open only files in the folders of its \
                                disks and media, and in those of --jail folders=PATH";

/// The exit status after a system call that the jail forbids.
pub const STATUS: u8 = 77;

/// Enters the jail. The machine must be built and switched off. With `--jail must`, fails if this
/// host does not support a restriction.
pub fn enter(config: &Config, needs: Needs, paths: &Paths) -> anyhow::Result<Restrictions> {
    if config.mode == Mode::Off {
        let mut jail = Restrictions { mode: Mode::Off, ..Restrictions::default() };
        jail.record_user();
        return Ok(jail);
    }
    let mut jail =
        Restrictions { mode: config.mode, seccomp: config.seccomp, ..Restrictions::default() };
    jail.files = config.mode != Mode::Auto && config.landlock == Landlock::On;
    let threads = threads();
    if threads > 1 {
        jail.lacks.push(format!("{} threads are not restricted: please report it", threads - 1));
    }
    jail.connects = needs.connect;
    let programs = filter::programs(needs, config.seccomp)?;
    let rules = paths.rules(jail.files)?;
    match kernel::leave_network() {
        Ok(()) => jail.network = true,
        // Without the words "os error", which tools take for a broken container.
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            let why = "the network namespace cannot be left: that needs the capability SYS_ADMIN";
            jail.lacks.push(why.to_owned());
        }
        Err(error) => jail.lacks.push(format!("the network namespace cannot be left: {error}")),
    }
    drop_privileges(config, needs, &mut jail)?;
    // Another process that wants the same disk finds its user through our open files, which would
    // then be visible only to root.
    if config.mode != Mode::Auto && !config.debug {
        user::protect_memory()?;
    }
    if config.landlock == Landlock::On {
        match paths::restrict(rules) {
            Ok(enforced) => jail.landlock = Some(enforced),
            Err(error) => jail.lacks.push(format!("{error:#}")),
        }
    }
    kernel::end_on_refusal()?;
    jail.record_user();
    if let Err(error) = filter::apply(&programs) {
        jail.seccomp = Seccomp::Off;
        jail.lacks.push(format!("{error:#}"));
    }
    report(config, &jail)?;
    Ok(jail)
}

/// The number of threads: the kernel applies most restrictions to the calling thread only. Waits a
/// moment for threads that have ended but are still listed.
fn threads() -> usize {
    let end = Instant::now() + THREAD_EXIT_TIMEOUT;
    loop {
        let count = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
        if count <= 1 || Instant::now() >= end {
            return count;
        }
        thread::sleep(Duration::from_micros(100));
    }
}

fn drop_privileges(config: &Config, needs: Needs, jail: &mut Restrictions) -> anyhow::Result<()> {
    let root = getuid().is_root();
    // A passt that is started again runs as another user, who owns its socket.
    let keep = if config.mode == Mode::Auto && config.user.is_none() && root && needs.connect {
        jail.capabilities = true;
        CapabilitySet::DAC_OVERRIDE
    } else {
        CapabilitySet::empty()
    };
    user::prevent_regaining(keep)?;
    match config.user {
        Some(user) => {
            if let Err(error) = user::change(user) {
                jail.lacks.push(format!("{error:#}"));
            }
        }
        None if root && config.mode != Mode::Auto => {
            jail.lacks.push("the process stays root: set user=UID:GID".into());
        }
        None => {}
    }
    user::drop_capabilities(keep)
}

/// Reports the restrictions that could not be applied: as an error with `--jail must`, otherwise in
/// the log.
fn report(config: &Config, jail: &Restrictions) -> anyhow::Result<()> {
    let lacks = jail.lacks.join("; ");
    // Without new sockets, the network namespace is only a second line of defense, and few
    // containers allow both. Do not warn if only this is missing.
    let only_network = jail.lacks.len() == 1 && !jail.network && jail.seccomp == Seccomp::On;
    match config.mode {
        Mode::Must if !lacks.is_empty() => bail!("--jail must: {lacks}"),
        Mode::On if only_network => tracing::info!("jail: {lacks}; seccomp refuses new sockets"),
        Mode::On if !lacks.is_empty() => tracing::warn!("jail: {lacks}"),
        _ if !lacks.is_empty() => tracing::debug!("jail: {lacks}"),
        _ => {}
    }
    tracing::debug!("jail: {}", jail.status());
    Ok(())
}
