//! Connections to web servers: directly or through a proxy, with TLS.
//!
//! Mozilla's root certificates are in the program. SSL_CERT_FILE names a file with further ones, as
//! users behind a proxy that reads TLS need.

use std::path::Path;
use std::sync::Arc;

use anyhow::{anyhow, ensure};
use base64::prelude::{BASE64_STANDARD, Engine as _};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::crypto::ring::default_provider;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, RootCertStore};

use super::address::Address;
use super::fault::Fault;
use super::reach::Reach;
use crate::settings::Web;
use crate::settings::value::quote;
use crate::settings::version::without_secrets;

/// Maximum length of a file with certificates, and of the answer of a proxy.
const MAX_CERTIFICATES: u64 = 4 << 20;
const MAX_ANSWER: usize = 16 << 10;

/// A connection, with TLS or without.
pub(super) trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// How a request goes out.
pub(super) struct Connection {
    pub(super) stream: Box<dyn Stream>,
    /// The proxy wants the whole address in the request, and this authorization.
    pub(super) by_proxy: Option<Option<String>>,
    pub(super) reach: Reach,
}

pub(super) struct Connector {
    tls: TlsConnector,
    http_proxy: Option<Address>,
    https_proxy: Option<Address>,
    direct: Vec<String>,
}

impl Connector {
    pub(super) fn new(web: &Web) -> anyhow::Result<Self> {
        let proxy = |name: &str, text: Option<&str>| {
            let Some(text) = text else { return Ok(None) };
            // As other programs, this one takes `proxy:3128`, too.
            let text =
                if text.contains("://") { text.to_owned() } else { format!("http://{text}") };
            let plain = "give the address of a proxy like http://proxy.example:3128";
            let shown = || quote(&without_secrets(&text));
            let proxy = Address::read(&text);
            let proxy = proxy.map_err(|_| anyhow!("{name}={}: {plain}", shown()))?;
            ensure!(!proxy.secure, "{name}: TLS to the proxy itself is not supported: {plain}");
            Ok(Some(proxy))
        };
        let direct = web.no_proxy.iter().flat_map(|list| list.0.split([',', ' ']));
        let direct = direct.map(|word| match word.trim() {
            "*" => "*".to_owned(),
            word => word.trim_start_matches(['*', '.']).to_lowercase(),
        });
        Ok(Self {
            tls: tls(web.certificates.as_deref())?,
            http_proxy: proxy("HTTP_PROXY", web.http_proxy.as_ref().map(|it| &*it.0))?,
            https_proxy: proxy("HTTPS_PROXY", web.https_proxy.as_ref().map(|it| &*it.0))?,
            direct: direct.filter(|word| !word.is_empty()).collect(),
        })
    }

    fn proxy(&self, to: &Address) -> Option<&Address> {
        let own = |word: &String| {
            let rest = to.host.strip_suffix(word.as_str());
            rest.is_some_and(|rest| rest.is_empty() || rest.ends_with('.')) || word == "*"
        };
        let local = to.host == "localhost" || to.host.starts_with("127.") || to.host == "::1";
        if local || self.direct.iter().any(own) {
            return None;
        }
        if to.secure { self.https_proxy.as_ref() } else { self.http_proxy.as_ref() }
    }

    /// The caller limits the time. `limit` is how far inside the server may be.
    pub(super) async fn connect(&self, to: &Address, limit: Reach) -> Result<Connection, Fault> {
        let proxy = self.proxy(to);
        let by = proxy.unwrap_or(to);
        let (addresses, reach) = match proxy {
            Some(proxy) => {
                let reach = limit.check(to)?;
                (Reach::Host.find(proxy).await?.0, reach)
            }
            None => limit.find(to).await?,
        };
        let stream = TcpStream::connect(&*addresses).await;
        let mut stream = stream.map_err(|error| {
            let whom = if proxy.is_some() { "the proxy " } else { "" };
            Fault::passing(format!("{whom}{} cannot be reached: {error}", by.host_header()))
        })?;
        stream.set_nodelay(true).ok();
        let login = proxy.and_then(Address::login);
        let login = login.map(|login| format!("Basic {}", BASE64_STANDARD.encode(login)));
        if !to.secure {
            let by_proxy = proxy.is_some().then_some(login);
            return Ok(Connection { stream: Box::new(stream), by_proxy, reach });
        }
        if let Some(proxy) = proxy {
            tunnel(&mut stream, proxy, to, login.as_deref()).await?;
        }
        let name = ServerName::try_from(to.host.clone());
        let name = name.map_err(|_| Fault::last(format!("{} is not a host", to.shown())))?;
        let stream = self.tls.connect(name, stream).await.map_err(|error| tls_fault(to, &error))?;
        Ok(Connection { stream: Box::new(stream), by_proxy: None, reach })
    }
}

fn tls_fault(to: &Address, error: &std::io::Error) -> Fault {
    let certificate = error.to_string().contains("certificate");
    let host = to.host_header();
    if error.to_string().contains("InvalidContentType") {
        return Fault::last(format!(
            "{host} answers without TLS: the network may ask for a login, or HTTPS_PROXY names \
             something else than a proxy"
        ));
    }
    if !certificate {
        return Fault::passing(format!("{host}: TLS: {error}"));
    }
    Fault::last(format!(
        "{host}: its certificate is not trusted ({error}): check the clock of the host; behind a \
         proxy that reads TLS, mount the proxy's root certificate and set SSL_CERT_FILE to its path"
    ))
}

/// Asks a proxy for a connection to the server (RFC 9110 9.3.6).
async fn tunnel(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    proxy: &Address,
    to: &Address,
    login: Option<&str>,
) -> Result<(), Fault> {
    let (host, port) = (&to.host, to.port);
    let host = if host.contains(':') { format!("[{host}]") } else { host.clone() };
    let login = login.map_or(String::new(), |it| format!("Proxy-Authorization: {it}\r\n"));
    let ask = format!("CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\n{login}\r\n");
    let whom = format!("the proxy {}", proxy.host_header());
    let broken = |error| Fault::passing(format!("{whom}: {error}"));
    stream.write_all(ask.as_bytes()).await.map_err(broken)?;
    let mut answer = Vec::new();
    // Byte by byte: what follows the answer belongs to TLS.
    while !answer.ends_with(b"\r\n\r\n") {
        if answer.len() == MAX_ANSWER {
            return Err(Fault::last(format!("{whom} sends too much")));
        }
        answer.push(stream.read_u8().await.map_err(broken)?);
    }
    let line = String::from_utf8_lossy(&answer);
    let line = line.lines().next().unwrap_or_default().to_owned();
    match line.split(' ').nth(1).and_then(|status| status.parse::<u16>().ok()) {
        Some(200..=299) => Ok(()),
        Some(407) => Err(Fault::last(format!(
            "{whom} asks for a login: give it as in HTTPS_PROXY=http://user:password@proxy:3128"
        ))),
        Some(status @ 400..=499) => {
            Err(Fault::last(format!("{whom} refuses to connect to {host} (status {status})")))
        }
        Some(status) => Err(Fault::passing(format!("{whom}: status {status} for {host}"))),
        None => Err(Fault::last(format!("{whom} does not speak HTTP: check HTTPS_PROXY"))),
    }
}

/// Mozilla's root certificates, and those of a file.
fn tls(certificates: Option<&Path>) -> anyhow::Result<TlsConnector> {
    let mut roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    if let Some(path) = certificates {
        add(&mut roots, path).map_err(|error| {
            let path = path.display();
            anyhow!("SSL_CERT_FILE={path}: {error}: mount root certificates in PEM format there")
        })?;
    }
    let config = ClientConfig::builder_with_provider(Arc::new(default_provider()));
    let config = config.with_safe_default_protocol_versions()?.with_root_certificates(roots);
    Ok(TlsConnector::from(Arc::new(config.with_no_client_auth())))
}

fn add(roots: &mut RootCertStore, path: &Path) -> anyhow::Result<()> {
    use std::io::Read as _;
    let file = crate::files::open(path, std::fs::File::options().read(true))?;
    let mut bytes = Vec::new();
    file.take(MAX_CERTIFICATES + 1).read_to_end(&mut bytes)?;
    ensure!(bytes.len() as u64 <= MAX_CERTIFICATES, "it is too long");
    let found: Vec<_> = CertificateDer::pem_slice_iter(&bytes).collect::<Result<_, _>>()?;
    let (added, _) = roots.add_parsable_certificates(found);
    ensure!(added > 0, "it has no certificate");
    Ok(())
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::words::{HostList, ProxyUrl};

    #[test]
    fn proxies_are_for_other_hosts_of_their_scheme() {
        let proxy = |text: &str| Some(ProxyUrl(text.into()));
        let web = Web {
            https_proxy: proxy("http://me:pw@proxy:3128"),
            http_proxy: proxy("plain:80"),
            no_proxy: Some(HostList(".intern.example, 10.0.0.1,*.svc".into())),
            certificates: None,
        };
        let connector = Connector::new(&web).unwrap();
        for (url, by) in [
            ("https://www.microsoft.com/", Some("proxy:3128")),
            ("http://www.microsoft.com/", Some("plain")),
            ("https://intern.example/", None),
            ("https://a.intern.example/", None),
            ("https://notintern.example/", Some("proxy:3128")),
            ("http://10.0.0.1/", None),
            ("http://a.svc/", None),
            ("https://localhost/", None),
            ("https://127.0.0.1/", None),
        ] {
            let to = Address::read(url).unwrap();
            assert_eq!(connector.proxy(&to).map(Address::host_header).as_deref(), by, "{url}");
        }
        let all = Web { no_proxy: Some(HostList("*".into())), ..web };
        let to = Address::read("https://a.example/").unwrap();
        assert!(Connector::new(&all).unwrap().proxy(&to).is_none());
        let wrong = Web { https_proxy: proxy("https://proxy"), ..Web::default() };
        let error = Connector::new(&wrong).err().unwrap().to_string();
        assert!(error.contains("HTTPS_PROXY") && error.contains("http://proxy.example"), "{error}");
    }

    #[test]
    fn a_wrong_file_with_certificates_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ca.pem");
        for content in [None, Some("no certificate")] {
            if let Some(text) = content {
                std::fs::write(&path, text).unwrap();
            }
            let web = Web { certificates: Some(path.clone()), ..Web::default() };
            let error = format!("{:#}", Connector::new(&web).err().unwrap());
            assert!(error.contains("SSL_CERT_FILE=") && error.contains("PEM"), "{error}");
        }
    }
}
