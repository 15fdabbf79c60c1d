//! Devices of a PC: registers, the back ends behind them, and the buses in front of them.
//!
//! Read `device.rs` first: it is the whole vocabulary. No device knows the hypervisor; what that
//! lends is in `hypervisor.rs`.
#![deny(unsafe_code)]

pub mod alarm;
pub mod balloon;
pub mod board;
pub mod bus;
pub mod bytes;
pub mod device;
pub mod display;
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
mod scsi;
pub mod testutil;
pub mod usb;
pub mod virtio;
pub mod worker;
