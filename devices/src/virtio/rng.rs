//! virtio-rng: gives the guest entropy from the host (VIRTIO 1.3, 5.4).
//!
//! Threats: the guest chooses how much it asks for. A longer request than the limit is answered in
//! part, so that the guest controls neither our memory use nor our CPU time.

use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use super::{Identity, Queue, Virtio, on_pci};
use crate::device::Device;
use crate::grants::{Build, Grants};
use crate::pci::Address;
use crate::worker::Worker;

/// `--device virtio-rng`
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// PCI slot. Defaults to the first free one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slot: Option<Address>,
}

const MAX_ANSWER: usize = 64 << 10;

impl Build for Config {
    fn build(self, grants: &mut dyn Grants) -> anyhow::Result<Box<dyn Device>> {
        on_pci(Rng { worker: None }, self.slot, grants)
    }
}

struct Rng {
    worker: Option<Worker<Vec<Queue>>>,
}

fn answer(queue: &mut Queue) {
    while let Some(chain) = super::next(queue) {
        let wanted = super::length(&chain.writable);
        let mut bytes = vec![0; usize::try_from(wanted).unwrap_or(MAX_ANSWER).min(MAX_ANSWER)];
        // This blocks only if the host has just booted and has no entropy yet.
        let filled = getrandom(&mut bytes[..], GetRandomFlags::empty()).unwrap_or(0);
        let bytes = &bytes[..filled];
        // A chain outside of guest memory is the guest's error. It is returned empty.
        let written = queue.memory.scatter(&chain.writable, bytes).map_or(0, |()| bytes.len());
        queue.push(chain, u32::try_from(written).unwrap_or(0));
    }
    queue.notify();
}

impl Virtio for Rng {
    fn identity(&self) -> Identity {
        Identity { id: 4, name: "rng", class: 0x00_ff00, queues: vec![64], features: 0 }
    }

    fn start(&mut self, queues: Vec<Queue>, _: u64) -> anyhow::Result<()> {
        let bells = queues.iter().map(|queue| queue.bell.clone()).collect();
        let step = |queues: &mut Vec<Queue>, at: usize| answer(&mut queues[at]);
        self.worker = Some(Worker::spawn("virtio-rng", queues, bells, step)?);
        Ok(())
    }

    fn stop(&mut self) -> Vec<Queue> {
        self.worker.take().map(Worker::stop).unwrap_or_default()
    }
}

#[cfg(test)]
mod test {
    use super::*;
    use crate::testutil::Bench;
    use crate::testutil::driver::Driver;

    const AT: Address = Address::new(3, 0);

    #[test]
    fn fills_buffers_up_to_the_limit() {
        let mut bench = Bench::new(1 << 20);
        bench.board.add("rng", |grants| Config { slot: Some(AT) }.build(grants)).unwrap();
        bench.board.run(Vec::new()).unwrap();
        let mut driver = Driver::find(&bench, AT);
        assert!(driver.negotiate(0));
        driver.enable(0, 16);
        driver.start();
        let room = driver.allocate(200_000);
        driver.offer(0, &[(room, 40, true), (room + 100, 8, true)]);
        driver.offer(0, &[(room + 200, 100_000, true)]);
        driver.offer(0, &[(room, 40, false)]);
        driver.offer(0, &[(1 << 40, 40, true)]);
        driver.kick(0);
        assert_eq!([(); 4].map(|()| driver.wait(0).length), [48, 65536, 0, 0]);
        let bytes = driver.bytes(room, 120);
        assert!(
            bytes[..40].iter().any(|byte| *byte != 0),
            "40 random zeros are practically impossible"
        );
        assert_eq!(bytes[40..100], [0; 60], "bytes between the pieces stay unchanged");
        assert_ne!(bytes[100..108], [0; 8]);
        assert_eq!(bytes[108..], [0; 12]);
    }
}
