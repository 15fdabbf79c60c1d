//! Windows' own drivers at our devices. Most of them are closed, so each is a model: a small driver
//! that performs the register accesses and commands of Windows' driver, in its order and with its
//! limits of time.
//!
//! Each step of a model names its source. The sources are the specifications, Microsoft's
//! documentation and published drivers, and the traces that maintainers of other machines have
//! published. A step without a source is marked as a conjecture: a device must bear it, but it is
//! no evidence that Windows does it.

mod display;
mod pci;
mod storahci;
mod stornvme;
mod tpm;
mod viogpudo;

use std::time::{Duration, Instant};

use devices::testutil::Bench;

/// Generous, because the test machine may be busy. The limits of Windows are in the models.
const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until `done` returns a value.
fn eventually<T>(event: &str, mut done: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = done() {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "{event} never came");
        std::thread::yield_now();
    }
}

/// The vectors of the messages that devices have sent.
fn messages(bench: &Bench) -> Vec<u32> {
    bench.hypervisor.sent.lock().unwrap().iter().map(|message| message.data).collect()
}
