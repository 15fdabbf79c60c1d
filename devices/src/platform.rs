//! The legacy chips of a PC, and the chips that firmware expects in a Q35.

pub mod debugcon;
pub mod flash;
pub mod fw_cfg;
pub mod hpet;
pub mod i8042;
pub(crate) mod pm;
pub mod rtc;
pub mod serial;
pub mod tpm;
