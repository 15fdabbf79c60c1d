//! Runs the fuzz target of the set-up disk for a limited time, with fixed seeds.

mod hostile_setup_disk;

use host::testutil::noise::Noise;

#[test]
fn whatever_names_files_have_all_are_on_the_disk_or_none() {
    let made = (0..600).filter(|seed| {
        let paths = hostile_setup_disk::paths(&mut Noise::new(*seed));
        hostile_setup_disk::make(&paths)
    });
    let made = made.count();
    assert!((200..600).contains(&made), "{made} of 600 trees are possible");
}
