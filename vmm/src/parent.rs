//! `--die-with`: ends the machine when the process that supervises it ends, for whatever reason. No
//! other process would shut the guest down.

use std::os::fd::OwnedFd;
use std::thread::Builder;

use anyhow::Context;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde::{Deserialize, Serialize};

/// The process ID of the supervisor, if there is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Parent(Option<i32>);

impl TryFrom<String> for Parent {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let number = text.parse().ok().filter(|number| *number > 0);
        let number = number.ok_or_else(|| format!("`{text}` is not a process ID"))?;
        Ok(Self(Some(number)))
    }
}

impl From<Pid> for Parent {
    fn from(process: Pid) -> Self {
        Self(Some(process.as_raw_nonzero().get()))
    }
}

impl From<Parent> for String {
    fn from(parent: Parent) -> Self {
        parent.0.map_or(Self::new(), |number| number.to_string())
    }
}

impl Parent {
    /// Opens the process, so that `watch` can wait for its end. Fails if the process has already
    /// ended.
    pub fn open(self) -> anyhow::Result<Option<OwnedFd>> {
        let Some(number) = self.0 else { return Ok(None) };
        let pid = Pid::from_raw(number).context("a process ID")?;
        let opened = pidfd_open(pid, PidfdFlags::empty());
        Ok(Some(opened.with_context(|| format!("--die-with {number}"))?))
    }
}

/// Calls `ended` when the process ends. The result of `ended` is ignored: the machine may be gone.
pub fn watch(parent: OwnedFd, ended: impl FnOnce() -> bool + Send + 'static) -> anyhow::Result<()> {
    let body = move || {
        let mut fds = [PollFd::new(&parent, PollFlags::IN)];
        while poll(&mut fds, None).is_err() {}
        ended();
    };
    Builder::new().name("parent".into()).spawn(body).context("a thread for the parent")?;
    Ok(())
}
