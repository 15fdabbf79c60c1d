//! A stand-in for vhost-net on hosts without it: a kernel that refuses calls, raises events and
//! moves ring positions at random, from a seed, and moves no packets.

use std::fs::File;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{Context, ensure};
use host::ram::GuestMemoryMmap;
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use host::net::vhost::{Kernel, Ring, Vhost};
use host::testutil::noise::Noise;

/// One of this number of calls is refused on average.
const REFUSAL_PERIOD: u64 = 8;

struct RandomKernel {
    ram: Arc<GuestMemoryMmap>,
    state: Mutex<State>,
}

struct State {
    noise: Noise,
    rings: [Option<KnownRing>; 2],
}

/// A ring that was passed to the kernel.
struct KnownRing {
    device: u64,
    next: u16,
    events: [EventFd; 2],
}

impl RandomKernel {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic")
    }
}

impl State {
    fn agree(&mut self) -> anyhow::Result<()> {
        ensure!(self.noise.below(REFUSAL_PERIOD) > 0, "refused at random");
        Ok(())
    }
}

impl Kernel for RandomKernel {
    fn set_features(&self, _: u64) -> anyhow::Result<()> {
        self.state().agree()
    }

    fn set_ring(
        &self,
        number: usize,
        ring: &Ring<'_>,
        events: [&EventFd; 2],
    ) -> anyhow::Result<()> {
        let mut state = self.state();
        let [call, error] = events;
        let events = [call.try_clone()?, error.try_clone()?];
        state.rings[number] = Some(KnownRing { device: ring.device, next: ring.next, events });
        state.agree()
    }

    fn set_tap(&self, number: usize, tap: Option<&File>) -> anyhow::Result<()> {
        let mut state = self.state();
        state.agree()?;
        let (far, errs, calls) = (
            state.noise.below(400),
            state.noise.below(REFUSAL_PERIOD) == 0,
            state.noise.below(2) == 0,
        );
        let Some(ring) = state.rings[number].as_mut().filter(|_| tap.is_some()) else {
            return Ok(());
        };
        // As if the kernel had used some buffers, or the guest had overwritten the position.
        ring.next = ring.next.wrapping_add(u16::try_from(far)?);
        self.ram.write_obj(ring.next, GuestAddress(ring.device.saturating_add(2))).ok();
        for (event, raised) in ring.events.iter().zip([calls, errs]) {
            if raised {
                event.write(1).ok();
            }
        }
        Ok(())
    }

    fn set_doorbell(&self, _: usize, _: &EventFd) {}

    fn next_available(&self, number: usize) -> Option<u16> {
        let mut state = self.state();
        let any = u16::try_from(state.noise.below(1 << 16)).ok();
        match state.noise.below(4) {
            0 => any,
            1 => None,
            _ => state.rings[number].as_ref().map(|ring| ring.next),
        }
    }
}

/// Creates a random kernel for each pair of queues.
pub(crate) fn random_kernels(
    seed: u64,
    pairs: u16,
    ram: &Arc<GuestMemoryMmap>,
) -> anyhow::Result<Vec<Vhost>> {
    let each = (0..pairs).map(|pair| {
        let noise = Noise::new(seed.wrapping_add(pair.into()));
        let state = Mutex::new(State { noise, rings: [None, None] });
        let tap = File::open("/dev/null").context("/dev/null")?;
        Vhost::with_kernel(Box::new(RandomKernel { ram: ram.clone(), state }), tap, ram.clone())
    });
    each.collect()
}
