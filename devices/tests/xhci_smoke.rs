//! The fuzzer of the USB controller, for as long as a test may take and always the same.

mod hostile_xhci;

use std::time::Duration;

use devices::testutil::hostile::Noise;
use devices::testutil::soon;

const ROUNDS: u64 = 200;
const BYTES: usize = 4000;

#[test]
fn no_driver_breaks_or_stops_the_controller() {
    for seed in 0..ROUNDS {
        soon(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_xhci::run(Noise::new(seed).take(BYTES));
        });
    }
}
