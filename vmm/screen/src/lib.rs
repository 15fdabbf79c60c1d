//! The screen server: VNC clients (RFB), browsers, and the translation of their keys for the guest.
//!
//! This crate knows a display ([`host::display::Scanout`]) and keyboards ([`host::input::Hub`]),
//! but no machine. `vmm` serves the screen of its own machine, the container that of another
//! process.

pub mod keys;
pub mod rfb;
pub mod web;
