//! The signals that mean "end": they reach the one who decides, and whoever works long before the
//! guest runs.

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Once, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

static SIGNALS: OnceLock<OwnedFd> = OnceLock::new();
/// The status of the first one that arrived.
static STATUS: AtomicU8 = AtomicU8::new(0);

extern "C" fn on_signal(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if let Some(event) = SIGNALS.get() {
        // One write of a number: what a signal handler may do. Signals of one moment add up, so
        // each has a byte of its own.
        let number = 1_u64 << (8 * slot(signal));
        rustix::io::write(event, &number.to_ne_bytes()).ok();
    }
}

const ENDING: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
/// The byte of the event that means: end the thread.
const REST: u32 = 7;

fn slot(signal: i32) -> u32 {
    (0..).zip(ENDING).find(|it| it.1 == signal).map_or(0, |it| it.0)
}

/// The status to end with, if a signal has arrived: who works long looks now and then.
pub fn arrived() -> Option<u8> {
    Some(STATUS.load(Ordering::Relaxed)).filter(|status| *status != 0)
}

/// The thread that waits for signals.
pub struct Watch {
    event: &'static OwnedFd,
    thread: Option<JoinHandle<Body>>,
    body: Option<Body>,
}

/// What the thread does with a signal; false when nobody listens any more.
type Body = Box<dyn Fn(i32) -> bool + Send>;

/// Tells each signal that means "end", until nobody listens any more.
///
/// # Errors
///
/// When the host has no thread or file descriptor left.
pub fn catch(
    tell: impl Fn(i32) -> bool + Send + 'static,
    grace: Duration,
) -> anyhow::Result<Watch> {
    let event = eventfd(0, EventfdFlags::CLOEXEC).context("an event for signals")?;
    let event = SIGNALS.get_or_init(|| event);
    // A file that may not grow is an error of one request, not the end.
    block_signal(libc::SIGXFSZ).ok();
    // They come to the one thread that waits for them: elsewhere they would interrupt system calls
    // half way, KVM_CREATE_VM among them.
    for signal in ENDING {
        // Whoever started us may have blocked it already.
        block_signal(signal).ok();
        register_signal_handler(signal, on_signal).context("signal handlers")?;
    }
    let body: Body = Box::new(move |signal| {
        let order = Ordering::Relaxed;
        STATUS.compare_exchange(0, status(signal), order, order).ok();
        let heard = tell(signal);
        if heard {
            end_at_last(signal, grace);
        }
        heard
    });
    let mut watch = Watch { event, thread: None, body: Some(body) };
    watch.go_on()?;
    Ok(watch)
}

impl Watch {
    /// Ends the thread: a signal waits until there is one again. If one has arrived, the status to
    /// end with.
    ///
    /// # Panics
    ///
    /// When the thread panicked, which ends the process anyway.
    pub fn rest(&mut self) -> Option<u8> {
        if let Some(thread) = self.thread.take() {
            rustix::io::write(self.event, &(1_u64 << (8 * REST)).to_ne_bytes()).ok();
            self.body = Some(thread.join().expect("a panic ends the process"));
        }
        arrived()
    }

    /// Waits for signals, from here on.
    ///
    /// # Errors
    ///
    /// When the host has no thread left.
    pub fn go_on(&mut self) -> anyhow::Result<()> {
        let Some(body) = self.body.take() else { return Ok(()) };
        let event = self.event;
        let body = move || wait(event, body);
        let thread = Builder::new().name("signals".into()).spawn(body);
        self.thread = Some(thread.context("a thread for signals")?);
        Ok(())
    }
}

fn wait(event: &OwnedFd, tell: Body) -> Body {
    for signal in ENDING {
        unblock_signal(signal).ok();
    }
    let mut number = [0; 8];
    loop {
        match rustix::io::read(event, &mut number) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return tell,
        }
        let times = |slot: u32| u64::from_ne_bytes(number) >> (8 * slot) & 0xff;
        // All that came since the last look: the second of them means more than the first.
        let mut came = ENDING.iter().zip(0..).flat_map(|(it, slot)| (0..times(slot)).map(|_| *it));
        let heard = came.all(&tell);
        if times(REST) > 0 || !heard {
            return tell;
        }
    }
}

/// As a shell says it.
fn status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// How long stopping may take, once the guest's time is over.
const AT_LAST: Duration = Duration::from_secs(10);

/// Ends the process whatever holds it up: a terminal or a pipe that nobody reads, a disk that does
/// not answer. What the guest was told is durable is with the kernel by then.
fn end_at_last(signal: i32, grace: Duration) {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        let body = move || {
            std::thread::sleep(grace + AT_LAST);
            host::stream::restore_terminal();
            leave(status(signal));
        };
        // Without a thread there is nobody to watch; the orderly way is still there.
        Builder::new().name("watchdog".into()).spawn(body).ok();
    });
}

#[expect(clippy::exit, reason = "the one that should return from main does not come back")]
fn leave(status: u8) {
    std::process::exit(status.into());
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn all_signals_of_one_moment_are_told() {
        let (told, heard) = mpsc::channel();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (signal, times) in [(libc::SIGTERM, 1), (libc::SIGHUP, 2), (libc::SIGINT, 1)] {
            let number: u64 = times << (8 * slot(signal));
            rustix::io::write(&event, &number.to_ne_bytes()).unwrap();
        }
        rustix::io::write(&event, &(1_u64 << (8 * REST)).to_ne_bytes()).unwrap();
        drop(wait(&event, Box::new(move |signal| told.send(signal).is_ok())));
        let heard: Vec<i32> = heard.iter().collect();
        assert_eq!(heard, [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGHUP]);
    }
}
