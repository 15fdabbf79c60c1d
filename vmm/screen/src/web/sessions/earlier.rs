//! Sessions of an earlier process, as lines of text: a digest, and the time of the last use in
//! seconds since 1970.
//!
//! Threats: the text may be read and written by others, who have the disk anyway. It has no
//! cookies, and nobody can add a session of their own without the passwords: the digest covers
//! them, and where the session is valid. An older text can be put back, and makes its cookies good
//! again. With a cookie, passwords can be guessed.

use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use ring::digest::{Context, SHA256, digest};

use super::{COOKIE_LENGTH, MAX_IDLE};
use crate::rfb::security::{Access, Passwords, PeerNetwork};

/// The text has less than 4 KiB.
const MAX_LINES: usize = 32;

/// A digest of the passwords, or of a session with its cookie.
type Digest = [u8; 32];

#[derive(Default)]
pub(super) struct Earlier {
    passwords: Digest,
    left: Vec<(Digest, Instant)>,
}

impl Earlier {
    pub(super) fn new(passwords: &Passwords) -> Self {
        Self { passwords: of_passwords(passwords), left: Vec::new() }
    }

    /// Lines that make no sense are left out: their clients log in again.
    pub(super) fn read(&mut self, text: &str) {
        self.left = text.lines().take(MAX_LINES).filter_map(parse).collect();
    }

    /// Finds the session of a cookie, and forgets it. Returns its access and where it is valid.
    pub(super) fn take(
        &mut self,
        cookie: &str,
        network: PeerNetwork,
    ) -> Option<(Access, Option<PeerNetwork>)> {
        if self.left.is_empty() || cookie.len() != COOKIE_LENGTH {
            return None;
        }
        let access = [Access::Full, Access::View].into_iter();
        let all = access.flat_map(|access| [(access, Some(network)), (access, None)]);
        all.into_iter().find(|(access, network)| {
            let wanted = self.digest(cookie, *access, *network);
            let found = self.left.extract_if(.., |(it, _)| *it == wanted).collect::<Vec<_>>();
            found.iter().any(|(_, used)| used.elapsed() < MAX_IDLE)
        })
    }

    /// The digest of a session.
    pub(super) fn digest(
        &self,
        cookie: &str,
        access: Access,
        network: Option<PeerNetwork>,
    ) -> Digest {
        let (kind, bits) = match network {
            None => (0, 0),
            Some(PeerNetwork::Local) => (1, 0),
            Some(PeerNetwork::Loopback) => (2, 0),
            Some(PeerNetwork::Remote(bits)) => (3, bits),
        };
        let mut all = Context::new(&SHA256);
        all.update(&self.passwords);
        all.update(&[u8::from(access == Access::Full), kind]);
        all.update(&bits.to_be_bytes());
        all.update(cookie.as_bytes());
        finish(all)
    }

    /// The newest of these sessions and of those that nobody has used again.
    pub(super) fn text(&self, current: impl Iterator<Item = (Digest, Instant)>) -> String {
        let mut all: Vec<_> = current.chain(self.left.iter().copied()).collect();
        all.sort_by_key(|(_, used)| *used);
        let newest = all.iter().rev().take(MAX_LINES);
        newest.map(|(digest, used)| line(digest, *used)).collect()
    }
}

/// Another one for other passwords or another user.
fn of_passwords(passwords: &Passwords) -> Digest {
    let mut all = Context::new(&SHA256);
    for part in [&passwords.user, &passwords.full, &passwords.view] {
        let part = part.as_deref().map(|part| digest(&SHA256, part.as_bytes()));
        all.update(&[u8::from(part.is_some())]);
        all.update(part.as_ref().map_or(&[], AsRef::as_ref));
    }
    finish(all)
}

fn finish(all: Context) -> Digest {
    all.finish().as_ref().try_into().expect("SHA-256 has 32 bytes")
}

fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

fn line(digest: &Digest, used: Instant) -> String {
    let used = now().saturating_sub(used.elapsed()).as_secs();
    format!("{} {used}\n", host::hex::encode(digest))
}

fn parse(line: &str) -> Option<(Digest, Instant)> {
    let (digest, used) = line.split_once(' ')?;
    let digest = host::hex::decode(digest).ok()?.try_into().ok()?;
    // A clock that was set back must not make a session live longer.
    let age = now().checked_sub(Duration::from_secs(used.parse().ok()?))?;
    let used = Instant::now().checked_sub(age).filter(|_| age < MAX_IDLE)?;
    Some((digest, used))
}

#[cfg(test)]
mod test {
    use super::super::Sessions;
    use super::*;

    const HERE: PeerNetwork = PeerNetwork::Remote(0x0a00_0001);

    /// Sessions of a process that starts with this text.
    fn sessions(password: &str, text: &str) -> Sessions {
        let full = Some(password.to_owned());
        let sessions = Sessions::new(&Passwords { full, ..Passwords::default() });
        sessions.resume(text);
        sessions
    }

    #[test]
    fn sessions_outlive_processes_until_they_end() {
        let first = sessions("one", "");
        let start = |access, network| first.start(access, network).unwrap();
        let [full, view, ended] =
            [Access::Full, Access::View, Access::Full].map(|access| start(access, Some(HERE)));
        let everywhere = start(Access::View, None);
        first.end(&ended, HERE);
        let text = first.text();
        assert!(!text.contains(&full), "a cookie is in the text");
        let second = sessions("one", &text);
        let access = |sessions: &Sessions, cookie: &str, network| {
            sessions.find(cookie, network).map(|it| it.access)
        };
        assert_eq!(access(&second, &full, PeerNetwork::Loopback), None, "a stolen cookie");
        assert_eq!(access(&second, &full, HERE), Some(Access::Full));
        assert_eq!(access(&second, &full, HERE), Some(Access::Full));
        assert_eq!(access(&second, &full, PeerNetwork::Loopback), None, "a stolen cookie");
        assert_eq!(access(&second, &ended, HERE), None, "it has logged out");
        let other = sessions("two", &text);
        assert_eq!(access(&other, &full, HERE), None, "another password");
        // One that was used there, and one that was not.
        let third = sessions("one", &second.text());
        assert_eq!(access(&third, &full, HERE), Some(Access::Full));
        assert_eq!(access(&third, &everywhere, PeerNetwork::Loopback), Some(Access::View));
        third.end(&view, HERE);
        third.end(&full, HERE);
        let fourth = sessions("one", &third.text());
        assert_eq!(access(&fourth, &view, HERE), None, "it has logged out");
        assert_eq!(access(&fourth, &full, HERE), None, "it has logged out");
        assert_eq!(access(&fourth, &everywhere, PeerNetwork::Local), Some(Access::View));
    }

    #[test]
    fn the_newest_are_kept_in_a_small_text() {
        let first = sessions("one", "");
        let all: Vec<_> =
            (0..MAX_LINES + 3).map(|_| first.start(Access::Full, Some(HERE)).unwrap()).collect();
        let text = first.text();
        assert!(text.len() < 4096 && text.lines().count() == MAX_LINES, "{text}");
        let second = sessions("one", &text);
        let found = |cookie: &String| second.find(cookie, HERE).is_some();
        assert!(found(&all[MAX_LINES + 2]) && !found(&all[0]));
    }

    #[test]
    fn lines_without_sense_are_left_out() {
        let first = sessions("one", "");
        let cookie = first.start(Access::Full, Some(HERE)).unwrap();
        let good = first.text();
        let found = |text: &str| sessions("one", text).find(&cookie, HERE).is_some();
        let (digest, used) = good.trim().split_once(' ').unwrap();
        for bad in [
            digest.to_owned(),
            format!("{} {used}", &digest[2..]),
            format!("{digest}00 {used}"),
            format!("{digest} {used} {used}"),
            // The future, and too long ago.
            format!("{digest} 99999999999"),
            format!("{digest} 1000000000"),
            format!("{digest} {}", u64::MAX),
            format!("{}{good}", "nothing\n".repeat(MAX_LINES)),
        ] {
            assert!(!found(&bad), "{bad}");
        }
        assert!(found(&format!("nothing\n{good}")));
    }
}
