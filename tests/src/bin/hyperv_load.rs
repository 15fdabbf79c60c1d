//! Keeps all processors of a Linux guest busy with what Hyper-V accelerates: `hyperv_load SECONDS`.
//!
//! On each processor, one thread unmaps memory (the other processors flush their TLBs), two wake
//! each other from different processors (interrupts between them), and one sleeps (timers). The
//! output has the counts.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{available_parallelism, scope, sleep};
use std::time::{Duration, Instant};

use anyhow::Context;
use rustix::thread::{CpuSet, sched_setaffinity};

/// More than the largest allocation that the C library serves from its heap: it is mapped and
/// unmapped.
const MAPPING: usize = 33 << 20;
const NAP: Duration = Duration::from_millis(2);

#[derive(Default)]
struct Counts {
    done: AtomicBool,
    unmapped: AtomicU64,
    woken: AtomicU64,
    slept: AtomicU64,
    /// The latest end of a sleep, in milliseconds after its time.
    late: AtomicU64,
}

fn main() -> anyhow::Result<()> {
    let seconds = std::env::args().nth(1).context("usage: hyperv_load SECONDS")?.parse()?;
    let processors = available_parallelism()?.get();
    let counts = Counts::default();
    scope(|threads| {
        for cpu in 0..processors {
            let (ping, pinged) = channel();
            let (pong, ponged) = channel();
            let counts = &counts;
            threads.spawn(move || counts.unmap(cpu));
            threads.spawn(move || counts.nap(cpu));
            threads.spawn(move || counts.wake(cpu, &ping, &ponged));
            threads.spawn(move || answer((cpu + 1) % processors, &pong, &pinged));
        }
        sleep(Duration::from_secs(seconds));
        counts.done.store(true, Ordering::Relaxed);
    });
    let [unmapped, woken, slept, late] =
        [&counts.unmapped, &counts.woken, &counts.slept, &counts.late].map(value);
    transom_tests::say!("unmapped {unmapped} woken {woken} slept {slept} late {late}");
    Ok(())
}

fn value(counter: &AtomicU64) -> u64 {
    counter.load(Ordering::Relaxed)
}

/// Moves this thread to a processor.
fn stay_on(cpu: usize) {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).expect("the processor exists");
}

impl Counts {
    fn goes_on(&self) -> bool {
        !self.done.load(Ordering::Relaxed)
    }

    fn unmap(&self, cpu: usize) {
        stay_on(cpu);
        while self.goes_on() {
            let mut memory = vec![0_u8; MAPPING];
            memory.iter_mut().step_by(1 << 20).for_each(|byte| *byte = 1);
            drop(std::hint::black_box(memory));
            self.unmapped.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn nap(&self, cpu: usize) {
        stay_on(cpu);
        while self.goes_on() {
            let start = Instant::now();
            sleep(NAP);
            let late = start.elapsed().saturating_sub(NAP).as_millis();
            self.late.fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
            self.slept.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn wake(&self, cpu: usize, ping: &Sender<()>, ponged: &Receiver<()>) {
        stay_on(cpu);
        while self.goes_on() && ping.send(()).is_ok() && ponged.recv().is_ok() {
            self.woken.fetch_add(1, Ordering::Relaxed);
        }
    }
}

fn answer(cpu: usize, pong: &Sender<()>, pinged: &Receiver<()>) {
    stay_on(cpu);
    while pinged.recv().is_ok() && pong.send(()).is_ok() {}
}
