//! Places of connections: how many there are, and which connection gives its place to another.
//!
//! Threats: a peer that opens many connections and never logs in, or guesses passwords on them; an
//! account that leaves connections behind. Connections without a login have places of their own,
//! and the oldest one gives way to the newest. A connection with a login gives way only while all
//! are taken and it is idle, without an open file: Windows then connects again by itself, as with
//! Windows servers, which end such connections after 15 minutes.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::net::Shutdown;

use crate::status::{Answer, Status};

/// The maximum number of connections that are logged in. Each costs up to 6 MiB.
pub const MAX_CONNECTIONS: usize = 16;
/// The maximum number of connections without a login.
pub const MAX_STRANGERS: usize = 8;
/// The maximum number of threads: with strangers that gave way, and are about to end.
const MAX_THREADS: usize = MAX_CONNECTIONS + 2 * MAX_STRANGERS;
/// The time without a request after which a connection may give way.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Default)]
pub struct Lobby {
    /// In the order of arrival.
    holders: Mutex<Vec<Holder>>,
}

struct Holder {
    stream: Arc<OwnedFd>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Stranger,
    /// Its wrong password is not answered yet. It stays until then: who could guess again on a new
    /// connection would not have to wait.
    Wrong,
    /// Logged in. The time of the last request, if it has no open files.
    Account {
        idle: Option<Instant>,
    },
    /// It gave way, and its thread ends.
    Leaving,
}

/// The place of a connection, until it is dropped.
pub struct Place {
    lobby: Arc<Lobby>,
    stream: Arc<OwnedFd>,
}

impl Lobby {
    fn holders(&self) -> MutexGuard<'_, Vec<Holder>> {
        self.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a place for a connected stream, from the oldest one without a login if need be. None
    /// if all of these wait for the answer to a wrong password.
    pub fn admit(self: &Arc<Self>, stream: OwnedFd) -> Option<Place> {
        let mut holders = self.holders();
        let waits = |it: &&Holder| matches!(it.state, State::Stranger | State::Wrong);
        if holders.len() >= MAX_THREADS {
            return None;
        }
        if holders.iter().filter(waits).count() >= MAX_STRANGERS {
            holders.iter_mut().find(|it| it.state == State::Stranger)?.leave();
        }
        let stream = Arc::new(stream);
        holders.push(Holder { stream: stream.clone(), state: State::Stranger });
        Some(Place { lobby: self.clone(), stream })
    }
}

impl Holder {
    fn is(&self, stream: &Arc<OwnedFd>) -> bool {
        Arc::ptr_eq(&self.stream, stream)
    }

    fn leave(&mut self) {
        self.state = State::Leaving;
        // It may have ended meanwhile.
        let _ = rustix::net::shutdown(&*self.stream, Shutdown::Both);
    }
}

impl Place {
    pub fn stream(&self) -> &Arc<OwnedFd> {
        &self.stream
    }

    /// Gets one of the places of connections with a login.
    pub fn enter(&self, now: Instant) -> Answer<()> {
        let mut holders = self.lobby.holders();
        let idle_since = |it: &Holder| match it.state {
            State::Account { idle } => idle.filter(|it| now.duration_since(*it) >= IDLE),
            _ => None,
        };
        let entered =
            |it: &&Holder| !it.is(&self.stream) && matches!(it.state, State::Account { .. });
        if holders.iter().filter(entered).count() >= MAX_CONNECTIONS {
            let idle = holders.iter_mut().filter_map(|it| Some((idle_since(it)?, it)));
            let longest = idle.min_by_key(|(since, _)| *since);
            let Some((_, longest)) = longest else {
                drop(holders);
                tracing::warn!("a login is refused: {MAX_CONNECTIONS} connections are in use");
                return Err(Status::REQUEST_NOT_ACCEPTED);
            };
            longest.leave();
        }
        set(&mut holders, &self.stream, State::Account { idle: None })
    }

    /// The connection has a login, and its last request was at this time.
    pub fn rest(&self, used: Instant, has_files: bool) {
        let idle = (!has_files).then_some(used);
        // One that gave way meanwhile is about to notice.
        let _ = set(&mut self.lobby.holders(), &self.stream, State::Account { idle });
    }

    /// Keeps the place while a wrong password is not answered.
    pub fn keep(&self) -> Answer<()> {
        set(&mut self.lobby.holders(), &self.stream, State::Wrong)
    }

    /// Gives way again, as the last of all.
    pub fn wait(&self) {
        let mut holders = self.lobby.holders();
        if let Some(at) = holders.iter().position(|it| it.is(&self.stream)) {
            let holder = holders.remove(at);
            holders.push(Holder { state: State::Stranger, ..holder });
        }
    }
}

/// Fails if the connection has given way.
fn set(holders: &mut [Holder], stream: &Arc<OwnedFd>, state: State) -> Answer<()> {
    let holder = holders.iter_mut().find(|it| it.is(stream) && it.state != State::Leaving);
    holder.ok_or(Status::REQUEST_NOT_ACCEPTED)?.state = state;
    Ok(())
}

impl Drop for Place {
    fn drop(&mut self) {
        self.lobby.holders().retain(|it| !it.is(&self.stream));
    }
}

#[cfg(test)]
mod test {
    use std::io::Read as _;
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A client and its place.
    fn arrive(lobby: &Arc<Lobby>) -> Option<(UnixStream, Place)> {
        let (near, far) = UnixStream::pair().unwrap();
        near.set_nonblocking(true).unwrap();
        Some((near, lobby.admit(far.into())?))
    }

    fn stays((client, _): &(UnixStream, Place)) -> bool {
        let mut client = client;
        client.read(&mut [0]).is_err()
    }

    #[test]
    fn the_oldest_stranger_gives_way_and_no_account() {
        let lobby = Arc::new(Lobby::default());
        let arrive = || arrive(&lobby).unwrap();
        let now = Instant::now();
        let enter = |guest: (UnixStream, Place)| guest.1.enter(now).map(|()| guest).unwrap();
        let entered: Vec<_> = (0..MAX_CONNECTIONS).map(|_| enter(arrive())).collect();
        let strangers: Vec<_> = (0..=MAX_STRANGERS).map(|_| arrive()).collect();
        assert!(!stays(&strangers[0]) && strangers[1..].iter().all(stays));
        assert!(entered.iter().all(stays));
        assert!(strangers[0].1.enter(now).is_err(), "it has given way");
        drop(entered);
        assert_eq!(strangers[1].1.enter(now), Ok(()));
        drop(strangers);
        assert!(lobby.holders().is_empty());
    }

    #[test]
    fn threads_that_do_not_end_are_limited() {
        let lobby = Arc::new(Lobby::default());
        let all: Vec<_> = (0..100).filter_map(|_| arrive(&lobby)).collect();
        assert_eq!(all.len(), MAX_THREADS);
        drop(all);
        assert!(arrive(&lobby).is_some());
    }

    #[test]
    fn a_wrong_password_keeps_its_place_until_its_answer() {
        let lobby = Arc::new(Lobby::default());
        let strangers: Vec<_> = (0..MAX_STRANGERS).filter_map(|_| arrive(&lobby)).collect();
        strangers.iter().for_each(|(_, place)| place.keep().unwrap());
        assert!(arrive(&lobby).is_none());
        strangers[3].1.wait();
        let newer = arrive(&lobby).unwrap();
        assert!(!stays(&strangers[3]) && stays(&newer) && stays(&strangers[0]));
        assert!(strangers[3].1.keep().is_err(), "it has given way");
    }

    #[test]
    fn an_idle_account_without_files_gives_way_if_all_places_are_taken() {
        let lobby = Arc::new(Lobby::default());
        let start = Instant::now();
        let late = start + 2 * IDLE;
        let arrive = || arrive(&lobby).unwrap();
        let mut all = Vec::new();
        for count in 0..16 {
            all.push(arrive());
            let (_, place) = &all[all.len() - 1];
            place.enter(start).unwrap();
            // The first ones have files, the last ones are in use.
            let used = if count < 12 { start + Duration::from_secs(count) } else { late };
            place.rest(used, count < 10);
        }
        let new = arrive();
        assert_eq!(new.1.enter(start + IDLE), Err(Status::REQUEST_NOT_ACCEPTED));
        assert_eq!(new.1.enter(late), Ok(()));
        assert!(!stays(&all[10]) && stays(&all[11]));
        assert_eq!(arrive().1.enter(late), Ok(()));
        let (next, last) = (arrive(), arrive());
        assert!(!stays(&all[11]));
        assert_eq!(next.1.enter(late), Ok(()), "a place was dropped");
        assert_eq!(last.1.enter(late), Err(Status::REQUEST_NOT_ACCEPTED));
        assert_eq!(all.iter().filter(|it| stays(it)).count(), MAX_CONNECTIONS - 2);
    }
}
