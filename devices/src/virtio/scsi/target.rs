//! State shared by all queues: the target, its unit, and pending unit attentions.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::Context;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::scsi::{Bus, Cdb, Conditions, Plan, Profile, Sense, Unit};
use host::disk::Drive;

/// The unit that a request addresses (5.6.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Addressee {
    /// The only unit of the target.
    Unit,
    OtherUnit,
    NoTarget,
}

impl Addressee {
    pub(super) fn of(lun: [u8; 8]) -> Self {
        match lun {
            // By peripheral or by flat space addressing (SAM-5, 4.7.7).
            [1, 0, 0 | 0x40, 0, ..] => Self::Unit,
            [1, 0, 0 | 0x40..=0x7f, ..] => Self::OtherUnit,
            _ => Self::NoTarget,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// Reported by the unit: CHECK CONDITION.
    Sense(Sense),
    /// Reported by the controller: a response other than OK.
    Response(u8),
}

impl From<Sense> for Refusal {
    fn from(sense: Sense) -> Self {
        Self::Sense(sense)
    }
}

/// Response codes (5.6.6.1, 5.6.6.2).
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
    /// The disk grew, and the event for this is not sent yet.
    grown: AtomicBool,
    /// Wakes the control thread when the disk grows.
    pub(super) kick: EventFd,
}

impl Target {
    pub(super) fn new(drive: Arc<Drive>) -> anyhow::Result<Self> {
        let serial = drive.serial.clone();
        let profile = Profile { bus: Bus::Scsi, cdrom: false, removable: false, serial };
        let kick = EventFd::new(EFD_NONBLOCK).context("an event for a SCSI controller")?;
        let (conditions, grown) = (Mutex::default(), AtomicBool::new(false));
        Ok(Self { drive, profile, conditions, grown, kick })
    }

    pub(super) fn conditions(&self) -> MutexGuard<'_, Conditions> {
        self.conditions.lock().expect("no device panicked")
    }

    pub(super) fn restore(&self, conditions: Conditions) {
        self.grown.store(false, Ordering::Release);
        *self.conditions() = conditions;
    }

    /// Called when the disk grows. The driver is notified with its next command, and by an event.
    pub(super) fn grow(&self) {
        self.conditions().add_attention(Sense::CAPACITY_CHANGED);
        self.grown.store(true, Ordering::Release);
        self.kick.write(1).ok();
    }

    /// Whether an event is pending.
    pub(super) fn is_grown(&self) -> bool {
        self.grown.load(Ordering::Acquire)
    }

    /// Called after the event was sent, or if the driver does not want it.
    pub(super) fn clear_grown(&self) {
        self.grown.store(false, Ordering::Release);
    }

    fn unit<T>(&self, ask: impl FnOnce(&mut Unit<'_>) -> T) -> T {
        let geometry = self.drive.geometry();
        let conditions = &mut self.conditions();
        ask(&mut Unit { profile: &self.profile, conditions, medium: Some(&geometry) })
    }

    /// Plans a command without its parameters.
    pub(super) fn plan(&self, lun: [u8; 8], cdb: &Cdb) -> Result<Plan, Refusal> {
        match Addressee::of(lun) {
            Addressee::Unit => Ok(self.unit(|unit| unit.plan(cdb))?),
            Addressee::OtherUnit => Ok(Unit::plan_absent_unit(cdb)?),
            Addressee::NoTarget => Err(Refusal::Response(BAD_TARGET)),
        }
    }

    /// Plans a command whose parameters have arrived.
    pub(super) fn parameters(&self, cdb: &Cdb, data: &[u8]) -> Result<Plan, Refusal> {
        Ok(self.unit(|unit| unit.parameters(cdb, data))?)
    }
}
