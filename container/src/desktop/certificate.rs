//! The certificate of the guest's remote desktop. Windows makes and signs it itself, so nothing
//! else vouches for it. The first one is kept on the volume, and another one is refused until a
//! user trusts it: on a network of its own (`DHCP=Y`), somebody else could answer at the guest's
//! address.

use std::io::Write as _;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use anyhow::{Context as _, ensure};
use ring::digest::{SHA256, digest};
use serde::Serialize;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature,
};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, SignatureScheme};

use crate::files;

/// Hexadecimal digits of a fingerprint.
const DIGITS: usize = 64;
/// Follows a kept fingerprint that a user trusts.
const TRUSTED: &str = " trusted";

/// Fingerprints (SHA-256) of the kept certificate, and of the one that was refused.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Changed {
    /// `None` before the first one, and if the one that is shown is kept, but proves nothing now.
    pub kept: Option<String>,
    pub shown: String,
}

/// A certificate that is accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Accepted {
    Known,
    /// Its owner has proven nothing yet. The fingerprint.
    First(String),
}

/// The kept certificate.
#[derive(Default)]
pub(super) struct Pin {
    /// Without a volume, the certificate is kept until the pod ends.
    file: OnceLock<PathBuf>,
    fingerprints: Mutex<Fingerprints>,
}

#[derive(Default)]
struct Fingerprints {
    kept: Option<String>,
    /// A user trusts the kept one, also if its owner proves nothing.
    trusted: bool,
    /// Another certificate, which was refused.
    shown: Option<String>,
}

impl Pin {
    pub(super) fn keep_in(&self, file: PathBuf) {
        // Others may write to the volume: a link could lead to any file.
        let text = files::read_itself(&file).unwrap_or_default();
        let trusted = text.trim().strip_suffix(TRUSTED);
        let kept = trusted.unwrap_or(text.trim());
        if kept.len() == DIGITS && kept.bytes().all(|it| it.is_ascii_hexdigit()) {
            let mut fingerprints = self.lock();
            fingerprints.kept = Some(kept.to_owned());
            fingerprints.trusted = trusted.is_some();
        }
        self.file.get_or_init(|| file);
    }

    /// Accepts the first certificate if its owner offers to prove in CredSSP that it knows the
    /// password: the caller calls `proven` when it has. Without CredSSP the owner gets the
    /// password, so that a user must trust it: an attacker may offer CredSSP first. Refuses another
    /// one.
    pub(super) fn accepts(
        &self,
        certificate: &CertificateDer<'_>,
        proves: bool,
    ) -> Option<Accepted> {
        let fingerprint = fingerprint(certificate);
        let mut fingerprints = self.lock();
        match &fingerprints.kept {
            Some(kept) if *kept == fingerprint && (proves || fingerprints.trusted) => {
                fingerprints.shown = None;
                Some(Accepted::Known)
            }
            kept if kept.is_some() || !proves => {
                fingerprints.shown = Some(fingerprint);
                None
            }
            _ => Some(Accepted::First(fingerprint)),
        }
    }

    /// Keeps the first certificate: its owner knows the password.
    pub(super) fn proven(&self, fingerprint: String) {
        let mut fingerprints = self.lock();
        if fingerprints.kept.is_none()
            && let Err(error) = self.keep(&mut fingerprints, fingerprint, false)
        {
            tracing::warn!("the certificate of the remote desktop is not kept: {error:#}");
        }
    }

    pub(super) fn changed(&self) -> Option<Changed> {
        let fingerprints = self.lock();
        let shown = fingerprints.shown.clone()?;
        let kept = fingerprints.kept.clone().filter(|kept| *kept != shown);
        Some(Changed { kept, shown })
    }

    pub(super) fn trust(&self, fingerprint: &str) -> anyhow::Result<()> {
        let mut fingerprints = self.lock();
        let is_shown = fingerprints.shown.as_deref() == Some(fingerprint);
        ensure!(is_shown, "the remote desktop did not show a certificate with this fingerprint");
        self.keep(&mut fingerprints, fingerprint.to_owned(), true)
    }

    fn keep(
        &self,
        fingerprints: &mut Fingerprints,
        fingerprint: String,
        trusted: bool,
    ) -> anyhow::Result<()> {
        let line = format!("{fingerprint}{}\n", if trusted { TRUSTED } else { "" });
        *fingerprints = Fingerprints { kept: Some(fingerprint), trusted, shown: None };
        let Some(file) = self.file.get() else { return Ok(()) };
        files::write_for_owner(file, |file| file.write_all(line.as_bytes()))
            .with_context(|| file.display().to_string())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Fingerprints> {
        self.fingerprints.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn fingerprint(certificate: &CertificateDer<'_>) -> String {
    let bytes = digest(&SHA256, certificate);
    bytes.as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Connects to servers whose certificates nothing vouches for.
pub(super) fn connector() -> anyhow::Result<TlsConnector> {
    let provider = default_provider();
    let owner = Arc::new(Owner { algorithms: provider.signature_verification_algorithms });
    let config = ClientConfig::builder_with_provider(Arc::new(provider))
        .with_safe_default_protocol_versions()
        .context("TLS")?
        .dangerous()
        .with_custom_certificate_verifier(owner)
        .with_no_client_auth();
    Ok(TlsConnector::from(Arc::new(config)))
}

/// Accepts any certificate from a server that has its key.
#[derive(Debug)]
struct Owner {
    algorithms: WebPkiSupportedAlgorithms,
}

impl ServerCertVerifier for Owner {
    fn verify_server_cert(
        &self,
        _certificate: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // `Pin` decides after the handshake.
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signature, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signature, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
