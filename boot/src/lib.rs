//! What a PC finds in its memory and in its firmware's files when it starts.
//!
//! Pure: a description of the machine goes in, bytes and the place for them come out. Nothing here
//! knows a hypervisor or a device. There are two ways into a guest, and both get the same tables:
//!
//! * **Firmware** ([`fw_cfg`]): stock UEFI firmware asks for files by name. ACPI comes as blobs
//!   with a linker script ([`acpi::Tables::files`]), SMBIOS as an anchor and its structures.
//! * **Direct boot** ([`linux`]): the kernel is put into memory by us, with the tables at fixed
//!   addresses ([`acpi::Tables::image`], [`smbios::Smbios::image`]).
//!
//! [`layout`] says where everything is in guest-physical memory, [`e820`] says it to the guest.

#![forbid(unsafe_code)]

pub mod acpi;
pub mod e820;
pub mod file;
pub mod fw_cfg;
pub mod layout;
pub mod linux;
pub mod smbios;

/// Bytes, each run with the guest-physical address that it belongs to. The runs do not overlap.
pub type Image = Vec<(u64, Vec<u8>)>;
