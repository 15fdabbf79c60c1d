//! The firmware's flash memory: CODE ends at 4 GiB, and VARS, which the guest programs, is below
//! it.
//!
//! Implements the part of Intel's command set (`CFI` primary set 1) that OVMF uses: one-byte
//! program, erase of 4 KiB blocks, and status. The guest reads and executes both images directly.
//! Only its writes reach the device.
//!
//! With `smm`, the chips take commands from processors in system-management mode only. Others read
//! the array, and their writes have no effect.
//!
//! Threats: the guest may write anything at any width at any time. Commands and data stay within
//! the two images, and CODE is never written. Each byte is in the file (the page cache) before the
//! guest continues, in the guest's order: killing the process at any moment has the effect of a
//! power cut, which the firmware's fault-tolerant writes are designed for. If the disk fails, the
//! file stays at one point of that order. The guest continues in memory, and sees the program error
//! bit.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};

use crate::alarm::Alarm;
use crate::device::{Access, Device, Kind, Region, Saved};
use crate::grants::{Build, Grants};
use crate::hypervisor::{Backing, GuestAccess};
use host::disk::Disks;
use host::gate::Gate;
use host::lock;

/// `--device flash,code=OVMF_CODE_4M.fd,vars=VARS.fd`
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// The firmware image. It is opened read-only.
    pub code: PathBuf,
    /// The firmware's variable store: your own copy of it, which the guest writes to.
    #[serde(default)]
    pub vars: Option<PathBuf>,
    /// Opens `vars` read-only: the guest's changes to it are lost when the machine ends.
    #[serde(default)]
    pub readonly: bool,
    /// Only processors in system-management mode can change `vars`, as firmware with Secure Boot
    /// requires. Set by `--smm on`.
    #[serde(default)]
    pub smm: bool,
}

/// Firmware ends at 4 GiB: the reset vector is in its last 16 bytes.
const END: u64 = 1 << 32;
/// Maximum size of both images together. The local APICs, among others, are at lower addresses.
const MAX_SIZE: u64 = 16 << 20;
/// The erase block, and the unit of sizes.
const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = BLOCK_BYTES as u64;
const RESET_VECTOR: usize = 16;

/// `EFI_FIRMWARE_VOLUME_HEADER.FileSystemGuid` (PI 1.8, volume 3, 3.2.1).
const FV_GUID: usize = 0x10;
const FV_LENGTH: usize = 0x20;
const FV_SIGNATURE: usize = 0x28;
/// `gEfiSystemNvDataFvGuid`, fff12b8d-7696-4c8b-a985-2747075b4f50: the volume holds variables.
const NV_DATA: [u8; 16] = [
    0x8d, 0x2b, 0xf1, 0xff, 0x96, 0x76, 0x8b, 0x4c, 0xa9, 0x85, 0x27, 0x47, 0x07, 0x5b, 0x4f, 0x50,
];

/// Program: the next write is the data.
const PROGRAM: u8 = 0x10;
/// Erase: unless the next write is `ERASE_CONFIRM`, nothing is erased.
const ERASE: u8 = 0x20;
const ERASE_CONFIRM: u8 = 0xd0;
/// Clear status: OVMF then expects to read the array. After the next `READ_STATUS` it expects a
/// status of zero.
const CLEAR_STATUS: u8 = 0x50;
const READ_STATUS: u8 = 0x70;

const STATUS_READY: u8 = 1 << 7;
const STATUS_ERASE_ERROR: u8 = 1 << 5;
const STATUS_PROGRAM_ERROR: u8 = 1 << 4;

/// Written data is flushed to the disk within this time, so that a series of programs needs one
/// flush.
const SYNC_AFTER: Duration = Duration::from_millis(100);

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        let code = read(&open(&self.code, false)?, &self.code)?;
        check_code(&self.code, &code)?;
        let disks = grants.shared().disks.clone();
        let vars = self.vars.as_deref().map(|path| self.vars(path, &disks)).transpose()?;
        let total = code.len() + vars.as_ref().map_or(0, |(bytes, _)| bytes.len());
        ensure!(
            total as u64 <= MAX_SIZE,
            "{} and its variable store have {total} bytes together: the maximum is 16 MiB",
            self.code.display()
        );
        let at = END - code.len() as u64;
        let space = if self.smm { Kind::SmmMemory } else { Kind::Memory };
        let code = Bank::new(at, &code, (Writes::Refused, space), grants)?;
        let vars = match vars {
            Some((bytes, writes)) => {
                Some(Bank::new(at - bytes.len() as u64, &bytes, (writes, space), grants)?)
            }
            None => None,
        };
        Ok(Box::new(Flash { code, vars }))
    }

    fn detach_host_side(&mut self) {
        self.readonly = true;
    }
}

impl Config {
    fn vars(&self, path: &Path, disks: &Disks) -> anyhow::Result<(Vec<u8>, Writes)> {
        let file = open(path, !self.readonly)?;
        // Lock before reading, so that no other process is in the middle of writing.
        if self.readonly {
            lock::shared(&file, path)?;
        } else {
            lock::exclusive(&file, path)?;
        }
        let bytes = read(&file, path)?;
        check_vars(path, &bytes)?;
        let writes = if self.readonly {
            Writes::Memory
        } else {
            let store = Store::new(path, file, bytes.len() as u64);
            disks.add_locked(&store.file.file);
            Writes::File(store)
        };
        Ok((bytes, writes))
    }
}

fn open(path: &Path, writable: bool) -> anyhow::Result<File> {
    let name = path.display();
    // Check before opening: opening a pipe would block.
    let found = fs::metadata(path).with_context(|| format!("{name}"))?;
    ensure!(!found.is_dir(), "{name} is a directory, not a flash image");
    ensure!(found.is_file(), "{name} is not a file");
    match OpenOptions::new().read(true).write(writable).open(path) {
        Err(error) if writable && is_refusal(&error) => {
            bail!("{name} is not writable: make a copy of it, or set `readonly=on`")
        }
        other => other.with_context(|| format!("{name}")),
    }
}

fn read(file: &File, path: &Path) -> anyhow::Result<Vec<u8>> {
    let name = path.display();
    let size = file.metadata().with_context(|| format!("{name}"))?.len();
    ensure!(size != 0, "{name} is empty");
    ensure!(
        size.is_multiple_of(BLOCK) && size <= MAX_SIZE,
        "{name} has {size} bytes: the size of a flash image is a multiple of 4096, and at most \
         16 MiB"
    );
    let mut bytes = vec![0; usize::try_from(size)?];
    file.read_exact_at(&mut bytes, 0).with_context(|| format!("{name}"))?;
    Ok(bytes)
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem)
}

fn check_code(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    let vector = &bytes[bytes.len() - RESET_VECTOR..];
    if let blank @ (0 | 0xff) = vector[0]
        && vector.iter().all(|byte| *byte == blank)
    {
        bail!(
            "{} is not firmware: its last 16 bytes, the entry, are all {blank:#04x}",
            path.display()
        );
    }
    Ok(())
}

fn check_vars(path: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    // A power cut while the firmware rewrites the first block may leave it incomplete. The spare
    // area then has a complete copy, from which the firmware restores the block.
    let (blocks, _) = bytes.as_chunks::<BLOCK_BYTES>();
    ensure!(
        blocks.iter().any(|block| is_store(block)),
        "{} is not a variable store: it has no volume of variables (`_FVH` at 0x28)",
        path.display()
    );
    let length = u64::from_le_bytes(bytes[FV_LENGTH..][..8].try_into()?);
    ensure!(
        !is_store(bytes) || length == bytes.len() as u64,
        "{} has {} bytes, but the variable store in it has {length}",
        path.display(),
        bytes.len()
    );
    Ok(())
}

fn is_store(volume: &[u8]) -> bool {
    volume[FV_GUID..].starts_with(&NV_DATA) && volume[FV_SIGNATURE..].starts_with(b"_FVH")
}

/// Where the guest's writes go.
enum Writes {
    Refused,
    /// To memory only: the changes are lost when the machine ends.
    Memory,
    File(Store),
}

/// Waits until the guest's memory is checked, and the guest with it. Returns whether it is sound.
fn passes(gate: &Gate) -> bool {
    if gate.is_unchecked() {
        gate.hurry();
    }
    gate.pass()
}

struct Bank {
    region: Region,
    /// The region in which the chip takes commands: with `smm`, not the one above.
    commands: Region,
    memory: Arc<dyn Backing>,
    writes: Writes,
    chip: Chip,
    gate: Arc<Gate>,
    /// The offset and the array's bytes that the status replaces now.
    masked: Option<(u64, Vec<u8>)>,
}

/// The state of a chip. At power-on, reads return the array, and the status is clear.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
struct Chip {
    mode: Mode,
    status: u8,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
enum Mode {
    #[default]
    Array,
    /// Reads return the status, at the offset and with the width of the command.
    Status {
        offset: u64,
        width: u8,
    },
    Program,
    Erase,
}

impl Bank {
    fn new(
        at: u64,
        bytes: &[u8],
        (writes, space): (Writes, Kind),
        grants: &mut dyn Grants,
    ) -> anyhow::Result<Self> {
        let size = bytes.len() as u64;
        let region = grants.claim(Kind::Memory, at..at + size)?;
        let commands = match space {
            Kind::Memory => region,
            other => grants.claim(other, at..at + size)?,
        };
        let memory = grants.shared().hypervisor.backing(size, GuestAccess::ReadOnly)?;
        memory.write(0, bytes);
        memory.map(Some(at))?;
        let chip = Chip::default();
        let gate = grants.shared().disks.gate();
        Ok(Self { region, commands, memory, writes, chip, gate, masked: None })
    }

    fn command(&mut self, offset: u64, data: &[u8]) {
        self.unmask();
        // The command is in the lowest byte of wider writes, as in QEMU.
        let command = data.first().copied().unwrap_or_default();
        match std::mem::take(&mut self.chip.mode) {
            Mode::Program => self.program(offset, data, STATUS_PROGRAM_ERROR),
            Mode::Erase => {
                // The chip returns to the array by itself, because OVMF does not request it.
                if command == ERASE_CONFIRM {
                    let block = offset - offset % BLOCK;
                    self.program(block, &[0xff; BLOCK_BYTES], STATUS_ERASE_ERROR);
                }
            }
            Mode::Array | Mode::Status { .. } => match command {
                PROGRAM => self.chip.mode = Mode::Program,
                ERASE => self.chip.mode = Mode::Erase,
                CLEAR_STATUS => self.chip.status = 0,
                READ_STATUS => {
                    let width = u8::try_from(data.len()).unwrap_or(u8::MAX);
                    self.chip.mode = Mode::Status { offset, width };
                    self.mask();
                }
                // "Read array", and unknown commands.
                _ => {}
            },
        }
    }

    fn program(&mut self, offset: u64, data: &[u8], error: u8) {
        let written = match &mut self.writes {
            Writes::Refused => false,
            Writes::Memory => {
                self.memory.write(offset, data);
                true
            }
            Writes::File(_) if !passes(&self.gate) => false,
            Writes::File(store) => {
                self.memory.write(offset, data);
                store.write(offset, data, self.memory.as_ref())
            }
        };
        self.chip.status |= STATUS_READY | if written { 0 } else { error };
    }

    /// Writes the status over the array at the offset of the command. The guest's reads do not
    /// reach the device, and it reads the status only there.
    fn mask(&mut self) {
        if let Mode::Status { offset, width } = self.chip.mode {
            let mut bytes = vec![0; usize::from(width)];
            self.memory.read(offset, &mut bytes);
            self.memory.write(offset, &vec![self.chip.status; bytes.len()]);
            self.masked = Some((offset, bytes));
        }
    }

    fn unmask(&mut self) {
        if let Some((offset, bytes)) = self.masked.take() {
            self.memory.write(offset, &bytes);
        }
    }

    fn store(&mut self) -> Option<&mut Store> {
        if let Writes::File(store) = &mut self.writes { Some(store) } else { None }
    }

    fn park(&mut self) -> Chip {
        self.unmask();
        if let Writes::File(store) = &mut self.writes {
            store.stop(self.memory.as_ref());
        }
        self.chip.clone()
    }

    fn run(&mut self, chip: Chip) -> anyhow::Result<()> {
        self.unmask();
        self.chip = chip;
        self.mask();
        if let Writes::File(store) = &mut self.writes {
            store.start()?;
        }
        Ok(())
    }
}

struct Flash {
    code: Bank,
    vars: Option<Bank>,
}

/// The saved state. The contents are in the files instead.
#[derive(Default, Serialize, Deserialize)]
struct State {
    code: Chip,
    vars: Chip,
    /// Blocks that the file of VARS lacks, and memory has.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    outdated: BTreeSet<u64>,
}

impl Flash {
    fn bank(&mut self, region: Region) -> Option<&mut Bank> {
        let is_code = [self.code.region, self.code.commands].contains(&region);
        if is_code { Some(&mut self.code) } else { self.vars.as_mut() }
    }
}

impl Device for Flash {
    fn read(&mut self, region: Region, offset: u64, data: &mut [u8]) -> Access {
        let Some(bank) = self.bank(region) else { return Access::Ignored };
        bank.memory.read(offset, data);
        Access::Done
    }

    fn write(&mut self, region: Region, offset: u64, data: &[u8]) -> Access {
        let Some(bank) = self.bank(region).filter(|bank| bank.commands == region) else {
            return Access::Ignored;
        };
        bank.command(offset, data);
        Access::Done
    }

    fn park(&mut self) -> Saved {
        let code = self.code.park();
        let vars = self.vars.as_mut().map(Bank::park).unwrap_or_default();
        let store = self.vars.as_mut().and_then(Bank::store);
        let outdated = store.map(|store| store.outdated.clone()).unwrap_or_default();
        Saved::of(&State { code, vars, outdated })
    }

    fn run(&mut self, saved: Saved) -> anyhow::Result<()> {
        let State { code, vars, outdated } = saved.take()?;
        self.code.run(code)?;
        if let Some(store) = self.vars.as_mut().and_then(Bank::store) {
            store.outdated.extend(outdated.into_iter().filter(|block| *block < store.size / BLOCK));
        }
        self.vars.as_mut().map_or(Ok(()), |bank| bank.run(vars))
    }
}

/// The file of VARS.
struct Store {
    file: Arc<SyncedFile>,
    size: u64,
    /// Flushes the file while the machine runs.
    alarm: Option<Alarm>,
    /// Blocks whose content in the file is outdated, because a write failed.
    outdated: BTreeSet<u64>,
}

/// The file, shared with the thread that flushes it.
struct SyncedFile {
    file: Arc<File>,
    path: PathBuf,
    /// There are writes to flush, and the alarm is set.
    unsynced: AtomicBool,
    /// A flush failed: the host may have lost any part of the writes.
    lost: AtomicBool,
    /// An error was logged. Later ones are not, so that the guest cannot fill the log.
    logged: AtomicBool,
}

impl SyncedFile {
    fn sync(&self) {
        // Clear the flag first: later writes belong to the next flush.
        if self.unsynced.swap(false, Ordering::AcqRel)
            && let Err(error) = self.file.sync_data()
        {
            self.lost.store(true, Ordering::Release);
            self.log_once(&error);
        }
    }

    fn log_once(&self, error: &io::Error) {
        if !self.logged.swap(true, Ordering::Relaxed) {
            let path = self.path.display();
            tracing::error!("{path} is not up to date (logged once, retried later): {error}");
        }
    }
}

impl Store {
    fn new(path: &Path, file: File, size: u64) -> Self {
        let [unsynced, lost, logged] = [const { AtomicBool::new(false) }; 3];
        let path = path.to_owned();
        let file = Arc::new(SyncedFile { file: Arc::new(file), path, unsynced, lost, logged });
        Self { file, size, alarm: None, outdated: BTreeSet::new() }
    }

    /// Writes data to the file that `view` already has. Returns false if the file is not up to
    /// date.
    ///
    /// After a failed write, no later write overtakes it: the file stays at one moment of the
    /// guest's history until it can catch up.
    fn write(&mut self, offset: u64, data: &[u8], view: &dyn Backing) -> bool {
        self.take_back_lost();
        if self.outdated.is_empty() {
            match self.file.file.write_all_at(data, offset) {
                Ok(()) => {
                    self.flush_soon();
                    return true;
                }
                Err(error) => self.file.log_once(&error),
            }
        }
        let last = offset.saturating_add(data.len() as u64).min(self.size).saturating_sub(1);
        self.outdated.extend(offset / BLOCK..=last / BLOCK);
        self.catch_up(view)
    }

    /// After a failed flush, marks all blocks as outdated, because any of them may be lost.
    fn take_back_lost(&mut self) {
        if self.file.lost.swap(false, Ordering::AcqRel) {
            self.outdated.extend(0..self.size / BLOCK);
        }
    }

    fn catch_up(&mut self, view: &dyn Backing) -> bool {
        self.take_back_lost();
        while let Some(block) = self.outdated.first().copied() {
            let mut bytes = [0; BLOCK_BYTES];
            view.read(block * BLOCK, &mut bytes);
            if let Err(error) = self.file.file.write_all_at(&bytes, block * BLOCK) {
                self.file.log_once(&error);
                return false;
            }
            self.outdated.remove(&block);
            self.flush_soon();
        }
        true
    }

    fn flush_soon(&self) {
        if !self.file.unsynced.swap(true, Ordering::AcqRel)
            && let Some(alarm) = &self.alarm
        {
            alarm.set(Some(Instant::now() + SYNC_AFTER));
        }
    }

    fn start(&mut self) -> anyhow::Result<()> {
        let file = self.file.clone();
        let ring = move || {
            file.sync();
            None
        };
        self.alarm = Some(Alarm::spawn("flash", ring)?);
        Ok(())
    }

    fn stop(&mut self, view: &dyn Backing) {
        self.alarm = None;
        self.catch_up(view);
        self.file.sync();
        self.take_back_lost();
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        self.alarm = None;
        self.file.sync();
    }
}

#[cfg(test)]
mod test;
