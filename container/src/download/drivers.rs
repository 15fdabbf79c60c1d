//! The bundle of drivers for virtio devices (virtio-win), as an ISO image.
//!
//! The bundle is pinned: each build of this program gets the same file, or none. 0.1.285 corrupts
//! page files with its driver for disks (kvm-guest-drivers-windows, issue 1614), so it is 0.1.271.

use std::path::{Path, PathBuf};

use super::client::{Client, Patience};
use super::digest::Sha256;
use super::fault::Fault;
use super::transfer::{self, Wanted};
use crate::settings::Settings;
use crate::status::{Failure, Status};
use crate::story::Story;

/// A bundle at an address that does not change.
pub struct Bundle {
    pub version: &'static str,
    pub url: &'static str,
    /// Fedora publishes neither; both are checked once they are known.
    pub length: Option<u64>,
    pub sha256: Option<&'static str>,
}

pub const BUNDLE: Bundle = Bundle {
    version: "0.1.271",
    url: "https://fedorapeople.org/groups/virt/virtio-win/direct-downloads/archive-virtio/virtio-win-0.1.271-1/virtio-win-0.1.271.iso",
    length: None,
    sha256: None,
};

/// Where the bundle comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// A file that the user has put there.
    File(PathBuf),
    Url(String),
}

impl Source {
    /// DRIVERS, or the pinned bundle.
    pub fn of(settings: &Settings) -> Self {
        match &settings.media.drivers {
            Some(text) if text.0.starts_with('/') => Self::File(PathBuf::from(&text.0)),
            Some(text) => Self::Url(text.0.clone()),
            None => Self::Url(BUNDLE.url.to_owned()),
        }
    }
}

/// The path of the bundle. Downloads it onto the volume unless it is there.
pub async fn bundle(settings: &Settings, folder: &Path, story: &Story) -> anyhow::Result<PathBuf> {
    let fail = |fault: Fault| {
        let sentence = format!("the drivers for virtio devices cannot be had: {fault}");
        let out = "mount virtio-win.iso, and set DRIVERS to its path";
        Failure::new(Status::Download, format!("{sentence}: {out}"))
    };
    let url = match Source::of(settings) {
        Source::File(path) if path.is_file() => return Ok(path),
        Source::File(path) => {
            return Err(fail(Fault::last(format!("DRIVERS={}: no such file", path.display()))));
        }
        Source::Url(url) => url,
    };
    let client = Client::new(&settings.web, Patience::default())?;
    bundle_from(&client, &url, folder, story).await.map_err(fail)
}

/// Downloads a bundle from an address, which may end with `#sha256=DIGITS`.
pub async fn bundle_from(
    client: &Client,
    url: &str,
    folder: &Path,
    story: &Story,
) -> Result<PathBuf, Fault> {
    let pinned = url == BUNDLE.url;
    let given = url.split_once("#sha256=").map(|(_, digits)| digits);
    let sha256 = given.or(BUNDLE.sha256.filter(|_| pinned));
    let sha256 = sha256.map(str::parse::<Sha256>).transpose()?;
    let path =
        folder.join(format!("virtio-win-{}.iso", if pinned { BUNDLE.version } else { "own" }));
    let wanted = Wanted {
        name: "the drivers for virtio devices".into(),
        url: url.to_owned(),
        referer: None,
        path: path.clone(),
        length: BUNDLE.length.filter(|_| pinned),
        sha256,
        connections: 1,
    };
    transfer::fetch(client, &wanted, story).await?;
    Ok(path)
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::download::address::Address;
    use crate::settings::environment;

    #[test]
    fn the_bundle_is_pinned_and_can_be_replaced() {
        let of = |text: &str| {
            let words = [("DRIVERS".into(), text.into())].into();
            Source::of(&environment::read(&words).unwrap().settings)
        };
        assert_eq!(of(""), Source::Url(BUNDLE.url.into()));
        assert!(Address::read(BUNDLE.url).unwrap().secure);
        assert!(BUNDLE.url.contains(&format!("-{}.iso", BUNDLE.version)));
        assert_eq!(of("/drivers/v.iso"), Source::File("/drivers/v.iso".into()));
        assert_eq!(of("https://mirror/v.iso"), Source::Url("https://mirror/v.iso".into()));
        let words = [("DRIVERS".into(), "v.iso".into())].into();
        assert!(environment::read(&words).is_err());
    }
}
