//! A tap in a network namespace of its own, for one benchmark: nothing of it is seen outside.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// What the tap is called in there, and this host's address on it.
pub const NAME: &str = "bench0";
/// The host's address.
pub const HOST: &str = "10.98.76.1";

/// The namespace; it goes with this value.
pub struct Tap {
    space: String,
}

impl Tap {
    /// Makes it, which needs root.
    ///
    /// # Errors
    ///
    /// When that cannot be done.
    pub fn new() -> Result<Self> {
        let tap = Self { space: format!("transom-bench-{}", std::process::id()) };
        ip(&format!("netns add {}", tap.space)).context("a network namespace, which needs root")?;
        for words in [
            format!("tuntap add {NAME} mode tap"),
            format!("addr add {HOST}/24 dev {NAME}"),
            format!("link set {NAME} up"),
        ] {
            ip(&format!("-n {} {words}", tap.space))?;
        }
        Ok(tap)
    }

    /// The same command, with the tap.
    pub fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        // It becomes the program, so that the process is the program's.
        inside.args(["netns", "exec", &self.space]).arg(command.get_program());
        inside.args(command.get_args());
        for (key, value) in command.get_envs() {
            inside.env(key, value.unwrap_or(OsStr::new("")));
        }
        inside
    }
}

impl Drop for Tap {
    fn drop(&mut self) {
        ip(&format!("netns del {}", self.space)).ok();
    }
}

fn ip(words: &str) -> Result<()> {
    let status = Command::new("ip").args(words.split(' ')).status().context("ip")?;
    ensure!(status.success(), "ip {words}: {status}");
    Ok(())
}
