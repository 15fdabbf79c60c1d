//! TLS from files, which may be replaced at any time: certificates do not live long. For VeNCrypt,
//! and for browsers.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, ServerConfig};

/// The files are looked at as often as that, and only when somebody comes.
const LOOK: Duration = Duration::from_secs(1);

/// What tells a file from the one that was there before: device, number, size and time.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// A certificate and its key.
pub struct Files {
    cert: PathBuf,
    key: PathBuf,
    now: Mutex<Now>,
}

struct Now {
    acceptor: TlsAcceptor,
    stamps: [Stamp; 2],
    looked: Instant,
}

impl Files {
    /// Reads both, if there are any.
    ///
    /// # Errors
    ///
    /// When one is missing, or they are no pair.
    pub fn new(cert: Option<&PathBuf>, key: Option<&PathBuf>) -> anyhow::Result<Option<Self>> {
        let (cert, key) = match (cert, key) {
            (Some(cert), Some(key)) => (cert.clone(), key.clone()),
            (None, None) => return Ok(None),
            (Some(_), None) => bail!("tls-cert needs tls-key, the certificate's private key"),
            (None, Some(_)) => bail!("tls-key needs tls-cert, the certificate for that key"),
        };
        let stamps = [stamp(&cert), stamp(&key)];
        let now = Now { acceptor: load(&cert, &key)?, stamps, looked: Instant::now() };
        Ok(Some(Self { cert, key, now: Mutex::new(now) }))
    }

    /// As the files are now. While they are no pair, perhaps because only one of them has been
    /// replaced so far, the last good one stays.
    pub fn acceptor(&self) -> TlsAcceptor {
        let mut now = self.now.lock().expect("no look panicked");
        if now.looked.elapsed() >= LOOK {
            self.look(&mut now);
        }
        now.acceptor.clone()
    }

    fn look(&self, now: &mut Now) {
        now.looked = Instant::now();
        let stamps = [stamp(&self.cert), stamp(&self.key)];
        if stamps == now.stamps {
            return;
        }
        now.stamps = stamps;
        match load(&self.cert, &self.key) {
            Ok(acceptor) => {
                now.acceptor = acceptor;
                tracing::info!("tls-cert={} was read again", self.cert.display());
            }
            Err(error) => tracing::warn!("the old certificate stays: {error:#}"),
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

/// Reads a certificate, with those that it is signed by, and its key.
///
/// # Errors
///
/// One sentence that names the file.
pub fn load(certificate: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let named = |path: &Path| format!("{}", path.display());
    let chain = CertificateDer::pem_file_iter(certificate)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("tls-cert={}", named(certificate)))?;
    ensure!(!chain.is_empty(), "tls-cert={}: no certificate in PEM format", named(certificate));
    let secret = PrivateKeyDer::from_pem_file(key)
        .with_context(|| format!("tls-key={}: a private key in PEM format", named(key)))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS")?
        .with_no_client_auth();
    match builder.with_single_cert(chain, secret) {
        Ok(config) => Ok(TlsAcceptor::from(Arc::new(config))),
        Err(Error::InconsistentKeys(_)) => {
            bail!("tls-cert={} is not for tls-key={}", named(certificate), named(key))
        }
        Err(error) => {
            bail!("tls-cert={}, tls-key={}: {error}", named(certificate), named(key))
        }
    }
}
