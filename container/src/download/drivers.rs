//! The ISO image with Windows' drivers (virtio-win), from an address of the user.

use std::path::{Path, PathBuf};

use super::client::{Client, Patience};
use super::digest::Checksum;
use super::fault::Fault;
use super::transfer::{self, Form, Wanted};
use crate::settings::Settings;
use crate::state::name;
use crate::status::{Failure, Status};
use crate::story::Story;

/// An image to get.
pub struct Job {
    client: Client,
    url: String,
    path: PathBuf,
}

impl Job {
    /// A job for the volume at this path. The address may end with `#sha256=DIGITS`.
    pub fn new(settings: &Settings, url: &str, folder: &Path) -> anyhow::Result<Self> {
        Self::with(settings, url, folder, Patience::default())
    }

    pub fn with(
        settings: &Settings,
        url: &str,
        folder: &Path,
        patience: Patience,
    ) -> anyhow::Result<Self> {
        let client = Client::new(&settings.web, patience);
        let client = client.map_err(|error| fail(&Fault::Final(error)))?;
        Ok(Self { client, url: url.to_owned(), path: folder.join(name::of_drivers(url)) })
    }

    /// Downloads the image. Returns its path.
    pub async fn run(self, story: &Story) -> anyhow::Result<PathBuf> {
        let Self { client, url, path } = self;
        let checksum = url.split_once("#sha256=").map(|(_, digits)| Checksum::sha256(digits));
        let wanted = Wanted {
            name: "Windows' drivers".into(),
            checksum: checksum.transpose().map_err(|error| fail(&Fault::from(error)))?,
            url,
            referer: None,
            path: path.clone(),
            length: None,
            connections: 1,
            form: Form::Cd,
        };
        transfer::fetch(&client, &wanted, story).await.map_err(|fault| fail(&fault))?;
        Ok(path)
    }
}

fn fail(fault: &Fault) -> anyhow::Error {
    let sentence = format!("Windows' drivers cannot be downloaded: {fault}");
    let out = "correct DRIVERS, or mount virtio-win's ISO as /drivers.iso";
    Failure::new(Status::Download, format!("{sentence}: {out}"))
}
