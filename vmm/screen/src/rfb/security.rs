//! Passwords, access rights, and delays after wrong passwords.
//!
//! Threats: VNC authentication is DES with a key of eight bytes, as it has been since 1998. An
//! attacker who can read the connection can find the password offline, so this method is only for
//! loopback, Unix sockets and TLS. Each wrong password makes the next attempt from the same door
//! slower, however many connections the attacker opens. Attempts from many addresses share one
//! budget. It does not apply to addresses that logged in before, nor to this host: a distributed
//! attack never locks those out. All addresses of the loopback network are one door, so guesses
//! there slow down in the same way, and affect that door alone.

use std::collections::HashMap;
use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use des::Des;
use des::cipher::{Block, BlockCipherEncrypt, KeyInit};
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConstantTimeEq};

/// Origin of a client. Wrong passwords are counted per door.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// A Unix socket, which only its owner can use.
    Local,
    /// Any loopback address of this host.
    Loopback,
    /// An IPv4 address, or an IPv6 network of 64 bits, because each host has many addresses there.
    Network(u128),
}

impl Door {
    /// The door of an address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            address if address.is_loopback() => Self::Loopback,
            IpAddr::V4(address) => Self::Network(u128::from(address.to_bits())),
            IpAddr::V6(address) => Self::Network(address.to_bits() >> 64 << 64),
        }
    }

    /// Whether only this host can use the door.
    pub fn is_here(self) -> bool {
        matches!(self, Self::Local | Self::Loopback)
    }
}

impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Local => f.write_str("this host"),
            Self::Loopback => f.write_str("the loopback"),
            // The upper bits of an IPv6 network are never those of an IPv4 address, except for
            // `::/64`.
            Self::Network(bits) => match u32::try_from(*bits) {
                Ok(bits) if bits != 0 => Ipv4Addr::from_bits(bits).fmt(f),
                _ => write!(f, "{}/64", Ipv6Addr::from_bits(*bits)),
            },
        }
    }
}

/// Maximum doors whose failures are remembered.
const MAX_DOORS: usize = 1024;
/// Maximum doors that are remembered because of a login.
const MAX_TRUSTED: usize = 256;
/// Wrong passwords that all untrusted doors together may send before they must wait.
const BURST: u32 = 64;
/// Interval in which the budget grows by one.
const REFILL: Duration = Duration::from_secs(10);
/// Delay after the second failure. Each further failure doubles it.
const FIRST_DELAY: Duration = Duration::from_secs(1);
/// Maximum delay.
const MAX_DELAY: Duration = Duration::from_secs(60);
/// Failures are forgotten after this long without an attempt.
const FORGET_AFTER: Duration = Duration::from_secs(15 * 60);

/// Counts failed logins and delays further attempts.
#[derive(Default)]
pub struct Doors {
    book: Mutex<Book>,
}

#[derive(Default)]
struct Book {
    failures: HashMap<Door, Failures>,
    /// Doors with a login by the full password, and the time of the last one.
    trusted: HashMap<Door, Instant>,
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

/// Reason why a password was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Denied {
    /// The password was wrong. The number counts the failures of this door.
    Wrong(u32),
    /// The password was not checked, because the door must wait this long.
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

impl Book {
    /// Whether the common budget does not apply to this door.
    fn trusts(&self, door: Door) -> bool {
        door.is_here() || self.trusted.contains_key(&door)
    }

    fn closed(&mut self, door: Door, now: Instant) -> Option<Duration> {
        let own = self.failures.get(&door).map(|it| it.left(now)).filter(|left| !left.is_zero());
        let all = if self.trusts(door) { None } else { self.budget.wait(now) };
        own.max(all)
    }

    fn failed(&mut self, door: Door, now: Instant) -> u32 {
        if !self.trusts(door) {
            self.budget.left = self.budget.left.saturating_sub(1);
        }
        self.failures.retain(|_, it| now.saturating_duration_since(it.last) < FORGET_AFTER);
        if self.failures.len() >= MAX_DOORS && !self.failures.contains_key(&door) {
            // Forget the door with the shortest remaining delay.
            let least = self.failures.iter().min_by_key(|(_, it)| (it.left(now), it.last));
            let least = least.map(|(door, _)| *door);
            least.map(|door| self.failures.remove(&door));
        }
        let entry = self.failures.entry(door).or_insert(Failures { count: 0, last: now });
        entry.count = entry.count.saturating_add(1);
        entry.last = now;
        entry.count
    }

    /// Records a login. A login by the view password does not reset the failures, because the
    /// client may still be guessing the full password.
    fn opened(&mut self, door: Door, right: Right, now: Instant) {
        if right != Right::Full {
            return;
        }
        self.failures.remove(&door);
        if self.trusted.len() >= MAX_TRUSTED && !self.trusted.contains_key(&door) {
            let oldest = self.trusted.iter().min_by_key(|(_, since)| **since);
            let oldest = oldest.map(|(door, _)| *door);
            oldest.map(|door| self.trusted.remove(&door));
        }
        self.trusted.insert(door, now);
    }
}

impl Doors {
    /// Time during which no password is checked at this door, or nothing if one may be sent now.
    pub fn closed(&self, door: Door) -> Option<Duration> {
        self.book(|book, now| book.closed(door, now))
    }

    /// Checks a password, unless this door must wait. Only one check runs at a time, so parallel
    /// attempts count like sequential ones.
    ///
    /// # Errors
    ///
    /// If the password is wrong, or the door must wait.
    pub fn judge(
        &self,
        door: Door,
        check: impl FnOnce() -> Option<Right>,
    ) -> Result<Right, Denied> {
        self.book(|book, now| {
            if let Some(left) = book.closed(door, now) {
                return Err(Denied::Later(left));
            }
            let right = check().ok_or_else(|| Denied::Wrong(book.failed(door, now)))?;
            book.opened(door, right, now);
            Ok(right)
        })
    }

    #[cfg(test)]
    pub(crate) fn failed(&self, door: Door) -> u32 {
        self.book(|book, now| book.failed(door, now))
    }

    #[cfg(test)]
    pub(crate) fn opened(&self, door: Door, right: Right) {
        self.book(|book, now| book.opened(door, right, now));
    }

    fn book<T>(&self, work: impl FnOnce(&mut Book, Instant) -> T) -> T {
        work(&mut self.book.lock().expect("no door panicked"), Instant::now())
    }
}

/// The passwords of a screen.
#[derive(Clone, Debug, Default)]
pub struct Passwords {
    /// Password for full access.
    pub full: Option<String>,
    /// Password for access without keyboard and mouse.
    pub view: Option<String>,
    /// User name that belongs to them, for methods that have one. Without it, every name is
    /// accepted.
    pub user: Option<String>,
}

/// Rights that a password gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Screen, keyboard and mouse.
    Full,
    /// Screen only.
    View,
}

impl Passwords {
    /// Whether clients must send a password.
    pub fn are_needed(&self) -> bool {
        self.full.is_some() || self.view.is_some()
    }

    /// Number of bytes of a password that VNC authentication uses.
    pub const SEEN: usize = 8;

    /// Whether VNC authentication would ignore a part of a password.
    pub fn are_long(&self) -> bool {
        [&self.full, &self.view].into_iter().flatten().any(|it| it.len() > Self::SEEN)
    }

    /// Checks the response to a challenge (RFC 6143 7.2.2).
    pub fn check_answer(&self, challenge: &[u8; 16], answer: &[u8; 16]) -> Option<Right> {
        let check = |password: &Option<String>| match password {
            Some(password) => answer.ct_eq(&encrypt(password, challenge)),
            None => Choice::from(0),
        };
        // Always check both, so that the time does not depend on which password is right.
        Self::pick(check(&self.full), check(&self.view))
    }

    /// Checks a user name and a password.
    pub fn check_plain(&self, user: &[u8], password: &[u8]) -> Option<Right> {
        let named = self.user.as_ref().map_or(Choice::from(1), |it| same(it, user));
        let check = |right: &Option<String>| match right {
            Some(right) => named & same(right, password),
            None => Choice::from(0),
        };
        Self::pick(check(&self.full), check(&self.view))
    }

    fn pick(full: Choice, view: Choice) -> Option<Right> {
        match (bool::from(full), bool::from(view)) {
            (true, _) => Some(Right::Full),
            (false, true) => Some(Right::View),
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
    let mut key = [0; Passwords::SEEN];
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
    fn answers_are_those_of_the_protocol() {
        // The usual test vector of DES, with the bits of its key reversed.
        let key = "\x40\x02\x22\x62\x4a\x2a\x3e\x7f";
        assert_eq!(encrypt("", &[0; 16])[..8], [0x8c, 0xa6, 0x4d, 0xe9, 0xc1, 0xb1, 0x23, 0xa7]);
        assert_ne!(encrypt(key, &[0; 16]), encrypt("", &[0; 16]));
        assert_eq!(encrypt("12345678", &[7; 16]), encrypt("123456789", &[7; 16]));
    }

    #[test]
    fn the_second_password_is_for_looking() {
        let passwords = Passwords {
            full: Some("full".into()),
            view: Some("view".into()),
            user: Some("me".into()),
        };
        let challenge = [0x5a; 16];
        let answer = |password| encrypt(password, &challenge);
        assert_eq!(passwords.check_answer(&challenge, &answer("full")), Some(Right::Full));
        assert_eq!(passwords.check_answer(&challenge, &answer("view")), Some(Right::View));
        assert_eq!(passwords.check_answer(&challenge, &answer("")), None);
        assert_eq!(passwords.check_plain(b"me", b"full"), Some(Right::Full));
        assert_eq!(passwords.check_plain(b"me", b"view"), Some(Right::View));
        assert_eq!(passwords.check_plain(b"you", b"full"), None);
        assert_eq!(passwords.check_plain(b"me", b"ful"), None);
        assert_eq!(Passwords::default().check_answer(&challenge, &answer("")), None);
    }

    #[test]
    fn guessing_becomes_slow_and_memory_is_bounded() {
        let mut book = Book::default();
        let now = Instant::now();
        let door = Door::of("10.0.0.1".parse().unwrap());
        book.failed(door, now);
        assert_eq!(book.closed(door, now), None, "the first failure causes no delay");
        let mut last = Duration::ZERO;
        for _ in 0..5 {
            book.failed(door, now);
            let wait = book.closed(door, now).unwrap();
            assert!(wait > last && wait <= MAX_DELAY);
            last = wait;
        }
        assert_eq!(book.closed(Door::Local, now), None, "failures of another door");
        for address in 0..3 * MAX_DOORS {
            book.failed(Door::Network(address as u128), now);
        }
        assert!(book.failures.len() <= MAX_DOORS);
        assert!(book.failures.contains_key(&door), "the door with the longest delay is kept");
        book.opened(door, Right::View, now);
        assert!(book.failures.contains_key(&door), "the view password does not reset failures");
        book.opened(door, Right::Full, now);
        assert_eq!(book.closed(door, now), None);
        for address in 0..3 * MAX_TRUSTED {
            book.opened(Door::Network(address as u128), Right::Full, now);
        }
        assert_eq!(book.trusted.len(), MAX_TRUSTED);
    }

    #[test]
    fn guesses_of_many_addresses_share_one_budget() {
        let (mut book, start) = (Book::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        let network = |text: &str| Door::of(text.parse().unwrap());
        let (friend, stranger) = (network("10.0.0.1"), network("10.0.0.2"));
        book.opened(friend, Right::Full, start);
        // Other addresses guess all the time, as often as they are allowed.
        let mut next = 1_u128 << 96;
        let mut guess = |book: &mut Book, count: u32, now| {
            let heard = |_: &u32| -> bool {
                next += 1 << 64;
                let door = Door::Network(next);
                let open = book.closed(door, now).is_none();
                open.then(|| book.failed(door, now)).is_some()
            };
            (0..count).filter(heard).count()
        };
        assert_eq!(guess(&mut book, 10_000, start), 64, "at once");
        assert_eq!(book.closed(stranger, start), Some(REFILL));
        assert_eq!(
            book.closed(friend, start),
            None,
            "a door with an earlier login is not affected"
        );
        assert_eq!(book.closed(network("127.0.0.1"), start), None, "this host is not affected");
        // Guesses during one day.
        let day: usize = (1..=86_400).map(|second| guess(&mut book, 3, at(second))).sum();
        assert_eq!(day, 8640);
        assert!(book.closed(stranger, at(86_400)).is_some());
        assert_eq!(book.closed(stranger, at(86_410)), None, "after the attack, all may log in");
        // The delay of each door applies too.
        for _ in 0..3 {
            book.failed(friend, at(86_410));
        }
        assert!(book.closed(friend, at(86_410)).is_some());
    }

    #[test]
    fn a_password_that_comes_too_early_is_not_looked_at() {
        let doors = Doors::default();
        let door = Door::of("10.0.0.1".parse().unwrap());
        assert_eq!(doors.judge(door, || None), Err(Denied::Wrong(1)));
        assert_eq!(doors.judge(door, || None), Err(Denied::Wrong(2)));
        let early = doors.judge(door, || panic!("the password was checked"));
        assert!(matches!(early, Err(Denied::Later(_))), "{early:?}");
        assert_eq!(doors.judge(Door::Local, || Some(Right::Full)), Ok(Right::Full));
    }

    #[test]
    fn a_door_is_an_address_or_a_network_and_is_shown_so() {
        let network = |text: &str| Door::of(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::2:1"));
        assert_eq!(network("::ffff:10.0.0.1"), network("10.0.0.1"));
        for one in ["127.0.0.1", "127.255.255.254", "::ffff:127.9.9.9", "::1"] {
            assert_eq!(network(one), Door::Loopback, "{one}");
        }
        assert_ne!(network("::2"), Door::Loopback);
        for (text, here, shown) in [
            ("127.0.0.9", true, "the loopback"),
            ("::1", true, "the loopback"),
            ("::2", false, "::/64"),
            ("10.88.0.1", false, "10.88.0.1"),
            ("::ffff:10.88.0.1", false, "10.88.0.1"),
            ("2001:db8::1", false, "2001:db8::/64"),
        ] {
            assert_eq!(network(text).is_here(), here, "{text}");
            assert_eq!(network(text).to_string(), shown);
        }
        assert_eq!(Door::Local.to_string(), "this host");
    }
}
