//! QEMU's firmware configuration device: selector, data port, DMA and file directory
//! (QEMU `docs/specs/fw_cfg.rst`), as ACPI's `QEMU0002`.
//!
//! A [`Source`] provides the items. This file implements the ports and the transfers.
//!
//! Threats: a DMA descriptor has any address and a length of up to 4 GiB. Copies use one small
//! buffer and end at the first address that is not RAM, so a guest wastes its own time, but no
//! memory of the host. It writes only into writable files, within their size. ACPI tables are built
//! at most once per reset, even if the guest selects them more often.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Once};

use anyhow::{bail, ensure};
use serde::{Deserialize, Serialize};

use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::Grants;
use host::memory::Memory;

/// The selector port. The data port is at offset 1, the DMA address at offsets 4 and 8.
const BASE: u64 = 0x510;
/// The number of ports: selector, data, DMA address.
const LENGTH: u64 = 12;
const DATA: u64 = 1;
const DMA_HIGH: u64 = 4;
const DMA_LOW: u64 = 8;

/// `FW_CFG_SIGNATURE`: "QEMU", by which firmware recognizes the device.
const SIGNATURE: u16 = 0x0000;
/// `FW_CFG_ID`: the features of the interface.
const ID: u16 = 0x0001;
/// `FW_CFG_VERSION | FW_CFG_VERSION_DMA`.
const ID_TRADITIONAL_AND_DMA: u32 = 3;
/// `FW_CFG_FILE_DIR`.
const FILE_DIR: u16 = 0x0019;
/// `FW_CFG_FILE_FIRST`: the key of the first file.
const FILE_FIRST: u16 = 0x0020;
/// Keys of files are lower: bit 14 of a key means "write" in old interfaces.
const FILE_END: u16 = 0x4000;
/// `FW_CFG_MAX_FILE_PATH`, with the NUL at the end.
const NAME_LENGTH: usize = 56;
/// The value of the DMA address registers when read, big-endian.
const DMA_SIGNATURE: [u8; 8] = *b"QEMU CFG";

// `FW_CFG_DMA_CTL_*`. We never report an error: OVMF waits forever for a zero, and ignores the
// error bit.
const CTL_READ: u32 = 1 << 1;
const CTL_SKIP: u32 = 1 << 2;
const CTL_SELECT: u32 = 1 << 3;
const CTL_WRITE: u32 = 1 << 4;

/// The size of the copy buffer in bytes.
const CHUNK: usize = 16 << 10;
/// The maximum number of zeros that a read returns beyond the end of an item. The device is locked
/// during the whole read.
const MAX_ZEROS: usize = 1 << 20;
/// The maximum size of a writable file in bytes. Guests write a few addresses or a mode, never bulk
/// data.
const WRITABLE_MAX: usize = 64 << 10;

pub trait Source: Send {
    /// The numbered items, such as the number of processors or a kernel. Called once.
    fn keys(&mut self) -> Vec<(u16, Vec<u8>)>;
    /// The files. Called once, because the guest remembers their numbers.
    fn files(&mut self) -> Vec<File>;
    /// Names and contents of the files that are [`Content::Acpi`].
    ///
    /// Called on a vCPU's thread when the guest first selects one of them after a reset: PCI
    /// windows and BARs are programmed by then. It may access other devices through the bus.
    /// If it fails, the guest finds empty files.
    fn acpi(&mut self) -> anyhow::Result<Vec<(String, Vec<u8>)>>;
}

/// Receives the content of a writable file after each write of the guest, and when the device
/// starts to run. It is called on a vCPU's thread, and must not block or call devices.
pub type OnWrite = Arc<dyn Fn(&[u8]) + Send + Sync>;

/// Returns the content of a file when the guest selects it. It is called on a vCPU's thread, and
/// must not block or call devices.
pub type Compute = Arc<dyn Fn() -> Vec<u8> + Send + Sync>;

pub struct File {
    /// The name in the directory, such as `etc/e820` or `opt/org.example/answer`.
    pub name: String,
    pub content: Content,
}

pub enum Content {
    Fixed(Vec<u8>),
    /// Built by [`Source::acpi`] after the guest has read this size in the directory. The rest of
    /// the size reads as zeros. Guests skip zeros at the end of a loader script (commands of type
    /// 0) and of tables.
    Acpi(u32),
    /// Computed each time that the guest selects the file, with this size.
    Computed(u32, Compute),
    /// Written by the guest. These are the content at power-on, which also fixes the size, and the
    /// function that receives the content.
    Writable(Vec<u8>, OnWrite),
}

impl fmt::Debug for File {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} bytes)", self.name, self.content.size())
    }
}

impl Content {
    fn size(&self) -> usize {
        match self {
            Self::Fixed(bytes) | Self::Writable(bytes, _) => bytes.len(),
            Self::Acpi(size) | Self::Computed(size, _) => *size as usize,
        }
    }
}

pub fn build(
    mut source: Box<dyn Source>,
    grants: &mut dyn Grants,
) -> anyhow::Result<Box<dyn Device>> {
    grants.claim(Kind::Port, BASE..BASE + LENGTH)?;
    grants.acpi("QEMU0002");
    let items = items(source.as_mut())?;
    let memory = grants.shared().memory.clone();
    let (registers, logged) = (Registers::default(), Once::new());
    Ok(Box::new(FwCfg { items, memory, source, registers, logged }))
}

fn items(source: &mut dyn Source) -> anyhow::Result<BTreeMap<u16, Item>> {
    let mut items = BTreeMap::new();
    items.insert(SIGNATURE, Item::numbered(b"QEMU".to_vec()));
    items.insert(ID, Item::numbered(ID_TRADITIONAL_AND_DMA.to_le_bytes().to_vec()));
    let mut files = source.files();
    files.sort_by(|one, other| one.name.cmp(&other.name));
    items.insert(FILE_DIR, Item::numbered(directory(&files)?));
    for (key, bytes) in source.keys() {
        ensure!(
            !(FILE_FIRST..FILE_END).contains(&key),
            "fw_cfg key {key:#x} is reserved for files"
        );
        ensure!(!items.contains_key(&key), "fw_cfg key {key:#x} is taken");
        items.insert(key, Item::numbered(bytes));
    }
    items.extend((FILE_FIRST..).zip(files.into_iter().map(Item::file)));
    Ok(items)
}

/// Encodes `struct FWCfgFiles`. All numbers are big-endian.
fn directory(files: &[File]) -> anyhow::Result<Vec<u8>> {
    let room = usize::from(FILE_END - FILE_FIRST);
    ensure!(files.len() <= room, "{} fw_cfg files: the maximum is {room}", files.len());
    let mut bytes = u32::try_from(files.len())?.to_be_bytes().to_vec();
    for (key, file) in (FILE_FIRST..).zip(files) {
        let (name, size) = (&file.name, file.content.size());
        let fits = (1..NAME_LENGTH).contains(&name.len());
        if !fits || !name.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            bail!("invalid name of a fw_cfg file {name:?}: use 1 to 55 printable ASCII characters");
        }
        if matches!(file.content, Content::Writable(..)) && size > WRITABLE_MAX {
            bail!(
                "the writable fw_cfg file {name} has {size} bytes: the maximum is {WRITABLE_MAX}"
            );
        }
        let Ok(size) = u32::try_from(size) else {
            bail!("the fw_cfg file {name} has {size} bytes: the maximum is 4 GiB");
        };
        bytes.extend(size.to_be_bytes());
        bytes.extend(key.to_be_bytes());
        bytes.extend([0; 2]);
        let mut field = [0; NAME_LENGTH];
        field[..name.len()].copy_from_slice(name.as_bytes());
        bytes.extend(field);
    }
    if let Some(twice) = files.windows(2).find(|pair| pair[0].name == pair[1].name) {
        bail!("there are two fw_cfg files {}", twice[0].name);
    }
    Ok(bytes)
}

struct Item {
    /// Empty for numbered items.
    name: String,
    size: usize,
    /// At most `size` bytes. The rest of the item reads as zeros.
    bytes: Vec<u8>,
    nature: Nature,
}

enum Nature {
    Fixed,
    Acpi,
    Computed(Compute),
    Writable { initial: Vec<u8>, written: OnWrite },
}

impl Item {
    fn numbered(bytes: Vec<u8>) -> Self {
        Self { name: String::new(), size: bytes.len(), bytes, nature: Nature::Fixed }
    }

    fn file(file: File) -> Self {
        let size = file.content.size();
        let (bytes, nature) = match file.content {
            Content::Fixed(bytes) => (bytes, Nature::Fixed),
            Content::Acpi(_) => (Vec::new(), Nature::Acpi),
            Content::Computed(_, compute) => (Vec::new(), Nature::Computed(compute)),
            Content::Writable(initial, written) => {
                (initial.clone(), Nature::Writable { initial, written })
            }
        };
        Self { name: file.name, size, bytes, nature }
    }

    /// Fills `data` from `offset` on, with zeros beyond the end of the item.
    fn copy(&self, offset: usize, data: &mut [u8]) {
        data.fill(0);
        let from = self.bytes.get(offset..).unwrap_or_default();
        let length = from.len().min(data.len());
        data[..length].copy_from_slice(&from[..length]);
    }

    /// Whether the item may change while the machine runs, and so is part of the saved state.
    fn changes(&self) -> bool {
        !matches!(self.nature, Nature::Fixed)
    }

    /// Restores the saved content, or the content at power-on.
    fn restore(&mut self, saved: Option<Vec<u8>>) -> anyhow::Result<()> {
        let Self { name, size, .. } = self;
        self.bytes = match (&self.nature, saved) {
            (Nature::Fixed, _) => return Ok(()),
            (Nature::Acpi | Nature::Computed(_), None) => Vec::new(),
            (Nature::Acpi | Nature::Computed(_), Some(bytes)) if bytes.len() <= *size => bytes,
            (Nature::Writable { initial, .. }, None) => initial.clone(),
            (Nature::Writable { .. }, Some(bytes)) if bytes.len() == *size => bytes,
            (_, Some(bytes)) => bail!("the saved {name} has {} bytes, not {size}", bytes.len()),
        };
        if let Nature::Writable { written, .. } = &self.nature {
            written(&self.bytes);
        }
        Ok(())
    }
}

struct FwCfg {
    items: BTreeMap<u16, Item>,
    memory: Memory,
    source: Box<dyn Source>,
    registers: Registers,
    /// Missing tables are logged once, because a guest can reset the machine endlessly.
    logged: Once,
}

/// The registers. At power-on the signature is selected.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Registers {
    selected: u16,
    offset: u32,
    dma_high: u32,
    /// Whether `Source::acpi` was called since the reset.
    made: bool,
}

#[derive(Default, Serialize, Deserialize)]
struct State {
    registers: Registers,
    /// The contents of the writable files and the ACPI files, by name.
    files: BTreeMap<String, Vec<u8>>,
}

impl FwCfg {
    fn select(&mut self, key: u16) {
        self.registers.selected = key;
        self.registers.offset = 0;
        let Some(item) = self.items.get_mut(&key) else { return };
        if let Nature::Computed(compute) = &item.nature {
            item.bytes = compute();
            item.bytes.truncate(item.size);
        }
        if matches!(item.nature, Nature::Acpi) && !self.registers.made {
            self.registers.made = true;
            if let Err(error) = self.build_acpi() {
                self.logged
                    .call_once(|| tracing::error!("the guest gets no ACPI tables: {error:#}"));
            }
        }
    }

    /// Fills all ACPI files, or none: a loader script is useless without its tables.
    fn build_acpi(&mut self) -> anyhow::Result<()> {
        let mut made = self.source.acpi()?;
        let lazy = |item: &&mut Item| matches!(item.nature, Nature::Acpi);
        let mut filled = Vec::new();
        for item in self.items.values_mut().filter(lazy) {
            let Some(at) = made.iter().position(|(name, _)| *name == item.name) else {
                bail!("{} is missing in the ACPI tables", item.name);
            };
            let (name, bytes) = made.swap_remove(at);
            if bytes.len() > item.size {
                bail!("{name} has {} bytes, but only {} fit", bytes.len(), item.size);
            }
            filled.push((item, bytes));
        }
        if let Some((name, _)) = made.first() {
            bail!("{name} is not in the directory");
        }
        for (item, bytes) in filled {
            item.bytes = bytes;
        }
        Ok(())
    }

    fn next_byte(&mut self) -> u8 {
        let mut byte = [0];
        if let Some(item) = self.items.get(&self.registers.selected) {
            item.copy(self.registers.offset as usize, &mut byte);
        }
        self.skip(1);
        byte[0]
    }

    fn skip(&mut self, length: u32) {
        let size = self.items.get(&self.registers.selected).map_or(0, |item| item.size);
        // The directory limits the size of files to 32 bits. A larger numbered item is cut off.
        let end = u32::try_from(size).unwrap_or(u32::MAX);
        self.registers.offset = self.registers.offset.saturating_add(length).min(end);
    }

    /// Performs the transfer of the descriptor at `address`.
    fn transfer(&mut self, address: u64) {
        let mut descriptor = [0; 16];
        if self.memory.read(address, &mut descriptor).is_err() {
            // There is no memory for reporting the error to the guest.
            return;
        }
        let descriptor = u128::from_be_bytes(descriptor);
        // Each mask is the field's width.
        let field = |shift: u32| u32::try_from(descriptor >> shift & 0xffff_ffff).unwrap_or(0);
        let (control, length) = (field(96), field(64));
        let target = u64::from(field(32)) << 32 | u64::from(field(0));
        if control & CTL_SELECT != 0 {
            self.select(u16::try_from(control >> 16).unwrap_or(0));
        }
        if control & CTL_READ != 0 {
            self.copy_to_guest(target, length);
        } else if control & CTL_WRITE != 0 {
            self.copy_from_guest(target, length);
        }
        if control & (CTL_READ | CTL_WRITE | CTL_SKIP) != 0 {
            self.skip(length);
        }
        self.memory.write(address, &0_u32.to_be_bytes()).ok();
    }

    /// Copies from the selected item to the guest, up to the first address that is not RAM.
    fn copy_to_guest(&self, target: u64, length: u32) {
        let item = self.items.get(&self.registers.selected);
        // Bytes beyond the end read as zeros, but not gigabytes of them.
        let rest = item.map_or(0, |item| item.size).saturating_sub(self.registers.offset as usize);
        let length = length.min(u32::try_from(rest + MAX_ZEROS).unwrap_or(u32::MAX));
        let mut buffer = [0; CHUNK];
        for (at, to, size) in chunks(self.registers.offset as usize, target, length) {
            let part = &mut buffer[..size];
            match item {
                Some(item) => item.copy(at, part),
                None => part.fill(0),
            }
            if self.memory.write(to, part).is_err() {
                return;
            }
        }
    }

    /// Copies from the guest to the selected item. As in QEMU, a copy that does not fit, or whose
    /// source is not RAM, has no effect.
    fn copy_from_guest(&mut self, target: u64, length: u32) {
        let Some(item) = self.items.get_mut(&self.registers.selected) else { return };
        let Nature::Writable { written, .. } = &item.nature else { return };
        let start = self.registers.offset as usize;
        let Some(to) =
            start.checked_add(length as usize).and_then(|end| item.bytes.get_mut(start..end))
        else {
            return;
        };
        // At most `WRITABLE_MAX` bytes.
        let mut bytes = vec![0; to.len()];
        if self.memory.read(target, &mut bytes).is_ok() {
            to.copy_from_slice(&bytes);
            written(&item.bytes);
        }
    }
}

/// Splits a copy into chunks: offset, guest address and length. It ends with the address space.
fn chunks(offset: usize, target: u64, length: u32) -> impl Iterator<Item = (usize, u64, usize)> {
    (0..length as usize).step_by(CHUNK).map_while(move |done| {
        let to = target.checked_add(done as u64)?;
        Some((offset.saturating_add(done), to, CHUNK.min(length as usize - done)))
    })
}

impl Device for FwCfg {
    fn read(&mut self, _: Region, offset: u64, data: &mut [u8]) -> Access {
        match (offset, &mut *data) {
            (DATA, [byte]) => *byte = self.next_byte(),
            (DMA_HIGH..LENGTH, _) => {
                let from = usize::try_from(offset - DMA_HIGH).unwrap_or(usize::MAX);
                let Some(bytes) = DMA_SIGNATURE.get(from..).and_then(|it| it.get(..data.len()))
                else {
                    return Access::Ignored;
                };
                data.copy_from_slice(bytes);
            }
            _ => return Access::Ignored,
        }
        Access::Done
    }

    fn write(&mut self, _: Region, offset: u64, data: &[u8]) -> Access {
        match (offset, data) {
            (0, &[low, high]) => self.select(u16::from_le_bytes([low, high])),
            // Writing items through this port is obsolete, and has no effect.
            (DATA, [_]) => {}
            (DMA_HIGH, &[a, b, c, d]) => self.registers.dma_high = u32::from_be_bytes([a, b, c, d]),
            (DMA_LOW, &[a, b, c, d]) => {
                let high = std::mem::take(&mut self.registers.dma_high);
                let low = u32::from_be_bytes([a, b, c, d]);
                self.transfer(u64::from(high) << 32 | u64::from(low));
            }
            (DMA_HIGH, &[a, b, c, d, e, f, g, h]) => {
                self.registers.dma_high = 0;
                self.transfer(u64::from_be_bytes([a, b, c, d, e, f, g, h]));
            }
            _ => return Access::Ignored,
        }
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let changing = self.items.values().filter(|item| item.changes());
        let files = changing.map(|item| (item.name.clone(), item.bytes.clone())).collect();
        Saved::of(&State { registers: self.registers.clone(), files })
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let State { registers, mut files } = saved.take()?;
        for item in self.items.values_mut() {
            item.restore(files.remove(&item.name))?;
        }
        if let Some((name, _)) = files.pop_first() {
            bail!("the saved state has a fw_cfg file {name}, which this machine does not have");
        }
        self.registers = registers;
        Ok(())
    }
}

#[cfg(test)]
mod test;
