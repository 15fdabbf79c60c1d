//! The fuzzers of the virtio devices, for as long as a test may take and always the same.

mod hostile_virtio;

use std::time::Duration;

use devices::testutil::hostile::Noise;
use devices::testutil::soon;

const ROUNDS: u64 = 200;
const BYTES: usize = 2000;

#[test]
fn no_driver_breaks_or_stops_a_device() {
    let folder = tempfile::tempdir().unwrap();
    for kind in hostile_virtio::KINDS {
        for seed in 0..ROUNDS {
            soon(Duration::from_secs(5), format_args!("{}, seed {seed}", kind.name), || {
                hostile_virtio::run(kind.name, folder.path(), Noise::new(seed).take(BYTES));
            });
        }
    }
}
