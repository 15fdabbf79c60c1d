//! Reads the medium to install from, and compares settings with it.

use std::ffi::OsStr;
use std::path::Path;

use crate::media::Opened;
use crate::media::windows::{Media, analyze};
use crate::settings::environment::ParsedEnvironment;
use crate::settings::language::Language;
use crate::settings::value::{Value as _, quote};
use crate::settings::version::{Product, Version};
use crate::source::Source;
use crate::state::name;
use crate::status::{Failure, Status};

/// Reads the medium. One without Windows for this machine is an error, except with MANUAL=Y: then
/// it starts all the same, and the error is a warning.
pub(super) fn read(
    source: &Source,
    input: &mut ParsedEnvironment,
) -> anyhow::Result<Option<Media>> {
    let Source::Medium(path) = source else { return Ok(None) };
    let reason = match Opened::open(path).and_then(|image| analyze(&image)) {
        Ok(Some(media)) => return Ok(Some(media)),
        Ok(None) => "it has no Windows to install (no sources/install.wim, .esd or .swm): use an \
                     ISO of Microsoft's"
            .to_owned(),
        Err(error) => format!("{error:#}"),
    };
    let sentence = format!("{}: {reason}", path.show());
    if !input.settings.windows.manual {
        let sentence = format!("{sentence}, or set MANUAL=Y to start it as it is");
        return Err(Failure::new(Status::Iso, sentence));
    }
    input.warnings.push(format!("{sentence}: it is started as it is (MANUAL=Y)"));
    Ok(None)
}

/// Variables that contradict the medium, with a sentence on each.
pub(super) fn contradictions(
    input: &ParsedEnvironment,
    path: &Path,
    media: &Media,
) -> Vec<(&'static str, String)> {
    let windows = &input.settings.windows;
    let mut all = Vec::new();
    if let Version::Windows(product) = &windows.version
        && input.names.contains("VERSION")
        && !is_product(product, media)
    {
        let what = format!("it has {} ({})", media.product(), media.names());
        all.push(("VERSION", product.name.to_owned(), what + ", whatever VERSION says"));
    }
    if let Some(edition) = windows.edition.as_ref().filter(|it| media.edition(&it.0).is_none()) {
        let what = format!("it has only {}: choose one of them", media.names());
        all.push(("EDITION", edition.show(), what));
    }
    let culture = windows.language.0.culture;
    if input.names.contains("LANGUAGE") && !media.has_language(culture) {
        let language = media.language();
        let what = format!("it has {language} and not {culture}, so that Windows is in {language}");
        all.push(("LANGUAGE", windows.language.show(), what));
    }
    let path = quote(&path.display().to_string());
    let sentence = |(name, value, what)| (name, format!("{name}={value}: {path}: {what}"));
    all.into_iter().map(sentence).collect()
}

/// Whether a medium has the product and the edition of a `VERSION`.
pub(super) fn is_product(product: &Product, media: &Media) -> bool {
    let name = media.product();
    // The last word is a year or a number: `Hyper-V Server 2019`, `Tiny 11`.
    let last = |name: &'static str| name.split(' ').next_back();
    let same = product.name.starts_with(name) || last(product.name) == last(name);
    // As in `win11x64-enterprise-ltsc-eval`.
    let edition: Vec<_> = product.id.split('-').skip(1).filter(|word| *word != "eval").collect();
    same && (edition.is_empty() || media.edition(&edition.join("-")).is_some())
}

/// Whether VERSION selected this medium.
pub(super) fn selects(version: &Version, medium: &Path) -> bool {
    let name = medium.file_name().and_then(OsStr::to_str).unwrap_or_default();
    match version {
        Version::File(_) => true,
        Version::Url(url) => {
            let downloaded = name::of(version, Language::default().0);
            url.contains(name) || downloaded.as_deref() == Some(name)
        }
        Version::Windows(product) => name.starts_with(product.id),
        Version::Probe => false,
    }
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;
    use crate::media::testutil::{Layout, image, install_cd, windows_11};
    use crate::settings::environment::read as environment;

    fn input(words: &[(&str, &str)]) -> ParsedEnvironment {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        environment(&words).unwrap()
    }

    #[test]
    fn contradictions_are_one_line_each() {
        let cd = install_cd(Layout::Bridge, &windows_11(9));
        let media = analyze(&cd[..]).unwrap().unwrap();
        let of = |words: &[(&str, &str)]| -> Vec<String> {
            let all = contradictions(&input(words), Path::new("/custom.iso"), &media);
            all.into_iter().map(|(_, sentence)| sentence).collect()
        };
        let fits = [("VERSION", "11"), ("EDITION", "home"), ("LANGUAGE", "Korean")];
        for words in [&fits[..], &[("VERSION", "tiny11")], &[("EDITION", "Windows 11 Pro")]] {
            assert_eq!(of(words), [""; 0], "{words:?}");
        }
        let wrong = [("VERSION", "10"), ("EDITION", "datacenter"), ("LANGUAGE", "de")];
        assert_eq!(
            of(&wrong),
            [
                "VERSION=Windows 10 Pro: /custom.iso: it has Windows 11 (Windows 11 Home, Windows \
                 11 Pro), whatever VERSION says",
                "EDITION=datacenter: /custom.iso: it has only Windows 11 Home, Windows 11 Pro: \
                 choose one of them",
                "LANGUAGE=German: /custom.iso: it has ko-KR and not de-DE, so that Windows is in \
                 ko-KR",
            ]
        );
        // Defaults contradict nothing, and LTSC is not Pro.
        assert_eq!(of(&[]), [""; 0]);
        assert_eq!(of(&[("VERSION", "11l")]).len(), 1);

        let server = image(1, "Server", "ServerStandardEval", "Server Core", 9);
        let cd = install_cd(Layout::Iso, &[server]);
        let media = analyze(&cd[..]).unwrap().unwrap();
        let of = |edition: &str| {
            let input = input(&[("VERSION", "2025"), ("EDITION", edition)]);
            contradictions(&input, Path::new("/a.iso"), &media).len()
        };
        assert_eq!(["core", "standard-core", "Server"].map(of), [0; 3]);
        assert_eq!(["standard", "datacenter-core", "pro"].map(of), [1; 3]);
    }

    #[test]
    fn a_medium_without_windows_starts_only_by_hand() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.iso");
        let source = Source::Medium(path.clone());
        for (cd, words) in [
            (install_cd(Layout::Bridge, &windows_11(12)), "for ARM processors"),
            (install_cd(Layout::Bridge, &windows_11(0)), "for 32 bits"),
            (crate::media::testutil::cd(Layout::Bridge, &[]), "no Windows to install"),
            (vec![0; 1 << 16], "no Windows to install"),
        ] {
            fs::write(&path, cd).unwrap();
            let error = read(&source, &mut input(&[])).unwrap_err();
            assert_eq!(Status::of(&error), Status::Iso);
            let sentence = error.to_string();
            assert!(sentence.contains(words) && sentence.contains("MANUAL=Y"), "{sentence}");
            let mut manual = input(&[("MANUAL", "Y")]);
            assert_eq!(read(&source, &mut manual).unwrap(), None);
            assert!(manual.warnings.iter().any(|it| it.contains(words)), "{:?}", manual.warnings);
        }
        fs::write(&path, install_cd(Layout::Metadata, &windows_11(9))).unwrap();
        assert!(read(&source, &mut input(&[])).unwrap().is_some());
        let disk = Source::Disk(path);
        assert_eq!(read(&disk, &mut input(&[])).unwrap(), None);
    }
}
