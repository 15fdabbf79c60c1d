//! The fuzzer of the screen's clients, for as long as a test may take and always the same.

mod hostile_viewer;

use devices::testutil::hostile::Noise;

const ROUNDS: u64 = 1200;

/// Beginnings of messages, and what is in them.
const PARTS: [&[u8]; 25] = [
    b"RFB 003.003\n",
    b"RFB 003.007\n\x02",
    b"RFB 003.008\n\x02",
    b"RFB 003.889\n\x13\0\x02",
    b"GET / HTTP/1.1\r\n\r\n",
    &[0, 0, 0, 0, 32, 24, 0, 1, 0, 255, 0, 255, 0, 255, 16, 8, 0, 0, 0, 0],
    &[0, 0, 0, 0, 8, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    &[0, 0, 0, 0, 16, 16, 1, 1, 0, 31, 0, 63, 0, 31, 11, 5, 0, 0, 0, 0],
    &[2, 0, 0, 3, 0, 0, 0, 7, 255, 255, 255, 32, 255, 255, 254, 0xcc],
    &[2, 0, 0, 2, 0, 0, 0, 16, 255, 255, 254, 0xc8],
    &[2, 0, 0, 3, 0, 0, 0, 5, 0xc0, 0xa1, 0xe5, 0xce, 255, 255, 255, 33],
    &[2, 0, 0, 4, 0, 0, 0, 6, 255, 255, 255, 32, 255, 255, 254, 0xc7, 255, 255, 254, 0xcc],
    &[2, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 5, 255, 255, 255, 33],
    &[3, 0, 0, 0, 0, 0, 255, 255, 255, 255],
    &[3, 1, 0, 0, 0, 0, 255, 255, 255, 255],
    &[4, 1, 0, 0, 0, 0, 255, 0xe1],
    &[5, 0x81, 0, 9, 0, 9],
    b"\x06\0\0\0\0\0\0\x03abc",
    &[6, 0, 0, 0, 255, 255, 255, 252, 2, 0, 0, 1],
    &[6, 0, 0, 0, 255, 255, 255, 240, 16, 0, 0, 1, 0x78, 1, 3, 0, 0, 0, 0, 1, 0, 0, 0, 0],
    &[150, 1, 0, 0, 0, 0, 255, 255, 255, 255],
    &[248, 0, 0, 0, 0x80, 0, 0, 4, 2, 7, 7],
    &[250, 0, 1, 4],
    &[251, 0, 2, 128, 1, 224, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 128, 1, 224, 0, 0, 0, 0],
    &[255, 0, 0, 1, 0, 0, 0, 0x61, 0, 0, 0, 0x1e],
];

#[test]
fn whatever_a_client_says_ends_that_client_alone() {
    let bench = hostile_viewer::Bench::shared();
    for seed in 0..ROUNDS {
        let mut noise = Noise::new(seed);
        let mut bytes = vec![seed.to_le_bytes()[0]];
        for _ in 0..noise.below(20) {
            bytes.extend(noise.of(&PARTS));
            if noise.below(8) == 0 {
                let count = usize::try_from(noise.below(12)).unwrap();
                bytes.extend(noise.by_ref().take(count));
            }
        }
        bench.talk(&bytes);
    }
}
