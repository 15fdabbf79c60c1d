//! The Windows that is installed: by VERSION and EDITION, or from the list of a medium.

use super::release::{self, Image, Release};
use crate::media::wim::Entry;
use crate::media::windows::Media;
use crate::settings::Windows;
use crate::settings::value::Value as _;
use crate::settings::version::Version;
use crate::status::{Failure, Status};

/// The editions of media that the user gives, the one to install first. It is the reference image's
/// order.
const CLIENTS: [&str; 7] = ["enterprise", "ultimate", "pro", "iot", "ltsc", "education", "home"];
const SERVERS: [&str; 10] = [
    "standard",
    "datacenter",
    "azure",
    "enterprise",
    "web",
    "foundation",
    "essentials",
    "standardcore",
    "datacentercore",
    "hv",
];
/// Editions of clients with identifiers of their own.
const KINDS: [(&str, &str); 4] = [
    ("enterprise", "-enterprise"),
    ("ltsc", "-enterprise-ltsc"),
    ("iotltsc", "-enterprise-iot"),
    ("iot", "-enterprise-iot"),
];

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The reference image's identifier, such as `win11x64-enterprise-eval`.
    pub id: String,
    pub release: Release,
    pub image: Image,
    /// The only language of the medium, if that is not the configured one.
    pub language: Option<String>,
    /// Whether it accepts remote desktops.
    pub remote: bool,
    /// A sentence about an edition that there is not.
    pub warning: Option<String>,
}

impl Target {
    /// The Windows that VERSION and EDITION name.
    ///
    /// # Errors
    ///
    /// If VERSION names a medium or the probe.
    pub fn of_version(windows: &Windows) -> anyhow::Result<Self> {
        let refuse = |sentence: &str| {
            let shown = windows.version.show();
            Err(Failure::new(Status::Version, format!("VERSION={shown}: {sentence}")))
        };
        let product = match &windows.version {
            Version::Probe => {
                return refuse("the probe needs no answer file: set it to a version of Windows");
            }
            Version::Url(_) | Version::File(_) => {
                return refuse(
                    "the Windows of this medium is known only when it is read: set it to a \
                     version of Windows, such as 11",
                );
            }
            Version::Windows(product) => product,
        };
        let Some(release) = Release::of(product.id) else {
            return refuse("it cannot be installed unattended: set MANUAL=Y");
        };
        let edition = windows.edition.as_ref().map(|edition| edition.0.as_str());
        let (image, known) = release::image(product.id, release, edition);
        let warning = edition.filter(|_| !known).map(|edition| {
            let (all, name) = (product.name, &image.name);
            format!("EDITION={edition}: {all} has no such edition: {name} is installed")
        });
        let remote = !image.name.contains(" Home") && image.name != "Windows 8.1";
        Ok(Self { id: product.id.to_owned(), release, image, language: None, remote, warning })
    }

    /// The Windows of a medium: the edition that EDITION names, or the usual one, or else the first
    /// in the reference image's order. `None` if it cannot be installed unattended.
    pub fn of_media(windows: &Windows, usual: Option<&str>, media: &Media) -> Option<Self> {
        let entry = edition(windows, usual, media);
        let release = match entry.edition_id.to_ascii_lowercase().starts_with("serverhyper") {
            true => Release::HyperV2019,
            false => Release::named(media.product())?,
        };
        let evaluation = entry.is_evaluation() || release == Release::HyperV2019;
        let words = entry.words();
        let name = (entry.index, entry.shown());
        let image = Image::listed(release, name, &words, evaluation);
        let has_language = media.has_language(windows.language.0.culture);
        let language = Some(media.language()).filter(|it| !it.is_empty() && !has_language);
        Some(Self {
            id: id(release, &words, entry.is_evaluation()),
            release,
            image,
            language: language.map(str::to_owned),
            remote: !entry.edition_id.to_ascii_lowercase().starts_with("core"),
            warning: None,
        })
    }
}

fn edition<'a>(windows: &Windows, usual: Option<&str>, media: &'a Media) -> &'a Entry {
    let order: &[&str] = if media.is_server() { &SERVERS } else { &CLIENTS };
    let asked = windows.edition.as_ref().map(|edition| edition.0.trim_end_matches("-eval"));
    let wanted = asked.into_iter().chain(usual).chain(order.iter().copied());
    wanted.into_iter().find_map(|word| media.edition(word)).unwrap_or(&media.editions[0])
}

fn id(release: Release, words: &[String], evaluation: bool) -> String {
    let kind = KINDS.iter().find(|(word, _)| words.iter().any(|it| it == word));
    let kind = kind.filter(|_| release.is_client()).map_or("", |(_, kind)| kind);
    format!("{}{kind}{}", release.id(), if evaluation { "-eval" } else { "" })
}

#[cfg(test)]
mod test {
    use super::super::release::Selection;
    use super::*;
    use crate::media::testutil::{Layout, image, install_cd};
    use crate::media::windows::analyze;
    use crate::settings::environment;

    fn target(words: &[(&str, &str)], usual: Option<&str>, all: &[(&str, &str)]) -> Target {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let windows = environment::read(&words).unwrap().settings.windows;
        let kind = |edition: &str, name: &str| match edition.starts_with("Server") {
            true if name.contains("Core") => "Server Core",
            true => "Server",
            false => "Client",
        };
        let listed = (1..).zip(all);
        let images: Vec<_> = listed
            .map(|(index, (name, edition))| image(index, name, edition, kind(edition, name), 9))
            .collect();
        let cd = install_cd(Layout::Bridge, &images);
        Target::of_media(&windows, usual, &analyze(&cd[..]).unwrap().unwrap()).unwrap()
    }

    /// Identifier, number, and whether there is a key.
    fn chosen(target: &Target) -> (&str, u32, bool) {
        let Selection::Index(index) = target.image.selection else { panic!("{target:?}") };
        (&target.id, index, target.image.key.is_some())
    }

    #[test]
    fn the_edition_is_chosen_in_the_reference_images_order() {
        let client = [
            ("Windows 11 Home", "Core"),
            ("Windows 11 Education", "Education"),
            ("Windows 11 Pro", "Professional"),
        ];
        let of = |words: &[(&str, &str)], usual| target(words, usual, &client);
        assert_eq!(chosen(&of(&[], None)), ("win11x64", 3, true));
        assert_eq!(chosen(&of(&[("EDITION", "home")], Some("pro"))), ("win11x64", 1, true));
        assert_eq!(chosen(&of(&[("EDITION", "education")], None)), ("win11x64", 2, true));
        assert_eq!(chosen(&of(&[("EDITION", "bakery")], None)), ("win11x64", 3, true));
        assert!(!of(&[("EDITION", "home")], None).remote && of(&[], None).remote);
        let all = [client[2], ("Windows 11 Enterprise", "Enterprise")];
        assert_eq!(chosen(&target(&[], None, &all)), ("win11x64-enterprise", 2, true));
        assert_eq!(chosen(&target(&[], Some("pro"), &all)), ("win11x64", 1, true));
        let unknown = [("Windows 11 X", "Strange"), ("Windows 11 Y", "Stranger")];
        assert_eq!(chosen(&target(&[], None, &unknown)), ("win11x64", 1, false));
    }

    #[test]
    fn evaluation_media_have_no_key() {
        let server = [
            ("Windows Server 2025 Standard Evaluation Core", "ServerStandardEval"),
            ("Windows Server 2025 Standard Evaluation", "ServerStandardEval"),
            ("Windows Server 2025 Datacenter Evaluation Core", "ServerDatacenterEval"),
            ("Windows Server 2025 Datacenter Evaluation", "ServerDatacenterEval"),
        ];
        let of = |edition: &str| target(&[("EDITION", edition)], None, &server);
        for (word, index) in [("", 2), ("core", 1), ("datacenter", 4), ("datacenter-core", 3)] {
            assert_eq!(chosen(&of(word)), ("win2025-eval", index, false), "{word}");
        }
        assert_eq!(of("core").release, Release::Server2025);
        let retail = server.map(|(name, _)| (name, "ServerStandard"));
        let key = target(&[], None, &retail).image.key;
        assert_eq!(key, Some("TVRH6-WHNXV-R9WG3-9XRFY-MY832"));
        let ltsc = [
            ("Windows 11 Enterprise LTSC Evaluation", "EnterpriseSEval"),
            ("Windows 11 IoT Enterprise LTSC Evaluation", "IoTEnterpriseSEval"),
        ];
        let of = |usual| target(&[], usual, &ltsc);
        assert_eq!(chosen(&of(Some("ltsc"))), ("win11x64-enterprise-ltsc-eval", 1, false));
        assert_eq!(chosen(&of(None)), ("win11x64-enterprise-iot-eval", 2, false));
        let hyper = target(&[], None, &[("Hyper-V Server", "ServerHyperCore")]);
        assert_eq!(
            (chosen(&hyper), hyper.release),
            (("win2019-hv", 1, false), Release::HyperV2019)
        );
    }

    #[test]
    fn the_language_is_one_that_the_medium_has() {
        let all = [("Windows 11 Pro", "Professional")];
        let of = |language| target(&[("LANGUAGE", language)], None, &all).language;
        assert_eq!(of("Korean"), None);
        assert_eq!(of("German").as_deref(), Some("ko-KR"));
    }
}
