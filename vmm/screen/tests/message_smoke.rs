//! Runs the fuzzer of the parsers for client messages for a limited time, always with the same
//! input.

mod hostile_message;

use host::testutil::noise::Noise;

const ROUNDS: u64 = 60_000;
/// Message types, one of which does not exist.
const KINDS: [u8; 13] = [0, 2, 3, 4, 5, 6, 150, 248, 250, 251, 255, 77, 6];

#[test]
fn a_message_is_parsed_only_when_complete() {
    let mut messages = 0;
    for seed in 0..ROUNDS {
        let mut noise = Noise::new(seed);
        let mut bytes = vec![seed.to_le_bytes()[0]];
        for _ in 0..noise.below(12) {
            bytes.push(noise.choose(&KINDS));
            let count = usize::try_from(noise.below(30)).unwrap();
            // Mostly zeros, so that lengths are short.
            let few = noise.below(3) > 0;
            bytes.extend(noise.by_ref().take(count).map(|byte| if few { byte & 1 } else { byte }));
        }
        messages += hostile_message::read(&bytes);
    }
    assert!(messages > 10_000, "{messages} messages");
}
