//! A tap in its own network namespace, for one benchmark. It is not visible outside of the
//! namespace.

use std::ffi::OsStr;
use std::process::Command;

use anyhow::{Context, Result, ensure};

pub const NAME: &str = "bench0";
pub const HOST: &str = "10.98.76.1";

/// The namespace with the tap. Dropping it removes both.
pub struct Tap {
    space: String,
}

impl Tap {
    /// Needs root.
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

    /// Wraps a command so that it runs in the namespace.
    pub fn inside(&self, command: &Command) -> Command {
        let mut inside = Command::new("ip");
        // `ip netns exec` replaces itself by the program, so the process ID is the program's.
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
