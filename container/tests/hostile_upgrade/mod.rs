//! Blocks of LZMS, directories of images, and archives that are nearly right.

use std::fs::File;
use std::io::Write as _;

use container::esd::Plan;
use container::esd::archive::{Archive, Sha1};
use container::esd::lzms::Decoder;
use container::esd::tree;

/// Longer CDs are not written.
const MAX_LENGTH: u64 = 128 << 20;

/// The first byte selects the reader. Returns whether it took the bytes.
pub(crate) fn read(bytes: &[u8]) -> bool {
    let Some((kind, rest)) = bytes.split_first() else { return false };
    match kind % 4 {
        0 => block(rest),
        1 => tree::read(rest).is_ok() && tree::streams(rest).is_ok(),
        _ => archive(&changed(rest)),
    }
}

/// A block, whose length is in the first byte.
fn block(bytes: &[u8]) -> bool {
    let Some((length, block)) = bytes.split_first() else { return false };
    let mut out = vec![0; usize::from(*length) * 97 + 1];
    Decoder::default().decode(block, &mut out).is_ok()
}

fn archive(bytes: &[u8]) -> bool {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("room");
    let plan = Archive::open(file.path()).and_then(Plan::new);
    plan.is_ok_and(|plan| {
        let fits = plan.max_length().is_ok_and(|it| it < MAX_LENGTH);
        let cd: File = tempfile::tempfile().expect("a temporary file");
        fits && plan.write(&cd, &|_, _| ()).is_ok()
    })
}

/// The template, with changes: place, and new byte.
fn changed(bytes: &[u8]) -> Vec<u8> {
    let mut changed = template();
    for change in bytes.chunks_exact(3) {
        let at = usize::from(u16::from_le_bytes([change[0], change[1]])) % changed.len();
        changed[at] = change[2];
    }
    changed
}

/// An archive with four images, whose content is not compressed.
fn template() -> Vec<u8> {
    let mut bytes = vec![0; 208];
    let mut table = Vec::new();
    let mut put = |content: &[u8], flags: u8| {
        table.extend(resource(bytes.len(), content.len(), flags));
        table.extend([1, 0, 1, 0, 0, 0]);
        table.extend(Sha1::of(content).0);
        bytes.extend_from_slice(content);
    };
    let (boot, other) = (vec![1; 5000], vec![2; 70_000]);
    put(&boot, 0);
    put(&other, 0);
    let boot = entry("efisys.bin", Sha1::of(&boot), 0);
    let media = folders(&["efi", "microsoft", "boot"], &boot);
    put(&media, 2);
    for _ in 0..3 {
        put(&folders(&["Windows"], &entry("a.dll", Sha1::of(&other), 0)), 2);
    }
    let xml: String = (1..=4).map(|it| format!("<IMAGE INDEX=\"{it}\"></IMAGE>")).collect();
    let xml: Vec<u8> =
        format!("\u{feff}<WIM>{xml}</WIM>").encode_utf16().flat_map(u16::to_le_bytes).collect();
    let places = [bytes.len(), bytes.len() + table.len()];
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(0, b"MSWIM\0\0\0");
    set(8, &208_u32.to_le_bytes());
    set(16, &0x8_0002_u32.to_le_bytes());
    set(20, &0x2_0000_u32.to_le_bytes());
    set(40, &[1, 0, 1, 0, 4]);
    set(48, &resource(places[0], table.len(), 2));
    set(72, &resource(places[1], xml.len(), 2));
    [bytes, table, xml].concat()
}

fn resource(offset: usize, length: usize, flags: u8) -> Vec<u8> {
    let [offset, length] = [offset, length].map(|it| (it as u64).to_le_bytes());
    [&length[..7], &[flags], &offset, &length].concat()
}

/// Metadata: no security descriptors, these folders in one another beside `sources`, and an entry
/// in the last one.
fn folders(names: &[&str], last: &[u8]) -> Vec<u8> {
    let mut bytes = [&8_u32.to_le_bytes()[..], &[0; 4]].concat();
    let next = |bytes: &[u8], length: usize| (bytes.len() + length + 8) as u64;
    bytes.extend(entry("", Sha1::default(), next(&bytes, entry("", Sha1::default(), 1).len())));
    bytes.extend([0; 8]);
    for (number, name) in names.iter().enumerate() {
        let folder = |children| entry(name, Sha1::default(), children);
        let sources = entry("sources", Sha1::default(), 1);
        let more = if number == 0 { sources.len() } else { 0 };
        let children = next(&bytes, folder(1).len() + more);
        bytes.extend(folder(children));
        if number == 0 {
            bytes.extend(entry("sources", Sha1::default(), u64::MAX));
        }
        bytes.extend([0; 8]);
    }
    bytes.extend_from_slice(last);
    bytes.extend([0; 8]);
    bytes
}

/// A file, or a directory with its children at this place; `u64::MAX` is none.
fn entry(name: &str, sha1: Sha1, children: u64) -> Vec<u8> {
    let name: Vec<u8> = name.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let mut bytes = vec![0; (102 + name.len()).next_multiple_of(8)];
    let length = bytes.len() as u64;
    let mut set = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
    set(0, &length.to_le_bytes());
    set(8, &(if children == 0 { 0_u32 } else { 0x10 }).to_le_bytes());
    set(16, &(if children == u64::MAX { 0 } else { children }).to_le_bytes());
    set(64, &sha1.0);
    set(100, &u16::try_from(name.len()).expect("a short name").to_le_bytes());
    set(102, &name);
    bytes
}
