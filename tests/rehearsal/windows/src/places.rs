//! Paths of Windows: drives by their letters, and a current folder.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use anyhow::ensure;

use super::drives::Drive;
use super::files;

/// In place of a drive that does not exist.
const NO_DRIVE: &str = "/drive/none";
const SERIAL: &str = "/dev/ttyS0";

#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// The drive of Windows.
    pub(crate) drive: PathBuf,
    letters: BTreeMap<char, PathBuf>,
    /// The current folder.
    pub(crate) folder: String,
}

impl Places {
    /// `drive` is the place of C:.
    pub(crate) fn new(drive: &Path) -> Self {
        Self {
            drive: drive.to_owned(),
            letters: [('C', drive.to_owned())].into(),
            folder: "C:\\Windows\\System32".to_owned(),
        }
    }

    /// In Windows PE, whose own drive is X:. The others have the letters from C: on.
    pub(crate) fn in_windows_pe(own: &Path, others: &[Drive]) -> Self {
        let mut letters: BTreeMap<_, _> =
            ('C'..).zip(others.iter().map(|it| it.root.clone())).collect();
        letters.insert('X', own.to_owned());
        Self { drive: own.to_owned(), letters, folder: "X:\\Windows\\System32".to_owned() }
    }

    /// Gives a folder a letter that is free.
    pub(crate) fn assign(&mut self, letter: char, root: &Path) -> anyhow::Result<()> {
        let taken = self.letters.contains_key(&letter);
        ensure!(letter.is_ascii_uppercase() && !taken, "{letter}: is not a free drive letter");
        self.letters.insert(letter, root.to_owned());
        Ok(())
    }

    /// The file of a path of Windows.
    pub(crate) fn file(&self, path: &str) -> PathBuf {
        let path = path.trim_matches('"');
        if let Some((letter, rest)) = path.split_once(':') {
            let letter = letter.to_ascii_uppercase();
            let drive = letter.parse().ok().and_then(|letter: char| self.letters.get(&letter));
            return drive.map_or_else(|| NO_DRIVE.into(), |drive| files::below(drive, rest));
        }
        match path.starts_with('\\') {
            true => files::below(&self.drive, path),
            false => files::below(&self.drive, &format!("{}\\{path}", &self.folder[2..])),
        }
    }

    /// Writes to a file or the serial port, whose terminal writes the carriage return itself.
    pub(crate) fn write(&self, name: &str, adds: bool, text: &str) -> io::Result<()> {
        let mut options = File::options();
        options.write(true);
        match name.to_ascii_lowercase().as_str() {
            "nul" | "con" | "&1" => Ok(()),
            "com1" if text.is_empty() => Ok(()),
            "com1" => options.open(SERIAL)?.write_all(text.replace('\r', "").as_bytes()),
            _ => {
                options.create(true).append(adds).truncate(!adds);
                options.open(self.file(name))?.write_all(text.as_bytes())
            }
        }
    }
}
