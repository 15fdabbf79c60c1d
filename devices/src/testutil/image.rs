//! A disk that tests hold, let go, and make fail.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};

use host::disk::{Channel, Completion, Fault, Geometry, Image, Operation, Request};
use host::memory::Memory;

/// A disk that records its requests and can delay them.
pub struct Double {
    below: Arc<dyn Image>,
    state: Arc<DoubleState>,
}

impl Double {
    pub fn over(below: Arc<dyn Image>) -> (Arc<dyn Image>, Arc<DoubleState>) {
        let state = Arc::new(DoubleState {
            mode: AtomicU8::new(GO),
            seen: Mutex::default(),
            event: eventfd(0, EventfdFlags::NONBLOCK).unwrap(),
            fails: AtomicBool::new(false),
        });
        (Arc::new(Self { below, state: state.clone() }), state)
    }
}

pub struct DoubleState {
    /// `GO`, `HOLD` (in flight for a long time) or `WAIT` (not started, for lack of space).
    mode: AtomicU8,
    pub seen: Mutex<Vec<Operation>>,
    event: OwnedFd,
    pub fails: AtomicBool,
}

pub const GO: u8 = 0;
pub const HOLD: u8 = 1;
pub const WAIT: u8 = 2;

impl DoubleState {
    pub fn set(&self, mode: u8) {
        self.mode.store(mode, Ordering::SeqCst);
        rustix::io::write(&self.event, &1_u64.to_ne_bytes()).unwrap();
    }

    pub fn seen(&self) -> Vec<Operation> {
        std::mem::take(&mut *self.seen.lock().unwrap())
    }
}

struct DoubleChannel {
    below: Box<dyn Channel>,
    state: Arc<DoubleState>,
    pending: Vec<Request>,
    failed: Vec<Request>,
}

impl Image for Double {
    fn geometry(&self) -> Geometry {
        self.below.geometry()
    }
    fn channel(&self, memory: &Memory) -> anyhow::Result<Box<dyn Channel>> {
        let (below, state) = (self.below.channel(memory)?, self.state.clone());
        Ok(Box::new(DoubleChannel { below, state, pending: Vec::new(), failed: Vec::new() }))
    }
    fn grow(&self, size: Option<u64>) -> anyhow::Result<()> {
        self.below.grow(size)
    }
}

/// Requests in flight are carried out, as with every channel. Those that wait for space are not.
impl Drop for DoubleChannel {
    fn drop(&mut self) {
        let start = Instant::now();
        while self.state.mode.load(Ordering::SeqCst) == HOLD && !self.pending.is_empty() {
            if start.elapsed() > PATIENCE {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        self.submit();
    }
}

/// The maximum time that a dropped channel waits for the test.
const PATIENCE: Duration = Duration::from_secs(20);

impl Channel for DoubleChannel {
    fn push(&mut self, request: Request) {
        self.state.seen.lock().unwrap().push(request.operation);
        self.pending.push(request);
    }
    fn submit(&mut self) {
        if self.state.mode.load(Ordering::SeqCst) == GO {
            if self.state.fails.load(Ordering::SeqCst) {
                self.failed.append(&mut self.pending);
                return;
            }
            for request in self.pending.drain(..) {
                self.below.push(request);
            }
            self.below.submit();
        }
    }
    fn reap(&mut self, done: &mut Vec<Completion>) {
        self.submit();
        self.below.reap(done);
        done.extend(self.failed.drain(..).map(|it| Completion {
            tag: it.tag,
            result: Err(Fault::Broken),
            pieces: it.pieces,
        }));
    }
    fn event(&self) -> BorrowedFd<'_> {
        self.state.event.as_fd()
    }
    fn withdraw(&mut self) -> Vec<Request> {
        if self.state.mode.load(Ordering::SeqCst) == WAIT {
            return std::mem::take(&mut self.pending);
        }
        Vec::new()
    }
}
