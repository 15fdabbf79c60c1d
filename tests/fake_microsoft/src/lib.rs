//! Microsoft's download servers for tests: pages, links and files, with faults on demand.
//!
//! One port serves all of them. It is a proxy, as users behind a firewall have: it reads TLS with
//! certificates of its own authority. So a program needs no other addresses, only `HTTPS_PROXY` and
//! `SSL_CERT_FILE`. Direct connections with and without TLS are served, too.
#![forbid(unsafe_code)]

pub mod certificate;
pub mod fault;
mod pages;
mod serve;

use std::fs::File;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::Context as _;
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use self::certificate::Authority;
use self::fault::{Fault, Faults};

/// A file that is served.
struct Served {
    file: File,
    length: u64,
    sha256: String,
    sha1: String,
}

impl Served {
    fn open(path: &Path) -> anyhow::Result<Arc<Self>> {
        let file = File::open(path).with_context(|| path.display().to_string())?;
        let length = file.metadata()?.len();
        let [sha256, sha1] = ["-sha256", "-sha1"].map(|kind| certificate::digest(kind, path));
        Ok(Arc::new(Self { file, length, sha256: sha256?, sha1: sha1? }))
    }

    fn read(&self, at: u64, length: usize) -> std::io::Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        let count = self.file.read_at(&mut bytes, at)?;
        bytes.truncate(count);
        Ok(bytes)
    }
}

/// The site that all connections see.
pub struct Site {
    iso: Arc<Served>,
    /// The upgrade image of the catalog. Without it, the catalog is empty.
    upgrade: Option<Arc<Served>>,
    faults: Mutex<Faults>,
    /// Host, path and range of each request.
    requests: Mutex<Vec<String>>,
    /// Authorizations of requests.
    logins: Mutex<Vec<String>>,
}

impl Site {
    /// Serves this file as every ISO image.
    pub fn new(iso: &Path, faults: Vec<Fault>) -> anyhow::Result<Self> {
        let iso = Served::open(iso)?;
        let faults = Mutex::new(Faults::new(faults));
        Ok(Self {
            iso,
            upgrade: None,
            faults,
            requests: Mutex::default(),
            logins: Mutex::default(),
        })
    }

    /// Serves this file as every upgrade image (ESD), too.
    pub fn with_upgrade(self, esd: &Path) -> anyhow::Result<Self> {
        Ok(Self { upgrade: Some(Served::open(esd)?), ..self })
    }

    pub fn sha256(&self) -> &str {
        &self.iso.sha256
    }

    /// Other faults from now on.
    pub fn set_faults(&self, faults: Vec<Fault>) {
        *self.faults.lock().unwrap_or_else(PoisonError::into_inner) = Faults::new(faults);
    }

    /// The requests so far, and forgets them.
    pub fn take_requests(&self) -> Vec<String> {
        std::mem::take(&mut *self.requests.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// The authorizations so far, and forgets them.
    pub fn take_logins(&self) -> Vec<String> {
        std::mem::take(&mut *self.logins.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note_login(&self, login: &str) {
        let mut logins = self.logins.lock().unwrap_or_else(PoisonError::into_inner);
        logins.extend((!login.is_empty()).then(|| login.to_owned()));
    }

    fn note(&self, request: String) {
        self.requests.lock().unwrap_or_else(PoisonError::into_inner).push(request);
    }

    /// Whether a fault shall happen now.
    fn has(&self, fits: impl Fn(&Fault) -> bool) -> Option<Fault> {
        self.faults.lock().unwrap_or_else(PoisonError::into_inner).take(fits)
    }
}

/// A running server. It ends with its runtime.
pub struct FakeMicrosoft {
    pub address: SocketAddr,
    pub site: Arc<Site>,
    /// A file with the certificate of the authority.
    pub authority: PathBuf,
}

impl FakeMicrosoft {
    /// Starts a server on the current runtime. Its certificates are in the folder.
    pub async fn start(bind: SocketAddr, folder: &Path, site: Site) -> anyhow::Result<Self> {
        let authority = Authority::create(folder)?;
        let acceptor = TlsAcceptor::from(Arc::new(authority.server_config()?));
        let listener = TcpListener::bind(bind).await.with_context(|| bind.to_string())?;
        let address = listener.local_addr()?;
        let site = Arc::new(site);
        tokio::spawn(serve::run(listener, acceptor, site.clone()));
        Ok(Self { address, site, authority: authority.file() })
    }

    /// The value of `HTTPS_PROXY`.
    pub fn proxy(&self) -> String {
        format!("http://{}", self.address)
    }
}
