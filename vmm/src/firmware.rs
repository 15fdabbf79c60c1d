//! What firmware finds in fw_cfg.

use std::sync::{Arc, OnceLock};

use anyhow::Context;
use boot::fw_cfg::{self as files, Files};
use boot::{acpi, e820};
use devices::platform::fw_cfg::{self, Content, File};

use crate::description::Description;
use crate::machine::Plan;

/// Room for the ACPI files: their sizes are told before their contents are known, and what is left
/// over reads as zeros, which loaders skip.
const ROOM: [(&str, u32); 3] =
    [(acpi::TABLES_FILE, 128 << 10), (acpi::RSDP_FILE, 4 << 10), (acpi::SCRIPT_FILE, 8 << 10)];

/// The files of one machine.
pub struct Source {
    keys: Vec<(u16, Vec<u8>)>,
    files: Vec<(String, Vec<u8>)>,
    description: Arc<OnceLock<Description>>,
}

impl Source {
    /// Prepares all that is known before the devices are there.
    ///
    /// # Errors
    ///
    /// When something has no place in a table, or a file cannot be read.
    pub fn new(plan: &Plan, description: Arc<OnceLock<Description>>) -> anyhow::Result<Self> {
        let cpus = plan.apic_ids.len();
        let keys = files::numbers(cpus, plan.config.smbios.uuid()?, false)?;
        let smbios = crate::description::smbios(plan)?;
        let map = e820::for_firmware(plan.ram);
        let told = Files { e820: &map, smbios: &smbios, boot_order: &[], boot_menu_ms: None };
        let files = files::files(&told)?.into_iter().map(|file| (file.name, file.bytes));
        let mut files: Vec<_> = files.collect();
        for item in &plan.config.fw_cfg {
            files.push((item.name.clone(), item.bytes()?));
        }
        Ok(Self { keys, files, description })
    }
}

impl fw_cfg::Source for Source {
    fn keys(&self) -> Vec<(u16, Vec<u8>)> {
        self.keys.clone()
    }

    fn files(&mut self) -> Vec<File> {
        let fixed = self.files.drain(..);
        let fixed = fixed.map(|(name, bytes)| File { name, content: Content::Fixed(bytes) });
        let lazy =
            ROOM.map(|(name, size)| File { name: name.to_owned(), content: Content::Acpi(size) });
        fixed.chain(lazy).collect()
    }

    fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
        let description = self.description.get().context("the machine is not built yet")?;
        let tables = acpi::tables(&description.platform()?)?;
        Ok(tables.files().into_iter().map(|file| (file.name, file.bytes)).collect())
    }
}
