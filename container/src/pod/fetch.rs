//! Gets the medium before the machine starts, and plans the machine with it.
//!
//! The download has a thread of its own, without the rights that the machine needs: it talks to the
//! Internet, and parses what comes from there. Signals end it, and what has arrived is kept for the
//! next start.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use tokio::time::timeout;

use super::run_in_thread;
use super::stop::Signals;
use crate::download::Job;
use crate::jail;
use crate::plan::Plan;
use crate::settings::environment::Environment;
use crate::source::Source;
use crate::status::{Failure, Status};
use crate::story::Story;

/// How long a stopped download may write what has arrived to the disk.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// The plan with its medium, or the exit status of the signal that ended the download.
pub(super) async fn fetch(
    plan: Arc<Plan>,
    environment: &Environment,
    story: &Arc<Story>,
    signals: &mut Signals,
) -> anyhow::Result<Result<Arc<Plan>, u8>> {
    if !matches!(plan.source, Source::Download(_)) {
        return Ok(Ok(plan));
    }
    let job = Job::new(&plan.input.settings, &plan.input.settings.storage.folder)?;
    if let Err(status) = run(job, story, signals).await? {
        return Ok(Err(status));
    }
    let new = Plan::make(environment, Path::new("/"))?;
    let Source::Medium(_) = new.source else {
        let sentence = "the medium that was downloaded is gone: start again";
        return Err(Failure::new(Status::Download, sentence.to_owned()));
    };
    for warning in new.warnings.iter().filter(|it| !plan.warnings.contains(it)) {
        tracing::warn!("{warning}");
    }
    if let Some(media) = &new.media {
        tracing::info!("the medium has {media}");
    }
    Ok(Ok(Arc::new(new)))
}

/// Downloads the medium that the environment describes, without a machine. Returns the exit status.
pub fn download(environment: &Environment) -> anyhow::Result<u8> {
    let plan = Plan::make(environment, Path::new("/"))?;
    let settings = &plan.input.settings;
    if !matches!(plan.source, Source::Download(_)) {
        tracing::info!("nothing to download: it is {}", plan.description());
        return Ok(0);
    }
    if let Some(error) = plan.download_error() {
        return Err(error);
    }
    let job = Job::new(settings, &settings.storage.folder)?;
    let runtime = Builder::new_current_thread().enable_all().build().context("threads")?;
    runtime.block_on(async {
        let mut signals = Signals::catch()?;
        let ended = run(job, &Story::new(), &mut signals).await?;
        Ok(ended.err().unwrap_or(0))
    })
}

/// Runs a job until it ends, or a signal arrives, whose exit status is the error.
async fn run(
    job: Job,
    story: &Arc<Story>,
    signals: &mut Signals,
) -> anyhow::Result<Result<(), u8>> {
    let (stop, stopped) = oneshot::channel::<()>();
    let story = story.clone();
    let thread = run_in_thread("download", move || {
        jail::serve_volume();
        let runtime = Builder::new_current_thread().enable_all().build().context("threads")?;
        let done = runtime.block_on(async {
            tokio::select! {
                got = job.run(&story) => got.map(drop),
                _ = stopped => Ok(()),
            }
        });
        // A name may still be looked up, which nothing can interrupt.
        runtime.shutdown_background();
        done
    });
    let mut thread = std::pin::pin!(thread);
    tokio::select! {
        done = &mut thread => done.map(Ok),
        status = signals.peek() => {
            drop(stop);
            if timeout(END_TIMEOUT, thread).await.is_err() {
                tracing::warn!("the download does not end: what came last is downloaded again");
            }
            Ok(Err(status))
        }
    }
}
