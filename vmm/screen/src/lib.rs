//! The screen: viewers that speak RFB, browsers, and from what they type to keys of the guest.
//!
//! It knows a display ([`host::display::Scanout`]) and keyboards ([`host::input::Hub`]), and no
//! machine: `vmm` shows its own, the container that of another process.

pub mod keys;
pub mod rfb;
pub mod web;
