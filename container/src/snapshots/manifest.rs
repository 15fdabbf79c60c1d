//! The manifest of a snapshot, and the journal of a restore: a line with format and checksum, and
//! JSON.
//!
//! Threats: others may write to the volume. The files are read with a limit, and each name in them
//! is one of a file directly in a folder; [`super::set::belongs`] decides which of these may be
//! written.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use anyhow::{Context as _, bail, ensure};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use vmm::control::snapshot::{MACHINE, MEMORY as CONTENTS};

use super::{MEMORY, Name};
use crate::disks::MAX_DISKS;
use crate::files;

pub const MANIFEST: &str = "manifest";
/// The only format that this version writes and reads.
const FORMAT: u32 = 1;
const MAX_BYTES: u64 = 64 << 10;
pub const MAX_FILES: usize = 64;
const MAX_NAME: usize = 255;

/// The state of the guest in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// The machine was off.
    Off,
    /// The guest had frozen its file systems.
    Frozen,
    /// As after a power cut.
    PowerCut,
    /// Its memory: it continues where it was.
    Memory,
}

impl Kind {
    /// For people.
    pub const fn words(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Frozen => "frozen by the guest",
            Self::PowerCut => "as after a power cut",
            Self::Memory => "with memory",
        }
    }
}

/// A file of a snapshot. Its place is that of the pod's file: the number of the volume (0 is
/// STORAGE, 1 is /storage2), and the name in its folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    pub volume: usize,
    pub file: String,
    pub bytes: u64,
    /// Seconds and nanoseconds of the last change, by which memory knows its disks.
    pub changed: (i64, u32),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub name: Name,
    /// Seconds since 1970.
    pub created: u64,
    pub kind: Kind,
    pub files: Vec<Entry>,
    /// Those of its memory, if it has one, in the order of [`memory_files`].
    pub memory: Vec<Entry>,
    /// Files, by volume and name, that did not exist, and are removed by a restore.
    pub absent: Vec<(usize, String)>,
}

/// The files of the machine's memory, with their paths in the folder of the snapshot.
pub fn memory_files() -> [String; 2] {
    [MACHINE, CONTENTS].map(|file| format!("{MEMORY}/{file}"))
}

/// A restore that has begun, and must be finished.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Journal {
    pub manifest: Manifest,
    /// The disks before and after it. Any other one has been used since.
    pub disks: Vec<Entry>,
    /// The new VM Generation ID.
    pub generation: String,
}

impl Manifest {
    pub fn read(bytes: &[u8]) -> anyhow::Result<Self> {
        let manifest: Self = unseal(bytes)?;
        manifest.check()?;
        Ok(manifest)
    }

    pub fn write(&self) -> anyhow::Result<Vec<u8>> {
        seal(self)
    }

    /// The manifest in the folder of a snapshot of this name.
    pub fn of(shelf: &Path, name: &Name) -> anyhow::Result<Self> {
        let manifest = Self::read(&read(shelf, &Path::new(name.as_str()).join(MANIFEST))?)?;
        ensure!(manifest.name == *name, "it is that of {}", manifest.name.as_str());
        Ok(manifest)
    }

    fn check(&self) -> anyhow::Result<()> {
        let count = self.files.len().max(self.absent.len());
        ensure!((1..=MAX_FILES).contains(&count), "it lists {count} files");
        let saved = self.files.iter().map(|entry| (entry.volume, &entry.file));
        let mut all: Vec<_> =
            saved.chain(self.absent.iter().map(|(volume, file)| (*volume, file))).collect();
        for (volume, file) in &all {
            let plain = !file.starts_with('.') && !file.contains(['/', '\\']);
            let plain = plain && !file.contains(char::is_control);
            ensure!(plain && (1..=MAX_NAME).contains(&file.len()), "it lists a wrong name");
            ensure!(*volume < MAX_DISKS, "it lists a volume {volume}");
        }
        all.sort_unstable();
        ensure!(all.windows(2).all(|two| two[0] != two[1]), "it lists a file twice");
        let memory: Vec<_> =
            self.memory.iter().map(|entry| (entry.volume, entry.file.clone())).collect();
        let whole = match self.kind {
            Kind::Memory => memory == memory_files().map(|file| (0, file)),
            _ => memory.is_empty(),
        };
        ensure!(whole, "it lists other files of a memory than it has");
        let mut entries = self.files.iter().chain(&self.memory);
        let wrong = entries
            .any(|entry| i64::try_from(entry.bytes).is_err() || entry.changed.1 >= 1_000_000_000);
        ensure!(!wrong, "it lists a wrong length or time");
        Ok(())
    }
}

impl Journal {
    pub fn read(bytes: &[u8]) -> anyhow::Result<Self> {
        let journal: Self = unseal(bytes)?;
        journal.manifest.check()?;
        journal.generation.parse::<host::uuid::Uuid>()?;
        Ok(journal)
    }

    pub fn write(&self) -> anyhow::Result<Vec<u8>> {
        seal(self)
    }
}

/// Reads a file below a folder. Follows no link, and reads at most one byte too many.
pub fn read(folder: &Path, path: &Path) -> anyhow::Result<Vec<u8>> {
    let file: File = files::open_within(folder, path)?;
    ensure!(file.metadata()?.is_file(), "it is not a file");
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

fn seal(value: &impl Serialize) -> anyhow::Result<Vec<u8>> {
    let body = serde_json::to_vec(value)?;
    let bytes = with_checksum(&body);
    ensure!(bytes.len() as u64 <= MAX_BYTES, "it lists too much");
    Ok(bytes)
}

/// Adds the first line.
pub fn with_checksum(body: &[u8]) -> Vec<u8> {
    let line = format!("transom {FORMAT} {:08x}\n", crc32fast::hash(body));
    [line.as_bytes(), body].concat()
}

fn unseal<T: DeserializeOwned>(bytes: &[u8]) -> anyhow::Result<T> {
    ensure!(bytes.len() as u64 <= MAX_BYTES, "it is too long");
    let end = bytes.iter().position(|byte| *byte == b'\n').context("it is damaged")?;
    let (line, body) = (std::str::from_utf8(&bytes[..end])?, &bytes[end + 1..]);
    let ["transom", format, crc32] = line.split(' ').collect::<Vec<_>>()[..] else {
        bail!("it is damaged")
    };
    ensure!(
        format == FORMAT.to_string(),
        "its format is {:.9}, and this version reads format {FORMAT}: use the image that wrote it",
        format.escape_default().to_string()
    );
    let same = crc32 == format!("{:08x}", crc32fast::hash(body));
    ensure!(same, "it is damaged: its checksum is wrong");
    serde_json::from_slice(body).context("it is damaged")
}

#[cfg(test)]
mod test {
    use super::*;

    fn manifest(files: &[(usize, &str)]) -> Manifest {
        let entry = |(volume, file): &(usize, &str)| Entry {
            volume: *volume,
            file: (*file).to_owned(),
            bytes: 7,
            changed: (1, 2),
        };
        Manifest {
            name: Name::read("one").unwrap(),
            created: 1,
            kind: Kind::Off,
            files: files.iter().map(entry).collect(),
            memory: vec![],
            absent: vec![],
        }
    }

    #[test]
    fn a_manifest_comes_back_as_it_was_written() {
        let mut was = manifest(&[(0, "data.img"), (1, "data2.img")]);
        was.absent.push((0, "data.qcow2".into()));
        assert_eq!(Manifest::read(&was.write().unwrap()).unwrap(), was);
        let disks = was.files.clone();
        let journal = Journal { manifest: was, disks, generation: "0".repeat(32) };
        assert_eq!(Journal::read(&journal.write().unwrap()).unwrap(), journal);
    }

    #[test]
    fn memory_has_its_two_files_and_no_others() {
        let mut all = manifest(&[(0, "data.img")]);
        let read = |all: &Manifest| Manifest::read(&all.write().unwrap());
        let entry = |file| Entry { file, ..all.files[0].clone() };
        let memory = memory_files().map(entry).to_vec();
        all.memory = memory.clone();
        read(&all).unwrap_err();
        all.kind = Kind::Memory;
        assert_eq!(read(&all).unwrap(), all);
        all.memory[1].file = "memory/../data.img".into();
        read(&all).unwrap_err();
        all.memory = memory[..1].to_vec();
        read(&all).unwrap_err();
    }

    #[test]
    fn any_damage_is_found() {
        let bytes = manifest(&[(0, "data.img")]).write().unwrap();
        for at in 0..bytes.len() {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1;
            Manifest::read(&damaged).unwrap_err();
            Manifest::read(&bytes[..at]).unwrap_err();
        }
        let long = [&bytes[..], &vec![b' '; 70_000]].concat();
        assert_eq!(Manifest::read(&long).unwrap_err().to_string(), "it is too long");
        let text = String::from_utf8(bytes).unwrap().replacen("transom 1", "transom 2", 1);
        let newer = Manifest::read(text.as_bytes()).unwrap_err().to_string();
        assert!(newer.starts_with("its format is 2, and this version reads format 1"), "{newer}");
    }

    #[test]
    fn places_outside_of_a_folder_are_refused() {
        for file in ["../x", "/etc/passwd", "", ".lock", "a/b", "a\\b", "a\nb", &"x".repeat(256)] {
            let said = Manifest::read(&manifest(&[(0, file)]).write().unwrap()).unwrap_err();
            assert_eq!(said.to_string(), "it lists a wrong name", "{file:?}");
        }
        for files in [&[][..], &[(6, "data.img")], &[(0, "data.img"), (0, "data.img")]] {
            Manifest::read(&manifest(files).write().unwrap()).unwrap_err();
        }
        let many: Vec<_> = (0..65).map(|number| number.to_string()).collect();
        let many: Vec<_> = many.iter().map(|name| (0, name.as_str())).collect();
        Manifest::read(&manifest(&many).write().unwrap()).unwrap_err();
    }
}
