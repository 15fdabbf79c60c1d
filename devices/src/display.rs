//! Displays: the registers, the monitor's description (EDID), and its preferred resolution.

pub mod bochs;
mod edid;
mod resolution;

pub use self::resolution::Resolution;
