//! TLS for VeNCrypt: a certificate and its key from files.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, bail, ensure};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::rustls::{Error, ServerConfig};

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
