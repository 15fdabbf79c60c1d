//! Memory contents and firmware files that a PC needs to start.
//!
//! The crate is pure: it takes a description of the machine, and returns bytes with their
//! addresses. It knows neither hypervisors nor devices. A guest can start in two ways, and both
//! provide the same tables:
//! * **Firmware** ([`fw_cfg`]): stock UEFI firmware asks for files by name. ACPI comes as blobs
//!   with a linker script ([`acpi::Tables::files`]), SMBIOS as an anchor and its structures.
//! * **Direct boot** ([`linux`]): this crate puts the kernel into memory, with the tables at fixed
//!   addresses ([`acpi::Tables::image`], [`smbios::Smbios::image`]).
//!
//! [`layout`] defines the layout of guest-physical memory, and [`e820`] describes it to the guest.

#![forbid(unsafe_code)]

pub mod acpi;
pub mod e820;
pub mod file;
pub mod fw_cfg;
pub mod layout;
pub mod linux;
pub mod smbios;

/// Runs of bytes, each with its guest-physical address. The runs do not overlap.
pub type Image = Vec<(u64, Vec<u8>)>;
