//! Archives that are made to need memory and time.

use std::io::Write as _;
use std::time::{Duration, Instant};

use super::*;

/// An archive with this content, and this blob table behind it.
fn open(content: &[u8], table: &[u8]) -> anyhow::Result<Archive> {
    let mut start = vec![0; header::BYTES];
    let mut put = |at: usize, bytes: &[u8]| start[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, header::MAGIC);
    put(header::FLAGS, &LZMS.to_le_bytes());
    put(header::CHUNK, &0x2_0000_u32.to_le_bytes());
    let (offset, length) = ((header::BYTES + content.len()) as u64, table.len() as u64);
    put(header::BLOBS, &Resource { packed: length, flags: 0, offset, length }.write());
    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(&[&start, content, table].concat()).unwrap();
    Archive::open(file.path())
}

fn entry(packed: u64, flags: u8, offset: u64, length: u64) -> Vec<u8> {
    let resource = Resource { packed, flags, offset, length };
    [&resource.write()[..], &[0; ENTRY_BYTES - Resource::BYTES]].concat()
}

/// The start of a solid resource with this content, in the smallest chunks.
fn solid(length: u64) -> Vec<u8> {
    [length.to_le_bytes(), (MIN_CHUNK | u64::from(SOLID_LZMS) << 32).to_le_bytes()].concat()
}

#[test]
fn resources_that_share_a_table_have_a_limit() {
    const CHUNKS: u64 = 1 << 20;
    let content = [solid(CHUNKS * MIN_CHUNK), vec![0; 4 << 20]].concat();
    let resource = entry(0, flag::SOLID, header::BYTES as u64, SOLID_LENGTH);
    assert_eq!(open(&content, &resource).unwrap().solid.len(), 1);
    let error = format!("{:#}", open(&content, &resource.repeat(8)).err().unwrap());
    assert!(error.contains("too many chunks"), "{error}");
}

#[test]
fn many_resources_and_blobs_take_no_long_time() {
    const COUNT: usize = 300_000;
    // All but the last are empty, and each blob is in the last one.
    let empty = entry(0, flag::SOLID, header::BYTES as u64, SOLID_LENGTH);
    let last = entry(0, flag::SOLID, header::BYTES as u64 + 16, SOLID_LENGTH);
    let blob = entry(1, flag::SOLID, 1, 1);
    let table = [empty.repeat(COUNT), last, blob.repeat(COUNT)].concat();
    let started = Instant::now();
    let archive = open(&[solid(0), solid(2), vec![0; 4]].concat(), &table).unwrap();
    assert!(started.elapsed() < Duration::from_secs(10), "{:?}", started.elapsed());
    assert_eq!(archive.blob(&Sha1::default()).unwrap().order(), (COUNT, 1));
}

#[test]
fn a_blob_is_within_its_resource() {
    let resources =
        [0, 20].map(|at| entry(0, flag::SOLID, header::BYTES as u64 + at, SOLID_LENGTH));
    let content = [solid(9), vec![0; 4], solid(5), vec![0; 4]].concat();
    let of = |length: u64, offset: u64| {
        let blob = entry(length, flag::SOLID, offset, 1);
        let archive = open(&content, &[resources.concat(), blob].concat())?;
        anyhow::Ok(archive.blob(&Sha1::default()).map(Blob::order))
    };
    assert_eq!(of(9, 0).unwrap(), Some((0, 0)));
    assert_eq!(of(5, 9).unwrap(), Some((1, 0)));
    assert_eq!(of(1, 13).unwrap(), Some((1, 4)));
    for (length, offset) in [(2, 8), (6, 9), (1, 14), (1, u64::MAX)] {
        of(length, offset).unwrap_err();
    }
}

#[test]
fn a_blob_has_a_maximum_length() {
    assert!(open(&[], &entry(0, 0, 0, MAX_LENGTH)).is_ok());
    for length in [MAX_LENGTH + 1, u64::MAX] {
        let error = format!("{:#}", open(&[], &entry(0, 0, 0, length)).err().unwrap());
        assert!(error.contains("too many"), "{error}");
    }
}
