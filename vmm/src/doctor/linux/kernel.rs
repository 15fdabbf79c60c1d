//! Finds the kernel of this host, and its modules.

use std::fs::File;
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::path::{Path, PathBuf};

/// A bzImage (Linux, `Documentation/arch/x86/boot.rst`): its magic number, and the field with the
/// offset of a text with the release, counted from 0x200.
const MAGIC_AT: u64 = 0x202;
const RELEASE_AT: u64 = 0x20e;
const MAX_RELEASE: u64 = 128;

#[derive(Debug)]
pub(in crate::doctor) struct Kernel {
    pub(in crate::doctor) path: PathBuf,
    /// The folder with `modules.dep`, if there is one.
    pub(super) modules: Option<PathBuf>,
}

impl Kernel {
    pub(super) fn find(kernel: Option<&Path>, modules: Option<&Path>) -> Result<Self, String> {
        let path = match kernel {
            Some(path) => path.to_owned(),
            None => of_host(Path::new("/"), &running())?,
        };
        let modules = modules.map(Path::to_owned).or_else(|| {
            let release = release(&path)?;
            let folders =
                ["/usr/lib/modules", "/lib/modules"].map(|it| Path::new(it).join(&release));
            folders.into_iter().find(|folder| folder.join("modules.dep").exists())
        });
        Ok(Self { path, modules })
    }
}

/// The release of the running kernel.
fn running() -> String {
    std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default().trim().to_owned()
}

/// The file of the running kernel, below `root`.
fn of_host(root: &Path, release: &str) -> Result<PathBuf, String> {
    // Alpine names the file by the last part of the release: `lts`, `virt`.
    let flavour = release.rsplit('-').next().unwrap_or_default();
    let names = [
        format!("boot/vmlinuz-{release}"),
        format!("usr/lib/modules/{release}/vmlinuz"),
        format!("lib/modules/{release}/vmlinuz"),
        format!("boot/vmlinuz-{flavour}"),
    ];
    let mut refused = None;
    for path in names.iter().map(|name| root.join(name)) {
        match File::open(&path) {
            Ok(_) => return Ok(path),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => refused = Some(path),
            Err(_) => {}
        }
    }
    Err(match refused {
        Some(path) => format!(
            "{} may not be read by this user: run as root, or name a kernel with --kernel FILE",
            path.display()
        ),
        None => format!(
            "the kernel of this host ({release}) is neither in /boot nor in /usr/lib/modules: name \
             one with --kernel FILE (in a container, mount both folders)"
        ),
    })
}

/// The release in the header of a bzImage.
fn release(path: &Path) -> Option<String> {
    let mut file = File::open(path).ok()?;
    let mut read = |at, bytes: &mut [u8]| {
        file.seek(SeekFrom::Start(at)).ok()?;
        file.read_exact(bytes).ok()
    };
    let (mut magic, mut at) = ([0; 4], [0; 2]);
    read(MAGIC_AT, &mut magic)?;
    read(RELEASE_AT, &mut at)?;
    if &magic != b"HdrS" {
        return None;
    }
    file.seek(SeekFrom::Start(0x200 + u64::from(u16::from_le_bytes(at)))).ok()?;
    let mut text = Vec::new();
    file.take(MAX_RELEASE).read_to_end(&mut text).ok()?;
    let text = text.split(|byte| byte.is_ascii_whitespace() || *byte == 0).next()?;
    let release = String::from_utf8(text.to_vec()).ok()?;
    // It becomes part of a path.
    (!release.is_empty() && !release.contains('/') && release != "..").then_some(release)
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;

    #[test]
    fn the_kernel_of_the_host_is_found_in_its_usual_places() {
        for file in
            ["boot/vmlinuz-6.1.0-9-lts", "usr/lib/modules/6.1.0-9-lts/vmlinuz", "boot/vmlinuz-lts"]
        {
            let root = tempfile::tempdir().unwrap();
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            let error = of_host(root.path(), "6.1.0-9-lts").unwrap_err();
            assert!(error.contains("(6.1.0-9-lts)") && error.contains("--kernel FILE"), "{error}");
            fs::write(&path, "").unwrap();
            assert_eq!(of_host(root.path(), "6.1.0-9-lts").unwrap(), path);
        }
    }

    #[test]
    fn the_release_of_a_kernel_is_in_its_header() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("kernel");
        let image = |magic: &[u8], text: &[u8]| {
            let mut bytes = vec![0; 0x1000];
            bytes[0x202..0x206].copy_from_slice(magic);
            bytes[0x20e..0x210].copy_from_slice(&0x300_u16.to_le_bytes());
            bytes[0x500..0x500 + text.len()].copy_from_slice(text);
            fs::write(&path, bytes).unwrap();
            release(&path)
        };
        assert_eq!(image(b"HdrS", b"6.1.0-9 (x@y) #1\0").as_deref(), Some("6.1.0-9"));
        for (magic, text) in [(b"HdrX", &b"6.1"[..]), (b"HdrS", b"../etc"), (b"HdrS", b"..\0")] {
            assert_eq!(image(magic, text), None);
        }
        fs::write(&path, "short").unwrap();
        assert_eq!(release(&path), None);
    }
}
