//! Displays: the registers, the monitor's description (EDID), and its preferred resolution.

pub mod bochs;
pub(crate) mod edid;
mod resolution;

pub use self::resolution::Resolution;
