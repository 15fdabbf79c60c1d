//! Writes the screen to a file.
//!
//! Threats: a client chooses the path, and the volume has the pod's disks. A picture is written
//! only into a few folders, only under the name of a picture, and no link is followed.

use std::ffi::OsStr;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};
use serde::Deserialize;
use vmm::control::Client;

use crate::files;
use crate::pod::machine_client::QUICK;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Format {
    #[default]
    Ppm,
    Png,
}

/// Takes a picture of the machine's screen, and writes it to a file in one of the folders.
pub(super) fn write(
    control: &Path,
    path: &Path,
    format: Format,
    folders: &[PathBuf],
) -> anyhow::Result<()> {
    let path = target(path, folders)?;
    let mut machine = Client::connect_timeout(control, QUICK)?;
    let bytes = match format {
        Format::Png => machine.png()?,
        Format::Ppm => {
            let (picture, pixels) = machine.screenshot()?;
            ppm(picture.width, picture.height, &pixels)
        }
    };
    files::write(&path, |file| file.write_all(&bytes)).with_context(|| path.display().to_string())
}

/// A picture in the format PPM. The pixels have four bytes: blue, green, red and an unused one.
fn ppm(width: u32, height: u32, pixels: &[u8]) -> Vec<u8> {
    let mut bytes = format!("P6\n{width} {height}\n255\n").into_bytes();
    let pixels = pixels.as_chunks().0;
    bytes.extend(pixels.iter().flat_map(|[blue, green, red, _]| [*red, *green, *blue]));
    bytes
}

/// The file to write, if it is a picture in one of the folders or below.
fn target(path: &Path, folders: &[PathBuf]) -> anyhow::Result<PathBuf> {
    let named = || path.display().to_string();
    let end = path.extension().and_then(OsStr::to_str).map(str::to_ascii_lowercase);
    ensure!(
        path.is_absolute() && matches!(end.as_deref(), Some("ppm" | "png")),
        "{}: give an absolute path that ends with .ppm or .png",
        named()
    );
    let (folder, name) = path.parent().zip(path.file_name()).with_context(named)?;
    let folder = folder.canonicalize().with_context(named)?;
    let allowed = |it: &PathBuf| it.canonicalize().is_ok_and(|it| folder.starts_with(it));
    ensure!(folders.iter().any(allowed), "{}: pictures are written only in {}", named(), {
        let all: Vec<_> = folders.iter().map(|it| it.display().to_string()).collect();
        all.join(", ")
    });
    Ok(folder.join(name))
}

#[cfg(test)]
mod test {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn pictures_are_written_only_as_pictures_in_the_folders() {
        let [own, other] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let folders = [own.path().to_owned(), "/no/such/folder".into()];
        fs::create_dir(own.path().join("frames")).unwrap();
        symlink(other.path(), own.path().join("way")).unwrap();
        let at = |name: &str| target(&own.path().join(name), &folders);
        for good in ["a.ppm", "frames/b.PNG", "frames/../c.png"] {
            assert!(at(good).is_ok(), "{good}");
        }
        for (bad, reason) in [
            ("data.img", "ends with .ppm or .png"),
            ("ppm", "ends with .ppm or .png"),
            ("none/a.ppm", "No such file"),
            ("way/a.ppm", "only in"),
            ("../a.ppm", "only in"),
        ] {
            let error = format!("{:#}", at(bad).unwrap_err());
            assert!(error.contains(reason), "{bad}: {error}");
        }
        assert!(target(Path::new("a.ppm"), &folders).is_err());
        assert!(target(&other.path().join("a.ppm"), &folders).is_err());
    }

    #[test]
    fn a_ppm_has_red_first() {
        let bytes = ppm(2, 1, &[1, 2, 3, 0, 4, 5, 6, 0]);
        assert_eq!(bytes, b"P6\n2 1\n255\n\x03\x02\x01\x06\x05\x04");
    }
}
