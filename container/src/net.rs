//! The guest's network.
//!
//! `nat` gives the guest a tap of the pod with address translation. `macvtap` gives it a card on
//! the pod's own network. With `user`, the pod opens the guest's connections itself. `dhcp` answers
//! the guest, and so does `relay`, with `dns`, `resolv` and the names of `hosts`. `link` reads and
//! creates interfaces, after `capabilities` has checked the privileges for that.

mod capabilities;
pub mod dhcp;
pub mod dns;
pub mod hosts;
pub mod link;
pub mod macvtap;
pub mod nat;
pub mod relay;
pub mod resolv;
pub mod user;

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener};

/// The address that stands for all of the pod's, when a port is bound. Where the kernel has no
/// IPv6, `::` cannot be bound.
pub fn every_address() -> IpAddr {
    match TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)) {
        Ok(_) => Ipv6Addr::UNSPECIFIED.into(),
        Err(_) => Ipv4Addr::UNSPECIFIED.into(),
    }
}
