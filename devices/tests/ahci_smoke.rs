//! Runs the fuzzer of the AHCI controller for a short time, with fixed seeds.

mod hostile_ahci;

use std::time::Duration;

use host::testutil::call_in_time;
use host::testutil::noise::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 3000;

#[test]
fn no_driver_breaks_or_stops_the_controller() {
    let folder = tempfile::tempdir().unwrap();
    let mut served = 0;
    for seed in 0..ROUNDS {
        served += call_in_time(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_ahci::run(folder.path(), Noise::new(seed).take(BYTES))
        });
    }
    assert!(served > 0, "no command reached the medium");
}
