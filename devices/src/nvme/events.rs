//! Asynchronous events, and the guest's requests for them (NVMe 1.4, 5.2).
//!
//! Threats: a guest may send any number of requests. At most 4 are stored, and each event is queued
//! once.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};

use super::command::Status;

/// Log pages that events refer to.
pub(super) const ERROR: u8 = 0x01;
pub(super) const HEALTH: u8 = 0x02;
pub(super) const CHANGED: u8 = 0x04;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Event {
    /// Event type: 0 to 2.
    kind: u8,
    information: u8,
    page: u8,
}

impl Event {
    pub(super) const INVALID_REGISTER: Self = Self { kind: 0, information: 0, page: ERROR };
    pub(super) const INVALID_VALUE: Self = Self { kind: 0, information: 1, page: ERROR };
    pub(super) const TEMPERATURE: Self = Self { kind: 1, information: 1, page: HEALTH };
    pub(super) const NAMESPACE: Self = Self { kind: 2, information: 0, page: CHANGED };

    /// Dword 0 of the completion.
    pub(super) fn result(self) -> u32 {
        u32::from_le_bytes([self.kind, self.information, self.page, 0])
    }
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Events {
    requests: VecDeque<u16>,
    waiting: VecDeque<Event>,
    /// Bit mask of event types that are suspended until their log page is read.
    masked: u8,
}

/// Maximum number of pending requests (AERL + 1).
pub(super) const MAX_REQUESTS: usize = 4;

impl Events {
    pub(super) fn request(&mut self, id: u16) -> Result<(), Status> {
        if self.requests.len() >= MAX_REQUESTS {
            return Err(Status::EVENT_LIMIT);
        }
        self.requests.push_back(id);
        Ok(())
    }

    /// Returns whether the request was pending.
    pub(super) fn abort(&mut self, id: u16) -> bool {
        let at = self.requests.iter().position(|it| *it == id);
        at.is_some_and(|at| self.requests.remove(at).is_some())
    }

    pub(super) fn raise(&mut self, event: Event) {
        if !self.waiting.contains(&event) {
            self.waiting.push_back(event);
        }
    }

    /// The guest read this log page: its event type is enabled again.
    pub(super) fn unmask(&mut self, page: u8) {
        match page {
            ERROR => self.masked &= !(1 << 0),
            HEALTH => self.masked &= !(1 << 1),
            CHANGED => self.masked &= !(1 << 2),
            _ => {}
        }
    }

    /// Takes an event and the request that it answers.
    pub(super) fn next(&mut self) -> Option<(u16, Event)> {
        let at = self.waiting.iter().position(|it| self.masked >> it.kind & 1 == 0)?;
        let request = self.requests.pop_front()?;
        let event = self.waiting.remove(at)?;
        self.masked |= 1 << event.kind;
        Some((request, event))
    }

    pub(super) fn is_valid(&self) -> bool {
        let known = |event: &Event| event.kind < 3;
        self.requests.len() <= MAX_REQUESTS
            && self.waiting.len() <= 8
            && self.waiting.iter().all(known)
    }
}
