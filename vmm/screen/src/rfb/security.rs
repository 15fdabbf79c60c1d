//! Passwords, access rights, and delays after wrong passwords.
//!
//! Threats: VNC authentication is DES with a key of eight bytes, as it has been since 1998. An
//! attacker who can read the connection can find the password offline, so this method is only for
//! loopback, Unix sockets and TLS. Each wrong password makes the next attempt from that network
//! slower, however many connections the attacker opens. Attempts from many addresses share one
//! budget, and an IPv6 network of 48 bits cannot use it up: one customer may have so much. The
//! budget does not apply to addresses that logged in before, nor to this host: a distributed
//! attack never locks those out. All loopback addresses are one network, so guesses
//! there slow down in the same way, and affect that network alone.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use des::Des;
use des::cipher::{Block, BlockCipherEncrypt, KeyInit};
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConstantTimeEq};

/// Wrong passwords are counted per network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerNetwork {
    /// A Unix socket, which only its owner can use.
    Local,
    Loopback,
    /// An IPv4 address, or an IPv6 network of 64 bits, because each host has many addresses there.
    Remote(u128),
}

impl PeerNetwork {
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            address if address.is_loopback() => Self::Loopback,
            IpAddr::V4(address) => Self::Remote(u128::from(address.to_bits())),
            IpAddr::V6(address) => Self::Remote(address.to_bits() >> 64 << 64),
        }
    }

    /// The IPv6 network of 48 bits, which one customer of a provider may have. Its lowest bit is
    /// set, unlike that of a network of 64 bits.
    fn site(self) -> Option<Self> {
        match self {
            Self::Remote(bits) if bits > u128::from(u32::MAX) => {
                Some(Self::Remote(bits >> 80 << 80 | 1))
            }
            _ => None,
        }
    }

    /// Whether only this host can use the network.
    pub fn is_local(self) -> bool {
        matches!(self, Self::Local | Self::Loopback)
    }
}

impl fmt::Display for PeerNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("this host"),
            Self::Loopback => f.write_str("the loopback"),
            // The upper bits of an IPv6 network are never those of an IPv4 address, except for
            // `::/64`.
            Self::Remote(bits) => match u32::try_from(*bits) {
                Ok(bits) if bits != 0 => Ipv4Addr::from_bits(bits).fmt(f),
                _ => write!(f, "{}/64", Ipv6Addr::from_bits(*bits)),
            },
        }
    }
}

/// Maximum networks whose failures are remembered.
const MAX_NETWORKS: usize = 1024;
/// Maximum networks that are remembered because of a login.
const MAX_TRUSTED: usize = 256;
/// Wrong passwords that all untrusted networks together may send before they must wait.
const BURST: u32 = 64;
/// Interval in which the budget grows by one.
const REFILL: Duration = Duration::from_secs(10);
/// Delay after the second failure. Each further failure doubles it.
const FIRST_DELAY: Duration = Duration::from_secs(1);
const MAX_DELAY: Duration = Duration::from_secs(60);
/// This many failures of a site delay it like one failure of a network: a site may have many users.
const SITE_SHARE: u32 = 8;
/// Failures are forgotten after this long without an attempt.
const FORGET_AFTER: Duration = Duration::from_secs(15 * 60);

#[derive(Default)]
pub struct LoginLimiter {
    records: Mutex<Records>,
}

#[derive(Default)]
struct Records {
    failures: HashMap<PeerNetwork, Failures>,
    /// Networks with a login by the full password, and the time of the last one.
    trusted: HashMap<PeerNetwork, Instant>,
    budget: Budget,
}

/// Token bucket: the number of wrong passwords that all strangers together may still send.
struct Budget {
    left: u32,
    filled: Option<Instant>,
}

impl Default for Budget {
    fn default() -> Self {
        Self { left: BURST, filled: None }
    }
}

impl Budget {
    /// Time until the next attempt is allowed, or nothing if one is allowed now.
    fn wait(&mut self, now: Instant) -> Option<Duration> {
        let filled = *self.filled.get_or_insert(now);
        let since = now.saturating_duration_since(filled);
        let new = since.as_secs() / REFILL.as_secs();
        self.left = self.left.saturating_add(u32::try_from(new).unwrap_or(u32::MAX)).min(BURST);
        if self.left == BURST {
            self.filled = Some(now);
        } else {
            self.filled = Some(filled + Duration::from_secs(new * REFILL.as_secs()));
        }
        let next = self.filled.unwrap_or(now) + REFILL;
        (self.left == 0).then(|| next.saturating_duration_since(now))
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The password was wrong. The number counts the failures of this network.
    Wrong(u32),
    /// The password was not checked, because the network must wait this long.
    Later(Duration),
}

#[derive(Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Failures {
    /// The first failure causes no delay: it may be a typing error.
    fn delay(self) -> Duration {
        let doubled = FIRST_DELAY.saturating_mul(1 << self.count.saturating_sub(2).min(16));
        if self.count < 2 { Duration::ZERO } else { doubled.min(MAX_DELAY) }
    }

    fn left(self, now: Instant) -> Duration {
        (self.last + self.delay()).saturating_duration_since(now)
    }
}

impl Records {
    /// Whether the common budget does not apply to this network.
    fn trusts(&self, network: PeerNetwork) -> bool {
        network.is_local() || self.trusted.contains_key(&network)
    }

    fn locked_for(&mut self, network: PeerNetwork, now: Instant) -> Option<Duration> {
        let left = |it: Failures| Some(it.left(now)).filter(|left| !left.is_zero());
        let own = self.failures.get(&network).and_then(|it| left(*it));
        if self.trusts(network) {
            return own;
        }
        let site = network.site().and_then(|site| self.failures.get(&site));
        let site =
            site.and_then(|it| left(Failures { count: it.count / SITE_SHARE, last: it.last }));
        own.max(site).max(self.budget.wait(now))
    }

    fn failed(&mut self, network: PeerNetwork, now: Instant) -> u32 {
        self.failures.retain(|_, it| now.saturating_duration_since(it.last) < FORGET_AFTER);
        if !self.trusts(network) {
            self.budget.left = self.budget.left.saturating_sub(1);
            if let Some(site) = network.site() {
                self.count(site, now);
            }
        }
        self.count(network, now)
    }

    fn count(&mut self, network: PeerNetwork, now: Instant) -> u32 {
        if self.failures.len() >= MAX_NETWORKS && !self.failures.contains_key(&network) {
            // Forget the network with the shortest remaining delay.
            let least = self.failures.iter().min_by_key(|(_, it)| (it.left(now), it.last));
            let least = least.map(|(network, _)| *network);
            least.map(|network| self.failures.remove(&network));
        }
        let entry = self.failures.entry(network).or_insert(Failures { count: 0, last: now });
        entry.count = entry.count.saturating_add(1);
        entry.last = now;
        entry.count
    }

    /// Records a login. A login by the view password does not reset the failures, because the
    /// client may still be guessing the full password.
    fn logged_in(&mut self, network: PeerNetwork, access: Access, now: Instant) {
        if access != Access::Full {
            return;
        }
        self.failures.remove(&network);
        if self.trusted.len() >= MAX_TRUSTED && !self.trusted.contains_key(&network) {
            let oldest = self.trusted.iter().min_by_key(|(_, since)| **since);
            let oldest = oldest.map(|(network, _)| *network);
            oldest.map(|network| self.trusted.remove(&network));
        }
        self.trusted.insert(network, now);
    }
}

impl LoginLimiter {
    /// Time during which no password is checked at this network, or nothing if one may be sent now.
    pub fn locked_for(&self, network: PeerNetwork) -> Option<Duration> {
        self.records(|records, now| records.locked_for(network, now))
    }

    /// Checks a password, unless this network must wait. Only one check runs at a time, so parallel
    /// attempts count like sequential ones.
    pub fn check(
        &self,
        network: PeerNetwork,
        verify: impl FnOnce() -> Option<Access>,
    ) -> Result<Access, Denied> {
        self.records(|records, now| {
            if let Some(left) = records.locked_for(network, now) {
                return Err(Denied::Later(left));
            }
            let access = verify().ok_or_else(|| Denied::Wrong(records.failed(network, now)))?;
            records.logged_in(network, access, now);
            Ok(access)
        })
    }

    #[cfg(test)]
    pub(crate) fn failed(&self, network: PeerNetwork) -> u32 {
        self.records(|records, now| records.failed(network, now))
    }

    #[cfg(test)]
    pub(crate) fn logged_in(&self, network: PeerNetwork, access: Access) {
        self.records(|records, now| records.logged_in(network, access, now));
    }

    fn records<T>(&self, work: impl FnOnce(&mut Records, Instant) -> T) -> T {
        work(&mut self.records.lock().expect("no network panicked"), Instant::now())
    }
}

#[derive(Clone, Debug, Default)]
pub struct Passwords {
    pub full: Option<String>,
    pub view: Option<String>,
    /// User name that belongs to them, for methods that have one. Without it, every name is
    /// accepted.
    pub user: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Screen, keyboard and mouse.
    Full,
    /// Screen only.
    View,
}

impl Passwords {
    pub fn are_needed(&self) -> bool {
        self.full.is_some() || self.view.is_some()
    }

    /// Number of bytes of a password that VNC authentication uses.
    pub const VNC_BYTES: usize = 8;

    /// Whether VNC authentication would ignore a part of a password.
    pub fn are_long(&self) -> bool {
        [&self.full, &self.view].into_iter().flatten().any(|it| it.len() > Self::VNC_BYTES)
    }

    /// Checks the response to a challenge (RFC 6143 7.2.2).
    pub fn check_answer(&self, challenge: &[u8; 16], answer: &[u8; 16]) -> Option<Access> {
        let check = |password: &Option<String>| match password {
            Some(password) => answer.ct_eq(&encrypt(password, challenge)),
            None => Choice::from(0),
        };
        // Always check both, so that the time does not depend on which password is right.
        Self::pick(check(&self.full), check(&self.view))
    }

    pub fn check_plain(&self, user: &[u8], password: &[u8]) -> Option<Access> {
        let named = self.user.as_ref().map_or(Choice::from(1), |it| same(it, user));
        let check = |expected: &Option<String>| match expected {
            Some(expected) => named & same(expected, password),
            None => Choice::from(0),
        };
        Self::pick(check(&self.full), check(&self.view))
    }

    fn pick(full: Choice, view: Choice) -> Option<Access> {
        match (bool::from(full), bool::from(view)) {
            (true, _) => Some(Access::Full),
            (false, true) => Some(Access::View),
            _ => None,
        }
    }
}

/// Compares a secret. The time does not reveal even its length.
fn same(secret: &str, received: &[u8]) -> Choice {
    let digest = |bytes| digest(&SHA256, bytes);
    digest(secret.as_bytes()).as_ref().ct_eq(digest(received).as_ref())
}

/// DES with the bits of each byte of the key reversed: RFC 6143 keeps this old mistake.
fn encrypt(password: &str, challenge: &[u8; 16]) -> [u8; 16] {
    let mut key = [0; Passwords::VNC_BYTES];
    for (key, letter) in key.iter_mut().zip(password.bytes()) {
        *key = letter.reverse_bits();
    }
    let cipher = Des::new(&key.into());
    let mut answer = *challenge;
    for block in answer.chunks_exact_mut(8) {
        let mut eight = Block::<Des>::default();
        eight.copy_from_slice(block);
        cipher.encrypt_block(&mut eight);
        block.copy_from_slice(&eight);
    }
    answer
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn responses_match_the_protocol() {
        // The usual test vector of DES, with the bits of its key reversed.
        let key = "\x40\x02\x22\x62\x4a\x2a\x3e\x7f";
        assert_eq!(encrypt("", &[0; 16])[..8], [0x8c, 0xa6, 0x4d, 0xe9, 0xc1, 0xb1, 0x23, 0xa7]);
        assert_ne!(encrypt(key, &[0; 16]), encrypt("", &[0; 16]));
        assert_eq!(encrypt("12345678", &[7; 16]), encrypt("123456789", &[7; 16]));
    }

    #[test]
    fn the_second_password_is_view_only() {
        let passwords = Passwords {
            full: Some("full".into()),
            view: Some("view".into()),
            user: Some("me".into()),
        };
        let challenge = [0x5a; 16];
        let answer = |password| encrypt(password, &challenge);
        assert_eq!(passwords.check_answer(&challenge, &answer("full")), Some(Access::Full));
        assert_eq!(passwords.check_answer(&challenge, &answer("view")), Some(Access::View));
        assert_eq!(passwords.check_answer(&challenge, &answer("")), None);
        assert_eq!(passwords.check_plain(b"me", b"full"), Some(Access::Full));
        assert_eq!(passwords.check_plain(b"me", b"view"), Some(Access::View));
        assert_eq!(passwords.check_plain(b"you", b"full"), None);
        assert_eq!(passwords.check_plain(b"me", b"ful"), None);
        assert_eq!(Passwords::default().check_answer(&challenge, &answer("")), None);
    }

    #[test]
    fn wrong_passwords_cause_delays_and_memory_is_bounded() {
        let mut records = Records::default();
        let now = Instant::now();
        let network = PeerNetwork::of("10.0.0.1".parse().unwrap());
        records.failed(network, now);
        assert_eq!(records.locked_for(network, now), None, "the first failure causes no delay");
        let mut last = Duration::ZERO;
        for _ in 0..5 {
            records.failed(network, now);
            let wait = records.locked_for(network, now).unwrap();
            assert!(wait > last && wait <= MAX_DELAY);
            last = wait;
        }
        assert_eq!(
            records.locked_for(PeerNetwork::Local, now),
            None,
            "failures of another network"
        );
        for address in 0..3 * MAX_NETWORKS {
            records.failed(PeerNetwork::Remote(address as u128), now);
        }
        assert!(records.failures.len() <= MAX_NETWORKS);
        assert!(
            records.failures.contains_key(&network),
            "the network with the longest delay is kept"
        );
        records.logged_in(network, Access::View, now);
        assert!(
            records.failures.contains_key(&network),
            "the view password does not reset failures"
        );
        records.logged_in(network, Access::Full, now);
        assert_eq!(records.locked_for(network, now), None);
        for address in 0..3 * MAX_TRUSTED {
            records.logged_in(PeerNetwork::Remote(address as u128), Access::Full, now);
        }
        assert_eq!(records.trusted.len(), MAX_TRUSTED);
    }

    #[test]
    fn wrong_passwords_of_many_addresses_share_one_limit() {
        let (mut records, start) = (Records::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let network = |text: &str| PeerNetwork::of(text.parse().unwrap());
        let (friend, stranger) = (network("10.0.0.1"), network("10.0.0.2"));
        records.logged_in(friend, Access::Full, start);
        // Other addresses guess all the time, as often as they are allowed.
        let mut next = 1_u128 << 96;
        let mut guess = |records: &mut Records, count: u32, now| {
            let checked = |_: &u32| -> bool {
                next += 1 << 80;
                let network = PeerNetwork::Remote(next);
                let open = records.locked_for(network, now).is_none();
                open.then(|| records.failed(network, now)).is_some()
            };
            (0..count).filter(checked).count()
        };
        assert_eq!(guess(&mut records, 10_000, start), 64, "at once");
        assert_eq!(records.locked_for(stranger, start), Some(REFILL));
        assert_eq!(
            records.locked_for(friend, start),
            None,
            "a network with an earlier login is not affected"
        );
        assert_eq!(
            records.locked_for(network("127.0.0.1"), start),
            None,
            "this host is not affected"
        );
        // Guesses during one day.
        let day: usize = (1..=86_400).map(|second| guess(&mut records, 3, at(second))).sum();
        assert_eq!(day, 8640);
        assert!(records.locked_for(stranger, at(86_400)).is_some());
        assert_eq!(
            records.locked_for(stranger, at(86_410)),
            None,
            "after the attack, all may log in"
        );
        // The delay of each network applies too.
        for _ in 0..3 {
            records.failed(friend, at(86_410));
        }
        assert!(records.locked_for(friend, at(86_410)).is_some());
    }

    #[test]
    fn one_site_with_many_networks_does_not_lock_others_out() {
        let (mut records, start) = (Records::default(), Instant::now());
        let stranger = PeerNetwork::of("2001:db8:1::1".parse().unwrap());
        let site = 0x2001_0db8_0002_u128 << 80;
        let mut locked = 0;
        for second in 0..3600_u32 {
            let now = start + Duration::from_secs(second.into());
            // Each guess from another network of the site.
            let network = PeerNetwork::Remote(site | u128::from(second % 65_536) << 64);
            if records.locked_for(network, now).is_none() {
                records.failed(network, now);
            }
            locked += u32::from(records.locked_for(stranger, now).is_some());
        }
        assert_eq!(locked, 0, "seconds");
        let neighbor = PeerNetwork::Remote(site | 0xffff << 64);
        assert!(records.locked_for(neighbor, start + Duration::from_secs(3600)).is_some());
    }

    #[test]
    fn a_password_sent_too_early_is_not_checked() {
        let limiter = LoginLimiter::default();
        let network = PeerNetwork::of("10.0.0.1".parse().unwrap());
        assert_eq!(limiter.check(network, || None), Err(Denied::Wrong(1)));
        assert_eq!(limiter.check(network, || None), Err(Denied::Wrong(2)));
        let early = limiter.check(network, || panic!("the password was checked"));
        assert!(matches!(early, Err(Denied::Later(_))), "{early:?}");
        assert_eq!(limiter.check(PeerNetwork::Local, || Some(Access::Full)), Ok(Access::Full));
    }

    #[test]
    fn peers_are_grouped_and_printed_by_network() {
        let network = |text: &str| PeerNetwork::of(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::2:1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        for one in ["127.0.0.1", "127.255.255.254", "::ffff:127.9.9.9", "::1"] {
            assert_eq!(network(one), PeerNetwork::Loopback, "{one}");
        }
        assert_ne!(network("::2"), PeerNetwork::Loopback);
        for (text, here, shown) in [
            ("127.0.0.9", true, "the loopback"),
            ("::1", true, "the loopback"),
            ("::2", false, "::/64"),
            ("10.88.0.1", false, "10.88.0.1"),
            ("::ffff:10.88.0.1", false, "10.88.0.1"),
            ("2001:db8::1", false, "2001:db8::/64"),
        ] {
            assert_eq!(network(text).is_local(), here, "{text}");
            assert_eq!(network(text).to_string(), shown);
        }
        assert_eq!(PeerNetwork::Local.to_string(), "this host");
    }
}
