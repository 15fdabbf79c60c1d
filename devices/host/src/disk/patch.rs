//! Patches of a read-only disk: the guest reads other bytes at some places, and the file keeps its
//! own.

use std::io;
use std::sync::Arc;

use anyhow::{Context, ensure};
use serde::de::{self, Deserializer, Visitor};
use serde::{Deserialize, Serialize, Serializer};

use super::Geometry;
use super::medium::{Buffer, Medium};

/// Maximum number of patches of a disk, and of bytes of a patch.
const MAX_PATCHES: usize = 16;
const MAX_BYTES: usize = 64;
/// Bytes that are read around a patch to compare it. A multiple of every sector.
const BLOCK: u64 = 4096;

/// Where the guest sees something else than the file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Changes {
    /// Nowhere: writes go to the file.
    #[default]
    None,
    /// Where it wrote: writes stay in memory.
    Writes,
    /// In the patches. It cannot write.
    Patches(Vec<Patch>),
}

impl Changes {
    /// Fails if a CD cannot have these changes: nobody writes to it.
    pub fn check_cdrom(&self) -> anyhow::Result<()> {
        let why = "`overlay=on` has no effect on a CD, which the guest cannot write: remove it";
        ensure!(*self != Self::Writes, why);
        Ok(())
    }
}

/// Bytes that replace those of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Patch {
    pub offset: u64,
    /// The bytes of the file. It is not opened if it has others.
    pub old: Vec<u8>,
    /// The same number of bytes as `old`.
    pub new: Vec<u8>,
}

impl Patch {
    /// Reads `OFFSET:OLD:NEW`, where OLD and NEW are hexadecimal.
    fn read(text: &str) -> anyhow::Result<Self> {
        let mut parts = text.split(':');
        let parts = [parts.next(), parts.next(), parts.next(), parts.next()];
        let [Some(offset), Some(old), Some(new), None] = parts else {
            anyhow::bail!("`{text}` is not a patch: write OFFSET:OLD:NEW, as in 38912:1f02:2a04");
        };
        let offset = offset.parse().with_context(|| format!("`{offset}` is not an offset"))?;
        let patch = Self { offset, old: bytes(old)?, new: bytes(new)? };
        ensure!(
            patch.old.len() == patch.new.len(),
            "`{text}` replaces {} bytes by {}: give as many",
            patch.old.len(),
            patch.new.len()
        );
        Ok(patch)
    }

    fn write(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|it| format!("{it:02x}")).collect::<String>();
        format!("{}:{}:{}", self.offset, hex(&self.old), hex(&self.new))
    }

    fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.new.len() as u64)
    }
}

fn bytes(hex: &str) -> anyhow::Result<Vec<u8>> {
    let plain = hex.bytes().all(|byte| byte.is_ascii_hexdigit());
    ensure!(
        plain && hex.len().is_multiple_of(2) && (1..=MAX_BYTES).contains(&(hex.len() / 2)),
        "`{hex}` must be 1 to {MAX_BYTES} bytes, each of two hexadecimal digits"
    );
    let byte = |at: usize| u8::from_str_radix(&hex[at..at + 2], 16);
    Ok((0..hex.len()).step_by(2).map(byte).collect::<Result<_, _>>()?)
}

impl Changes {
    fn read(text: &str) -> anyhow::Result<Self> {
        let patches = text.split('+').take(MAX_PATCHES + 1).map(Patch::read);
        let patches = patches.collect::<anyhow::Result<Vec<_>>>()?;
        ensure!(patches.len() <= MAX_PATCHES, "more than {MAX_PATCHES} patches");
        Ok(Self::Patches(patches))
    }
}

impl Serialize for Changes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_bool(false),
            Self::Writes => serializer.serialize_bool(true),
            Self::Patches(patches) => {
                let patches: Vec<_> = patches.iter().map(Patch::write).collect();
                serializer.serialize_str(&patches.join("+"))
            }
        }
    }
}

impl<'de> Deserialize<'de> for Changes {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Form;
        impl Visitor<'_> for Form {
            type Value = Changes;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a boolean, or patches OFFSET:OLD:NEW")
            }

            fn visit_bool<E: de::Error>(self, on: bool) -> Result<Changes, E> {
                Ok(if on { Changes::Writes } else { Changes::None })
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Changes, E> {
                Changes::read(text).map_err(|error| E::custom(format!("{error:#}")))
            }
        }
        deserializer.deserialize_any(Form)
    }
}

/// A read-only disk with patches.
pub(super) struct Patched {
    base: Arc<dyn Medium>,
    patches: Vec<Patch>,
}

impl Patched {
    /// Checks that the patches are within the disk and that it has the old bytes.
    pub(super) fn new(base: Arc<dyn Medium>, patches: &[Patch]) -> anyhow::Result<Self> {
        let mut patches = patches.to_vec();
        ensure!(patches.len() <= MAX_PATCHES, "more than {MAX_PATCHES} patches");
        patches.sort_by_key(|patch| patch.offset);
        let size = base.geometry().size;
        let mut last = 0;
        for patch in &patches {
            let end = patch.end().filter(|end| *end <= size);
            let end =
                end.with_context(|| format!("a patch at {} of {size} bytes", patch.offset))?;
            ensure!(last <= patch.offset, "two patches change the byte at {}", patch.offset);
            ensure!(
                patch.old.len() == patch.new.len() && patch.new.len() <= MAX_BYTES,
                "the patch at {} has a wrong length",
                patch.offset
            );
            ensure!(
                has(&*base, patch, size).with_context(|| format!("at {}", patch.offset))?,
                "the bytes at {} are not those that the patch replaces: the image is another one, \
                 or was changed",
                patch.offset
            );
            last = end;
        }
        Ok(Self { base, patches })
    }
}

/// Whether the disk has the bytes that the patch replaces.
fn has(base: &dyn Medium, patch: &Patch, size: u64) -> anyhow::Result<bool> {
    let start = patch.offset / BLOCK * BLOCK;
    let end = (patch.offset + patch.old.len() as u64).next_multiple_of(BLOCK).min(size);
    let mut buffer = Buffer::default();
    let around = buffer.take(usize::try_from(end - start)?);
    base.read(around, start)?;
    Ok(around[usize::try_from(patch.offset - start)?..].starts_with(&patch.old))
}

/// Replaces the bytes of a patch in a buffer that was read at `offset`.
fn apply(patch: &Patch, buffer: &mut [u8], offset: u64) {
    for (at, byte) in (patch.offset..).zip(&patch.new) {
        let place = at.checked_sub(offset).and_then(|it| usize::try_from(it).ok());
        if let Some(place) = place.and_then(|it| buffer.get_mut(it)) {
            *place = *byte;
        }
    }
}

impl Medium for Patched {
    fn geometry(&self) -> Geometry {
        Geometry { read_only: true, discard: 0, ..self.base.geometry() }
    }

    fn read(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.base.read(buffer, offset)?;
        for patch in &self.patches {
            apply(patch, buffer, offset);
        }
        Ok(())
    }

    fn write(&self, _: &[u8], _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn flush(&self) -> io::Result<()> {
        Ok(())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn zero(&self, _: u64, _: u64, _: bool) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn grow(&self, _: Option<u64>) -> anyhow::Result<()> {
        anyhow::bail!("a disk with patches cannot grow")
    }
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::super::driver::{Driver, piece};
    use super::super::{Config, Fault, Operation, open};
    use super::*;

    fn config(text: &str) -> anyhow::Result<Config> {
        Ok(serde_json::from_str(text)?)
    }

    #[test]
    fn patches_change_reads_and_not_the_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cd.iso");
        let mut bytes: Vec<u8> = (0..6 * 2048_usize).map(|it| it.to_le_bytes()[0]).collect();
        fs::write(&path, &bytes).unwrap();
        let old = bytes.clone();
        // Across two sectors, and the last byte.
        bytes[2046..2050].copy_from_slice(&[0xaa, 0xbb, 0xcc, 0xdd]);
        bytes[6 * 2048 - 1] = 0xee;
        let changes = Changes::read("2046:feff0001:aabbccdd+12287:ff:ee").unwrap();
        let config = Config { overlay: changes, ..Config::new(&path) };
        let image = open(&config, None).unwrap();
        assert!(image.geometry().read_only);
        let mut driver = Driver::new(&image);
        assert!(driver.read(0, 6 * 2048).unwrap() == bytes);
        for at in (0..6 * 2048).step_by(512) {
            let start = usize::try_from(at).unwrap();
            assert_eq!(driver.read(at, 512).unwrap(), bytes[start..start + 512], "{at}");
        }
        let write = Operation::Write { durable: false };
        assert_eq!(driver.execute(write, 0, 512, &[piece(0, 512)]), Err(Fault::Refused));
        assert!(fs::read(&path).unwrap() == old);
    }

    #[test]
    fn patches_of_another_image_or_beyond_the_end_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("cd.iso");
        fs::write(&path, [7; 4096]).unwrap();
        for (text, words) in [
            ("10:08:09", "at 10 are not those that the patch replaces"),
            ("4095:0707:0101", "a patch at 4095 of 4096 bytes"),
            ("18446744073709551615:07:01", "of 4096 bytes"),
            ("10:0707:0101+11:07:02", "two patches change the byte at 11"),
        ] {
            let config = Config { overlay: Changes::read(text).unwrap(), ..Config::new(&path) };
            let said = format!("{:#}", open(&config, None).err().unwrap());
            assert!(said.contains(words) && said.contains("cd.iso"), "{said}");
        }
    }

    #[test]
    fn round_trips_through_json() {
        for value in ["false", "true", r#""10:08:09""#, r#""10:08:09+4096:0102:0304""#] {
            let config = config(&format!(r#"{{"path":"a","overlay":{value}}}"#)).unwrap();
            assert_eq!(serde_json::to_string(&config.overlay).unwrap(), value);
        }
        let long = "00".repeat(MAX_BYTES + 1);
        let many = vec!["1:00:01"; MAX_PATCHES + 1].join("+");
        for text in [
            "",
            "1",
            "1:00",
            "1:0:1",
            "1:00:0102",
            "1:é0:00",
            "-1:00:01",
            "1:00:01:2",
            &format!("1:{long}:{long}"),
            &many,
        ] {
            assert!(config(&format!(r#"{{"path":"a","overlay":"{text}"}}"#)).is_err(), "{text}");
        }
    }
}
