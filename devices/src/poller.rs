//! A thread for what must answer within microseconds: it sleeps on its events, and looks itself for
//! a moment after it had something to do, where that pays.
//!
//! Waking a thread takes 5 to 50 us, more than a small read from a cached disk and as much as one
//! from a fast disk. So a poller that slept [`SHORT`] or less several times in a row stays awake
//! instead, with the driver's doorbell switched off: for [`AWAKE`], or for [`SHORT`] while the
//! driver waits for one request. The first time that nothing comes meanwhile ends it, so that an
//! idle device costs nothing, and looking in vain little.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// How long it looks for more.
pub(crate) const AWAKE: Duration = Duration::from_micros(32);
/// A sleep that it could have spent looking, waking included; and how long it looks for the end of
/// a request that the driver waits for.
const SHORT: Duration = Duration::from_micros(128);
/// So many short sleeps come before it looks.
const ENOUGH: u32 = 8;

/// What a poller does.
pub trait Serve: Send + 'static {
    /// Does what there is to do; false if there was nothing.
    fn serve(&mut self) -> bool;
    /// One request is in flight, and nothing else is to be done until it ends.
    fn awaits(&self) -> bool {
        false
    }
    /// Asks to be woken from now on. True when something came meanwhile.
    fn listen(&mut self) -> bool;
    /// Asks not to be woken: it will look itself.
    fn quiet(&mut self);
    /// What wakes it: readable when there is something to do. They stay what they are.
    fn events(&self) -> Vec<RawFd>;
    /// Empties those of its events that are counters.
    fn heard(&mut self);
}

/// A thread that serves. Dropping it without `stop` stops it too.
pub struct Poller<T> {
    stop: Arc<Stop>,
    thread: Option<JoinHandle<T>>,
}

struct Stop {
    event: EventFd,
    /// So that looking costs no system call.
    flag: AtomicBool,
}

impl<T: Serve> Poller<T> {
    /// Starts the thread, which first looks whether there is something to do.
    ///
    /// # Errors
    ///
    /// When the host has no thread or file descriptor left.
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

    /// Ends the thread after what it is doing.
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

/// Whether looking has paid so far, for one kind of wait.
#[derive(Default)]
struct Habit {
    /// Sleeps in a row that were short.
    short: u32,
}

impl Habit {
    fn pays(&self) -> bool {
        self.short >= ENOUGH
    }

    /// Something came so long after the wait began.
    fn learn(&mut self, waited: Duration) {
        self.short = if waited < SHORT { self.short.saturating_add(1) } else { 0 };
    }
}

fn run(value: &mut impl Serve, epoll: &Epoll, stop: &AtomicBool) {
    let [mut commands, mut ends] = [Habit::default(), Habit::default()];
    while !stop.load(Ordering::Acquire) {
        if value.serve() {
            continue;
        }
        let (habit, span) =
            if value.awaits() { (&mut ends, SHORT) } else { (&mut commands, AWAKE) };
        if habit.pays() {
            if look(value, stop, span) {
                continue;
            }
            *habit = Habit::default();
        }
        if !value.listen() {
            let start = Instant::now();
            // A signal makes it look again, which is no harm.
            epoll.wait(-1, &mut [EpollEvent::default()]).ok();
            habit.learn(start.elapsed());
            value.heard();
        }
        value.quiet();
    }
}

/// Looks for so long until there was something to do; false if there was not.
fn look(value: &mut impl Serve, stop: &AtomicBool, span: Duration) -> bool {
    let start = Instant::now();
    while start.elapsed() < span && !stop.load(Ordering::Acquire) {
        if value.serve() {
            return true;
        }
        if span > AWAKE {
            // Others that want this processor do not wait for us.
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

    /// Counts what it hears.
    struct Counter {
        bell: Arc<EventFd>,
        count: u64,
        looked: Arc<AtomicU64>,
        done: Arc<EventFd>,
    }

    impl Serve for Counter {
        fn serve(&mut self) -> bool {
            self.looked.fetch_add(1, Ordering::Relaxed);
            let rung = self.bell.read().unwrap_or(0);
            self.count += rung;
            if rung > 0 {
                self.done.write(rung).unwrap();
            }
            rung > 0
        }
        fn listen(&mut self) -> bool {
            false
        }
        fn quiet(&mut self) {}
        fn events(&self) -> Vec<RawFd> {
            vec![self.bell.as_raw_fd()]
        }
        fn heard(&mut self) {}
    }

    fn counter() -> (Poller<Counter>, [Arc<EventFd>; 2], Arc<AtomicU64>) {
        let [bell, done] = [EFD_NONBLOCK, 0].map(|it| Arc::new(EventFd::new(it).unwrap()));
        let looked = Arc::<AtomicU64>::default();
        let value =
            Counter { bell: bell.clone(), count: 0, looked: looked.clone(), done: done.clone() };
        (Poller::spawn("test", value).unwrap(), [bell, done], looked)
    }

    #[test]
    fn serves_each_ring_and_gives_the_value_back() {
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
    fn looking_pays_after_several_short_waits_in_a_row() {
        let mut habit = Habit::default();
        for wait in 1..ENOUGH {
            habit.learn(SHORT / 2);
            assert!(!habit.pays(), "after {wait}");
        }
        habit.learn(SHORT);
        (1..ENOUGH).for_each(|_| habit.learn(AWAKE));
        assert!(!habit.pays(), "a long wait was between");
        habit.learn(SHORT / 2);
        assert!(habit.pays());
    }

    #[test]
    fn an_idle_poller_does_not_look() {
        let (_poller, [bell, done], looked) = counter();
        let looks = [(); 10].map(|()| {
            let before = looked.load(Ordering::Relaxed);
            bell.write(1).unwrap();
            done.read().unwrap();
            thread::sleep(Duration::from_millis(20));
            looked.load(Ordering::Relaxed) - before
        });
        // Once for the ring, once before the sleep; a late start of a thread may add some.
        assert!(looks.iter().any(|it| *it < 10), "looked {looks:?} times");
    }
}
