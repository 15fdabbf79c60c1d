//! Texts as Windows reads them: lines end with CR LF, and `cmd` reads no UTF-16 and no byte order
//! mark.

use std::path::Path;
use std::string::FromUtf16Error;

/// Extensions of texts that are converted. Signatures of drivers cover their `.inf` files as they
/// are.
const TEXTS: [&str; 10] = ["bat", "cmd", "ini", "ps1", "psd1", "psm1", "reg", "txt", "vbs", "js"];
const SCRIPTS: [&str; 2] = ["bat", "cmd"];
const UTF8_MARK: &[u8] = b"\xef\xbb\xbf";
const UTF16_MARK: &[u8] = b"\xff\xfe";
const BIG_ENDIAN_MARK: &[u8] = b"\xfe\xff";

pub(super) fn is_text(path: &Path) -> bool {
    has(path, &TEXTS)
}

fn has(path: &Path, extensions: &[&str]) -> bool {
    path.extension().is_some_and(|it| extensions.iter().any(|other| it.eq_ignore_ascii_case(other)))
}

/// The text with Windows' ends of lines. Other bytes stay as they are.
pub(super) fn converted(path: &Path, bytes: Vec<u8>) -> Vec<u8> {
    if has(path, &SCRIPTS) {
        return script(&bytes);
    }
    match wide(&bytes) {
        Some(Ok(text)) => {
            let lines = lines(text.as_bytes());
            let units = String::from_utf8_lossy(&lines);
            let units = units.encode_utf16().flat_map(u16::to_le_bytes);
            UTF16_MARK.iter().copied().chain(units).collect()
        }
        None if !bytes.contains(&0) => lines(&bytes),
        _ => bytes,
    }
}

/// The text of a script for `cmd`, in UTF-8 if it was in UTF-16, and with Windows' ends of lines.
pub(crate) fn script(bytes: &[u8]) -> Vec<u8> {
    match wide(bytes) {
        Some(Ok(text)) => lines(text.as_bytes()),
        None if !bytes.contains(&0) => lines(bytes.strip_prefix(UTF8_MARK).unwrap_or(bytes)),
        _ => bytes.to_vec(),
    }
}

/// The text of UTF-16 with a mark of its order.
fn wide(bytes: &[u8]) -> Option<Result<String, FromUtf16Error>> {
    let text = |bytes: &[u8], unit: fn([u8; 2]) -> u16| {
        let units: Vec<u16> = bytes.as_chunks().0.iter().copied().map(unit).collect();
        String::from_utf16(&units)
    };
    let little = bytes.strip_prefix(UTF16_MARK).map(|it| text(it, u16::from_le_bytes));
    little.or_else(|| Some(text(bytes.strip_prefix(BIG_ENDIAN_MARK)?, u16::from_be_bytes)))
}

fn lines(text: &[u8]) -> Vec<u8> {
    let mut lines = Vec::with_capacity(text.len() + text.len() / 16);
    let mut before = 0;
    for byte in text {
        if *byte == b'\n' && before != b'\r' {
            lines.push(b'\r');
        }
        lines.push(*byte);
        before = *byte;
    }
    lines
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn lines_end_as_windows_has_them() {
        let of = |name: &str, bytes: &[u8]| converted(Path::new(name), bytes.to_vec());
        assert_eq!(of("a.bat", b"a\nb\r\nc\r\r\n\n"), b"a\r\nb\r\nc\r\r\n\r\n");
        assert_eq!(of("a.bat", b"\xef\xbb\xbf@echo\n"), b"@echo\r\n");
        assert_eq!(of("a.ps1", b"\xef\xbb\xbfx\n"), b"\xef\xbb\xbfx\r\n");
        // Not UTF-8, which Korean scripts often are.
        assert_eq!(of("a.cmd", b"\xb0\xa1\n"), b"\xb0\xa1\r\n");
        assert_eq!(of("a.txt", b"\0\n"), b"\0\n");
        assert_eq!(of("a.reg", b"\xff\xfea\0\n\0"), b"\xff\xfea\0\r\0\n\0");
        assert_eq!(of("a.bat", b"\xff\xfea\0\n\0"), b"a\r\n");
        assert_eq!(of("a.bat", b"\xfe\xff\0a\0\n"), b"a\r\n");
        // Half a pair of surrogates.
        assert_eq!(of("a.reg", b"\xff\xfe\0\xd8\n\0"), b"\xff\xfe\0\xd8\n\0");
        assert!(is_text(Path::new("x/A.BAT")) && !is_text(Path::new("a.inf")));
    }
}
