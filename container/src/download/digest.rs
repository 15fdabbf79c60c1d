//! Checksums of files: SHA-256, and SHA-1 where Microsoft gives no other (FIPS 180-4).

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use anyhow::{Context as _, ensure};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};

const BLOCK: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Checksum {
    Sha256([u8; 32]),
    Sha1([u8; 20]),
}

impl Checksum {
    pub fn sha256(text: &str) -> anyhow::Result<Self> {
        Ok(Self::Sha256(bytes(text).context("a SHA-256 checksum has 64 hexadecimal digits")?))
    }

    pub fn sha1(text: &str) -> anyhow::Result<Self> {
        Ok(Self::Sha1(bytes(text).context("a SHA-1 checksum has 40 hexadecimal digits")?))
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Sha256(_) => "SHA-256",
            Self::Sha1(_) => "SHA-1",
        }
    }
}

fn bytes<const LENGTH: usize>(text: &str) -> anyhow::Result<[u8; LENGTH]> {
    let plain = text.bytes().all(|digit| digit.is_ascii_hexdigit());
    ensure!(plain && text.len() == 2 * LENGTH, "not a checksum");
    let mut bytes = [0; LENGTH];
    for (at, byte) in bytes.iter_mut().enumerate() {
        *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16)?;
    }
    Ok(bytes)
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: &[u8] = match self {
            Self::Sha256(bytes) => bytes,
            Self::Sha1(bytes) => bytes,
        };
        bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The checksum of a file, of the same kind as a known one. Reports the number of bytes that it has
/// read.
pub(super) fn of(file: &File, known: &Checksum, report: impl Fn(u64)) -> io::Result<Checksum> {
    let mut context = Context::new(match known {
        Checksum::Sha256(_) => &SHA256,
        Checksum::Sha1(_) => &SHA1_FOR_LEGACY_USE_ONLY,
    });
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    loop {
        let count = match file.read_at(&mut block, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            break;
        }
        context.update(&block[..count]);
        at += count as u64;
        report(at);
    }
    let mut found = known.clone();
    match &mut found {
        Checksum::Sha256(bytes) => bytes.copy_from_slice(context.finish().as_ref()),
        Checksum::Sha1(bytes) => bytes.copy_from_slice(context.finish().as_ref()),
    }
    Ok(found)
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_the_standard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "abc").unwrap();
        let file = File::open(&path).unwrap();
        let long = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        let short = "a9993e364706816aba3e25717850c26c9cd0d89d";
        for (text, known) in [
            (long, Checksum::sha256(&long.to_uppercase()).unwrap()),
            (short, Checksum::sha1(&short.to_uppercase()).unwrap()),
        ] {
            assert_eq!(of(&file, &known, |_| ()).unwrap(), known);
            assert_eq!(known.to_string(), text);
        }
        for bad in ["", "ba78", &"g".repeat(64), &"\u{e9}".repeat(32), &"g".repeat(40), short] {
            assert!(Checksum::sha256(bad).is_err(), "{bad}");
        }
        assert!(Checksum::sha1(long).is_err());
    }
}
