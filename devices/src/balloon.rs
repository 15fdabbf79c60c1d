//! The balloon as the operator sees it: how much memory the guest shall have, and what it says.
//!
//! The device registers when it is built; the control socket asks and sets through the hub.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use anyhow::{Context, ensure};

use host::size::Size;

/// What is known of a balloon.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Bytes that the guest shall have.
    pub target: u64,
    /// Bytes that it has, by its own account.
    pub actual: u64,
    /// What it last told of its memory: names and numbers.
    pub statistics: Vec<(&'static str, u64)>,
    /// How long ago that was, if ever.
    pub age: Option<Duration>,
}

/// A balloon, seen from the host's side.
pub trait Balloon: Send + Sync {
    /// Bytes that the guest shall have from now on. What is more than it could ever have is all.
    fn set(&self, bytes: u64);
    /// What is known of it. It may wait that long for the guest to say how it is.
    fn report(&self, wait: Duration) -> Report;
}

/// The balloon of one machine, if it has one.
#[derive(Default)]
pub struct Hub {
    /// It ends with its device.
    balloon: Mutex<Option<Weak<dyn Balloon>>>,
}

impl Hub {
    /// Adds the balloon.
    ///
    /// # Errors
    ///
    /// When there is one: two would be asked for the same memory.
    pub(crate) fn register(&self, balloon: &Arc<impl Balloon + 'static>) -> anyhow::Result<()> {
        let mut place = self.place();
        let taken = place.as_ref().is_some_and(|it| it.strong_count() > 0);
        ensure!(!taken, "this machine has a balloon already, and needs no other");
        let balloon: Weak<dyn Balloon> = Arc::downgrade(balloon) as Weak<dyn Balloon>;
        *place = Some(balloon);
        Ok(())
    }

    /// Says how much the guest shall have; false when nobody listens.
    pub fn set(&self, bytes: u64) -> bool {
        self.find().map(|it| it.set(bytes)).is_some()
    }

    /// Says how much the guest shall have, if that can be.
    ///
    /// # Errors
    ///
    /// When there is no balloon, or not as much memory.
    pub fn ask_for(&self, size: Size, memory: Size) -> anyhow::Result<()> {
        ensure!(size <= memory, "{size} is more than the machine's memory, which is {memory}");
        ensure!(self.set(size.0), "{NONE}");
        Ok(())
    }

    /// What is known of the balloon.
    ///
    /// # Errors
    ///
    /// When there is none.
    pub fn report(&self, wait: Duration) -> anyhow::Result<Report> {
        Ok(self.find().context(NONE)?.report(wait))
    }

    fn find(&self) -> Option<Arc<dyn Balloon>> {
        self.place().as_ref().and_then(Weak::upgrade)
    }

    fn place(&self) -> std::sync::MutexGuard<'_, Option<Weak<dyn Balloon>>> {
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
    fn one_balloon_is_heard_until_it_is_gone() {
        let (hub, rubber) = (Hub::default(), Arc::<Rubber>::default());
        let memory = Size(4 << 20);
        assert!(!hub.set(1));
        assert!(hub.ask_for(Size(1), memory).unwrap_err().to_string().contains("no balloon"));
        hub.register(&rubber).unwrap();
        assert!(hub.register(&Arc::<Rubber>::default()).is_err(), "a second one");
        hub.ask_for(Size(1 << 20), memory).unwrap();
        assert_eq!(hub.report(Duration::ZERO).unwrap().target, 1 << 20);
        let error = hub.ask_for(Size(5 << 20), memory).unwrap_err().to_string();
        assert!(error.contains("5M") && error.contains("4M"), "{error}");
        drop(rubber);
        assert!(hub.report(Duration::ZERO).is_err());
        hub.register(&Arc::<Rubber>::default()).unwrap();
    }
}
