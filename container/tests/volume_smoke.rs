//! The fuzz targets of the volume's state, with fixed inputs.

mod hostile_volume;

use host::testutil::noise::Noise;

#[test]
fn survives_hostile_disks() {
    let mut noise = Noise::new(16);
    for length in [0, 1, 2, 5, 9, 33, 129] {
        for _ in 0..40 {
            let bytes: Vec<u8> = noise.by_ref().take(length).collect();
            hostile_volume::judge_disk(&bytes);
        }
    }
}

#[test]
fn survives_hostile_names() {
    let mut noise = Noise::new(17);
    let parts =
        ["..", "/", "%2e", "%", "%00", ".iso", ".ESD", "windows.", "\n", "é", "?", "#", " "];
    for length in 0..400 {
        let numbers = noise.by_ref().take(length % 40);
        let text: String = numbers.map(|it| parts[usize::from(it) % parts.len()]).collect();
        hostile_volume::name_medium(&text);
    }
    hostile_volume::name_medium(&"%41".repeat(20_000));
}

#[test]
fn survives_hostile_manifests() {
    // A valid one, and a valid journal.
    hostile_volume::read_manifest(&[0, 1, 4, 2, 5, 6, 8]);
    hostile_volume::read_manifest(&[9, 0, 1, 5, 8, 10]);
    let mut noise = Noise::new(18);
    for length in 0..600 {
        let bytes: Vec<u8> = noise.by_ref().take(length).collect();
        hostile_volume::read_manifest(&bytes);
        // More likely to be well formed.
        let few: Vec<u8> = [0, 1].into_iter().chain(bytes.iter().take(5).copied()).collect();
        hostile_volume::read_manifest(&few);
    }
}
