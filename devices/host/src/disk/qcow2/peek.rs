//! Reads an image that may be in use.
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use super::empty;
use super::entry::{COMPRESSED, OFFSET, ZERO};
use super::header::Header;

/// Reads bytes as the guest sees them, without a lock: another process may be writing. Compressed
/// clusters, backing files and ranges beyond the end are errors.
pub fn peek(file: &File, buffer: &mut [u8], offset: u64) -> io::Result<()> {
    let header = empty::read(file)?;
    let whole = offset.checked_add(buffer.len() as u64).is_some_and(|end| end <= header.size);
    if header.backing.is_some() || !whole {
        return Err(empty::wrong("these bytes are not in this image".into()));
    }
    let cluster = 1_u64 << header.cluster_bits;
    let (mut offset, mut rest) = (offset, buffer);
    while !rest.is_empty() {
        let length = usize::try_from(cluster - offset % cluster).unwrap_or(rest.len());
        let (part, behind) = rest.split_at_mut(length.min(rest.len()));
        match cluster_at(file, &header, offset / cluster)? {
            Some(at) => file.read_exact_at(part, at + offset % cluster)?,
            None => part.fill(0),
        }
        offset += part.len() as u64;
        rest = behind;
    }
    Ok(())
}

/// The place of a cluster in the file. `None` if it reads as zeros.
fn cluster_at(file: &File, header: &Header, number: u64) -> io::Result<Option<u64>> {
    let entry = |at: u64| {
        let mut bytes = [0; 8];
        file.read_exact_at(&mut bytes, at).map(|()| u64::from_be_bytes(bytes))
    };
    let per_table = 1_u64 << (header.cluster_bits - 3);
    let table = entry(header.l1_offset + number / per_table * 8)? & OFFSET;
    if table == 0 {
        return Ok(None);
    }
    let found = entry(table + number % per_table * 8)?;
    if found & COMPRESSED != 0 {
        return Err(empty::wrong("these bytes are compressed".into()));
    }
    let zero = header.version == 3 && found & ZERO != 0;
    Ok(Some(found & OFFSET).filter(|at| *at != 0 && !zero))
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn bytes_are_those_that_qemu_wrote() {
        let file = tempfile::NamedTempFile::new().unwrap();
        empty::create(file.as_file(), 1 << 30).unwrap();
        let mut io = Command::new("qemu-io");
        io.args(["-f", "qcow2", "-c", "write -P 7 65000 1000", "-c", "write -P 8 600M 4k"]);
        io.args(["-c", "write -P 9 700M 64k", "-c", "write -z 700M 64k"]);
        assert!(io.arg(file.path()).output().unwrap().status.success());
        let read = |offset: u64, length: usize| {
            let mut bytes = vec![1; length];
            peek(file.as_file(), &mut bytes, offset).map(|()| bytes)
        };
        assert_eq!(read(65_000, 1000).unwrap(), [7; 1000]);
        assert_eq!(read(64_999, 2).unwrap(), [0, 7]);
        assert_eq!(read((600 << 20) - 1, 3).unwrap(), [0, 8, 8]);
        assert_eq!(read(700 << 20, 512).unwrap(), [0; 512]);
        assert_eq!(read((1 << 30) - 1, 1).unwrap(), [0]);
        assert!(read(1 << 30, 1).is_err() && read(u64::MAX, 2).is_err());
        file.as_file().set_len(1 << 16).unwrap();
        assert!(read(0, 1).is_err());
    }
}
