//! The jail: what this process gives up once its files and sockets are open, before the guest's
//! first instruction.
//!
//! A guest that breaks out of a device has this process' memory, and then what the process may do:
//! so it may do little. `user` is who it is and what it may, `paths` the files that it may open
//! (Landlock), `filter` its system calls (seccomp), and `kernel` the network that it leaves and the
//! line that a refused call ends with. All of it holds for one thread and those that it starts, so
//! it is done while there is only one. `watch` is the jail of who looks after a machine from
//! outside.
//!
//! Nothing of it is silently missing: what this host does not let us give up is in a line, in
//! `vmm ctl status`, and the end with `--jail must`.

mod filter;
mod kernel;
mod paths;
mod user;
pub mod watch;
mod words;

use std::io::ErrorKind;
use std::time::{Duration, Instant};
use std::{fs, thread};

use anyhow::{anyhow, bail};
use rustix::process::{getgid, getuid};
use rustix::thread::CapabilitySet;
use serde_json::{Value, json};

pub use self::filter::Needs;
pub use self::paths::{Paths, Use};
pub use self::words::{Config, Folders, Landlock, Mode, Seccomp, User};

/// How long a thread takes to be gone after it has ended.
const LEAVING: Duration = Duration::from_secs(1);

/// What holds.
#[derive(Debug, Default)]
pub struct Held {
    mode: Mode,
    /// Who we are now.
    user: u32,
    group: u32,
    /// Whether the network is one of our own that has nothing.
    network: bool,
    /// Whether Unix sockets may be connected all the same.
    connects: bool,
    landlock: Option<paths::Kept>,
    files: bool,
    seccomp: Seccomp,
    capabilities: bool,
    /// What could not be had, each with the reason.
    lacks: Vec<String>,
}

impl Held {
    /// Looks who we are: it cannot be asked later.
    fn who(&mut self) {
        (self.user, self.group) = (getuid().as_raw(), getgid().as_raw());
    }

    /// The network that new sockets would have.
    fn reach(&self) -> &'static str {
        match (self.network, self.mode, self.seccomp) {
            (true, ..) => "none",
            (false, Mode::Off, _) | (.., Seccomp::Off | Seccomp::Log) => "as it was",
            (false, _, Seccomp::On) if self.connects => "unix sockets",
            (false, _, Seccomp::On) => "no new sockets",
        }
    }

    /// For `vmm ctl status`.
    pub fn status(&self) -> Value {
        let on = self.mode != Mode::Off;
        let capabilities = match (on, self.capabilities) {
            (false, _) => "as they were",
            (true, true) => "dac_override",
            (true, false) => "none",
        };
        let landlock = self
            .landlock
            .map(|kept| json!({ "abi": kept.abi, "whole": kept.whole, "files": self.files }));
        json!({
            "mode": self.mode,
            "user": self.user,
            "group": self.group,
            "capabilities": capabilities,
            "network": self.reach(),
            "landlock": landlock,
            "seccomp": if on { self.seccomp } else { Seccomp::Off },
            "lacks": self.lacks,
        })
    }

    /// What a file that cannot be opened has to do with the jail.
    pub fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let refused = |cause: &(dyn std::error::Error + 'static)| {
            let cause = cause.downcast_ref::<std::io::Error>();
            cause.is_some_and(|it| it.kind() == ErrorKind::PermissionDenied)
        };
        if !error.chain().any(refused) {
            return error;
        }
        match (self.files, self.mode) {
            (true, _) => anyhow!(
                "{error:#}: in its jail the machine opens what lies beside its disks and media, \
                 and in the folders of --jail folders=PATH"
            ),
            (false, Mode::Auto) if self.user == 0 => anyhow!(
                "{error:#}: in its jail root has no capabilities, and opens what root owns or all \
                 may open: give the file to root, or start the machine as its owner"
            ),
            _ => error,
        }
    }
}

/// The exit status of a process that made a system call which its jail forbids.
pub const STATUS: u8 = 77;

/// Enters the jail of a machine that is built and switched off.
///
/// # Errors
///
/// With `--jail must`, what this host does not let us give up; else what the kernel refuses
/// although it should not.
pub fn enter(config: &Config, needs: Needs, paths: &Paths) -> anyhow::Result<Held> {
    if config.mode == Mode::Off {
        let mut held = Held { mode: Mode::Off, ..Held::default() };
        held.who();
        return Ok(held);
    }
    let mut held = Held { mode: config.mode, seccomp: config.seccomp, ..Held::default() };
    held.files = config.mode != Mode::Auto && config.landlock == Landlock::On;
    let threads = threads();
    if threads > 1 {
        held.lacks.push(format!("{} threads stay outside: please report it", threads - 1));
    }
    held.connects = needs.connect;
    let programs = filter::programs(needs, config.seccomp)?;
    let rules = paths.rules(held.files)?;
    match kernel::leave_network() {
        Ok(()) => held.network = true,
        Err(error) => held.lacks.push(format!("the network namespace stays: {error}")),
    }
    become_nobody(config, needs, &mut held)?;
    // Another start tells who has a disk by our open files, which only root sees then.
    if config.mode != Mode::Auto && !config.debug {
        user::hide()?;
    }
    if config.landlock == Landlock::On {
        match paths::close(rules) {
            Ok(kept) => held.landlock = Some(kept),
            Err(error) => held.lacks.push(format!("{error:#}")),
        }
    }
    kernel::end_on_refusal()?;
    held.who();
    if let Err(error) = filter::apply(&programs) {
        held.seccomp = Seccomp::Off;
        held.lacks.push(format!("{error:#}"));
    }
    tell(config, &held)?;
    Ok(held)
}

/// How many threads there are: the kernel does most of this for the calling one alone. One that
/// has ended may still be leaving.
fn threads() -> usize {
    let end = Instant::now() + LEAVING;
    loop {
        let count = fs::read_dir("/proc/self/task").map_or(1, Iterator::count);
        if count <= 1 || Instant::now() >= end {
            return count;
        }
        thread::sleep(Duration::from_micros(100));
    }
}

/// Gives up the user and all rights, as far as the configuration says.
fn become_nobody(config: &Config, needs: Needs, held: &mut Held) -> anyhow::Result<()> {
    let root = getuid().is_root();
    // A passt that is started again is another user, and so is its socket.
    let keep = if config.mode == Mode::Auto && config.user.is_none() && root && needs.connect {
        held.capabilities = true;
        CapabilitySet::DAC_OVERRIDE
    } else {
        CapabilitySet::empty()
    };
    user::close_ways_back(keep)?;
    match config.user {
        Some(user) => {
            if let Err(error) = user::change(user) {
                held.lacks.push(format!("{error:#}"));
            }
        }
        None if root && config.mode != Mode::Auto => {
            held.lacks.push("it stays root: say user=UID:GID".into());
        }
        None => {}
    }
    user::drop_capabilities(keep)
}

/// What could not be had, in a line: to insist on it is an error.
fn tell(config: &Config, held: &Held) -> anyhow::Result<()> {
    let lacks = held.lacks.join("; ");
    // Where nobody can open a socket, its network namespace is the second of two walls: few
    // containers may have both.
    let second = held.lacks.len() == 1 && !held.network && held.seccomp == Seccomp::On;
    match config.mode {
        Mode::Must if !lacks.is_empty() => bail!("--jail must: {lacks}"),
        Mode::On if second => tracing::info!("jail: {lacks}; seccomp refuses new sockets"),
        Mode::On if !lacks.is_empty() => tracing::warn!("jail: {lacks}"),
        _ if !lacks.is_empty() => tracing::debug!("jail: {lacks}"),
        _ => {}
    }
    tracing::debug!("jail: {}", held.status());
    Ok(())
}
