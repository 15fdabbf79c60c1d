//! The medium from a fake Microsoft, which is the pod's proxy in its network.

use std::ffi::OsString;
use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;

use anyhow::{Context as _, ensure};
use container::settings::environment;
use container::state::name;
use fake_microsoft::fault::Fault;
use fake_microsoft::{FakeMicrosoft, Site};
use tempfile::TempDir;
use tokio::sync::oneshot;
use transom_tests::say;

use super::medium;
use super::pod::{Case, Place};
use super::steps::Setup;

/// A server that ends when it is dropped.
pub(crate) struct Microsoft {
    pub(crate) site: Arc<Site>,
    proxy: String,
    authority: PathBuf,
    /// The file of the medium on the volume.
    pub(crate) file: String,
    breaks: bool,
    _folder: TempDir,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<anyhow::Result<()>>>,
}

impl Microsoft {
    /// Serves the medium of a case, with these faults.
    pub(crate) fn serve(place: &Place, case: &Case, faults: &[Fault]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_owned();
        let site = Site::new(&medium::path(case.setup.medium)?, faults.to_vec())?;
        let (tell, told) = mpsc::channel();
        let (stop, stopped) = oneshot::channel();
        let thread = place.inside(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
            runtime.block_on(async {
                let server = FakeMicrosoft::start(([127, 0, 0, 1], 0).into(), &path, site).await?;
                tell.send(server)?;
                stopped.await.ok();
                anyhow::Ok(())
            })
        })?;
        let Ok(server) = told.recv() else {
            let ended = thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            return Err(ended.err().context("the server ended")?);
        };
        Ok(Self {
            proxy: server.proxy(),
            site: server.site,
            authority: server.authority,
            file: file_of(&case.setup)?,
            breaks: !faults.is_empty(),
            _folder: folder,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    /// The variables by which a pod finds the server.
    pub(crate) fn variables(&self) -> [(&'static str, String); 2] {
        let authority = self.authority.display().to_string();
        [("HTTPS_PROXY", self.proxy.clone()), ("SSL_CERT_FILE", authority)]
    }

    /// The pod's words about a download, in this order.
    pub(crate) fn steps(&self, case: &Case) -> Vec<String> {
        let title = case.setup.title;
        let again = self.breaks.then(|| ": trying again".to_owned());
        let verified = case.setup.has_checksum.then(|| "the SHA-256 checksum is right".to_owned());
        [
            Some("the next step is install: nothing is installed yet".to_owned()),
            Some(format!("Requesting {title} from the Microsoft servers…")),
            Some(format!("Downloading {title}…")),
            again,
            Some(format!("Downloading {title}… 100% at ")),
            verified,
            Some("the medium has ".to_owned()),
        ]
        .into_iter()
        .flatten()
        .collect()
    }

    /// Windows is set up, and its medium is gone, with the mark that names it.
    pub(crate) fn is_removed(&self, place: &Place) -> anyhow::Result<()> {
        let names = fs::read_dir(place.storage())?.flatten().map(|it| it.file_name());
        let names: Vec<_> = names.collect();
        let left = |name: &OsString| *name == *self.file || *name == *"windows.setup";
        ensure!(!names.iter().any(left), "{names:?}");
        Ok(())
    }

    /// The file came in ranges at the same time, and after a break only the rest of one again.
    pub(crate) fn was_asked(&self) -> anyhow::Result<()> {
        let requests = self.site.take_requests();
        let ranges: Vec<_> = requests.iter().filter_map(|request| range(request)).collect();
        let bytes: u64 = ranges.iter().map(|(start, end)| end - start).sum();
        say!("{} ranges, {} MB", ranges.len(), bytes / 1_000_000);
        ensure!(ranges.len() > 4, "{requests:?}");
        let starts = |at: u64| ranges.iter().filter(|(start, _)| *start == at).count();
        // The first bytes are asked for alone before, to look at them.
        let twice = ranges.iter().filter(|(start, _)| *start > 0 && starts(*start) > 1).count();
        ensure!(twice == 0, "a range is fetched twice: {requests:?}");
        Ok(())
    }
}

/// First byte and end of the range that a request asks for.
pub(crate) fn range(request: &str) -> Option<(u64, u64)> {
    let (path, range) = request.split_once(" bytes=")?;
    let (start, last) = range.split_once('-').filter(|_| path.contains(".iso"))?;
    Some((start.parse().ok()?, last.parse::<u64>().ok()? + 1))
}

/// The name on the volume of the medium that the settings ask for.
fn file_of(setup: &Setup) -> anyhow::Result<String> {
    let words = setup.settings.iter().map(|(name, value)| (name.into(), value.into())).collect();
    let windows = environment::read(&words)?.settings.windows;
    name::of(&windows.version, windows.language.0).context("a version that is downloaded")
}

impl Drop for Microsoft {
    fn drop(&mut self) {
        drop(self.stop.take());
        let ended = self.thread.take().map(JoinHandle::join);
        if let Some(Ok(Err(error))) = ended {
            say!("{error:#}");
        }
    }
}
