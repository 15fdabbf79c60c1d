//! The contents of fw_cfg, for firmware.

use std::fs;
use std::path::Path;
use std::str::FromStr as _;
use std::sync::{Arc, OnceLock};

use anyhow::{Context, bail};
use boot::acpi::{self, vmgenid};
use boot::e820;
use boot::fw_cfg::{self as files, Files};
use devices::board::Board;
use devices::platform::fw_cfg::{self, Content, File};
use devices::smi::{self, Negotiation};
use host::uuid::Uuid;

use super::Generation;
use super::description::Description;
use super::{Plan, order};
use crate::config::Config;

/// Reserved sizes of the ACPI files. Sizes are announced before the contents are known; the rest
/// reads as zeros, which loaders skip.
const RESERVED_BYTES: [(&str, u32); 4] = [
    (acpi::TABLES_FILE, 128 << 10),
    (acpi::RSDP_FILE, 4 << 10),
    (acpi::SCRIPT_FILE, 8 << 10),
    (vmgenid::PAGE_FILE, 4 << 10),
];

/// The fw_cfg files of one machine.
pub(super) struct Source {
    keys: Vec<(u16, Vec<u8>)>,
    files: Vec<(String, Vec<u8>)>,
    description: Arc<OnceLock<Description>>,
    generation: Arc<Generation>,
    /// With system-management mode.
    smi: Option<Arc<Negotiation>>,
}

impl Source {
    /// Prepares all files that do not change later. All other devices must be on the board.
    pub(super) fn new(
        plan: &Plan,
        board: &Board,
        description: Arc<OnceLock<Description>>,
    ) -> anyhow::Result<Self> {
        let cpus = plan.apic_ids.len();
        let uuid = Uuid::from_str(&plan.config.smbios.uuid)?;
        let mut keys = files::numbers(cpus, uuid.0, false)?;
        keys.extend(kernel(&plan.config)?);
        let smbios = super::description::smbios(plan)?;
        let map = e820::for_firmware(plan.ram);
        let order = order::paths(&plan.config.boot.0, board)?;
        let tables = Files { e820: &map, smbios: &smbios, boot_order: &order, boot_menu_ms: None };
        let files = files::files(&tables)?.into_iter().map(|file| (file.name, file.bytes));
        let mut files: Vec<_> = files.collect();
        files.extend(tpm_files(board)?);
        for item in &plan.config.fw_cfg {
            files.push((item.name.clone(), item.bytes()?));
        }
        let (generation, smi) = (plan.generation.clone(), &board.shared.smi);
        let smi = plan.smm.then(|| smi.clone());
        Ok(Self { keys, files, description, generation, smi })
    }
}

/// The files in which firmware and the chip set agree on features of system-management interrupts.
fn smi_files(smi: &Arc<Negotiation>) -> [File; 3] {
    let (requests, agrees) = (smi.clone(), smi.clone());
    let written =
        move |bytes: &[u8]| requests.request(bytes.try_into().map_or(0, u64::from_le_bytes));
    let agree = move || vec![u8::from(agrees.agree())];
    let supported = smi::SUPPORTED.to_le_bytes().to_vec();
    [
        ("etc/smi/supported-features", Content::Fixed(supported)),
        ("etc/smi/requested-features", Content::Writable(vec![0; 8], Arc::new(written))),
        ("etc/smi/features-ok", Content::Computed(1, Arc::new(agree))),
    ]
    .map(|(name, content)| File { name: name.to_owned(), content })
}

/// With a TPM: the buffer in which firmware logs its measurements for the operating system, and the
/// place of requests to firmware.
fn tpm_files(board: &Board) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
    let nodes = super::description::nodes(board);
    let Some(tpm) = nodes.iter().find(|node| node.hid == acpi::TPM) else { return Ok(Vec::new()) };
    let presence = tpm.memory.get(1).context("a TPM without a place for requests to firmware")?;
    let files = [acpi::event_log(), acpi::presence_file(presence)?];
    Ok(files.into_iter().map(|file| (file.name, file.bytes)).collect())
}

/// The keys for size and data of each part: the kernel's set-up part, the rest of the kernel, the
/// initial RAM disk, the command line.
const SETUP: (u16, u16) = (0x17, 0x18);
const KERNEL: (u16, u16) = (0x08, 0x11);
const INITRD: (u16, u16) = (0x0b, 0x12);
const COMMAND_LINE: (u16, u16) = (0x14, 0x15);
/// Offsets in a bzImage (Linux, Documentation/arch/x86/boot.rst): the number of set-up sectors
/// after the first, where 0 means 4; and the magic number.
const SETUP_SECTORS: usize = 0x1f1;
const MAGIC: std::ops::Range<usize> = 0x202..0x206;

fn kernel(config: &Config) -> anyhow::Result<Vec<(u16, Vec<u8>)>> {
    let (Some(_), Some(path)) = (&config.firmware, &config.kernel) else { return Ok(Vec::new()) };
    let read = |what: &str, path: &Path| {
        fs::read(path).with_context(|| format!("--{what} {}", path.display()))
    };
    let mut setup = read("kernel", path)?;
    if setup.get(MAGIC) != Some(b"HdrS") {
        bail!("--kernel {}: not a bzImage, as firmware needs it", path.display());
    }
    let sectors = match setup[SETUP_SECTORS] {
        0 => 4,
        count => usize::from(count),
    };
    let rest = setup.split_off(((sectors + 1) * 512).min(setup.len()));
    let mut command_line = config.cmdline.clone().unwrap_or_default().into_bytes();
    command_line.push(0);
    let mut items = vec![(SETUP, setup), (KERNEL, rest), (COMMAND_LINE, command_line)];
    if let Some(path) = &config.initrd {
        items.push((INITRD, read("initrd", path)?));
    }
    let mut keys = Vec::new();
    for ((size, data), bytes) in items {
        let length = u32::try_from(bytes.len()).context("a kernel of more than 4 GiB")?;
        keys.push((size, length.to_le_bytes().to_vec()));
        keys.push((data, bytes));
    }
    Ok(keys)
}

impl fw_cfg::Source for Source {
    fn keys(&mut self) -> Vec<(u16, Vec<u8>)> {
        std::mem::take(&mut self.keys)
    }

    fn files(&mut self) -> Vec<File> {
        let fixed = self.files.drain(..);
        let fixed = fixed.map(|(name, bytes)| File { name, content: Content::Fixed(bytes) });
        let lazy = RESERVED_BYTES.map(|(name, size)| {
            let content = Content::Acpi(size);
            File { name: name.to_owned(), content }
        });
        let smi = self.smi.iter().flat_map(smi_files);
        fixed.chain(lazy).chain([self.generation.address_file()]).chain(smi).collect()
    }

    fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>> {
        let description = self.description.get().context("the machine is not built yet")?;
        let tables = acpi::tables(&description.platform()?)?;
        Ok(tables.files().into_iter().map(|file| (file.name, file.bytes)).collect())
    }
}
