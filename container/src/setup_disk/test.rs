//! The set-up disk, as mtools and `fsck.vfat` read it.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

use host::disk;
use rustix::fs::{CWD, FileType, Mode, mknodat};

use super::testutil::{checked, copied, tool};
use super::*;
use crate::media::Extent;

const ANSWERS: &str = "Autounattend.xml";

fn item(path: &str, bytes: &[u8]) -> Item {
    let modified = UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    Item { path: path.into(), content: Some(Content::Bytes(bytes.to_vec())), modified }
}

fn make(items: Vec<Item>) -> anyhow::Result<SetupDisk> {
    lay_out(items).and_then(|layout| SetupDisk::write(&layout))
}

fn image(items: Vec<Item>) -> (tempfile::TempDir, String) {
    checked(make(items).unwrap())
}

#[test]
fn other_tools_read_every_file_under_its_name() {
    let large: Vec<u8> = (0..=250).cycle().take(3_000_001).collect();
    let empty = Item { content: None, ..item("$OEM$/empty folder", b"") };
    let items = vec![
        item(ANSWERS, b"<unattend/>"),
        item("$WinPEDriver$/vioscsi/vioscsi.inf", b"[Version]"),
        item("$WinPEDriver$/vioscsi/vioscsi.sys", &large),
        item("$OEM$/$$/Setup/Scripts/SetupComplete.cmd", b"exit\r\n"),
        item("$OEM$/$1/OEM/install.bat", b""),
        item("$OEM$/$1/OEM/Ünïcode 한국어.txt", b"x"),
        item("$OEM$/$1/OEM/.hidden", &[7; 4096]),
        item("$OEM$/$1/OEM/a+b,c;d=[e].tar.gz", &[8; 4097]),
        item(&format!("$OEM$/{}", "n".repeat(234)), b"long"),
        empty,
    ];
    let wanted: BTreeMap<_, _> = items
        .iter()
        .filter_map(|item| match &item.content {
            Some(Content::Bytes(bytes)) => Some((item.path.clone(), bytes.clone())),
            _ => None,
        })
        .collect();
    let (_folder, image) = image(items);
    let found = copied(&image);
    assert_eq!(found.keys().collect::<Vec<_>>(), wanted.keys().collect::<Vec<_>>());
    assert!(found == wanted, "the contents differ");
    assert_eq!(tool("mtype", &["-i", &image, "::/Autounattend.xml"]), "<unattend/>");
    let listed = tool("mdir", &["-i", &image, "::/$OEM$/$1/OEM"]);
    assert!(listed.contains("2023-11-14") && listed.contains("22:13"), "{listed}");
    assert!(tool("mdir", &["-i", &image, "::/"]).contains("is SETUP"), "the label");
    tool("mdir", &["-i", &image, "::/$OEM$/empty folder"]);
}

#[test]
fn a_folder_of_many_files_is_whole() {
    let many = |at: usize| item(&format!("$OEM$/$1/OEM/file number {at}.bin"), &at.to_le_bytes());
    let (_folder, image) = image((0..5000).map(many).collect());
    let found = copied(&image);
    assert_eq!(found.len(), 5000);
    assert_eq!(found["$OEM$/$1/OEM/file number 4321.bin"], 4321_usize.to_le_bytes());
}

#[test]
fn a_range_of_a_file_is_not_copied_before() {
    let bundle = tempfile::tempfile().unwrap();
    // Sparse; an ISO image of drivers has several hundred MiB.
    bundle.set_len(800 << 20).unwrap();
    bundle.write_all_at(b"driver", 12_345).unwrap();
    let file = Arc::new(bundle);
    let range = |name: &str, offset, length| Item {
        content: Some(Content::Ranges {
            file: file.clone(),
            extents: vec![Extent { start: offset, length }],
        }),
        ..item(name, b"")
    };
    let start = Instant::now();
    let items = vec![range("a.sys", 12_345, 6), range("b.sys", 0, 400 << 20)];
    let disk = make(items).unwrap();
    // A debug build on a busy host takes longer than the second that a release needs.
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    disk.close().free().unwrap();
    let (_folder, image) = image(vec![range("a.sys", 12_345, 6)]);
    assert_eq!(copied(&image)["a.sys"], b"driver");
    let beyond = make(vec![range("a.sys", 800 << 20, 1)]).unwrap_err();
    assert!(format!("{beyond:#}").contains("became shorter"), "{beyond:#}");
}

#[test]
fn the_machine_reads_the_disk_and_cannot_write_it() {
    let made = make(vec![item(ANSWERS, b"x")]).unwrap();
    made.bequeath().unwrap();
    let path = made.path();
    let number = path.file_name().unwrap().to_str().unwrap();
    // The number is that of an open file in programs that start now.
    let count = tool("sh", &["-c", &format!("wc -c < /proc/self/fd/{number}")]);
    assert_eq!(count.trim().parse::<u64>().unwrap(), made.memory.0.metadata().unwrap().len());
    let config =
        disk::Config { readonly: true, direct: disk::Direct::Off, ..disk::Config::new(&path) };
    let geometry = disk::open(&config, None).unwrap().geometry();
    assert!(geometry.read_only && geometry.size == made.memory.0.metadata().unwrap().len());
    let writer = File::options().write(true).open(&path);
    assert!(writer.is_err() || writer.unwrap().write_at(b"y", 0).is_err());
    made.memory.0.set_len(1 << 40).unwrap_err();
    let inherited = File::open(&path).unwrap();
    made.close().free().unwrap();
    assert_eq!(inherited.metadata().unwrap().len(), 0);
}

/// The sentences of errors about a folder.
fn refusal(fill: impl FnOnce(&Path)) -> String {
    let root = tempfile::tempdir().unwrap();
    let oem = root.path().join("oem");
    fs::create_dir(&oem).unwrap();
    fill(&oem);
    let made = UsersFiles::read(root.path(), &root.path().join("storage"));
    let error = made.and_then(|users| make(users.items)).unwrap_err();
    let said = format!("{error:#}");
    assert!(!said.contains('\n') && said.len() < 800, "{said}");
    said
}

#[test]
fn a_config_map_is_copied_and_its_links_stay_inside() {
    let root = tempfile::tempdir().unwrap();
    let place = |name: &str| root.path().join(name);
    fs::create_dir_all(place("storage/OEM/..2026_11_23")).unwrap();
    fs::create_dir_all(place("storage/OEM/tools/x64")).unwrap();
    fs::write(place("storage/OEM/..2026_11_23/install.bat"), "echo 1\nexit\n").unwrap();
    fs::write(place("storage/OEM/tools/x64/a.inf"), "[x]\n").unwrap();
    symlink("..2026_11_23", place("storage/OEM/..data")).unwrap();
    symlink("..data/install.bat", place("storage/OEM/install.bat")).unwrap();
    symlink("tools/x64", place("storage/OEM/more")).unwrap();
    let users = UsersFiles::read(root.path(), &place("storage")).unwrap();
    assert_eq!(users.install_bat.unwrap(), b"echo 1\r\nexit\r\n");
    let (_folder, image) = image(users.items);
    let found = copied(&image);
    let found: BTreeMap<_, _> =
        found.iter().map(|(name, bytes)| (name.as_str(), bytes.as_slice())).collect();
    let wanted: [(&str, &[u8]); 2] =
        [("$OEM$/$1/OEM/more/a.inf", b"[x]\n"), ("$OEM$/$1/OEM/tools/x64/a.inf", b"[x]\n")];
    assert_eq!(found, BTreeMap::from(wanted));
    // Mounts go before the volume.
    fs::create_dir(place("oem")).unwrap();
    fs::write(place("oem/Install.BAT"), "mine\n").unwrap();
    let users = UsersFiles::read(root.path(), &place("storage")).unwrap();
    assert_eq!((users.items.len(), users.install_bat.as_deref()), (0, Some(&b"mine\r\n"[..])));
    let none = UsersFiles::read(&place("oem"), &place("none")).unwrap();
    assert!(none.items.is_empty() && none.install_bat.is_none());
}

#[test]
fn a_folder_on_the_volume_is_no_link_out_of_it() {
    let root = tempfile::tempdir().unwrap();
    let volume = root.path().join("storage");
    fs::create_dir_all(volume.join("mine")).unwrap();
    fs::create_dir(root.path().join("secrets")).unwrap();
    fs::write(root.path().join("secrets/token"), "hush").unwrap();
    let read = || UsersFiles::read(root.path(), &volume);
    symlink(root.path().join("secrets"), volume.join("oem")).unwrap();
    let said = format!("{:#}", read().unwrap_err());
    assert!(said.contains("mount the folder as /oem") && said.contains("a link out of"), "{said}");
    fs::remove_file(volume.join("oem")).unwrap();
    symlink("mine", volume.join("oem")).unwrap();
    fs::write(volume.join("mine/a"), "x").unwrap();
    assert_eq!(read().unwrap().items.len(), 1);
}

#[test]
fn pipes_and_sockets_are_refused() {
    let pipe = refusal(|oem| mknodat(CWD, oem.join("a"), FileType::Fifo, Mode::RWXU, 0).unwrap());
    let socket = refusal(|oem| drop(UnixListener::bind(oem.join("a")).unwrap()));
    for said in [pipe, socket] {
        assert!(said.contains("a: it is neither a file nor a folder"), "{said}");
    }
}

#[test]
fn what_cannot_be_copied_is_one_sentence() {
    for (said, what) in [
        (refusal(|oem| symlink("/etc/passwd", oem.join("a")).unwrap()), "a: it is a link out of"),
        (refusal(|oem| symlink("../../secret", oem.join("a")).unwrap()), "a: it is a link out of"),
        (refusal(|oem| symlink("gone", oem.join("a")).unwrap()), "a: it is a link to nothing"),
        (refusal(|oem| symlink("a", oem.join("a")).unwrap()), "a: it is a link to itself"),
        (refusal(|oem| symlink(".", oem.join("a")).unwrap()), "a: it is a link to a folder that"),
        (refusal(|oem| fs::write(oem.join("a:b"), "").unwrap()), "/oem/a:b: a:b has one of"),
        (
            refusal(|oem| {
                ["A", "a"].iter().for_each(|name| fs::write(oem.join(name), "").unwrap());
            }),
            "/oem/a: A is in the same place",
        ),
        (
            refusal(|oem| {
                let large = File::create(oem.join("large.iso")).unwrap();
                large.set_len(5 << 30).unwrap();
            }),
            "/oem/large.iso: it has 5G, and the file system of the set-up disk has no files of 4",
        ),
        (
            refusal(|oem| {
                let large = File::create(oem.join("large.iso")).unwrap();
                large.set_len(3 << 30).unwrap();
            }),
            "/oem/large.iso: with it, the set-up disk would have more than 2G",
        ),
        (
            refusal(|oem| {
                let name = OsStr::from_bytes(b"a\xff");
                fs::write(oem.join(name), "").unwrap();
            }),
            "its name is not UTF-8",
        ),
        (
            refusal(|oem| {
                fs::remove_dir(oem).unwrap();
                fs::write(oem, "").unwrap();
            }),
            "oem is not a folder",
        ),
        (
            refusal(|oem| fs::write(oem.join("install.bat"), vec![b'x'; 2 << 20]).unwrap()),
            "oem/install.bat: it is no text of at most 1 MiB",
        ),
        (
            refusal(|oem| {
                for name in ["install.bat", "INSTALL.BAT"] {
                    fs::write(oem.join(name), "").unwrap();
                }
            }),
            "it has install.bat in several spellings",
        ),
    ] {
        assert!(said.contains(what), "{what}: {said}");
    }
}
