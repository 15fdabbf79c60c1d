//! Upgrade images that wimlib makes.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

use container::esd::archive::{Archive, Sha1};
use container::esd::tree::{self, Content, Node};

fn run(program: &str, words: &[&str]) {
    let output = Command::new(program).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {said}");
}

#[test]
fn every_byte_is_that_of_wimlib() {
    let from = std::env::var("ESD_SOURCE").unwrap();
    let esd = "/tmp/x/esd-work/a.esd";
    if !Path::new(esd).exists() {
        run("wimlib-imagex", &["capture", &from, esd, "--solid", "--compress=LZMS", "--no-acls"]);
    }
    let start = std::time::Instant::now();
    let mut archive = Archive::open(Path::new(esd)).unwrap();
    let metadata = archive.metadata(0).unwrap();
    let root = tree::read(&metadata).unwrap();
    let mut files = BTreeMap::new();
    walk(&root, Path::new(&from), &mut files);
    let mut blobs: Vec<_> = files.keys().map(|sha1| *archive.blob(sha1).unwrap()).collect();
    blobs.sort_by_key(|it| it.order());
    let mut total = 0;
    for blob in blobs {
        let mut bytes = Vec::new();
        archive.read(&blob, &mut |part| { bytes.extend_from_slice(part); Ok(()) }).unwrap();
        total += bytes.len();
        assert!(bytes == fs::read(&files[&blob.sha1]).unwrap());
    }
    eprintln!("{total} bytes in {:?}", start.elapsed());
}

fn walk(node: &Node, path: &Path, files: &mut BTreeMap<Sha1, std::path::PathBuf>) {
    match &node.content {
        Content::File(sha1) if !sha1.is_none() => drop(files.insert(*sha1, path.to_owned())),
        Content::File(_) => {}
        Content::Directory(nodes) => nodes.iter().for_each(|it| walk(it, &path.join(&it.name), files)),
    }
}
