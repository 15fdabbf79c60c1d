//! The guest's network.
//!
//! `dhcp` and `relay` answer what the guest asks the pod, in any mode: its address and names. `nat`
//! gives it a tap of the pod's, with address translation.

pub mod dhcp;
pub mod dns;
pub mod nat;
pub mod relay;
pub mod resolv;
