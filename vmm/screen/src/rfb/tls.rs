//! TLS for VeNCrypt and browsers. Certificates are short-lived, so the files may be replaced at any
//! time.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail, ensure};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, ServerConfig};

/// Minimum interval between two checks of the files. They are checked only when a client connects.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Identifies a version of a file: device, inode, size, and modification time.
type Stamp = Option<(u64, u64, u64, i64, i64)>;

/// A certificate and its key, reloaded when the files change.
pub struct Files {
    cert: PathBuf,
    key: PathBuf,
    now: Mutex<Loaded>,
}

struct Loaded {
    acceptor: TlsAcceptor,
    stamps: [Stamp; 2],
    checked: Instant,
}

impl Files {
    /// `None` if neither file is configured. Fails if only one is, or if the key is not that of the
    /// certificate.
    pub fn new(cert: Option<&PathBuf>, key: Option<&PathBuf>) -> anyhow::Result<Option<Self>> {
        let (cert, key) = match (cert, key) {
            (Some(cert), Some(key)) => (cert.clone(), key.clone()),
            (None, None) => return Ok(None),
            (Some(_), None) => bail!("tls-cert needs tls-key, the certificate's private key"),
            (None, Some(_)) => bail!("tls-key needs tls-cert, the certificate for that key"),
        };
        let stamps = [stamp(&cert), stamp(&key)];
        let now = Loaded { acceptor: load(&cert, &key)?, stamps, checked: Instant::now() };
        Ok(Some(Self { cert, key, now: Mutex::new(now) }))
    }

    /// Returns the acceptor for the current files. While these are not a valid pair, perhaps
    /// because only one has been replaced so far, the previous pair remains in use.
    pub fn acceptor(&self) -> TlsAcceptor {
        let mut now = self.now.lock().expect("no reload panicked");
        if now.checked.elapsed() >= CHECK_INTERVAL {
            self.reload(&mut now);
        }
        now.acceptor.clone()
    }

    fn reload(&self, now: &mut Loaded) {
        now.checked = Instant::now();
        let stamps = [stamp(&self.cert), stamp(&self.key)];
        if stamps == now.stamps {
            return;
        }
        now.stamps = stamps;
        match load(&self.cert, &self.key) {
            Ok(acceptor) => {
                now.acceptor = acceptor;
                tracing::info!("tls-cert={}: certificate reloaded", self.cert.display());
            }
            Err(error) => tracing::warn!("the previous certificate remains in use: {error:#}"),
        }
    }
}

fn stamp(path: &Path) -> Stamp {
    let meta = fs::metadata(path).ok()?;
    Some((meta.dev(), meta.ino(), meta.size(), meta.mtime(), meta.mtime_nsec()))
}

pub fn load(certificate: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let named = |path: &Path| format!("{}", path.display());
    let text = read("tls-cert", certificate)?;
    let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| damaged("tls-cert", certificate, &error))?;
    ensure!(!chain.is_empty(), "tls-cert={}: no certificate in PEM format", named(certificate));
    let text = read("tls-key", key)?;
    ensure!(
        !is_locked(&text),
        "tls-key={}: the key is encrypted with a passphrase, which cannot be entered here: \
         write it without one (openssl pkey -in {0} -out FILE)",
        named(key)
    );
    let secret = PrivateKeyDer::from_pem_slice(&text);
    let secret = secret.map_err(|error| damaged("tls-key", key, &error))?;
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()
        .context("TLS")?
        .with_no_client_auth();
    match builder.with_single_cert(chain, secret) {
        Ok(mut config) => {
            // TigerVNC's viewer up to 1.12 treats a ticket as the end of the available data. Data
            // that arrived with it would wait forever.
            config.send_tls13_tickets = 0;
            Ok(TlsAcceptor::from(Arc::new(config)))
        }
        Err(Error::InconsistentKeys(_)) => {
            bail!("tls-cert={} is not for tls-key={}", named(certificate), named(key))
        }
        Err(error) => {
            bail!("tls-cert={}, tls-key={}: {error}", named(certificate), named(key))
        }
    }
}

fn read(word: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("{word}={}", path.display()))
}

/// Whether a key is encrypted, in PKCS #8 or in the old PEM format.
fn is_locked(text: &[u8]) -> bool {
    let has = |words: &[u8]| text.windows(words.len()).any(|it| it == words);
    has(b"-----BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED")
}

fn damaged(word: &str, path: &Path, error: &pem::Error) -> anyhow::Error {
    let path = path.display();
    match error {
        pem::Error::NoItemsFound => anyhow!("{word}={path}: no private key in PEM format"),
        pem::Error::MissingSectionEnd { .. } => anyhow!("{word}={path}: the file is cut short"),
        other => anyhow!("{word}={path}: the file is damaged: {other}"),
    }
}
