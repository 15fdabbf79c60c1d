//! Who has shown a password, and is known by a cookie since.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::sync::Notify;

use crate::rfb::security::Right;

/// So many people at once.
const MOST: usize = 1024;
/// Whoever was not there for so long says the password again.
const FORGET: Duration = Duration::from_secs(12 * 60 * 60);

/// One of them.
pub(super) struct Session {
    /// What they may do.
    pub(super) right: Right,
    /// They logged out: whatever they have open is closed.
    pub(super) over: Notify,
}

/// All of them, by their cookies: 256 random bits each, so that the time that a search takes
/// tells nothing.
#[derive(Default)]
pub(super) struct Sessions(Mutex<HashMap<String, (Arc<Session>, Instant)>>);

impl Sessions {
    /// A new one. Where all places are taken, it has that of the one who was away longest.
    pub(super) fn start(&self, right: Right) -> anyhow::Result<String> {
        let mut bytes = [0; 32];
        let count = getrandom(&mut bytes, GetRandomFlags::empty()).context("randomness")?;
        ensure!(count == bytes.len(), "randomness");
        let cookie = bytes.iter().fold(String::new(), |mut text, byte| {
            write!(text, "{byte:02x}").ok();
            text
        });
        let mut all = self.0.lock().expect("no session panicked");
        all.retain(|_, (_, used)| used.elapsed() < FORGET);
        if all.len() >= MOST {
            let oldest = all.iter().min_by_key(|(_, (_, used))| *used);
            let oldest = oldest.map(|(cookie, _)| cookie.clone());
            oldest.and_then(|it| all.remove(&it)).inspect(|(it, _)| it.over.notify_waiters());
        }
        let session = Session { right, over: Notify::new() };
        all.insert(cookie.clone(), (Arc::new(session), Instant::now()));
        Ok(cookie)
    }

    /// The one of a cookie.
    pub(super) fn find(&self, cookie: &str) -> Option<Arc<Session>> {
        let mut all = self.0.lock().expect("no session panicked");
        let (session, used) = all.get_mut(cookie).filter(|(_, used)| used.elapsed() < FORGET)?;
        *used = Instant::now();
        Some(session.clone())
    }

    /// It is over.
    pub(super) fn end(&self, cookie: &str) {
        let ended = self.0.lock().expect("no session panicked").remove(cookie);
        ended.inspect(|(session, _)| session.over.notify_waiters());
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn memory_is_bounded_and_the_newest_stay() {
        let sessions = Sessions::default();
        let first = sessions.start(Right::Full).unwrap();
        assert_eq!(first.len(), 64);
        let second = sessions.start(Right::View).unwrap();
        assert_eq!(sessions.find(&second).unwrap().right, Right::View);
        assert!(sessions.find(&first).is_some(), "and is the one used last");
        let mut last = String::new();
        for _ in 0..MOST - 1 {
            last = sessions.start(Right::Full).unwrap();
        }
        assert_eq!(sessions.0.lock().unwrap().len(), MOST);
        assert!(sessions.find(&second).is_none());
        assert!(sessions.find(&first).is_some() && sessions.find(&last).is_some());
        sessions.end(&first);
        assert!(sessions.find(&first).is_none() && sessions.find("").is_none());
    }
}
