//! Disks and state files that say anything.

use container::settings::language::Language;
use container::settings::version::Version;
use container::snapshots::manifest::{Journal, MAX_FILES, Manifest, with_checksum};
use container::state::content::{Content, judge};
use container::state::name;
use container::state::testutil::{Esp, HEADER, disk, seal};

/// Starts of structures: MBR, GPT, its entries, the EFI system partition, its root directory.
const PLACES: [usize; 5] = [446, HEADER, 1024, 1 << 20, (1 << 20) + 40 * 512];

/// Changes bytes of a disk, in groups of four: place, offset, byte, and whether the checksums are
/// made valid again. A boot loader whose structures are intact is always found.
pub(crate) fn judge_disk(bytes: &[u8]) {
    let Some((kind, changes)) = bytes.split_first() else { return };
    let esp = [Esp::None, Esp::Unformatted, Esp::Empty, Esp::Files][usize::from(kind % 4)];
    let mut disk = disk(esp);
    if kind & 4 != 0 {
        disk.truncate((1 << 20) + usize::from(*kind) * 128);
    }
    for change in changes.chunks_exact(4) {
        let place = PLACES[usize::from(change[0]) % PLACES.len()];
        if let Some(byte) = disk.get_mut(place + usize::from(change[1])) {
            *byte = change[2];
        }
        if change[3] & 1 == 0 {
            seal(&mut disk);
        }
    }
    let judged = judge(&disk[..]);
    if changes.len() < 4 && kind & 4 == 0 {
        let bootable = judged == Content::Bootable;
        assert_eq!(bootable, esp == Esp::Files, "{esp:?}");
    }
}

/// The text as `windows.base`, and at the end of the address of a medium.
pub(crate) fn name_medium(text: &str) {
    let url = Version::Url(format!("https://example.com/{text}"));
    let named = [name::of_base(text), name::of(&url, Language::default().0)];
    for name in named.into_iter().flatten() {
        let plain = !name.contains('/') && !name.contains(char::is_control) && name.len() < 300;
        assert!(plain && name.to_lowercase().ends_with(".iso"), "{name:?}");
    }
}

/// A manifest of a snapshot, in which the fuzzer replaces parts.
const PARTS: [&str; 16] = [
    r#"{"name":"one","created":1,"kind":"off","files":["#,
    r#"{"volume":0,"file":"data.img","bytes":7,"changed":[1,2]}"#,
    r#"{"volume":1,"file":"data2.img","bytes":7,"changed":[-1,2]}"#,
    r#"{"volume":9,"file":"../x","bytes":18446744073709551615,"changed":[1,4000000000]}"#,
    ",",
    r#"],"absent":["#,
    r#"[0,"windows.boot"]"#,
    r#"[0,"/etc/passwd"]"#,
    "]}",
    r#"{"manifest":"#,
    r#","generation":"00000000000000000000000000000000"}"#,
    "..",
    "\"",
    "[",
    "\\u0000",
    "memory",
];

/// Bytes as the manifest of a snapshot, as they are and with a checksum; and parts of manifests in
/// the order of the bytes.
pub(crate) fn read_manifest(bytes: &[u8]) {
    let parts: String = bytes.iter().map(|it| PARTS[usize::from(*it) % PARTS.len()]).collect();
    for bytes in [bytes, &with_checksum(bytes), &with_checksum(parts.as_bytes())] {
        if let Ok(manifest) = Manifest::read(bytes) {
            judge_manifest(&manifest);
        }
        if let Ok(journal) = Journal::read(bytes) {
            judge_manifest(&journal.manifest);
        }
    }
}

fn judge_manifest(manifest: &Manifest) {
    let files = manifest.files.iter().map(|entry| (entry.volume, entry.file.as_str()));
    let absent = manifest.absent.iter().map(|(volume, file)| (*volume, file.as_str()));
    let all: Vec<_> = files.chain(absent).collect();
    assert!(all.len() <= 2 * MAX_FILES);
    for (volume, file) in all {
        let plain = !file.contains('/') && !file.starts_with('.') && !file.is_empty();
        assert!(plain && volume < 6, "{volume} {file:?}");
    }
    assert_eq!(Manifest::read(&manifest.write().unwrap()).unwrap(), *manifest);
}
