//! Displays: registers, what their monitor says, and the sizes that it prefers.

pub mod bochs;
mod edid;
mod resolution;

pub use self::resolution::Resolution;
