//! Paths of Windows: names equal but for case, with backslashes.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// The file at this path below a folder, by the names that are there. Names that are not there are
/// as given.
pub(crate) fn below(root: &Path, path: &str) -> PathBuf {
    let names = path.split(['\\', '/']).filter(|name| !name.is_empty());
    names.fold(root.to_owned(), |folder, name| folder.join(name_in(&folder, name)))
}

fn name_in(folder: &Path, name: &str) -> String {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    let same = |other: &String| other.to_lowercase() == name.to_lowercase();
    names.into_iter().find(same).unwrap_or_else(|| name.to_owned())
}

/// Copies a folder's files into another, and returns their number. Files that are there are
/// replaced.
pub(crate) fn copy(from: &Path, to: &Path) -> anyhow::Result<u32> {
    fs::create_dir_all(to).with_context(|| to.display().to_string())?;
    let mut count = 0;
    for entry in fs::read_dir(from).with_context(|| from.display().to_string())? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let target = to.join(name_in(to, &name));
        if entry.file_type()?.is_dir() {
            count += copy(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target).with_context(|| target.display().to_string())?;
            count += 1;
        }
    }
    Ok(count)
}

/// All files below a folder, in the order of their paths.
pub(crate) fn all(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    if !folder.exists() {
        return Ok(found);
    }
    for entry in fs::read_dir(folder).with_context(|| folder.display().to_string())? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(all(&path)?),
            false => found.push(path),
        }
    }
    found.sort();
    Ok(found)
}

/// A text in UTF-8, or in UTF-16 with a mark.
pub(crate) fn text(path: &Path) -> anyhow::Result<String> {
    let bytes = fs::read(path).with_context(|| path.display().to_string())?;
    match bytes.as_slice() {
        [0xff, 0xfe, rest @ ..] => {
            ensure!(rest.len().is_multiple_of(2), "{}: half a character", path.display());
            let units = rest.chunks_exact(2).map(|pair| u16::from_le_bytes([pair[0], pair[1]]));
            let text: Result<String, _> = char::decode_utf16(units).collect();
            text.with_context(|| path.display().to_string())
        }
        _ => Ok(String::from_utf8_lossy(&bytes).into_owned()),
    }
}
