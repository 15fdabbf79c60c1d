//! A worker thread that owns a value, and returns it when it stops.

use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::thread::{Builder, JoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::Context;
use event_manager::{EventManager, EventOps, EventSet, Events, MutEventSubscriber, SubscriberOps};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The interval for checking whether a thread has ended.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);

/// A worker thread. Dropping it stops the thread, like `stop`.
pub struct Worker<T> {
    stop: EventFd,
    thread: Option<JoinHandle<T>>,
}

impl<T: Send + 'static> Worker<T> {
    /// Starts a thread that calls `step(value, n)` whenever the `n`th bell rings.
    pub fn spawn(
        name: &str,
        value: T,
        bells: Vec<Arc<EventFd>>,
        step: impl FnMut(&mut T, usize) + Send + 'static,
    ) -> anyhow::Result<Self> {
        let stop = EventFd::new(EFD_NONBLOCK).context("an event for a worker")?;
        let stop_too = stop.try_clone().context("an event for a worker")?;
        let mut manager = EventManager::new().context("an epoll for a worker")?;
        let round = Round { value, bells, stop: stop_too, stopped: false, step };
        let body = move || {
            let id = manager.add_subscriber(round);
            loop {
                // This fails only if the epoll is broken, and only this file uses it.
                manager.run().expect("epoll works");
                let round = manager.subscriber_mut(id).expect("it was added above");
                if round.stopped {
                    break manager.remove_subscriber(id).expect("it was added above").value;
                }
            }
        };
        let thread = Builder::new().name(name.to_owned()).spawn(body).context("a worker thread")?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread after its current step, and returns the value. If the step takes longer than
    /// `time`, the thread is detached with the value and ends later.
    pub fn stop_within(mut self, time: Duration) -> Option<T> {
        self.stop.write(1).expect("an eventfd takes a 1");
        let end = Instant::now() + time;
        while self.thread.as_ref().is_some_and(|it| !it.is_finished()) {
            if Instant::now() >= end {
                self.thread = None;
            }
            sleep(CHECK_INTERVAL);
        }
        self.join()
    }

    /// Ends the thread after its current step, and returns the value.
    pub fn stop(mut self) -> T {
        self.join().expect("a worker is stopped once")
    }
}

impl<T> Worker<T> {
    fn join(&mut self) -> Option<T> {
        let thread = self.thread.take()?;
        self.stop.write(1).expect("an eventfd takes a 1");
        Some(thread.join().expect("a panic ends the process"))
    }
}

impl<T> Drop for Worker<T> {
    fn drop(&mut self) {
        self.join();
    }
}

struct Round<T, F> {
    value: T,
    bells: Vec<Arc<EventFd>>,
    stop: EventFd,
    stopped: bool,
    step: F,
}

impl<T, F: FnMut(&mut T, usize)> MutEventSubscriber for Round<T, F> {
    fn init(&mut self, ops: &mut EventOps) {
        let stop = Events::with_data(&self.stop, u32::MAX, EventSet::IN);
        ops.add(stop).expect("a new epoll takes an eventfd");
        for (number, bell) in (0..).zip(&self.bells) {
            let bell = Events::with_data(bell.as_ref(), number, EventSet::IN);
            ops.add(bell).expect("a new epoll takes an eventfd");
        }
    }

    fn process(&mut self, events: Events, _: &mut EventOps) {
        if events.fd() == self.stop.as_raw_fd() {
            self.stopped = true;
        } else if !self.stopped {
            let number = events.data() as usize;
            // The bell is empty if another step has already drained it.
            self.bells[number].read().ok();
            (self.step)(&mut self.value, number);
        }
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn returns_its_value_after_pending_wakeups() {
        let bell = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let done = Arc::new(EventFd::new(0).unwrap());
        let said = done.clone();
        let worker = Worker::spawn("test", 0, vec![bell.clone()], move |count: &mut u32, _| {
            *count += 1;
            said.write(1).unwrap();
        })
        .unwrap();
        for _ in 0..3 {
            bell.write(1).unwrap();
            done.read().unwrap();
        }
        assert_eq!(worker.stop(), 3);
    }

    #[test]
    fn a_worker_stuck_in_a_step_is_abandoned() {
        let bell = Arc::new(EventFd::new(EFD_NONBLOCK).unwrap());
        let (go, [begun, gone]) = (Arc::new(EventFd::new(0).unwrap()), events());
        let (hold, said, value) = (go.clone(), begun.clone(), DropSignal(gone.clone()));
        let worker =
            Worker::spawn("test", value, vec![bell.clone()], move |_: &mut DropSignal, _| {
                said.write(1).unwrap();
                hold.read().unwrap();
            })
            .unwrap();
        bell.write(1).unwrap();
        begun.read().unwrap();
        assert!(worker.stop_within(Duration::from_millis(20)).is_none());
        go.write(1).unwrap();
        gone.read().unwrap();
        let quick = Worker::spawn("test", 7, vec![bell], |_: &mut u8, _| {}).unwrap();
        assert_eq!(quick.stop_within(Duration::from_secs(60)), Some(7));
    }

    fn events() -> [Arc<EventFd>; 2] {
        [(); 2].map(|()| Arc::new(EventFd::new(0).unwrap()))
    }

    /// Raises an event when it is dropped.
    struct DropSignal(Arc<EventFd>);

    impl Drop for DropSignal {
        fn drop(&mut self) {
            self.0.write(1).unwrap();
        }
    }
}
