//! Runs the fuzz targets of the user-mode network for a limited time, with fixed seeds.

mod hostile_frames;

/// Pseudo-random bytes for a seed (splitmix64). Small ones are more frequent.
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let byte = std::iter::from_fn(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        let [choice, byte, ..] = (mixed ^ mixed >> 31).to_le_bytes();
        Some(if choice < 100 { byte % 16 } else { byte })
    });
    byte.take(length).collect()
}

#[test]
fn the_network_survives_any_frames() {
    for seed in 0..6_000 {
        hostile_frames::frames(&noise(seed, 4000));
    }
}

#[test]
fn any_segments_deliver_the_data_that_was_sent() {
    for seed in 0..20_000 {
        hostile_frames::segments(&noise(seed, 2000));
    }
}
