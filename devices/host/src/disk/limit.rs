//! Limits of requests and bytes per second: two token buckets per disk, shared by all its queues.
//!
//! A bucket holds the tokens of a tenth of a second, so that an idle disk answers a short burst at
//! once. A request begins as soon as there is one token. If it costs more, it leaves a debt, and
//! later requests wait until that is paid.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::timer::Timer;
use super::{Below, Channel, Completion, Geometry, Image, LockedFile, Operation, Request};
use crate::memory::Memory;

/// Capacity of a bucket, in seconds of its rate.
const BURST: f64 = 0.1;

pub(super) struct Limited {
    inner: Arc<dyn Image>,
    buckets: Arc<Mutex<Buckets>>,
}

struct Bucket {
    /// Tokens per second.
    rate: f64,
    capacity: f64,
    /// Below zero after a request that is larger than the capacity.
    tokens: f64,
}

impl Bucket {
    #[expect(clippy::cast_precision_loss, reason = "2⁵³ bytes per second are no limit")]
    fn new(rate: u64) -> Self {
        let rate = rate as f64;
        let capacity = (rate * BURST).max(1.0);
        Self { rate, capacity, tokens: capacity }
    }

    fn fill(&mut self, seconds: f64) {
        self.tokens = (self.tokens + self.rate * seconds).min(self.capacity);
    }

    /// Seconds until a request may begin.
    fn wait(&self) -> f64 {
        // A request needs one token, whatever its cost. So every request begins at some time.
        ((1.0 - self.tokens) / self.rate).max(0.0)
    }
}

struct Buckets {
    requests: Option<Bucket>,
    bytes: Option<Bucket>,
    filled: Instant,
}

impl Buckets {
    /// Takes the tokens of a request. The error is the time to wait before the next attempt.
    #[expect(clippy::cast_precision_loss, reason = "no request has 2⁵³ bytes")]
    fn take(&mut self, request: &Request, now: Instant) -> Result<(), Duration> {
        let seconds = now.saturating_duration_since(self.filled).as_secs_f64();
        self.filled = self.filled.max(now);
        let mut wait = 0.0_f64;
        for bucket in [&mut self.requests, &mut self.bytes].into_iter().flatten() {
            bucket.fill(seconds);
            wait = wait.max(bucket.wait());
        }
        if wait > 0.0 {
            // Rounded up: a timer that fires a nanosecond early would find too few tokens.
            return Err(Duration::from_secs_f64(wait.min(3600.0)) + Duration::from_micros(1));
        }
        if let Some(requests) = &mut self.requests {
            requests.tokens -= 1.0;
        }
        let moves = matches!(request.operation, Operation::Read | Operation::Write { .. });
        if let (Some(bytes), true) = (&mut self.bytes, moves) {
            bytes.tokens -= request.length as f64;
        }
        Ok(())
    }
}

impl Limited {
    pub(super) fn new(inner: Arc<dyn Image>, iops: Option<u64>, bandwidth: Option<u64>) -> Self {
        let buckets = Buckets {
            requests: iops.map(Bucket::new),
            bytes: bandwidth.map(Bucket::new),
            filled: Instant::now(),
        };
        Self { inner, buckets: Arc::new(Mutex::new(buckets)) }
    }
}

impl Image for Limited {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn keeps_writes(&self) -> bool {
        self.inner.keeps_writes()
    }

    fn complete(&self) -> std::io::Result<()> {
        self.inner.complete()
    }

    fn file(&self) -> Option<LockedFile> {
        self.inner.file()
    }

    fn below(&self) -> std::io::Result<Below> {
        self.inner.below()
    }

    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let inner = self.inner.channel(memory)?;
        let timer = Timer::with_event(inner.event())?;
        let (buckets, queue) = (self.buckets.clone(), VecDeque::new());
        Ok(Box::new(Queue { inner, timer, buckets, queue, due: None }))
    }

    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.inner.grow(size)
    }
}

struct Queue {
    inner: Box<dyn Channel>,
    timer: Timer,
    buckets: Arc<Mutex<Buckets>>,
    queue: VecDeque<Request>,
    /// The time at which the first of them may begin.
    due: Option<Instant>,
}

impl Queue {
    /// Passes on the requests that the limits allow now. Returns whether there was one.
    fn pass(&mut self) -> bool {
        let now = Instant::now();
        if self.due.is_some_and(|due| due > now) {
            return false;
        }
        let mut passed = false;
        let mut buckets = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
        let mut wait = None;
        while let Some(request) = self.queue.pop_front() {
            if let Err(after) = buckets.take(&request, now) {
                self.queue.push_front(request);
                wait = Some(after);
                break;
            }
            self.inner.push(request);
            passed = true;
        }
        drop(buckets);
        if wait.is_some() || self.due.is_some() {
            self.timer.set(wait);
        }
        self.due = wait.map(|after| now + after);
        passed
    }
}

impl Channel for Queue {
    fn push(&mut self, request: Request) {
        self.queue.push_back(request);
    }

    fn submit(&mut self) {
        self.pass();
        self.inner.submit();
    }

    fn reap(&mut self, done: &mut Vec<Completion>) {
        if self.pass() {
            self.inner.submit();
        }
        self.inner.reap(done);
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.timer.event()
    }

    fn withdraw(&mut self) -> Vec<Request> {
        // Queued requests have taken no tokens. Those of the inner channel have, and take them
        // again when they are pushed again.
        let mut withdrawn = self.inner.withdraw();
        withdrawn.extend(self.queue.drain(..));
        self.due = None;
        self.timer.set(None);
        withdrawn
    }
}

#[cfg(test)]
mod test {
    use super::super::driver::{Driver, piece};
    use super::super::memory;
    use super::*;
    use crate::testutil::call_in_time;

    fn image(iops: Option<u64>, bandwidth: Option<u64>) -> Arc<dyn Image> {
        Arc::new(Limited::new(memory(8 << 20), iops, bandwidth))
    }

    fn took(driver: &mut Driver, count: usize, length: usize) -> f64 {
        let start = Instant::now();
        for _ in 0..count {
            driver.push(Operation::Read, 0, length as u64, &[piece(0, length)]);
        }
        driver.channel.submit();
        assert!(driver.wait(count).iter().all(|it| it.result == Ok(())));
        start.elapsed().as_secs_f64()
    }

    #[test]
    fn limits_requests_per_second_after_a_burst() {
        call_in_time(Duration::from_secs(1), "80 requests", || {
            // The burst is 20 requests; the others take 5 ms each.
            let took = took(&mut Driver::new(&image(Some(200), None)), 80, 512);
            assert!(took >= 0.29, "{took}");
        });
    }

    #[test]
    fn limits_bandwidth_even_for_requests_larger_than_the_bucket() {
        call_in_time(Duration::from_millis(800), "2 MiB", || {
            // The bucket holds 0.4 MiB. The first request leaves a debt, the second waits for it.
            let took = took(&mut Driver::new(&image(None, Some(4 << 20))), 2, 1 << 20);
            assert!(took >= 0.14, "{took}");
        });
    }

    #[test]
    fn two_queues_share_the_limit() {
        let image = image(Some(200), None);
        let (mut one, mut two) = (Driver::new(&image), Driver::new(&image));
        let start = Instant::now();
        std::thread::scope(|scope| {
            scope.spawn(|| took(&mut one, 40, 512));
            scope.spawn(|| took(&mut two, 40, 512));
        });
        assert!(start.elapsed().as_secs_f64() >= 0.29, "{:?}", start.elapsed());
    }

    #[test]
    fn sleeps_while_throttled_and_returns_pending_requests() {
        // The first request leaves a debt of 16 s.
        let mut driver = Driver::new(&image(None, Some(64 << 10)));
        for _ in 0..3 {
            driver.push(Operation::Read, 0, 1 << 20, &[piece(0, 1 << 20)]);
        }
        driver.channel.submit();
        assert_eq!(driver.wait(1).len(), 1);
        let event = driver.channel.event();
        let mut fds = [rustix::event::PollFd::new(&event, rustix::event::PollFlags::IN)];
        let soon = rustix::event::Timespec { tv_sec: 0, tv_nsec: 30_000_000 };
        assert_eq!(rustix::event::poll(&mut fds, Some(&soon)), Ok(0));
        let tags: Vec<u64> = driver.channel.withdraw().iter().map(|it| it.tag).collect();
        assert_eq!(tags, [2, 3]);
    }

    #[test]
    fn withdrawn_requests_are_not_completed_later() {
        let mut driver = Driver::new(&image(Some(10), None));
        for _ in 0..3 {
            driver.push(Operation::Flush, 0, 0, &[]);
        }
        driver.channel.submit();
        let tags: Vec<u64> = driver.channel.withdraw().iter().map(|it| it.tag).collect();
        assert!(tags.ends_with(&[2, 3]), "{tags:?}");
        let mut done = Vec::new();
        std::thread::sleep(Duration::from_millis(250));
        driver.channel.reap(&mut done);
        assert!(done.iter().all(|it| !tags.contains(&it.tag)), "{tags:?} and {done:?}");
    }
}
