//! The message ids that a client may use: as many as the credits it was granted
//! ([MS-SMB2] 3.3.1.1 and 3.3.5.2.3).
//!
//! Threats: the client uses an id twice. Ids are the nonces of AES-GMAC, whose key is revealed by
//! two answers with the same nonce. Or it uses ids far apart: the window has a maximum, and grows
//! only as its lowest id is used.

use std::collections::VecDeque;

/// The maximum size, as that of Samba and Windows.
const MAX_CREDITS: usize = 8192;

pub struct Window {
    /// The lowest id that was not used.
    low: u64,
    /// Whether ids from `low` on were used.
    used: VecDeque<bool>,
}

impl Default for Window {
    /// The first message is granted to everyone.
    fn default() -> Self {
        Self { low: 0, used: [false].into() }
    }
}

impl Window {
    /// Uses an id, and those after it that a large request needs. Returns false if one of them was
    /// used before, or was not granted.
    pub fn take(&mut self, id: u64, charge: u16) -> bool {
        let start = id.checked_sub(self.low).and_then(|it| usize::try_from(it).ok());
        let Some(start) = start.filter(|it| *it < self.used.len()) else { return false };
        let end = start + usize::from(charge.max(1));
        if end > self.used.len() || self.used.range(start..end).any(|it| *it) {
            return false;
        }
        self.used.range_mut(start..end).for_each(|it| *it = true);
        while self.used.front() == Some(&true) {
            self.used.pop_front();
            self.low += 1;
        }
        true
    }

    /// Grants credits, up to the number that the client wants. There is always one that is not
    /// used.
    pub fn grant(&mut self, wanted: u16) -> u16 {
        let granted = usize::from(wanted.max(1)).min(MAX_CREDITS - self.used.len());
        self.used.resize(self.used.len() + granted, false);
        u16::try_from(granted).expect("the window has 8192 ids")
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn ids_are_used_once_in_any_order_and_only_if_granted() {
        let mut window = Window::default();
        assert!(!window.take(1, 1) && window.take(0, 0) && !window.take(0, 1));
        assert_eq!(window.grant(8), 8);
        assert!(window.take(3, 2) && window.take(1, 1));
        for (id, charge) in [(0, 1), (1, 1), (2, 2), (4, 1), (8, 2), (9, 1), (7, u16::MAX)] {
            assert!(!window.take(id, charge), "{id} {charge}");
        }
        assert!(!window.take(u64::MAX, 1) && !window.take(u64::MAX, u16::MAX));
        assert!(window.take(2, 1) && window.take(5, 4));
        assert!(!window.take(9, 1), "nothing is granted");
    }

    #[test]
    fn a_window_grows_only_as_its_lowest_id_is_used() {
        let mut window = Window::default();
        assert_eq!(window.grant(u16::MAX), 8191);
        assert_eq!(window.grant(1), 0);
        for id in 1..8192 {
            assert!(window.take(id, 1));
            assert_eq!(window.grant(1), 0, "{id}");
        }
        assert!(window.take(0, 1));
        assert_eq!(window.grant(0), 1);
        assert!(!window.take(8191, 1) && window.take(8192, 1));
    }
}
