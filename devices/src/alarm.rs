//! A thread that sleeps until a moment that can be changed. Unset, it costs nothing.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

use anyhow::Context;

/// An alarm clock. Dropping it waits for a ring that is under way.
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
    /// An alarm that calls `ring` each time it is due, once per `set`. `ring` may set it again
    /// through what it returns. It must not wait for the thread that drops the alarm.
    ///
    /// # Errors
    ///
    /// When the host has no thread left.
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
                // What was set while it rang is newer than what the ring asks for.
                state.due = state.due.or(next);
            }
        };
        let thread = Builder::new().name(name.to_owned()).spawn(body).context("a timer thread")?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Rings at `due` instead of when it was set before, or not at all.
    pub fn set(&self, due: Option<Instant>) {
        let (state, changed) = &*self.shared;
        state.lock().expect("no alarm panicked").due = due;
        changed.notify_one();
    }
}

/// Sleeps until the alarm is due; false when it is gone.
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
    fn rings_once_when_it_is_due_and_not_when_it_was_unset() {
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
