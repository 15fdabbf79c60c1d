//! Runs the fuzzer of the network controller for a short time, with fixed seeds.

mod hostile_net;

use std::time::Duration;

use host::testutil::call_in_time;
use host::testutil::noise::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 3000;

#[test]
fn rings_taken_back_from_the_kernel_are_served() {
    for seed in 0..ROUNDS / 4 {
        call_in_time(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_net::run_with_vhost(Noise::new(seed).take(BYTES));
        });
    }
}

#[test]
fn hostile_drivers_and_peers_do_not_break_the_controller() {
    let mut seen = [0; 2];
    for seed in 0..ROUNDS {
        let frames = call_in_time(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_net::run(Noise::new(seed).take(BYTES))
        });
        seen.iter_mut().zip(frames).for_each(|(sum, it)| *sum += it);
    }
    assert!(!seen.contains(&0), "frames that arrived at the host and at the guest: {seen:?}");
}
