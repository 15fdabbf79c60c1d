//! `transom cp`: copies a file between the volume and standard input or output, because the image
//! has no `tar` for `kubectl cp`.
//!
//! Threats: others may write to the volume, too. A link in the path is not followed, so that it
//! cannot lead elsewhere; an existing file, such as the disk of the running machine, is never
//! replaced; and a file gets its name only when it is complete.

use std::fs::{self, File, Permissions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, fchown};
use std::path::Path;

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
    /// This number of bytes from standard input to the volume. A connection that breaks looks like
    /// the end of standard input, so the number says whether all of them came.
    In(&'a str, u64),
}

/// Reads the arguments `FILE -`, or `--size BYTES - FILE`. The error is a sentence.
pub fn direction<'a>(words: &[&'a str]) -> Result<Copy<'a>, String> {
    let (size, words) = match words {
        ["--size", size, words @ ..] => (Some(*size), words),
        words => (None, words),
    };
    match (words, size) {
        ([file, "-"], None) if *file != "-" => Ok(Copy::Out(file)),
        (["-", file], Some(size)) if *file != "-" => {
            let bytes = size.parse();
            let bytes = bytes.map_err(|_| format!("--size {size}: give the number of bytes"));
            Ok(Copy::In(file, bytes?))
        }
        (["-", file], None) if *file != "-" => {
            let why = "a broken connection looks like the end of standard input";
            Err(format!(
                "{why}: give the number of bytes, as in --size $(stat -c %s FILE) - {file}"
            ))
        }
        _ => Err("cp takes FILE - (to standard output) or --size BYTES - FILE (from standard \
                  input)"
            .into()),
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
        Copy::In(path, bytes) => store(volume, path, *bytes, input),
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

fn store(volume: &Path, path: &str, size: u64, input: &mut impl Read) -> anyhow::Result<u64> {
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
    let place = files::path_of(&folder).join(name);
    if fs::symlink_metadata(&place).is_ok() {
        bail!("{path}: it exists already, and is not replaced: choose another name");
    }
    let made = files::make(&place, |file| {
        let bytes = transfer(&mut input.by_ref().take(size.saturating_add(1)), file)?;
        if bytes != size {
            return Err(io::Error::other(other_size(bytes, size)));
        }
        // Only root may give files away.
        fchown(&*file, Some(owner.uid()), Some(owner.gid())).ok();
        file.set_permissions(Permissions::from_mode(MODE))
    });
    made.with_context(|| path.to_owned())?;
    Ok(size)
}

fn other_size(bytes: u64, size: u64) -> String {
    match bytes < size {
        true => format!("only {bytes} of {size} bytes came: copy it again"),
        false => format!("more than {size} bytes came: give the size of the file"),
    }
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
        let size = input.len().to_string();
        let direction = match words {
            ["-", file] => direction(&["--size", &size, "-", file]),
            words => direction(&words),
        };
        let direction = direction.unwrap();
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
    }

    #[test]
    fn a_file_is_stored_only_if_all_of_it_came() {
        let folder = tempfile::tempdir().unwrap();
        let of = |size: u64, input: &[u8]| {
            let copied = run(&Copy::In("x", size), folder.path(), &mut &*input, &mut io::sink());
            copied.map_err(|error| format!("{error:#}"))
        };
        assert_eq!(of(3, b"ab").unwrap_err(), "x: only 2 of 3 bytes came: copy it again");
        assert!(of(3, b"abcd").unwrap_err().contains("more than 3 bytes"));
        assert!(of(u64::MAX, b"abcd").unwrap_err().contains("only 4 of"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        assert_eq!((of(0, b""), fs::read(folder.path().join("x")).unwrap().len()), (Ok(0), 0));
        assert_eq!(direction(&["--size", "7", "-", "x"]), Ok(Copy::In("x", 7)));
        assert_eq!(direction(&["x", "-"]), Ok(Copy::Out("x")));
        assert!(direction(&["-", "x"]).unwrap_err().contains("--size $(stat -c %s FILE) - x"));
        assert!(direction(&["--size", "-1", "-", "x"]).unwrap_err().contains("--size -1: "));
        for wrong in [&["-", "-"][..], &["a", "b"], &["--size", "7", "a", "-"], &["a"], &[]] {
            assert!(direction(wrong).unwrap_err().starts_with("cp takes "), "{wrong:?}");
        }
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
        let copied = run(&Copy::In("x.iso", 9), folder.path(), &mut Broken(0), &mut io::sink());
        assert!(format!("{:#}", copied.unwrap_err()).starts_with("x.iso: "));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
