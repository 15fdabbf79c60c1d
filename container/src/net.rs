//! The guest's network.
//!
//! `dhcp` and `dns` answer what the guest asks the pod, where its network is the pod's, and `hosts`
//! is what the pod's own file says; `nat` gives
//! it a tap of the pod with address translation; `macvtap` a card of its own on the pod's network;
//! `user` makes its connections the pod's own. `link` knows and makes interfaces, and `right` what
//! is needed for that.

mod capabilities;
pub mod dhcp;
pub mod dns;
pub mod hosts;
mod link;
pub mod macvtap;
pub mod nat;
pub mod relay;
pub mod resolv;
pub mod user;
