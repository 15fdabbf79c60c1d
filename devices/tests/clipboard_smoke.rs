//! Runs the fuzzer of the clipboard for a short time, with fixed seeds.

mod hostile_clipboard;

use std::time::Duration;

use host::testutil::call_in_time;
use host::testutil::noise::Noise;

const ROUNDS: u64 = 200;
const BYTES: usize = 3000;

#[test]
fn hostile_agents_do_not_break_the_clipboard() {
    let mut seen = [0; 2];
    for seed in 0..ROUNDS {
        let these = call_in_time(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_clipboard::run(Noise::new(seed).take(BYTES))
        });
        seen.iter_mut().zip(these).for_each(|(sum, it)| *sum += it);
    }
    assert!(!seen.contains(&0), "texts and bytes that arrived: {seen:?}");
}
