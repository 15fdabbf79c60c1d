//! The pod's side of a snapshot, as the command sees it: the pod holds the machine still while the
//! connection lasts.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use serde_json::Value;
use vmm::control::snapshot::{self, SnapshotKey};
use vmm::control::{Client, Then};

use super::{ANSWER_TIMEOUT, NO_POD, Pod};
use crate::pod::freeze::Outcome;
use crate::pod::inquiry::Question;
use crate::pod::runtime_folder::RuntimeFolder;
use crate::snapshots::create::{self, Held, Running};

/// Besides memory: registers and devices.
const OTHER_BYTES: u64 = 64 << 20;

/// The pod that runs here, if there is one. Its memory is encrypted with the key.
pub fn pod(key: Option<SnapshotKey>) -> Option<RunningPod> {
    Pod::find().ok().map(|pod| RunningPod { pod, key })
}

pub struct RunningPod {
    pod: Pod,
    key: Option<SnapshotKey>,
}

impl create::Pod for RunningPod {
    fn machine(&mut self) -> anyhow::Result<Running> {
        let state: Value = serde_json::from_slice(&self.pod.ask(&Question::State)?)?;
        let machine = &state["machine"];
        let doing = state["pod"]["doing"].as_str().unwrap_or_default();
        ensure!(machine.is_object(), "the machine does not run yet: {doing}: try again later");
        let disks = machine["disks"].as_array().into_iter().flatten();
        let disks = disks.filter_map(|disk| disk["path"].as_str()).map(PathBuf::from).collect();
        let memory =
            machine["memory"].as_u64().context("the machine does not report its memory")?;
        Ok(Running { disks, memory: memory.saturating_add(OTHER_BYTES) })
    }

    fn hold(&mut self, freeze: bool, limit: Duration) -> anyhow::Result<()> {
        // With memory, the guest need not know of it.
        let encrypts = (!freeze).then_some(self.key.is_some());
        self.pod.ask(&Question::Hold { freeze, seconds: limit.as_secs(), encrypts }).map(drop)
    }

    fn save(&mut self, folder: &Path, within: Duration) -> anyhow::Result<()> {
        let runtime_folder = RuntimeFolder::find().context(NO_POD)?;
        // The machine gives up first, and has the reason.
        let patience = within.saturating_add(ANSWER_TIMEOUT);
        let mut machine = Client::connect_timeout(&runtime_folder.control(), patience)?;
        let within = u16::try_from(within.as_secs()).unwrap_or(u16::MAX);
        let (then, within) = (Then::Pause, Some(within));
        snapshot::save_with_key(&mut machine, folder, then, within, self.key.as_ref()).map(drop)
    }

    fn release(&mut self) -> anyhow::Result<Held> {
        let outcome: Outcome = serde_json::from_slice(&self.pod.ask(&Question::Release)?)?;
        let Outcome { in_time, frozen, why, seconds } = outcome;
        ensure!(
            in_time,
            "the machine went on before the snapshot was complete, after {seconds:.1} s: allow \
             more with --pause, or take the snapshot while it is off"
        );
        Ok(Held { frozen: if frozen { Ok(()) } else { Err(why) }, seconds })
    }
}
