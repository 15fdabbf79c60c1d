//! Tests of `gate`.

use axum::http::HeaderValue;

use super::*;

fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
    let pair = |(name, value): &(&'static str, &str)| {
        (name.parse().unwrap(), HeaderValue::from_str(value).unwrap())
    };
    list.iter().map(pair).collect()
}

fn near(tls: bool) -> Connection {
    Connection { address: Some("127.0.0.1".parse().unwrap()), tls }
}

fn same(gate: &Gate, connection: Connection, list: &[(&'static str, &str)]) -> bool {
    let headers = headers(list);
    gate.same_origin(&gate.client(connection, &headers), &headers).is_ok()
}

#[test]
fn only_same_origin_pages_are_admitted() {
    let gate = Gate::new(Rules::default());
    let asks = |host, origin, tls| same(&gate, near(tls), &[("host", host), ("origin", origin)]);
    assert!(asks("a.org:6080", "http://a.org:6080", false));
    assert!(asks("a.org", "https://A.org", true));
    assert!(asks("a.org", "https://a.org:443", true));
    assert!(asks("[::1]:6080", "http://[::1]:6080", false));
    assert!(asks("a.org", "https://a.org", false), "a proxy that does not report TLS");
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
    assert!(!same(&gate, near(false), &[("host", "a.org")]), "neither an origin nor a password");
    let twice = [("host", "a.org"), ("origin", "http://a.org"), ("origin", "http://b.org")];
    assert!(!same(&gate, near(false), &twice[..1]) && same(&gate, near(false), &twice[..2]));
    let mut both = headers(&twice[..2]);
    both.append("origin", HeaderValue::from_static("http://b.org"));
    assert!(gate.same_origin(&gate.client(near(false), &both), &both).is_err());
    let script = [("host", "a.org"), ("authorization", "Basic eDp5")];
    assert!(same(&gate, near(false), &script), "no page can add this header");
}

#[test]
fn only_listed_proxies_are_trusted() {
    let forwarded = [
        ("host", "127.0.0.1:6080"),
        ("origin", "https://a.org"),
        ("x-forwarded-host", "evil, a.org"),
        ("x-forwarded-proto", "https"),
        ("x-forwarded-for", "10.9.9.9, 10.0.0.7"),
    ];
    let stranger = Gate::new(Rules::default());
    assert!(!same(&stranger, near(false), &forwarded));
    let client = stranger.client(near(false), &headers(&forwarded));
    assert_eq!((client.peer.as_str(), client.secure), ("127.0.0.1", None));
    let proxies = Proxies::read("127.0.0.0/8").unwrap();
    let friend = Gate::new(Rules { proxies, ..Rules::default() });
    let socket = Connection { address: None, tls: false };
    for (gate, connection) in [(&friend, near(false)), (&stranger, socket)] {
        assert!(same(gate, connection, &forwarded));
        let client = gate.client(connection, &headers(&forwarded));
        assert_eq!((client.peer.as_str(), client.secure), ("10.0.0.7", Some(true)));
        assert_eq!(client.network, PeerNetwork::of("10.0.0.7".parse().unwrap()));
    }
    let origins = Origins::read("https://a.org").unwrap();
    let configured = Gate::new(Rules { origins, ..Rules::default() });
    assert!(same(&configured, near(false), &forwarded[..2]));
}

#[test]
fn without_a_password_foreign_host_names_are_refused() {
    let limiter = LoginLimiter::default();
    let gate = Gate::new(Rules::default());
    let comes = |gate: &Gate, host| {
        let headers = headers(&[("host", host)]);
        gate.admit(&gate.client(near(false), &headers), &headers, &limiter).is_ok()
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
    let passwords = Passwords { full: Some("full".into()), ..Passwords::default() };
    let guarded = Gate::new(Rules { passwords, ..Rules::default() });
    let any = headers(&[("host", "any.org")]);
    assert_eq!(
        guarded.check_host(&guarded.client(near(false), &any)),
        Ok(()),
        "a foreign page has no cookie"
    );
}

#[test]
fn an_open_screen_refuses_reads_under_foreign_host_names() {
    let option_names =
        OptionNames { origin: "WEB_ORIGIN", password: "PROTECT=Y", ..OptionNames::default() };
    let origins = Origins::read("http://vm.example:8080").unwrap();
    let proxies = Proxies::read("10.0.0.1").unwrap();
    let rules = Rules { open: true, option_names, origins, proxies, ..Rules::default() };
    let (gate, limiter) = (Gate::new(rules), LoginLimiter::default());
    let from = |address: &str, list: &[(&'static str, &str)]| {
        let connection = Connection { address: Some(address.parse().unwrap()), tls: false };
        let headers = headers(list);
        gate.admit(&gate.client(connection, &headers), &headers, &limiter).map(drop)
    };
    let reads = |list: &[(&'static str, &str)]| from("10.9.9.9", list);
    for host in ["evil.example:8006", "evil.example", "evil.example.", "a.localhost.evil.org"] {
        let refused = reads(&[("host", host)]).unwrap_err();
        let says = refused.sentence();
        assert_eq!(refused.status(), StatusCode::FORBIDDEN);
        assert!(says.contains("WEB_ORIGIN") && says.contains("PROTECT=Y"), "{says}");
        assert!(says.contains(host), "{says}");
        let origin = format!("http://{host}");
        assert_eq!(reads(&[("host", host), ("origin", &origin)]), Err(refused));
        // Headers that a script can set are believed only from a trusted proxy.
        let forwarded = [("host", host), ("x-forwarded-proto", "https")];
        assert!(reads(&forwarded).is_err(), "{host}");
        assert_eq!(from("10.0.0.1", &forwarded), Ok(()), "{host}");
        // A foreign page may have come by TLS, but from another server.
        assert!(reads(&[("host", host), ("origin", &format!("https://{host}"))]).is_err());
        // TLS ends at a proxy that has a certificate for that name.
        assert_eq!(reads(&[("host", host), ("sec-fetch-site", "none")]), Ok(()), "{host}");
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
        assert_eq!(reads(&[("host", host)]), Ok(()), "{host}");
    }
    for host in ["evil.example,localhost", "localhost evil.example", "a@localhost", "[::1]a"] {
        assert_eq!(reads(&[("host", host)]), Err(Refusal::InvalidHost), "{host}");
        let forwarded = [("host", "localhost"), ("x-forwarded-host", host)];
        let list = host.contains(',');
        assert_eq!(
            from("10.0.0.1", &forwarded).is_ok(),
            list,
            "the nearest proxy added the last entry"
        );
        assert_eq!(reads(&forwarded), Ok(()), "the header is ignored");
    }
    let any = Gate::new(Rules { open: true, any_host: true, ..Rules::default() });
    let evil = headers(&[("host", "evil.example:8006")]);
    assert_eq!(any.check_host(&any.client(near(false), &evil)), Ok(()));
}

#[test]
fn browsers_without_fetch_metadata_need_a_cookie() {
    let gate = Gate::new(Rules { open: true, ..Rules::default() });
    let reads = |list: &[(&'static str, &str)]| {
        let headers = headers(list);
        gate.admit(&gate.client(near(false), &headers), &headers, &LoginLimiter::default())
            .map(drop)
    };
    let (host, tls) = (("host", "evil.example"), ("sec-fetch-site", "none"));
    let shown = |gate: &Gate, list: &[(&'static str, &str)]| {
        gate.proof(&gate.client(near(false), &headers(list)))
    };
    let proof = shown(&gate, &[host, tls]).unwrap();
    assert!(proof.ends_with("; HttpOnly; SameSite=Strict; Secure"), "{proof}");
    let proof = proof.split(';').next().unwrap();
    assert!(reads(&[host, ("cookie", proof)]).is_ok());
    assert_eq!(shown(&gate, &[host]), None);
    let another = Gate::new(Rules { open: true, ..Rules::default() });
    let wrong = shown(&another, &[host, tls]).unwrap();
    assert!(reads(&[host, ("cookie", &wrong)]).is_err());
}

#[test]
fn a_program_may_act_without_an_origin() {
    let gate = Gate::new(Rules { open: true, ..Rules::default() });
    let acts = |list: &[(&'static str, &str)]| {
        let headers = headers(list);
        gate.may_act(&gate.client(near(false), &headers), &headers)
    };
    let (host, json) = (("host", "10.0.0.1:8006"), ("content-type", "application/json"));
    assert_eq!(acts(&[host, json]), Ok(()));
    assert_eq!(acts(&[host, ("content-type", "Application/JSON; charset=utf-8")]), Ok(()));
    assert_eq!(acts(&[host, json, ("origin", "http://10.0.0.1:8006")]), Ok(()));
    for mark in [
        ("origin", "http://evil.example"),
        ("origin", "null"),
        ("cookie", "transom8006=1"),
        ("referer", "http://evil.example/"),
        ("sec-fetch-site", "cross-site"),
    ] {
        assert!(acts(&[host, json, mark]).is_err(), "{mark:?}");
    }
    for kind in ["text/plain", "application/x-www-form-urlencoded", ""] {
        let says = acts(&[host, ("content-type", kind)]).unwrap_err().sentence();
        assert!(says.contains("application/json") && !says.contains("``"), "{says}");
    }
    assert!(acts(&[host]).is_err(), "a form of an old browser");
}

#[test]
fn a_password_gives_a_cookie_and_wrong_ones_cause_delays() {
    let limiter = LoginLimiter::default();
    let passwords = Passwords { full: Some("full".into()), view: Some("look".into()), user: None };
    let gate = Gate::new(Rules { passwords, ..Rules::default() });
    let bare = headers(&[("host", "a.org:6080")]);
    let client = gate.client(near(true), &bare);
    let admit = |list: &[(&'static str, &str)]| {
        gate.admit(&client, &headers(list), &limiter).map(|it| it.access)
    };
    assert_eq!(admit(&[]), Err(Refusal::Unknown));
    let cookie = gate.log_in(&client, b"", b"look", &limiter).unwrap();
    assert!(cookie.ends_with("; HttpOnly; SameSite=Strict; Secure"), "{cookie}");
    let pair = cookie.split(';').next().unwrap();
    assert!(pair.starts_with("transom6080=") && pair.len() > 60, "{pair}");
    let mixed = format!("a=b; {pair}; c=d");
    assert_eq!(admit(&[("cookie", &mixed)]), Ok(Access::View));
    assert_eq!(admit(&[("cookie", "transom6080=0")]), Err(Refusal::Unknown));
    let gone = gate.log_out(&client, &headers(&[("cookie", pair)]));
    assert!(gone.ends_with("Max-Age=0"));
    assert_eq!(admit(&[("cookie", pair)]), Err(Refusal::Unknown));
    let basic = |text: &str| format!("Basic {}", BASE64_STANDARD.encode(text));
    assert_eq!(admit(&[("authorization", &basic("me:full"))]), Ok(Access::Full));
    assert_eq!(admit(&[("authorization", &basic("me:wrong"))]), Err(Refusal::Wrong));
    assert_eq!(gate.log_in(&client, b"", b"wrong", &limiter), Err(Refusal::Wrong));
    let later = gate.log_in(&client, b"", b"full", &limiter);
    assert!(matches!(later, Err(Refusal::RetryAfter(1..=2))), "{later:?}");
    assert!(matches!(admit(&[("authorization", &basic("me:full"))]), Err(Refusal::RetryAfter(_))));
}
