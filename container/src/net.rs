//! The guest's network.
//!
//! `dhcp` and `dns` answer what the guest asks the pod, in any mode; `nat` gives it a tap of the
//! pod with address translation; `user` makes its connections the pod's own.

pub mod dhcp;
pub mod dns;
pub mod nat;
pub mod relay;
pub mod resolv;
pub mod user;
