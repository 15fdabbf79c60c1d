//! Upgrade images: each byte of what we read, and the CD that we make of them, as wimlib and others
//! see it.

#[path = "../hostile_upgrade/mod.rs"]
mod hostile_upgrade;
mod made;
#[path = "../programs/mod.rs"]
mod programs;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use container::esd::Plan;
use container::esd::archive::Archive;
use container::esd::tree::{self, Content, Node};
use container::media::noprompt::Question;
use container::media::windows::analyze;
use container::media::{FileSystem, Opened};
use container::medium;
use host::testutil::noise::Noise;
use made::{IMAGES, WIMLIB};
use programs::{has, run};

/// Compares the files of an image with a folder that wimlib applied it to.
fn compare(archive: &mut Archive, node: &Node, path: &Path) -> usize {
    let of = |path: &Path| path.display().to_string();
    match &node.content {
        Content::Directory(nodes) => {
            let names: BTreeSet<_> = nodes.iter().map(|it| it.name.clone()).collect();
            let entries = fs::read_dir(path).unwrap().map(|it| it.unwrap().file_name());
            let there = entries.map(|name| name.into_string().unwrap()).collect();
            assert_eq!(names, there, "{}", of(path));
            nodes.iter().map(|it| compare(archive, it, &path.join(&it.name))).sum()
        }
        Content::File(_) if path.is_symlink() => 0,
        Content::File(sha1) => {
            let mut bytes = Vec::new();
            if let Some(blob) = archive.blob(sha1).copied() {
                let mut take = |part: &[u8]| {
                    bytes.extend_from_slice(part);
                    Ok(())
                };
                archive.read(&blob, &mut take).unwrap();
            }
            assert!(bytes == fs::read(path).unwrap(), "{}", of(path));
            bytes.len()
        }
    }
}

#[test]
fn every_byte_is_that_of_wimlib() {
    if !has("every_byte_is_that_of_wimlib", &[WIMLIB]) {
        return;
    }
    // Microsoft's chunks; and short ones, so that files are in several.
    for options in [&[][..], &["--solid-chunk-size=64K", "--chunk-size=32K"]] {
        let folder = tempfile::tempdir().unwrap();
        let path = made::esd(folder.path(), options);
        let mut archive = Archive::open(&path).unwrap();
        assert_eq!(archive.images(), IMAGES.len());
        for (number, name) in IMAGES.iter().enumerate() {
            let to = folder.path().join(format!("{name}.applied"));
            let (index, to) = ((number + 1).to_string(), to.display().to_string());
            run(WIMLIB, &["apply", "x.esd", &index, &to, "--no-acls"], folder.path());
            let root = tree::read(&archive.metadata(number).unwrap()).unwrap();
            assert!(compare(&mut archive, &root, Path::new(&to)) > 100_000, "{name}");
        }
    }
}

fn cd(esd: &Path) -> anyhow::Result<PathBuf> {
    let plan = Plan::new(Archive::open(esd)?)?;
    let (max_length, path) = (plan.max_length()?, esd.with_extension("iso"));
    plan.write(&File::create(&path)?, &|done, of| assert!(done <= of))?;
    assert!(fs::metadata(&path)?.len() <= max_length);
    Ok(path)
}

#[test]
fn the_cd_installs_the_editions_of_the_archive() {
    if !has("the_cd_installs_the_editions_of_the_archive", &[WIMLIB]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let esd = made::esd(folder.path(), &[]);
    let before = fs::read(&esd).unwrap();
    let path = cd(&esd).unwrap();
    assert!(fs::read(&esd).unwrap() == before, "the archive is as it was");
    medium::check(&path).unwrap();
    let opened = Opened::open(&path).unwrap();
    let media = analyze(&opened).unwrap().unwrap();
    assert_eq!(
        media.to_string(),
        "Windows 11 26100.0, x64, de-DE: Windows 11 Home, Windows 11 Pro"
    );
    assert_eq!((media.source, &media.question), ("sources/install.esd", &Question::Never));
    assert_eq!(media.edition("pro").unwrap().index, 2);

    // The files of the first image.
    let files = FileSystem::open(&opened).unwrap().unwrap();
    let all = run("find", &["media", "-type", "f", "-printf", "%P\n"], folder.path());
    for name in all.lines() {
        let content = files.find(&opened, name).unwrap().expect(name);
        let mut bytes = vec![0; usize::try_from(content.length()).unwrap()];
        content.read(&opened, &mut bytes, 0).unwrap();
        assert!(bytes == fs::read(folder.path().join("media").join(name)).unwrap(), "{name}");
    }
    // The two archives as wimlib applies them.
    for (name, images) in [("boot.wim", &IMAGES[1..3]), ("install.esd", &IMAGES[3..])] {
        let content = files.find(&opened, &format!("sources/{name}")).unwrap().unwrap();
        let mut bytes = vec![0; usize::try_from(content.length()).unwrap()];
        content.read(&opened, &mut bytes, 0).unwrap();
        fs::write(folder.path().join(name), bytes).unwrap();
        let said = run(WIMLIB, &["verify", name], folder.path());
        assert!(said.contains("was successfully verified"), "{said}");
        for (index, image) in (1..).zip(images) {
            let (index, to) = (format!("{index}"), format!("{image}.of-cd"));
            run(WIMLIB, &["apply", name, &index, &to, "--no-acls"], folder.path());
            run("diff", &["-r", "--no-dereference", image, &to], folder.path());
        }
    }
    let header = run(WIMLIB, &["info", "boot.wim", "--header"], folder.path());
    assert!(header.contains("COMPRESS_XPRESS"), "{header}");
    assert!(
        header.lines().any(|it| it.starts_with("Boot Index") && it.ends_with("= 2")),
        "{header}"
    );
}

#[test]
fn other_programs_read_the_cd() {
    let test = "other_programs_read_the_cd";
    if !has(test, &["xorriso", "udfinfo", WIMLIB]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    cd(&made::esd(folder.path(), &[])).unwrap();
    let info = run("udfinfo", &["x.iso"], folder.path());
    let all = run("find", &["media", "-type", "f"], folder.path()).lines().count() + 2;
    for line in ["lvid=ESD_ISO", "accesstype=readonly", "udfrev=1.02", &format!("numfiles={all}")] {
        assert!(info.lines().any(|it| it == line), "{line}: {info}");
    }
    let words = ["-indev", "x.iso", "-report_el_torito", "plain"];
    let boot = run("xorriso", &words, folder.path());
    for words in ["BIOS  y   none  0x0000  0x00      8", "UEFI  y   none  0x0000  0x00      1"] {
        assert!(boot.contains(words), "{boot}");
    }
}

#[test]
fn a_damaged_archive_is_refused() {
    if !has("a_damaged_archive_is_refused", &[WIMLIB]) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = made::esd(folder.path(), &["--solid-chunk-size=64K"]);
    let good = fs::read(&path).unwrap();
    let mut noise = Noise::new(3);
    let mut refused = 0;
    for _ in 0..40 {
        let mut bytes = good.clone();
        let at = usize::try_from(noise.below(bytes.len() as u64)).unwrap();
        bytes[at] ^= 1 << noise.below(8);
        fs::write(&path, bytes).unwrap();
        refused += usize::from(cd(&path).is_err());
    }
    // Some bytes belong to an edition, which is copied as it is, or to nothing.
    assert!(refused > 10, "{refused} of 40");
    for part in 1..20 {
        fs::write(&path, &good[..good.len() * part / 20]).unwrap();
        assert!(cd(&path).is_err(), "{part}");
    }
}

#[test]
fn archives_with_any_bytes_are_read_or_refused() {
    assert!(hostile_upgrade::read(&[2]), "an archive without changes");
    let mut noise = Noise::new(11);
    for _ in 0..3000 {
        let length = noise.below(60);
        let bytes: Vec<u8> = (0..length).map(|_| noise.below(256).to_le_bytes()[0]).collect();
        hostile_upgrade::read(&bytes);
    }
}
