//! Limits the number of tasks and descriptors that the guest and outside hosts may use at the same
//! time.
//!
//! A slot (a permit) is acquired before a task starts or a descriptor is opened, and released when
//! the task has ended. A task keeps its slot while it ends. Without a free slot, a frame is
//! dropped, as on any busy network.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Slots of each kind. Each stands for at most one task and one descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// TCP connections of the guest to outside hosts.
    pub connections: usize,
    /// TCP connections of outside hosts to forwarded ports.
    pub incoming: usize,
    /// UDP flows of the guest.
    pub datagrams: usize,
    /// Pings of the guest.
    pub echoes: usize,
    /// DNS questions by UDP that wait for an answer.
    pub questions: usize,
    /// TCP connections of the guest to the gateway's name server.
    pub names: usize,
}

impl Limits {
    /// The limits for a process that may open `files` descriptors. All kinds together use at most
    /// half of them. The other half is for the web port, probes and the machine.
    pub fn of(files: usize) -> Self {
        let share = |parts: usize, max: usize| (files / 32 * parts).clamp(2, max);
        Self {
            connections: share(6, 2048),
            incoming: share(4, 1024),
            datagrams: share(2, 1024),
            echoes: share(1, 128),
            questions: share(2, 256),
            names: share(1, 32),
        }
    }

    pub fn sum(&self) -> usize {
        let Self { connections, incoming, datagrams, echoes, questions, names } = self;
        connections + incoming + datagrams + echoes + questions + names
    }
}

/// Dropping it releases the slot.
pub type Slot = OwnedSemaphorePermit;

#[derive(Clone, Debug)]
pub struct Slots {
    free: Arc<Semaphore>,
    spare: usize,
}

impl Slots {
    pub fn new(limit: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(limit)), spare: (limit / 8).max(1) }
    }

    pub fn take(&self) -> Option<Slot> {
        self.free.clone().try_acquire_owned().ok()
    }

    pub async fn wait(&self) -> Slot {
        self.free.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    /// Whether fewer than an eighth of the slots are free. Then an old task must end for each new
    /// one, so that some slots stay free while old tasks end.
    pub fn are_scarce(&self) -> bool {
        self.free.available_permits() < self.spare
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn half_of_the_descriptors_are_reserved_for_the_pod() {
        for files in [64, 256, 1000, 1024, 4096, 1 << 20, usize::MAX] {
            let limits = Limits::of(files);
            assert!(limits.sum() <= files / 2, "{files}: {limits:?}");
        }
        assert_eq!(Limits::of(1 << 20), Limits::of(usize::MAX));
        assert_eq!(Limits::of(1024).connections, 192);
    }

    #[test]
    fn slots_become_scarce_before_they_run_out() {
        let slots = Slots::new(2);
        let first = slots.take();
        assert!(first.is_some() && !slots.are_scarce());
        let second = slots.take();
        assert!(second.is_some() && slots.are_scarce() && slots.take().is_none());
        drop(first);
        assert!(slots.take().is_some());
    }
}
