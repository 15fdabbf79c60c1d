//! Runs the fuzzer of USB devices of the host for a short time, with fixed seeds.

mod hostile_usb_host;

use std::time::Duration;

use host::testutil::call_in_time;
use host::testutil::noise::Noise;

const ROUNDS: u64 = 300;
const BYTES: usize = 2000;

#[test]
fn hostile_devices_of_the_host_do_not_break_the_controller() {
    for seed in 0..ROUNDS {
        call_in_time(Duration::from_secs(20), format_args!("seed {seed}"), || {
            hostile_usb_host::run(Noise::new(seed).take(BYTES));
        });
    }
}
