//! A certificate authority, made by the program `openssl`: a library would bring 25 crates.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use anyhow::{Context as _, ensure};
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

/// The names in the server's certificate.
const NAMES: &str = "subjectAltName=DNS:*.microsoft.com,DNS:*.prss.microsoft.com,\
    DNS:*.download.prss.microsoft.com,DNS:dl.delivery.mp.microsoft.com,\
    DNS:fedorapeople.org,DNS:*.example.test,DNS:localhost,\
    IP:127.0.0.1";

pub struct Authority {
    folder: PathBuf,
}

impl Authority {
    pub fn create(folder: &Path) -> anyhow::Result<Self> {
        let key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"];
        let first = [
            &["req", "-x509", "-days", "30", "-subj", "/CN=Fake Microsoft Authority"][..],
            &key,
            &["-keyout", "authority.key", "-out", "authority.pem"],
        ];
        openssl(folder, &first.concat())?;
        let second = [
            &["req", "-x509", "-days", "30", "-subj", "/CN=Fake Microsoft"][..],
            &["-CA", "authority.pem", "-CAkey", "authority.key", "-addext", NAMES],
            &["-addext", "basicConstraints=critical,CA:FALSE"],
            &key,
            &["-keyout", "server.key", "-out", "server.pem"],
        ];
        openssl(folder, &second.concat())?;
        Ok(Self { folder: folder.to_owned() })
    }

    /// The certificate that clients trust.
    pub fn file(&self) -> PathBuf {
        self.folder.join("authority.pem")
    }

    pub(crate) fn server_config(&self) -> anyhow::Result<ServerConfig> {
        let chain = vec![CertificateDer::from_pem_file(self.folder.join("server.pem"))?];
        let key = PrivateKeyDer::from_pem_file(self.folder.join("server.key"))?;
        let config = ServerConfig::builder_with_provider(Arc::new(default_provider()));
        let config = config.with_safe_default_protocol_versions()?.with_no_client_auth();
        Ok(config.with_single_cert(chain, key)?)
    }
}

/// The checksum of a file, in hexadecimal digits.
pub(crate) fn digest(kind: &str, path: &Path) -> anyhow::Result<String> {
    let path = path.to_str().context("a path in UTF-8")?;
    let said = openssl(Path::new("."), &["dgst", kind, "-r", path])?;
    Ok(said.split(' ').next().unwrap_or_default().to_owned())
}

fn openssl(folder: &Path, words: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("openssl").args(words).current_dir(folder).output();
    let output = output.context("the program openssl (Debian: openssl)")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "openssl {}: {said}", words.join(" "));
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
