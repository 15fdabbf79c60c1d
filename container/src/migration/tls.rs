//! TLS 1.3 between two pods that know each other's public key, without certificates (raw public
//! keys, RFC 7250). A pod makes its key pair when it starts, and keeps the private key in memory.

use std::fmt;
use std::sync::Arc;

use anyhow::Context as _;
use ring::rand::SystemRandom;
use ring::signature::Ed25519KeyPair;
use serde::{Deserialize, Serialize};
use tokio_rustls::rustls::client::AlwaysResolvesClientRawPublicKeys;
use tokio_rustls::rustls::client::danger::{
    HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier,
};
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::crypto::{
    WebPkiSupportedAlgorithms, verify_tls13_signature_with_raw_key,
};
use tokio_rustls::rustls::pki_types::{
    CertificateDer, PrivatePkcs8KeyDer, ServerName, SubjectPublicKeyInfoDer, UnixTime,
};
use tokio_rustls::rustls::server::AlwaysResolvesServerRawPublicKeys;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::sign::CertifiedKey;
use tokio_rustls::rustls::version::TLS13;
use tokio_rustls::rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, DistinguishedName, Error, ServerConfig,
    SignatureScheme,
};
use tokio_rustls::{TlsAcceptor, TlsConnector};

/// A public key: the hexadecimal digits of its DER form.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PublicKey(String);

impl PublicKey {
    fn of(der: &[u8]) -> Self {
        Self(der.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Returns the key of the other pod. It may change, so it is asked for in each handshake.
pub type Known = Box<dyn Fn() -> anyhow::Result<PublicKey> + Send + Sync>;

/// The key pair of this pod.
#[derive(Clone)]
pub struct Key(Arc<CertifiedKey>);

impl Key {
    pub fn make() -> anyhow::Result<Self> {
        let pair = Ed25519KeyPair::generate_pkcs8(&SystemRandom::new());
        let pair = pair.ok().context("no random numbers for a key")?;
        let private = PrivatePkcs8KeyDer::from(pair.as_ref().to_vec()).into();
        let key = default_provider().key_provider.load_private_key(private)?;
        let public = key.public_key().context("a key without its public half")?;
        let public = CertificateDer::from(public.as_ref().to_vec());
        Ok(Self(Arc::new(CertifiedKey::new(vec![public], key))))
    }

    pub fn public(&self) -> PublicKey {
        self.0.cert.first().map_or_else(|| PublicKey(String::new()), |it| PublicKey::of(it))
    }

    /// Connects to the pod with that key.
    pub fn connector(&self, known: Known) -> anyhow::Result<TlsConnector> {
        let peer = Arc::new(Peer::new(known));
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&TLS13])
            .context("TLS")?
            .dangerous()
            .with_custom_certificate_verifier(peer)
            .with_client_cert_resolver(Arc::new(AlwaysResolvesClientRawPublicKeys::new(
                self.0.clone(),
            )));
        Ok(TlsConnector::from(Arc::new(config)))
    }

    /// Accepts the pod with that key alone.
    pub fn acceptor(&self, known: Known) -> anyhow::Result<TlsAcceptor> {
        let peer = Arc::new(Peer::new(known));
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_protocol_versions(&[&TLS13])
            .context("TLS")?
            .with_client_cert_verifier(peer)
            .with_cert_resolver(Arc::new(AlwaysResolvesServerRawPublicKeys::new(self.0.clone())));
        // A session that is resumed would not show its key again.
        config.send_tls13_tickets = 0;
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

/// Checks the key of the other pod.
struct Peer {
    known: Known,
    algorithms: WebPkiSupportedAlgorithms,
}

impl fmt::Debug for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Peer")
    }
}

impl Peer {
    fn new(known: Known) -> Self {
        Self { known, algorithms: default_provider().signature_verification_algorithms }
    }

    fn check(&self, key: &CertificateDer<'_>) -> Result<(), Error> {
        let known = (self.known)().map_err(|error| Error::General(format!("{error:#}")))?;
        let is_known = known == PublicKey::of(key);
        let wrong = CertificateError::ApplicationVerificationFailure;
        if is_known { Ok(()) } else { Err(Error::InvalidCertificate(wrong)) }
    }

    fn check_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let key = SubjectPublicKeyInfoDer::from(key.as_ref());
        verify_tls13_signature_with_raw_key(message, &key, signature, &self.algorithms)
    }
}

/// TLS 1.2 is not offered.
fn old() -> Result<HandshakeSignatureValid, Error> {
    Err(Error::General("TLS 1.2".into()))
}

impl ServerCertVerifier for Peer {
    fn verify_server_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        self.check(key).map(|()| ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}

impl ClientCertVerifier for Peer {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        key: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        self.check(key).map(|()| ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _message: &[u8],
        _key: &CertificateDer<'_>,
        _signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        old()
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        key: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.check_signature(message, key, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        vec![SignatureScheme::ED25519]
    }

    fn requires_raw_public_keys(&self) -> bool {
        true
    }
}
