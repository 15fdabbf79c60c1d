//! The device through which a macvtap's frames go. Its number is the interface's own, and in a
//! container nobody makes its node but us.

use std::fs::{self, OpenOptions};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::{Errno, FdFlags};

use super::refusal;
use crate::net::link::Link;

/// Where nodes of all devices may be: the host's own /dev, and that which the reference mounts.
const SHARED: [&str; 2] = ["/dev", "/dev0"];
/// A folder of the container's own that is always mounted for devices.
const DEV: &str = "/dev";

/// Opens the device, once for each pair of queues. Whoever is started inherits them.
pub(super) fn open(link: &Link, folder: &Path, pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let name = format!("tap{}", link.index);
    let number = Path::new("/sys/class/net").join(&link.name).join(&name).join("dev");
    let text = fs::read_to_string(&number).with_context(|| number.display().to_string())?;
    let device = read(&text).with_context(|| format!("{}: {text}", number.display()))?;
    let mut shared = SHARED.iter().map(|place| Path::new(place).join(&name));
    let queues = match shared.find(|path| is_device(path, device)) {
        Some(path) => enter(&path, pairs),
        None => make(device, &[folder, Path::new(DEV)], pairs),
    }?;
    for queue in &queues {
        rustix::io::fcntl_setfd(queue, FdFlags::empty()).context("a macvtap to inherit")?;
    }
    Ok(queues)
}

/// The number of a device, as sysfs says it.
fn read(text: &str) -> Option<u64> {
    let (major, minor) = text.trim().split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn is_device(path: &Path, device: u64) -> bool {
    fs::symlink_metadata(path)
        .is_ok_and(|told| told.file_type().is_char_device() && told.rdev() == device)
}

/// Opens a device by a node that is made for that, in the first place where it can be.
fn make(device: u64, places: &[&Path], pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    let mut places = places.iter().map(|place| {
        let node = Node::make(place.join("transom-macvtap"), device)?;
        enter(&node.0, pairs)
    });
    let first = places.next().context("no place for a node")?;
    // Its reason is the nearest.
    first.or_else(|error| places.find_map(Result::ok).ok_or(error))
}

/// Opens the device at a path.
fn enter(path: &Path, pairs: u16) -> anyhow::Result<Vec<OwnedFd>> {
    if let Err(error) = OpenOptions::new().read(true).write(true).open(path) {
        return Err(refusal(match Errno::from_io_error(&error) {
            Some(Errno::PERM) => "its device may not be opened: add device_cgroup_rules: \
                                  [\"c *:* rwm\"] (--device-cgroup-rule \"c *:* rwm\")"
                .to_owned(),
            _ => format!("{}: {error}", path.display()),
        }));
    }
    host::net::tap::open(path, pairs)
}

/// A node, which goes away once the device was opened.
struct Node(PathBuf);

impl Node {
    fn make(path: PathBuf, device: u64) -> anyhow::Result<Self> {
        // That of one who was killed meanwhile.
        fs::remove_file(&path).ok();
        let mode = Mode::from_raw_mode(0o600);
        match mknodat(CWD, &path, FileType::CharacterDevice, mode, device) {
            Ok(()) => Ok(Self(path)),
            Err(error) => Err(refusal(format!(
                "the node of its device cannot be made: {error}: add --cap-add MKNOD (which no \
                 container of a user namespace can have)"
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
    fn a_number_has_two_halves() {
        assert_eq!(read("246:1\n"), Some(makedev(246, 1)));
        for text in ["", "246", "246:", ":1", "246:-1", "4294967296:1"] {
            assert_eq!(read(text), None, "{text}");
        }
    }

    #[test]
    fn a_device_is_known_by_its_number() {
        let null = makedev(1, 3);
        assert!(is_device(Path::new("/dev/null"), null));
        assert!(!is_device(Path::new("/dev/zero"), null));
        assert!(!is_device(Path::new("/"), null));
    }
}
