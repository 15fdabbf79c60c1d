//! The fuzzer of mass storage at USB, for as long as a test may take and always the same.

mod hostile_storage;

use std::time::Duration;

use devices::testutil::hostile::Noise;
use devices::testutil::soon;

const ROUNDS: u64 = 60;
const BYTES: usize = 4000;

#[test]
fn no_driver_breaks_or_stops_a_disk_or_a_cd() {
    for seed in 0..ROUNDS {
        soon(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_storage::run(Noise::new(seed).take(BYTES));
        });
    }
}
