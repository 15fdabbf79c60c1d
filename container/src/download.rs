//! Gets the installation medium for a `VERSION`: from Microsoft, or from the address of the user.
//!
//! A version has up to three sources: a page that gives links, a file at a fixed address, and the
//! catalog of upgrade images, which become CDs. If the medium is not to be had in the language, it
//! is tried in English. Each failure is logged, and the last error has all of them.

pub mod address;
pub mod ask;
pub mod cab;
pub mod catalog;
pub mod client;
mod connect;
pub mod consumer;
pub mod digest;
pub mod drivers;
pub mod esd;
pub mod evaluation;
pub mod fault;
pub mod meter;
pub mod pieces;
mod reach;
pub mod sidecar;
mod size;
pub mod transfer;
mod upgrade;

use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use host::uuid::Uuid;

use self::ask::{Link, go};
use self::catalog::Page;
use self::client::{Client, Patience};
use self::consumer::Consumer;
use self::digest::Checksum;
use self::esd::Esd;
use self::evaluation::Evaluation;
use self::fault::Fault;
use self::transfer::{Form, Wanted};
use crate::settings::Settings;
use crate::settings::language::{Language, Row};
use crate::settings::value::quote;
use crate::settings::version::{Product, Version, without_secrets};
use crate::state::name;
use crate::status::{Failure, Status};
use crate::story::Story;

/// Ends of addresses that are no CDs, and what to do with each.
const ARCHIVES: [&str; 10] =
    [".zip", ".7z", ".rar", ".tar", ".gz", ".xz", ".bz2", ".cab", ".lzma", ".wim"];
/// End of addresses of upgrade images.
const UPGRADE: &str = ".esd";

/// Why a version cannot be downloaded. Nothing has been requested yet.
pub fn refusal(version: &Version) -> Option<anyhow::Error> {
    let sentence = match version {
        Version::Windows(product) => catalog::refusal(product)?,
        Version::Url(url) => {
            let path = path_of(url);
            ARCHIVES.iter().find(|end| path.ends_with(**end))?;
            let shown = quote(&without_secrets(url));
            format!("VERSION={shown}: it is not an ISO image: give the address of one")
        }
        Version::Probe | Version::File(_) => return None,
    };
    Some(Failure::new(Status::Download, sentence))
}

/// The name of the upgrade image on the volume, until it is the CD with this name.
pub fn upgrade_file(cd: &str) -> String {
    format!("{}{UPGRADE}", cd.strip_suffix(".iso").unwrap_or(cd))
}

fn path_of(url: &str) -> String {
    url.split(['?', '#']).next().unwrap_or_default().to_lowercase()
}

/// A medium to get.
pub struct Job {
    client: Client,
    version: Version,
    language: &'static Row,
    folder: PathBuf,
    connections: usize,
    /// Microsoft is asked, and its catalog of upgrade images, too.
    asks: bool,
    upgrades: bool,
}

/// A source of a version.
enum Place {
    Page(Page),
    File(&'static catalog::File),
}

impl Job {
    /// A job for the volume at this path.
    pub fn new(settings: &Settings, folder: &Path) -> anyhow::Result<Self> {
        Self::with(settings, folder, Patience::default())
    }

    pub fn with(settings: &Settings, folder: &Path, patience: Patience) -> anyhow::Result<Self> {
        let media = &settings.media;
        let fail = |error: anyhow::Error| Failure::new(Status::Download, format!("{error:#}"));
        Ok(Self {
            client: Client::new(&settings.web, patience).map_err(fail)?,
            version: settings.windows.version.clone(),
            language: settings.windows.language.0,
            folder: folder.to_owned(),
            connections: usize::try_from(media.connections.0).unwrap_or(1),
            asks: media.mido,
            upgrades: media.esd,
        })
    }

    /// Checks that MIDO allows the download.
    pub fn check_allowed(&self) -> anyhow::Result<()> {
        let microsofts = matches!(self.version, Version::Windows(_));
        let allowed =
            self.asks || !microsofts || self.folder.join(upgrade_file(&self.file())).exists();
        let forbidden = || self.error(&[Fault::last("MIDO=N forbids to ask Microsoft")]);
        if allowed { Ok(()) } else { Err(forbidden()) }
    }

    /// Downloads the medium. Returns its path.
    pub async fn run(&self, story: &Story) -> anyhow::Result<PathBuf> {
        self.check_allowed()?;
        let upgrade = self.folder.join(upgrade_file(&self.file()));
        if upgrade.exists() {
            // It may be the user's, who may have no other.
            let made = self.make_cd(&upgrade, story);
            return made.map_err(|fault| self.error(&[fault]));
        }
        let got = match &self.version {
            Version::Url(url) => self.fetch_address(url, story).await.map_err(|fault| vec![fault]),
            Version::Windows(product) => self.fetch_windows(product, story).await,
            Version::Probe | Version::File(_) => unreachable!("nothing to download"),
        };
        got.map_err(|faults| self.error(&faults))
    }

    fn error(&self, faults: &[Fault]) -> anyhow::Error {
        let name = title(&self.version);
        let reasons: Vec<_> = faults.iter().map(Fault::to_string).collect();
        let reasons = reasons.join("; ");
        if faults.iter().any(|fault| matches!(fault, Fault::Host(_))) {
            return Failure::new(Status::Download, format!("{name}: {reasons}"));
        }
        let out = match &self.version {
            Version::Windows(_) => {
                let file = self.file();
                format!("mount its ISO as /custom.iso, or copy it onto the volume as {file}")
            }
            _ => "correct the address, or mount the ISO as /custom.iso".into(),
        };
        let sentence = format!("{name} cannot be downloaded: {reasons}: {out}");
        Failure::new(Status::Download, sentence)
    }

    async fn fetch_address(&self, url: &str, story: &Story) -> Result<PathBuf, Fault> {
        let checksum = match url.split_once("#sha256=") {
            Some((_, digits)) => Some(Checksum::sha256(digits)?),
            None => None,
        };
        let link = Link { url: url.to_owned(), referer: None, length: None, checksum };
        match path_of(url).ends_with(UPGRADE) {
            true => self.fetch_upgrade(link, story).await,
            false => self.fetch(link, story).await,
        }
    }

    async fn fetch_windows(
        &self,
        product: &'static Product,
        story: &Story,
    ) -> Result<PathBuf, Vec<Fault>> {
        let english = Language::default().0;
        let mut faults = Vec::new();
        for language in [self.language, english] {
            for place in self.places(product, language.code == english.code) {
                match self.fetch_from(&place, product, language, story).await {
                    Ok(path) => return Ok(path),
                    Err(fault) => {
                        story.warn(&format!("{}: {fault}", place.name()));
                        let ends = matches!(fault, Fault::Host(_));
                        faults.push(fault);
                        if ends {
                            return Err(faults);
                        }
                    }
                }
            }
            if language.code == english.code {
                break;
            }
            let what = format!("{} is not to be had in {}", shown(product), language.name);
            story.warn(&format!("{what}: it is downloaded in English"));
        }
        Err(faults)
    }

    async fn fetch_from(
        &self,
        place: &Place,
        product: &Product,
        language: &'static Row,
        story: &Story,
    ) -> Result<PathBuf, Fault> {
        let link = match place {
            Place::File(file) => Link {
                url: file.url.to_owned(),
                referer: None,
                length: Some(file.length),
                checksum: file.checksum(),
            },
            Place::Page(page) => {
                let shown = shown(product);
                story.step(&format!("Requesting {shown} from the Microsoft servers…"));
                transfer::again(&self.client, || self.ask(*page, language)).await?
            }
        };
        match place {
            Place::Page(Page::Upgrade(..)) => self.fetch_upgrade(link, story).await,
            _ => self.fetch(link, story).await,
        }
    }

    async fn ask(&self, page: Page, language: &'static Row) -> Result<Link, Fault> {
        match page {
            Page::Consumer(url, edition) => {
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let now = u64::try_from(since.as_millis()).unwrap_or(0);
                let session = Uuid::random()?;
                go(&self.client, &mut Consumer::new(url, edition, language.name, session, now))
                    .await
            }
            Page::Evaluation(name, number) => {
                go(&self.client, &mut Evaluation::new(name, language.culture, number)).await
            }
            Page::Upgrade(catalog, edition) => {
                let culture = language.culture;
                go(&self.client, &mut Esd { catalog, edition, culture }).await
            }
        }
    }

    fn places(&self, product: &Product, english: bool) -> Vec<Place> {
        let page = catalog::page(product.id).map(Place::Page);
        let file = catalog::file(product.id).filter(|_| english).map(Place::File);
        let upgrade = catalog::upgrade(product.id).filter(|_| self.upgrades).map(Place::Page);
        page.into_iter().chain(file).chain(upgrade).collect()
    }

    /// The name of the medium on the volume, in whatever language it is to be had.
    fn file(&self) -> String {
        name::of(&self.version, self.language).unwrap_or_default()
    }

    async fn fetch(&self, link: Link, story: &Story) -> Result<PathBuf, Fault> {
        let wanted = self.wanted(link, self.file(), Form::Cd);
        transfer::fetch(&self.client, &wanted, story).await?;
        Ok(wanted.path)
    }

    fn wanted(&self, link: Link, file: String, form: Form) -> Wanted {
        let Link { url, referer, length, checksum } = link;
        let path = self.folder.join(file);
        let name = title(&self.version);
        let connections = self.connections;
        Wanted { name, url, referer, path, length, checksum, connections, form }
    }

    /// Downloads an upgrade image, and makes a CD of it.
    async fn fetch_upgrade(&self, link: Link, story: &Story) -> Result<PathBuf, Fault> {
        let wanted = self.wanted(link, upgrade_file(&self.file()), Form::Upgrade);
        transfer::fetch(&self.client, &wanted, story).await?;
        let made = self.make_cd(&wanted.path, story);
        if matches!(made, Err(Fault::Final(_))) {
            std::fs::remove_file(&wanted.path).ok();
        }
        made
    }

    fn make_cd(&self, upgrade: &Path, story: &Story) -> Result<PathBuf, Fault> {
        let path = self.folder.join(self.file());
        upgrade::make(upgrade, &path, &title(&self.version), story)?;
        Ok(path)
    }
}

impl Place {
    fn name(&self) -> &'static str {
        match self {
            Self::Page(Page::Consumer(..)) => "Microsoft's download page",
            Self::Page(Page::Evaluation(..)) => "Microsoft's evaluation centre",
            Self::Page(Page::Upgrade(..)) => "Microsoft's catalog of upgrade images",
            Self::File(_) => "Microsoft's file server",
        }
    }
}

/// The name of a version in the log: programs look for the reference image's `Windows 11`.
fn shown(product: &Product) -> &'static str {
    product.name.strip_suffix(" Pro").unwrap_or(product.name)
}

/// The name of a download in the log.
pub fn title(version: &Version) -> String {
    match version {
        Version::Windows(product) => shown(product).to_owned(),
        other => other.name(),
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn archives_are_refused_before_they_are_downloaded() {
        let of = |url: &str| refusal(&Version::Url(url.into())).map(|error| error.to_string());
        assert_eq!(of("https://a/b.iso?x=.zip"), None);
        assert_eq!(of("https://a/b"), None);
        assert_eq!(of("https://a/b.esd"), None);
        let sentence = of("https://me:hush@a/b.WIM?sig=hush").unwrap();
        assert!(sentence.contains("not an ISO image") && !sentence.contains("hush"), "{sentence}");
    }
}
