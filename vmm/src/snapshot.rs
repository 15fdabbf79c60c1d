//! A saved machine: a folder with `machine.json`, the machine's configuration and state, and
//! `memory`, a sparse file with the contents of its memory.
//!
//! `machine.json` begins with a line of its own: format, version, and length and checksum of the
//! rest. It gets its name last, so a folder without it holds no snapshot. Snapshots are as secret
//! as the guest's memory: only their owner can read them, and with a key nobody without it. Then
//! both files are encrypted but for that line and for the places of data.

pub mod cipher;
pub mod memory;

use std::collections::BTreeMap;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, BufRead, BufReader, ErrorKind, Read as _, Write as _};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use devices::device;
use host::ram::{GuestMemoryMmap, MmapRegion};
use kvm_bindings::kvm_cpuid_entry2;
use rustix::fs::OFlags;
use serde::{Deserialize, Serialize};
use vm_memory::GuestMemoryBackend as _;

use self::cipher::{AuthTag, Cipher, Salt, Secret};
use self::memory::Part;
use crate::config::{Checks, Config, Memory, Restore};
use crate::hyperv;
use crate::kvm::{state, vm};
use crate::ram;
use crate::status::{Failure, Status};

/// The files of a snapshot.
pub const MACHINE: &str = "machine.json";
pub const MEMORY: &str = "memory";
/// The name of the first until it is complete.
pub const UNFINISHED: &str = "machine.json.unfinished";

/// The only formats that this version writes and reads: without and with encryption. A change of
/// what `Saved` means needs new numbers.
pub const FORMAT: u32 = 1;
const ENCRYPTED: u32 = 2;
/// The nonce of the machine's state. Those of memory are offsets.
const STATE: u64 = u64::MAX;
/// The limit for the first line, and for the rest of the file.
const MAX_HEADER: u64 = 512;
const MAX_STATE: u64 = 256 << 20;

/// The machine's state after a snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Then {
    #[default]
    Resume,
    Pause,
    Quit,
    /// It stays parked, and its memory is that of the snapshot until it is used again.
    Sleep,
}

/// The first line of `machine.json`.
#[derive(Debug, Serialize, Deserialize)]
pub struct Header {
    format: u32,
    vmm: String,
    bytes: u64,
    crc32: u32,
    #[serde(default)]
    pub then: Then,
    /// The sizes of the machine, for those who do not read the rest.
    #[serde(default)]
    pub processors: u32,
    #[serde(default)]
    pub memory: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    encryption: Option<Encryption>,
}

/// How the rest of `machine.json` is encrypted.
#[derive(Debug, Serialize, Deserialize)]
struct Encryption {
    salt: Salt,
    tag: AuthTag,
}

impl Header {
    pub fn read(from: &mut impl BufRead) -> anyhow::Result<Self> {
        let mut line = Vec::new();
        from.take(MAX_HEADER).read_until(b'\n', &mut line)?;
        ensure!(line.ends_with(b"\n"), "the first line is damaged");
        serde_json::from_slice(&line).context("the first line is damaged")
    }

    /// Like [`read`](Self::read), and compares the checksum of the rest.
    pub fn check(file: &File) -> anyhow::Result<Self> {
        let mut from = BufReader::new(file);
        let header = Self::read(&mut from)?;
        let (mut crc32, mut bytes) = (crc32fast::Hasher::new(), 0);
        let mut buffer = [0; 1 << 16];
        let mut rest = from.take(MAX_STATE);
        while let count @ 1.. = rest.read(&mut buffer)? {
            crc32.update(&buffer[..count]);
            bytes += count as u64;
        }
        header.compare(bytes, crc32.finalize())?;
        Ok(header)
    }

    pub fn is_encrypted(&self) -> bool {
        self.encryption.is_some()
    }

    /// The cipher of an encrypted snapshot. Fails if it has none, and there is a secret.
    fn cipher(&self, secret: Option<&Secret>) -> anyhow::Result<Option<Cipher>> {
        match (self.format, &self.encryption, secret) {
            (FORMAT, None, None) => Ok(None),
            (FORMAT, None, Some(_)) => bail!(
                "it is not encrypted, so anybody may have changed it: without `key=` it is \
                 restored all the same"
            ),
            (ENCRYPTED, Some(it), Some(secret)) => Ok(Some(Cipher::of(secret, &it.salt))),
            (ENCRYPTED, Some(_), None) => {
                bail!("it is encrypted: add `,key=FILE` with the file of its key or passphrase")
            }
            (FORMAT | ENCRYPTED, ..) => bail!("the first line is damaged"),
            (format, ..) => bail!(
                "its format is {format}, and this version reads formats {FORMAT} and {ENCRYPTED}: \
                 restore it with vmm {}, which wrote it, and shut the guest down there",
                self.vmm
            ),
        }
    }

    fn compare(&self, bytes: u64, crc32: u32) -> anyhow::Result<()> {
        let same = (self.bytes, self.crc32) == (bytes, crc32);
        ensure!(same, "it is damaged: its checksum is wrong");
        Ok(())
    }
}

/// All of a machine but the contents of its memory.
#[derive(Serialize, Deserialize)]
pub struct Saved {
    /// With defaults filled in, without what belongs to one process.
    pub config: Config,
    pub then: Then,
    /// The devices of the configuration, each with its claims.
    pub layout: Vec<(String, Vec<String>)>,
    pub cpuid: Vec<Vec<kvm_cpuid_entry2>>,
    pub moment: Moment,
    pub generation: String,
    pub files: Vec<Mark>,
    /// RAM, then the memory of devices, as they follow each other in the file.
    pub memory: Vec<Part>,
}

/// Processors, chip set and devices at one moment. Their clocks stop there, and go on together.
#[derive(Serialize, Deserialize)]
pub struct Moment {
    pub processors: Vec<(state::Processor, state::Tsc)>,
    pub vm: vm::State,
    pub hyperv: Option<hyperv::State>,
    pub devices: Vec<(String, device::Saved)>,
}

impl Saved {
    pub fn write(&self, mut file: &File, cipher: Option<&Cipher>) -> anyhow::Result<()> {
        let mut state = serde_json::to_vec(self).context("the machine's state")?;
        let bytes = state.len() as u64;
        ensure!(bytes < MAX_STATE, "the machine's state has {bytes} bytes, too many to restore");
        let mut encryption = None;
        if let Some(cipher) = cipher {
            let tag = cipher.encrypt(STATE, &mut state)?;
            encryption = Some(Encryption { salt: cipher.salt().clone(), tag });
        }
        let header = Header {
            format: if cipher.is_some() { ENCRYPTED } else { FORMAT },
            vmm: env!("CARGO_PKG_VERSION").into(),
            bytes,
            crc32: crc32fast::hash(&state),
            then: self.then,
            processors: self.config.cpus.count,
            memory: self.config.memory.size.0,
            encryption,
        };
        let mut text = serde_json::to_vec(&header)?;
        text.push(b'\n');
        text.extend(state);
        file.write_all(&text).and_then(|()| file.sync_all()).context("machine.json")
    }

    fn read(file: &File, secret: Option<&Secret>) -> anyhow::Result<(Self, Option<Cipher>)> {
        let mut from = BufReader::new(file);
        let header = Header::read(&mut from)?;
        let cipher = header.cipher(secret)?;
        let mut state = Vec::new();
        from.take(MAX_STATE).read_to_end(&mut state)?;
        header.compare(state.len() as u64, crc32fast::hash(&state))?;
        if let (Some(cipher), Some(it)) = (&cipher, &header.encryption) {
            let same = cipher.decrypt(STATE, &mut state, &it.tag);
            ensure!(same, "it is damaged, or the key is another one");
        }
        let saved = serde_json::from_slice::<Self>(&state);
        let saved = saved.context("it does not describe a machine of this version")?;
        // Nothing else proves that the first line belongs to the rest.
        let sizes = (saved.then, saved.config.cpus.count, saved.config.memory.size.0);
        let same = sizes == (header.then, header.processors, header.memory);
        ensure!(cipher.is_none() || same, "the first line is damaged");
        Ok((saved, cipher))
    }
}

/// A machine that is restored.
pub struct Snapshot {
    pub saved: Saved,
    pub memory: Contents,
}

/// The contents of its memory.
pub enum Contents {
    File(Stored),
    Received(Received),
}

/// Memory in a file of a snapshot.
pub struct Stored {
    pub file: File,
    from: Restore,
    pub cipher: Option<Cipher>,
}

impl Stored {
    /// Whether memory is read and checked at first. Memory in huge pages cannot be that of a file.
    fn is_copied(&self, memory: &Memory) -> bool {
        self.from.copy || self.cipher.is_some() || memory.hugepages.is_some()
    }

    /// Copies a part to memory that has only zeros.
    pub fn read(&self, at: u64, part: &Part, region: &MmapRegion) -> anyhow::Result<()> {
        memory::read((&self.file, self.cipher.as_ref()), at, part, region)
    }
}

/// The files of a snapshot that is written.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub machine: &'a File,
    pub memory: &'a File,
    pub cipher: Option<&'a Cipher>,
}

/// The memory of a machine that came from another process.
pub struct Received {
    pub ram: Arc<GuestMemoryMmap>,
    /// The memory of each device: its pages that are not zero, by their offsets.
    pub devices: Vec<BTreeMap<usize, Vec<u8>>>,
}

/// The snapshot whose contents the machine's memory had at first.
pub struct Origin {
    pub file: File,
    pub parts: Vec<Part>,
}

impl Origin {
    /// Checks the first parts. `step` is called again and again, and its error ends the check.
    pub fn check(
        &self,
        parts: usize,
        step: impl FnMut() -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        memory::check(&self.file, memory::places(&self.parts).take(parts), step)
    }
}

impl Snapshot {
    /// Opens a snapshot, and checks all but the contents of memory.
    pub fn open(from: &Restore) -> anyhow::Result<Self> {
        let opened = Self::open_files(from);
        refused(opened.with_context(|| format!("--restore {}", from.dir.display())))
    }

    pub fn received(saved: Saved, memory: Received) -> Self {
        Self { saved, memory: Contents::Received(memory) }
    }

    fn open_files(from: &Restore) -> anyhow::Result<Self> {
        let file = match open(&from.dir.join(MACHINE)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                bail!("{}", missing(&from.dir))
            }
            other => other.context(MACHINE)?,
        };
        let secret = from.key.as_deref().map(Secret::open).transpose()?;
        let (saved, cipher) = Saved::read(&file, secret.as_ref()).context(MACHINE)?;
        let file = open(&from.dir.join(MEMORY)).context(MEMORY)?;
        memory::check_length(&file, &saved.memory, cipher.is_some()).context(MEMORY)?;
        Ok(Self { saved, memory: Contents::File(Stored { file, from: from.clone(), cipher }) })
    }

    /// Checks the contents of memory, if the guest is to run only afterwards. Those that are copied
    /// are checked then.
    pub fn check(&self, memory: &Memory) -> anyhow::Result<()> {
        let Contents::File(stored) = &self.memory else { return Ok(()) };
        if stored.is_copied(memory) || stored.from.check != Checks::First {
            return Ok(());
        }
        let places = memory::places(&self.saved.memory);
        let checked = memory::check(&stored.file, places, memory::no_signal);
        refused(checked.with_context(|| stored.from.memory()))
    }

    /// Whether the guest waits for `vmm ctl resume`, and its disks are as they were until then.
    pub fn waits(&self) -> bool {
        match &self.memory {
            Contents::File(stored) => stored.from.paused,
            Contents::Received(_) => self.saved.then == Then::Pause,
        }
    }

    /// Whether the contents of memory are checked while the guest runs.
    pub fn is_checked_later(&self, memory: &Memory) -> bool {
        match &self.memory {
            Contents::File(stored) => {
                stored.from.check == Checks::Later && !stored.is_copied(memory)
            }
            Contents::Received(_) => false,
        }
    }

    /// Guest RAM with the contents of the snapshot.
    pub fn ram(
        &self,
        memory: &Memory,
        ranges: &[Range<u64>],
    ) -> anyhow::Result<Arc<GuestMemoryMmap>> {
        let stored = match &self.memory {
            Contents::File(stored) => stored,
            Contents::Received(received) => return Ok(received.ram.clone()),
        };
        if !stored.is_copied(memory) {
            return ram::map(memory, ranges, Some(&stored.file));
        }
        let ram = ram::map(memory, ranges, None)?;
        for (region, (at, part)) in ram.iter().zip(memory::places(&self.saved.memory)) {
            let read = stored.read(at, part, &region.get_mmap());
            refused(read.with_context(|| stored.from.memory()))?;
        }
        Ok(ram)
    }
}

/// Opens a file of a snapshot. Others may have put a pipe there, which must not block.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let flags = OFlags::NONBLOCK.bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path)?;
    match file.metadata()?.is_file() {
        true => Ok(file),
        false => Err(io::Error::new(ErrorKind::InvalidInput, "it is not a file")),
    }
}

/// Gives the error about a snapshot that is damaged or does not fit its own exit status.
pub fn refused<T>(result: anyhow::Result<T>) -> anyhow::Result<T> {
    result.map_err(|error| Failure::new(Status::Snapshot, format!("{error:#}")))
}

/// The reason why a folder has no snapshot.
fn missing(dir: &Path) -> String {
    let (name, unfinished) = (MACHINE, UNFINISHED);
    let sentence =
        format!("there is no complete snapshot: `{name}` is missing, which is written last");
    if dir.join(unfinished).exists() {
        format!(
            "{sentence}; if `vmm ctl` was interrupted, and the machine has ended with this \
             snapshot, rename `{unfinished}` to `{name}`: it is checked"
        )
    } else {
        sentence
    }
}

/// A file whose content the guest relies on, as it was in the snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    /// The device that uses the file.
    pub name: String,
    bytes: u64,
    /// Seconds and nanoseconds of the last change; none for what is no regular file.
    changed: Option<(i64, i64)>,
}

impl Mark {
    pub fn of(name: &str, path: &Path) -> anyhow::Result<Self> {
        let found = std::fs::metadata(path).with_context(|| path.display().to_string())?;
        Ok(Self::new(name.to_owned(), &found))
    }

    pub fn new(name: String, found: &Metadata) -> Self {
        let changed = found.is_file().then(|| (found.mtime(), found.mtime_nsec()));
        Self { name, bytes: found.len(), changed }
    }

    /// The files that an image is based on, whose numbers begin with `first`: 0 is the disk itself.
    pub fn below(disk: &str, files: &[Metadata], first: usize) -> Vec<Self> {
        let name = |number| match number {
            0 => disk.to_owned(),
            number => format!("{disk}, backing file {number}"),
        };
        (first..).zip(files).map(|(number, file)| Self::new(name(number), file)).collect()
    }

    /// Whether a write of the guest to this file is noticed.
    pub fn shows_changes(&self) -> bool {
        self.changed.is_some()
    }

    /// Fails if a file is not as it was. Otherwise the guest would write its old picture of a file
    /// system over a newer one.
    pub fn compare(before: &[Self], now: &[Self]) -> anyhow::Result<()> {
        for was in before {
            let is = now.iter().find(|is| is.name == was.name);
            let is = is.with_context(|| format!("this machine has no file for `{}`", was.name))?;
            ensure!(
                is.bytes == was.bytes && same_time(is.changed, was.changed),
                "the file of `{}` has another size or time of change than in the snapshot: the \
                 guest would destroy a file that was written since. Put the file back as it was \
                 (copy it with `cp -p`), or start the machine without the snapshot",
                was.name
            );
        }
        match now.iter().find(|is| !before.iter().any(|was| was.name == is.name)) {
            Some(is) => bail!("the snapshot has no file for `{}`: leave it out", is.name),
            None => Ok(()),
        }
    }
}

/// Whether these are the same time. Some file systems and archives keep whole seconds.
fn same_time(one: Option<(i64, i64)>, two: Option<(i64, i64)>) -> bool {
    match (one, two) {
        (Some(one), Some(two)) => one == two || one.0 == two.0 && (one.1 == 0 || two.1 == 0),
        (one, two) => one == two,
    }
}
