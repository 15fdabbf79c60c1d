//! Authentication and authorization of requests: names, origins, passwords and sessions.
//!
//! Threats: a foreign page can make a browser send us any request, with the cookies that the
//! browser holds for us. A request that changes something must therefore carry an `Origin` of ours,
//! or must not come from a browser: browsers send `Origin` with everything but plain reads, and no
//! page can hide it. A foreign page can also point its own name at our address (DNS rebinding). Its
//! origin then equals the name it uses for us. It has no cookie for that name, but where no
//! password is needed, every request, reads included, must use a name that no stranger could own
//! ([`Gate::check_host`]). The headers of a proxy count only if `proxy` lists its address, or if it
//! connects by a Unix socket.

use std::net::{IpAddr, Ipv6Addr};
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use subtle::ConstantTimeEq as _;

use super::sessions::{Session, Sessions, random};
use super::trusted::{Origins, Proxies};
use crate::rfb::security::{Access, Denied, LoginLimiter, Passwords, PeerNetwork};

/// The request's relation to the page that made it, as the browser sees it (Fetch Metadata 2.2).
const SEC_FETCH_SITE: HeaderName = HeaderName::from_static("sec-fetch-site");
/// Suffixes of names that have no meaning outside of one network (RFC 6761, 6762, 8375, clusters).
const PRIVATE_SUFFIXES: [&str; 6] = [".local", ".lan", ".internal", ".home.arpa", ".svc", ".test"];

#[derive(Clone, Copy, Debug)]
pub struct Connection {
    /// The address of the peer, or `None` for a Unix socket.
    pub address: Option<IpAddr>,
    pub tls: bool,
}

#[derive(Default)]
pub struct Rules {
    pub passwords: Passwords,
    /// `auth=none` is set: clients need no password.
    pub open: bool,
    pub view_only: bool,
    /// Accepts any host name, so DNS rebinding is not prevented.
    pub any_host: bool,
    /// Origins that are ours in addition to the one that the request addresses.
    pub origins: Origins,
    /// Trusted proxies: peers whose `X-Forwarded-*` headers are believed.
    pub proxies: Proxies,
    /// The title of the window.
    pub name: String,
    pub option_names: OptionNames,
    pub sessions: Arc<Sessions>,
}

/// The names of options as the user sets them, for messages that suggest a change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OptionNames {
    /// The option for the listening address, unless it is `--web` with the address.
    pub address: Option<String>,
    pub origin: &'static str,
    pub password: &'static str,
    /// An instruction that leads to TLS.
    pub tls: &'static str,
}

impl Default for OptionNames {
    fn default() -> Self {
        Self {
            address: None,
            origin: "`origin=` of --web",
            password: "password=FILE",
            tls: "set tls-cert=FILE,tls-key=FILE",
        }
    }
}

pub(super) struct Client {
    /// The address, for logs.
    pub(super) peer: String,
    /// The source that wrong passwords are counted for.
    pub(super) network: PeerNetwork,
    /// The host that the request addresses: one name or address, with an optional port. `None` if
    /// the header is invalid or repeated: another reader might pick the other value.
    host: Option<String>,
    /// The `Host` header, if a trusted proxy says another one.
    own_host: Option<String>,
    /// The network, unless proxies that are not trusted may be between.
    own_network: Option<PeerNetwork>,
    /// Whether the client uses TLS, which is unknown behind some proxies.
    pub(super) secure: Option<bool>,
    /// A browser asked for this name by TLS, without the word of a proxy.
    sent_by_tls: bool,
}

impl Client {
    /// A browser asked for this name by TLS, so the server that answers has a certificate for it.
    fn is_certified(&self) -> bool {
        self.sent_by_tls || self.secure == Some(true)
    }

    fn host(&self) -> &str {
        self.host.as_deref().unwrap_or_default()
    }
}

pub(super) struct Admitted {
    pub(super) access: Access,
    /// The session, for clients that can log out.
    pub(super) session: Option<Arc<Session>>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// No password and no valid cookie was sent.
    Unknown,
    Wrong,
    /// Too many wrong passwords: all are refused for this number of seconds.
    RetryAfter(u64),
    /// The request has a foreign origin or host name. The sentence says what can be done.
    Foreign(String),
    /// The host is missing, invalid or ambiguous.
    InvalidHost,
}

impl Refusal {
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Unknown | Self::Wrong => StatusCode::UNAUTHORIZED,
            Self::RetryAfter(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Foreign(_) => StatusCode::FORBIDDEN,
            Self::InvalidHost => StatusCode::BAD_REQUEST,
        }
    }

    pub(super) fn sentence(&self) -> String {
        match self {
            Self::Unknown => "Please log in.".into(),
            Self::Wrong => "The password is wrong.".into(),
            Self::RetryAfter(seconds) => {
                format!("Too many wrong passwords: try again in {seconds} s.")
            }
            Self::Foreign(sentence) => sentence.clone(),
            Self::InvalidHost => "Host, or X-Forwarded-Host of a proxy, must be one name or \
                                  address, with an optional port."
                .into(),
        }
    }
}

pub(super) struct Gate {
    rules: Rules,
    /// The value of the cookie that proves an earlier request by TLS. `None` without randomness.
    proof: Option<String>,
}

impl Gate {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, proof: random().ok() }
    }

    pub(super) fn needs_password(&self) -> bool {
        self.rules.passwords.are_needed()
    }

    pub(super) fn needs_user(&self) -> bool {
        self.rules.passwords.user.is_some()
    }

    pub(super) fn client(&self, connection: Connection, headers: &HeaderMap) -> Client {
        let proxy = match connection.address {
            Some(address) => self.rules.proxies.contains(address),
            None => true,
        };
        let forwarded = |name| proxy.then(|| last(headers, name)).flatten();
        let address =
            forwarded("x-forwarded-for").and_then(|it| it.parse().ok()).or(connection.address);
        let own = only(headers, &header::HOST);
        let host = own.clone().map(|host| forwarded("x-forwarded-host").unwrap_or(host));
        let plain =
            |host: Option<String>| host.map(|it| it.to_ascii_lowercase()).filter(|it| is_plain(it));
        let scheme = forwarded("x-forwarded-proto").map(|it| it.eq_ignore_ascii_case("https"));
        let secure = if connection.tls { Some(true) } else { scheme };
        // Browsers send `Sec-Fetch-Site` (Fetch Metadata) only by TLS and to names of this host,
        // and scripts cannot set it. An `Origin` tells how the page was loaded, not how this
        // request is sent.
        let sent_by_tls = connection.tls || headers.contains_key(SEC_FETCH_SITE);
        let network = address.map_or(PeerNetwork::Local, PeerNetwork::of);
        let hops = headers.get_all("x-forwarded-for").iter();
        let hops = hops.map(|it| it.as_bytes().split(|it| *it == b',').count()).sum::<usize>();
        let mut client = Client {
            peer: address.map_or("local".into(), |it: IpAddr| it.to_canonical().to_string()),
            network,
            host: plain(host.clone()),
            own_host: plain(own.filter(|own| host.as_ref() != Some(own))),
            own_network: Some(network).filter(|_| hops == 0 || proxy && hops == 1),
            secure,
            sent_by_tls,
        };
        client.sent_by_tls |= self.is_proven(&client, headers);
        client
    }

    /// The cookie that proves to the WebSocket that its page came by TLS. It is set only where this
    /// is in doubt: not all browsers send `Sec-Fetch-Site` with a WebSocket. It is `Secure`, so a
    /// page of the same name without TLS never gets it.
    pub(super) fn proof(&self, client: &Client) -> Option<String> {
        let doubted = !self.needs_password() && client.secure.is_none() && client.is_certified();
        let proof = self.proof.as_ref().filter(|_| doubted)?;
        Some(format!("{}={proof}; HttpOnly; SameSite=Strict; Secure", proof_name(client)))
    }

    fn is_proven(&self, client: &Client, headers: &HeaderMap) -> bool {
        let sent = cookie(headers, &proof_name(client));
        let both = self.proof.as_ref().zip(sent);
        both.is_some_and(|(proof, sent)| proof.as_bytes().ct_eq(sent.as_bytes()).into())
    }

    /// Refuses requests from foreign pages.
    pub(super) fn same_origin(&self, client: &Client, headers: &HeaderMap) -> Result<(), Refusal> {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let origin = match (origins.next(), origins.next()) {
            (Some(origin), None) => origin.to_str().unwrap_or_default().to_ascii_lowercase(),
            // Browsers never add this header by themselves, and no page can make them send it.
            (None, None) if headers.contains_key(header::AUTHORIZATION) => return Ok(()),
            _ => String::new(),
        };
        if self.rules.origins.contains(&origin) {
            return Ok(());
        }
        let same = origin.split_once("://").is_some_and(|(scheme, host)| {
            let fits = match client.secure {
                Some(secure) => scheme == if secure { "https" } else { "http" },
                None => matches!(scheme, "http" | "https"),
            };
            fits && !host.is_empty() && plain(scheme, host) == plain(scheme, client.host())
        });
        if same {
            return Ok(());
        }
        let host = short(client.host());
        Err(Refusal::Foreign(match &*origin {
            "" => format!(
                "This request has no Origin header: a page must send the origin of `{host}`, and \
                 a program must send JSON (Content-Type: application/json) without Cookie, \
                 Referer and Sec-Fetch-Site."
            ),
            _ => format!(
                "This request is from `{}`, but it addresses `{host}`: behind a proxy, set {}, or \
                 let the proxy pass on the Host header.",
                short(&origin),
                self.rules.option_names.origin
            ),
        }))
    }

    /// Refuses changes unless they come from a page of ours, or from a program that is no browser.
    /// Even a browser that omits `Origin` cannot send JSON to another site: it sends a preflight
    /// request first (CORS), and we never answer that.
    pub(super) fn may_act(&self, client: &Client, headers: &HeaderMap) -> Result<(), Refusal> {
        let browsers = [header::ORIGIN, header::COOKIE, header::REFERER, SEC_FETCH_SITE];
        let kind = headers.get(header::CONTENT_TYPE).and_then(|it| it.to_str().ok());
        let kind = kind.and_then(|it| it.split(';').next()).unwrap_or_default();
        let json = kind.trim().eq_ignore_ascii_case("application/json");
        if json && !browsers.iter().any(|name| headers.contains_key(name)) {
            return Ok(());
        }
        self.same_origin(client, headers)
    }

    /// Refuses names that a stranger could own, where no password is needed. With `auth=none`, more
    /// names are accepted: names without a dot, names of home networks and clusters, and names that
    /// a browser asked for by TLS.
    pub(super) fn check_host(&self, client: &Client) -> Result<(), Refusal> {
        let host = client.host.as_deref().ok_or(Refusal::InvalidHost)?;
        self.check_name(host, self.rules.open, client.is_certified())?;
        match &client.own_host {
            // A page could send any `X-Forwarded-` header, which some proxies pass on. A proxy may
            // call this host by a name of its own network.
            Some(own) => self.check_name(own, true, client.sent_by_tls),
            None => Ok(()),
        }
    }

    /// `open`: names of the local network are accepted, too, and with `certified` all names.
    fn check_name(&self, host: &str, open: bool, certified: bool) -> Result<(), Refusal> {
        let name = name_of(host);
        if self.needs_password() || self.rules.any_host || self.is_known(name) {
            return Ok(());
        }
        let near = PRIVATE_SUFFIXES.iter().any(|end| name.trim_end_matches('.').ends_with(end));
        let own = certified || !name.contains('.') || near;
        if open && own {
            return Ok(());
        }
        let OptionNames { origin, password, .. } = self.rules.option_names;
        let (name, host) = (short(name), short(host));
        Err(Refusal::Foreign(format!(
            "No password is set, and `{name}` could be another site's name for this address: set \
             {origin} to `http://{host}` if the name is yours, or set {password}, or use the IP \
             address."
        )))
    }

    /// Whether no stranger can own this name, or the configuration lists it.
    fn is_known(&self, name: &str) -> bool {
        name == "localhost"
            || name.ends_with(".localhost")
            || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || self.rules.origins.hosts().any(|host| name_of(host) == name)
    }

    pub(super) fn admit(
        &self,
        client: &Client,
        headers: &HeaderMap,
        limiter: &LoginLimiter,
    ) -> Result<Admitted, Refusal> {
        self.check_host(client)?;
        if !self.needs_password() {
            return Ok(self.admitted(Access::Full, None));
        }
        if let Some((user, password)) = basic(headers) {
            let access = self.check_password(client.network, &user, &password, limiter)?;
            return Ok(self.admitted(access, None));
        }
        let cookie = Self::cookie(client, headers);
        let session = cookie.and_then(|it| self.rules.sessions.find(it, client.network));
        let session = session.ok_or(Refusal::Unknown)?;
        Ok(self.admitted(session.access, Some(session)))
    }

    fn admitted(&self, access: Access, session: Option<Arc<Session>>) -> Admitted {
        let access = if self.rules.view_only { Access::View } else { access };
        Admitted { access, session }
    }

    /// On success, starts a session and returns its cookie.
    pub(super) fn log_in(
        &self,
        client: &Client,
        user: &[u8],
        password: &[u8],
        limiter: &LoginLimiter,
    ) -> Result<String, Refusal> {
        let access = self.check_password(client.network, user, password, limiter)?;
        let cookie = self.rules.sessions.start(access, client.own_network).map_err(|error| {
            tracing::error!("web: {error:#}");
            Refusal::Unknown
        })?;
        tracing::info!("web: {} logged in", client.peer);
        Ok(Self::written(client, &cookie))
    }

    /// Ends a session. Returns the header value that makes the browser delete the cookie.
    pub(super) fn log_out(&self, client: &Client, headers: &HeaderMap) -> String {
        if let Some(cookie) = Self::cookie(client, headers) {
            self.rules.sessions.end(cookie, client.network);
        }
        format!("{}; Max-Age=0", Self::written(client, ""))
    }

    fn check_password(
        &self,
        network: PeerNetwork,
        user: &[u8],
        password: &[u8],
        limiter: &LoginLimiter,
    ) -> Result<Access, Refusal> {
        limiter.check(network, || self.rules.passwords.check_plain(user, password)).map_err(
            |denied| match denied {
                Denied::Later(left) => Refusal::RetryAfter(left.as_secs() + 1),
                Denied::Wrong(count) => {
                    tracing::warn!("web: a wrong password, number {count} from {network}");
                    Refusal::Wrong
                }
            },
        )
    }

    /// The cookie has no path: browsers then send it to the folder that set it, whatever a proxy
    /// calls that folder. Cookies are shared between ports, so the name contains the port.
    fn written(client: &Client, value: &str) -> String {
        let secure = if client.secure == Some(true) { "; Secure" } else { "" };
        format!("{}={value}; HttpOnly; SameSite=Strict{secure}", cookie_name(client))
    }

    fn cookie<'a>(client: &Client, headers: &'a HeaderMap) -> Option<&'a str> {
        cookie(headers, &cookie_name(client))
    }
}

fn cookie<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let all = headers.get_all(header::COOKIE).iter().filter_map(|it| it.to_str().ok());
    let mut pairs = all.flat_map(|it| it.split(';')).filter_map(|it| it.trim().split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

fn proof_name(client: &Client) -> String {
    format!("{}-tls", cookie_name(client))
}

fn cookie_name(client: &Client) -> String {
    let host = client.host();
    let port = host.strip_prefix(name_of(host)).unwrap_or_default();
    let digits: String = port.chars().filter(char::is_ascii_digit).take(5).collect();
    format!("transom{digits}")
}

/// Whether this is a name or an address with an optional port (RFC 9110 7.2), as browsers write it.
/// An empty host is allowed, as programs may omit it.
fn is_plain(host: &str) -> bool {
    let name = name_of(host);
    match name.strip_prefix('[') {
        Some(address) => address.strip_suffix(']').is_some_and(|it| it.parse::<Ipv6Addr>().is_ok()),
        None => name.bytes().all(|it| it.is_ascii_alphanumeric() || b"-._".contains(&it)),
    }
}

fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// Removes the default port of the scheme from a host.
fn plain<'a>(scheme: &str, host: &'a str) -> &'a str {
    let port = if scheme == "https" { ":443" } else { ":80" };
    host.strip_suffix(port).unwrap_or(host)
}

/// The value of a header that must not be repeated. Empty if the header is absent.
fn only(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (None, _) => Some(String::new()),
        (Some(value), None) => value.to_str().ok().map(|it| it.trim().to_owned()),
        _ => None,
    }
}

/// The value that the nearest proxy added: the last of the list.
fn last(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get_all(name).iter().next_back()?.to_str().ok()?;
    value.rsplit(',').next().map(|it| it.trim().to_owned()).filter(|it| !it.is_empty())
}

/// The user name and the password of Basic authentication (RFC 7617).
fn basic(headers: &HeaderMap) -> Option<(Vec<u8>, Vec<u8>)> {
    let value = headers.get(header::AUTHORIZATION)?.to_str().ok()?;
    let (scheme, text) = value.split_once(' ')?;
    let bytes = BASE64_STANDARD.decode(text.trim()).ok()?;
    let at = bytes.iter().position(|byte| *byte == b':')?;
    let basic = scheme.eq_ignore_ascii_case("basic");
    basic.then(|| (bytes[..at].to_vec(), bytes[at + 1..].to_vec()))
}

fn short(text: &str) -> String {
    text.chars().take(80).collect()
}

#[cfg(test)]
mod test;
