//! The set-up disk as other programs read it, for tests.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::process::Command;

use super::SetupDisk;

pub(crate) fn tool(name: &str, words: &[&str]) -> String {
    let output = Command::new(name).args(words).env("MTOOLS_SKIP_CHECK", "0").output();
    let output = output.unwrap_or_else(|error| panic!("{name}: {error}"));
    let said = [output.stdout, output.stderr].map(|it| String::from_utf8(it).unwrap()).concat();
    assert!(output.status.success(), "{name} {words:?}: {said}");
    said
}

/// The disk as a file, after `fsck.vfat` has accepted it.
pub(crate) fn checked(disk: SetupDisk) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("setup.img");
    // A copy, as another process would read it.
    let mut from = File::open(disk.path()).unwrap();
    std::io::copy(&mut from, &mut File::create(&path).unwrap()).unwrap();
    disk.close().free().unwrap();
    let path = path.display().to_string();
    let said = tool("fsck.vfat", &["-n", "-v", &path]);
    for wrong in ["differ", "rong", "nvalid", "uplicate", "ad ", "dirty", "rphan"] {
        assert!(!said.contains(wrong), "{said}");
    }
    (folder, path)
}

/// The files that `mcopy` finds on the disk, by their paths.
pub(crate) fn copied(image: &str) -> BTreeMap<String, Vec<u8>> {
    let folder = tempfile::tempdir().unwrap();
    tool("mcopy", &["-s", "-n", "-m", "-i", image, "::", &folder.path().display().to_string()]);
    let mut found = BTreeMap::new();
    let mut folders = vec![folder.path().to_owned()];
    while let Some(at) = folders.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            let name = path.strip_prefix(folder.path()).unwrap().to_str().unwrap().to_owned();
            found.insert(name, fs::read(path).unwrap());
        }
    }
    found
}
