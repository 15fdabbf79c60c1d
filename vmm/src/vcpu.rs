//! Runs processors on their threads: run, pause, reset. Knows no ports and no devices.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::Context;
use devices::bus::Spaces;

use crate::hyperv::Own;
use crate::kvm::Runner;
use crate::kvm::vcpu::{Exit, Vcpu};
use crate::msr::Registers;

/// The reason for which a processor stopped by itself.
#[derive(Debug)]
pub enum Stop {
    /// A triple fault: the guest requests a reset, or crashed.
    TripleFault,
    /// KVM's system event: its type and its data.
    System(u32, Vec<u64>),
    /// KVM cannot run the guest: a message with registers.
    Broken(String),
}

/// Called on the processor's thread. It must not block.
pub type OnStop = Arc<dyn Fn(Stop) + Send + Sync>;

/// All processors of a machine. They begin paused, without threads.
pub struct Processors {
    shared: Arc<Shared>,
    cpus: Vec<Arc<Mutex<Vcpu>>>,
    runners: Vec<Arc<Runner>>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    /// Checked before each entry into the guest, so that pausing needs no lock there.
    stop_requested: AtomicBool,
    state: Mutex<State>,
    changed: Condvar,
    spaces: Arc<Spaces>,
    registers: Registers,
    on_stop: OnStop,
}

struct State {
    order: Order,
    /// The number of calls to `resume`. A processor that stopped by itself waits for the next.
    round: u64,
    parked: usize,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Order {
    Run,
    Pause,
    Quit,
}

impl Processors {
    pub fn new(
        vcpus: Vec<Vcpu>,
        spaces: Arc<Spaces>,
        registers: Registers,
        on_stop: OnStop,
    ) -> Self {
        let state = State { order: Order::Pause, round: 0, parked: 0 };
        let shared = Arc::new(Shared {
            stop_requested: AtomicBool::new(true),
            state: Mutex::new(state),
            changed: Condvar::new(),
            spaces,
            registers,
            on_stop,
        });
        let runners = vcpus.iter().map(|vcpu| vcpu.runner().clone()).collect();
        let cpus = vcpus.into_iter().map(|vcpu| Arc::new(Mutex::new(vcpu))).collect();
        Self { shared, cpus, runners, threads: Vec::new() }
    }

    /// Starts a thread for each processor, paused.
    pub fn start(&mut self) -> anyhow::Result<()> {
        for (index, cpu) in self.cpus.iter().enumerate() {
            let (shared, cpu) = (self.shared.clone(), cpu.clone());
            let body = move || shared.work(&cpu);
            let thread = Builder::new().name(format!("cpu{index}")).spawn(body);
            self.threads.push(thread.context("a processor's thread")?);
        }
        Ok(())
    }

    /// Stops all processors between two instructions. Returns when they have stopped.
    pub fn pause(&self) {
        self.order(Order::Pause);
        self.wait_until_parked(None);
    }

    /// Like `pause`, but waits only for this time. Returns whether all have stopped.
    pub fn pause_within(&self, time: Duration) -> bool {
        self.order(Order::Pause);
        self.wait_until_parked(Some(Instant::now() + time))
    }

    pub fn resume(&self) {
        let mut state = self.shared.lock();
        state.order = Order::Run;
        state.round += 1;
        self.shared.stop_requested.store(false, Ordering::Release);
        self.shared.changed.notify_all();
    }

    /// The processors must be paused.
    pub fn each(&self) -> impl Iterator<Item = MutexGuard<'_, Vcpu>> {
        self.cpus.iter().map(|cpu| cpu.lock().expect("a panic ends the process"))
    }

    /// The part of Hyper-V's interface that is not KVM's, if the guest has that.
    pub fn hyperv(&self) -> Option<&Own> {
        self.shared.registers.hyperv.as_ref()
    }

    /// Returns the registers that all processors share to their power-on state.
    pub fn reset_registers(&self) {
        if let Some(hyperv) = &self.shared.registers.hyperv {
            hyperv.reset();
        }
    }

    fn order(&self, order: Order) {
        self.shared.stop_requested.store(true, Ordering::Release);
        self.shared.lock().order = order;
        self.shared.changed.notify_all();
        self.runners.iter().for_each(|it| it.kick());
    }

    /// Kicks again from time to time. A processor may wait for the host's side of a device (a
    /// terminal without a reader) and have missed the signal that interrupts it.
    fn wait_until_parked(&self, end: Option<Instant>) -> bool {
        let mut state = self.shared.lock();
        while state.parked < self.threads.len() {
            if end.is_some_and(|end| end <= Instant::now()) {
                return false;
            }
            let waited = self.shared.changed.wait_timeout(state, KICK_INTERVAL);
            let (now, late) = waited.expect("a panic ends the process");
            state = now;
            if late.timed_out() && self.shared.stop_requested.load(Ordering::Acquire) {
                self.runners.iter().for_each(|it| it.kick());
            }
        }
        true
    }
}

/// Time for a processor to stop before it is kicked again.
const KICK_INTERVAL: Duration = Duration::from_millis(5);

impl Drop for Processors {
    fn drop(&mut self) {
        self.pause();
        self.order(Order::Quit);
        for thread in self.threads.drain(..) {
            thread.join().expect("a panic ends the process");
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("a panic ends the process")
    }

    fn work(&self, cpu: &Mutex<Vcpu>) {
        let mut round = 0;
        while let Some(next) = self.park(round) {
            round = next;
            let mut vcpu = cpu.lock().expect("a panic ends the process");
            let kickable = vcpu.kickable();
            let stop = self.run(&mut vcpu);
            vcpu.settle(&self.spaces, &self.registers);
            drop(kickable);
            drop(vcpu);
            if let Some(stop) = stop {
                (self.on_stop)(stop);
            } else {
                // Paused, not stopped by itself: continue in the same round when all resume.
                round = round.saturating_sub(1);
            }
        }
    }

    /// Waits for the order to run in a later round than `done`. Returns `None` at the end.
    fn park(&self, done: u64) -> Option<u64> {
        let mut state = self.lock();
        state.parked += 1;
        self.changed.notify_all();
        let waits = |state: &mut State| match state.order {
            Order::Pause => true,
            Order::Run => state.round <= done,
            Order::Quit => false,
        };
        state = self.changed.wait_while(state, waits).expect("a panic ends the process");
        state.parked -= 1;
        (state.order == Order::Run).then_some(state.round)
    }

    fn run(&self, vcpu: &mut Vcpu) -> Option<Stop> {
        while !self.stop_requested.load(Ordering::Acquire) {
            match vcpu.step(&self.spaces, &self.registers) {
                Exit::Done | Exit::Interrupted => {}
                Exit::Shutdown => return Some(Stop::TripleFault),
                Exit::System(kind, data) => return Some(Stop::System(kind, data)),
                Exit::Broken(report) => return Some(Stop::Broken(report)),
            }
        }
        None
    }
}
