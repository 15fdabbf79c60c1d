//! The fuzzer of the configuration, for as long as a test may take and always the same.

mod hostile_user;

use devices::registry::KINDS;
use devices::testutil::hostile::Noise;
use vmm::config::OPTIONS;

const ROUNDS: u64 = 50_000;

/// What options and files are made of, besides keys and kinds.
const PARTS: [&str; 24] = [
    "=", ",", ",,", ":", "0x", "-1", "4G", "1", "65536", "1e999", "on", "path", "slot", "03.0",
    "to", "socket:", "tap:", "fd:3", "\"", "{", "}", "[", "]", "\u{e9}",
];

#[test]
fn whatever_a_user_writes_is_read_or_refused_in_a_sentence() {
    for seed in 0..ROUNDS {
        let mut noise = Noise::new(seed);
        let keys: Vec<_> = OPTIONS.iter().map(|option| option.key).collect();
        let mut text = String::new();
        for word in 0..seed % 12 {
            text += noise.of(match word % 4 {
                0 => KINDS,
                2 => &keys,
                _ => &PARTS,
            });
        }
        let option = usize::try_from(noise.below(OPTIONS.len() as u64 + 4)).unwrap();
        hostile_user::read(option, &text);
    }
}
