//! UUIDs: reading and showing them, and those that are derived from a machine's disk.

use std::path::Path;

use anyhow::Context as _;
use ring::digest::{SHA256, digest};

/// Reads 32 hexadecimal digits, with hyphens or without.
///
/// # Errors
///
/// When they are not.
pub fn read(text: &str) -> anyhow::Result<[u8; 16]> {
    let digits: String = text.chars().filter(|c| *c != '-').collect();
    let number = (digits.len() == 32).then(|| u128::from_str_radix(&digits, 16).ok()).flatten();
    let number = number.with_context(|| format!("{text}: a UUID is 32 hexadecimal digits"))?;
    Ok(number.to_be_bytes())
}

/// In the usual form.
pub fn show(id: [u8; 16]) -> String {
    let hex: String = id.iter().map(|byte| format!("{byte:02x}")).collect();
    let part = |range: std::ops::Range<usize>| &hex[range];
    [part(0..8), part(8..12), part(12..16), part(16..20), part(20..32)].join("-")
}

/// As Microsoft's GUIDs are in memory: the first three fields are little-endian.
pub fn in_memory(id: [u8; 16]) -> [u8; 16] {
    let [a, b, c, d, e, f, g, h, rest @ ..] = id;
    let [i, j, k, l, m, n, o, p] = rest;
    [d, c, b, a, f, e, h, g, i, j, k, l, m, n, o, p]
}

/// A random one (RFC 9562, version 4).
///
/// # Errors
///
/// When the host has no random bytes.
pub fn random() -> anyhow::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
        .context("random bytes")?;
    Ok(stamped(bytes, 4))
}

/// The UUID of a machine that was given none: the same as long as its first disk lies in the same
/// place of the same host.
pub fn of_disk(disk: &Path) -> [u8; 16] {
    let host = std::fs::read("/etc/machine-id").unwrap_or_default();
    let place = std::fs::canonicalize(disk).unwrap_or_else(|_| disk.to_owned());
    derived("machine", &[&host[..], place.as_os_str().as_encoded_bytes()].concat())
}

/// A UUID for one purpose, derived from a seed (RFC 9562, version 8).
pub fn derived(purpose: &str, seed: &[u8]) -> [u8; 16] {
    let hash = digest(&SHA256, &[b"transom ", purpose.as_bytes(), &[0][..], seed].concat());
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&hash.as_ref()[..16]);
    stamped(bytes, 8)
}

/// Puts version and variant in.
fn stamped(mut bytes: [u8; 16], version: u8) -> [u8; 16] {
    bytes[6] = bytes[6] & 0xf | version << 4;
    bytes[8] = bytes[8] & 0x3f | 0x80;
    bytes
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn reads_shows_and_turns_what_windows_turns() {
        let text = "12345678-9abc-def0-1122-334455667788";
        let id = read(text).unwrap();
        assert_eq!(show(id), text);
        assert_eq!(read(&text.replace('-', "")).unwrap(), id);
        let turned = [0x78, 0x56, 0x34, 0x12, 0xbc, 0x9a, 0xf0, 0xde];
        assert_eq!(in_memory(id)[..8], turned);
        assert_eq!(in_memory(id)[8..], id[8..]);
        for wrong in ["", "12", "x2345678-9abc-def0-1122-334455667788"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_disk_has_one_uuid_and_another_disk_another() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("disk");
        std::fs::write(&disk, "").unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&disk, &link).unwrap();
        assert_eq!(of_disk(&disk), of_disk(&link));
        assert_ne!(of_disk(&disk), of_disk(&folder.path().join("other")));
        assert_ne!(derived("machine", b"x"), derived("generation", b"x"));
        assert_ne!(random().unwrap(), random().unwrap());
        assert_eq!((derived("x", b"")[6] >> 4, random().unwrap()[6] >> 4), (8, 4));
    }
}
