//! Opens the character device of a macvtap. Each macvtap has its own device number, and in a
//! container no other program creates the node.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::{Errno, FdFlags};

use super::refusal;
use crate::net::link::Link;

/// Folders that may have nodes of all devices: the host's /dev, also where users of the reference
/// image mount it.
const SHARED: [&str; 2] = ["/dev", "/dev0"];
/// A folder of the container in which device nodes always work.
const DEV: &str = "/dev";

/// Opens the device, once for each queue pair. Child processes inherit the descriptors.
pub(super) fn open(link: &Link, folder: &Path, pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let name = format!("tap{}", link.index);
    let number = Path::new("/sys/class/net").join(&link.name).join(&name).join("dev");
    let text = fs::read_to_string(&number).with_context(|| number.display().to_string())?;
    let device = read(&text).with_context(|| format!("{}: {text}", number.display()))?;
    let mut shared = SHARED.iter().map(|folder| Path::new(folder).join(&name));
    let queues = match shared.find(|path| is_device(path, device)) {
        Some(path) => open_queues(&path, pairs),
        None => open_new_node(device, &[folder, Path::new(DEV)], pairs),
    }?;
    for queue in &queues {
        rustix::io::fcntl_setfd(queue, FdFlags::empty()).context("flags of the macvtap")?;
    }
    Ok(queues)
}

/// Parses a device number of sysfs, `major:minor`.
fn read(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn is_device(path: &Path, device: u64) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|file| file.file_type().is_char_device() && file.rdev() == device)
}

/// Opens a device by a temporary node, in the first of these folders where that works.
fn open_new_node(device: u64, folders: &[&Path], pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let mut attempts = folders.iter().map(|folder| {
        let node = Node::make(folder.join("transom-macvtap"), device)?;
        open_queues(&node.0, pairs)
    });
    let first = attempts.next().context("no folder for a node")?;
    // If all fail, the first error is the most useful.
    first.or_else(|error| attempts.find_map(Result::ok).ok_or(error))
}

fn open_queues(path: &Path, pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open(path) {
        return Err(refusal(match Errno::from_io_error(&error) {
            Some(Errno::PERM) => "its device may not be opened: add device_cgroup_rules: \
                                  [\"c *:* rwm\"] (--device-cgroup-rule \"c *:* rwm\")"
                .to_owned(),
            _ => format!("{}: {error}", path.display()),
        }));
    }
    host::net::tap::open_macvtap(path, pairs)
}

/// A device node, removed when dropped.
struct Node(PathBuf);

impl Node {
    fn make(path: PathBuf, device: u64) -> anyhow::Result<Self> {
        // A killed predecessor may have left one.
        fs::remove_file(&path).ok();
        let mode = Mode::from_raw_mode(0o600);
        match mknodat(CWD, &path, FileType::CharacterDevice, mode, device) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(refusal(format!(
                "the device node cannot be created: {error}: add --cap-add MKNOD (which has no \
                 effect in a user namespace)"
            ))),
        }
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            tracing::warn!("{}: {error}", self.0.display());
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_device_number_has_major_and_minor() {
        assert_eq!(read("246:1\n"), Some(makedev(246, 1)));
        for text in ["", "246", "246:", ":1", "246:-1", "4294967296:1"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_device_is_identified_by_its_number() {
        let null = makedev(1, 3);
        assert!(is_device(Path::new("/dev/null"), null));
        assert!(!is_device(Path::new("/dev/zero"), null));
        assert!(!is_device(Path::new("/"), null));
    }
}
