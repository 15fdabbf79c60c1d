//! `vmm doctor --disk PATH`: measures a disk or a volume. An existing disk is only read.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};

use super::machine::Limits;
use super::trial::{self, Trial};

/// Size of the file on a volume, in MiB, if time is limited or not: at most this, and at most a
/// quarter of the free space.
const MAX_MIB: [u64; 2] = [64, 256];
const MIN_MIB: u64 = 16;
/// Time limit of each measurement, so that slow disks end too.
const SECONDS: [u64; 2] = [1, 5];
/// Block size, queue depth and maximum number of requests of each measurement.
const READS: [(&str, u64, u64); 3] = [("128K", 32, 2000), ("4K", 1, 10_000), ("4K", 32, 100_000)];

/// Measures a disk, or the volume of a folder.
pub(super) fn measure(path: &Path, limits: Limits) -> anyhow::Result<Trial> {
    match fs::metadata(path) {
        Ok(found) if found.is_dir() => on_volume(path, path, limits),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
            on_volume(path, parent.unwrap_or(Path::new(".")), limits)
        }
        _ => existing(path, limits),
    }
}

/// The value for measurements that are short, or not.
fn choose([short, long]: [u64; 2], limits: Limits) -> u64 {
    if limits.is_short() { short } else { long }
}

/// Command-line words for the probe: read measurements over this span of the disk.
fn reads(span: &str, limits: Limits) -> impl Iterator<Item = String> {
    let seconds = choose(SECONDS, limits);
    READS.into_iter().map(move |(block, depth, requests)| {
        let settings = format!("block={block},depth={depth},requests={requests}");
        format!("disk=read,{settings},span={span},seconds={seconds}")
    })
}

/// The value of `--device` for a file. A comma would end the path.
fn device(path: &Path, more: &str) -> anyhow::Result<String> {
    let text = path.to_str().with_context(|| format!("{} is not text", path.display()))?;
    ensure!(!text.contains(','), "{text}: the path contains a comma: rename the file");
    Ok(format!("virtio-blk,path={text}{more}"))
}

fn existing(path: &Path, limits: Limits) -> anyhow::Result<Trial> {
    let words: Vec<_> = reads("0", limits).collect();
    let outcome = trial::run(&device(path, ",readonly=on")?, "disk", &words, limits)?;
    Ok(trial_of(path, "it was only read", outcome))
}

/// Writes a file and reads it. The file has no name, and disappears with this process.
fn on_volume(path: &Path, folder: &Path, limits: Limits) -> anyhow::Result<Trial> {
    let space = rustix::fs::statvfs(folder)
        .with_context(|| format!("{}: no folder to measure in", folder.display()))?;
    let free = (space.f_bavail.saturating_mul(space.f_frsize) / 4) >> 20;
    let mib = free.min(choose(MAX_MIB, limits));
    ensure!(
        mib >= MIN_MIB,
        "{}: too little free space to measure: {} MiB are needed",
        folder.display(),
        4 * MIN_MIB
    );
    let (file, path_in_proc) = nameless(folder)?;
    file.set_len(mib << 20).with_context(|| format!("{mib} MiB in {}", folder.display()))?;
    let settings = format!("block=128K,depth=32,span={mib}M");
    let both = ["write", "verify"].map(|mode| format!("disk={mode},{settings}"));
    let words: Vec<_> = both.into_iter().chain(reads(&format!("{mib}M"), limits)).collect();
    let outcome = trial::run(&device(&path_in_proc, "")?, "disk", &words, limits)?;
    let says = format!("a file of {mib} MiB was written there, verified and deleted");
    Ok(trial_of(path, &says, outcome))
}

/// Creates a file without a name, and returns the path by which another process can open it.
fn nameless(folder: &Path) -> anyhow::Result<(File, PathBuf)> {
    let process = std::process::id();
    let name = folder.join(format!(".transom-doctor-{process}"));
    let mut options = OpenOptions::new();
    let file = options.read(true).write(true).create_new(true).open(&name);
    let file = file.with_context(|| format!("{}: a file to measure with", name.display()))?;
    fs::remove_file(&name).with_context(|| name.display().to_string())?;
    let path = PathBuf::from(format!("/proc/{process}/fd/{}", file.as_raw_fd()));
    Ok((file, path))
}

fn trial_of(path: &Path, action: &str, outcome: trial::Outcome) -> Trial {
    let cached = outcome.log.contains("page cache");
    let cache = if cached { "through the page cache" } else { "around the page cache" };
    Trial {
        name: path.display().to_string(),
        says: format!("{action}; {cache}"),
        works: outcome.parts.iter().all(|part| part.works),
        parts: outcome.parts,
    }
}

#[cfg(test)]
mod test {
    use std::io::{Read, Seek, SeekFrom, Write};

    use super::*;

    #[test]
    fn a_measurement_file_has_no_name_and_can_be_opened() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, path) = nameless(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        File::options().write(true).open(&path).unwrap().write_all(b"seen").unwrap();
        let mut text = String::new();
        file.seek(SeekFrom::Start(0)).unwrap();
        file.read_to_string(&mut text).unwrap();
        assert_eq!(text, "seen");
    }

    #[test]
    fn a_path_with_a_comma_is_refused() {
        let error = device(Path::new("/a,b"), "").unwrap_err().to_string();
        assert!(error.contains("comma"), "{error}");
        assert_eq!(device(Path::new("/a"), ",x=1").unwrap(), "virtio-blk,path=/a,x=1");
    }
}
