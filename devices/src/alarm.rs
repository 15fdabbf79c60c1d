//! A timer thread whose deadline can be changed at any time. An unset alarm costs no processor
//! time.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use anyhow::Context;

/// A timer with its own thread. Dropping it waits until a running callback returns.
pub struct Alarm {
    shared: Arc<(Mutex<State>, Condvar)>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct State {
    due: Option<Instant>,
    gone: bool,
}

impl Alarm {
    /// Starts an alarm that calls `ring` once for each `set`, at the due time. The value that
    /// `ring` returns is the next due time. `ring` must not wait for the thread that drops the
    /// alarm.
    pub fn spawn(
        name: &str,
        mut ring: impl FnMut() -> Option<Instant> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let shared = Arc::new((Mutex::new(State::default()), Condvar::new()));
        let ours = shared.clone();
        let body = move || {
            while wait(&ours) {
                let next = ring();
                let mut state = ours.0.lock().expect("no alarm panicked");
                // A time that was set during the callback is newer than the callback's result.
                state.due = state.due.or(next);
            }
        };
        let thread = Builder::new().name(name.to_owned()).spawn(body).context("a timer thread")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Replaces the due time. `None` unsets the alarm.
    pub fn set(&self, due: Option<Instant>) {
        let (state, changed) = &*self.shared;
        state.lock().expect("no alarm panicked").due = due;
        changed.notify_one();
    }
}

/// Sleeps until the alarm is due. Returns false if the alarm was dropped.
fn wait((state, changed): &(Mutex<State>, Condvar)) -> bool {
    let mut state = state.lock().expect("no alarm panicked");
    loop {
        if state.gone {
            return false;
        }
        let Some(due) = state.due else {
            state = changed.wait(state).expect("no alarm panicked");
            continue;
        };
        let left = due.saturating_duration_since(Instant::now());
        if left.is_zero() {
            state.due = None;
            return true;
        }
        state = changed.wait_timeout(state, left).expect("no alarm panicked").0;
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        let (state, changed) = &*self.shared;
        state.lock().expect("no alarm panicked").gone = true;
        changed.notify_one();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("a panic ends the process");
        }
    }
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    #[test]
    fn fires_once_when_due_and_not_after_it_was_cancelled() {
        let (rang, ring) = mpsc::channel();
        let alarm = Alarm::spawn("test", move || {
            rang.send(()).unwrap();
            None
        })
        .unwrap();
        alarm.set(Some(Instant::now() + Duration::from_secs(3600)));
        alarm.set(None);
        assert!(ring.recv_timeout(Duration::from_millis(20)).is_err());
        alarm.set(Some(Instant::now()));
        ring.recv().unwrap();
        assert!(ring.recv_timeout(Duration::from_millis(20)).is_err());
    }
}
