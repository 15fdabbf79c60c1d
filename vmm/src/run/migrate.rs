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
use crate::migration::departure::{Departure, Limits, Progress, Refused};
use crate::snapshot::Mark;
use crate::snapshot::memory::Limit;
use crate::status::Status;

/// The pause of a machine that moves, unless the operator allows another one.
const PAUSE: u32 = 300;
/// How long the other end may keep the locks of a machine that does not run there.
const PATIENCE: Duration = Duration::from_secs(10);
const RETRY_INTERVAL: Duration = Duration::from_millis(20);

/// A migration that is under way.
pub(super) struct Migration {
    /// Answered at the end.
    request: Request,
    progress: Arc<Progress>,
    stream: OwnedFd,
    began: Instant,
}

/// A departure whose memory was sent, or why that failed.
pub struct Prepared {
    departure: Departure,
    result: anyhow::Result<()>,
}

/// Where the machine runs after a migration.
enum Place {
    Here(anyhow::Error),
    There,
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
                self.migration = Some(Migration { request, progress, stream, began });
            }
            Err(error) => request.answer(Err(error)),
        }
    }

    fn begin_departure(
        &mut self,
        files: Vec<OwnedFd>,
        limits: Limits,
    ) -> anyhow::Result<(OwnedFd, Arc<Progress>)> {
        let Ok([stream]) = <[_; 1]>::try_from(files) else {
            bail!("a migration needs one open file, its stream: use `vmm ctl migrate`");
        };
        let copy = stream.try_clone().context("its stream")?;
        let hello = self.machine.hello()?;
        self.settle(Limit::new(None))?;
        let departure = self.machine.stand_still().and_then(|()| {
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
            self.machine.record_writes(false)?;
        }
        begun
    }

    /// Sends memory in a thread, while the machine runs.
    fn send_memory(&self, mut departure: Departure, hello: Vec<u8>) -> anyhow::Result<()> {
        let notices = self.notices.sender.clone();
        let brake = notices.clone();
        let brake = Box::new(move |time| brake.send(Notice::Slow(time)).is_ok());
        let body = move || {
            let result = departure.prepare(&hello, brake);
            notices.send(Notice::Prepared(Box::new(Prepared { departure, result }))).ok();
        };
        Builder::new().name("migration".into()).spawn(body).context("a thread")?;
        Ok(())
    }

    /// Stops the processors of a machine that is being sent for this time.
    pub(super) fn slow_down(&self, time: Duration) {
        if self.migration.is_some() && !self.must_stay_paused() {
            self.machine.pause();
            sleep(time);
            self.resume_if_allowed();
        }
    }

    pub(super) fn cancel_migration(&self) -> anyhow::Result<Value> {
        let migration = self.migration.as_ref().context("the machine is not being moved")?;
        // The other end, and this one, find the stream cut.
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
            Ok(()) => self.hand_over(&mut departure),
            Err(error) => Ok(Place::Here(error)),
        };
        match place {
            Ok(Place::There) => {
                let (pause, total) = (stopped.elapsed(), migration.began.elapsed());
                tracing::info!("moved to another process in {total:?}, with a pause of {pause:?}");
                migration.request.answer(Ok(json!({
                    "seconds": total.as_secs_f64(),
                    "pause_ms": pause.as_secs_f64() * 1e3,
                    "sent_bytes": departure.sent(),
                })));
                Ok(Some(Status::Moved as u8))
            }
            Ok(Place::Here(error)) => {
                self.machine.record_writes(false)?;
                migration.request.answer(Err(error));
                self.failed.take().map_or(Ok(None), Err)
            }
            Err(error) => {
                migration.request.answer(Err(anyhow::anyhow!("{error:#}")));
                Err(error)
            }
        }
    }

    /// Stops the machine, and sends the rest. An error ends this machine.
    fn hand_over(&mut self, departure: &mut Departure) -> anyhow::Result<Place> {
        let (paused, began) = (self.paused, Instant::now());
        if let Err(error) = self.settle(Limit::new(None)) {
            return Ok(Place::Here(error));
        }
        let state = self.machine.stand_still().and_then(|()| {
            tracing::debug!("stands still after {:?}", began.elapsed());
            departure.finish()?;
            self.machine.state(paused)
        });
        tracing::debug!("memory was sent after {:?}", began.elapsed());
        let place = match state {
            Ok((state, files)) => self.exchange(departure, &state, &files)?,
            Err(error) => Place::Here(error),
        };
        if let Place::Here(_) = place {
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
    ) -> anyhow::Result<Place> {
        let locks = self.machine.shared().disks.locks();
        locks.iter().try_for_each(|it| lock::release(it)).context("the locks of the disks")?;
        let answer = departure.send_state(state).and_then(|()| departure.answer());
        let Err(error) = answer else {
            // If this is lost, the other end runs the machine nevertheless if it has disks.
            departure.let_go().ok();
            return Ok(Place::There);
        };
        let refused = error.is::<Refused>();
        if !take_again(&locks) {
            ensure!(!refused, "another machine has the disks of this one, which ends: {error:#}");
            tracing::warn!("{error:#}: the other end has the disks, and runs the machine");
            return Ok(Place::There);
        }
        // The other end has run it and has ended already, if it has written.
        if !refused && self.machine.files()? != files {
            bail!("{error:#}, and the disks have changed: the machine has run at the other end");
        }
        let error = error.context("the machine stays");
        Ok(Place::Here(error))
    }
}

/// Takes all locks again. The other end may have some of them until it has given up.
fn take_again(locks: &[Arc<File>]) -> bool {
    let end = Instant::now() + PATIENCE;
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
