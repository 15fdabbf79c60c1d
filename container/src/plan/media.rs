//! Finds the ISO image to install from among the files on the volume.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::settings::Settings;
use crate::settings::value::quote;
use crate::settings::version::Version;
use crate::state::name;
use crate::status::{Failure, Status};

/// Names with other meanings: the rescue CD, and drivers.
const OTHERS: [&str; 3] = ["start.iso", "mount.iso", "drivers.iso"];
/// Maximum number of names in the error about several images.
const MAX_SHOWN: usize = 3;

/// The ISO image to install from: the reference image's name for this version, or the only image on
/// the volume. Several images to choose from are an error.
pub(super) fn on_volume(volume: &Path, settings: &Settings) -> anyhow::Result<Option<PathBuf>> {
    let mut names = names(volume);
    let windows = &settings.windows;
    let wanted = name::of(&windows.version, windows.language.0);
    match &windows.version {
        // Only the image with the name at the end of the address fits.
        Version::Url(url) => {
            let path = url.split(['?', '#']).next().unwrap_or_default();
            let fits = |name: &String| {
                path.ends_with(&format!("/{name}")) || wanted.as_ref() == Some(name)
            };
            names.retain(fits);
        }
        Version::Windows(_) => {}
        Version::Probe | Version::File(_) => return Ok(None),
    }
    if let Some(name) = names.iter().find(|name| wanted.as_ref() == Some(name)) {
        return Ok(Some(volume.join(name)));
    }
    match &names[..] {
        [] => Ok(None),
        [name] => Ok(Some(volume.join(name))),
        [first, ..] => {
            let shown: Vec<_> = names.iter().take(MAX_SHOWN).map(|name| quote(name)).collect();
            let more = if names.len() > MAX_SHOWN { "…" } else { "" };
            let sentence = format!(
                "STORAGE={}: it has several ISO images ({}{more}): select one, as in \
                 VERSION={}",
                settings.storage.folder.display(),
                shown.join(", "),
                quote(first)
            );
            Err(Failure::new(Status::Iso, sentence))
        }
    }
}

/// Names of ISO images on the volume, sorted.
fn names(volume: &Path) -> Vec<String> {
    let entries = fs::read_dir(volume).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file()).map(|entry| entry.file_name());
    let is_medium = |name: &String| {
        let small = name.to_lowercase();
        let iso = Path::new(&small).extension() == Some(OsStr::new("iso"));
        iso && !small.starts_with('.')
            && !small.starts_with(name::DRIVERS)
            && !OTHERS.contains(&&*small)
    };
    let names = files.filter_map(|name| name.into_string().ok());
    let mut names: Vec<String> = names.filter(is_medium).collect();
    names.sort();
    names
}
