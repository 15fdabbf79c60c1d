//! `transom cp`: copies a file between the volume and standard input or output, because the image
//! has no `tar` for `kubectl cp`.
//!
//! Threats: others may write to the volume, too. A link in the path is not followed, so that it
//! cannot lead elsewhere; an existing file, such as the disk of the running machine, is never
//! replaced; and a file gets its name only when it is complete.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail, ensure};

use crate::files;

/// Bytes that are copied at once.
const CHUNK: usize = 1 << 20;
/// The mode of a new file: the machine may run as another user.
const MODE: u32 = 0o644;

/// The direction of a copy, and the path on the volume.
#[derive(Debug, PartialEq, Eq)]
pub enum Copy<'a> {
    /// From the volume to standard output.
    Out(&'a str),
    /// From standard input to the volume.
    In(&'a str),
}

/// Reads the arguments `FILE -` or `- FILE`.
pub fn direction<'a>(from: &'a str, to: &'a str) -> Option<Copy<'a>> {
    match (from, to) {
        ("-", "-") => None,
        (file, "-") => Some(Copy::Out(file)),
        ("-", file) => Some(Copy::In(file)),
        _ => None,
    }
}

/// Copies, and returns the number of bytes.
pub fn run(
    copy: &Copy<'_>,
    volume: &Path,
    input: &mut impl Read,
    output: &mut impl Write,
) -> anyhow::Result<u64> {
    match copy {
        Copy::Out(path) => {
            let name = || (*path).to_owned();
            let mut file = files::open_within(volume, inner(volume, path)?).with_context(name)?;
            ensure!(
                file.metadata()?.is_file(),
                "{path}: it is not a file: copy one file at a time"
            );
            transfer(&mut file, output).with_context(name)
        }
        Copy::In(path) => store(volume, path, input),
    }
}

/// The path below the volume.
fn inner<'a>(volume: &Path, path: &'a str) -> anyhow::Result<&'a Path> {
    let path = Path::new(path);
    let inner = if path.is_absolute() { path.strip_prefix(volume).ok() } else { Some(path) };
    inner.filter(|inner| inner.file_name().is_some()).with_context(|| {
        format!("{}: give a file on the volume, in {}", path.display(), volume.display())
    })
}

fn store(volume: &Path, path: &str, input: &mut impl Read) -> anyhow::Result<u64> {
    let inner = inner(volume, path)?;
    let name = inner.file_name().context("a path without a name")?;
    let parent = inner.parent().unwrap_or(Path::new(""));
    let folder = match parent.as_os_str().is_empty() {
        true => File::open(volume).with_context(|| volume.display().to_string())?,
        false => files::open_within(volume, parent).with_context(|| path.to_owned())?,
    };
    let owner = folder.metadata()?;
    ensure!(owner.is_dir(), "{path}: {} is not a folder", parent.display());
    // By its descriptor the folder stays the same, whatever others rename.
    let place = PathBuf::from(format!("/proc/self/fd/{}", folder.as_raw_fd())).join(name);
    if fs::symlink_metadata(&place).is_ok() {
        bail!("{path}: it exists already, and is not replaced: choose another name");
    }
    let mut bytes = 0;
    let made = files::make(&place, |file| {
        bytes = transfer(input, file)?;
        // Only root may give files away.
        fchown(&*file, Some(owner.uid()), Some(owner.gid())).ok();
        file.set_permissions(Permissions::from_mode(MODE))
    });
    made.with_context(|| path.to_owned())?;
    Ok(bytes)
}

fn transfer(from: &mut impl Read, to: &mut impl Write) -> io::Result<u64> {
    let mut chunk = vec![0; CHUNK];
    let mut bytes = 0;
    loop {
        let count = match from.read(&mut chunk) {
            Ok(0) => break,
            Ok(count) => count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        to.write_all(&chunk[..count])?;
        bytes += count as u64;
    }
    to.flush()?;
    Ok(bytes)
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Copies into or out of a folder. Returns what came out.
    fn copy(volume: &Path, words: [&str; 2], input: &[u8]) -> Result<Vec<u8>, String> {
        let direction = direction(words[0], words[1]).unwrap();
        let mut output = Vec::new();
        run(&direction, volume, &mut &*input, &mut output).map_err(|error| format!("{error:#}"))?;
        Ok(output)
    }

    #[test]
    fn a_file_comes_back_as_it_was_stored() {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path();
        fs::create_dir(volume.join("oem")).unwrap();
        let bytes: Vec<u8> = (0..3 << 20).map(|it: u32| it.to_le_bytes()[1]).collect();
        let absolute = volume.join("custom.iso").display().to_string();
        for path in [&*absolute, "oem/install.bat"] {
            copy(volume, ["-", path], &bytes).unwrap();
            assert_eq!(copy(volume, [path, "-"], &[]).unwrap(), bytes, "{path}");
        }
        let mode = fs::metadata(volume.join("custom.iso")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, MODE);
        assert_eq!(fs::read_dir(volume).unwrap().count(), 2, "no temporary file is left");
    }

    #[test]
    fn paths_outside_the_volume_and_existing_files_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let volume = folder.path().join("volume");
        fs::create_dir(&volume).unwrap();
        fs::write(folder.path().join("theirs"), "theirs").unwrap();
        fs::write(volume.join("data.img"), "disk").unwrap();
        symlink("..", volume.join("up")).unwrap();
        symlink("../theirs", volume.join("link")).unwrap();
        for path in ["/etc/passwd", "../theirs", "up/theirs", "link", "", "/", "a/../../theirs"] {
            copy(&volume, [path, "-"], &[]).unwrap_err();
            copy(&volume, ["-", path], b"new").unwrap_err();
        }
        let refused = copy(&volume, ["-", "data.img"], b"new").unwrap_err();
        assert!(refused.contains("it exists already"), "{refused}");
        assert!(copy(&volume, ["missing/x", "-"], &[]).is_err());
        assert!(copy(&volume, ["-", "missing/x"], &[]).is_err());
        assert!(copy(folder.path(), ["volume", "-"], &[]).unwrap_err().contains("not a file"));
        assert_eq!(fs::read(volume.join("data.img")).unwrap(), b"disk");
        assert_eq!(fs::read(folder.path().join("theirs")).unwrap(), b"theirs");
        assert_eq!((direction("a", "b"), direction("-", "-")), (None, None));
    }

    #[test]
    fn an_interrupted_copy_leaves_no_file() {
        struct Broken(usize);
        impl Read for Broken {
            fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
                self.0 += 1;
                if self.0 > 2 { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(into.len()) }
            }
        }
        let folder = tempfile::tempdir().unwrap();
        let copied = run(&Copy::In("x.iso"), folder.path(), &mut Broken(0), &mut io::sink());
        assert!(format!("{:#}", copied.unwrap_err()).starts_with("x.iso: "));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
