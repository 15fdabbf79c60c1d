//! Sessions: clients that have shown a password, identified by a cookie.
//!
//! Threats: a browser sends its cookies to all ports of a host, so that programs in the guest may
//! see them. A cookie is therefore good for the network of the login only.

mod earlier;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use rustix::rand::{GetRandomFlags, getrandom};
use tokio::sync::Semaphore;

use self::earlier::Earlier;
use crate::rfb::security::{Access, Passwords, PeerNetwork};

const MAX_SESSIONS: usize = 1024;
/// In hexadecimal digits.
const COOKIE_LENGTH: usize = 64;
/// A session that is unused for this long ends.
const MAX_IDLE: Duration = Duration::from_secs(12 * 60 * 60);

pub(super) struct Session {
    pub(super) access: Access,
    /// Where it is valid. `None`: unknown proxies hide where its client is.
    network: Option<PeerNetwork>,
    warned: AtomicBool,
    /// Closed when the session ends. This ends all connections of the session, now and later.
    ended: Semaphore,
}

impl Session {
    fn new(access: Access, network: Option<PeerNetwork>) -> Self {
        Self { access, network, warned: AtomicBool::new(false), ended: Semaphore::new(0) }
    }

    pub(super) async fn ended(&self) {
        // The semaphore never has a permit, so this returns only when it is closed.
        self.ended.acquire().await.map_or_else(|_| (), drop);
    }
}

/// Returns 256 random bits in hexadecimal.
pub(super) fn random() -> anyhow::Result<String> {
    let mut bytes = [0; 32];
    let count = getrandom(&mut bytes, GetRandomFlags::empty()).context("randomness")?;
    ensure!(count == bytes.len(), "randomness");
    Ok(host::hex::encode(&bytes))
}

/// A session and its last use, by cookie. Cookies have 256 random bits, so the time of a search
/// reveals nothing.
type Current = HashMap<String, (Arc<Session>, Instant)>;

#[derive(Default)]
struct State {
    current: Current,
    earlier: Earlier,
}

/// All sessions.
#[derive(Default)]
pub struct Sessions(Mutex<State>);

impl Sessions {
    pub(super) fn new(passwords: &Passwords) -> Self {
        let earlier = Earlier::new(passwords);
        Self(Mutex::new(State { earlier, ..State::default() }))
    }

    /// Continues sessions of an earlier process with the same passwords.
    pub fn resume(&self, text: &str) {
        self.state().earlier.read(text);
    }

    /// A text for [`Sessions::resume`]: the newest sessions, without their cookies.
    pub fn text(&self) -> String {
        let State { current, earlier } = &*self.state();
        let current = current.iter().map(|(cookie, (session, used))| {
            (earlier.digest(cookie, session.access, session.network), *used)
        });
        earlier.text(current)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("no session panicked")
    }

    /// Starts a session.
    /// `network`: where the session is valid; everywhere if it is not known.
    pub(super) fn start(
        &self,
        access: Access,
        network: Option<PeerNetwork>,
    ) -> anyhow::Result<String> {
        let cookie = random()?;
        add(&mut self.state().current, &cookie, Session::new(access, network));
        Ok(cookie)
    }

    pub(super) fn find(&self, cookie: &str, network: PeerNetwork) -> Option<Arc<Session>> {
        let State { current, earlier } = &mut *self.state();
        if !current.contains_key(cookie) {
            let (access, network) = earlier.take(cookie, network)?;
            add(current, cookie, Session::new(access, network));
        }
        let (session, used) =
            current.get_mut(cookie).filter(|(_, used)| used.elapsed() < MAX_IDLE)?;
        if let Some(own) = session.network.filter(|own| *own != network) {
            if !session.warned.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    "web: a session of {own} is used at {network}, which needs a login of its \
                     own: if these are proxies, name them all as trusted"
                );
            }
            return None;
        }
        *used = Instant::now();
        Some(session.clone())
    }

    pub(super) fn end(&self, cookie: &str, network: PeerNetwork) {
        let State { current, earlier } = &mut *self.state();
        let removed = current.remove(cookie);
        removed.inspect(|(session, _)| session.ended.close());
        earlier.take(cookie, network);
    }
}

/// Adds a session. If the maximum is reached, it replaces the one that was unused for longest.
fn add(all: &mut Current, cookie: &str, session: Session) {
    // One with connections stays known, so that logging out ends them.
    let is_connected = |session: &Arc<Session>| Arc::strong_count(session) > 1;
    all.retain(|_, (session, used)| used.elapsed() < MAX_IDLE || is_connected(session));
    if all.len() >= MAX_SESSIONS {
        let oldest = all.iter().min_by_key(|(_, (_, used))| *used);
        let oldest = oldest.map(|(cookie, _)| cookie.clone());
        oldest.and_then(|it| all.remove(&it)).inspect(|(it, _)| it.ended.close());
    }
    all.insert(cookie.to_owned(), (Arc::new(session), Instant::now()));
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn sessions_are_limited_and_the_newest_are_kept() {
        let sessions = Sessions::default();
        let [here, elsewhere] =
            ["10.0.0.1", "10.0.0.2"].map(|it| PeerNetwork::of(it.parse().unwrap()));
        let find = |cookie: &str| sessions.find(cookie, here);
        let first = sessions.start(Access::Full, Some(here)).unwrap();
        assert_eq!(first.len(), COOKIE_LENGTH);
        let second = sessions.start(Access::View, Some(here)).unwrap();
        assert!(sessions.find(&second, elsewhere).is_none(), "a stolen cookie");
        let third = sessions.start(Access::View, None).unwrap();
        assert!(sessions.find(&third, elsewhere).is_some(), "behind unknown proxies");
        sessions.end(&third, here);
        assert_eq!(find(&second).unwrap().access, Access::View);
        assert!(find(&first).is_some(), "it is now the one used last");
        let mut last = String::new();
        for _ in 0..MAX_SESSIONS - 1 {
            last = sessions.start(Access::Full, Some(here)).unwrap();
        }
        assert_eq!(sessions.state().current.len(), MAX_SESSIONS);
        assert!(find(&second).is_none());
        assert!(find(&first).is_some() && find(&last).is_some());
        let session = find(&first).unwrap();
        sessions.end(&first, here);
        // This holds for a caller that begins to wait only now, too.
        let ended = std::pin::pin!(session.ended());
        assert!(
            ended.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_ready()
        );
        assert!(find(&first).is_none() && find("").is_none());
    }
}
