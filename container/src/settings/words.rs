//! Values with a grammar of their own: addresses, ports, names, keys, time zones.

use std::fmt;
use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::str::FromStr;

use anyhow::{Context, bail, ensure};
use host::mac::Mac;
use host::uuid::Uuid;

use super::value::{Value, quote};
use super::version::without_secrets;

/// Accepts colons, hyphens, or the digits alone.
impl Value for Mac {
    const ACCEPTS: &'static str = "MAC address";

    fn read(text: &str) -> anyhow::Result<Self> {
        let reason = "give a MAC address of six bytes, like 02:11:22:33:44:55";
        let pairs: Vec<&str> = match text.len() {
            12 if text.is_ascii() => {
                (0..6).filter_map(|pair| text.get(2 * pair..2 * pair + 2)).collect()
            }
            17 if text.contains('-') => text.split('-').collect(),
            17 => text.split(':').collect(),
            _ => bail!(reason),
        };
        let mac = Self::from_pairs(pairs).context(reason)?;
        ensure!(!mac.is_multicast(), "it is a multicast address: make its first byte even");
        ensure!(!mac.is_zero(), "the address 0 is invalid: {reason}");
        Ok(mac)
    }
    fn show(&self) -> String {
        self.to_string().to_ascii_uppercase()
    }
}

/// A network mask, as its number of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Mask(pub u8);

impl Mask {
    /// Whether an address is the first of its network, which names the network itself, or the last,
    /// which is the broadcast address.
    pub fn is_edge(self, address: Ipv4Addr) -> bool {
        let inside = u32::MAX.checked_shr(u32::from(self.0)).unwrap_or(0);
        let own = u32::from(address) & inside;
        own == 0 || own == inside
    }
}

impl Value for Mask {
    const ACCEPTS: &'static str = "network mask";

    fn read(text: &str) -> anyhow::Result<Self> {
        let reason = "give a mask from 255.255.0.0 to 255.255.255.0";
        let bits = match text.strip_prefix('/') {
            Some(bits) => bits.parse().ok(),
            None => text.parse().ok().map(|mask: Ipv4Addr| mask.into()).and_then(ones),
        };
        let bits = bits.filter(|bits| (16..=24).contains(bits));
        bits.map(Self).context(reason)
    }
    fn show(&self) -> String {
        let mask = u32::MAX.checked_shl(32 - u32::from(self.0.clamp(1, 32))).unwrap_or(0);
        Ipv4Addr::from(mask).to_string()
    }
}

/// The number of leading ones of a mask. Nothing if a one follows a zero.
fn ones(mask: u32) -> Option<u8> {
    let ones = mask.leading_ones();
    (mask.count_ones() == ones).then(|| u8::try_from(ones).ok()).flatten()
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    Tcp,
    Udp,
}

/// A list of ports, separated by commas: `n`, `n/tcp` or `n/udp`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ports(pub Vec<(u16, Protocol)>);

impl Value for Ports {
    const ACCEPTS: &'static str = "ports: n, n/tcp or n/udp, comma-separated";

    fn read(text: &str) -> anyhow::Result<Self> {
        let mut ports = Vec::new();
        // Users leave blanks and stray commas behind when they edit a list.
        let words = text.split([',', ' ']).map(str::trim).filter(|word| !word.is_empty());
        for word in words {
            let (number, protocol) = match word.split_once('/') {
                None => (word, Protocol::Tcp),
                Some((number, name)) if name.eq_ignore_ascii_case("tcp") => (number, Protocol::Tcp),
                Some((number, name)) if name.eq_ignore_ascii_case("udp") => (number, Protocol::Udp),
                Some(_) => bail!("{} is not a port: give n, n/tcp or n/udp", quote(word)),
            };
            let plain = number.bytes().all(|digit| digit.is_ascii_digit());
            let number = number.parse().ok().filter(|number: &u16| plain && *number != 0);
            let number = number.with_context(|| {
                format!("{} is not a port: give n, n/tcp or n/udp, n from 1 to 65535", quote(word))
            })?;
            if !ports.contains(&(number, protocol)) {
                ports.push((number, protocol));
            }
        }
        Ok(Self(ports))
    }
    fn show(&self) -> String {
        let shown = self.0.iter().map(|(number, protocol)| match protocol {
            Protocol::Tcp => number.to_string(),
            Protocol::Udp => format!("{number}/udp"),
        });
        shown.collect::<Vec<_>>().join(",")
    }
}

/// Texts, each with its check and with its form in messages.
macro_rules! texts {
    ($($name:ident $accepts:literal: $check:ident, $show:path;)+) => {$(
        #[derive(Clone, Debug, Default, PartialEq, Eq)]
        pub struct $name(pub String);

        impl Value for $name {
            const ACCEPTS: &'static str = $accepts;

            fn read(text: &str) -> anyhow::Result<Self> {
                $check(text)?;
                Ok(Self(text.to_owned()))
            }
            fn show(&self) -> String {
                $show(&self.0)
            }
        }
    )+};
}

texts! {
    Interface "interface name": check_interface, str::to_owned;
    FileName "file name": check_file_name, quote;
    HostName "computer name": check_host_name, str::to_owned;
    Workgroup "workgroup": check_workgroup, quote;
    Domain "domain": check_domain, str::to_owned;
    Zone "time zone": check_zone, str::to_owned;
    HostList "host names, comma-separated": check_line, quote;
}

/// Where the ISO image with Windows' drivers is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DriversFrom {
    /// It is not downloaded.
    Nowhere,
    Path(PathBuf),
    Url(String),
}

impl Value for DriversFrom {
    const ACCEPTS: &'static str = "path, URL or N";

    fn read(text: &str) -> anyhow::Result<Self> {
        check_line(text)?;
        if matches!(bool::read(text), Ok(false)) {
            return Ok(Self::Nowhere);
        }
        if text.starts_with('/') {
            return Ok(Self::Path(text.into()));
        }
        let is_url = ["https://", "http://"].iter().any(|start| text.starts_with(start));
        let out = "give the path or the URL of an ISO image, which starts with / or https://, or N";
        ensure!(is_url, out);
        Ok(Self::Url(text.to_owned()))
    }
    fn show(&self) -> String {
        match self {
            Self::Nowhere => "N".into(),
            Self::Path(path) => quote(&path.to_string_lossy()),
            Self::Url(url) => shown_url(url),
        }
    }
}

/// The address of a proxy. It is checked when it is used: many environments set one.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProxyUrl(pub String);

/// Hides user and password.
impl fmt::Debug for ProxyUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.show())
    }
}

impl Value for ProxyUrl {
    const ACCEPTS: &'static str = "URL";

    fn read(text: &str) -> anyhow::Result<Self> {
        check_line(text)?;
        Ok(Self(text.to_owned()))
    }
    fn show(&self) -> String {
        let text = if self.0.contains("://") { &self.0 } else { &format!("http://{}", self.0) };
        shown_url(text)
    }
}

fn shown_url(text: &str) -> String {
    quote(&without_secrets(text))
}

fn check_line(text: &str) -> anyhow::Result<()> {
    ensure!(!text.contains(char::is_control), "it contains a control character: remove that");
    ensure!(text.len() <= 4096, "it is too long: give at most 4096 bytes");
    Ok(())
}

fn check_interface(text: &str) -> anyhow::Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.@".contains(&byte);
    let named = !["", ".", ".."].contains(&text);
    let fits = named && text.len() <= 15 && text.bytes().all(plain);
    ensure!(fits, "give the name of an interface: at most 15 letters, digits and - _ . @");
    Ok(())
}

fn check_file_name(text: &str) -> anyhow::Result<()> {
    let plain = !text.contains(['/', '\\']) && !text.contains(char::is_control);
    ensure!(plain && !text.starts_with('.'), "give the name alone, without a folder");
    ensure!(text.len() <= 200, "the name is too long: give at most 200 bytes");
    Ok(())
}

/// Accounts that Windows creates itself.
const BUILT_IN: &[&str] = &[
    "administrator",
    "guest",
    "defaultaccount",
    "wdagutilityaccount",
    "system",
    "network service",
    "local service",
    "networkservice",
    "localservice",
    "none",
];

/// The name of the local account, or with a domain of the account there.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct UserName(pub String);

/// Hides the name, because it may come from a file with secrets.
impl fmt::Debug for UserName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl UserName {
    /// Checks the name of a local account, whose rules are stricter than those of a domain.
    pub fn check_local(&self) -> anyhow::Result<()> {
        let name = self.0.as_str();
        ensure!(name.chars().count() <= 20, "Windows accepts at most 20 characters");
        ensure!(!name.contains('@'), "@ is not allowed in the name of a local account");
        let built_in = BUILT_IN.iter().any(|other| other.eq_ignore_ascii_case(name));
        ensure!(!built_in, "Windows has an account of this name already: choose another");
        Ok(())
    }

    /// Whether it is the name of the account that is made by default, which no domain has.
    pub fn is_usual(&self) -> bool {
        self.0.split('@').next().is_some_and(|name| name.eq_ignore_ascii_case("docker"))
    }

    /// Whether the name can be one of this domain: `user`, or `user@domain`.
    pub fn is_of(&self, domain: &str) -> bool {
        match self.0.split_once('@') {
            Some((name, of)) => !name.is_empty() && of.eq_ignore_ascii_case(domain),
            None => true,
        }
    }
}

impl Value for UserName {
    const ACCEPTS: &'static str = "account name";
    const FILE: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        const FORBIDDEN: &str = "\"/\\[]:;|=,+*?<>%";
        ensure!(text.chars().count() <= 256, "the name is too long: give at most 256 characters");
        if let Some(bad) = text.chars().find(|it| FORBIDDEN.contains(*it) || it.is_control()) {
            bail!("Windows does not allow {} in the name of an account", bad.escape_debug());
        }
        ensure!(!text.ends_with('.'), "Windows does not allow a dot at the end of the name");
        Ok(Self(text.to_owned()))
    }
    fn show(&self) -> String {
        quote(&self.0)
    }
}

fn check_host_name(text: &str) -> anyhow::Result<()> {
    let plain = text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
    ensure!(plain && text.len() <= 15, "give at most 15 letters, digits and hyphens");
    let inner = !text.starts_with('-') && !text.ends_with('-');
    ensure!(inner, "a hyphen must be between letters or digits");
    let number = text.bytes().all(|byte| byte.is_ascii_digit());
    ensure!(!number, "Windows does not allow a name of digits alone");
    Ok(())
}

fn check_workgroup(text: &str) -> anyhow::Result<()> {
    let bad = |letter: char| "\"/\\[]:|<>+=;,?*".contains(letter) || letter.is_control();
    let fits = text.chars().count() <= 15 && !text.contains(bad);
    ensure!(fits, "give at most 15 characters, without \" / \\ [ ] : | < > + = ; , ? *");
    let is_name = text.contains(|letter: char| letter != '.' && !letter.is_whitespace());
    ensure!(is_name, "give more than dots and spaces");
    Ok(())
}

fn check_domain(text: &str) -> anyhow::Result<()> {
    let label = |label: &str| {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
        let inner = !label.starts_with('-') && !label.ends_with('-');
        (1..=63).contains(&label.len()) && label.bytes().all(plain) && inner
    };
    let fits = text.len() <= 253 && text.split('.').all(label);
    ensure!(fits, "give the name of a domain, like corp.example.com");
    Ok(())
}

/// A product key of Windows: five groups of five characters. It is secret.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct ProductKey(pub String);

impl fmt::Debug for ProductKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

impl Value for ProductKey {
    const ACCEPTS: &'static str = "XXXXX-XXXXX-XXXXX-XXXXX-XXXXX";
    const FILE: bool = true;
    const SECRET: bool = true;

    fn read(text: &str) -> anyhow::Result<Self> {
        let group =
            |group: &str| group.len() == 5 && group.bytes().all(|it| it.is_ascii_alphanumeric());
        let fits = text.split('-').count() == 5 && text.split('-').all(group);
        ensure!(fits, "give five groups of five letters and digits, separated by hyphens");
        Ok(Self(text.to_ascii_uppercase()))
    }
    fn show(&self) -> String {
        "***".into()
    }
}

/// An edition of Windows, normalized to lower case with hyphens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Edition(pub String);

impl Value for Edition {
    const ACCEPTS: &'static str = "edition";

    fn read(text: &str) -> anyhow::Result<Self> {
        let words: Vec<&str> =
            text.split([' ', '_', '-']).filter(|word| !word.is_empty()).collect();
        let id = words.join("-").to_ascii_lowercase();
        let plain = id.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
        let fits = plain && !id.is_empty() && id.len() <= 40;
        ensure!(fits, "give the name of an edition, like pro, home, enterprise or datacenter");
        Ok(Self(id))
    }
    fn show(&self) -> String {
        self.0.clone()
    }
}

/// Requires the hyphens.
impl Value for Uuid {
    const ACCEPTS: &'static str = "UUID";

    fn read(text: &str) -> anyhow::Result<Self> {
        let lengths: Vec<usize> = text.split('-').map(str::len).collect();
        let plain = text.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        let id = text.parse().ok().filter(|_| plain && lengths == [8, 4, 4, 4, 12]);
        id.context("give a UUID, like 123e4567-e89b-12d3-a456-426614174000")
    }
    fn show(&self) -> String {
        self.to_string()
    }
}

fn check_zone(text: &str) -> anyhow::Result<()> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/_+-:,.<>".contains(&byte);
    let fits = text.bytes().all(plain) && text.len() <= 100 && !text.contains("..");
    ensure!(fits, "give the name of a time zone, like Europe/Berlin");
    Ok(())
}

/// The limits of the guest's network in user mode. A /30 has two hosts and two reserved addresses:
/// smaller networks are not possible.
pub const MIN_PREFIX: u8 = 8;
pub const MAX_PREFIX: u8 = 30;

/// The addresses that a guest knows when it goes on in another pod, as `10.0.2.15/24 10.0.2.2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeptAddress {
    pub guest: Ipv4Addr,
    pub prefix: u8,
    pub gateway: Ipv4Addr,
}

impl FromStr for KeptAddress {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> anyhow::Result<Self> {
        let (guest, rest) = text.split_once('/').context("it has no prefix")?;
        let (prefix, gateway) = rest.split_once(' ').context("it has no gateway")?;
        let kept =
            Self { guest: guest.parse()?, prefix: prefix.parse()?, gateway: gateway.parse()? };
        ensure!(
            (MIN_PREFIX..=MAX_PREFIX).contains(&kept.prefix),
            "its prefix is too long or too short"
        );
        Ok(kept)
    }
}

impl fmt::Display for KeptAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{} {}", self.guest, self.prefix, self.gateway)
    }
}

#[cfg(test)]
mod test {
    use super::*;

    fn shown<T: Value>(text: &str) -> Option<String> {
        T::read(text).ok().map(|value| value.show())
    }

    /// Checks that each text is refused.
    fn refuses<T: Value>(texts: &[&str]) {
        for text in texts {
            assert_eq!(shown::<T>(text), None, "{text}");
        }
    }

    #[test]
    fn mac_addresses_have_three_notations() {
        for text in ["02aabbccddee", "02:AA:bb:CC:dd:EE", "02-aa-bb-cc-dd-ee"] {
            assert_eq!(shown::<Mac>(text).as_deref(), Some("02:AA:BB:CC:DD:EE"));
        }
        refuses::<Mac>(&[
            "",
            "02:aa:bb:cc:dd",
            "02:aa:bb:cc:dd:e",
            "02:aa-bb:cc-dd:ee",
            "+2:aa:bb:cc:dd:ee",
            "01:aa:bb:cc:dd:ee",
            "000000000000",
            "zzzzzzzzzzzz",
            "éééééé",
            "02:aa:bb:cc:dd:éa",
        ]);
    }

    #[test]
    fn masks_are_ones_before_zeroes() {
        assert_eq!(shown::<Mask>("255.255.240.0").as_deref(), Some("255.255.240.0"));
        assert_eq!(shown::<Mask>("/16").as_deref(), Some("255.255.0.0"));
        refuses::<Mask>(&["255.255.255.128", "255.0.0.0", "255.255.0.255", "/33", "24", "/-1", ""]);
    }

    #[test]
    fn ports_are_parsed_as_a_list() {
        let ports = "3389/tcp,3389/udp, 22 80,,80/TCP,";
        assert_eq!(shown::<Ports>(ports).as_deref(), Some("3389,3389/udp,22,80"));
        refuses::<Ports>(&[
            "0",
            "65536",
            "22/sctp",
            "22/",
            "/tcp",
            "+22",
            "a",
            "22-25",
            "22/tcp/udp",
        ]);
    }

    #[test]
    fn names_are_valid_for_windows_and_linux() {
        refuses::<Interface>(&["", "an interface", "abcdefghijklmnop", "a/b", "..", "é"]);
        refuses::<FileName>(&["../x", "a/b", ".x", "a\\b", "a\nb"]);
        refuses::<HostName>(&["-a", "a-", "123", "a_b", "abcdefghijklmnop", "é"]);
        refuses::<Workgroup>(&["a/b", "abcdefghijklmnop", "a\u{7}", "..", ". ."]);
        refuses::<Domain>(&["", ".", "a..b", "a b", "é.com", "-a.com", "a.b-"]);
        refuses::<UserName>(&["a/b", "a.", "a%b", "a\nb", "a;b"]);
        for name in ["me@x", "NONE", "Guest", "a name of more than twenty"] {
            assert!(UserName::read(name).unwrap().check_local().is_err(), "{name}");
        }
        assert!(UserName::read("Jürgen Müller").unwrap().check_local().is_ok());
        assert_eq!(format!("{:?}", UserName::read("me").unwrap()), "***");
    }

    #[test]
    fn keys_and_names_are_validated() {
        refuses::<ProductKey>(&["", "ABCDE", "ABCDE-ABCDE-ABCDE-ABCDE-ABCD", "ABCD!-A-A-A-A"]);
        let key = ProductKey::read("abcde-abcde-abcde-abcde-abcde").unwrap();
        assert_eq!((key.0.as_str(), key.show().as_str()), ("ABCDE-ABCDE-ABCDE-ABCDE-ABCDE", "***"));
        assert_eq!(format!("{key:?}"), "***");
        refuses::<Uuid>(&["", "1", "123e4567e89b12d3a456426614174000"]);
        refuses::<Edition>(&["", " ", "a;b", "é"]);
        assert_eq!(
            shown::<Edition>("Datacenter  Azure_Edition").as_deref(),
            Some("datacenter-azure-edition")
        );
        refuses::<Zone>(&["../x", "a b", "Europe/Zürich"]);
        assert!(Zone::read("CET-1CEST,M3.5.0,M10.5.0/3").is_ok());
    }
}
