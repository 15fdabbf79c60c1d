//! Who may look, and who may touch: passwords, and patience with those who guess.
//!
//! Threats: VNC authentication is DES with a key of eight bytes, as it has been since 1998; whoever
//! reads the line can guess at home. So it is for loopback and Unix sockets, or within TLS. Whoever
//! guesses here gets slower with each guess, however many connections they open.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use des::Des;
use des::cipher::{Block, BlockCipherEncrypt, KeyInit};
use ring::digest::{SHA256, digest};
use subtle::{Choice, ConstantTimeEq};

/// Whose guesses are counted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Door {
    /// A Unix socket, which is its owner's.
    Local,
    /// An address; of IPv6 the network, because everybody has many addresses.
    Network(u128),
}

impl Door {
    /// The door of an address.
    pub fn of(address: IpAddr) -> Self {
        match address.to_canonical() {
            IpAddr::V4(address) => Self::Network(u128::from(address.to_bits())),
            IpAddr::V6(address) => Self::Network(address.to_bits() >> 64 << 64),
        }
    }

    /// Whether it is of this host alone.
    pub fn is_here(self) -> bool {
        match self {
            Self::Local => true,
            // The network of `::1`, and 127.0.0.0/8.
            Self::Network(address) => address == 0 || address >> 24 == 127,
        }
    }
}

/// So many doors are remembered.
const MOST_DOORS: usize = 1024;
/// The first delay; each further failure doubles it.
const FIRST: Duration = Duration::from_secs(1);
/// The longest.
const LONGEST: Duration = Duration::from_secs(60);
/// After so long without a guess everything is forgotten.
const FORGET: Duration = Duration::from_secs(15 * 60);

/// Who failed, and until when they wait.
#[derive(Default)]
pub struct Doors {
    failures: Mutex<HashMap<Door, Failures>>,
}

#[derive(Clone, Copy)]
struct Failures {
    count: u32,
    last: Instant,
}

impl Failures {
    /// One slip of the fingers is free.
    fn delay(self) -> Duration {
        let doubled = FIRST.saturating_mul(1 << self.count.saturating_sub(2).min(16));
        if self.count < 2 { Duration::ZERO } else { doubled.min(LONGEST) }
    }

    fn left(self, now: Instant) -> Duration {
        (self.last + self.delay()).saturating_duration_since(now)
    }
}

impl Doors {
    /// How long nobody is heard here; nothing when they may try.
    pub fn closed(&self, door: Door) -> Option<Duration> {
        let now = Instant::now();
        let failures = self.failures.lock().expect("no door panicked");
        failures.get(&door).map(|it| it.left(now)).filter(|left| !left.is_zero())
    }

    /// A password was wrong. Answers how many were.
    pub fn failed(&self, door: Door) -> u32 {
        let now = Instant::now();
        let mut failures = self.failures.lock().expect("no door panicked");
        failures.retain(|_, it| now.duration_since(it.last) < FORGET);
        if failures.len() >= MOST_DOORS && !failures.contains_key(&door) {
            // The one that waits least loses least.
            let least = failures.iter().min_by_key(|(_, it)| (it.left(now), it.last));
            let least = least.map(|(door, _)| *door);
            least.map(|door| failures.remove(&door));
        }
        let entry = failures.entry(door).or_insert(Failures { count: 0, last: now });
        entry.count = entry.count.saturating_add(1);
        entry.last = now;
        entry.count
    }

    /// The password was right. Who may look with it may still be guessing the other one.
    pub fn opened(&self, door: Door, right: Right) {
        if right == Right::Full {
            self.failures.lock().expect("no door panicked").remove(&door);
        }
    }
}

/// The passwords of a screen.
#[derive(Clone, Debug, Default)]
pub struct Passwords {
    /// Who has this may touch.
    pub full: Option<String>,
    /// Who has this may look.
    pub view: Option<String>,
    /// The name that goes with them, where names are asked for; without it every name will do.
    pub user: Option<String>,
}

/// What somebody with a right password may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Right {
    /// Look and touch.
    Full,
    /// Look.
    View,
}

impl Passwords {
    /// Whether anything must be said to come in.
    pub fn are_needed(&self) -> bool {
        self.full.is_some() || self.view.is_some()
    }

    /// VNC authentication uses this much of a password.
    pub const SEEN: usize = 8;

    /// Whether VNC authentication would look at a part of them only.
    pub fn are_long(&self) -> bool {
        [&self.full, &self.view].into_iter().flatten().any(|it| it.len() > Self::SEEN)
    }

    /// Checks the answer to a challenge (RFC 6143 7.2.2).
    pub fn check_answer(&self, challenge: &[u8; 16], answer: &[u8; 16]) -> Option<Right> {
        let check = |password: &Option<String>| match password {
            Some(password) => answer.ct_eq(&encrypt(password, challenge)),
            None => Choice::from(0),
        };
        // Both, always: what is right must not be seen by the time it takes.
        Self::pick(check(&self.full), check(&self.view))
    }

    /// Checks a name and a password.
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

/// Whether somebody said this; the time that it takes does not even tell how long it is.
fn same(secret: &str, said: &[u8]) -> Choice {
    let digest = |bytes| digest(&SHA256, bytes);
    digest(secret.as_bytes()).as_ref().ct_eq(digest(said).as_ref())
}

/// DES with the bits of each byte of the key reversed, as RFC 6143 has it by an old mistake.
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
        // The usual test vector of DES, with the key's bits reversed.
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
        let doors = Doors::default();
        let door = Door::of("10.0.0.1".parse().unwrap());
        doors.failed(door);
        assert_eq!(doors.closed(door), None, "one slip is free");
        let mut last = Duration::ZERO;
        for _ in 0..5 {
            doors.failed(door);
            let now = doors.closed(door).unwrap();
            assert!(now > last && now <= LONGEST);
            last = now;
        }
        assert_eq!(doors.closed(Door::Local), None, "another's guesses");
        for address in 0..3 * MOST_DOORS {
            doors.failed(Door::Network(address as u128));
        }
        assert!(doors.failures.lock().unwrap().len() <= MOST_DOORS);
        assert!(doors.closed(door).is_some(), "it waits longest and stays");
        doors.opened(door, Right::View);
        assert!(doors.closed(door).is_some(), "a password for looking is no way to guess faster");
        doors.opened(door, Right::Full);
        assert_eq!(doors.closed(door), None);
        let network = |text: &str| Door::of(text.parse().unwrap());
        assert_eq!(network("2001:db8::1"), network("2001:db8::2:1"));
        assert_eq!(network("::ffff:10.0.0.1"), door);
        for (text, here) in
            [("127.0.0.9", true), ("::1", true), ("10.0.0.1", false), ("2001:db8::1", false)]
        {
            assert_eq!(network(text).is_here(), here, "{text}");
        }
    }
}
