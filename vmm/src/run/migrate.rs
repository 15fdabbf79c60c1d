//! A machine that moves to another process: what the main loop does for it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use host::lock;
use rustix::net::{Shutdown, shutdown};
use serde_json::{Value, json};

use super::{MainLoop, Notice};
use crate::control::Request;
use crate::migration::departure::{Departure, Limits, Refused, Slow};
use crate::migration::pages::Progress;
use crate::snapshot::Mark;
use crate::snapshot::memory::Limit;
use crate::status::Status;

/// The pause of a machine that moves, unless the operator allows another one.
const PAUSE: u32 = 300;
/// How long the other end may keep the locks of a machine that does not run there.
const LOCK_TIMEOUT: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A migration that is under way.
pub(super) struct Migration {
    /// Answered at the end.
    request: Request,
    progress: Arc<Progress>,
    stream: OwnedFd,
    began: Instant,
    cancelled: bool,
}

/// A departure whose memory was sent, or why that failed.
pub struct Prepared {
    departure: Departure,
    result: anyhow::Result<()>,
}

/// Where the machine runs after a migration.
enum RunsAt {
    Source(anyhow::Error),
    OtherEnd,
}

impl MainLoop {
    /// Begins to send the machine. The request is answered at the end.
    pub(super) fn depart(
        &mut self,
        request: Request,
        files: Vec<OwnedFd>,
        pause: Option<u32>,
        within: Option<u16>,
    ) {
        let pause = Duration::from_millis(pause.unwrap_or(PAUSE).into());
        match self.begin_departure(files, Limits { pause, within }) {
            Ok((stream, progress)) => {
                let began = Instant::now();
                self.migration =
                    Some(Migration { request, progress, stream, began, cancelled: false });
            }
            Err(error) => request.answer(Err(error)),
        }
    }

    fn begin_departure(
        &mut self,
        files: Vec<OwnedFd>,
        limits: Limits,
    ) -> anyhow::Result<(OwnedFd, Arc<Progress>)> {
        ensure!(!limits.pause.is_zero(), "a machine cannot move without a pause: allow some");
        let Ok([stream]) = <[_; 1]>::try_from(files) else {
            bail!("a migration needs one open file, its stream: use `vmm ctl migrate`");
        };
        let copy = stream.try_clone().context("its stream")?;
        self.settle(Limit::new(None))?;
        let mut hello = Vec::new();
        let departure = self.machine.stand_still().and_then(|()| {
            hello = self.machine.hello()?;
            let vm = self.machine.record_writes(true)?;
            let files = self.machine.shared().disks.locks();
            Departure::new(stream, vm, (self.machine.contents(), files), limits)
        });
        self.unpark()?;
        self.resume_if_allowed();
        let begun = departure.and_then(|departure| {
            let progress = departure.progress();
            self.send_memory(departure, hello)?;
            Ok((copy, progress))
        });
        if begun.is_err() {
            self.end_recording();
        }
        begun.context("the machine stays")
    }

    /// A machine whose writes are recorded is slower, and otherwise sound.
    fn end_recording(&self) {
        if let Err(error) = self.machine.record_writes(false) {
            tracing::warn!("writes to memory are still recorded: {error:#}");
        }
    }

    /// Sends memory in a thread, while the machine runs.
    fn send_memory(&self, mut departure: Departure, hello: Vec<u8>) -> anyhow::Result<()> {
        let notices = self.notices.sender.clone();
        let brake = notices.clone();
        let brake = Box::new(move |slow| brake.send(Notice::Slow(slow)).is_ok());
        let body = move || {
            let result = departure.prepare(&hello, brake);
            notices.send(Notice::Prepared(Box::new(Prepared { departure, result }))).ok();
        };
        Builder::new().name("migration".into()).spawn(body).context("a thread")?;
        tracing::info!("the machine is being moved");
        Ok(())
    }

    /// Stops the processors of a machine that is being moved for a moment.
    pub(super) fn slow_down(&self, slow: &Slow) {
        if self.migration.is_some() && !self.must_stay_paused() {
            self.machine.pause();
            slow.wait();
            self.resume_if_allowed();
        }
    }

    pub(super) fn cancel_migration(&mut self) -> anyhow::Result<Value> {
        let migration = self.migration.as_mut().context("the machine is not being moved")?;
        migration.cancelled = true;
        // The other end finds the stream cut, and closes it. The jail allows no other shutdown.
        shutdown(&migration.stream, Shutdown::Write).context("the stream")?;
        Ok(json!({}))
    }

    pub(super) fn show_migration(&self) -> Option<Value> {
        self.migration.as_ref().map(|it| it.progress.show())
    }

    /// Sends the rest of the machine, and ends this one if it runs there.
    pub(super) fn leave(&mut self, prepared: Prepared) -> anyhow::Result<Option<u8>> {
        let Prepared { mut departure, result } = prepared;
        let Some(migration) = self.migration.take() else { return Ok(None) };
        let stopped = Instant::now();
        let place = match result {
            _ if migration.cancelled => {
                let cancelled = "`vmm ctl migrate-cancel` has ended the migration";
                Ok(RunsAt::Source(anyhow::anyhow!(cancelled)))
            }
            Ok(()) => self.hand_over(&mut departure),
            Err(error) => Ok(RunsAt::Source(error)),
        };
        match place {
            Ok(RunsAt::OtherEnd) => {
                let (pause, total) = (stopped.elapsed(), migration.began.elapsed());
                tracing::info!("moved to another process in {total:?}, with a pause of {pause:?}");
                migration.request.answer(Ok(json!({
                    "seconds": total.as_secs_f64(),
                    "pause_ms": pause.as_secs_f64() * 1e3,
                    "sent_bytes": departure.sent(),
                    "rounds": departure.progress().show()["rounds"],
                    "throttle_percent": departure.progress().show()["throttle_percent"],
                })));
                Ok(Some(Status::Moved as u8))
            }
            Ok(RunsAt::Source(error)) => {
                self.end_recording();
                tracing::warn!("the machine stays: {error:#}");
                migration.request.answer(Err(error.context("the machine stays")));
                self.failed.take().map_or(Ok(None), Err)
            }
            Err(error) => {
                migration.request.answer(Err(anyhow::anyhow!("{error:#}")));
                Err(error)
            }
        }
    }

    /// Stops the machine, and sends the rest. An error ends this machine.
    fn hand_over(&mut self, departure: &mut Departure) -> anyhow::Result<RunsAt> {
        let (paused, began) = (self.paused, Instant::now());
        self.machine.shared().input.release_all();
        if let Err(error) = self.settle(Limit::new(None)) {
            return Ok(RunsAt::Source(error));
        }
        let state = self.machine.stand_still().and_then(|()| {
            tracing::debug!("stands still after {:?}", began.elapsed());
            departure.send_rest()?;
            self.machine.state(paused)
        });
        tracing::debug!("memory was sent after {:?}", began.elapsed());
        let place = match state {
            Ok((state, files)) => self.exchange(departure, &state, &files)?,
            Err(error) => RunsAt::Source(error),
        };
        if let RunsAt::Source(_) = place {
            self.machine.unpark()?;
            self.resume_if_allowed();
        }
        Ok(place)
    }

    /// Gives the disks up, sends the state, and finds out where the machine runs.
    fn exchange(
        &self,
        departure: &mut Departure,
        state: &[u8],
        files: &[Mark],
    ) -> anyhow::Result<RunsAt> {
        let locks = self.machine.shared().disks.locks();
        let released = locks.iter().try_for_each(|it| lock::release(it));
        let mut let_go = false;
        let answer = released.context("the locks of the disks").and_then(|()| {
            departure.send_state(state)?;
            departure.answer()?;
            departure.let_go()?;
            let_go = true;
            departure.answer()
        });
        let Err(error) = answer else { return Ok(RunsAt::OtherEnd) };
        let refused = error.is::<Refused>();
        // Without locks, the other end waits for this one, and runs when it is let go.
        let here = if locks.is_empty() { refused || !let_go } else { take_again(&locks) };
        ensure!(here, "{error:#}: the other end has the machine, or had it: this one ends");
        // After the other end was let go, its devices may have written. Only the files tell.
        let unchanged = || {
            let shown = locks.is_empty() || files.iter().all(Mark::shows_changes);
            anyhow::Ok(shown && self.machine.files()? == files)
        };
        if (let_go || !refused) && !unchanged()? {
            bail!("{error:#}, and the machine may have run at the other end: this one ends");
        }
        Ok(RunsAt::Source(error))
    }
}

/// Takes all locks again. The other end may have some of them until it has given up.
fn take_again(locks: &[Arc<File>]) -> bool {
    let end = Instant::now() + LOCK_TIMEOUT;
    loop {
        if locks.iter().all(|it| lock::take_again(it).unwrap_or(false)) {
            return true;
        }
        if Instant::now() >= end {
            return false;
        }
        sleep(RETRY_INTERVAL);
    }
}
