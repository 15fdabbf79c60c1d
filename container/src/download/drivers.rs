//! The ISO image with Windows' drivers (virtio-win): the usual one, or that of an address of the
//! user.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::client::{Client, Patience};
use super::digest::Checksum;
use super::fault::Fault;
use super::transfer::{self, Form, Wanted};
use crate::settings::Settings;
use crate::settings::version::without_secrets;
use crate::settings::words::DriversFrom;
use crate::state::name;
use crate::status::{Failure, Status};
use crate::story::Story;

/// The image that is downloaded by default. Its makers publish no checksum. Packages for Arch Linux
/// and Nix, Packer templates and scripts of independent projects have this one, and others this
/// length. The next version, 0.1.285, damages page files (virtio-win/kvm-guest-drivers-windows,
/// issue 1614).
const URL: &str = "https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/\
                   archive-virtio/virtio-win-0.1.271-1/virtio-win-0.1.271.iso";
const LENGTH: u64 = 726_501_376;
const SHA256: &str = "bbe6166ad86a490caefad438fef8aa494926cb0a1b37fa1212925cfd81656429";
/// Failures in a row before a check ends. The download itself has more patience.
const CHECKS: u32 = 4;
/// Mark of a checksum at the end of an address.
const CHECKSUM: &str = "#sha256=";

/// An image at an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    pub url: String,
    pub length: Option<u64>,
    pub checksum: Option<Checksum>,
    /// The user has not asked for it, so that an installation goes on without it.
    pub is_usual: bool,
}

impl Remote {
    /// The image to download where no other is found. `None` if DRIVERS names a file, or none.
    pub fn of(settings: &Settings) -> anyhow::Result<Option<Self>> {
        match &settings.media.drivers {
            None => Self::at(URL).map(|usual| Some(Self { is_usual: true, ..usual })),
            Some(DriversFrom::Url(url)) => {
                Self::at(url).map(Some).map_err(|error| fail(&error.into()))
            }
            Some(DriversFrom::Nowhere | DriversFrom::Path(_)) => Ok(None),
        }
    }

    /// The image at this address. The usual one, by its name, is known wherever it is.
    fn at(url: &str) -> anyhow::Result<Self> {
        let given = url.split_once(CHECKSUM).map(|(_, digits)| Checksum::sha256(digits));
        let (url, checksum) = (url.to_owned(), given.transpose()?);
        let mut remote = Self { url, length: None, checksum, is_usual: false };
        if remote.checksum.is_none() && name::of_drivers(&remote.url) == name::of_drivers(URL) {
            remote.length = Some(LENGTH);
            remote.checksum = Some(Checksum::sha256(SHA256)?);
        }
        Ok(remote)
    }

    /// Its place on the volume.
    pub fn path(&self, volume: &Path) -> PathBuf {
        volume.join(name::of_drivers(&self.url))
    }

    /// Its address for people, or the name of the usual one.
    pub fn shown(&self) -> String {
        if self.is_usual { name::of_drivers(&self.url) } else { without_secrets(&self.url) }
    }

    /// How long to wait for the server. An installation does not wait long for what it can do
    /// without.
    fn patience(&self) -> Patience {
        match self.is_usual {
            true => {
                Patience { answer: Duration::from_secs(15), failures: 3, ..Patience::default() }
            }
            false => Patience::default(),
        }
    }
}

/// An image to get.
pub struct Job {
    client: Client,
    wanted: Wanted,
}

impl Job {
    /// A job for the volume at this path.
    pub fn new(settings: &Settings, remote: &Remote, folder: &Path) -> anyhow::Result<Self> {
        let client = Client::new(&settings.web, remote.patience());
        let client = client.map_err(|error| fail(&Fault::Final(error)))?;
        let wanted = Wanted {
            name: "Windows' drivers".into(),
            url: remote.url.clone(),
            referer: None,
            path: remote.path(folder),
            length: remote.length,
            checksum: remote.checksum.clone(),
            connections: usize::try_from(settings.media.connections.0).unwrap_or(1),
            form: Form::Cd,
        };
        Ok(Self { client, wanted })
    }

    /// Asks the server for the start of the image, so that a mistake is found before the medium is
    /// downloaded.
    pub async fn check(&mut self) -> anyhow::Result<()> {
        let failures = &mut self.client.patience.failures;
        *failures = CHECKS.min(*failures);
        transfer::check(&self.client, &self.wanted).await.map_err(|fault| fail(&fault))
    }

    /// Downloads the image. Returns its path.
    pub async fn run(self, story: &Story) -> anyhow::Result<PathBuf> {
        let Self { client, wanted } = self;
        transfer::fetch(&client, &wanted, story).await.map_err(|fault| fail(&fault))?;
        Ok(wanted.path)
    }
}

fn fail(fault: &Fault) -> anyhow::Error {
    let sentence = format!("Windows' drivers cannot be downloaded: {fault}");
    let out = "set DRIVERS to the URL of virtio-win's ISO, or mount it as /drivers.iso";
    Failure::new(Status::Download, format!("{sentence}: {out}"))
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::environment;

    fn remote(word: Option<&str>) -> anyhow::Result<Option<Remote>> {
        let words = word.map(|word| ("DRIVERS".into(), word.into())).into_iter().collect();
        Remote::of(&environment::read(&words).unwrap().settings)
    }

    #[test]
    fn the_usual_image_is_known_wherever_it_is() {
        let usual = remote(None).unwrap().unwrap();
        let place = Path::new("/storage/virtio-win-0.1.271.iso");
        assert_eq!((usual.is_usual, &*usual.path("/storage".as_ref())), (true, place));
        // A CD has whole sectors.
        assert!(usual.length.unwrap().is_multiple_of(2048) && usual.checksum.is_some());
        let mirror = remote(Some("http://mirror.example/a/virtio-win-0.1.271.iso?x=1")).unwrap();
        let mirror = mirror.unwrap();
        assert_eq!((mirror.length, &mirror.checksum), (usual.length, &usual.checksum));
        assert!(!mirror.is_usual);
        let digits = "0".repeat(64);
        let own = format!("https://mirror.example/virtio-win-0.1.271.iso#sha256={digits}");
        let own = remote(Some(&own)).unwrap().unwrap();
        assert_eq!((own.length, own.checksum.unwrap().to_string()), (None, digits));
        let other = remote(Some("https://mirror.example/virtio-win-0.1.266.iso")).unwrap().unwrap();
        assert_eq!((other.length, other.checksum), (None, None));
        assert_eq!(remote(Some("N")).unwrap(), None);
        assert_eq!(remote(Some("/srv/v.iso")).unwrap(), None);
        let error = remote(Some("https://mirror.example/v.iso#sha256=12")).unwrap_err();
        assert!(error.to_string().contains("64 hexadecimal digits"), "{error}");
    }
}
