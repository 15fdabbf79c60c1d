//! SHA-256 checksums of files (FIPS 180-4).

use std::fmt;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::str::FromStr;

use anyhow::{Context as _, ensure};
use ring::digest::{Context, SHA256};

const BLOCK: usize = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sha256([u8; 32]);

impl FromStr for Sha256 {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let reason = "a SHA-256 checksum has 64 hexadecimal digits";
        ensure!(text.len() == 64 && text.bytes().all(|digit| digit.is_ascii_hexdigit()), reason);
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * at..2 * at + 2], 16).context(reason)?;
        }
        Ok(Self(bytes))
    }
}

impl fmt::Display for Sha256 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The checksum of a file. Reports the number of bytes that it has read.
pub(super) fn of(file: &File, report: impl Fn(u64)) -> io::Result<Sha256> {
    let mut context = Context::new(&SHA256);
    let mut block = vec![0; BLOCK];
    let mut at = 0;
    loop {
        let count = match file.read_at(&mut block, at) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count?,
        };
        if count == 0 {
            let mut bytes = [0; 32];
            bytes.copy_from_slice(context.finish().as_ref());
            return Ok(Sha256(bytes));
        }
        context.update(&block[..count]);
        at += count as u64;
        report(at);
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_checksum_is_that_of_the_standard() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        std::fs::write(&path, "abc").unwrap();
        let found = of(&File::open(&path).unwrap(), |_| ()).unwrap();
        let known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
        assert_eq!(found.to_string(), known);
        assert_eq!(known.to_uppercase().parse::<Sha256>().unwrap(), found);
        for bad in ["", "ba78", &"g".repeat(64), &"\u{e9}".repeat(32)] {
            assert!(bad.parse::<Sha256>().is_err(), "{bad}");
        }
    }
}
