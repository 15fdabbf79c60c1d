//! The files and numbers that stock firmware reads from fw_cfg.
//!
//! This module provides contents only: the ports, the directory and the transfers belong to the
//! device. The ACPI files are not among [`files`], because they depend on how the firmware programs
//! PCI; see [`crate::acpi::Tables::files`].

use anyhow::{Result, ensure};

use crate::e820::{self, Entry};
use crate::file::File;
use crate::smbios::Smbios;

#[derive(Clone, Debug)]
pub struct Files<'a> {
    pub e820: &'a [Entry],
    pub smbios: &'a Smbios,
    /// OpenFirmware paths of the boot devices in order. If empty, the firmware boots the first
    /// device that it finds.
    pub boot_order: &'a [String],
    /// How long the firmware shows the boot menu's prompt, in milliseconds.
    pub boot_menu_ms: Option<u16>,
}

/// S-states: bit 7 marks a supported state, the low bits are its sleep type. Only S0 and S5 exist.
const SYSTEM_STATES: [u8; 6] = [0x80, 0, 0, 0, 0, 0x80 | crate::acpi::S5_SLEEP_TYPE];

/// Returns all files except those of ACPI.
pub fn files(files: &Files<'_>) -> Result<Vec<File>> {
    let [anchor, tables] = files.smbios.files()?;
    let mut all = vec![
        File::new("etc/e820", e820::bytes(files.e820)),
        anchor,
        tables,
        File::new("etc/system-states", SYSTEM_STATES.to_vec()),
    ];
    if !files.boot_order.is_empty() {
        for path in files.boot_order {
            ensure!(
                path.starts_with('/') && path.bytes().all(|byte| byte.is_ascii_graphic()),
                "{path:?} is not an OpenFirmware path: it must start with `/` and have no spaces"
            );
        }
        // The firmware ignores the file if its last byte is not 0.
        let list = files.boot_order.join("\n") + "\n\0";
        all.push(File::new("bootorder", list.into_bytes()));
    }
    if let Some(wait) = files.boot_menu_ms {
        all.push(File::new("etc/boot-menu-wait", wait.to_le_bytes().to_vec()));
    }
    Ok(all)
}

pub const KEY_UUID: u16 = 0x0002;
/// The key of the number of processors that start: the firmware waits for exactly this number.
pub const KEY_CPU_COUNT: u16 = 0x0005;
pub const KEY_BOOT_MENU: u16 = 0x000E;
pub const KEY_CPU_COUNT_MAX: u16 = 0x000F;

/// Returns the values of the numeric keys. Missing keys (no kernel, no initrd) read as zeros. The
/// device itself provides the signature and the features.
pub fn numbers(cpus: usize, uuid: [u8; 16], boot_menu: bool) -> Result<Vec<(u16, Vec<u8>)>> {
    ensure!(cpus > 0, "a machine without a processor");
    let count =
        u16::try_from(cpus).map_err(|_| anyhow::anyhow!("{cpus} processors: at most 65535"))?;
    Ok(vec![
        (KEY_UUID, uuid.to_vec()),
        (KEY_CPU_COUNT, count.to_le_bytes().to_vec()),
        (KEY_BOOT_MENU, u16::from(boot_menu).to_le_bytes().to_vec()),
        (KEY_CPU_COUNT_MAX, count.to_le_bytes().to_vec()),
    ])
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::file::NAME_MAX;
    use crate::layout::Ram;
    use crate::smbios::Processors;

    fn all(order: &[&str], wait: Option<u16>) -> Result<Vec<File>> {
        let processors = Processors { sockets: 1, cores: 1, threads: 1, ..Processors::default() };
        let smbios = Smbios { processors, ..Smbios::default() };
        let boot_order: Vec<_> = order.iter().map(|path| (*path).to_owned()).collect();
        let e820 = e820::for_firmware(Ram::new(5 << 30));
        let (smbios, boot_order) = (&smbios, boot_order.as_slice());
        files(&Files { e820: &e820, smbios, boot_order, boot_menu_ms: wait })
    }

    fn get(files: &[File], name: &str) -> Option<Vec<u8>> {
        files.iter().find(|file| file.name == name).map(|file| file.bytes.clone())
    }

    #[test]
    fn terminates_the_boot_order_for_firmware() {
        let files = all(&["/pci@i0cf8/scsi@2/disk@0,0", "/pci@i0cf8/ethernet@3"], None).unwrap();
        assert_eq!(
            get(&files, "bootorder").unwrap(),
            b"/pci@i0cf8/scsi@2/disk@0,0\n/pci@i0cf8/ethernet@3\n\0"
        );
        assert_eq!(get(&all(&[], None).unwrap(), "bootorder"), None);
    }

    #[test]
    fn refuses_invalid_boot_order_paths() {
        for path in ["", "disk", "/a\nb", "/a b", "/a\0"] {
            assert!(all(&[path], None).unwrap_err().to_string().contains("path"), "{path:?}");
        }
    }

    #[test]
    fn offers_neither_s3_nor_s4() {
        let states = get(&all(&[], None).unwrap(), "etc/system-states").unwrap();
        assert_eq!(states.iter().map(|state| state >> 7).collect::<Vec<_>>(), [1, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn gives_the_memory_map_and_the_menu_time() {
        let files = all(&[], Some(0x1234)).unwrap();
        assert_eq!(get(&files, "etc/e820").unwrap().len(), 3 * 20);
        assert_eq!(get(&files, "etc/boot-menu-wait").unwrap(), [0x34, 0x12]);
        assert!(files.iter().all(|file| file.name.len() <= NAME_MAX));
    }

    #[test]
    fn counts_processors_in_sixteen_bits() {
        let numbers = numbers(300, [7; 16], true).unwrap();
        assert!(numbers.contains(&(KEY_CPU_COUNT, vec![0x2C, 0x01])));
        assert!(numbers.contains(&(KEY_BOOT_MENU, vec![1, 0])));
        assert!(super::numbers(0, [0; 16], false).is_err());
        assert!(super::numbers(65536, [0; 16], false).is_err());
    }
}
