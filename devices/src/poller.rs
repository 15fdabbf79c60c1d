//! A thread for work that must start within microseconds. It sleeps on its events, and polls for a
//! moment after each piece of work if that is likely to pay off.
//!
//! Waking a thread takes 5 to 50 us, longer than a small read from a cached disk and as long as one
//! from a fast disk. After several sleeps in a row that were shorter than [`SHORT_WAIT`], the
//! thread therefore polls instead, with the driver's doorbell switched off: for [`POLL_TIME`], or
//! for [`SHORT_WAIT`] while the driver waits for one request. It stops polling the first time that
//! nothing arrives. An idle device thus costs nothing, and polling in vain costs little.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The time to poll for new requests.
pub(crate) const POLL_TIME: Duration = Duration::from_micros(32);
/// Sleeps shorter than this, including the wake-up, could have been spent polling. Also the time to
/// poll for the end of a request that the driver waits for.
const SHORT_WAIT: Duration = Duration::from_micros(128);
/// The number of short sleeps in a row before the thread polls.
const MIN_SHORT_WAITS: u32 = 8;

pub trait Serve: Send + 'static {
    /// Does all pending work. Returns false if there was none.
    fn serve(&mut self) -> bool;
    /// Whether exactly one request is in flight, and there is no work until it ends.
    fn has_single_request(&self) -> bool {
        false
    }
    /// Enables wake-ups. Returns true if work arrived in the meantime.
    fn enable_doorbells(&mut self) -> bool;
    /// Disables wake-ups while the thread polls.
    fn disable_doorbells(&mut self);
    /// The file descriptors that become readable when there is work. They must not change later.
    fn events(&self) -> Vec<RawFd>;
    /// Resets those events that are counters.
    fn clear_events(&mut self);
}

/// A polling thread. Dropping it stops the thread, like `stop`.
pub struct Poller<T> {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<T>>,
}

struct Stop {
    event: EventFd,
    /// A copy of the event's state, so that polling needs no system call.
    flag: AtomicBool,
}

impl<T: Serve> Poller<T> {
    /// Starts the thread, which first does all pending work.
    pub fn spawn(name: &str, mut value: T) -> anyhow::Result<Self> {
        let event = EventFd::new(EFD_NONBLOCK).context("an event for a poller")?;
        let epoll = Epoll::new().context("an epoll for a poller")?;
        for fd in value.events().into_iter().chain([event.as_raw_fd()]) {
            let readable = EpollEvent::new(EventSet::IN, 0);
            epoll.ctl(ControlOperation::Add, fd, readable).context("an event for a poller")?;
        }
        let stop = Arc::new(Stop { event, flag: AtomicBool::new(false) });
        let stop_too = stop.clone();
        let body = move || {
            run(&mut value, &epoll, &stop_too.flag);
            value
        };
        let thread = Builder::new().name(name.to_owned()).spawn(body).context("a poller")?;
        Ok(Self { stop, thread: Some(thread) })
    }

    /// Ends the thread after its current work, and returns the value.
    pub fn stop(mut self) -> T {
        self.join().expect("a poller is stopped once")
    }
}

impl<T> Poller<T> {
    fn join(&mut self) -> Option<T> {
        let thread = self.thread.take()?;
        self.stop.flag.store(true, Ordering::Release);
        self.stop.event.write(1).expect("an eventfd takes a 1");
        Some(thread.join().expect("a panic ends the process"))
    }
}

impl<T> Drop for Poller<T> {
    fn drop(&mut self) {
        self.join();
    }
}

/// Predicts whether polling pays off, for one kind of wait.
#[derive(Default)]
struct Habit {
    /// The number of short sleeps in a row.
    short: u32,
}

impl Habit {
    fn should_poll(&self) -> bool {
        self.short >= MIN_SHORT_WAITS
    }

    fn learn(&mut self, waited: Duration) {
        self.short = if waited < SHORT_WAIT { self.short.saturating_add(1) } else { 0 };
    }
}

fn run(value: &mut impl Serve, epoll: &Epoll, stop: &AtomicBool) {
    let [mut commands, mut ends] = [Habit::default(), Habit::default()];
    while !stop.load(Ordering::Acquire) {
        if value.serve() {
            continue;
        }
        let (habit, span) = if value.has_single_request() {
            (&mut ends, SHORT_WAIT)
        } else {
            (&mut commands, POLL_TIME)
        };
        if habit.should_poll() {
            if poll(value, stop, span) {
                continue;
            }
            *habit = Habit::default();
        }
        if !value.enable_doorbells() {
            let start = Instant::now();
            // A signal wakes the thread too, which is harmless.
            epoll.wait(-1, &mut [EpollEvent::default()]).ok();
            habit.learn(start.elapsed());
            value.clear_events();
        }
        value.disable_doorbells();
    }
}

/// Polls until there was work, for at most `span`. Returns false if there was none.
fn poll(value: &mut impl Serve, stop: &AtomicBool, span: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < span && !stop.load(Ordering::Acquire) {
        if value.serve() {
            return true;
        }
        if span > POLL_TIME {
            // Let other threads use this processor.
            thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
    false
}

#[cfg(test)]
mod test {
    use std::sync::atomic::AtomicU64;

    use super::*;

    /// Counts the rings of its bell.
    struct Counter {
        bell: Arc<EventFd>,
        count: u64,
        polls: Arc<AtomicU64>,
        done: Arc<EventFd>,
    }

    impl Serve for Counter {
        fn serve(&mut self) -> bool {
            self.polls.fetch_add(1, Ordering::Relaxed);
            let rung = self.bell.read().unwrap_or(0);
            self.count += rung;
            if rung > 0 {
                self.done.write(rung).unwrap();
            }
            rung > 0
        }
        fn enable_doorbells(&mut self) -> bool {
            false
        }
        fn disable_doorbells(&mut self) {}
        fn events(&self) -> Vec<RawFd> {
            vec![self.bell.as_raw_fd()]
        }
        fn clear_events(&mut self) {}
    }

    fn counter() -> (Poller<Counter>, [Arc<EventFd>; 2], Arc<AtomicU64>) {
        let [bell, done] = [EFD_NONBLOCK, 0].map(|it| Arc::new(EventFd::new(it).unwrap()));
        let polls = Arc::<AtomicU64>::default();
        let value =
            Counter { bell: bell.clone(), count: 0, polls: polls.clone(), done: done.clone() };
        (Poller::spawn("test", value).unwrap(), [bell, done], polls)
    }

    #[test]
    fn serves_each_ring_and_returns_the_value() {
        let (poller, [bell, done], _) = counter();
        let mut seen = 0;
        for ring in 1..=1000 {
            bell.write(1).unwrap();
            while seen < ring {
                seen += done.read().unwrap();
            }
        }
        assert_eq!(poller.stop().count, 1000);
    }

    #[test]
    fn polling_starts_after_several_short_waits() {
        let mut habit = Habit::default();
        for wait in 1..MIN_SHORT_WAITS {
            habit.learn(SHORT_WAIT / 2);
            assert!(!habit.should_poll(), "after {wait}");
        }
        habit.learn(SHORT_WAIT);
        (1..MIN_SHORT_WAITS).for_each(|_| habit.learn(POLL_TIME));
        assert!(!habit.should_poll(), "a long wait was between");
        habit.learn(SHORT_WAIT / 2);
        assert!(habit.should_poll());
    }

    #[test]
    fn an_idle_poller_does_not_poll() {
        let (_poller, [bell, done], polls) = counter();
        let looks = [(); 10].map(|()| {
            let before = polls.load(Ordering::Relaxed);
            bell.write(1).unwrap();
            done.read().unwrap();
            thread::sleep(Duration::from_millis(20));
            polls.load(Ordering::Relaxed) - before
        });
        // One for the ring and one before the sleep. A late start of a thread may add some.
        assert!(looks.iter().any(|it| *it < 10), "polled {looks:?} times");
    }
}
