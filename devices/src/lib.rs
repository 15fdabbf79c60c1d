//! Devices of a PC: registers, the back ends behind them, and the buses in front of them.
//!
//! Read `device.rs` and `grants.rs` first: what a device is, and what it may ask for. No device
//! knows the hypervisor; what that lends is in `hypervisor.rs`.
#![deny(unsafe_code)]

pub mod alarm;
pub mod balloon;
pub mod board;
pub mod bus;
pub mod bytes;
pub mod device;
pub mod display;
pub mod grants;
pub mod hypervisor;
pub mod line;
pub mod nvme;
pub mod pages;
pub mod pci;
pub mod platform;
pub mod poller;
pub mod power;
mod presses;
pub mod registry;
pub mod resources;
mod scsi;
pub mod testutil;
pub mod usb;
pub mod virtio;
pub mod worker;
