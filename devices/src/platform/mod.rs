//! The chips that a PC has had since its beginnings, and those that firmware expects of a Q35.

pub mod debugcon;
pub mod flash;
pub mod fw_cfg;
pub mod hpet;
pub mod i8042;
pub(crate) mod pm;
pub mod rtc;
pub mod serial;
pub mod tpm;
