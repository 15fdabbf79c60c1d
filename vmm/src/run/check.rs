//! Checks a restored machine's memory while its guest runs. Until it is found to be sound, writes
//! to the host's files wait: a guest that runs with damaged memory would damage its disks, too.

use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread::{Builder, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::process::setpriority_process;

use super::{MainLoop, Notice};
use crate::config::{Cloning, Restore};
use crate::machine::Unchecked;
use crate::status::{Failure, Status};

/// Afterwards the whole guest waits: its drivers give up requests that take much longer.
const RUNS_AT_MOST: Duration = Duration::from_secs(5);
/// How soon a guest that waits for the check stands still.
const INTERVAL: Duration = Duration::from_millis(10);
/// The time in which processors stop, unless one of them writes a variable.
pub(super) const STOP_TIME: Duration = Duration::from_secs(1);
/// The time in which requests that waited are done before a guest whose clocks went on goes on.
const HEAD_START: Duration = Duration::from_millis(100);
/// The priority of the check, as of `nice`: the guest comes first, and the check still gets a
/// quarter of a busy processor.
const NICE: i32 = 5;
/// The check begins this late, so that it does not delay the guest's first answer.
const AFTER: Duration = Duration::from_millis(20);

impl MainLoop {
    /// Whether the machine cannot be saved yet, because of the check.
    pub(super) fn is_unchecked(&self) -> bool {
        self.machine.shared().disks.gate().is_unchecked() || self.waits_for_check()
    }

    pub(super) fn waits_for_check(&self) -> bool {
        self.machine.shared().disks.gate().is_urgent()
    }

    /// The guest waits, and its clocks stand still: its drivers would give their requests up.
    pub(super) fn wait_for_check(&mut self) -> anyhow::Result<()> {
        let stopped = self.machine.pause_within(STOP_TIME);
        if !self.machine.shared().disks.gate().is_unchecked() {
            // It goes on at once, and its TPM may be at work already.
            return Ok(());
        }
        match self.machine.can_stand_still() {
            Ok(()) if stopped => return self.machine.freeze(),
            Ok(()) => tracing::info!("a processor writes a variable: the guest's clocks go on"),
            Err(error) => tracing::warn!("the guest's clocks go on while it waits: {error:#}"),
        }
        Ok(())
    }

    /// A guest that waited goes on.
    pub(super) fn checked(&mut self) -> anyhow::Result<()> {
        if !self.waits_for_check() {
            return Ok(());
        }
        let gate = self.machine.shared().disks.gate();
        if self.machine.is_parked() {
            self.machine.unpark()?;
            gate.settled();
            self.resume_if_allowed();
        } else {
            // Its drivers gave up if they found nothing done after this time.
            sleep(HEAD_START);
            gate.settled();
            self.go_on_late();
        }
        Ok(())
    }

    /// Begins the check, if the memory is not checked yet.
    pub(super) fn check_memory(&self) -> anyhow::Result<()> {
        let Some(unchecked) = self.machine.unchecked() else { return Ok(()) };
        let (tell, told) = mpsc::channel();
        let (origin, parts) = (unchecked.origin.clone(), unchecked.parts);
        let gate = unchecked.gate.clone();
        let check = move || {
            setpriority_process(None, NICE).ok();
            if !gate.is_paused() && !gate.is_urgent() {
                sleep(AFTER);
            }
            let checked = origin.check(parts, || {
                ensure!(gate.is_closed(), "the machine has ended");
                Ok(())
            });
            tell.send(checked).ok();
        };
        let notices = self.notices.sender.clone();
        let notify = move |notice| {
            notices.send(notice).ok();
        };
        // Reading may hang, so another thread has the clock.
        let conclude = move || conclude(&unchecked, &told, RUNS_AT_MOST, &notify);
        Builder::new().name("check".into()).spawn(check).context("a thread")?;
        Builder::new().name("checked".into()).spawn(conclude).context("a thread")?;
        Ok(())
    }
}

/// Waits for the end of the check. After `time`, the guest waits, too.
fn conclude(
    unchecked: &Unchecked,
    told: &Receiver<anyhow::Result<()>>,
    time: Duration,
    notify: &impl Fn(Notice),
) {
    let Unchecked { restore, gate, .. } = unchecked;
    let began = Instant::now();
    // A guest that is paused has no requests that could become old.
    let runs_on = || gate.is_paused() || began.elapsed() < time && !gate.is_urgent();
    let early = loop {
        match told.recv_timeout(INTERVAL) {
            Err(RecvTimeoutError::Timeout) if runs_on() => {}
            early => break early,
        }
    };
    let waits = matches!(early, Err(RecvTimeoutError::Timeout));
    if waits {
        tracing::info!("the guest waits until the memory of its snapshot is checked");
        gate.hurry();
        notify(Notice::Waits);
    }
    let ran = began.elapsed().as_secs_f64();
    // It always tells its end.
    let Ok(checked) = early.or_else(|_| told.recv()) else { return };
    // Otherwise the machine has ended meanwhile.
    if !gate.is_closed() {
        return;
    }
    match checked {
        Ok(()) => {
            gate.checked();
            notify(Notice::Checked);
        }
        Err(error) => {
            notify(Notice::Damaged(damaged(restore, &error, (!gate.is_paused()).then_some(ran))));
            gate.shut();
        }
    }
}

/// The error about memory that is damaged, and with which the guest may have run for these seconds.
fn damaged(restore: &Restore, error: &anyhow::Error, ran: Option<f64>) -> anyhow::Error {
    let mut sentence = format!("{}: {error:#}", restore.memory());
    sentence += "; its disks are as they were";
    if let Some(ran) = ran {
        sentence += &format!(", though the guest ran for {ran:.1} s");
    }
    if let Cloning::In(folder) = &restore.clone {
        sentence += &format!("; remove {}, the folder of the clone", folder.display());
    }
    Failure::new(Status::Snapshot, sentence)
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::FileExt as _;
    use std::sync::{Arc, Mutex};

    use host::gate::Gate;
    use host::ram::MmapRegion;
    use vm_memory::VolatileMemory as _;

    use super::*;
    use crate::snapshot::Origin;
    use crate::snapshot::memory::{Before, Limit, Pages, Writer, write};

    /// Three mebibytes, each with contents.
    fn unchecked() -> Unchecked {
        let region = MmapRegion::new(3 << 20).unwrap();
        region.as_volatile_slice().copy_from(&vec![7_u8; 3 << 20]);
        let file = tempfile::tempfile().unwrap();
        let mut writer = Writer::new(&file, None, Limit::new(None));
        let part = write(&mut writer, 0, &region, &Pages::open(), Before::Zeros).unwrap();
        let (origin, gate) = (Origin { file, parts: vec![part] }, Gate::new(true, false));
        gate.started(|| ());
        let restore =
            Restore { dir: "saved".into(), clone: Cloning::In("one".into()), ..Restore::default() };
        Unchecked { origin: Arc::new(origin), parts: 1, restore, gate: Arc::new(gate) }
    }

    /// The notices of a check that ends after `late`, as text.
    fn notices(unchecked: &Unchecked, late: Duration) -> Vec<String> {
        let all = Mutex::new(Vec::new());
        let notify = |notice| {
            all.lock().unwrap().push(match notice {
                Notice::Waits => "waits".into(),
                Notice::Checked => "checked".into(),
                Notice::Damaged(error) => format!("{error:#}"),
                _ => unreachable!("no other"),
            });
        };
        let (tell, told) = mpsc::channel();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                sleep(late);
                tell.send(unchecked.origin.check(unchecked.parts, || Ok(()))).unwrap();
            });
            // Longer than the check takes, unless that is late.
            let time = if late.is_zero() { RUNS_AT_MOST } else { late / 10 };
            conclude(unchecked, &told, time, &notify);
        });
        all.into_inner().unwrap()
    }

    #[test]
    fn a_guest_whose_memory_takes_long_waits() {
        for (late, wanted) in
            [(Duration::ZERO, &["checked"][..]), (Duration::from_secs(1), &["waits", "checked"])]
        {
            let unchecked = unchecked();
            assert_eq!(notices(&unchecked, late), wanted);
            assert!(unchecked.gate.is_open());
        }
        // It waits for its TPM.
        let urgent = unchecked();
        urgent.gate.hurry();
        assert_eq!(notices(&urgent, Duration::from_secs(1)).len(), 2);
    }

    #[test]
    fn damage_shuts_the_gate_and_a_machine_that_has_ended_says_nothing() {
        for (late, waits) in [(Duration::ZERO, 0), (Duration::from_secs(1), 1)] {
            let damaged = unchecked();
            damaged.origin.file.write_all_at(&[8], (2 << 20) + 5).unwrap();
            let said = notices(&damaged, late);
            assert_eq!(said.len(), waits + 1, "{said:?}");
            let said = &said[waits];
            assert!(said.starts_with("--restore saved: memory: it is damaged between"), "{said}");
            assert!(said.contains("; its disks are as they were, though the guest ran"), "{said}");
            assert!(said.ends_with("; remove one, the folder of the clone"), "{said}");
            assert!(!damaged.gate.pass());
        }
        let ended = unchecked();
        ended.gate.shut();
        assert!(notices(&ended, Duration::ZERO).is_empty());
    }
}
