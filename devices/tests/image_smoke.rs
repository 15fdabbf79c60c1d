//! The fuzzer of qcow2 images, for as long as a test may take and always the same.

mod hostile_image;

use std::time::Duration;

use devices::testutil::hostile::Noise;
use devices::testutil::soon;

const ROUNDS: u64 = 300;
const BYTES: usize = 300;

#[test]
fn no_image_breaks_the_machine_and_a_sound_one_keeps_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 0..ROUNDS {
        soon(Duration::from_secs(5), format_args!("seed {seed}"), || {
            hostile_image::run(folder.path(), Noise::new(seed).take(BYTES));
        });
    }
}
