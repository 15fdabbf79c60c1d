//! SCSI, whatever carries it: a logical unit that is a disk or a CD-ROM drive.
//!
//! A transport brings commands to a [`Unit`] and gets a [`Plan`] for each: what to answer, or what
//! the medium is to do, and that is the transport's own affair. Nothing here waits for anything.
//!
//! Threats: commands and all that comes with them are the guest's. Blocks are checked against the
//! medium before anything is planned; answers and lists are short.

mod cd;
mod commands;
mod inquiry;
mod mode;
mod operations;
mod sense;
mod unit;

pub(crate) use self::sense::Sense;
pub(crate) use self::unit::{
    Bus, CD_BLOCK, Cdb, Conditions, Move, News, Plan, Profile, Unit, fault,
};

#[cfg(test)]
mod test;
