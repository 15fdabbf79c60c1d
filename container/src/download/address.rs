//! URLs: their parts, and redirections.

use hyper::Uri;
use percent_encoding::percent_decode_str;

use super::fault::Fault;
use crate::settings::value::quote;
use crate::settings::version::without_secrets;

/// Longer addresses are no address of a file.
const MAX_LENGTH: usize = 8192;

/// An absolute address of a web server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    pub uri: Uri,
    pub host: String,
    pub port: u16,
    pub secure: bool,
}

impl Address {
    pub fn read(text: &str) -> Result<Self, Fault> {
        let wrong = |why: &str| {
            let shown = quote(&without_secrets(text));
            Fault::last(format!("{shown} is not the address of a file: {why}"))
        };
        if text.len() > MAX_LENGTH {
            return Err(wrong("it is too long"));
        }
        let text = text.split('#').next().unwrap_or_default();
        let uri: Uri = text.parse().map_err(|_| wrong("it is malformed"))?;
        let secure = match uri.scheme_str() {
            Some("https") => true,
            Some("http") => false,
            _ => return Err(wrong("it begins with neither https:// nor http://")),
        };
        let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_lowercase();
        if host.is_empty() {
            return Err(wrong("it has no host"));
        }
        let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
        Ok(Self { uri, host, port, secure })
    }

    /// The path with the query, as in the first line of a request.
    pub fn path(&self) -> &str {
        self.uri.path_and_query().map_or("/", hyper::http::uri::PathAndQuery::as_str)
    }

    /// The Host header: without user and password, and without the usual port.
    pub fn host_header(&self) -> String {
        let host =
            if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        match (self.secure, self.port) {
            (true, 443) | (false, 80) => host,
            (_, port) => format!("{host}:{port}"),
        }
    }

    /// Whether this is the server of another address: the same host and port, or its secure twin.
    pub fn belongs_to(&self, other: &Self) -> bool {
        let is_twin = self.secure && (self.port, other.port) == (443, 80);
        self.host == other.host && (self.port == other.port || is_twin)
    }

    /// User and password of the address, decoded.
    pub fn login(&self) -> Option<String> {
        let (login, _) = self.uri.authority()?.as_str().rsplit_once('@')?;
        Some(percent_decode_str(login).decode_utf8_lossy().into_owned())
    }

    /// The target of a redirection. One from https to http is refused: everybody on the way could
    /// replace the file.
    pub fn redirected(&self, location: &str) -> Result<Self, Fault> {
        let base =
            format!("{}://{}", if self.secure { "https" } else { "http" }, self.host_header());
        let text = match location {
            whole if begins_with_scheme(whole) => whole.to_owned(),
            network if network.starts_with("//") => {
                format!("{}:{network}", if self.secure { "https" } else { "http" })
            }
            absolute if absolute.starts_with('/') => base + absolute,
            relative => {
                let path = self.uri.path();
                let folder = &path[..=path.rfind('/').unwrap_or(0)];
                format!("{base}{folder}{relative}")
            }
        };
        let target = Self::read(&text)?;
        if self.secure && !target.secure {
            let sentence = "redirects to http://, where anyone on the way can replace the file";
            return Err(Fault::last(format!("{} {sentence}", self.host)));
        }
        Ok(target)
    }

    /// The host and the path, without user, password and query.
    pub fn shown(&self) -> String {
        quote(&format!("{}{}", self.host_header(), self.uri.path()))
    }
}

/// Whether a reference is a whole URL. Others may have one in their query.
fn begins_with_scheme(text: &str) -> bool {
    text.split_once("://").is_some_and(|(scheme, _)| !scheme.contains(['/', '?', '#']))
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn an_address_has_host_port_and_path() {
        let read = |text: &str| Address::read(text).unwrap();
        let full = read("https://Me:p%40ss@Example.com:8443/a/b.iso?sig=1#end");
        assert_eq!((&*full.host, full.port, full.secure), ("example.com", 8443, true));
        assert_eq!(full.path(), "/a/b.iso?sig=1");
        assert_eq!(full.host_header(), "example.com:8443");
        assert_eq!(full.login().as_deref(), Some("Me:p@ss"));
        assert_eq!(full.shown(), "example.com:8443/a/b.iso");
        assert_eq!(read("http://[::1]/x").host_header(), "[::1]");
        assert_eq!(read("http://a").path(), "/");
        let long = format!("https://a/{}", "x".repeat(MAX_LENGTH));
        for bad in ["", "a.iso", "ftp://a/b", "https://", "https://a b/", "file:///x", &long] {
            assert!(matches!(Address::read(bad), Err(Fault::Final(_))), "{bad}");
        }
    }

    #[test]
    fn a_login_is_for_its_server_alone() {
        let belongs = |one: &str, other: &str| {
            Address::read(one).unwrap().belongs_to(&Address::read(other).unwrap())
        };
        assert!(belongs("https://a/x", "https://A:443/y"));
        assert!(belongs("https://a/x", "http://a/y"));
        assert!(!belongs("https://a:8443/x", "https://a/y"));
        assert!(!belongs("https://b/x", "https://a/y"));
        assert!(!belongs("https://a/x", "http://a:8080/y"));
    }

    #[test]
    fn a_redirection_stays_secure() {
        let from = Address::read("https://a.example/x/y.iso?z").unwrap();
        for (location, target) in [
            ("https://b.example/c", "https://b.example/c"),
            ("//b.example/c", "https://b.example/c"),
            ("/c?d", "https://a.example/c?d"),
            ("c", "https://a.example/x/c"),
            ("/c?to=http://b.example", "https://a.example/c?to=http://b.example"),
            ("c?to=http://b.example", "https://a.example/x/c?to=http://b.example"),
        ] {
            assert_eq!(from.redirected(location).unwrap().uri, target.parse::<Uri>().unwrap());
        }
        let error = from.redirected("http://a.example/x").unwrap_err().to_string();
        assert!(error.contains("can replace the file"), "{error}");
        assert!(from.redirected("javascript:x://").is_err());
        let open = Address::read("http://a.example/x").unwrap();
        assert!(open.redirected("https://b.example/").unwrap().secure);
    }
}
