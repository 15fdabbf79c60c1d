//! A volume, a medium, and a fake Microsoft that has it.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use container::download::Job;
use container::download::client::Patience;
use container::download::digest::Checksum;
use container::download::drivers::{self, Remote};
use container::media::testutil::{Layout, install_cd, windows_11};
use container::settings::{Settings, environment};
use container::status::Status;
use container::story::Story;
use fake_microsoft::fault::Fault;
use fake_microsoft::{FakeMicrosoft, Site};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};

use crate::made;

/// Length of the medium: several pieces, and a rest.
pub(crate) const LENGTH: usize = 40 * 1024 * 1024 + 2048;

pub(crate) struct World {
    pub(crate) iso: Vec<u8>,
    pub(crate) volume: TempDir,
    pub(crate) server: FakeMicrosoft,
    pub(crate) story: Arc<Story>,
    pub(crate) server_files: TempDir,
    /// How long a download waits.
    pub(crate) patience: Patience,
    _runtime: Runtime,
}

impl World {
    pub(crate) fn new(faults: Vec<Fault>) -> Self {
        Self::with(faults, |_| ())
    }

    pub(crate) fn with(faults: Vec<Fault>, change: impl FnOnce(&mut Vec<u8>)) -> Self {
        Self::serve(faults, change, |site, _| site)
    }

    /// With an upgrade image in Microsoft's catalog.
    pub(crate) fn with_upgrade(faults: Vec<Fault>) -> Self {
        let add = |site: Site, folder: &Path| site.with_upgrade(&made::esd(folder, &[])).unwrap();
        Self::serve(faults, |_| (), add)
    }

    fn serve(
        faults: Vec<Fault>,
        change: impl FnOnce(&mut Vec<u8>),
        add: impl FnOnce(Site, &Path) -> Site,
    ) -> Self {
        let mut iso = MEDIUM.clone();
        change(&mut iso);
        let files = tempfile::tempdir().unwrap();
        let path = files.path().join("image");
        fs::write(&path, &iso).unwrap();
        let site = add(Site::new(&path, faults).unwrap(), files.path());
        let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let bind = ([127, 0, 0, 1], 0).into();
        let server = runtime.block_on(FakeMicrosoft::start(bind, files.path(), site)).unwrap();
        let volume = tempfile::tempdir().unwrap();
        let story = Story::new();
        let patience = Patience {
            answer: Duration::from_secs(20),
            stall: Duration::from_secs(2),
            pause: Duration::from_millis(10),
            failures: 4,
        };
        Self { iso, volume, server, story, server_files: files, patience, _runtime: runtime }
    }

    fn settings(&self, words: &[(&str, &str)]) -> Settings {
        let (proxy, authority) = (self.server.proxy(), self.server.authority.display().to_string());
        let usual =
            [("HTTPS_PROXY", &*proxy), ("HTTP_PROXY", &*proxy), ("SSL_CERT_FILE", &*authority)];
        let words = usual.iter().chain(words);
        let words = words.map(|(name, text)| (name.into(), text.into())).collect();
        environment::read(&words).unwrap().settings
    }

    /// Runs a download with these variables.
    pub(crate) fn run(&self, words: &[(&str, &str)]) -> anyhow::Result<PathBuf> {
        let job = Job::with(&self.settings(words), self.volume.path(), self.patience)?;
        Builder::new_current_thread().enable_all().build()?.block_on(job.run(&self.story))
    }

    /// Gets the drivers of DRIVERS, or of this image in place of the usual one.
    pub(crate) fn drivers(&self, place: &str, usual: Option<Remote>) -> anyhow::Result<PathBuf> {
        let settings = self.settings(&[("DRIVERS", place)]);
        let remote = usual.map_or_else(|| Remote::of(&settings), |usual| Ok(Some(usual)))?.unwrap();
        let job = || drivers::Job::new(&settings, &remote, self.volume.path());
        let (mut check, job) = (job()?, job()?);
        let run = async {
            check.check().await?;
            job.run(&self.story).await
        };
        Builder::new_current_thread().enable_all().build()?.block_on(run)
    }

    /// This server's image, as if it were the usual one.
    pub(crate) fn usual(&self) -> Remote {
        Remote {
            length: Some(self.iso.len() as u64),
            checksum: Some(Checksum::sha256(self.server.site.sha256()).unwrap()),
            ..Remote::of(&self.settings(&[])).unwrap().unwrap()
        }
    }

    pub(crate) fn refusal(&self, words: &[(&str, &str)]) -> (Status, String) {
        let error = self.run(words).unwrap_err();
        (Status::of(&error), format!("{error:#}"))
    }

    pub(crate) fn place(&self, name: &str) -> PathBuf {
        self.volume.path().join(name)
    }

    pub(crate) fn is_whole(&self, name: &str) -> bool {
        fs::read(self.place(name)).is_ok_and(|bytes| bytes == self.iso)
    }

    /// The files on the volume, sorted.
    pub(crate) fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.volume.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    pub(crate) fn log(&self) -> Vec<String> {
        self.story.lines(0).0.into_iter().map(|line| line.text).collect()
    }
}

static MEDIUM: LazyLock<Vec<u8>> = LazyLock::new(medium);

/// A CD with Windows, filled up with bytes that differ from place to place.
fn medium() -> Vec<u8> {
    let mut cd = install_cd(Layout::Bridge, &windows_11(9));
    let from = cd.len();
    assert!(from < LENGTH, "the medium has several pieces");
    cd.resize(LENGTH, 0);
    let mut noise = host::testutil::noise::Noise::new(1);
    for block in cd[from..].chunks_mut(4096) {
        let number = noise.below(u64::MAX).to_le_bytes();
        block.iter_mut().zip(number.iter().cycle()).for_each(|(byte, new)| *byte = *new);
    }
    // The end belongs to the last partition, so that a file that is cut is known as such.
    let sectors = u32::try_from(LENGTH / 2048).unwrap();
    cd[16 * 2048 + 80..][..4].copy_from_slice(&sectors.to_le_bytes());
    cd
}
