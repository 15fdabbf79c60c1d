//! A server: its account, its shares, and what its connections have in common.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use rustix::net::Shutdown;

use crate::folder::{Folder, filetime};
use crate::lobby::{Lobby, Place};
use crate::ntlm::Account;
use crate::table::Table;

pub struct Share {
    pub name: String,
    pub folder: Folder,
    pub read_only: bool,
}

pub struct Config {
    /// The server's NetBIOS name: at most 15 letters.
    pub host: String,
    pub account: Account,
    pub shares: Vec<Share>,
}

pub struct Server {
    pub(crate) config: Config,
    pub(crate) table: Table,
    pub(crate) guid: [u8; 16],
    lobby: Arc<Lobby>,
    next: AtomicU64,
    /// Held while the answer to a wrong password waits: many connections do not guess faster.
    pub(crate) wrong: Mutex<()>,
    /// Connections of sessions.
    sessions: Mutex<HashMap<u64, Arc<OwnedFd>>>,
}

/// The time that a client waits for its former connection to end.
const REPLACE: Duration = Duration::from_secs(2);

impl Server {
    pub fn new(config: Config) -> Arc<Self> {
        Arc::new(Self {
            config,
            table: Table::default(),
            guid: random(),
            lobby: Arc::default(),
            // Ids of files survive neither a restart nor a guess of a client with older ones.
            next: AtomicU64::new(u64::from_le_bytes(random()) >> 16),
            wrong: Mutex::default(),
            sessions: Mutex::default(),
        })
    }

    /// Takes a place for a connected stream. None if there is none.
    pub fn admit(&self, stream: OwnedFd) -> Option<Place> {
        self.lobby.admit(stream)
    }

    /// A number that is used once: for sessions, files and nonces.
    pub(crate) fn next(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn sessions(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Arc<OwnedFd>>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn register(&self, session: u64, place: Option<&Place>) {
        if let Some(place) = place {
            self.sessions().insert(session, place.stream().clone());
        }
    }

    pub(crate) fn forget(&self, session: u64) {
        self.sessions().remove(&session);
    }

    /// Ends the connection of a session which the same account has opened again: its files would
    /// stay in use until the host notices that the client has restarted.
    pub(crate) fn replace(&self, session: u64) {
        let Some(stream) = self.sessions().get(&session).cloned() else { return };
        // It may have ended meanwhile.
        let _ = rustix::net::shutdown(&*stream, Shutdown::Both);
        let until = Instant::now() + REPLACE;
        while self.sessions().contains_key(&session) && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Random bytes of the kernel.
pub fn random<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    let mut filled = 0;
    while filled < N {
        let rest = &mut bytes[filled..];
        filled += rustix::rand::getrandom(rest, rustix::rand::GetRandomFlags::empty())
            .expect("the kernel has random numbers");
    }
    bytes
}

/// The time as a FILETIME.
pub fn now() -> u64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    filetime(i64::try_from(now.as_secs()).unwrap_or(0), now.subsec_nanos())
}
