//! Runs the fuzzer of the 82574 for a short time, with fixed seeds.

mod hostile_e1000e;

use std::time::Duration;

use host::testutil::call_in_time;
use host::testutil::noise::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 3000;

#[test]
fn hostile_drivers_and_peers_do_not_break_the_card() {
    let mut seen = [0; 2];
    for seed in 0..ROUNDS {
        let frames = call_in_time(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_e1000e::run(Noise::new(seed).take(BYTES))
        });
        seen.iter_mut().zip(frames).for_each(|(sum, it)| *sum += it);
    }
    assert!(!seen.contains(&0), "frames that arrived at the host and at the guest: {seen:?}");
}
