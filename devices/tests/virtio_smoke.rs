//! The fuzzers of the virtio devices, for as long as a test may take and always the same.

mod hostile_virtio;

use std::time::{Duration, Instant};

use devices::testutil::hostile::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 2000;

#[test]
fn no_driver_breaks_or_stops_a_device() {
    let folder = tempfile::tempdir().unwrap();
    for kind in hostile_virtio::KINDS {
        for seed in 0..ROUNDS {
            let start = Instant::now();
            hostile_virtio::run(kind.name, folder.path(), Noise::new(seed).take(BYTES));
            let took = start.elapsed();
            assert!(took < Duration::from_secs(5), "{}, seed {seed} took {took:?}", kind.name);
        }
    }
}
