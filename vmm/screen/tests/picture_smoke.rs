//! Runs the fuzzer of the encodings for a limited time, always with the same input.

mod hostile_picture;

use host::testutil::noise::Noise;
// The decoder is shared with the unit tests of that crate, and imports from `rfb`.
use screen::rfb;

const ROUNDS: u64 = 400;

#[test]
fn any_picture_arrives_in_each_encoding_and_format() {
    let mut pictures = 0;
    for seed in 0..ROUNDS {
        pictures += hostile_picture::run(Noise::new(seed).take(600));
    }
    assert!(
        pictures > 1000,
        "{pictures} pictures of {} encodings",
        rfb::encode::Encoding::ALL.len()
    );
}
