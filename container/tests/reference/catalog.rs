//! The versions and languages of the reference image, row by row: what is written down in
//! `versions.txt` and `languages.txt` is what this image does. Nothing there comes from our lists.

use container::download::catalog::{self, Page};
use container::download::digest::Checksum;
use container::settings::language::Language;
use container::settings::value::{GIB, Value as _};
use container::settings::version::{Product, Version};
use container::state::name;

/// The cells of each row.
fn rows(text: &str) -> impl Iterator<Item = Vec<&str>> {
    let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.map(|line| line.split(" | ").collect())
}

/// Each word, as people write it.
fn spellings(word: &str) -> [String; 3] {
    [word.to_owned(), word.to_uppercase(), format!(" \"{word}\" ")]
}

/// The version that the pod reads.
fn version(word: &str) -> anyhow::Result<Version> {
    let environment = [("VERSION".into(), word.into())].into();
    Ok(container::settings::environment::read(&environment)?.settings.windows.version)
}

fn product(word: &str) -> &'static Product {
    match version(word) {
        Ok(Version::Windows(product)) => product,
        other => panic!("VERSION={word}: {other:?}"),
    }
}

/// A page as in the table.
fn page_of(id: &str) -> String {
    match catalog::page(id) {
        None => "-".into(),
        Some(Page::Consumer(url, number)) => {
            let page = url.strip_prefix("https://www.microsoft.com/en-us/");
            format!("{} {number}", page.unwrap_or(url))
        }
        Some(Page::Evaluation(name, number)) => format!("{name} {number}"),
        Some(other) => panic!("{id}: {other:?}"),
    }
}

fn upgrade_of(id: &str) -> &'static str {
    let catalog = if id.starts_with("win11") { 2_156_292 } else { 841_361 };
    match catalog::upgrade(id) {
        None => "-",
        Some(Page::Upgrade(number, edition)) if number == catalog => edition,
        Some(other) => panic!("{id}: {other:?}"),
    }
}

fn check_file(id: &str, wanted: &str) {
    let Some(file) = catalog::file(id) else { return assert_eq!(wanted, "-", "{id}") };
    let parts: Vec<_> = wanted.split(' ').collect();
    let [length, digits, url] = parts[..] else { panic!("{id} has a file") };
    assert_eq!((file.length.to_string().as_str(), file.url), (length, url));
    assert_eq!(file.checksum(), Checksum::sha256(digits).ok(), "{id}");
    // A page leads to the same file.
    let own = url.rsplit('/').next().and_then(catalog::named);
    assert_eq!(own.map(|file| file.id), Some(id));
}

#[test]
fn each_version_of_the_reference_image_is_known_by_each_word_and_has_its_sources() {
    let english = Language::default().0;
    let all = rows(include_str!("versions.txt")).filter(|row| row.len() > 2);
    let (mut count, mut words) = (0, 0);
    for row in all {
        let [names, id, needs, page, upgrade, file] = row[..] else { panic!("{row:?}") };
        for word in names.split(", ").chain([id]) {
            for spelling in spellings(word) {
                assert_eq!(product(&spelling).id, id, "VERSION={spelling}");
            }
            words += 1;
        }
        let version = Version::Windows(product(id));
        assert_eq!(name::of(&version, english), Some(format!("{id}.iso")));
        let (memory, disk) = version.needs();
        assert_eq!(format!("{}, {}", memory / GIB, disk / GIB), needs, "{id}");
        assert_eq!((page_of(id).as_str(), upgrade_of(id)), (page, upgrade), "{id}");
        check_file(id, file);
        let is_offered = [page, file].iter().any(|it| *it != "-");
        let refusal = catalog::refusal(product(id));
        assert_eq!(refusal.is_none(), is_offered, "{id}: {refusal:?}");
        assert!(refusal.is_none_or(|it| it.contains("mount it as /custom.iso")), "{id}");
        count += 1;
    }
    assert_eq!((count, words), (19, 121));
}

#[test]
fn each_version_with_a_bios_is_refused_by_name() {
    let mut count = 0;
    for row in rows(include_str!("versions.txt")).filter(|row| row.len() == 2) {
        for word in row[0].split(", ").flat_map(spellings) {
            let error = format!("{:#}", version(&word).unwrap_err());
            let wanted = format!(": {} needs a BIOS, and this machine has UEFI: ", row[1]);
            assert!(error.contains(&wanted), "{error}");
        }
        count += 1;
    }
    assert_eq!(count, 21);
}

#[test]
fn each_language_of_the_reference_image_is_known_by_each_word() {
    let eleven = Version::Windows(product("11"));
    let mut count = 0;
    for row in rows(include_str!("languages.txt")) {
        let [words, code, called, culture] = row[..] else { panic!("{row:?}") };
        for word in words.split(" / ").map(|word| word.replace('*', "xx")) {
            for spelling in [word.clone(), word.to_uppercase(), word.replace('-', "_")] {
                let language = Language::read(&spelling).unwrap().0;
                let found = (language.code, language.name, language.culture);
                assert_eq!(found, (code, called, culture), "LANGUAGE={spelling}");
            }
        }
        let medium = name::of(&eleven, Language::read(culture).unwrap().0).unwrap();
        let language = culture.split('-').next().unwrap().to_lowercase();
        let end = if language == "en" { String::new() } else { format!("_{language}") };
        assert_eq!(medium, format!("win11x64{end}.iso"));
        count += 1;
    }
    assert_eq!(count, 39);
}
