//! Tests of `qcow2`.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;

use super::super::driver::Driver;
use super::super::rehearsal::{check, create, qemu_img, retry_while_locked};
use super::super::{Fault, Image, Operation, open as open_disk};
use super::*;
use crate::size::Size;
use crate::testutil::noise::Noise;

fn refusal(path: &Path) -> String {
    let Err(error) = open_disk(&Config::new(path), None) else { panic!("{path:?} was opened") };
    format!("{error:#}")
}

#[test]
fn follows_backing_files_only_in_its_own_folder_by_default() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("follows_backing_files_only_in_its_own_folder_by_default") {
        return;
    }
    let (inner, secret) = (folder.path().join("images"), folder.path().join("secret.raw"));
    fs::create_dir(&inner).unwrap();
    fs::write(&secret, [0x55; 4096]).unwrap();
    let image = inner.join("disk.qcow2");
    std::os::unix::fs::symlink(&secret, inner.join("link.raw")).unwrap();
    let absolute = secret.to_str().unwrap().to_owned();
    for name in [absolute.as_str(), "../secret.raw", "link.raw"] {
        create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
        let said = refusal(&image);
        assert!(said.contains("is not in its own folder: set `backing=on`"), "{said}");
        let config = Config { backing: BackingFile::Anywhere, ..Config::new(&image) };
        let disk = open_disk(&config, None).unwrap();
        assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [0x55; 512]);
    }
    fs::write(inner.join("near.raw"), [0x66; 4096]).unwrap();
    for name in ["near.raw", "./near.raw", inner.join("near.raw").to_str().unwrap()] {
        create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
        let disk = open_disk(&Config::new(&image), None).unwrap();
        let mut driver = Driver::new(&disk);
        assert_eq!(driver.read(0, 512).unwrap(), [0x66; 512]);
        // A writer to the backing file would change the disk above it.
        let said = refusal(&inner.join("near.raw"));
        assert!(said.contains("is in use by"), "{said}");
        driver.write(0, &[1; 512]).unwrap();
        assert_eq!(fs::read(inner.join("near.raw")).unwrap(), [0x66; 4096]);
    }
    for name in ["nbd://10.0.0.1/x", "json:{}", "https://example.org/x.qcow2"] {
        create(&image, &["-u", "-b", name, "-F", "raw"], "1M");
        assert!(refusal(&image).contains("is not a file"), "{}", refusal(&image));
    }
    create(&image, &["-u", "-b", "gone.raw", "-F", "raw"], "1M");
    assert!(refusal(&image).contains("gone.raw"), "{}", refusal(&image));
    // Without a format, the name decides that it is raw. Bytes that its guest wrote cannot make
    // it qcow2.
    create(&image, &["-u", "-b", "near.raw", "-F", "raw"], "1M");
    let mut bytes = fs::read(&image).unwrap();
    let format = [0xe2, 0x79, 0x2a, 0xca];
    let at = bytes.windows(4).position(|it| it == format).unwrap();
    // An extension of unknown type.
    bytes[at] = 0x01;
    fs::write(&image, bytes).unwrap();
    fs::write(inner.join("near.raw"), b"QFI\xfb\0\0\0\x03").unwrap();
    assert!(refusal(&image).contains("begins like a qcow2 image"), "{}", refusal(&image));
}

#[test]
fn a_configured_base_is_read_whatever_the_image_names() {
    let folder = tempfile::tempdir().unwrap();
    let [images, bases] = ["images", "bases"].map(|name| folder.path().join(name));
    fs::create_dir(&images).unwrap();
    fs::create_dir(&bases).unwrap();
    let [secret, base] = [images.join("secret.raw"), bases.join("base.img")];
    fs::write(&secret, [0x55; 4096]).unwrap();
    fs::write(&base, [0x66; 4096]).unwrap();
    let image = images.join("disk.qcow2");
    let over = |name: &Path| {
        create_over(&File::create(&image).unwrap(), 1 << 20, name, Format::Qcow2).unwrap();
    };
    let config = Config { backing: BackingFile::This(base.clone()), ..Config::new(&image) };
    for name in [&base, &secret, Path::new("nbd://10.0.0.1/x"), Path::new("gone")] {
        over(name);
        let disk = open_disk(&config, None).unwrap();
        let mut driver = Driver::new(&disk);
        assert_eq!(driver.read(0, 512).unwrap(), [0x66; 512]);
        driver.write(0, &[1; 512]).unwrap();
        assert_eq!(fs::read(&base).unwrap(), [0x66; 4096]);
    }
    // Many machines read one base, which nobody may write meanwhile.
    let disk = open_disk(&config, None).unwrap();
    fs::copy(&image, images.join("other.qcow2")).unwrap();
    let other = Config { path: images.join("other.qcow2"), ..config.clone() };
    let other = open_disk(&other, None).unwrap();
    assert_eq!(Driver::new(&other).read(512, 512).unwrap(), [0x66; 512]);
    assert!(refusal(&base).contains("is in use by"), "{}", refusal(&base));
    drop((disk, other));
    // The guest wrote the magic bytes of another format.
    fs::write(&base, b"QFI\xfb").unwrap();
    let refused = |config: &Config| format!("{:#}", open_disk(config, None).err().unwrap());
    assert!(refused(&config).contains("begins like a qcow2 image"), "{}", refused(&config));
    fs::write(&base, [0x66; 4096]).unwrap();
    empty::create(&File::create(&image).unwrap(), 1 << 20).unwrap();
    assert!(refused(&config).contains("has no backing file"), "{}", refused(&config));
    let raw = Config { path: secret, ..config };
    assert!(refused(&raw).contains("only qcow2 images have a backing file"), "{}", refused(&raw));
}

#[test]
fn a_loop_of_backing_files_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("a_loop_of_backing_files_is_refused") {
        return;
    }
    let (one, two) = (folder.path().join("one.qcow2"), folder.path().join("two.qcow2"));
    create(&one, &["-u", "-b", "two.qcow2", "-F", "qcow2"], "1M");
    create(&two, &["-u", "-b", "one.qcow2", "-F", "qcow2"], "1M");
    assert!(refusal(&one).contains("in use by"), "{}", refusal(&one));
    let config = Config { readonly: true, ..Config::new(&one) };
    let said = format!("{:#}", open_disk(&config, None).err().unwrap());
    assert!(said.contains("more than 32 backing files"), "{said}");
}

#[test]
fn refuses_unknown_features_with_advice() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("refuses_unknown_features_with_advice") {
        return;
    }
    let image = folder.path().join("disk.qcow2");
    for (options, said) in [
        ("extended_l2=on", "extended L2"),
        ("data_file=other.raw", "its data is in another file"),
        ("compression_type=zstd", "zstd"),
        ("refcount_bits=64", "have 64 bits"),
    ] {
        let mut command = std::process::Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2", "-o", options, "disk.qcow2", "1M"]);
        assert!(retry_while_locked(command.current_dir(folder.path())).status.success());
        assert!(refusal(&image).contains(said), "{options}: {}", refusal(&image));
    }
    create(&image, &[], "1M");
    let snapshot = ["snapshot", "-c", "one"];
    let mut command = std::process::Command::new("qemu-img");
    assert!(retry_while_locked(command.args(snapshot).arg(&image)).status.success());
    assert!(refusal(&image).contains("has internal snapshots (1)"), "{}", refusal(&image));
    open_disk(&Config { readonly: true, ..Config::new(&image) }, None).unwrap();
    // Marked dirty with refcounts that are too low (lazy refcounts), or marked corrupt.
    create(&image, &[], "1M");
    let mut bytes = fs::read(&image).unwrap();
    let number = |bytes: &[u8], at| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let table = usize::try_from(number(&bytes, 48)).unwrap();
    let block = usize::try_from(number(&bytes, table)).unwrap();
    bytes[block..block + 2].fill(0);
    for bit in [1, 2] {
        bytes[79] = bit;
        fs::write(&image, &bytes).unwrap();
        assert!(refusal(&image).contains("`qemu-img check -r all`"), "{}", refusal(&image));
        assert!(fs::read(&image).unwrap() == bytes, "it was changed");
    }
    fs::write(&image, &bytes[..60]).unwrap();
    assert!(refusal(&image).contains("is cut off"), "{}", refusal(&image));
}

#[test]
fn clusters_leaked_by_a_kill_are_freed() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("clusters_leaked_by_a_kill_are_freed") {
        return;
    }
    let (path, killed) = (folder.path().join("disk.qcow2"), folder.path().join("killed.qcow2"));
    create(&path, &["-o", "cluster_size=4096"], "8M");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let mut driver = Driver::new(&disk);
    driver.write(0, &[1; 64 << 10]).unwrap();
    driver.flush().unwrap();
    driver.execute(Operation::Discard, 0, 32 << 10, &[]).unwrap();
    // Released clusters stay counted until the second flush.
    driver.flush().unwrap();
    fs::copy(&path, &killed).unwrap();
    assert!(check(&killed).contains("8 leaked clusters"), "{}", check(&killed));
    drop((driver, disk));
    let marked = |path: &Path| fs::read(path).unwrap()[79] & 1 == 1;
    assert!(marked(&killed) && !marked(&path));
    let reader = open_disk(&Config { readonly: true, ..Config::new(&killed) }, None).unwrap();
    assert_eq!(Driver::new(&reader).read(32 << 10, 512).unwrap(), [1; 512]);
    drop(reader);
    assert!(marked(&killed), "a reader changes nothing");
    drop(open_disk(&Config::new(&killed), None).unwrap());
    assert!(!marked(&killed) && !check(&killed).contains("leaked"), "{}", check(&killed));
    let disk = open_disk(&Config::new(&killed), None).unwrap();
    let mut driver = Driver::new(&disk);
    assert_eq!(driver.read(32 << 10, 512).unwrap(), [1; 512]);
    driver.write(1 << 20, &[2; 4096]).unwrap();
    drop((driver, disk));
    assert!(!marked(&killed) && !check(&killed).contains("leaked"), "{}", check(&killed));
}

#[test]
fn a_discard_of_the_whole_disk_frees_everything_and_lets_others_read() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("a_discard_of_the_whole_disk_frees_everything_and_lets_others_read") {
        return;
    }
    const SIZE: u64 = 4 << 40;
    let path = folder.path().join("disk.qcow2");
    create(&path, &[], &SIZE.to_string());
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let [mut driver, mut other] = [(); 2].map(|()| Driver::new(&disk));
    // In the first turn, across the border of two, and in the last one.
    let places = [1 << 20, (256 << 20) - (1 << 20), SIZE - (2 << 20)];
    for place in places {
        driver.write(place, &[7; 2 << 20]).unwrap();
    }
    driver.flush().unwrap();
    let blocks = || fs::metadata(&path).unwrap().blocks() * 512;
    assert!(blocks() >= 6 << 20);
    driver.push(Operation::Discard, 0, SIZE, &[]);
    driver.channel.submit();
    // It answers, whether the discard has come there or not.
    let last = other.read(places[2], 512).unwrap();
    assert!(last == [0; 512] || last == [7; 512]);
    driver.wait(1).pop().unwrap().result.unwrap();
    for place in places {
        assert_eq!(driver.read(place, 2 << 20).unwrap(), vec![0; 2 << 20]);
    }
    drop((driver, other, disk));
    assert!(blocks() < 2 << 20, "{} bytes are left", blocks());
    assert!(check(&path).contains("No errors"), "{}", check(&path));
}

#[test]
fn a_completed_image_changes_only_when_it_is_written() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("a_completed_image_changes_only_when_it_is_written") {
        return;
    }
    let (path, base) = (folder.path().join("disk.qcow2"), folder.path().join("base.qcow2"));
    let (raw, copy) = (folder.path().join("raw"), folder.path().join("copy.qcow2"));
    fs::write(&raw, [7; 8 << 10]).unwrap();
    create(&base, &["-F", "raw", "-b", "raw"], "8M");
    create(&path, &["-o", "cluster_size=4096", "-F", "qcow2", "-b", "base.qcow2"], "8M");
    let time = || fs::metadata(&path).unwrap().modified().unwrap();
    let dirty = || fs::read(&path).unwrap()[79] & 1 == 1;
    // A tick of the clock by which file systems date their changes.
    let tick = || std::thread::sleep(std::time::Duration::from_millis(20));
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let sizes: Vec<_> = disk.below().unwrap().files.iter().map(Metadata::len).collect();
    assert_eq!(sizes, [&base, &raw].map(|it| fs::metadata(it).unwrap().len()));
    let mut driver = Driver::new(&disk);
    for round in 0..3 {
        driver.write(round << 20, &[1; 64 << 10]).unwrap();
        driver.execute(Operation::Discard, round << 20, 32 << 10, &[]).unwrap();
        assert!(dirty());
        disk.complete().unwrap();
        assert!(!dirty());
        // A copy that names no backing file, because both files are locked.
        let mut bytes = fs::read(&path).unwrap();
        bytes[8..20].fill(0);
        fs::write(&copy, bytes).unwrap();
        assert!(check(&copy).contains("No errors"), "{}", check(&copy));
        let completed = time();
        tick();
        disk.complete().unwrap();
        driver.flush().unwrap();
        driver.read(0, 64 << 10).unwrap();
        assert_eq!(time(), completed);
        // In place, without a change of its tables.
        driver.write((round << 20) + (48 << 10), &[2; 4096]).unwrap();
        assert!(time() > completed && !dirty());
    }
    disk.complete().unwrap();
    let completed = time();
    tick();
    drop((disk, driver));
    assert_eq!(time(), completed, "closed");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    Driver::new(&disk).read(0, 64 << 10).unwrap();
    drop(disk);
    assert_eq!(time(), completed, "opened and closed");
    assert!(check(&path).contains("No errors"), "{}", check(&path));
}

#[test]
fn grows_while_in_use_as_far_as_its_table_allows() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("grows_while_in_use_as_far_as_its_table_allows") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    create(&path, &["-o", "cluster_size=4096"], "1M");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let mut driver = Driver::new(&disk);
    driver.write((1 << 20) - 512, &[1; 512]).unwrap();
    assert_eq!(driver.read(1 << 20, 512), Err(Fault::Refused));
    assert!(disk.grow(None).is_err(), "the file is not as long as the disk");
    disk.grow(Some(9 << 20)).unwrap();
    assert_eq!(disk.geometry().size, 9 << 20);
    assert_eq!(driver.read(1 << 20, 4096).unwrap(), [0; 4096]);
    driver.write((9 << 20) - 512, &[2; 512]).unwrap();
    assert!(disk.grow(Some(1 << 20)).is_err() && disk.grow(Some((9 << 20) + 1)).is_err());
    drop((driver, disk));
    check(&path);
    let disk = open_disk(&Config::new(&path), None).unwrap();
    assert_eq!(disk.geometry().size, 9 << 20);
    assert_eq!(Driver::new(&disk).read((9 << 20) - 512, 512).unwrap(), [2; 512]);
    drop(disk);
    // It also grows at start, and a larger image keeps its size.
    for (said, is) in [(10 << 20, 10 << 20), (1 << 20, 10 << 20)] {
        let config = Config { size: Some(Size(said)), ..Config::new(&path) };
        assert_eq!(open_disk(&config, None).unwrap().geometry().size, is);
    }
    check(&path);
    create(&path, &["-o", "cluster_size=512"], "1M");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let said = format!("{:#}", disk.grow(Some(9 << 20)).unwrap_err());
    assert!(said.contains("`qemu-img resize`"), "{said}");
    drop(disk);
    let below = folder.path().join("below.raw");
    fs::write(below, vec![3; 2 << 20]).unwrap();
    create(&path, &["-b", "below.raw", "-F", "raw"], "1M");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    let said = disk.grow(Some(9 << 20)).unwrap_err().to_string();
    assert!(said.contains("its backing file is larger"), "{said}");
}

/// Every request on an invalid image must end with an answer. Returns whether it could be
/// opened.
fn torment(path: &Path) -> bool {
    let Ok(disk) = open_disk(&Config { discard: false, ..Config::new(path) }, None) else {
        return false;
    };
    let size = disk.geometry().size;
    let mut driver = Driver::new(&disk);
    let zero = Operation::WriteZeroes { unmap: true };
    let end = (size - 512).min(3 << 20) / 512 * 512;
    for at in [0, 65536, 1 << 20, end] {
        if at + 512 > size {
            continue;
        }
        let found = [
            driver.read(at, 512).map(|_| ()),
            driver.write(at, &[3; 512]),
            driver.execute(zero, at, 512, &[]),
            driver.flush(),
        ];
        for answer in found {
            assert!(matches!(answer, Ok(()) | Err(Fault::Broken)), "{answer:?}");
        }
    }
    true
}

#[test]
fn torn_and_hostile_images_never_panic() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("torn_and_hostile_images_never_panic") {
        return;
    }
    let source = folder.path().join("source.raw");
    let noise: Vec<u8> = (0..4_u32 << 20).map(|it| (it / 700).to_le_bytes()[0]).collect();
    fs::write(&source, noise).unwrap();
    let mut opened = 0;
    for (kind, options) in [("", "cluster_size=4096"), ("-c", "cluster_size=65536")] {
        let whole = folder.path().join("whole.qcow2");
        let mut convert = std::process::Command::new("qemu-img");
        convert.args(["convert", "-f", "raw", "-O", "qcow2", "-o", options]);
        convert.args(Some(kind).filter(|it| !it.is_empty())).arg(&source).arg(&whole);
        assert!(convert.status().unwrap().success());
        let bytes = fs::read(&whole).unwrap();
        let victim = folder.path().join("victim.qcow2");
        let mut dice = Noise::new(11);
        for _ in 0..250 {
            let mut torn = bytes.clone();
            // Damages the header, the tables behind it, or any place: a bit, a byte, or a
            // number.
            for _ in 0..=dice.below(4) {
                let within = [112, 112, 300_000, torn.len() as u64];
                let within = within[usize::try_from(dice.below(4)).unwrap()];
                let at = usize::try_from(dice.below(within)).unwrap().min(torn.len() - 8);
                match dice.below(4) {
                    0 => torn[at] ^= 1 << dice.below(8),
                    1 => torn[at] = dice.below(256).to_le_bytes()[0],
                    2 => torn[at..at + 8].fill(0xff),
                    _ => {
                        let length = usize::try_from(dice.below(torn.len() as u64)).unwrap();
                        torn.truncate(length.max(4096));
                    }
                }
            }
            fs::write(&victim, &torn).unwrap();
            opened += usize::from(torment(&victim));
        }
    }
    assert!(opened > 100, "{opened}");
}

#[test]
fn invalid_table_offsets_are_errors() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("invalid_table_offsets_are_errors") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    create(&path, &[], "1M");
    let disk = open_disk(&Config::new(&path), None).unwrap();
    Driver::new(&disk).write(0, &[1; 512]).unwrap();
    drop(disk);
    check(&path);
    let bytes = fs::read(&path).unwrap();
    let number = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap());
    let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
    let l2 = usize::try_from(number(l1) & !COPIED).unwrap();
    for (at, entry) in [
        // Behind the end of the file, not aligned to a cluster, and compressed data that is
        // invalid.
        (l1, COPIED | 1 << 50),
        (l1, COPIED | 0x200),
        (l2, COPIED | 0x200),
        (l2, COMPRESSED | 1 << 40),
        (l2, COMPRESSED | 0x50000),
    ] {
        let mut lies = bytes.clone();
        lies[at..at + 8].copy_from_slice(&entry.to_be_bytes());
        fs::write(&path, lies).unwrap();
        let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
        assert_eq!(Driver::new(&disk).read(0, 512), Err(Fault::Broken), "{entry:#x}");
    }
    // All refcounts are zero: the next cluster to be allocated would be the header.
    let block = usize::try_from(number(usize::try_from(number(48)).unwrap())).unwrap();
    let mut lies = bytes.clone();
    lies[block..block + 64].fill(0);
    fs::write(&path, lies).unwrap();
    let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
    assert_eq!(Driver::new(&disk).write(65536, &[1; 512]), Err(Fault::Broken));
    assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
}

/// An image with one L2 table and one data cluster. Returns its bytes, and a function that
/// reads a number at an offset.
fn written(path: &Path) -> (Vec<u8>, impl Fn(usize) -> u64 + use<>) {
    create(path, &[], "1M");
    let disk = open_disk(&Config::new(path), None).unwrap();
    Driver::new(&disk).write(0, &[1; 512]).unwrap();
    drop(disk);
    let bytes = fs::read(path).unwrap();
    let copy = bytes.clone();
    (bytes, move |at| u64::from_be_bytes(copy[at..at + 8].try_into().unwrap()))
}

#[test]
fn damaged_tables_never_overwrite_the_header() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("damaged_tables_never_overwrite_the_header") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    let (bytes, number) = written(&path);
    let reftable = usize::try_from(number(48)).unwrap();
    let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
    let l2 = usize::try_from(number(l1) & !COPIED).unwrap();
    // First, the header as a compressed cluster, which would be freed when the guest overwrites
    // it. Second, no refcount block for the first clusters, which would be created in the
    // header's place.
    for (at, entry, answer) in [(l2, COMPRESSED, Ok(())), (reftable, 0, Err(Fault::Broken))] {
        let mut lies = bytes.clone();
        lies[at..at + 8].copy_from_slice(&entry.to_be_bytes());
        fs::write(&path, lies).unwrap();
        let disk: Arc<dyn Image> = open_disk(&Config::new(&path), None).unwrap();
        let mut driver = Driver::new(&disk);
        assert_eq!(driver.write(0, &[2; 65536]).and(driver.write(65536, &[2; 512])), answer);
        (0..2).for_each(|_| driver.flush().unwrap());
        drop((driver, disk));
        assert!(fs::read(&path).unwrap()[..512] == bytes[..512], "{entry:#x} at {at:#x}");
    }
}

#[test]
fn refuses_a_table_referenced_repeatedly() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("refuses_a_table_referenced_repeatedly") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    // With a clean image, and with one whose references are counted because it is marked dirty.
    for mark in [0, 1] {
        let (mut bytes, number) = written(&path);
        bytes[79] = mark;
        let l1 = usize::try_from(number(header::L1_OFFSET)).unwrap();
        // The table's cluster has room for three entries.
        bytes[header::L1_SIZE..][..4].copy_from_slice(&3_u32.to_be_bytes());
        bytes.copy_within(l1..l1 + 8, l1 + 16);
        fs::write(&path, bytes).unwrap();
        assert!(refusal(&path).contains("is there twice"), "{}", refusal(&path));
        let config = Config { readonly: true, ..Config::new(&path) };
        let disk = open_disk(&config, None).unwrap();
        assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
    }
}

#[test]
fn accepts_tables_longer_than_necessary() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("accepts_tables_longer_than_necessary") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    let run = |words: &[&str]| {
        let mut command = std::process::Command::new("qemu-img");
        let done = retry_while_locked(command.args(words).current_dir(folder.path()));
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    };
    for went_back in [false, true] {
        // Neither shrinking nor reverting to a snapshot makes the table shorter.
        create(&path, &["-o", "cluster_size=512"], if went_back { "1M" } else { "16M" });
        if went_back {
            run(&["snapshot", "-c", "one", "disk.qcow2"]);
            run(&["resize", "-q", "disk.qcow2", "16M"]);
            run(&["snapshot", "-a", "one", "disk.qcow2"]);
            run(&["snapshot", "-d", "one", "disk.qcow2"]);
        } else {
            run(&["resize", "-q", "--shrink", "disk.qcow2", "1M"]);
        }
        let mut bytes = fs::read(&path).unwrap();
        let entries = u32::from_be_bytes(bytes[header::L1_SIZE..][..4].try_into().unwrap());
        assert_eq!(entries, 16 << 20 >> 15, "went back: {went_back}");
        bytes[79] = 1;
        fs::write(&path, bytes).unwrap();
        let disk = open_disk(&Config::new(&path), None).unwrap();
        assert_eq!(disk.geometry().size, 1 << 20);
        Driver::new(&disk).write((1 << 20) - 512, &[1; 512]).unwrap();
        drop(disk);
        assert!(!check(&path).contains("leaked"), "{}", check(&path));
    }
}

/// The variable that names the image which the child process of a test opens.
const CHILD: &str = "TRANSOM_TEST_COUNTS";

/// Peak memory of this process, in bytes.
fn peak() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|it| it.strip_prefix("VmHWM:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse::<u64>().unwrap() << 10
}

#[test]
fn missing_refcount_blocks_cost_no_memory() {
    let test = "missing_refcount_blocks_cost_no_memory";
    if let Some(path) = std::env::var_os(CHILD) {
        let before = peak();
        drop(open_disk(&Config::new(path), None).unwrap());
        let more = peak() - before;
        assert!(more < 64 << 20, "{more} bytes more");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img(test) {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    let (mut bytes, number) = written(&path);
    bytes[79] = 1;
    // Refcount blocks that count each cluster of 2 TiB once, although the file has only a few
    // of them.
    let blocks = 1 << 10;
    let reftable = usize::try_from(number(48)).unwrap();
    let first = usize::try_from(number(reftable)).unwrap();
    for block in 1..blocks {
        let at = bytes.len().next_multiple_of(1 << 16);
        bytes[reftable + 8 * block..][..8].copy_from_slice(&(at as u64).to_be_bytes());
        bytes.resize(at, 0);
        bytes.extend([0, 1].repeat(1 << 15));
    }
    bytes[first..first + (1 << 16)].copy_from_slice(&[0, 1].repeat(1 << 15));
    fs::write(&path, bytes).unwrap();
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", &format!("disk::qcow2::test::{test}")]);
    let ended = child.env(CHILD, &path).output().unwrap();
    assert!(ended.status.success(), "{}", String::from_utf8_lossy(&ended.stdout));
    assert!(!check(&path).contains("leaked"), "{}", check(&path));
    let disk = open_disk(&Config::new(&path), None).unwrap();
    assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
    Driver::new(&disk).write(65536, &[2; 65536]).unwrap();
    drop(disk);
    assert!(!check(&path).contains("leaked"), "{}", check(&path));
    assert!(
        fs::metadata(&path).unwrap().len() < 1 << 28,
        "the lowest free clusters are used first"
    );
}

#[test]
fn refuses_a_repeated_refcount_block() {
    let folder = tempfile::tempdir().unwrap();
    if !qemu_img("refuses_a_repeated_refcount_block") {
        return;
    }
    let path = folder.path().join("disk.qcow2");
    let (mut bytes, number) = written(&path);
    let reftable = usize::try_from(number(48)).unwrap();
    bytes.copy_within(reftable..reftable + 8, reftable + 80);
    fs::write(&path, bytes).unwrap();
    assert!(refusal(&path).contains("refcount block that is there twice"), "{}", refusal(&path));
    let config = Config { readonly: true, ..Config::new(&path) };
    let disk = open_disk(&config, None).unwrap();
    assert_eq!(Driver::new(&disk).read(0, 512).unwrap(), [1; 512]);
}
