//! Gets the medium and Windows' drivers before the machine starts, and plans the machine with them.
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

use super::stop::Signals;
use super::thread::run_in_thread;
use crate::download::drivers::{self, Remote};
use crate::download::{Job, transfer, upgrade_file};
use crate::jail;
use crate::plan::Plan;
use crate::settings::environment::Environment;
use crate::source::Source;
use crate::state::name;
use crate::status::{Failure, Status};
use crate::story::Story;

/// How long a stopped download may write what has arrived to the disk.
const END_TIMEOUT: Duration = Duration::from_secs(5);

/// Something to ask web servers for.
enum Task {
    /// Whether the drivers are to be had.
    Check(drivers::Job),
    Medium(Job),
    Drivers(drivers::Job),
}

impl Task {
    /// Drivers that the installation cannot do without are looked for before the medium is
    /// downloaded, which is large.
    fn check(plan: &Plan) -> anyhow::Result<Option<Self>> {
        let settings = &plan.input.settings;
        if !matches!(plan.source, Source::Download(_)) || settings.windows.manual {
            return Ok(None);
        }
        let remote = match &plan.unattended {
            Some(unattended) => {
                unattended.remote.clone().filter(|_| unattended.needs_drivers(&plan.input))
            }
            // Which Windows it is, is not known yet.
            None => Remote::of(settings)?.filter(|remote| !remote.is_usual),
        };
        let folder = &settings.storage.folder;
        let job = remote.map(|remote| drivers::Job::new(settings, &remote, folder));
        Ok(job.transpose()?.map(Self::Check))
    }

    fn medium(plan: &Plan) -> anyhow::Result<Option<Self>> {
        let settings = &plan.input.settings;
        match plan.source {
            Source::Download(_) => {
                Ok(Some(Self::Medium(Job::new(settings, &settings.storage.folder)?)))
            }
            _ => Ok(None),
        }
    }

    fn drivers(plan: &Plan) -> anyhow::Result<Option<Self>> {
        let settings = &plan.input.settings;
        let remote = plan.unattended.as_ref().and_then(|it| it.remote.as_ref());
        let folder = &settings.storage.folder;
        let job = remote.map(|remote| drivers::Job::new(settings, remote, folder));
        Ok(job.transpose()?.map(Self::Drivers))
    }

    async fn run(self, story: &Story) -> anyhow::Result<()> {
        match self {
            Self::Check(mut job) => job.check().await,
            Self::Medium(job) => job.run(story).await.map(drop),
            Self::Drivers(job) => job.run(story).await.map(drop),
        }
    }
}

/// The plan with its medium and Windows' drivers, or the exit status of the signal that ended the
/// download. Which Windows it is, and which drivers it needs, is known when the medium is there.
pub(super) async fn fetch(
    mut plan: Arc<Plan>,
    environment: &Environment,
    story: &Arc<Story>,
    signals: &mut Signals,
) -> anyhow::Result<Result<Arc<Plan>, u8>> {
    forget_others(&plan, story)?;
    if let Some(check) = Task::check(&plan)?
        && let Err(status) = run(check, story, signals).await?
    {
        return Ok(Err(status));
    }
    for of in [Task::medium, Task::drivers] {
        let Some(task) = of(&plan)? else { continue };
        let is_optional = matches!(task, Task::Drivers(_)) && !needs_drivers(&plan);
        let missing = match run(task, story, signals).await {
            Ok(Ok(())) => None,
            Ok(Err(status)) => return Ok(Err(status)),
            Err(error) if is_optional => Some(error),
            Err(error) => return Err(error),
        };
        let mut new = Plan::make(environment, Path::new("/"))?;
        if let Some(error) = missing {
            tracing::warn!("{error:#}");
            new.do_without_drivers()?;
        }
        if of(&new)?.is_some() {
            let sentence = "the file that was downloaded is gone: start again";
            return Err(Failure::new(Status::Download, sentence));
        }
        announce(&plan, &new);
        plan = Arc::new(new);
    }
    Ok(Ok(plan))
}

/// Removes unfinished downloads of a former VERSION, and those of a system that is installed.
fn forget_others(plan: &Plan, story: &Story) -> anyhow::Result<()> {
    let settings = &plan.input.settings;
    let folder = &settings.storage.folder;
    let windows = &settings.windows;
    let wanted = match plan.source {
        Source::Disk(_) => Vec::new(),
        Source::Download(_) => {
            let medium = name::of(&windows.version, windows.language.0);
            let media = medium.iter().flat_map(|name| [name.clone(), upgrade_file(name)]);
            let media = media.map(|name| folder.join(name));
            let drivers = Remote::of(settings)?.map(|remote| remote.path(folder));
            media.chain(drivers).collect()
        }
        // The user may come back to a download.
        Source::Medium(_) | Source::Probe => return Ok(()),
    };
    for path in transfer::forget_others(folder, &wanted) {
        let shown = path.display();
        story.info(&format!("{shown} is removed: nothing needs this unfinished download"));
    }
    Ok(())
}

fn needs_drivers(plan: &Plan) -> bool {
    plan.unattended.as_ref().is_some_and(|it| it.needs_drivers(&plan.input))
}

/// Logs what a plan knows that the one before the download did not.
fn announce(old: &Plan, new: &Plan) {
    for warning in new.warnings.iter().filter(|it| !old.warnings.contains(it)) {
        tracing::warn!("{warning}");
    }
    if let Some(media) = new.media.as_ref().filter(|_| new.media != old.media) {
        tracing::info!("the medium has {media}");
    }
}

/// Downloads what the environment describes, without a machine. Returns the exit status.
pub fn download(environment: &Environment) -> anyhow::Result<u8> {
    let plan = Arc::new(Plan::make(environment, Path::new("/"))?);
    if let Some(error) = plan.download_error() {
        return Err(error);
    }
    if Task::medium(&plan)?.is_none() && Task::drivers(&plan)?.is_none() {
        tracing::info!("nothing to download: it is {}", plan.description());
        return Ok(0);
    }
    let runtime = Builder::new_current_thread().enable_all().build().context("threads")?;
    runtime.block_on(async {
        let mut signals = Signals::catch()?;
        let ended = fetch(plan, environment, &Story::new(), &mut signals).await?;
        Ok(ended.err().unwrap_or(0))
    })
}

/// Runs a task until it ends, or a signal arrives, whose exit status is the error.
async fn run(
    task: Task,
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
                got = task.run(&story) => got,
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
