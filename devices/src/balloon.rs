//! The operator's interface to the memory balloon: the target size, and the guest's statistics.
//!
//! The device registers with the hub when it is built. The control socket uses the hub.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context, ensure};

use host::size::Size;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requested size of the guest's memory in bytes.
    pub target: u64,
    /// Current size of the guest's memory in bytes, as the guest reports it.
    pub actual: u64,
    /// The guest's last memory statistics: names and values.
    pub statistics: Vec<(&'static str, u64)>,
    /// Age of the statistics. `None` if the guest never sent any.
    pub age: Option<Duration>,
}

pub trait Balloon: Send + Sync {
    /// Sets the size of the guest's memory in bytes. Values above the machine's memory mean all of
    /// it.
    fn set(&self, bytes: u64);
    /// Returns the current state. May wait up to `wait` for new statistics from the guest.
    fn report(&self, wait: Duration) -> Report;
}

/// Gives access to the balloon of a machine, if it has one.
#[derive(Default)]
pub struct Hub {
    /// Weak, so that the hub does not keep the device alive.
    balloon: Mutex<Option<Weak<dyn Balloon>>>,
}

impl Hub {
    /// Fails if the machine already has a balloon.
    pub(crate) fn register(&self, balloon: &Arc<impl Balloon + 'static>) -> anyhow::Result<()> {
        let mut slot = self.lock();
        let taken = slot.as_ref().is_some_and(|it| it.strong_count() > 0);
        ensure!(!taken, "this machine already has a balloon: add only one virtio-balloon");
        let balloon: Weak<dyn Balloon> = Arc::downgrade(balloon) as Weak<dyn Balloon>;
        *slot = Some(balloon);
        Ok(())
    }

    /// Sets the size of the guest's memory in bytes. Returns false if there is no balloon.
    pub fn set(&self, bytes: u64) -> bool {
        self.find().map(|it| it.set(bytes)).is_some()
    }

    /// `memory` is the machine's memory, the maximum.
    pub fn resize(&self, size: Size, memory: Size) -> anyhow::Result<()> {
        ensure!(size <= memory, "{size} is more than the machine's memory, which is {memory}");
        ensure!(self.set(size.0), "{NONE}");
        Ok(())
    }

    /// See [`Balloon::report`].
    pub fn report(&self, wait: Duration) -> anyhow::Result<Report> {
        Ok(self.find().context(NONE)?.report(wait))
    }

    fn find(&self) -> Option<Arc<dyn Balloon>> {
        self.lock().as_ref().and_then(Weak::upgrade)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Weak<dyn Balloon>>> {
        self.balloon.lock().expect("no device panicked")
    }
}

const NONE: &str = "this machine has no balloon: add --device virtio-balloon when it is started";

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Balloon")
    }
}

#[cfg(test)]
mod test {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;

    #[derive(Default)]
    struct Rubber(AtomicU64);

    impl Balloon for Rubber {
        fn set(&self, bytes: u64) {
            self.0.store(bytes, Ordering::Relaxed);
        }
        fn report(&self, _: Duration) -> Report {
            Report { target: self.0.load(Ordering::Relaxed), ..Report::default() }
        }
    }

    #[test]
    fn a_balloon_is_registered_until_it_is_dropped() {
        let (hub, rubber) = (Hub::default(), Arc::<Rubber>::default());
        let memory = Size(4 << 20);
        assert!(!hub.set(1));
        assert!(hub.resize(Size(1), memory).unwrap_err().to_string().contains("no balloon"));
        hub.register(&rubber).unwrap();
        assert!(hub.register(&Arc::<Rubber>::default()).is_err(), "a second one");
        hub.resize(Size(1 << 20), memory).unwrap();
        assert_eq!(hub.report(Duration::ZERO).unwrap().target, 1 << 20);
        let error = hub.resize(Size(5 << 20), memory).unwrap_err().to_string();
        assert!(error.contains("5M") && error.contains("4M"), "{error}");
        drop(rubber);
        assert!(hub.report(Duration::ZERO).is_err());
        hub.register(&Arc::<Rubber>::default()).unwrap();
    }
}
