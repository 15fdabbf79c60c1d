//! The queue of a keyboard: presses and releases of keys, in order, until the guest reads them.
//!
//! The queue is bounded, and never loses half of a keystroke: a press that finds the queue full is
//! dropped together with its release, and a queued press is always followed by its release. Senders
//! that can wait do so while [`Presses::has_room`] is false, so that nothing is dropped.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

/// Senders that can wait do so at this number of events: several thousand characters with their
/// modifiers.
const ROOM: usize = 16 << 10;
/// Presses are dropped at this number of events. The room above `ROOM` is for senders that cannot
/// wait.
pub(crate) const LIMIT: usize = ROOM + (4 << 10);

/// A queue of keys, identified by their usages.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "U: Ord + Deserialize<'de>"))]
pub(crate) struct Presses<U> {
    /// Events that the guest has not read: the usage, and true for a press.
    events: VecDeque<(U, bool)>,
    /// Keys that are down after the last queued event.
    held: BTreeSet<U>,
    /// Keys that are down after the events read so far, in the order of their presses.
    pub(crate) down: Vec<U>,
}

impl<U> Default for Presses<U> {
    fn default() -> Self {
        Self { events: VecDeque::new(), held: BTreeSet::new(), down: Vec::new() }
    }
}

impl<U: Copy + Ord> Presses<U> {
    /// Queues a press or a release. Pressing a key that is already down has no effect.
    pub(crate) fn press(&mut self, usage: U, down: bool) {
        if !down {
            // Each release follows a press, so the queue stays bounded.
            if self.held.remove(&usage) {
                self.events.push_back((usage, false));
            }
        } else if self.events.len() < LIMIT && self.held.insert(usage) {
            self.events.push_back((usage, true));
        }
    }

    /// Repeats a key that is down, unless the guest has unread events: a user who sees the text
    /// late holds the key for too long.
    pub(crate) fn repeat(&mut self, usage: U) {
        if self.events.is_empty() && self.held.contains(&usage) {
            self.events.push_back((usage, true));
        }
    }

    pub(crate) fn next(&mut self) -> Option<(U, bool)> {
        let (usage, down) = self.events.pop_front()?;
        self.down.retain(|other| *other != usage);
        if down {
            self.down.push(usage);
        }
        if self.events.is_empty() {
            // Free the memory of a long text.
            self.events.shrink_to(64);
        }
        Some((usage, down))
    }

    /// Whether this key is down after the last queued event.
    pub(crate) fn is_held(&self, usage: U) -> bool {
        self.held.contains(&usage)
    }

    /// Whether the guest has read all events.
    pub(crate) fn is_idle(&self) -> bool {
        self.events.is_empty()
    }

    /// Whether a sender that can wait may send.
    pub(crate) fn has_room(&self) -> bool {
        self.events.len() < ROOM
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_full_queue_drops_whole_keys_and_releases_all_others() {
        let mut presses = Presses::default();
        for usage in (0..1_000_000).map(|it: u32| it % 251) {
            presses.press(usage, true);
            assert!(presses.has_room() || presses.events.len() >= ROOM);
            if usage % 3 != 0 {
                presses.press(usage, false);
            }
        }
        (0..251).for_each(|usage| presses.press(usage, false));
        assert!(!presses.has_room());
        let max = LIMIT + 251;
        assert!((LIMIT..=max).contains(&presses.events.len()), "{}", presses.events.len());
        let (mut downs, mut ups) = (0, 0);
        while let Some((_, down)) = presses.next() {
            *(if down { &mut downs } else { &mut ups }) += 1;
        }
        assert_eq!((downs, &presses.down[..]), (ups, &[][..]), "every key is released");
        assert!(presses.is_idle() && presses.has_room());
    }

    #[test]
    fn a_key_repeats_only_if_the_guest_keeps_up() {
        let mut presses = Presses::default();
        presses.repeat(1);
        assert_eq!(presses.next(), None, "it is not down");
        presses.press(1, true);
        presses.repeat(1);
        assert_eq!([presses.next(), presses.next()], [Some((1, true)), None]);
        presses.repeat(1);
        presses.repeat(1);
        assert_eq!([presses.next(), presses.next()], [Some((1, true)), None]);
        presses.press(1, false);
        assert_eq!((presses.next(), &presses.down[..]), (Some((1, false)), &[][..]));
    }
}
