//! Who asks, and whether they may.
//!
//! Threats: a page from elsewhere can make a browser ask us anything, with the cookies that it has
//! for us. What changes or shows something is therefore for requests whose `Origin` is ours. And
//! such a page can have its own name lead to our address (DNS rebinding): its origin then is what
//! it calls us. It has no cookie then; but where no password is needed, only those may come in who
//! call us by an address, `localhost`, or what `origin` says. Where an owner said that everybody
//! may, its pages show and change nothing, unless nobody else can have that name: one without a
//! dot, one of a network at home, or one that a browser asked for by TLS, which ends at a proxy
//! with a certificate for it. What a proxy says of others counts when `proxy` names it, or it comes
//! by a Unix socket.

use std::net::IpAddr;
use std::sync::Arc;

use axum::http::{HeaderMap, StatusCode, header};
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;

use super::known::{Origins, Proxies};
use super::sessions::{Session, Sessions};
use crate::rfb::security::{Door, Doors, Passwords, Right};

/// What names end with that are of no use outside of a network (RFC 6761, 6762, 8375, clusters).
const OWN: [&str; 6] = [".local", ".lan", ".internal", ".home.arpa", ".svc", ".test"];

/// How somebody is connected.
#[derive(Clone, Copy, Debug)]
pub struct Line {
    /// The other end; none for a Unix socket.
    pub address: Option<IpAddr>,
    /// It is TLS.
    pub tls: bool,
}

/// What holds for everybody.
#[derive(Default)]
pub struct Rules {
    /// Who may come in.
    pub passwords: Passwords,
    /// `auth=none` was said: everybody may.
    pub open: bool,
    /// Nobody may touch.
    pub view_only: bool,
    /// Nobody minds what browsers call us.
    pub any_name: bool,
    /// What browsers call us, besides what they ask for.
    pub origins: Origins,
    /// Who may say for whom it asks.
    pub proxies: Proxies,
    /// What the window is called.
    pub name: String,
    /// How these rules are set.
    pub words: Words,
}

/// How options are called where they are set, for those who read why they are refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Words {
    /// Where we listen, if that is not `--web` and the place.
    pub to: Option<String>,
    /// What browsers call us.
    pub origin: &'static str,
    /// A password is asked for.
    pub password: &'static str,
    /// Nobody reads along.
    pub tls: &'static str,
}

impl Default for Words {
    fn default() -> Self {
        Self {
            to: None,
            origin: "--web ..,origin=",
            password: "password=FILE",
            tls: "tls-cert=FILE,tls-key=FILE",
        }
    }
}

/// Somebody who asks.
pub(super) struct Asker {
    /// For people.
    pub(super) peer: String,
    /// Where guesses are counted.
    pub(super) door: Door,
    /// What they call us.
    pub(super) host: String,
    /// Their way to us is TLS; not known behind some proxies.
    pub(super) secure: Option<bool>,
}

/// Somebody who may come in.
pub(super) struct Guest {
    /// What they may do.
    pub(super) right: Right,
    /// How they are known, if that can end.
    pub(super) session: Option<Arc<Session>>,
}

/// Why somebody may not.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Refusal {
    /// They have shown no password.
    Unknown,
    /// It was wrong.
    Wrong,
    /// Too often: nobody is heard for so many seconds.
    Later(u64),
    /// They come from somewhere else; the sentence says what can be done.
    Elsewhere(String),
}

impl Refusal {
    /// The status of the answer.
    pub(super) fn status(&self) -> StatusCode {
        match self {
            Self::Unknown | Self::Wrong => StatusCode::UNAUTHORIZED,
            Self::Later(_) => StatusCode::TOO_MANY_REQUESTS,
            Self::Elsewhere(_) => StatusCode::FORBIDDEN,
        }
    }

    /// What people read.
    pub(super) fn sentence(&self) -> String {
        match self {
            Self::Unknown => "Please log in.".into(),
            Self::Wrong => "That is not the password.".into(),
            Self::Later(seconds) => format!("Too many wrong passwords: try again in {seconds} s."),
            Self::Elsewhere(sentence) => sentence.clone(),
        }
    }
}

/// See the module.
pub(super) struct Gate {
    rules: Rules,
    sessions: Sessions,
}

impl Gate {
    pub(super) fn new(rules: Rules) -> Self {
        Self { rules, sessions: Sessions::default() }
    }

    /// Whether there is anything to say at the door.
    pub(super) fn asks(&self) -> bool {
        self.rules.passwords.are_needed()
    }

    /// Whether a name is asked for, too.
    pub(super) fn asks_name(&self) -> bool {
        self.rules.passwords.user.is_some()
    }

    /// Who asks.
    pub(super) fn asker(&self, line: Line, headers: &HeaderMap) -> Asker {
        let said = |name: &str| last(headers, name);
        let proxy = match line.address {
            Some(address) => self.rules.proxies.have(address),
            None => true,
        };
        let told = |name| proxy.then(|| said(name)).flatten();
        let address = told("x-forwarded-for").and_then(|it| it.parse().ok()).or(line.address);
        let host = told("x-forwarded-host").or_else(|| said("host")).unwrap_or_default();
        let scheme = told("x-forwarded-proto").map(|it| it.eq_ignore_ascii_case("https"));
        Asker {
            peer: address.map_or("local".into(), |it: IpAddr| it.to_canonical().to_string()),
            door: address.map_or(Door::Local, Door::of),
            host: host.to_ascii_lowercase(),
            secure: if line.tls { Some(true) } else { scheme },
        }
    }

    /// Whether the page that asks is ours.
    pub(super) fn same_origin(&self, asker: &Asker, headers: &HeaderMap) -> Result<(), Refusal> {
        let mut origins = headers.get_all(header::ORIGIN).iter();
        let origin = match (origins.next(), origins.next()) {
            (Some(origin), None) => origin.to_str().unwrap_or_default().to_ascii_lowercase(),
            // No browser asks so for a page, and nothing is sent along unasked.
            (None, None) if headers.contains_key(header::AUTHORIZATION) => return Ok(()),
            _ => String::new(),
        };
        if self.rules.origins.has(&origin) {
            return Ok(());
        }
        let same = origin.split_once("://").is_some_and(|(scheme, place)| {
            let fits = match asker.secure {
                Some(secure) => scheme == if secure { "https" } else { "http" },
                None => matches!(scheme, "http" | "https"),
            };
            fits && !place.is_empty() && plain(scheme, place) == plain(scheme, &asker.host)
        });
        if !same {
            return Err(Refusal::Elsewhere(format!(
                "This request is from `{}`, and this place is called `{}`: behind a proxy, set {}, \
                 or have the proxy pass on the header Host.",
                short(&origin),
                short(&asker.host),
                self.rules.words.origin
            )));
        }
        self.own_name(asker, &origin)
    }

    /// Whether the page that asks could do what it is for. It shows why not; nobody sees what is
    /// said of a WebSocket.
    pub(super) fn own_page(&self, asker: &Asker, headers: &HeaderMap) -> Result<(), Refusal> {
        let page = headers.get(header::REFERER).and_then(|it| it.to_str().ok());
        let Some((scheme, rest)) = page.and_then(|it| it.split_once("://")) else { return Ok(()) };
        let place = rest.split('/').next().unwrap_or_default().to_ascii_lowercase();
        let scheme = scheme.to_ascii_lowercase();
        if plain(&scheme, &place) != plain(&scheme, &asker.host) {
            return Ok(());
        }
        self.own_name(asker, &format!("{scheme}://{place}"))
    }

    /// Refuses pages under names that anybody could have given us, where no password is asked for.
    fn own_name(&self, asker: &Asker, origin: &str) -> Result<(), Refusal> {
        let name = name_of(&asker.host);
        let own = !self.rules.open
            || self.rules.any_name
            // We do not speak it, or with a certificate that nobody else's name is in.
            || origin.starts_with("https://")
            || self.is_known(name)
            || !name.contains('.')
            || OWN.iter().any(|end| name.trim_end_matches('.').ends_with(end));
        if own {
            return Ok(());
        }
        let Words { origin: set, password, .. } = self.rules.words;
        Err(Refusal::Elsewhere(format!(
            "Without a password, pages of `{}` may do nothing here, since that could be anybody's \
             name: set {set} to `{}` if it is yours, or {password}, or come by its address.",
            short(name),
            short(origin)
        )))
    }

    /// Whether nobody else can be called so, or an owner has said it.
    fn is_known(&self, name: &str) -> bool {
        name == "localhost"
            || name.ends_with(".localhost")
            || name.trim_matches(['[', ']']).parse::<IpAddr>().is_ok()
            || self.rules.origins.hosts().any(|host| name_of(host) == name)
    }

    /// Whether somebody may come in, and to do what.
    pub(super) fn admit(
        &self,
        asker: &Asker,
        headers: &HeaderMap,
        doors: &Doors,
    ) -> Result<Guest, Refusal> {
        if !self.asks() {
            self.known_name(asker)?;
            return Ok(self.guest(Right::Full, None));
        }
        if let Some((user, password)) = basic(headers) {
            let right = self.judge(asker.door, &user, &password, doors)?;
            return Ok(self.guest(right, None));
        }
        let session = Self::cookie(asker, headers).and_then(|it| self.sessions.find(it));
        let session = session.ok_or(Refusal::Unknown)?;
        Ok(self.guest(session.right, Some(session)))
    }

    fn guest(&self, right: Right, session: Option<Arc<Session>>) -> Guest {
        let right = if self.rules.view_only { Right::View } else { right };
        Guest { right, session }
    }

    /// Judges a password; a right one starts a session, whose cookie this is.
    pub(super) fn log_in(
        &self,
        asker: &Asker,
        user: &[u8],
        password: &[u8],
        doors: &Doors,
    ) -> Result<String, Refusal> {
        let right = self.judge(asker.door, user, password, doors)?;
        let cookie = self.sessions.start(right).map_err(|error| {
            tracing::error!("web: {error:#}");
            Refusal::Unknown
        })?;
        tracing::info!("web: {} logged in", asker.peer);
        Ok(Self::written(asker, &cookie))
    }

    /// Ends a session; the answer is the cookie that takes the cookie away.
    pub(super) fn log_out(&self, asker: &Asker, headers: &HeaderMap) -> String {
        if let Some(cookie) = Self::cookie(asker, headers) {
            self.sessions.end(cookie);
        }
        format!("{}; Max-Age=0", Self::written(asker, ""))
    }

    fn judge(
        &self,
        door: Door,
        user: &[u8],
        password: &[u8],
        doors: &Doors,
    ) -> Result<Right, Refusal> {
        if let Some(left) = doors.closed(door) {
            return Err(Refusal::Later(left.as_secs() + 1));
        }
        match self.rules.passwords.check_plain(user, password) {
            Some(right) => {
                doors.opened(door, right);
                Ok(right)
            }
            None => {
                let count = doors.failed(door);
                tracing::warn!("web: a wrong password, number {count} from there ({door:?})");
                Err(Refusal::Wrong)
            }
        }
    }

    /// A cookie has no path: browsers then send it to the folder that set it, whatever proxies
    /// call that. Ports share their cookies, so the name tells them apart.
    fn written(asker: &Asker, value: &str) -> String {
        let secure = if asker.secure == Some(true) { "; Secure" } else { "" };
        format!("{}={value}; HttpOnly; SameSite=Strict{secure}", cookie_name(asker))
    }

    fn cookie<'a>(asker: &Asker, headers: &'a HeaderMap) -> Option<&'a str> {
        let name = cookie_name(asker);
        let all = headers.get_all(header::COOKIE).iter().filter_map(|it| it.to_str().ok());
        let mut pairs = all.flat_map(|it| it.split(';')).filter_map(|it| it.trim().split_once('='));
        pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Refuses names that anybody could have given us.
    fn known_name(&self, asker: &Asker) -> Result<(), Refusal> {
        let name = name_of(&asker.host);
        if self.rules.open || self.is_known(name) {
            return Ok(());
        }
        let Words { origin, password, .. } = self.rules.words;
        Err(Refusal::Elsewhere(format!(
            "Without a password, this place has to be called by its address, and not `{}`: set \
             {origin} to what the browser shows, or {password}.",
            short(name)
        )))
    }
}

fn cookie_name(asker: &Asker) -> String {
    let port = asker.host.strip_prefix(name_of(&asker.host)).unwrap_or_default();
    let digits: String = port.chars().filter(char::is_ascii_digit).take(5).collect();
    format!("transom{digits}")
}

/// A host without its port.
fn name_of(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => host,
    }
}

/// A host without the port that its scheme has anyway.
fn plain<'a>(scheme: &str, host: &'a str) -> &'a str {
    let port = if scheme == "https" { ":443" } else { ":80" };
    host.strip_suffix(port).unwrap_or(host)
}

/// What the nearest one said: the last of a list.
fn last(headers: &HeaderMap, name: &str) -> Option<String> {
    let value = headers.get_all(name).iter().next_back()?.to_str().ok()?;
    value.rsplit(',').next().map(|it| it.trim().to_owned()).filter(|it| !it.is_empty())
}

/// A name and a password of RFC 7617.
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
mod test {
    use axum::http::HeaderValue;

    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let pair = |(name, value): &(&'static str, &str)| {
            (name.parse().unwrap(), HeaderValue::from_str(value).unwrap())
        };
        list.iter().map(pair).collect()
    }

    fn near(tls: bool) -> Line {
        Line { address: Some("127.0.0.1".parse().unwrap()), tls }
    }

    fn same(gate: &Gate, line: Line, list: &[(&'static str, &str)]) -> bool {
        let headers = headers(list);
        gate.same_origin(&gate.asker(line, &headers), &headers).is_ok()
    }

    #[test]
    fn only_pages_of_ours_may_ask() {
        let gate = Gate::new(Rules::default());
        let asks =
            |host, origin, tls| same(&gate, near(tls), &[("host", host), ("origin", origin)]);
        assert!(asks("a.org:6080", "http://a.org:6080", false));
        assert!(asks("a.org", "https://A.org", true));
        assert!(asks("a.org", "https://a.org:443", true));
        assert!(asks("[::1]:6080", "http://[::1]:6080", false));
        assert!(asks("a.org", "https://a.org", false), "a proxy that says nothing of TLS");
        for (host, origin, tls) in [
            ("a.org", "http://b.org", false),
            ("a.org", "http://a.org:81", false),
            ("a.org", "http://a.org", true),
            ("a.org", "null", false),
            ("a.org", "", false),
            ("", "http://", false),
            ("a.org", "file://a.org", false),
            ("a.org", "http://a.org.b.org", false),
        ] {
            assert!(!asks(host, origin, tls), "{host} {origin}");
        }
        assert!(!same(&gate, near(false), &[("host", "a.org")]), "no origin, no way to be known");
        let twice = [("host", "a.org"), ("origin", "http://a.org"), ("origin", "http://b.org")];
        assert!(!same(&gate, near(false), &twice[..1]) && same(&gate, near(false), &twice[..2]));
        let mut both = headers(&twice[..2]);
        both.append("origin", HeaderValue::from_static("http://b.org"));
        assert!(gate.same_origin(&gate.asker(near(false), &both), &both).is_err());
        let script = [("host", "a.org"), ("authorization", "Basic eDp5")];
        assert!(same(&gate, near(false), &script), "no page can add this header");
    }

    #[test]
    fn proxies_are_believed_when_they_were_named() {
        let told = [
            ("host", "127.0.0.1:6080"),
            ("origin", "https://a.org"),
            ("x-forwarded-host", "evil, a.org"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-for", "10.9.9.9, 10.0.0.7"),
        ];
        let stranger = Gate::new(Rules::default());
        assert!(!same(&stranger, near(false), &told));
        let asker = stranger.asker(near(false), &headers(&told));
        assert_eq!((asker.peer.as_str(), asker.secure), ("127.0.0.1", None));
        let proxies = Proxies::read("127.0.0.0/8").unwrap();
        let friend = Gate::new(Rules { proxies, ..Rules::default() });
        let socket = Line { address: None, tls: false };
        for (gate, line) in [(&friend, near(false)), (&stranger, socket)] {
            assert!(same(gate, line, &told));
            let asker = gate.asker(line, &headers(&told));
            assert_eq!((asker.peer.as_str(), asker.secure), ("10.0.0.7", Some(true)));
            assert_eq!(asker.door, Door::of("10.0.0.7".parse().unwrap()));
        }
        let origins = Origins::read("https://a.org").unwrap();
        let configured = Gate::new(Rules { origins, ..Rules::default() });
        assert!(same(&configured, near(false), &told[..2]));
    }

    #[test]
    fn without_a_password_a_name_of_somebody_elses_is_refused() {
        let doors = Doors::default();
        let gate = Gate::new(Rules::default());
        let comes = |gate: &Gate, host| {
            let headers = headers(&[("host", host)]);
            gate.admit(&gate.asker(near(false), &headers), &headers, &doors).is_ok()
        };
        for host in ["127.0.0.1:6080", "[::1]:6080", "LocalHost:1", "vm.localhost", "192.0.2.1"] {
            assert!(comes(&gate, host), "{host}");
        }
        for host in ["evil.org:6080", "localhost.evil.org", "", "127.0.0.1.evil.org", "a:b"] {
            assert!(!comes(&gate, host), "{host}");
        }
        let origins = Origins::read("https://Vm.org:8443").unwrap();
        let named = Gate::new(Rules { origins, ..Rules::default() });
        assert!(comes(&named, "vm.org") && !comes(&named, "evil.org"));
        assert!(comes(&Gate::new(Rules { open: true, ..Rules::default() }), "any.org"));
    }

    #[test]
    fn where_everybody_may_come_a_page_of_anybodys_name_may_not_ask() {
        let words = Words { origin: "WEB_ORIGIN", password: "PROTECT=Y", ..Words::default() };
        let origins = Origins::read("http://vm.example:8080").unwrap();
        let rules = Rules { open: true, words, origins, ..Rules::default() };
        let gate = Gate::new(rules);
        let asks = |gate: &Gate, scheme: &str, host: &str| {
            let headers = headers(&[("host", host), ("origin", &format!("{scheme}://{host}"))]);
            gate.same_origin(&gate.asker(near(false), &headers), &headers)
        };
        for host in ["evil.example:8006", "evil.example", "evil.example.", "a.localhost.evil.org"] {
            let refused = asks(&gate, "http", host).unwrap_err();
            let says = refused.sentence();
            assert_eq!(refused.status(), StatusCode::FORBIDDEN);
            assert!(says.contains("WEB_ORIGIN") && says.contains("PROTECT=Y"), "{says}");
            assert!(says.contains(host), "{says}");
            let page = headers(&[("host", host), ("referer", &format!("http://{host}/vm/"))]);
            assert_eq!(gate.own_page(&gate.asker(near(false), &page), &page), Err(refused));
            // TLS ends at a proxy that has a certificate for that name.
            assert_eq!(asks(&gate, "https", host), Ok(()), "{host}");
        }
        for host in [
            "192.0.2.1:8006",
            "[fd00::1]:8006",
            "localhost:8006",
            "windows:8006",
            "nas.local:8006",
            "windows-service.windows.svc:8006",
            "windows-service.windows.svc.cluster.local",
            "vm.example:8080",
        ] {
            assert_eq!(asks(&gate, "http", host), Ok(()), "{host}");
        }
        let any = Gate::new(Rules { open: true, any_name: true, ..Rules::default() });
        assert_eq!(asks(&any, "http", "evil.example:8006"), Ok(()));
        // Where a password is asked for, such a page has no cookie.
        let passwords = Passwords { full: Some("full".into()), ..Passwords::default() };
        let asked = Gate::new(Rules { passwords, ..Rules::default() });
        assert_eq!(asks(&asked, "http", "a.org"), Ok(()));
    }

    #[test]
    fn a_password_leads_to_a_cookie_and_guessing_to_waiting() {
        let doors = Doors::default();
        let passwords =
            Passwords { full: Some("full".into()), view: Some("look".into()), user: None };
        let gate = Gate::new(Rules { passwords, ..Rules::default() });
        let bare = headers(&[("host", "a.org:6080")]);
        let asker = gate.asker(near(true), &bare);
        let admit = |list: &[(&'static str, &str)]| {
            gate.admit(&asker, &headers(list), &doors).map(|it| it.right)
        };
        assert_eq!(admit(&[]), Err(Refusal::Unknown));
        let cookie = gate.log_in(&asker, b"", b"look", &doors).unwrap();
        assert!(cookie.ends_with("; HttpOnly; SameSite=Strict; Secure"), "{cookie}");
        let pair = cookie.split(';').next().unwrap();
        assert!(pair.starts_with("transom6080=") && pair.len() > 60, "{pair}");
        let mixed = format!("a=b; {pair}; c=d");
        assert_eq!(admit(&[("cookie", &mixed)]), Ok(Right::View));
        assert_eq!(admit(&[("cookie", "transom6080=0")]), Err(Refusal::Unknown));
        let gone = gate.log_out(&asker, &headers(&[("cookie", pair)]));
        assert!(gone.ends_with("Max-Age=0"));
        assert_eq!(admit(&[("cookie", pair)]), Err(Refusal::Unknown));
        let basic = |text: &str| format!("Basic {}", BASE64_STANDARD.encode(text));
        assert_eq!(admit(&[("authorization", &basic("me:full"))]), Ok(Right::Full));
        assert_eq!(admit(&[("authorization", &basic("me:wrong"))]), Err(Refusal::Wrong));
        assert_eq!(gate.log_in(&asker, b"", b"wrong", &doors), Err(Refusal::Wrong));
        let later = gate.log_in(&asker, b"", b"full", &doors);
        assert!(matches!(later, Err(Refusal::Later(1..=2))), "{later:?}");
        assert!(matches!(admit(&[("authorization", &basic("me:full"))]), Err(Refusal::Later(_))));
    }
}
