//! Images in QEMU's format: an empty one is written, and the header of one that is there is read.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

/// Bytes of a cluster, as a power of two: QEMU's own choice.
const BITS: u32 = 16;
const CLUSTER: u64 = 1 << BITS;
/// Bytes of an entry of tables, and of a count of references.
const ENTRY: u64 = 8;
const COUNT: u64 = 2;
const MAGIC: u32 = 0x5146_49fb;
/// Bytes of a header of version 3 without any extension.
const HEADER: u32 = 104;

/// Writes an image of this size.
///
/// # Errors
///
/// When it cannot be written, or is too large for one.
pub fn write(file: &File, size: u64) -> io::Result<()> {
    let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "no qcow2 image is as large");
    // What one table of the second level reaches.
    let reach = CLUSTER / ENTRY * CLUSTER;
    let entries = size.div_ceil(reach);
    // The header, the table of counts, one block of them, which counts far more clusters than
    // there are tables, and the table of the first level.
    let clusters = 3 + (entries * ENTRY).div_ceil(CLUSTER);
    if clusters > CLUSTER / COUNT || size == 0 {
        return Err(wrong());
    }
    let entries = u32::try_from(entries).map_err(|_| wrong())?;
    // QEMU's docs/interop/qcow2: "Header".
    let mut header = Vec::new();
    header.extend(MAGIC.to_be_bytes());
    header.extend(3_u32.to_be_bytes());
    // No backing file.
    header.extend([0; 12]);
    header.extend(BITS.to_be_bytes());
    header.extend(size.to_be_bytes());
    // Not encrypted.
    header.extend([0; 4]);
    header.extend(entries.to_be_bytes());
    header.extend((3 * CLUSTER).to_be_bytes());
    header.extend(CLUSTER.to_be_bytes());
    header.extend(1_u32.to_be_bytes());
    // No snapshots, no features; counts have 2^4 bits.
    header.extend([0; 4 + 8 + 24]);
    header.extend(4_u32.to_be_bytes());
    header.extend(HEADER.to_be_bytes());
    file.set_len(clusters * CLUSTER)?;
    file.write_all_at(&header, 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    let counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.write_all_at(&counts, 2 * CLUSTER)
}

/// What the start of an image says.
struct Header {
    /// Where the name of the image below it is; 0 if it stands on none.
    below: u64,
    /// Bytes of a cluster, as a power of two.
    bits: u32,
    /// Bytes of the disk.
    length: u64,
    /// Entries of the table of the first level, and where that is.
    entries: u32,
    table: u64,
}

impl Header {
    fn read(file: &File) -> io::Result<Self> {
        let mut header = [0; 48];
        file.read_exact_at(&mut header, 0)?;
        if !header.starts_with(&MAGIC.to_be_bytes()) {
            return Err(wrong());
        }
        let half = |at: usize| {
            let (bytes, _) = header[at..].split_first_chunk::<4>().expect("four bytes");
            u32::from_be_bytes(*bytes)
        };
        let whole = |at: usize| u64::from(half(at)) << 32 | u64::from(half(at + 4));
        Ok(Self {
            below: whole(8),
            bits: half(20),
            length: whole(24),
            entries: half(36),
            table: whole(40),
        })
    }
}

fn wrong() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "this is no qcow2 image")
}

/// How long the disk in an image is, and whether it can become longer by itself: it stands on no
/// other one, and its tables have room.
///
/// # Errors
///
/// When it is no such image.
pub fn size(file: &File) -> io::Result<(u64, bool)> {
    let Header { below, bits, length, .. } = Header::read(file)?;
    Ok((length, below == 0 && bits >= BITS))
}

/// The longest table of the first level that QEMU takes, in bytes.
const LONGEST: u64 = 32 << 20;

/// Whether there is anything in an image: a cluster of its own, or an image that it stands on.
///
/// # Errors
///
/// When it is no such image.
pub fn is_written(file: &File) -> io::Result<bool> {
    let Header { below, entries, table, .. } = Header::read(file)?;
    let length = u64::from(entries) * ENTRY;
    if length > LONGEST {
        return Err(wrong());
    }
    let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
    file.read_exact_at(&mut bytes, table)?;
    Ok(below != 0 || bytes.iter().any(|byte| *byte != 0))
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn qemu_finds_no_fault_in_an_image() {
        for size in [512_u64, 64 << 30, 4 << 40] {
            let file = tempfile::NamedTempFile::new().unwrap();
            write(file.as_file(), size).unwrap();
            let path = file.path();
            let mut check = Command::new("qemu-img");
            check.args(["check", "-f", "qcow2"]).arg(path);
            assert!(check.output().unwrap().status.success(), "{size}");
            let info = Command::new("qemu-img").args(["info", "--output=json"]).arg(path).output();
            let info: serde_json::Value = serde_json::from_slice(&info.unwrap().stdout).unwrap();
            assert_eq!(
                (&info["format"], info["virtual-size"].as_u64()),
                (&"qcow2".into(), Some(size))
            );
            assert_eq!(super::size(file.as_file()).unwrap(), (size, true));
            assert!(!is_written(file.as_file()).unwrap());
            let mut io = Command::new("qemu-io");
            io.args(["-f", "qcow2", "-c", "write 0 512"]).arg(path);
            assert!(io.output().unwrap().status.success(), "{size}");
            assert!(is_written(file.as_file()).unwrap());
        }
        let file = tempfile::tempfile().unwrap();
        assert!(write(&file, u64::MAX).is_err() && write(&file, 0).is_err());
        assert!(size(&file).is_err() && is_written(&file).is_err());
        file.write_all_at(&[0; 64], 0).unwrap();
        assert!(size(&file).is_err());
    }
}
