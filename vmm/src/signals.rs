//! Signals that end the machine. The main thread receives them; long work before the guest runs can
//! poll for them.

use std::sync::atomic::{AtomicU8, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use anyhow::Context;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use rustix::io::Errno;
use vmm_sys_util::signal::{block_signal, register_signal_handler, unblock_signal};

static SIGNALS: OnceLock<OwnedFd> = OnceLock::new();
/// The exit status of the first signal that arrived.
static STATUS: AtomicU8 = AtomicU8::new(0);
/// The seconds that the guest gets to shut down.
static GRACE: AtomicU32 = AtomicU32::new(0);

extern "C" fn on_signal(signal: i32, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if let Some(event) = SIGNALS.get() {
        // A single write is allowed in a signal handler. Counts in an eventfd add up, so each
        // signal has a byte of its own.
        let number = 1_u64 << (8 * slot(signal));
        rustix::io::write(event, &number.to_ne_bytes()).ok();
    }
}

const END_SIGNALS: [i32; 3] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP];
/// The byte of the eventfd that stops the thread.
const STOP_SLOT: u32 = 7;

fn slot(signal: i32) -> u32 {
    (0..).zip(END_SIGNALS).find(|it| it.1 == signal).map_or(0, |it| it.0)
}

/// The exit status, if a signal has arrived. Long work polls this.
pub fn arrived() -> Option<u8> {
    Some(STATUS.load(Ordering::Relaxed)).filter(|status| *status != 0)
}

/// The thread that waits for signals.
pub struct Watch {
    event: &'static OwnedFd,
    thread: Option<JoinHandle<Body>>,
    body: Option<Body>,
}

/// Called by the thread for each signal. Returns false if the receiver is gone.
type Body = Box<dyn Fn(i32) -> bool + Send>;

/// Sets the time that the guest gets to shut down.
pub fn set_grace(seconds: u32) {
    GRACE.store(seconds, Ordering::Relaxed);
}

/// Passes each signal that ends the machine to `notify`, until `notify` returns false.
pub fn catch(notify: impl Fn(i32) -> bool + Send + 'static) -> anyhow::Result<Watch> {
    let event = eventfd(0, EventfdFlags::CLOEXEC).context("an event for signals")?;
    let event = SIGNALS.get_or_init(|| event);
    // Without SIGXFSZ, a file that reaches its size limit fails one request, not the process.
    block_signal(libc::SIGXFSZ).ok();
    // Only the waiting thread receives these signals. In other threads, they would interrupt system
    // calls such as KVM_CREATE_VM half way.
    for signal in END_SIGNALS {
        // The parent process may have blocked it already.
        block_signal(signal).ok();
        register_signal_handler(signal, on_signal).context("signal handlers")?;
    }
    let body: Body = Box::new(move |signal| {
        let order = Ordering::Relaxed;
        STATUS.compare_exchange(0, status(signal), order, order).ok();
        let received = notify(signal);
        if received {
            force_exit(signal);
        }
        received
    });
    let mut watch = Watch { event, thread: None, body: Some(body) };
    watch.start()?;
    Ok(watch)
}

impl Watch {
    /// Ends the thread. Signals stay pending until `start`. If one has arrived, returns the exit
    /// status.
    pub fn stop(&mut self) -> Option<u8> {
        if let Some(thread) = self.thread.take() {
            rustix::io::write(self.event, &(1_u64 << (8 * STOP_SLOT)).to_ne_bytes()).ok();
            self.body = Some(thread.join().expect("a panic ends the process"));
        }
        arrived()
    }

    pub fn start(&mut self) -> anyhow::Result<()> {
        let Some(body) = self.body.take() else { return Ok(()) };
        let event = self.event;
        let body = move || wait(event, body);
        let thread = Builder::new().name("signals".into()).spawn(body);
        self.thread = Some(thread.context("a thread for signals")?);
        Ok(())
    }
}

fn wait(event: &OwnedFd, notify: Body) -> Body {
    for signal in END_SIGNALS {
        unblock_signal(signal).ok();
    }
    let mut number = [0; 8];
    loop {
        match rustix::io::read(event, &mut number) {
            Ok(_) => {}
            Err(Errno::INTR) => continue,
            Err(_) => return notify,
        }
        let times = |slot: u32| u64::from_ne_bytes(number) >> (8 * slot) & 0xff;
        // All signals since the last read. A second one ends the machine at once.
        let mut signals =
            END_SIGNALS.iter().zip(0..).flat_map(|(it, slot)| (0..times(slot)).map(|_| *it));
        let received = signals.all(&notify);
        if times(STOP_SLOT) > 0 || !received {
            return notify;
        }
    }
}

/// The exit status after a signal, as in shells: 128 + signal.
fn status(signal: i32) -> u8 {
    u8::try_from(128 + signal).unwrap_or(u8::MAX)
}

/// Time for the machine to stop after the guest's grace period.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// Ends the process if stopping takes too long: a terminal or pipe without a reader may block it,
/// or a disk that does not answer. Data that the guest knows to be durable has reached the kernel
/// by then.
fn force_exit(signal: i32) {
    static WATCHING: Once = Once::new();
    WATCHING.call_once(|| {
        let body = move || {
            let grace = Duration::from_secs(GRACE.load(Ordering::Relaxed).into());
            std::thread::sleep(grace + STOP_TIMEOUT);
            host::stream::restore_terminal();
            exit(status(signal));
        };
        // Without a thread there is no watchdog; the machine can still stop by itself.
        Builder::new().name("watchdog".into()).spawn(body).ok();
    });
}

#[expect(clippy::exit, reason = "the main thread is blocked and cannot return from main")]
fn exit(status: u8) {
    std::process::exit(status.into());
}

#[cfg(test)]
mod test {
    use std::sync::mpsc;

    use super::*;

    #[test]
    fn all_pending_signals_are_reported() {
        let (sender, received) = mpsc::channel();
        let event = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        for (signal, times) in [(libc::SIGTERM, 1), (libc::SIGHUP, 2), (libc::SIGINT, 1)] {
            let number: u64 = times << (8 * slot(signal));
            rustix::io::write(&event, &number.to_ne_bytes()).unwrap();
        }
        rustix::io::write(&event, &(1_u64 << (8 * STOP_SLOT)).to_ne_bytes()).unwrap();
        drop(wait(&event, Box::new(move |signal| sender.send(signal).is_ok())));
        let received: Vec<i32> = received.iter().collect();
        assert_eq!(received, [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGHUP]);
    }
}
