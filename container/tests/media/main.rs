//! Windows media read in place: CDs and WIMs that genisoimage, xorriso, mkudffs and wimlib made,
//! and their opinion of what we read.

mod cd;
#[path = "../hostile_media/mod.rs"]
mod hostile_media;
#[path = "../programs/mod.rs"]
mod programs;

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use container::media::noprompt::Question;
use container::media::testutil::{image, windows_11};
use container::media::tree::Tree as _;
use container::media::wim::Architecture;
use container::media::windows::{Media, analyze};
use container::media::{FileSystem, Opened, SECTOR, udf};
use host::testutil::noise::Noise;

use cd::{bridge, joliet, tree, wim};
use programs::{has, run};

fn media(path: &Path) -> Media {
    analyze(&Opened::open(path).unwrap()).unwrap().unwrap()
}

fn refusal(path: &Path) -> String {
    let error = analyze(&Opened::open(path).unwrap()).unwrap_err();
    let sentence = format!("{error:#}");
    assert!(!sentence.contains(char::is_control), "{sentence}");
    sentence
}

/// The bytes of each file of the tree are those that are found on the CD.
fn compare(path: &Path, tree: &Path) {
    let opened = Opened::open(path).unwrap();
    let files = FileSystem::open(&opened).unwrap().unwrap();
    for name in [
        "boot/etfsboot.com",
        "efi/microsoft/boot/efisys.bin",
        "EFI/Microsoft/Boot/EFISYS_NOPROMPT.BIN",
        "sources/install.wim",
        "sources/a-rather-long-name-299.dll",
    ] {
        let content = files.find(&opened, name).unwrap().expect(name);
        let wanted = fs::read(tree.join(name.to_lowercase())).unwrap();
        assert_eq!(content.length(), wanted.len() as u64, "{name}");
        let mut bytes = vec![0; wanted.len()];
        content.read(&opened, &mut bytes, 0).unwrap();
        assert!(bytes == wanted, "{name}");
        assert!(content.read(&opened, &mut bytes, 1).is_err(), "beyond the end of {name}");
    }
    let mut listed: Vec<_> = files.list(&opened, "sources").unwrap();
    listed.sort_by(|one, other| one.0.cmp(&other.0));
    let names: Vec<_> = listed.iter().map(|(name, _)| name.clone()).collect();
    let on_disk = fs::read_dir(tree.join("sources")).unwrap().map(|entry| entry.unwrap());
    let on_disk = on_disk.filter(|entry| entry.path().is_file());
    let mut wanted: Vec<_> =
        on_disk.map(|entry| entry.file_name().into_string().unwrap()).collect();
    wanted.sort();
    assert_eq!(names, wanted);
    let (name, content) = &listed[0];
    assert_eq!(files.find(&opened, &format!("sources/{name}")).unwrap().as_ref(), Some(content));
    for name in ["", "/", "sources", "sources/none", "boot/etfsboot.com/x", "none/x"] {
        assert_eq!(files.find(&opened, name).unwrap(), None, "{name}");
    }
}

#[test]
fn reads_a_udf_bridge_and_avoids_its_question() {
    let test = "reads_a_udf_bridge_and_avoids_its_question";
    if !has(test, &["genisoimage", "xorriso", "udfinfo"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let tree = tree(folder.path(), |path| wim(path, 1 << 20, &windows_11(9)));
    let path = bridge(folder.path());
    compare(&path, &tree);
    let opened = Opened::open(&path).unwrap();
    let volume = udf::Volume::open(&opened).unwrap().unwrap();
    let info = run("udfinfo", &["cd.iso"], folder.path());
    assert!(info.contains(&format!("lvid={}", volume.name())), "{}: {info}", volume.name());
    let windows = media(&path);
    assert_eq!(
        windows.to_string(),
        "Windows 11 26100.1742, x64, ko-KR: Windows 11 Home, Windows 11 Pro"
    );
    assert_eq!(windows.edition("pro").unwrap().index, 2);
    assert!(windows.edition("datacenter").is_none() && windows.has_language("ko-kr"));

    // xorriso agrees on the entry before, and on the patched one.
    let patch = windows.patch().expect("both images are there");
    let files = FileSystem::open(&opened).unwrap().unwrap();
    let sector = |name: &str| {
        let found = files.find(&opened, &format!("efi/microsoft/boot/{name}")).unwrap().unwrap();
        found.whole().unwrap().start / SECTOR
    };
    let before = cd::boot_sectors(&path, folder.path());
    assert_eq!(before[1], sector("efisys.bin"));
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let mut old = vec![0; patch.old.len()];
    file.read_exact_at(&mut old, patch.offset).unwrap();
    assert_eq!(old, patch.old);
    file.write_all_at(&patch.new, patch.offset).unwrap();
    let after = cd::boot_sectors(&path, folder.path());
    assert_eq!(after, [before[0], sector("efisys_noprompt.bin")]);
    assert_eq!(media(&path).question, Question::Never);
}

#[test]
fn reads_joliet_names_without_udf() {
    let test = "reads_joliet_names_without_udf";
    if !has(test, &["xorriso"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let server =
        image(1, "Windows Server 2025 Standard Evaluation", "ServerStandardEval", "Server Core", 9);
    let tree = tree(folder.path(), |path| wim(path, 1 << 20, &[server]));
    let path = joliet(folder.path());
    compare(&path, &tree);
    let media = media(&path);
    assert_eq!(media.product(), "Windows Server 2025");
    assert!(media.is_server() && media.is_evaluation() && media.edition("core").is_some());
    assert!(matches!(media.question, Question::Avoided(_)));
}

#[test]
fn reads_a_wim_of_wimlib() {
    if !has("reads_a_wim_of_wimlib", &["xorriso", "wimlib-imagex"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("Windows")).unwrap();
    fs::write(folder.path().join("Windows/x"), "x").unwrap();
    let make = |path: &Path| {
        let path = path.to_str().unwrap();
        run("wimlib-imagex", &["capture", "Windows", path, "Windows 10 Pro"], folder.path());
        let mut words = vec!["info", path, "1"];
        for property in [
            "--image-property=WINDOWS/ARCH=9",
            "--image-property=WINDOWS/EDITIONID=Professional",
            "--image-property=WINDOWS/INSTALLATIONTYPE=Client",
            "--image-property=WINDOWS/LANGUAGES/DEFAULT=de-DE",
            "--image-property=WINDOWS/LANGUAGES/LANGUAGE=de-DE",
            "--image-property=WINDOWS/VERSION/BUILD=19045",
            "--image-property=WINDOWS/VERSION/SPBUILD=2006",
            "--image-property=DISPLAYNAME=A & <B>",
        ] {
            words.push(property);
        }
        run("wimlib-imagex", &words, folder.path());
    };
    tree(folder.path(), make);
    let media = media(&joliet(folder.path()));
    assert_eq!(media.to_string(), "Windows 10 19045.2006, x64, de-DE: A & <B>");
    let edition = &media.editions[0];
    assert_eq!((&*edition.name, edition.architecture), ("Windows 10 Pro", Architecture::Amd64));
}

#[test]
fn reads_the_first_part_of_a_split_wim() {
    let test = "reads_the_first_part_of_a_split_wim";
    if !has(test, &["xorriso", "wimlib-imagex"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir(folder.path().join("Windows")).unwrap();
    for (name, seed) in [("a", 1), ("b", 2), ("c", 3)] {
        let noise: Vec<u8> = Noise::new(seed).take(600 << 10).collect();
        fs::write(folder.path().join("Windows").join(name), noise).unwrap();
    }
    let tree = tree(folder.path(), |path| {
        let path = path.to_str().unwrap();
        run("wimlib-imagex", &["capture", "Windows", path, "Windows 11 Pro"], folder.path());
        let properties = ["ARCH=9", "EDITIONID=Professional", "INSTALLATIONTYPE=Client"];
        let words = properties.map(|it| format!("--image-property=WINDOWS/{it}"));
        let words = words.iter().map(String::as_str);
        let words: Vec<_> = ["info", path, "1"].into_iter().chain(words).collect();
        run("wimlib-imagex", &words, folder.path());
        let first = Path::new(path).with_extension("swm");
        run("wimlib-imagex", &["split", path, first.to_str().unwrap(), "1"], folder.path());
        fs::remove_file(path).unwrap();
    });
    let sources = tree.join("sources");
    assert!(sources.join("install2.swm").exists(), "the WIM is split");
    let found = media(&joliet(folder.path()));
    assert_eq!((found.source, found.editions.len()), ("sources/install.swm", 1));
    assert_eq!(found.editions[0].name, "Windows 11 Pro");
    fs::rename(sources.join("install2.swm"), sources.join("install.swm")).unwrap();
    let sentence = refusal(&joliet(folder.path()));
    assert!(sentence.contains("only the first part has all names"), "{sentence}");
}

#[test]
fn opens_every_revision_of_mkudffs() {
    if !has("opens_every_revision_of_mkudffs", &["mkudffs", "udfinfo"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    for revision in ["1.02", "1.50", "2.00", "2.01"] {
        let path = folder.path().join(revision);
        File::create(&path).unwrap().set_len(16 << 20).unwrap();
        let number = format!("--udfrev={revision}");
        let words = ["--blocksize=2048", &number, "--label=ÄÖ Ж", revision];
        run("mkudffs", &words, folder.path());
        let opened = Opened::open(&path).unwrap();
        let volume = udf::Volume::open(&opened).unwrap().expect(revision);
        assert_eq!(volume.name(), "ÄÖ Ж", "{revision}");
        assert_eq!(volume.find(&opened, "sources/install.wim").unwrap(), None);
        assert_eq!(analyze(&opened).unwrap(), None);
    }
}

/// All of `transom plan`, the analysis included, has at most this much memory.
fn has_20_mib(folder: &Path, cd: &Path) {
    let volume = folder.join("volume");
    fs::create_dir(&volume).unwrap();
    fs::rename(cd, volume.join("custom.iso")).unwrap();
    let plan = Command::new("time")
        .args(["-f", "peak %M", env!("CARGO_BIN_EXE_transom"), "plan"])
        .env("STORAGE", &volume)
        .output()
        .unwrap();
    let said = [plan.stdout, plan.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
    fs::rename(volume.join("custom.iso"), cd).unwrap();
    assert!(said.contains("Windows 11 26100.1742, x64"), "{said}");
    let peak = said.lines().find_map(|line| line.strip_prefix("peak ")).expect("a last line");
    assert!(peak.parse::<u64>().unwrap() < 20 << 10, "{peak} KiB");
}

#[test]
fn analyzes_6_gib_within_100_ms() {
    if !has("analyzes_6_gib_within_100_ms", &["genisoimage", "time"]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    tree(folder.path(), |path| wim(path, 6 << 30, &windows_11(9)));
    let path = bridge(folder.path());
    let counted = cd::Counted::open(&path);
    let start = Instant::now();
    let media = analyze(&counted).unwrap().unwrap();
    let elapsed = start.elapsed();
    assert_eq!(media.editions.len(), 2);
    assert!(elapsed < Duration::from_millis(100), "{elapsed:?}");
    assert!(counted.bytes.get() < 1 << 20, "{} bytes", counted.bytes.get());
    has_20_mib(folder.path(), &path);
    // The end of the image, with the XML data in it, is missing.
    File::options().write(true).open(&path).unwrap().set_len(5 << 30).unwrap();
    let sentence = refusal(&path);
    let starts = sentence.starts_with("it is cut off (the image has 5368709120 bytes, and needs ");
    assert!(starts && sentence.ends_with("): download it again"), "{sentence}");
}

#[test]
fn refuses_other_architectures_and_missing_editions() {
    let test = "refuses_other_architectures_and_missing_editions";
    if !has(test, &["xorriso"]) {
        return;
    }
    let made = |images: &[String]| {
        let folder = tempfile::tempdir().unwrap();
        tree(folder.path(), |path| wim(path, 1 << 20, images));
        let path = joliet(folder.path());
        (folder, path)
    };
    for (images, words) in [
        (windows_11(12), "for ARM processors (ARM64)"),
        (windows_11(0), "for 32 bits (x86)"),
        (vec![image(1, "Setup", "WindowsPE", "WindowsPE", 9)], "no edition of Windows"),
    ] {
        let (_folder, path) = made(&images);
        let sentence = refusal(&path);
        assert!(sentence.contains(words), "{sentence}");
    }
    let (folder, path) = made(&windows_11(9));
    fs::remove_file(folder.path().join("tree/sources/install.wim")).unwrap();
    assert_eq!(analyze(&Opened::open(&joliet(folder.path())).unwrap()).unwrap(), None);
    fs::write(&path, [0; 1 << 16]).unwrap();
    assert_eq!(analyze(&Opened::open(&path).unwrap()).unwrap(), None);
}

/// Runs the fuzz targets for a limited time, with fixed seeds.
#[test]
fn hostile_cds_are_read_in_bounds() {
    for seed in 0..2_000 {
        let bytes: Vec<u8> = Noise::new(seed).take(40).collect();
        hostile_media::descriptors(&bytes);
        hostile_media::catalog(&bytes);
        hostile_media::wim(&bytes);
    }
    for text in ["<WIM>", "<WIM><IMAGE INDEX='1'><NAME>&#0;</NAME></IMAGE></WIM>", "<a/>"] {
        hostile_media::xml(text);
    }
}
