//! The guest's network.
//!
//! `dhcp` and `relay` answer what the guest asks the pod, in any mode: its address and names.

pub mod dhcp;
pub mod dns;
pub mod relay;
pub mod resolv;
