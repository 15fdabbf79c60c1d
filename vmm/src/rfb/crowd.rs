//! Places for those who are not known yet, of which nobody takes all.
//!
//! Threats: somebody who opens connections and says nothing keeps others out. One address has a
//! part of the places only. Addresses of this host have no such limit: a proxy speaks for many
//! there, and whoever runs here has better ways to be a nuisance. A part of the places is theirs
//! alone. An address is remembered for as long as it has a place.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use super::security::Door;

/// One place of so many is for addresses of this host alone.
const OURS: usize = 8;

/// See the module.
#[derive(Clone)]
pub struct Crowd {
    most: usize,
    each: usize,
    places: Arc<Mutex<HashMap<Door, usize>>>,
}

/// A place that is taken.
pub struct Place {
    places: Arc<Mutex<HashMap<Door, usize>>>,
    door: Door,
}

impl Crowd {
    /// So many places, of which one address has so many.
    pub fn new(most: usize, each: usize) -> Self {
        Self { most, each, places: Arc::default() }
    }

    /// Takes a place, if there is one.
    pub fn enter(&self, door: Door) -> Option<Place> {
        let mut places = self.places.lock().expect("no place panicked");
        let mine = places.get(&door).copied().unwrap_or(0);
        let (each, most) = match door.is_here() {
            true => (self.most, self.most),
            false => (self.each, self.most - self.most / OURS),
        };
        if mine >= each || places.values().sum::<usize>() >= most {
            return None;
        }
        places.insert(door, mine + 1);
        Some(Place { places: self.places.clone(), door })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = self.places.lock().expect("no place panicked");
        if let Some(count) = places.get_mut(&self.door) {
            *count -= 1;
            if *count == 0 {
                places.remove(&self.door);
            }
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn one_address_leaves_places_for_others_and_nothing_is_remembered() {
        let crowd = Crowd::new(8, 3);
        let door = |text: &str| Door::of(text.parse().unwrap());
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
        assert!(crowd.places.lock().unwrap().is_empty());
    }
}
