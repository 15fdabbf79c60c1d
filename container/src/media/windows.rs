//! Windows installation media: editions, language, build and architecture, read from the WIM.

use std::fmt;

use anyhow::{Context as _, bail, ensure};
use host::disk::Patch;

use super::noprompt::{self, Question};
use super::wim::{self, Architecture, Entry};
use super::{FileSystem, Image, Truncated};

/// Places of the images to install. The last two are those of media for 32 and 64 bits.
const SOURCES: [&str; 5] = [
    "sources/install.wim",
    "sources/install.esd",
    "sources/install.swm",
    "x64/sources/install.esd",
    "x64/sources/install.wim",
];
/// Maximum number of editions in a description.
const MAX_SHOWN: usize = 4;
/// First builds of clients and of servers, newest first.
const CLIENTS: [(u32, &str); 6] = [
    (22000, "Windows 11"),
    (10240, "Windows 10"),
    (9600, "Windows 8.1"),
    (9200, "Windows 8"),
    (7600, "Windows 7"),
    (0, "Windows"),
];
const SERVERS: [(u32, &str); 8] = [
    (26100, "Windows Server 2025"),
    (20348, "Windows Server 2022"),
    (17763, "Windows Server 2019"),
    (14393, "Windows Server 2016"),
    (9600, "Windows Server 2012 R2"),
    (9200, "Windows Server 2012"),
    (7600, "Windows Server 2008 R2"),
    (0, "Windows Server"),
];
/// Edition IDs, in lower case, and the words of `EDITION` for them. Others are their own word.
const WORDS: [(&str, &[&str]); 16] = [
    ("core", &["home"]),
    ("coren", &["homen"]),
    ("coresinglelanguage", &["homesinglelanguage", "homesl"]),
    ("professional", &["pro"]),
    ("professionaln", &["pron"]),
    ("professionaleducation", &["proeducation"]),
    ("professionaleducationn", &["proeducationn"]),
    ("professionalworkstation", &["proworkstation", "proworkstations", "proforworkstations"]),
    ("professionalworkstationn", &["proworkstationn", "proworkstationsn", "pronforworkstations"]),
    ("enterprises", &["ltsc", "enterpriseltsc"]),
    ("iotenterprise", &["iot"]),
    ("iotenterprises", &["iot", "iotltsc", "iotenterpriseltsc", "enterpriseiot"]),
    ("serverhypercore", &["hv", "hyperv"]),
    ("serverdatacenter", &["datacenter"]),
    ("serverturbine", &["azure", "datacenterazure", "datacenterazureedition"]),
    ("serverstandard", &["standard"]),
];

/// A medium from which Windows can be installed here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Media {
    /// Path of the WIM on the CD.
    pub source: &'static str,
    /// The images that are Windows for x64. There is at least one.
    pub editions: Vec<Entry>,
    pub question: Question,
}

/// Reads what a CD installs. `None` if it has no Windows to install. An error is a sentence on why
/// it cannot be installed.
pub fn analyze(image: &(impl Image + ?Sized)) -> anyhow::Result<Option<Media>> {
    find(image).map_err(|error| match error.downcast_ref::<Truncated>() {
        Some(truncated) => anyhow::anyhow!("it is cut off ({truncated}): download it again"),
        None => error,
    })
}

fn find(image: &(impl Image + ?Sized)) -> anyhow::Result<Option<Media>> {
    let Some(files) = FileSystem::open(image)? else { return Ok(None) };
    for source in SOURCES {
        let Some(file) = files.find(image, source)? else { continue };
        file.check(image).context(source)?;
        let all = wim::images(image, &file).context(source)?;
        let question = noprompt::question(image, &files)?;
        return Ok(Some(Media { source, editions: editions(all)?, question }));
    }
    Ok(None)
}

/// The images that can be installed on this machine.
fn editions(all: Vec<Entry>) -> anyhow::Result<Vec<Entry>> {
    // An ESD begins with the files of the CD, Windows PE and Setup.
    let is_windows = |entry: &Entry| {
        !entry.edition_id.is_empty() && !entry.installation_type.eq_ignore_ascii_case("WindowsPE")
    };
    let (windows, _): (Vec<_>, Vec<_>) = all.into_iter().partition(is_windows);
    let Some(first) = windows.first() else {
        bail!("its WIM has no edition of Windows: use an ISO of Microsoft's");
    };
    let architecture = first.architecture;
    let fitting: Vec<_> =
        windows.into_iter().filter(|it| it.architecture == Architecture::Amd64).collect();
    let other = match architecture {
        Architecture::Arm | Architecture::Arm64 => "for ARM processors",
        Architecture::X86 => "for 32 bits",
        Architecture::Ia64 => "for Itanium processors",
        Architecture::Amd64 | Architecture::Unknown => "for an unknown processor",
    };
    ensure!(
        !fitting.is_empty(),
        "its Windows is {other} ({}), and this machine has an x64 one: use the ISO for x64",
        architecture.name()
    );
    Ok(fitting)
}

impl Media {
    fn first(&self) -> &Entry {
        &self.editions[0]
    }

    /// The patch with which the CD starts without its question.
    pub fn patch(&self) -> Option<&Patch> {
        match &self.question {
            Question::Avoided(patch) => Some(patch),
            Question::Never | Question::Asked => None,
        }
    }

    pub fn is_server(&self) -> bool {
        self.first().is_server()
    }

    /// Whether Windows expires: no product key activates it.
    pub fn is_evaluation(&self) -> bool {
        self.editions.iter().all(Entry::is_evaluation)
    }

    /// The product, as in `Windows 11` or `Windows Server 2025`.
    pub fn product(&self) -> &'static str {
        let names: &[_] = if self.is_server() { &SERVERS } else { &CLIENTS };
        let build = self.first().version.build;
        names.iter().find(|(first, _)| *first <= build).map_or("Windows", |(_, name)| name)
    }

    /// Build and update, as in `26100.1742`.
    pub fn build(&self) -> String {
        let version = self.first().version;
        format!("{}.{}", version.build, version.service_pack_build)
    }

    /// The language of the first edition, as in `en-US`. Empty if the WIM has none.
    pub fn language(&self) -> &str {
        let first = self.first();
        let known = first.languages.first().map_or("", String::as_str);
        if first.default_language.is_empty() { known } else { &first.default_language }
    }

    /// Whether Windows can be installed in this language, as in `ko-KR`.
    pub fn has_language(&self, culture: &str) -> bool {
        let first = self.first();
        let mut all = first.languages.iter().chain([&first.default_language]);
        all.any(|it| it.eq_ignore_ascii_case(culture))
    }

    /// The edition that a value of `EDITION` names. Words may be separated or not.
    pub fn edition(&self, wanted: &str) -> Option<&Entry> {
        let wanted = bare(wanted);
        let exact = self.editions.iter().find(|it| {
            [&it.name, &it.display_name, &it.edition_id].iter().any(|name| bare(name) == wanted)
        });
        exact.or_else(|| self.editions.iter().find(|it| it.words().contains(&wanted)))
    }

    /// Names of the editions: at most [`MAX_SHOWN`], and how many more there are.
    pub fn names(&self) -> String {
        let shown: Vec<_> = self.editions.iter().take(MAX_SHOWN).map(Entry::shown).collect();
        match self.editions.len() - shown.len() {
            0 => shown.join(", "),
            more => format!("{} and {more} more", shown.join(", ")),
        }
    }
}

/// One line, as in `Windows 11 26200.6584, x64, ko-KR: Windows 11 Home, Windows 11 Pro`.
impl fmt::Display for Media {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (product, build, language) = (self.product(), self.build(), self.language());
        write!(f, "{product} {build}, x64")?;
        if !language.is_empty() {
            write!(f, ", {language}")?;
        }
        let kind = if self.is_evaluation() { " (evaluation)" } else { "" };
        write!(f, "{kind}: {}", self.names())
    }
}

impl Entry {
    pub fn is_server(&self) -> bool {
        let starts = |text: &str| text.get(..6).is_some_and(|it| it.eq_ignore_ascii_case("server"));
        starts(&self.installation_type) || starts(&self.edition_id)
    }

    /// Whether this is a server without a desktop.
    pub fn is_server_core(&self) -> bool {
        self.installation_type.eq_ignore_ascii_case("Server Core")
    }

    pub fn is_evaluation(&self) -> bool {
        self.edition_id.to_ascii_lowercase().ends_with("eval")
    }

    /// The name for people.
    pub fn shown(&self) -> &str {
        let names = [&self.display_name, &self.name, &self.edition_id];
        names.into_iter().find(|name| !name.is_empty()).map_or("", String::as_str)
    }

    /// The bare words of `EDITION` for this edition.
    pub fn words(&self) -> Vec<String> {
        let id = self.edition_id.to_ascii_lowercase();
        let id = id.strip_suffix("eval").unwrap_or(&id);
        let known = WORDS.iter().find(|(known, _)| *known == id).map(|(_, words)| *words);
        let mut words: Vec<String> =
            known.unwrap_or_default().iter().map(|&it| it.into()).collect();
        words.push(id.to_owned());
        if let Some(rest) = id.strip_prefix("server") {
            words.push(rest.to_owned());
        }
        if self.is_server_core() {
            words = words.iter().map(|word| format!("{word}core")).collect();
            // The reference image's word.
            if id == "serverstandard" {
                words.push("core".to_owned());
            }
        }
        words
    }
}

/// Letters and digits in lower case.
fn bare(text: &str) -> String {
    let letters = text.chars().filter(|it| it.is_alphanumeric());
    letters.flat_map(char::to_lowercase).collect()
}
