//! Limits the connections of clients that are not authenticated yet, so that no peer can take all
//! places.
//!
//! Threats: a peer that opens many connections could keep others out. Each address can take only a
//! part of the places. Addresses of this host have no such limit, because a proxy there may serve
//! many clients, and its users could do worse things anyway. Some places are reserved for them. A
//! connection that only waits gives way to newcomers, so even many silent addresses cannot keep
//! others out. No data about an address outlives its connections.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use super::security::Door;

/// One of this many places is reserved for addresses of this host.
const RESERVED_SHARE: usize = 8;

/// A limited number of places. See the module.
#[derive(Clone)]
pub struct Crowd {
    max: usize,
    each: usize,
    /// Addresses of this host are treated like all others.
    equal: bool,
    taken: Taken,
}

/// Ordered by the time since which they wait, longest first.
type Taken = Arc<Mutex<Vec<Arc<Seat>>>>;

/// A place that is taken.
struct Seat {
    door: Door,
    /// Number of reasons not to give way.
    busy: AtomicUsize,
    /// Notified when the place was given to another connection.
    lost: Notify,
}

impl Seat {
    fn waits(&self) -> bool {
        self.busy.load(Ordering::Relaxed) == 0
    }
}

/// A place that a connection holds until it is dropped.
pub struct Place {
    taken: Taken,
    seat: Arc<Seat>,
}

/// While this exists, the connection does not give way.
pub struct Busy {
    taken: Taken,
    seat: Arc<Seat>,
}

impl Crowd {
    /// Creates `max` places, of which one address can take `each`.
    pub fn new(max: usize, each: usize) -> Self {
        Self { max, each, equal: false, taken: Taken::default() }
    }

    /// Like [`Crowd::new`], but treats addresses of this host like all others.
    pub(crate) fn of_equals(max: usize, each: usize) -> Self {
        Self { equal: true, ..Self::new(max, each) }
    }

    /// Takes a place that never gives way, if one is free.
    pub fn enter(&self, door: Door) -> Option<Place> {
        self.take(door, 1)
    }

    /// Takes a place that gives way to newcomers.
    pub(crate) fn wait(&self, door: Door) -> Option<Place> {
        self.take(door, 0)
    }

    fn take(&self, door: Door, busy: usize) -> Option<Place> {
        let mut taken = lock(&self.taken);
        let (each, max) = match (self.equal, door.is_here()) {
            (true, _) => (self.each, self.max),
            (false, true) => (self.max, self.max),
            (false, false) => (self.each, self.max - self.max / RESERVED_SHARE),
        };
        let count = |door| taken.iter().filter(|it| it.door == door).count();
        // If the address has reached its limit, it loses one of its own places. Otherwise the
        // address with the most places loses one.
        let own = || taken.iter().find(|it| it.door == door && it.waits());
        let crowded = || {
            let others = taken.iter().filter(|it| !it.door.is_here() && it.waits());
            // `max_by_key` returns the last of equal maximums, which is the first of the list.
            others.rev().max_by_key(|it| count(it.door))
        };
        let gone = match (count(door) >= each, taken.len() >= max) {
            (false, false) => None,
            (true, _) => Some(own()?.clone()),
            (false, true) => Some(crowded().or_else(own)?.clone()),
        };
        if let Some(gone) = gone {
            gone.lost.notify_one();
            taken.retain(|it| !Arc::ptr_eq(it, &gone));
        }
        let seat = Arc::new(Seat { door, busy: busy.into(), lost: Notify::new() });
        taken.push(seat.clone());
        Some(Place { taken: self.taken.clone(), seat })
    }
}

fn lock(taken: &Taken) -> MutexGuard<'_, Vec<Arc<Seat>>> {
    taken.lock().expect("no place panicked")
}

impl Place {
    /// Waits until the place was given to another connection.
    pub(crate) async fn lost(&self) {
        self.seat.lost.notified().await;
    }

    /// The connection does not give way until the result is dropped.
    pub(crate) fn busy(&self) -> Busy {
        let _taken = lock(&self.taken);
        self.seat.busy.fetch_add(1, Ordering::Relaxed);
        Busy { taken: self.taken.clone(), seat: self.seat.clone() }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        lock(&self.taken).retain(|it| !Arc::ptr_eq(it, &self.seat));
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut taken = lock(&self.taken);
        self.seat.busy.fetch_sub(1, Ordering::Relaxed);
        // The connection waits from now on, and is the last to give way.
        if let Some(at) = taken.iter().position(|it| Arc::ptr_eq(it, &self.seat)) {
            let seat = taken.remove(at);
            taken.push(seat);
        }
    }
}

#[cfg(test)]
mod test {
    use std::task::{Context, Waker};

    use super::*;

    fn door(text: &str) -> Door {
        Door::of(text.parse().unwrap())
    }

    /// Whether the place is still held.
    fn stays(place: &Place) -> bool {
        let lost = std::pin::pin!(place.lost());
        lost.poll(&mut Context::from_waker(Waker::noop())).is_pending()
    }

    #[test]
    fn one_address_leaves_places_for_others_and_nothing_is_remembered() {
        let crowd = Crowd::new(8, 3);
        let enter = |text: &str| crowd.enter(door(text));
        let mut taken: Vec<_> = (0..5).filter_map(|_| enter("10.0.0.1")).collect();
        assert_eq!(taken.len(), 3);
        assert!(enter("10.0.0.2").is_some());
        taken.extend((0..9).filter_map(|_| enter("127.0.0.1")));
        assert_eq!(taken.len(), 8);
        assert!(enter("10.0.0.2").is_none() && crowd.enter(Door::Local).is_none());
        taken.clear();
        // However many strangers there are, a place for this host remains.
        taken.extend((0..9).filter_map(|last| enter(&format!("10.0.1.{last}"))));
        assert_eq!(taken.len(), 7);
        assert!(enter("127.0.0.1").is_some() && enter("10.0.0.2").is_none());
        taken.clear();
        assert!(crowd.taken.lock().unwrap().is_empty());
        let equals = Crowd::of_equals(8, 3);
        taken.extend((0..9).filter_map(|_| equals.enter(door("127.0.0.1"))));
        assert_eq!(taken.len(), 3);
    }

    #[test]
    fn who_waits_gives_way_and_who_is_busy_does_not() {
        let crowd = Crowd::new(8, 3);
        let wait = |text: &str| crowd.wait(door(text)).unwrap();
        let mine: Vec<_> = (0..3).map(|_| wait("10.0.0.1")).collect();
        let busy = mine[0].busy();
        let fourth = wait("10.0.0.1");
        assert_eq!(mine.iter().map(stays).collect::<Vec<_>>(), [true, false, true]);
        let all = [mine[2].busy(), fourth.busy()];
        assert!(crowd.wait(door("10.0.0.1")).is_none(), "all places of the address are busy");
        assert!(stays(&wait("10.0.0.2")), "another address");
        drop(all);
        let next = wait("10.0.0.1");
        assert!(!stays(&mine[2]) && stays(&fourth) && stays(&mine[0]));
        drop((busy, mine, fourth, next));
        assert!(crowd.taken.lock().unwrap().is_empty());
    }

    #[test]
    fn many_addresses_leave_places_for_others_and_for_this_host() {
        let crowd = Crowd::new(8, 3);
        let wait = |text: &str| crowd.wait(door(text));
        let many: Vec<_> = (0..100).map(|last| wait(&format!("10.0.1.{last}")).unwrap()).collect();
        assert_eq!(
            many.iter().filter(|it| stays(it)).count(),
            7,
            "one place is reserved for this host"
        );
        assert_eq!(crowd.taken.lock().unwrap().len(), 7);
        // The address with the most places loses first.
        let first = wait("10.0.0.1").unwrap();
        let second = wait("10.0.0.1").unwrap();
        let _third = wait("10.0.0.2").unwrap();
        assert!(!stays(&first) && stays(&second), "an address with fewer places lost one");
        let here: Vec<_> = (0..8).map(|_| wait("127.0.0.1").unwrap()).collect();
        assert!(here.iter().all(stays));
        assert!(wait("10.0.0.9").is_none(), "places of this host are reserved");
        assert!(stays(&wait("127.0.0.1").unwrap()) && !stays(&here[0]));
    }
}
