//! Names and trees of any kind on the set-up disk, which a reader of FAT32 of its own reads.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::str::from_utf8;
use std::time::UNIX_EPOCH;

use container::setup_disk::{Content, Item, SetupDisk, lay_out};
use host::testutil::noise::Noise;

/// Maximum length of a file.
const LENGTH: usize = 10_000;
const LAST: u32 = 0x0fff_fff8;
const MAX_PATHS: u64 = 60;
/// Parts of names, most of which every file system takes.
const PARTS: [&str; 24] = [
    "a",
    "A",
    "b",
    "file",
    "FILE",
    "~1",
    "~",
    ".txt",
    ".TXT",
    ".",
    "..",
    " ",
    "+",
    "[",
    "$OEM$",
    "\u{e9}",
    "\u{df}",
    "\u{d55c}",
    "\u{1f600}",
    "averylongnamethatgoeson",
    "con",
    "com1",
    "0",
    "-",
];
const FORBIDDEN: [&str; 6] = [":", "\\", "\"", "\u{7f}", "\u{0}", "//"];

/// Paths of files and folders. Most are below a folder that came before.
pub(crate) fn paths(noise: &mut Noise) -> Vec<u8> {
    let mut folders = vec![String::new()];
    let mut lines = String::new();
    for _ in 0..noise.below(MAX_PATHS) {
        let above = usize::try_from(noise.below(folders.len() as u64)).expect("below a length");
        let mut path = folders[above].clone() + &name(noise);
        if noise.below(4) == 0 {
            path.push('/');
            folders.push(path.clone());
        }
        lines.push_str(&path);
        lines.push('\n');
    }
    lines.into_bytes()
}

fn name(noise: &mut Noise) -> String {
    let mut name = String::new();
    for _ in 0..=noise.below(4) {
        name.push_str(noise.choose(&PARTS));
    }
    if noise.below(200) == 0 {
        name.push_str(noise.choose(&FORBIDDEN));
    }
    // Few names end with a dot or a space, or are there twice.
    if noise.below(20) > 0 {
        name.push_str(&noise.below(1000).to_string());
    }
    name
}

/// Each line is the path of a file, or of a folder if it ends with a slash. Either all are on the
/// disk, or one sentence says why not. Returns whether they are.
pub(crate) fn make(bytes: &[u8]) -> bool {
    let mut wanted = BTreeMap::new();
    let mut items = Vec::new();
    for line in bytes.split(|byte| *byte == b'\n') {
        let Some(path) = from_utf8(line).ok().filter(|path| !path.is_empty()) else { continue };
        let (path, bytes) = match path.strip_suffix('/') {
            Some(folder) => (folder, None),
            None => (path, Some(content(line))),
        };
        if let Some(bytes) = &bytes {
            wanted.insert(path.to_owned(), bytes.clone());
        }
        let content = bytes.map(Content::Bytes);
        items.push(Item { path: path.to_owned(), content, modified: UNIX_EPOCH });
    }
    match lay_out(items).and_then(|layout| SetupDisk::write(&layout)) {
        Ok(disk) => {
            let file = File::open(disk.path()).expect("the disk");
            assert!(Volume::new(&file).files() == wanted, "the disk has other files");
            disk.close().free().expect("memory");
            true
        }
        Err(error) => {
            let sentence = format!("{error:#}");
            assert!(!sentence.contains(char::is_control), "{sentence:?}");
            assert!(sentence.len() < 2000, "{sentence}");
            false
        }
    }
}

/// Bytes that depend on the path. Some files are empty, some have several clusters.
fn content(path: &[u8]) -> Vec<u8> {
    let sum: usize = path.iter().map(|byte| usize::from(*byte)).sum();
    path.iter().copied().cycle().take(sum * 7 % LENGTH / (1 + sum % 3 * 50)).collect()
}

/// A FAT32 file system.
struct Volume<'a> {
    file: &'a File,
    fat: u64,
    data: u64,
    cluster: u64,
}

impl<'a> Volume<'a> {
    fn new(file: &'a File) -> Self {
        let boot = read(file, 0, 512);
        let [sector, clusters, reserved] =
            [short(&boot, 11), u64::from(boot[13]), short(&boot, 14)];
        let fat_length = u64::from(long(&boot, 36)) * sector;
        let (fat, fats) = (reserved * sector, u64::from(boot[16]));
        for number in 1..fats {
            let both = [fat, fat + number * fat_length].map(|at| read(file, at, 4096));
            assert_eq!(both[0], both[1], "the FATs differ");
        }
        Self { file, fat, data: fat + fats * fat_length, cluster: clusters * sector }
    }

    /// All files, by their paths.
    fn files(&self) -> BTreeMap<String, Vec<u8>> {
        let mut found = BTreeMap::new();
        let (mut folders, mut used) = (vec![(2, String::new())], BTreeSet::new());
        while let Some((cluster, path)) = folders.pop() {
            let entries = self.chain(cluster, &mut used);
            let mut short_names = BTreeSet::new();
            for (name, entry) in names(&entries, &mut short_names) {
                let first = u32::try_from(short(entry, 26) | short(entry, 20) << 16);
                let first = first.expect("two halves");
                let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                if entry[11] == 0x10 {
                    folders.push((first, path));
                    continue;
                }
                let length = usize::try_from(long(entry, 28)).expect("a short file");
                let mut bytes = if first == 0 { Vec::new() } else { self.chain(first, &mut used) };
                assert!(bytes.len() - length < 4096, "a chain that is too long");
                bytes.truncate(length);
                assert_eq!(found.insert(path, bytes), None, "a name is there twice");
            }
        }
        found
    }

    /// The bytes of a chain. No cluster is in two of them.
    fn chain(&self, first: u32, used: &mut BTreeSet<u32>) -> Vec<u8> {
        let (mut bytes, mut cluster) = (Vec::new(), first);
        while cluster < LAST {
            assert!(cluster >= 2 && used.insert(cluster), "cluster {cluster} is used twice");
            let at = self.data + u64::from(cluster - 2) * self.cluster;
            bytes.extend(read(self.file, at, self.cluster));
            cluster = long(&read(self.file, self.fat + u64::from(cluster) * 4, 4), 0);
        }
        bytes
    }
}

/// The entries of a folder and their long names, without `.`, `..` and the label.
fn names<'a>(bytes: &'a [u8], short_names: &mut BTreeSet<&'a [u8]>) -> Vec<(String, &'a [u8])> {
    let (mut found, mut units, mut sum) = (Vec::new(), Vec::new(), None);
    for entry in bytes.chunks_exact(32).take_while(|entry| entry[0] != 0) {
        if entry[11] == 0x0f {
            let offsets = [1, 3, 5, 7, 9, 14, 16, 18, 20, 22, 24, 28, 30];
            let part = offsets.map(|at| u16::from_le_bytes([entry[at], entry[at + 1]]));
            units.splice(..0, part);
            assert!(*sum.get_or_insert(entry[13]) == entry[13], "parts of two names");
            continue;
        }
        assert!(short_names.insert(&entry[..11]), "a short name is there twice");
        let own = entry[..11].iter().fold(0_u8, |sum, it| sum.rotate_right(1).wrapping_add(*it));
        assert!(sum.is_none_or(|sum| sum == own), "the long name of another file");
        let end = units.iter().position(|unit| *unit == 0).unwrap_or(units.len());
        let name = match end {
            0 => plain(&entry[..11]),
            _ => String::from_utf16(&units[..end]).expect("a name"),
        };
        if entry[11] != 0x08 && entry[0] != b'.' {
            found.push((name, entry));
        }
        (units, sum) = (Vec::new(), None);
    }
    let owners: BTreeMap<_, _> = found.iter().map(|(name, it)| (plain(&it[..11]), name)).collect();
    for (name, _) in &found {
        let owner = owners.get(&name.to_ascii_uppercase());
        assert!(owner.is_none_or(|it| *it == name), "{name:?} is the short name of {owner:?}");
    }
    found
}

/// A short name as people write it.
fn plain(short: &[u8]) -> String {
    let [stem, extension] =
        [&short[..8], &short[8..]].map(|it| String::from_utf8_lossy(it).trim_end().to_owned());
    if extension.is_empty() { stem } else { format!("{stem}.{extension}") }
}

fn read(file: &File, at: u64, length: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(length).expect("a short length")];
    file.read_exact_at(&mut bytes, at).expect("a place on the disk");
    bytes
}

fn short(bytes: &[u8], at: usize) -> u64 {
    u64::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn long(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
