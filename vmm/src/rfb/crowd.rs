//! Places for those who are not known yet, of which nobody takes all.
//!
//! Threats: somebody who opens connections and says nothing keeps others out. One address has a
//! part of the places only. Addresses of this host have no such limit: a proxy speaks for many
//! there, and whoever runs here has better ways to be a nuisance. An address is remembered for as
//! long as it has a place.

use std::collections::HashMap;
use std::sync::Mutex;

use super::security::Door;

/// See the module.
pub struct Crowd {
    most: usize,
    each: usize,
    places: Mutex<HashMap<Door, usize>>,
}

/// A place that is taken.
pub struct Place<'a> {
    crowd: &'a Crowd,
    door: Door,
}

impl Crowd {
    /// So many places, of which one address has so many.
    pub fn new(most: usize, each: usize) -> Self {
        Self { most, each, places: Mutex::default() }
    }

    /// Takes a place, if there is one.
    pub fn enter(&self, door: Door) -> Option<Place<'_>> {
        let mut places = self.places.lock().expect("no place panicked");
        let mine = places.get(&door).copied().unwrap_or(0);
        let each = if door.is_here() { self.most } else { self.each };
        if mine >= each || places.values().sum::<usize>() >= self.most {
            return None;
        }
        places.insert(door, mine + 1);
        Some(Place { crowd: self, door })
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut places = self.crowd.places.lock().expect("no place panicked");
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
        assert!(crowd.places.lock().unwrap().is_empty());
    }
}
