//! What all queues share: the target with its unit, and what happened to it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::scsi::{Bus, Cdb, Conditions, Plan, Profile, Sense, Unit};
use host::disk::Drive;

/// Whom a request means (5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Addressee {
    /// The one unit that there is.
    Unit,
    /// Another one of its target.
    Beside,
    Nobody,
}

impl Addressee {
    pub(super) fn of(lun: [u8; 8]) -> Self {
        match lun {
            // By peripheral or by flat space addressing (SAM-5, 4.7.7).
            [1, 0, 0 | 0x40, 0, ..] => Self::Unit,
            [1, 0, 0 | 0x40..=0x7f, ..] => Self::Beside,
            _ => Self::Nobody,
        }
    }
}

/// Why a command was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// The unit says so: CHECK CONDITION.
    Sense(Sense),
    /// The controller says so: a response other than OK.
    Response(u8),
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}

/// Responses (5.6.6.1, 5.6.6.2).
pub(super) const OK: u8 = 0;
pub(super) const OVERRUN: u8 = 1;
pub(super) const ABORTED: u8 = 2;
pub(super) const BAD_TARGET: u8 = 3;
pub(super) const RESET: u8 = 4;
pub(super) const FAILURE: u8 = 9;
pub(super) const SUCCEEDED: u8 = 10;
pub(super) const REJECTED: u8 = 11;
pub(super) const INCORRECT_LUN: u8 = 12;

pub(super) struct Target {
    pub(super) drive: Arc<Drive>,
    profile: Profile,
    conditions: Mutex<Conditions>,
    /// The driver has not yet been told that the disk grew, by an event.
    grown: AtomicBool,
    /// Rung when that happens.
    kick: EventFd,
}

impl Target {
    pub(super) fn new(drive: Arc<Drive>) -> anyhow::Result<Self> {
        let serial = drive.serial().to_owned();
        let profile = Profile { bus: Bus::Scsi, cdrom: false, removable: false, serial };
        let kick = EventFd::new(EFD_NONBLOCK).context("a bell for a SCSI controller")?;
        let (conditions, grown) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { drive, profile, conditions, grown, kick })
    }

    pub(super) fn conditions(&self) -> MutexGuard<'_, Conditions> {
        self.conditions.lock().expect("no device panicked")
    }

    /// As it was, or as after power-on.
    pub(super) fn restore(&self, conditions: Conditions) {
        self.grown.store(false, Ordering::Release);
        *self.conditions() = conditions;
    }

    /// The disk grew: the driver hears of it with its next command, and by an event.
    pub(super) fn grow(&self) {
        self.conditions().attend(Sense::CAPACITY_CHANGED);
        self.grown.store(true, Ordering::Release);
        self.kick.write(1).ok();
    }

    /// Whether an event is due.
    pub(super) fn is_grown(&self) -> bool {
        self.grown.load(Ordering::Acquire)
    }

    /// It was told.
    pub(super) fn told(&self) {
        self.grown.store(false, Ordering::Release);
    }

    pub(super) fn kick(&self) -> &EventFd {
        &self.kick
    }

    fn unit<T>(&self, ask: impl FnOnce(&mut Unit<'_>) -> T) -> T {
        let geometry = self.drive.geometry();
        let conditions = &mut self.conditions();
        ask(&mut Unit { profile: &self.profile, conditions, medium: Some(&geometry) })
    }

    /// What a command comes to.
    pub(super) fn plan(&self, lun: [u8; 8], cdb: &Cdb) -> Result<Plan, Refusal> {
        match Addressee::of(lun) {
            Addressee::Unit => Ok(self.unit(|unit| unit.plan(cdb))?),
            Addressee::Beside => Ok(Unit::plan_beside(cdb)?),
            Addressee::Nobody => Err(Refusal::Response(BAD_TARGET)),
        }
    }

    /// What it comes to when its parameters came.
    pub(super) fn parameters(&self, cdb: &Cdb, data: &[u8]) -> Result<Plan, Refusal> {
        Ok(self.unit(|unit| unit.parameters(cdb, data))?)
    }
}
