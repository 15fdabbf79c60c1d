//! Keys that go down and up, in the order that they do, until the guest asks.
//!
//! What is pressed while the buffer is full is lost whole; what was passed on as pressed is always
//! let go.

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

/// Keys that go down while as many events wait are lost.
pub(super) const BUFFER: usize = 64;

/// Keys by their usages.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(bound(deserialize = "U: Ord + Deserialize<'de>"))]
pub(super) struct Presses<U> {
    /// What is to be told, in the order that it happened: usages, and whether they went down.
    events: VecDeque<(U, bool)>,
    /// Keys that are down, when all that was told.
    held: BTreeSet<U>,
    /// Keys that are down by what was told, in the order that they went down.
    down: Vec<U>,
}

impl<U> Default for Presses<U> {
    fn default() -> Self {
        Self { events: VecDeque::new(), held: BTreeSet::new(), down: Vec::new() }
    }
}

impl<U: Copy + Ord> Presses<U> {
    /// A key goes down (again: keyboards repeat) or up.
    pub(super) fn press(&mut self, usage: U, down: bool) {
        if !down {
            // Each was pressed before, so this is bounded.
            if self.held.remove(&usage) {
                self.events.push_back((usage, false));
            }
        } else if self.events.len() < BUFFER && self.held.insert(usage) {
            self.events.push_back((usage, true));
        }
    }

    /// Tells the next event: which key it was.
    pub(super) fn tell(&mut self) -> Option<U> {
        let (usage, down) = self.events.pop_front()?;
        self.down.retain(|other| *other != usage);
        if down {
            self.down.push(usage);
        }
        Some(usage)
    }

    /// Keys that are down by what was told, in the order that they went down.
    pub(super) fn down(&self) -> &[U] {
        &self.down
    }

    /// Whether all is told.
    pub(super) fn is_idle(&self) -> bool {
        self.events.is_empty()
    }
}
