//! The fuzzer of the NVMe controller, for as long as a test may take and always the same.

mod hostile_nvme;

use std::time::{Duration, Instant};

use devices::testutil::hostile::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 3000;

#[test]
fn no_driver_breaks_or_stops_the_controller() {
    let folder = tempfile::tempdir().unwrap();
    let mut served = 0;
    for seed in 0..ROUNDS {
        let start = Instant::now();
        served += hostile_nvme::run(folder.path(), Noise::new(seed).take(BYTES));
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "seed {seed} took {took:?}");
    }
    assert!(served > 0, "no command reached the disk");
}
