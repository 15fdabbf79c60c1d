//! Limits the connections of clients that are not authenticated yet, so that no peer can take all
//! slots.
//!
//! Threats: a peer that opens many connections could keep others out. Each address can take only a
//! part of the slots. Addresses of this host have no such limit, because a proxy there may serve
//! many clients, and its users could do worse things anyway. Some slots are reserved for them. A
//! connection that only waits, or whose client does not read its answer, gives way to newcomers, so
//! even many silent addresses cannot keep others out. No data about an address outlives its
//! connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::Notify;

use super::security::PeerNetwork;

/// One of this many slots is reserved for addresses of this host.
const RESERVED_SHARE: usize = 8;

/// A connection whose client reads nothing of its answer for this long waits.
pub(crate) const STALLED: Duration = Duration::from_millis(if cfg!(test) { 200 } else { 10_000 });

#[derive(Clone)]
pub struct ConnectionLimit {
    max: usize,
    each: usize,
    /// Addresses of this host are treated like all others.
    equal: bool,
    taken: Taken,
}

/// Ordered by the time since which they wait, longest first.
type Taken = Arc<Mutex<Vec<Arc<Holder>>>>;

struct Holder {
    network: PeerNetwork,
    /// Number of reasons not to give way.
    busy: AtomicUsize,
    /// Since when the client has not read what is being sent.
    stalled: Mutex<Option<Instant>>,
    /// Notified when the slot was given to another connection.
    evicted: Notify,
}

impl Holder {
    fn waits(&self) -> bool {
        self.busy.load(Ordering::Relaxed) == 0
            || self.stalled().is_some_and(|since| since.elapsed() >= STALLED)
    }

    fn stalled(&self) -> MutexGuard<'_, Option<Instant>> {
        self.stalled.lock().expect("nothing panics with this lock")
    }
}

/// A slot that a connection holds until it is dropped.
pub struct Slot {
    taken: Taken,
    holder: Arc<Holder>,
}

/// While this exists, the connection does not give way.
pub struct BusyGuard {
    taken: Taken,
    holder: Arc<Holder>,
}

impl ConnectionLimit {
    /// Creates `max` slots, of which one address can take `each`.
    pub fn new(max: usize, each: usize) -> Self {
        Self { max, each, equal: false, taken: Taken::default() }
    }

    /// Like [`ConnectionLimit::new`], but treats addresses of this host like all others.
    pub(crate) fn without_local_reserve(max: usize, each: usize) -> Self {
        Self { equal: true, ..Self::new(max, each) }
    }

    /// Takes a slot that never gives way, if one is free.
    pub fn acquire(&self, network: PeerNetwork) -> Option<Slot> {
        self.take(network, 1)
    }

    /// Takes a slot that gives way to newcomers.
    pub fn acquire_evictable(&self, network: PeerNetwork) -> Option<Slot> {
        self.take(network, 0)
    }

    fn take(&self, network: PeerNetwork, busy: usize) -> Option<Slot> {
        let mut taken = lock(&self.taken);
        let (each, max) = match (self.equal, network.is_local()) {
            (true, _) => (self.each, self.max),
            (false, true) => (self.max, self.max),
            (false, false) => (self.each, self.max - self.max / RESERVED_SHARE),
        };
        let count = |network| taken.iter().filter(|it| it.network == network).count();
        // If the address has reached its limit, it loses one of its own slots. Otherwise the
        // address with the most slots loses one.
        let own = || taken.iter().find(|it| it.network == network && it.waits());
        let largest = || {
            let others = taken.iter().filter(|it| !it.network.is_local() && it.waits());
            // `max_by_key` returns the last of equal maximums, which is the first of the list.
            others.rev().max_by_key(|it| count(it.network))
        };
        let gone = match (count(network) >= each, taken.len() >= max) {
            (false, false) => None,
            (true, _) => Some(own()?.clone()),
            (false, true) => Some(largest().or_else(own)?.clone()),
        };
        if let Some(gone) = gone {
            gone.evicted.notify_one();
            taken.retain(|it| !Arc::ptr_eq(it, &gone));
        }
        let holder = Arc::new(Holder {
            network,
            busy: busy.into(),
            stalled: Mutex::default(),
            evicted: Notify::new(),
        });
        taken.push(holder.clone());
        Some(Slot { taken: self.taken.clone(), holder })
    }
}

fn lock(taken: &Taken) -> MutexGuard<'_, Vec<Arc<Holder>>> {
    taken.lock().expect("no slot panicked")
}

impl Slot {
    /// Returns when the slot was given to a newcomer.
    pub async fn evicted(&self) {
        self.holder.evicted.notified().await;
    }

    pub(crate) fn reading(&self) -> Reading {
        Reading(self.holder.clone())
    }

    /// The connection does not give way until the result is dropped.
    pub(crate) fn mark_busy(&self) -> BusyGuard {
        let _taken = lock(&self.taken);
        self.holder.busy.fetch_add(1, Ordering::Relaxed);
        BusyGuard { taken: self.taken.clone(), holder: self.holder.clone() }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        lock(&self.taken).retain(|it| !Arc::ptr_eq(it, &self.holder));
    }
}

/// Tells the slot whether its client reads. It does not hold the slot.
pub(crate) struct Reading(Arc<Holder>);

impl Reading {
    /// A part of an answer was sent, or waits for the client to read.
    pub(crate) fn note(&self, sent: bool) {
        let mut stalled = self.0.stalled();
        match sent {
            true => *stalled = None,
            false => drop(stalled.get_or_insert_with(Instant::now)),
        }
    }
}

impl Drop for BusyGuard {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        self.holder.busy.fetch_sub(1, Ordering::Relaxed);
        // The connection waits from now on, and is the last to give way.
        if let Some(at) = taken.iter().position(|it| Arc::ptr_eq(it, &self.holder)) {
            let holder = taken.remove(at);
            taken.push(holder);
        }
    }
}

#[cfg(test)]
mod test {
    use std::task::{Context, Waker};

    use super::*;

    fn network(text: &str) -> PeerNetwork {
        PeerNetwork::of(text.parse().unwrap())
    }

    /// Whether the slot is still held.
    fn stays(slot: &Slot) -> bool {
        let evicted = std::pin::pin!(slot.evicted());
        evicted.poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    #[test]
    fn connections_per_address_are_limited_and_released() {
        let limit = ConnectionLimit::new(8, 3);
        let acquire = |text: &str| limit.acquire(network(text));
        let mut taken: Vec<_> = (0..5).filter_map(|_| acquire("10.0.0.1")).collect();
        assert_eq!(taken.len(), 3);
        assert!(acquire("10.0.0.2").is_some());
        taken.extend((0..9).filter_map(|_| acquire("127.0.0.1")));
        assert_eq!(taken.len(), 8);
        assert!(acquire("10.0.0.2").is_none() && limit.acquire(PeerNetwork::Local).is_none());
        taken.clear();
        // However many strangers there are, a slot for this host remains.
        taken.extend((0..9).filter_map(|last| acquire(&format!("10.0.1.{last}"))));
        assert_eq!(taken.len(), 7);
        assert!(acquire("127.0.0.1").is_some() && acquire("10.0.0.2").is_none());
        taken.clear();
        assert!(limit.taken.lock().unwrap().is_empty());
        let equals = ConnectionLimit::without_local_reserve(8, 3);
        taken.extend((0..9).filter_map(|_| equals.acquire(network("127.0.0.1"))));
        assert_eq!(taken.len(), 3);
    }

    #[test]
    fn a_waiting_connection_is_evicted_and_a_busy_one_is_not() {
        let limit = ConnectionLimit::new(8, 3);
        let evictable = |text: &str| limit.acquire_evictable(network(text)).unwrap();
        let mine: Vec<_> = (0..3).map(|_| evictable("10.0.0.1")).collect();
        let busy = mine[0].mark_busy();
        let fourth = evictable("10.0.0.1");
        assert_eq!(mine.iter().map(stays).collect::<Vec<_>>(), [true, false, true]);
        let all = [mine[2].mark_busy(), fourth.mark_busy()];
        assert!(
            limit.acquire_evictable(network("10.0.0.1")).is_none(),
            "all slots of the address are busy"
        );
        assert!(stays(&evictable("10.0.0.2")), "another address");
        drop(all);
        let next = evictable("10.0.0.1");
        assert!(!stays(&mine[2]) && stays(&fourth) && stays(&mine[0]));
        drop((busy, mine, fourth, next));
        assert!(limit.taken.lock().unwrap().is_empty());
    }

    #[test]
    fn many_addresses_leave_slots_for_others_and_for_this_host() {
        let limit = ConnectionLimit::new(8, 3);
        let evictable = |text: &str| limit.acquire_evictable(network(text));
        let many: Vec<_> =
            (0..100).map(|last| evictable(&format!("10.0.1.{last}")).unwrap()).collect();
        assert_eq!(
            many.iter().filter(|it| stays(it)).count(),
            7,
            "one slot is reserved for this host"
        );
        assert_eq!(limit.taken.lock().unwrap().len(), 7);
        // The address with the most slots loses first.
        let first = evictable("10.0.0.1").unwrap();
        let second = evictable("10.0.0.1").unwrap();
        let _third = evictable("10.0.0.2").unwrap();
        assert!(!stays(&first) && stays(&second), "an address with fewer slots evicted one");
        let here: Vec<_> = (0..8).map(|_| evictable("127.0.0.1").unwrap()).collect();
        assert!(here.iter().all(stays));
        assert!(evictable("10.0.0.9").is_none(), "slots of this host are reserved");
        assert!(stays(&evictable("127.0.0.1").unwrap()) && !stays(&here[0]));
    }
}
