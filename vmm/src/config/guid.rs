//! Derived UUIDs: of a machine from its first disk, and of a VM Generation ID from another UUID.

use std::path::Path;

use host::uuid::Uuid;
use ring::digest::{SHA256, digest};

/// The default UUID of a machine. It stays the same as long as the first disk keeps its path on the
/// same host.
pub(crate) fn of_disk(disk: &Path) -> Uuid {
    let host = std::fs::read("/etc/machine-id").unwrap_or_default();
    let path = std::fs::canonicalize(disk).unwrap_or_else(|_| disk.to_owned());
    derived("machine", &[&host[..], path.as_os_str().as_encoded_bytes()].concat())
}

/// A UUID for one purpose, derived from a seed (RFC 9562, version 8).
pub(crate) fn derived(purpose: &str, seed: &[u8]) -> Uuid {
    let hash = digest(&SHA256, &[b"transom ", purpose.as_bytes(), &[0][..], seed].concat());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    Uuid::with_version(bytes, 8)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn each_disk_has_its_own_stable_uuid() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, "").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        assert_eq!(of_disk(&disk), of_disk(&link));
        assert_ne!(of_disk(&disk), of_disk(&folder.path().join("other")));
        assert_ne!(derived("machine", b"x"), derived("generation", b"x"));
        assert_eq!(derived("x", b"").0[6] >> 4, 8);
    }
}
