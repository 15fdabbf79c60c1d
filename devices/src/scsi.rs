//! SCSI without a transport: a logical unit that is a disk or a CD-ROM drive.
//!
//! A transport passes commands to a [`Unit`] and gets a [`Plan`] for each: an answer, or an
//! operation on the medium that the transport carries out. Nothing here blocks.
//!
//! Threats: commands and their parameters come from the guest. Blocks are checked against the
//! medium before anything is planned. Answers and lists are short.

mod cd;
mod commands;
mod inquiry;
mod medium;
mod mode;
mod operations;
mod sense;
mod unit;

pub(crate) use self::medium::open as open_medium;
pub(crate) use self::sense::Sense;
pub(crate) use self::unit::{
    BlockTransfer, Bus, Cdb, Conditions, MediaEvent, Plan, Profile, Unit, sense_for,
};

#[cfg(test)]
mod test;
