//! Empty images: creates an image, and reports its size and whether anything was written to it.
use std::fs::File;
use std::io::{self, ErrorKind};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::super::format::{Format, QCOW2};
use super::header::{Header, MAX_NAME_LENGTH};

/// Bits of the cluster size: QEMU's default.
const BITS: u32 = 16;
const CLUSTER: u64 = 1 << BITS;
/// Sizes in bytes of a table entry and of a refcount.
const ENTRY: u64 = 8;
const COUNT: u64 = 2;

/// Writes an image of this size in version 3, without a backing file.
pub fn create(file: &File, size: u64) -> io::Result<()> {
    write(file, size, None)
}

/// Like [`create`], over a backing file. Its name is for other programs:
/// [`BackingFile::This`](super::super::BackingFile::This) decides what is read.
pub fn create_over(file: &File, size: u64, base: &Path, format: Format) -> io::Result<()> {
    let name = base.to_str().filter(|name| name.len() <= MAX_NAME_LENGTH);
    let name = name.filter(|name| !name.chars().any(char::is_control));
    let unsuitable =
        || io::Error::new(ErrorKind::InvalidInput, "its name cannot be that of a base");
    write(file, size, Some((name.ok_or_else(unsuitable)?, format)))
}

fn write(file: &File, size: u64, base: Option<(&str, Format)>) -> io::Result<()> {
    let wrong = || io::Error::new(ErrorKind::InvalidInput, "a qcow2 image cannot have this size");
    // The size that one L2 table maps.
    let reach = CLUSTER / ENTRY * CLUSTER;
    let entries = size.div_ceil(reach);
    // The header, the refcount table, one refcount block (which counts far more clusters than there
    // are tables), and the L1 table.
    let clusters = 3 + (entries * ENTRY).div_ceil(CLUSTER);
    if clusters > CLUSTER / COUNT || size == 0 {
        return Err(wrong());
    }
    let number = |number: u64| usize::try_from(number).map_err(|_| wrong());
    let header = Header {
        version: 3,
        cluster_bits: BITS,
        size,
        l1_entries: number(entries)?,
        l1_offset: 3 * CLUSTER,
        reftable_offset: CLUSTER,
        reftable_entries: number(CLUSTER / ENTRY)?,
        snapshots: 0,
        incompatible: 0,
        autoclear: 0,
        refcount_order: 4,
        backing: base.map(|(name, _)| name.to_owned()),
        backing_format: base.map(|(_, format)| format.name().to_owned()),
        extended: false,
    };
    file.set_len(clusters * CLUSTER)?;
    file.write_all_at(&header.bytes(), 0)?;
    file.write_all_at(&(2 * CLUSTER).to_be_bytes(), CLUSTER)?;
    let counts: Vec<u8> = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    file.write_all_at(&counts, 2 * CLUSTER)
}

/// Bytes that are no image, or cannot be read.
pub(super) fn wrong(why: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, why)
}

pub(super) fn read(file: &File) -> io::Result<Header> {
    let mut magic = [0; QCOW2.len()];
    file.read_exact_at(&mut magic, 0)?;
    if magic != QCOW2 {
        return Err(wrong("this is not a qcow2 image".into()));
    }
    Header::read(file).map_err(|error| wrong(format!("{error:#}")))
}

/// The size of the disk in an image, and whether [`Image::grow`](super::super::Image::grow) can
/// make it larger: it has no backing file, and its clusters are not smaller than QEMU's default.
pub fn size(file: &File) -> io::Result<(u64, bool)> {
    let header = read(file)?;
    Ok((header.size, header.backing.is_none() && header.cluster_bits >= BITS))
}

/// Whether an image has a backing file.
pub fn is_over(file: &File) -> io::Result<bool> {
    read(file).map(|header| header.backing.is_some())
}

/// Whether an image contains data: a cluster of its own, or a backing file.
pub fn is_written(file: &File) -> io::Result<bool> {
    let header = read(file)?;
    Ok(header.backing.is_some() || has_clusters(file, &header)?)
}

/// Whether an image has a backing file, and all its data from there.
pub fn is_empty_over(file: &File) -> io::Result<bool> {
    let header = read(file)?;
    Ok(header.backing.is_some() && !has_clusters(file, &header)?)
}

fn has_clusters(file: &File, header: &Header) -> io::Result<bool> {
    let mut l1 = vec![0; header.l1_entries * size_of::<u64>()];
    file.read_exact_at(&mut l1, header.l1_offset)?;
    Ok(l1.iter().any(|byte| *byte != 0))
}

#[cfg(test)]
mod test {
    use std::process::Command;

    use super::*;

    #[test]
    fn an_image_over_a_base_shows_the_base() {
        let folder = tempfile::tempdir().unwrap();
        let [base, above] = ["base.img", "above.qcow2"].map(|name| folder.path().join(name));
        std::fs::write(&base, [7; 1 << 20]).unwrap();
        let file = File::options().read(true).write(true).create_new(true).open(&above).unwrap();
        create_over(&file, 2 << 20, &base, Format::Raw).unwrap();
        assert!(is_written(&file).unwrap() && is_empty_over(&file).unwrap());
        for arguments in [
            &["qemu-img", "check", "-f", "qcow2"][..],
            &["qemu-io", "-f", "qcow2", "-c", "read -P 7 0 1M", "-c", "read -P 0 1M 1M"],
        ] {
            let output = Command::new(arguments[0]).args(&arguments[1..]).arg(&above).output();
            let output = output.unwrap();
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert!(output.status.success() && !text.contains("failed"), "{arguments:?}: {text}");
        }
        let header = Header::read(&File::open(&above).unwrap()).unwrap();
        assert_eq!(header.backing.as_deref(), base.to_str());
        assert_eq!(header.backing_format.as_deref(), Some("raw"));
        let mut write = Command::new("qemu-io");
        write.args(["-f", "qcow2", "-c", "write 0 512"]).arg(&above);
        assert!(write.output().unwrap().status.success() && !is_empty_over(&file).unwrap());
        let long = folder.path().join("x".repeat(2000));
        assert!(create_over(&file, 1 << 20, &long, Format::Raw).is_err());
    }

    #[test]
    fn qemu_img_check_accepts_a_new_image() {
        for size in [512_u64, 64 << 30, 4 << 40] {
            let file = tempfile::NamedTempFile::new().unwrap();
            create(file.as_file(), size).unwrap();
            let header = read(file.as_file()).unwrap();
            assert_eq!(Header::parse(&header.bytes()).unwrap(), header);
            header.check(true).unwrap();
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
        assert!(create(&file, u64::MAX).is_err() && create(&file, 0).is_err());
        assert!(size(&file).is_err() && is_written(&file).is_err());
        file.write_all_at(&[0; 64], 0).unwrap();
        assert!(size(&file).is_err());
    }
}
