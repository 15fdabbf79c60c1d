//! Names of media in `windows.base`, as the reference image makes them: it compares them with what
//! its settings ask for, and so do we.

use crate::settings::language::Row;
use crate::settings::version::Version;

/// Start of the names of media that the user gives. The number of bytes follows, so that another
/// medium has another name.
const CUSTOM: &str = "windows.";
/// Maximum length of a file name.
const MAX_LENGTH: usize = 200;
/// Maximum length of a name before its extension and its beginning are added.
const MAX_STEM: usize = 180;
/// Beginnings of names that mean something else on a volume.
const TAKEN: [&str; 7] =
    ["start.iso", "mount.iso", "drivers.iso", "custom.iso", "boot.iso", DRIVERS, "."];
/// Start of the names of ISO images with Windows' drivers, as their makers name them.
pub const DRIVERS: &str = "virtio-win";
/// Extensions of downloads that contain a medium, and are not kept in its name.
const PACKED: [&str; 10] = ["7z", "zip", "rar", "tar", "cab", "cpio", "lzh", "lha", "xar", "esd"];

/// The name of a medium of the user's.
pub fn of_custom(bytes: u64) -> String {
    format!("{CUSTOM}{bytes}.iso")
}

pub fn is_custom(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let bytes = name.strip_prefix(CUSTOM).and_then(|rest| rest.strip_suffix(".iso"));
    bytes.is_some_and(|it| !it.is_empty() && it.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The name of a medium that is downloaded. `None` if the version is none.
pub fn of(version: &Version, language: &Row) -> Option<String> {
    match version {
        Version::Windows(product) => Some(of_product(product.id, language)),
        Version::Url(url) => Some(of_url(url)),
        Version::Probe | Version::File(_) => None,
    }
}

/// The language is that of the culture, and is left out for English.
fn of_product(id: &str, language: &Row) -> String {
    match language.culture.split('-').next() {
        None | Some("en") => format!("{id}.iso"),
        Some(language) => format!("{id}_{}.iso", language.to_ascii_lowercase()),
    }
}

/// The name of the ISO image with Windows' drivers from this address.
pub fn of_drivers(url: &str) -> String {
    let name = end_of(url);
    if name.to_ascii_lowercase().starts_with(DRIVERS) { name } else { format!("{DRIVERS}-{name}") }
}

fn of_url(url: &str) -> String {
    let name = end_of(url);
    let small = name.to_ascii_lowercase();
    let is_taken = is_custom(&name) || TAKEN.iter().any(|taken| small.starts_with(taken));
    if is_taken { format!("windows-{name}") } else { name }
}

/// The last part of the address, without what a file name should not have, and with `.iso`.
fn end_of(url: &str) -> String {
    let path = url.split(['?', '#']).next().unwrap_or_default().trim_end_matches('/');
    let last = decoded(path.rsplit('/').next().unwrap_or_default());
    let kept = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let plain = last.into_iter().map(|byte| if kept(byte) { char::from(byte) } else { '_' });
    with_end(&plain.take(MAX_STEM).collect::<String>())
}

/// Bytes of a text in which `%` begins two hexadecimal digits.
fn decoded(text: &str) -> Vec<u8> {
    let mut rest = text.as_bytes();
    let mut bytes = Vec::new();
    while let Some((first, behind)) = rest.split_first() {
        let digits = behind.get(..2).filter(|_| *first == b'%');
        let digits = digits.and_then(|it| std::str::from_utf8(it).ok());
        let byte = digits.and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &behind[2..] } else { behind };
    }
    bytes
}

/// The name with `.iso` at its end, in place of the extension of an archive.
fn with_end(name: &str) -> String {
    let (stem, end) = name.rsplit_once('.').unwrap_or((name, ""));
    let end = end.to_ascii_lowercase();
    let name = match &*end {
        "iso" => return name.to_owned(),
        end if PACKED.contains(&end) => stem,
        _ => name,
    };
    if name.is_empty() { "download.iso".into() } else { format!("{name}.iso") }
}

/// The name that a `windows.base` has, or `None` if it cannot be one. Old versions wrote the name
/// of the download.
pub fn of_base(text: &str) -> Option<String> {
    let plain = !text.starts_with('.') && !text.contains('/') && !text.contains(char::is_control);
    (plain && text.len() <= MAX_LENGTH).then(|| with_end(text))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::language::Language;
    use crate::settings::value::Value as _;

    #[test]
    fn names_are_those_of_the_reference() {
        let name = |version: &str, language: &str| {
            let language = Language::read(language).unwrap();
            of(&Version::read(version).unwrap(), language.0)
        };
        for (version, language, made) in [
            ("11", "en", "win11x64.iso"),
            ("11", "British", "win11x64.iso"),
            ("11", "fr-CA", "win11x64_fr.iso"),
            ("10l", "no", "win10x64-enterprise-ltsc-eval_nb.iso"),
            ("2025", "pt-PT", "win2025-eval_pt.iso"),
            ("2022", "hk", "win2022-eval_zh.iso"),
            ("https://example.com/a/Win%2011%E9.iso?sig=1", "en", "Win_11_.iso"),
            ("https://example.com/b.ESD#x", "en", "b.iso"),
            ("https://example.com/b.zip", "ko", "b.iso"),
            ("https://example.com/get", "en", "get.iso"),
            ("https://example.com/%2e%2e%2f", "en", "windows-.._.iso"),
            ("https://example.com/x/..%2f..%2fetc.iso", "en", "windows-.._.._etc.iso"),
            ("https://example.com/Custom.iso", "en", "windows-Custom.iso"),
            ("https://example.com/windows.7.iso", "en", "windows-windows.7.iso"),
            ("https://example.com/virtio-win-1.iso", "en", "windows-virtio-win-1.iso"),
            ("https://example.com/drivers.iso", "en", "windows-drivers.iso"),
            ("https://example.com/a%zz%", "en", "a_zz_.iso"),
        ] {
            assert_eq!(name(version, language).as_deref(), Some(made), "{version} {language}");
        }
        assert_eq!((name("my.iso", "en"), name("probe", "en")), (None, None));
        let long = of_url(&format!("https://example.com/virtio-win{}", "x".repeat(999)));
        assert_eq!(of_base(&long), Some(long));
        assert!(is_custom(&of_custom(7)) && is_custom("Windows.1.iso"));
        assert!(!is_custom("win11x64.iso") && !is_custom("windows.x.iso"));
    }

    #[test]
    fn drivers_have_a_name_by_which_they_are_found() {
        for (url, made) in [
            ("https://example.com/virtio-win-0.1.271.iso#sha256=1", "virtio-win-0.1.271.iso"),
            ("https://example.com/Virtio-Win.iso", "Virtio-Win.iso"),
            ("https://example.com/v.iso?x=virtio-win", "virtio-win-v.iso"),
            ("https://example.com/..%2fv", "virtio-win-.._v.iso"),
        ] {
            assert_eq!(of_drivers(url), made, "{url}");
        }
    }

    #[test]
    fn a_base_is_a_plain_file_name() {
        assert_eq!(of_base("win11x64.iso").as_deref(), Some("win11x64.iso"));
        assert_eq!(of_base("en_windows.esd").as_deref(), Some("en_windows.iso"));
        assert_eq!(of_base("x.zip").as_deref(), Some("x.iso"));
        let long = "a".repeat(MAX_LENGTH + 1);
        for wrong in ["../x.iso", "/x.iso", ".x", "a\nb", "a\0b", &long] {
            assert_eq!(of_base(wrong), None, "{wrong:?}");
        }
    }
}
