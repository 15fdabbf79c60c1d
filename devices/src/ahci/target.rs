//! The device behind the port: a disk (ATA), or a CD-ROM drive (ATAPI), with its medium.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::ata;
use super::drive::{self, Disk, Failure, QueuedError};
use super::fis::{Command, DRDY, DSC, ERR, Reply};
use super::identify;
use crate::scsi::{self, Cdb, Conditions, MediaEvent, Plan, Profile, Sense, Unit};
use host::disk::{Drive, Fault};

/// ATAPI: PACKET, and the length of its commands in bytes.
const PACKET: u8 = 0xa0;
const PACKET_LENGTH: usize = 12;
/// Feature of PACKET: the data moves by DMA.
const PACKET_DMA: u8 = 1 << 0;
/// Interrupt reason, in the count: the command has ended.
const ENDED: u16 = 3;

/// The registers of a CD-ROM drive after a reset: diagnostics passed.
const CDROM_SIGNATURE: Reply = Reply { status: 0, error: 1, lba: 0xeb_1401, device: 0, count: 1 };

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) enum State {
    Disk(drive::State),
    Cdrom {
        conditions: Conditions,
        /// The transfer mode, as SET FEATURES has it.
        mode: u8,
        standby: bool,
        /// The medium was removed.
        out: bool,
    },
}

impl State {
    pub(super) fn disk() -> Self {
        Self::Disk(drive::State::default())
    }

    pub(super) fn cdrom() -> Self {
        Self::Cdrom { conditions: Conditions::default(), mode: 0x46, standby: false, out: false }
    }

    /// Whether a saved state is one of this kind of device.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        matches!(
            (self, other),
            (Self::Disk(_), Self::Disk(_)) | (Self::Cdrom { .. }, Self::Cdrom { .. })
        )
    }
}

pub(super) struct Target {
    pub(super) state: State,
    pub(super) profile: Profile,
    pub(super) medium: Option<Arc<Drive>>,
}

impl Target {
    /// Plans a command without its parameters.
    pub(super) fn plan(
        &mut self,
        command: &Command,
        packet: &Cdb,
        reply: &mut Reply,
    ) -> Result<Plan, Failure> {
        let Self { state, profile, medium } = self;
        let State::Disk(state) = state else { return self.plan_cdrom(command, packet, reply) };
        let geometry = medium.as_ref().ok_or(Failure::ABORTED)?.geometry();
        Disk { state, serial: &profile.serial, geometry: &geometry }.plan(command, reply)
    }

    /// Plans a command whose parameters have arrived.
    pub(super) fn parameters(&mut self, packet: &Cdb, data: &[u8]) -> Result<Plan, Failure> {
        let Self { state, profile, medium } = self;
        let State::Disk(state) = state else {
            return self.ask(|unit| unit.parameters(packet, data));
        };
        let geometry = medium.as_ref().ok_or(Failure::ABORTED)?.geometry();
        Disk { state, serial: &profile.serial, geometry: &geometry }.parameters(data)
    }

    fn plan_cdrom(
        &mut self,
        command: &Command,
        packet: &Cdb,
        reply: &mut Reply,
    ) -> Result<Plan, Failure> {
        let State::Cdrom { mode, standby, .. } = &mut self.state else {
            return Err(Failure::ABORTED);
        };
        match command.code {
            PACKET => {
                reply.count = ENDED;
                *standby = false;
                let mut cdb = *packet;
                cdb[PACKET_LENGTH..].fill(0);
                return self.ask(|unit| unit.plan(&cdb));
            }
            0xa1 => return Ok(Plan::Answer(identify::cdrom(&self.profile.serial, *mode))),
            // DEVICE RESET, EXECUTE DEVICE DIAGNOSTIC.
            0x08 | 0x90 => *reply = CDROM_SIGNATURE,
            // READ SECTORS and IDENTIFY DEVICE show that it is no disk.
            0x20 | 0xec => {
                *reply = Reply { status: reply.status, error: reply.error, ..CDROM_SIGNATURE };
                return Err(Failure::ABORTED);
            }
            // SET FEATURES: the transfer mode.
            0xef if command.feature() == 3 => match command.count.to_le_bytes()[0] {
                value @ (0 | 1 | 0x08..=0x0c | 0x20..=0x22 | 0x40..=0x46) => *mode = value,
                _ => return Err(Failure::ABORTED),
            },
            // SET FEATURES: settings stay after a software reset, as they do in any case. Windows
            // sends this to every device.
            0xef if matches!(command.feature(), 0x66 | 0xcc) => {}
            0xe0 | 0xe2 | 0xe6 => *standby = true,
            0xe1 | 0xe3 => *standby = false,
            0xe5 => reply.count = if *standby { 0 } else { 0xff },
            _ => return Err(Failure::ABORTED),
        }
        Ok(Plan::Done)
    }

    fn ask(
        &mut self,
        act: impl FnOnce(&mut Unit<'_>) -> Result<Plan, Sense>,
    ) -> Result<Plan, Failure> {
        let geometry = self.medium.as_ref().map(|it| it.geometry());
        let State::Cdrom { conditions, .. } = &mut self.state else {
            return Err(Failure::ABORTED);
        };
        let unit = &mut Unit { profile: &self.profile, conditions, medium: geometry.as_ref() };
        act(unit).map_err(|sense| self.check_condition(sense))
    }

    /// Keeps sense data for REQUEST SENSE.
    pub(super) fn check_condition(&mut self, sense: Sense) -> Failure {
        if let State::Cdrom { conditions, .. } = &mut self.state {
            conditions.fail(sense);
        }
        Failure { status: DRDY | DSC | ERR, error: sense.key() << 4 }
    }

    /// The failure of a command whose request to the medium failed.
    pub(super) fn failure(&mut self, fault: Fault, write: bool) -> Failure {
        match &mut self.state {
            State::Disk(state) => {
                let broken = u32::from(fault == Fault::Broken);
                state.failures = state.failures.saturating_add(broken);
                Failure::of(fault, write)
            }
            State::Cdrom { .. } => self.check_condition(scsi::sense_for(fault, write)),
        }
    }

    pub(super) fn log_queued(&mut self, error: QueuedError) {
        if let State::Disk(state) = &mut self.state {
            state.queued_error = Some(error);
        }
    }

    pub(super) fn reset(&mut self) {
        match &mut self.state {
            State::Disk(state) => state.reset(),
            State::Cdrom { conditions, standby, .. } => {
                conditions.reset();
                *standby = false;
            }
        }
    }

    pub(super) fn signature(&self) -> Reply {
        if self.profile.cdrom { CDROM_SIGNATURE } else { ata::SIGNATURE }
    }

    /// Whether the data of a command moves by DMA, and not by PIO.
    pub(super) fn is_dma(&self, command: &Command) -> bool {
        if self.profile.cdrom {
            return command.code == PACKET && command.feature() & PACKET_DMA != 0;
        }
        ata::is_dma(command.code)
    }

    pub(super) fn is_queued(&self, command: &Command) -> bool {
        !self.profile.cdrom && ata::is_queued(command.code)
    }

    pub(super) fn is_packet(&self, command: &Command) -> bool {
        self.profile.cdrom && command.code == PACKET
    }

    /// A command that needs the medium fails from now on.
    pub(super) fn remove_medium(&mut self) {
        self.medium = None;
        if let State::Cdrom { conditions, out, .. } = &mut self.state {
            (*out, conditions.prevented, conditions.news) = (true, false, MediaEvent::Removal);
        }
    }

    pub(super) fn insert(&mut self, medium: Arc<Drive>) {
        self.medium = Some(medium);
        if let State::Cdrom { conditions, out, .. } = &mut self.state {
            *out = false;
            conditions.add_attention(Sense::MEDIUM_CHANGED);
            conditions.news = MediaEvent::NewMedium;
        }
    }

    /// The state at power-on.
    pub(super) fn power_on(&self) -> State {
        if self.profile.cdrom { State::cdrom() } else { State::disk() }
    }

    /// A medium that was removed when the state was saved is removed again.
    pub(super) fn restore(&mut self, state: State) {
        let was_out = matches!(state, State::Cdrom { out: true, .. });
        self.state = state;
        if was_out {
            self.medium = None;
        }
        if let State::Cdrom { out, .. } = &mut self.state {
            *out = self.medium.is_none();
        }
    }
}
