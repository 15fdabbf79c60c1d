//! The devices of a PC: their registers, their back ends, and the buses that connect them.
//!
//! Read `device.rs` (the interface of a device) and `grants.rs` (the resources it may request)
//! first. No device knows the hypervisor: its services are traits in `hypervisor.rs`.
#![deny(unsafe_code)]

pub mod ahci;
pub mod alarm;
pub mod balloon;
pub mod board;
pub mod bus;
pub mod bytes;
pub mod device;
pub mod display;
pub mod e1000e;
pub mod grants;
pub mod hda;
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
mod sleep;
pub mod smi;
pub mod testutil;
pub mod time;
pub mod usb;
pub mod virtio;
pub mod worker;
