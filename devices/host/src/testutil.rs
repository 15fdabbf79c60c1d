//! Shared by the tests of this crate and of others.

pub mod agent;
pub mod noise;
pub mod swtpm;
pub mod tap;

use std::fmt::Display;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use tracing::span::{Attributes, Id, Record};
use tracing::{Level, Metadata, Subscriber};

/// Counts the log lines of level INFO and above that this thread writes while `deed` runs.
pub fn count_log_lines(deed: impl FnOnce()) -> usize {
    let count = Arc::new(Lines::default());
    tracing::subscriber::with_default(count.clone(), deed);
    count.0.load(Ordering::Relaxed)
}

#[derive(Default)]
struct Lines(AtomicUsize);

impl Subscriber for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() <= Level::INFO
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// Calls `run`, which returns how long it took, up to three times until it takes less than `limit`.
/// On a busy host it is late now and then; code that blocks is late each time. Panics when all
/// three calls were late.
pub fn in_time<T>(
    limit: Duration,
    what: impl Display,
    mut run: impl FnMut() -> (Duration, T),
) -> T {
    let mut times = Vec::new();
    while times.len() < 3 {
        let (took, value) = run();
        if took < limit {
            return value;
        }
        times.push(took);
    }
    panic!("{what} took {times:?}, not less than {limit:?}");
}

/// As [`in_time`], but measures the whole call of `run`.
pub fn call_in_time<T>(limit: Duration, what: impl Display, mut run: impl FnMut() -> T) -> T {
    in_time(limit, what, || {
        let start = Instant::now();
        let value = run();
        (start.elapsed(), value)
    })
}
