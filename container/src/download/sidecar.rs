//! The file beside an unfinished download: which file it is, and which parts of it are there.
//!
//! Threats: others write to the volume, and a crash leaves anything. If the file does not fit, the
//! download starts again.

use std::io::Write as _;
use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::pieces::PIECE;
use crate::files;

/// Maximum length of an ETag. Longer ones are not kept.
const MAX_TAG: usize = 128;
/// The file must stay short enough to be read again. Parts beyond are fetched again.
const MAX_RUNS: usize = 64;

/// Identifies a version of a file on a server, as far as the server tells (RFC 9110 8.8).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    pub length: u64,
    /// A strong ETag, with its quotes.
    #[serde(default)]
    pub tag: Option<String>,
    #[serde(default)]
    pub modified: Option<String>,
    /// The known checksum, in hexadecimal digits.
    #[serde(default)]
    pub checksum: Option<String>,
}

impl Identity {
    pub fn new(length: u64, tag: Option<&str>, modified: Option<&str>) -> Self {
        let short = |text: &&str| text.len() <= MAX_TAG && text.is_ascii();
        let tag = tag.filter(short).filter(|tag| tag.starts_with('"')).map(str::to_owned);
        let modified = modified.filter(short).map(str::to_owned);
        Self { length, tag, modified, checksum: None }
    }

    /// Whether parts of the two belong together. A checksum is the best witness, since different
    /// servers have the same file.
    pub fn fits(&self, other: &Self) -> bool {
        let same = |one: &Option<String>, two: &Option<String>| one.is_some() && one == two;
        self.length == other.length
            && match (&self.checksum, &other.checksum) {
                (Some(one), Some(two)) => one == two,
                _ if self.tag.is_some() && other.tag.is_some() => self.tag == other.tag,
                _ => same(&self.modified, &other.modified),
            }
    }
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sidecar {
    #[serde(flatten)]
    pub identity: Identity,
    /// First byte and end of each part that is there and on the disk.
    pub done: Vec<(u64, u64)>,
}

impl Sidecar {
    pub fn new(identity: &Identity, done: &[Range<u64>]) -> Self {
        let done = done.iter().take(MAX_RUNS).map(|run| (run.start, run.end));
        Self { identity: identity.clone(), done: done.collect() }
    }

    /// Parses the text of a file, and checks that its parts are whole pieces in order.
    pub fn parse(text: &str) -> Option<Self> {
        let read: Self = serde_json::from_str(text).ok()?;
        let length = read.identity.length;
        let mut last = 0;
        for (start, end) in &read.done {
            let whole =
                start.is_multiple_of(PIECE) && (end.is_multiple_of(PIECE) || *end == length);
            if !whole || *start < last || end <= start || *end > length {
                return None;
            }
            last = *end;
        }
        Some(read)
    }

    pub fn read(path: &Path) -> Option<Self> {
        Self::parse(&files::read(path).ok()?)
    }

    pub fn write(&self, path: &Path) -> std::io::Result<()> {
        let text = serde_json::to_string(self)?;
        files::write(path, |file| file.write_all(text.as_bytes()))
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_sidecar_is_read_as_it_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let mut identity = Identity::new(900 * PIECE + 1, Some("\"x\\y\""), Some("Mon, 01 Jan"));
        identity.checksum = Some("a".repeat(64));
        let runs: Vec<_> = (0..100).map(|at| 8 * at * PIECE..(8 * at + 1) * PIECE).collect();
        let sidecar = Sidecar::new(&identity, &runs);
        sidecar.write(&path).unwrap();
        assert_eq!(Sidecar::read(&path).as_ref(), Some(&sidecar));
        assert_eq!(sidecar.done.len(), MAX_RUNS);
        assert!(Sidecar::read(&folder.path().join("none")).is_none());
    }

    #[test]
    fn a_sidecar_with_impossible_parts_is_not_believed() {
        let of = |done: &str| Sidecar::parse(&format!("{{\"length\":10000000,\"done\":{done}}}"));
        assert!(of("[[0,4194304],[8388608,10000000]]").is_some());
        for bad in [
            "[[0,1]]",
            "[[1,4194304]]",
            "[[4194304,0]]",
            "[[0,0]]",
            "[[0,8388608],[4194304,8388608]]",
            "[[0,12582912]]",
            "[[8388608,18446744073709551615]]",
            "[[-4194304,0]]",
            "null",
        ] {
            assert_eq!(of(bad), None, "{bad}");
        }
        for bad in ["", "{}", "[]", "{\"length\":-1,\"done\":[]}", "\u{0}"] {
            assert_eq!(Sidecar::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn parts_of_different_files_are_not_mixed() {
        let of = |tag, modified| Identity::new(9, tag, modified);
        let tagged = of(Some("\"a\""), Some("Monday"));
        assert!(tagged.fits(&of(Some("\"a\""), Some("Tuesday"))));
        assert!(!tagged.fits(&of(Some("\"b\""), Some("Monday"))));
        assert!(of(Some("W/\"a\""), Some("Monday")).fits(&of(None, Some("Monday"))));
        assert!(!of(None, None).fits(&of(None, None)));
        assert!(!tagged.fits(&Identity { length: 8, ..tagged.clone() }));
        let known = Identity { checksum: Some("1".into()), ..of(None, None) };
        assert!(known.fits(&Identity { checksum: Some("1".into()), ..tagged.clone() }));
        assert!(!known.fits(&Identity { checksum: Some("2".into()), ..of(None, None) }));
    }
}
