//! Media that lie on the volume under a name of their own.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use crate::settings::Settings;
use crate::settings::value::quote;
use crate::settings::version::Version;
use crate::status::{Failure, Status};

/// Those are something else: the rescue CD, drivers.
const OTHERS: [&str; 3] = ["start.iso", "mount.iso", "drivers.iso"];
/// How names begin of media that are drivers, as they are downloaded.
const DRIVERS: &str = "virtio-win";
/// So many are named where there are too many.
const SHOWN: usize = 3;

/// The medium on the volume that is meant: that of the version, under the reference image's name
/// for it, or the only one there.
///
/// # Errors
///
/// When it may be one of several.
pub(super) fn on_volume(volume: &Path, settings: &Settings) -> anyhow::Result<Option<PathBuf>> {
    let mut names = names(volume);
    let windows = &settings.windows;
    let wanted = match &windows.version {
        // Not another than the one at that address.
        Version::Url(url) => {
            let path = url.split(['?', '#']).next().unwrap_or_default();
            names.retain(|name| path.ends_with(&format!("/{name}")));
            None
        }
        Version::Windows(product) => Some(match windows.language.0.code {
            "en" => format!("{}.iso", product.id),
            code => format!("{}_{code}.iso", product.id),
        }),
        Version::Probe | Version::File(_) => return Ok(None),
    };
    if let Some(name) = names.iter().find(|name| wanted.as_ref() == Some(name)) {
        return Ok(Some(volume.join(name)));
    }
    match &names[..] {
        [] => Ok(None),
        [name] => Ok(Some(volume.join(name))),
        [first, ..] => {
            let shown: Vec<_> = names.iter().take(SHOWN).map(|name| quote(name)).collect();
            let more = if names.len() > SHOWN { "…" } else { "" };
            let sentence = format!(
                "STORAGE={}: more than one medium is there ({}{more}): say which, as in \
                 VERSION={}",
                settings.storage.folder.display(),
                shown.join(", "),
                quote(first)
            );
            Err(Failure::new(Status::Iso, sentence))
        }
    }
}

/// The names of media on the volume, as VERSION may name them, in their order.
fn names(volume: &Path) -> Vec<String> {
    let entries = fs::read_dir(volume).into_iter().flatten().flatten();
    let files = entries.filter(|entry| entry.path().is_file()).map(|entry| entry.file_name());
    let is_medium = |name: &String| {
        let small = name.to_lowercase();
        let iso = Path::new(&small).extension() == Some(OsStr::new("iso"));
        iso && !small.starts_with('.') && !small.starts_with(DRIVERS) && !OTHERS.contains(&&*small)
    };
    let names = files.filter_map(|name| name.into_string().ok());
    let mut names: Vec<String> = names.filter(is_medium).collect();
    names.sort();
    names
}
