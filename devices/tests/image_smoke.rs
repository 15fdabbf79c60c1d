//! The fuzzer of qcow2 images, for as long as a test may take and always the same.

mod hostile_image;

use std::time::{Duration, Instant};

use devices::testutil::hostile::Noise;

const ROUNDS: u64 = 300;
const BYTES: usize = 300;

#[test]
fn no_image_breaks_the_machine_and_a_sound_one_keeps_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 0..ROUNDS {
        let start = Instant::now();
        hostile_image::run(folder.path(), Noise::new(seed).take(BYTES));
        let took = start.elapsed();
        assert!(took < Duration::from_secs(5), "seed {seed} took {took:?}");
    }
}
