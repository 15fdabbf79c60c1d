//! Install media, as far as the start of a CD tells who made it (ISO 9660, ECMA-119).

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use crate::files;

/// The first volume descriptor, which is the primary one (ECMA-119 6.7.1, 8.4).
const PRIMARY: u64 = 16 * 2048;
/// As far as the names of those who made it go.
const LENGTH: usize = 702;
/// How it begins: its type, what it is, its version.
const MAGIC: &[u8] = b"\x01CD001\x01";
/// Where the names of publisher and preparer are.
const MAKERS: [usize; 2] = [318, 446];
/// And that of the program.
const PROGRAM: usize = 574;

/// Whether it is one of Microsoft's, or made with their program: such a CD asks for a key before it
/// starts. What cannot be read is none.
pub fn is_microsofts(path: &Path) -> bool {
    let mut start = [0; LENGTH];
    let file = files::open(path, File::options().read(true));
    file.is_ok_and(|it| it.read_exact_at(&mut start, PRIMARY).is_ok()) && says(&start)
}

/// Whether a volume descriptor says so.
fn says(descriptor: &[u8; LENGTH]) -> bool {
    let begins = |at: usize, name: &str| descriptor[at..].starts_with(name.as_bytes());
    descriptor.starts_with(MAGIC)
        && (MAKERS.iter().any(|at| begins(*at, "MICROSOFT"))
            || ["CDIMAGE", "OSCDIMG"].iter().any(|name| begins(PROGRAM, name)))
}

/// A CD that Microsoft made, as far as is looked at.
#[cfg(test)]
pub fn of_microsoft() -> Vec<u8> {
    let mut bytes = vec![0; 20 * 2048];
    let at = usize::try_from(PRIMARY).unwrap();
    bytes[at..][..MAGIC.len()].copy_from_slice(MAGIC);
    bytes[at + MAKERS[0]..][..21].copy_from_slice(b"MICROSOFT CORPORATION");
    bytes
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;

    #[test]
    fn a_cd_says_who_made_it() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let is = |bytes: &[u8]| {
            fs::write(&path, bytes).unwrap();
            is_microsofts(&path)
        };
        let cd = of_microsoft();
        let at = usize::try_from(PRIMARY).unwrap();
        let with = |place: usize, name: &str| {
            let mut cd = cd.clone();
            cd[at + MAKERS[0]..][..21].fill(b' ');
            cd[at + place..][..name.len()].copy_from_slice(name.as_bytes());
            cd
        };
        assert!(is(&cd));
        assert!(is(&with(MAKERS[1], "MICROSOFT CORPORATION, ONE MICROSOFT WAY, REDMOND")));
        assert!(is(&with(PROGRAM, "CDIMAGE 2.56 (01/01/2005 TM)")));
        assert!(is(&with(PROGRAM, "OSCDIMG 2.56 (01/01/2005 TM)")));
        assert!(!is(&with(PROGRAM, "XORRISO-1.5.4")));
        assert!(!is(&with(MAKERS[0], "DEBIAN, AS MICROSOFT DOES")));
        // Another descriptor, another file system, and whatever ends too early.
        let mut other = cd.clone();
        other[at] = 2;
        assert!(!is(&other));
        for length in [0, 1, at, at + 7, at + LENGTH - 1] {
            assert!(!is(&cd[..length]), "{length}");
        }
        assert!(is(&cd[..at + LENGTH]));
        assert!(!is_microsofts(folder.path()) && !is_microsofts(Path::new("/dev/zero")));
        assert!(!is_microsofts(&folder.path().join("gone.iso")));
    }
}
