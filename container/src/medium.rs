//! Checks ISO images: whether a file is one, whether it is complete, and whether Microsoft made it
//! (ISO 9660, ECMA-119; UDF, ECMA-167).
//!
//! Threats: a file on the volume may be anything. Sizes in it are not trusted, but compared with
//! its length. Only its start is read, apart from UDF's descriptors.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use host::size::Size;

use crate::files;
use crate::media::{SECTOR, SECTOR_BYTES};
use crate::settings::value::{MIB, Value as _};
use crate::status::{Failure, Status};

/// The first volume descriptor, which is the primary one (ECMA-119 6.7.1, 8.4).
const PRIMARY: u64 = 16 * SECTOR;
/// Standard identifiers of volume descriptors, of ISO 9660 and of UDF (ECMA-167 2/9.1).
const NAMES: [&[u8]; 4] = [b"CD001", b"BEA01", b"NSR02", b"NSR03"];
/// Maximum number of descriptors to read: a CD with both file systems has UDF's after the others.
const DESCRIPTORS: u64 = 16;
/// Offset of the number of sectors in a primary volume descriptor (ECMA-119 8.4.8).
const SECTORS: usize = 80;
/// Sector of UDF's anchor (ECMA-167 3/10.2), and offset of the location of the descriptor sequence.
const ANCHOR: u64 = 256;
const SEQUENCE: usize = 20;
/// Maximum number of descriptors of the sequence to read.
const MAX_PARTS: u64 = 32;
/// Tags of an anchor and of a partition (ECMA-167 3/7.2.1), and offset of the location of a
/// partition in its descriptor.
const TAGS: [u16; 2] = [2, 5];
const PARTITION: usize = 188;
/// Bytes that may be missing at the end: some programs omit padding when they copy CDs.
const PADDING: u64 = MIB;
/// Length of the descriptor's start, up to the name of the program that wrote the CD.
const DESCRIPTOR_LENGTH: usize = 702;
/// Start of a primary volume descriptor: type, identifier, version.
const MAGIC: &[u8] = b"\x01CD001\x01";
/// Offsets of the publisher and of the preparer.
const MAKERS: [usize; 2] = [318, 446];
/// Offset of the application's name.
const PROGRAM: usize = 574;

/// Checks that a file is a complete ISO image, as far as descriptors show.
pub fn check(path: &Path) -> anyhow::Result<()> {
    let fail = |why: &str| {
        let sentence = format!("{} is not an ISO image: {why}", path.display());
        Failure::new(Status::Iso, sentence)
    };
    let file = files::open(path, File::options().read(true));
    let file = file.map_err(|error| {
        let why = match path.is_symlink() && !path.exists() {
            true => "it is a link to a file that is not there: mount the file itself".to_owned(),
            false => format!("{error}: give an ISO image"),
        };
        Failure::new(Status::Iso, format!("{}: {why}", path.display()))
    })?;
    // A device has no length here.
    let found = file.metadata()?;
    let length = if found.is_file() { found.len() } else { u64::MAX };
    match length_of(&file, length).map_err(|error| fail(&error.to_string()))? {
        None => Err(fail(&describe_other(&file, length)?)),
        Some(whole) if whole > length.saturating_add(PADDING) => {
            let [length, whole] = [length, whole].map(|bytes| Size(bytes >> 10 << 10).show());
            let why = format!(
                "{} is cut off: {length} of {whole} are there: download it again",
                path.display()
            );
            Err(Failure::new(Status::Iso, why))
        }
        Some(_) => Ok(()),
    }
}

/// Length of a CD according to its descriptors, or `None` if the file is not a CD.
fn length_of(file: &File, length: u64) -> io::Result<Option<u64>> {
    let mut whole = None;
    for number in 0..DESCRIPTORS {
        let Some(bytes) = sector(file, PRIMARY / SECTOR + number)? else { break };
        if NAMES.iter().any(|name| bytes[1..].starts_with(name)) {
            let sectors = if bytes.starts_with(MAGIC) { u32_at(&bytes, SECTORS) } else { 0 };
            whole = Some(whole.unwrap_or(0).max(u64::from(sectors) * SECTOR));
        }
    }
    match whole {
        Some(whole) if length > ANCHOR * SECTOR => Ok(Some(whole.max(udf(file)?))),
        whole => Ok(whole),
    }
}

/// End of the last UDF partition; 0 without UDF.
fn udf(file: &File) -> io::Result<u64> {
    let tag = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]);
    let Some(anchor) = sector(file, ANCHOR)?.filter(|it| tag(it) == TAGS[0]) else { return Ok(0) };
    let first = u64::from(u32_at(&anchor, SEQUENCE));
    let mut end = 0;
    for number in first..first + MAX_PARTS {
        let Some(part) = sector(file, number)?.filter(|it| tag(it) != 0) else { break };
        if tag(&part) == TAGS[1] {
            let [start, count] = [PARTITION, PARTITION + 4].map(|at| u64::from(u32_at(&part, at)));
            end = end.max((start + count) * SECTOR);
        }
    }
    Ok(end)
}

/// `None` beyond the end of the file.
fn sector(file: &File, number: u64) -> io::Result<Option<[u8; SECTOR_BYTES]>> {
    let mut bytes = [0; SECTOR_BYTES];
    match file.read_exact_at(&mut bytes, number * SECTOR) {
        Ok(()) => Ok(Some(bytes)),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(None),
        Err(error) => Err(error),
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut number = [0; 4];
    number.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(number)
}

/// First bytes of files that people mistake for ISO images, in lower case, what each is, and the
/// advice.
const OTHERS: [(&[u8], &str, &str); 8] = [
    (b"<", "it is a web page", "download the image itself"),
    (b"{", "it is a web server's response", "download the image itself"),
    (b"pk\x03\x04", "it is a ZIP archive", "unpack it"),
    (b"7z\xbc\xaf", "it is a 7z archive", "unpack it"),
    (b"rar!", "it is a RAR archive", "unpack it"),
    (b"\x1f\x8b", "it is compressed with gzip", "unpack it"),
    (b"mswim", "it is a WIM or ESD image", "make an ISO image of it"),
    (b"qfi\xfb", "it is a disk in the format qcow2", "put it onto the volume as data.qcow2"),
];

/// Describes a file that begins like this, with the advice, if people mistake such files for ISO
/// images.
pub fn mistaken(start: &[u8]) -> Option<(&'static str, &'static str)> {
    // A web page may begin with a byte order mark and empty lines.
    let start = start[..start.len().min(64)].to_ascii_lowercase();
    let start = start.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&start).trim_ascii_start();
    let other = OTHERS.iter().find(|(begins, ..)| start.starts_with(begins));
    other.map(|(_, what, advice)| (*what, *advice))
}

/// Whether a file that begins with these bytes, at least 34 KiB, may be an ISO image.
pub fn begins_as_cd(start: &[u8]) -> bool {
    let at = usize::try_from(PRIMARY).unwrap_or(usize::MAX).saturating_add(1);
    start.get(at..).is_some_and(|it| NAMES.iter().any(|name| it.starts_with(name)))
}

fn describe_other(file: &File, length: u64) -> io::Result<String> {
    let again = "download it again";
    let mut start = [0; 64];
    let count = file.read_at(&mut start, 0)?;
    if count == 0 {
        return Ok(format!("it is empty: {again}"));
    }
    if let Some((what, advice)) = mistaken(&start[..count]) {
        return Ok(format!("{what}: {advice}"));
    }
    if length <= PRIMARY + SECTOR {
        return Ok(format!("it has only {length} bytes: {again}"));
    }
    Ok(format!("it has no file system of a CD (no CD001 or BEA01): {again}"))
}

/// Whether Microsoft made this CD, or its program wrote it. Such a CD asks for a key before it
/// boots. Returns false if the file cannot be read.
pub fn is_microsofts(path: &Path) -> bool {
    let mut start = [0; DESCRIPTOR_LENGTH];
    let file = files::open(path, File::options().read(true));
    file.is_ok_and(|it| it.read_exact_at(&mut start, PRIMARY).is_ok()) && names_microsoft(&start)
}

fn names_microsoft(descriptor: &[u8; DESCRIPTOR_LENGTH]) -> bool {
    let begins = |at: usize, name: &str| descriptor[at..].starts_with(name.as_bytes());
    descriptor.starts_with(MAGIC)
        && (MAKERS.iter().any(|at| begins(*at, "MICROSOFT"))
            || ["CDIMAGE", "OSCDIMG"].iter().any(|name| begins(PROGRAM, name)))
}

/// A CD of Microsoft's, as far as [`is_microsofts`] looks.
#[cfg(test)]
pub fn of_microsoft() -> Vec<u8> {
    let mut bytes = vec![0; 20 * 2048];
    let at = usize::try_from(PRIMARY).unwrap();
    bytes[at..][..MAGIC.len()].copy_from_slice(MAGIC);
    bytes[at + MAKERS[0]..][..21].copy_from_slice(b"MICROSOFT CORPORATION");
    bytes
}

/// A CD that names no maker.
#[cfg(test)]
pub fn of_nobody() -> Vec<u8> {
    let mut bytes = of_microsoft();
    let at = usize::try_from(PRIMARY).unwrap();
    bytes[at + MAKERS[0]..][..21].fill(b' ');
    bytes
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_that_is_not_an_iso_is_refused_with_the_reason() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            check(&path).map_err(|error| {
                assert_eq!(Status::of(&error), Status::Iso);
                error.to_string()
            })
        };
        for (bytes, words) in [
            (&b""[..], "it is empty: download it again"),
            (b"\n\n<!DOCTYPE html><html>", "it is a web page"),
            (b"{\"error\": 404}", "a web server's response"),
            (b"PK\x03\x04xyz", "unpack it"),
            (b"QFI\xfb\0\0\0\x03", "data.qcow2"),
            (b"GRUB", "only 4 bytes: download it again"),
            (&[0; 1 << 20], "no CD001 or BEA01"),
        ] {
            let said = of(bytes).unwrap_err();
            assert!(
                said.contains("/a.iso is not an ISO image: ") && said.contains(words),
                "{said}"
            );
        }
        assert_eq!(of(&of_nobody()), Ok(()));
        assert_eq!(of(&of_microsoft()), Ok(()));
        assert!(check(folder.path()).is_err() && check(&folder.path().join("gone")).is_err());
    }

    #[test]
    fn a_truncated_download_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let of = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            check(&path).map_err(|error| error.to_string())
        };
        let at = usize::try_from(PRIMARY).unwrap();
        let mut cd = of_nobody();
        cd[at + SECTORS..][..4].copy_from_slice(&4096_u32.to_le_bytes());
        cd.resize(2 << 20, 0);
        let said = of(&cd).unwrap_err();
        assert!(said.contains("cut off: 2M of 8M are there: download it again"), "{said}");
        cd.resize(8 << 20, 0);
        assert_eq!(of(&cd), Ok(()));
        // A copy without the padding.
        cd.resize((8 << 20) - 300_000, 0);
        assert_eq!(of(&cd), Ok(()));

        // A CD with UDF only. Its descriptor sequence is in sector 32.
        let mut cd = vec![0; 1 << 20];
        for (number, name) in (16..).zip(["BEA01", "NSR02", "TEA01"]) {
            cd[number * 2048 + 1..][..5].copy_from_slice(name.as_bytes());
        }
        let mut put = |number: usize, place: usize, bytes: &[u8]| {
            cd[number * 2048 + place..][..bytes.len()].copy_from_slice(bytes);
        };
        put(256, 0, &2_u16.to_le_bytes());
        put(256, SEQUENCE, &32_u32.to_le_bytes());
        put(32, 0, &1_u16.to_le_bytes());
        put(33, 0, &5_u16.to_le_bytes());
        put(33, PARTITION, &257_u32.to_le_bytes());
        put(33, PARTITION + 4, &2048_u32.to_le_bytes());
        let said = of(&cd).unwrap_err();
        assert!(said.contains("is cut off: 1M of "), "{said}");
        cd.resize((257 + 2048) * 2048, 0);
        assert_eq!(of(&cd), Ok(()));
    }

    #[test]
    fn reads_a_hostile_iso_within_bounds() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let mut cd = of_nobody();
        cd.resize(2 << 20, 0xff);
        let at = usize::try_from(ANCHOR * SECTOR).unwrap();
        cd[at..][..2].copy_from_slice(&2_u16.to_le_bytes());
        fs::write(&path, &cd).unwrap();
        check(&path).unwrap();
        let at = usize::try_from(PRIMARY).unwrap();
        cd[at + SECTORS..][..4].fill(0xff);
        fs::write(&path, &cd).unwrap();
        assert!(check(&path).unwrap_err().to_string().contains("is cut off"));
    }

    #[test]
    fn recognizes_a_microsoft_cd_by_its_maker_fields() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let is = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            is_microsofts(&path)
        };
        let cd = of_microsoft();
        let at = usize::try_from(PRIMARY).unwrap();
        let with = |place: usize, name: &str| {
            let mut cd = cd.clone();
            cd[at + MAKERS[0]..][..21].fill(b' ');
            cd[at + place..][..name.len()].copy_from_slice(name.as_bytes());
            cd
        };
        assert!(is(&cd));
        assert!(is(&with(MAKERS[1], "MICROSOFT CORPORATION, ONE MICROSOFT WAY, REDMOND")));
        assert!(is(&with(PROGRAM, "CDIMAGE 2.56 (01/01/2005 TM)")));
        assert!(is(&with(PROGRAM, "OSCDIMG 2.56 (01/01/2005 TM)")));
        assert!(!is(&with(PROGRAM, "XORRISO-1.5.4")));
        assert!(!is(&with(MAKERS[0], "DEBIAN, AS MICROSOFT DOES")));
        // Another descriptor type, another file system, and files that are too short.
        let mut other = cd.clone();
        other[at] = 2;
        assert!(!is(&other));
        for length in [0, 1, at, at + 7, at + DESCRIPTOR_LENGTH - 1] {
            assert!(!is(&cd[..length]), "{length}");
        }
        assert!(is(&cd[..at + DESCRIPTOR_LENGTH]));
        assert!(!is_microsofts(folder.path()) && !is_microsofts(Path::new("/dev/zero")));
        assert!(!is_microsofts(&folder.path().join("gone.iso")));
    }
}
