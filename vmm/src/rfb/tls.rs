//! TLS for VeNCrypt: a certificate and its key from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, anyhow, bail, ensure};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::{self, PemObject as _};
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, ServerConfig};

/// Reads a certificate, with those that it is signed by, and its key.
///
/// # Errors
///
/// One sentence that names the file.
pub fn load(certificate: &Path, key: &Path) -> anyhow::Result<TlsAcceptor> {
    let named = |path: &Path| format!("{}", path.display());
    let text = read("tls-cert", certificate)?;
    let chain = CertificateDer::pem_slice_iter(&text).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| damaged("tls-cert", certificate, &error))?;
    ensure!(!chain.is_empty(), "tls-cert={}: no certificate in PEM format", named(certificate));
    let text = read("tls-key", key)?;
    ensure!(
        !is_locked(&text),
        "tls-key={}: the key is locked with a passphrase, which nobody could type here: write it \
         without one (openssl pkey -in {0} -out FILE)",
        named(key)
    );
    let secret = PrivateKeyDer::from_pem_slice(&text);
    let secret = secret.map_err(|error| damaged("tls-key", key, &error))?;
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

fn read(word: &str, path: &Path) -> anyhow::Result<Vec<u8>> {
    std::fs::read(path).with_context(|| format!("{word}={}", path.display()))
}

/// Whether a key is encrypted, in the new way or in the old one.
fn is_locked(text: &[u8]) -> bool {
    let has = |words: &[u8]| text.windows(words.len()).any(|it| it == words);
    has(b"-----BEGIN ENCRYPTED PRIVATE KEY") || has(b"Proc-Type: 4,ENCRYPTED")
}

/// What is wrong with a file, for people.
fn damaged(word: &str, path: &Path, error: &pem::Error) -> anyhow::Error {
    let path = path.display();
    match error {
        pem::Error::NoItemsFound => anyhow!("{word}={path}: no private key in PEM format"),
        pem::Error::MissingSectionEnd { .. } => anyhow!("{word}={path}: the file is cut short"),
        other => anyhow!("{word}={path}: the file is damaged: {other}"),
    }
}

/// Both files, or neither.
///
/// # Errors
///
/// When one is missing, or they are no pair.
pub fn pair(cert: Option<&PathBuf>, key: Option<&PathBuf>) -> anyhow::Result<Option<TlsAcceptor>> {
    match (cert, key) {
        (Some(cert), Some(key)) => load(cert, key).map(Some),
        (None, None) => Ok(None),
        (Some(_), None) => bail!("tls-cert needs tls-key, the certificate's private key"),
        (None, Some(_)) => bail!("tls-key needs tls-cert, the certificate for that key"),
    }
}
