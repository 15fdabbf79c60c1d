//! Places for those who are not known yet, of which nobody takes all.
//!
//! Threats: somebody who opens connections keeps others out. One address has a part of the places
//! only. Addresses of this host have no such limit: a proxy speaks for many there, and whoever runs
//! here has better ways to be a nuisance. A part of the places is theirs alone. And who only waits
//! gives way to a newcomer, so that not even many addresses that say nothing keep anybody out. An
//! address is remembered for as long as it has a place.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use tokio::sync::Notify;

use super::security::Door;

/// One place of so many is for addresses of this host alone.
const OURS: usize = 8;

/// See the module.
#[derive(Clone)]
pub struct Crowd {
    most: usize,
    each: usize,
    /// Addresses of this host are as all others.
    equal: bool,
    taken: Taken,
}

/// In the order in which they gave up what they were at: the first has waited longest.
type Taken = Arc<Mutex<Vec<Arc<Seat>>>>;

/// A place that is taken.
struct Seat {
    door: Door,
    /// Reasons not to give way.
    busy: AtomicUsize,
    /// Somebody else has it now.
    lost: Notify,
}

impl Seat {
    fn waits(&self) -> bool {
        self.busy.load(Ordering::Relaxed) == 0
    }
}

/// Somebody in a place of theirs.
pub struct Place {
    taken: Taken,
    seat: Arc<Seat>,
}

/// A reason not to give way, for as long as this is there.
pub struct Busy {
    taken: Taken,
    seat: Arc<Seat>,
}

impl Crowd {
    /// So many places, of which one address has so many.
    pub fn new(most: usize, each: usize) -> Self {
        Self { most, each, equal: false, taken: Taken::default() }
    }

    /// The same, where addresses of this host are as all others.
    pub(crate) fn of_equals(most: usize, each: usize) -> Self {
        Self { equal: true, ..Self::new(most, each) }
    }

    /// Takes a place to stay in, if there is one.
    pub fn enter(&self, door: Door) -> Option<Place> {
        self.take(door, 1)
    }

    /// Takes a place to wait in, which gives way to whoever comes later.
    pub(crate) fn wait(&self, door: Door) -> Option<Place> {
        self.take(door, 0)
    }

    fn take(&self, door: Door, busy: usize) -> Option<Place> {
        let mut taken = lock(&self.taken);
        let (each, most) = match (self.equal, door.is_here()) {
            (true, _) => (self.each, self.most),
            (false, true) => (self.most, self.most),
            (false, false) => (self.each, self.most - self.most / OURS),
        };
        let count = |door| taken.iter().filter(|it| it.door == door).count();
        // Where an address has all that it may have, it loses one itself; else who has most does.
        let own = || taken.iter().find(|it| it.door == door && it.waits());
        let crowded = || {
            let others = taken.iter().filter(|it| !it.door.is_here() && it.waits());
            // The last of equals is found, which is the first in the list.
            others.rev().max_by_key(|it| count(it.door))
        };
        let gone = match (count(door) >= each, taken.len() >= most) {
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
    /// Waits until the place is somebody else's.
    pub(crate) async fn lost(&self) {
        self.seat.lost.notified().await;
    }

    /// Does not give way from now on.
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
        // It waits from now on, and is the last to give way.
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

    /// Whether nobody has taken it away.
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
        // However many strangers there are, this host has a place.
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
        assert!(crowd.wait(door("10.0.0.1")).is_none(), "all that it may have are busy");
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
        assert_eq!(many.iter().filter(|it| stays(it)).count(), 7, "one is this host's");
        assert_eq!(crowd.taken.lock().unwrap().len(), 7);
        // Who has most loses first.
        let first = wait("10.0.0.1").unwrap();
        let second = wait("10.0.0.1").unwrap();
        let _third = wait("10.0.0.2").unwrap();
        assert!(!stays(&first) && stays(&second), "not one of who has less");
        let here: Vec<_> = (0..8).map(|_| wait("127.0.0.1").unwrap()).collect();
        assert!(here.iter().all(stays));
        assert!(wait("10.0.0.9").is_none(), "nobody takes those of this host");
        assert!(stays(&wait("127.0.0.1").unwrap()) && !stays(&here[0]));
    }
}
