//! A gate in front of the host's files. While it is closed, writes of a restored machine's devices
//! wait: until its memory is known to be sound, and until the guest may go on.

use std::sync::{Condvar, Mutex, MutexGuard};

/// Open by default. An open gate stays open.
#[derive(Default)]
pub struct Gate {
    state: Mutex<State>,
    changed: Condvar,
}

/// The reasons why it is closed.
#[derive(Default)]
struct State {
    /// The process may yet fail to start.
    starting: bool,
    unchecked: bool,
    paused: bool,
    /// For ever.
    shut: bool,
    /// The guest waits for it.
    urgent: bool,
    first: Option<First>,
}

/// Work that is done before the first write.
type First = Box<dyn FnOnce() + Send>;

impl State {
    fn is_open(&self) -> bool {
        !self.starting && !self.unchecked && !self.paused && !self.shut
    }
}

impl Gate {
    /// That of a restored machine: closed until it has `started`. `unchecked`: closed until
    /// `checked`. `paused`: closed until `resumed`.
    pub fn new(unchecked: bool, paused: bool) -> Self {
        let state = Mutex::new(State { starting: true, unchecked, paused, ..State::default() });
        Self { state, ..Self::default() }
    }

    pub fn is_open(&self) -> bool {
        self.state().is_open()
    }

    /// Whether it is closed, and may open.
    pub fn is_closed(&self) -> bool {
        let state = self.state();
        !state.is_open() && !state.shut
    }

    /// Nothing that could fail is left but the check. `first` is done before the first write.
    pub fn started(&self, first: impl FnOnce() + Send + 'static) {
        self.change(|state| {
            state.starting = false;
            state.first = Some(Box::new(first));
        });
    }

    /// Whether memory was not checked yet, or is damaged.
    pub fn is_unchecked(&self) -> bool {
        self.state().unchecked
    }

    pub fn is_paused(&self) -> bool {
        self.state().paused
    }

    /// The guest cannot go on until its memory is checked.
    pub fn hurry(&self) {
        let mut state = self.state();
        state.urgent |= state.unchecked;
    }

    /// The guest goes on.
    pub fn settled(&self) {
        self.state().urgent = false;
    }

    pub fn is_urgent(&self) -> bool {
        self.state().urgent
    }

    /// The guest's memory is sound.
    pub fn checked(&self) {
        self.change(|state| state.unchecked = false);
    }

    /// The guest may go on.
    pub fn resumed(&self) {
        self.change(|state| state.paused = false);
    }

    /// Closes the gate for ever, unless it is open: no write that waits is ever done.
    pub fn shut(&self) {
        self.change(|state| state.shut |= !state.is_open());
    }

    fn change(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state();
        change(&mut state);
        // With the lock: nobody may see an open gate before.
        if state.is_open()
            && let Some(first) = state.first.take()
        {
            first();
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Waits while the gate is closed. Returns whether it is open now.
    pub fn pass(&self) -> bool {
        let closed = |state: &mut State| !state.is_open() && !state.shut;
        let waited = self.changed.wait_while(self.state(), closed);
        waited.expect(NO_PANIC).is_open()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect(NO_PANIC)
    }
}

const NO_PANIC: &str = "nothing panics with this lock";

#[cfg(test)]
mod test {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;

    use super::*;

    #[test]
    fn it_opens_when_all_reasons_are_gone_and_never_after_it_was_shut() {
        for (unchecked, paused) in [(true, true), (true, false), (false, true), (false, false)] {
            for opens in [true, false] {
                let gate = Arc::new(Gate::new(unchecked, paused));
                assert_eq!((gate.is_closed(), gate.is_unchecked()), (true, unchecked));
                let (other, done) = (gate.clone(), Arc::new(AtomicBool::new(false)));
                let first = done.clone();
                let waiting = thread::spawn(move || other.pass());
                if !opens {
                    gate.shut();
                }
                assert!(!gate.is_open());
                gate.started(move || assert!(!first.swap(true, Ordering::Relaxed)));
                assert_eq!(done.load(Ordering::Relaxed), gate.is_open());
                gate.checked();
                assert_eq!(gate.is_open(), opens && !paused);
                gate.resumed();
                gate.shut();
                assert_eq!(waiting.join().unwrap(), opens);
                assert_eq!(done.load(Ordering::Relaxed), opens);
                assert_eq!([gate.is_open(), gate.is_closed(), gate.pass()], [opens, false, opens]);
            }
        }
        assert!(Gate::default().pass());
        // A device that is late does not let the guest wait for ever.
        let gate = Gate::new(true, false);
        gate.started(|| ());
        gate.hurry();
        assert!(gate.is_urgent());
        gate.checked();
        gate.settled();
        gate.hurry();
        assert!(!gate.is_urgent());
    }
}
