//! The address of the web port, as the log shows it.

use std::net::IpAddr;

use crate::net::user::lan;
use crate::pod::guard::Guard;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::translate::Display;
use crate::settings::value::Value as _;
use crate::settings::{ScreenSettings, Settings};

/// The address of the web port: WEB_ORIGIN, or else the pod's own address.
pub fn address(settings: &Settings) -> String {
    let pod = lan::PodAddresses::read();
    let own = pod.v4.map(IpAddr::from).or(pod.v6.map(IpAddr::from));
    address_at(&settings.screen, own)
}

fn address_at(screen: &ScreenSettings, own: Option<IpAddr>) -> String {
    let port = screen.web_port.0;
    if let Some(origins) = &screen.web_origin {
        return origins.show().split(',').map(|it| format!("{it}/")).collect::<Vec<_>>().join(", ");
    }
    let host = match own {
        Some(IpAddr::V4(own)) => own.to_string(),
        Some(IpAddr::V6(own)) => format!("[{own}]"),
        None => "127.0.0.1".to_owned(),
    };
    let port = if port == 80 { String::new() } else { format!(":{port}") };
    format!("http://{host}{port}/")
}

/// The line of the log with the address of the screen and the way to log in; `None` if browsers are
/// not served.
pub fn line(input: &ParsedEnvironment, guard: &Guard) -> Option<String> {
    let settings = &input.settings;
    settings.screen.web.then(|| line_at(input, guard, &address(settings)))
}

fn line_at(input: &ParsedEnvironment, guard: &Guard, address: &str) -> String {
    let screen = &input.settings.screen;
    let what = if screen.display.value == Display::Web { "The screen" } else { "The status page" };
    let port = screen.web_port.0;
    let published = match screen.web_origin {
        Some(_) => String::new(),
        None => format!(", or port {port} of the host where it is published"),
    };
    let who = match guard {
        Guard::Open => "no password".to_owned(),
        Guard::Password { user, .. } => format!("name {user}; password: {}", password(input)),
    };
    format!("{what}: {address}{published} ({who})")
}

/// Where to find the screen's password. The password itself is never shown.
fn password(input: &ParsedEnvironment) -> String {
    let given = ["PASS", "PASSWORD"].into_iter().find(|name| input.names.contains(name));
    match given {
        Some(name) if input.files.contains(name) => format!("set in {name}_FILE"),
        Some(name) => format!("set in {name}"),
        None => "`transom password` in the container prints it".to_owned(),
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::settings::environment::read;

    fn parse(words: &[(&str, &str)]) -> ParsedEnvironment {
        read(&words.iter().map(|(name, text)| (name.into(), text.into())).collect()).unwrap()
    }

    #[test]
    fn the_address_is_the_url_for_browsers() {
        let of = |words: &[(&str, &str)], own: Option<&str>| {
            address_at(&parse(words).settings.screen, own.map(|it| it.parse().unwrap()))
        };
        assert_eq!(of(&[], Some("10.88.0.3")), "http://10.88.0.3:8006/");
        assert_eq!(of(&[("WEB_PORT", "80")], Some("2001:db8::7")), "http://[2001:db8::7]/");
        assert_eq!(of(&[("WEB_PORT", "8007")], None), "http://127.0.0.1:8007/");
        let named = [("WEB_ORIGIN", "https://vm.example.org")];
        assert_eq!(of(&named, Some("10.88.0.3")), "https://vm.example.org/");
    }

    #[test]
    fn the_screen_line_explains_how_to_log_in() {
        let (user, password) = ("Docker".into(), "/run/password".into());
        let asks = Guard::Password { user, password, vnc: None };
        let of = |words: &[(&str, &str)], guard: &Guard| line_at(&parse(words), guard, "http://x/");
        assert_eq!(
            of(&[], &asks),
            "The screen: http://x/, or port 8006 of the host where it is published (name Docker; \
             password: `transom password` in the container prints it)"
        );
        let hush = [("PASSWORD", "hush")];
        assert!(of(&hush, &asks).ends_with("(name Docker; password: set in PASSWORD)"));
        let named = [("WEB_ORIGIN", "https://vm.example.org"), ("PASS", "hush")];
        assert_eq!(of(&named, &Guard::Open), "The screen: http://x/ (no password)");
        assert!(of(&named, &asks).ends_with("set in PASS)"));
        assert!(of(&[("DISPLAY", "none")], &asks).starts_with("The status page: "));
    }
}
