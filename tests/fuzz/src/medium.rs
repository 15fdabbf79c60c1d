//! Installation CDs: their volume descriptors.

use std::path::Path;

use container::medium;
use host::testutil::noise::Noise;

const DESCRIPTORS: usize = 16 * 2048;

/// Checks a CD whose descriptors begin with these bytes.
pub(crate) fn look(folder: &Path, bytes: &[u8]) {
    let path = folder.join("cd.iso");
    // Some files are shorter than the system area.
    let file = match bytes.first() {
        Some(0..16) => bytes.to_vec(),
        _ => [&vec![0; DESCRIPTORS][..], bytes].concat(),
    };
    std::fs::write(&path, &file).expect("a file");
    let is = medium::is_microsofts(&path);
    let says = |name: &[u8]| file.windows(name.len()).any(|it| it == name);
    assert!(!is || says(b"CD001") && (says(b"MICROSOFT") || says(b"CDIMAGE") || says(b"OSCDIMG")));
}

/// A primary volume descriptor and a boot record, with some variations.
pub(crate) fn make(noise: &mut Noise) -> Vec<u8> {
    let mut bytes = vec![b' '; 2048];
    bytes[..7].copy_from_slice(b"\x01CD001\x01");
    bytes[0] = noise.choose(&[1, 1, 1, 0, 2, 255]);
    for at in [318, 446, 574] {
        let name: &[u8] = noise.choose(&[
            &b"MICROSOFT CORPORATION"[..],
            b"CDIMAGE 2.56",
            b"OSCDIMG 2.56",
            b"XORRISO",
            b"\xff\xff",
            b"",
        ]);
        bytes[at..at + name.len()].copy_from_slice(name);
    }
    bytes.extend(b"\0CD001\x01EL TORITO SPECIFICATION");
    let length =
        usize::try_from(noise.below(bytes.len() as u64 + 1)).expect("it is below a length");
    bytes.truncate(if noise.below(3) == 0 { length } else { bytes.len() });
    bytes
}
