//! Upgrade images, which become CDs.

use std::fs;
use std::path::PathBuf;

use container::download::transfer::forget_others;
use container::download::{cab, esd};
use container::media::Opened;
use container::media::windows::analyze;
use container::status::Status;
use fake_microsoft::fault::Fault;
use host::testutil::noise::Noise;

use crate::made;
use crate::programs::has;
use crate::world::World;

/// Microsoft's page refuses, and German is at no fixed address.
const GERMAN: [(&str, &str); 2] = [("VERSION", "11"), ("LANGUAGE", "German")];
const CD: &str = "win11x64_de.iso";
/// A cabinet with LZX, which wimlib compressed, and which cabextract reads.
const LZX: &[u8] = include_bytes!("lzx.cab");
const ESD: &str = "win11x64_de.esd";

fn world(test: &str, faults: Vec<Fault>) -> Option<World> {
    has(test, &[made::WIMLIB]).then(|| World::with_upgrade(faults))
}

fn check(world: &World, name: &str) {
    assert_eq!(world.names(), [name]);
    let media = analyze(&Opened::open(&world.place(name)).unwrap()).unwrap().unwrap();
    assert_eq!(
        media.to_string(),
        "Windows 11 26100.0, x64, de-DE: Windows 11 Home, Windows 11 Pro"
    );
}

#[test]
fn a_refused_address_gets_the_upgrade_image_as_a_cd() {
    let test = "a_refused_address_gets_the_upgrade_image_as_a_cd";
    let Some(world) = world(test, vec![Fault::Sentinel]) else { return };
    let path = world.run(&GERMAN).unwrap();
    assert_eq!(path, world.place(CD));
    check(&world, CD);
    let log = world.log();
    let refusals: Vec<_> = log.iter().filter(|line| line.contains("Sentinel")).collect();
    assert!(
        matches!(refusals[..], [one] if one.starts_with("Microsoft's download page: ")),
        "{log:?}"
    );
    let has = |words: &str| log.iter().any(|line| line.contains(words));
    assert!(
        has("the SHA-1 checksum is right") && has("Making the CD of Windows 11… 100%"),
        "{log:?}"
    );
    let requests = world.server.site.take_requests();
    assert!(
        requests.iter().any(|it| it.starts_with("dl.delivery.mp.microsoft.com/files/x_de-de.esd"))
    );
}

#[test]
fn esd_n_leaves_the_catalog_out() {
    let Some(world) = world("esd_n_leaves_the_catalog_out", vec![Fault::Sentinel]) else { return };
    // The file at the fixed address is another one here.
    let (_, sentence) = world.refusal(&[GERMAN[0], GERMAN[1], ("ESD", "N")]);
    assert!(sentence.contains("the server has another file"), "{sentence}");
    let requests = world.server.site.take_requests();
    assert!(!requests.iter().any(|it| it.contains("products.cab")), "{requests:?}");
}

#[test]
fn a_wrong_upgrade_image_leaves_nothing() {
    let test = "a_wrong_upgrade_image_leaves_nothing";
    for (faults, words) in [
        (vec![Fault::Sentinel, Fault::Checksum], "the SHA-1 checksum is"),
        (vec![Fault::Sentinel, Fault::Html], "is not an upgrade image: it is a web page"),
        (vec![Fault::Sentinel, Fault::Size(4096)], "the server has another file"),
        (vec![Fault::PageStatus(403)], "catalog of upgrade images refused the request"),
    ] {
        let Some(world) = world(test, faults) else { return };
        let (status, sentence) = world.refusal(&GERMAN);
        assert_eq!(status, Status::Download);
        assert!(sentence.contains(words), "{sentence}");
        assert!(!world.names().iter().any(|it| it.ends_with(".iso") || it.ends_with(".esd")));
    }
    // No catalog has Korean here.
    let Some(world) = world(test, vec![Fault::Sentinel]) else { return };
    world.run(&[("VERSION", "11"), ("LANGUAGE", "Korean")]).unwrap();
    let log = world.log();
    let words = "Microsoft's catalog of upgrade images has no Professional in ko-KR";
    assert!(log.iter().any(|line| line.contains(words)), "{log:?}");
}

#[test]
fn an_upgrade_image_that_is_there_becomes_a_cd_without_a_request() {
    let test = "an_upgrade_image_that_is_there_becomes_a_cd_without_a_request";
    let Some(world) = world(test, vec![]) else { return };
    let esd = world.server_files.path().join("x.esd");
    fs::copy(&esd, world.place(ESD)).unwrap();
    // A pod was killed while it made the CD.
    fs::write(world.place(&format!("{CD}.part")), vec![1; 100_000_000]).unwrap();
    world.run(&[&GERMAN[..], &[("MIDO", "N")]].concat()).unwrap();
    check(&world, CD);
    assert_eq!(world.server.site.take_requests(), [""; 0]);
    // A damaged one stays, because it may be the user's.
    fs::remove_file(world.place(CD)).unwrap();
    let mut bytes = fs::read(&esd).unwrap();
    bytes.truncate(bytes.len() / 2);
    fs::write(world.place(ESD), bytes).unwrap();
    let (status, sentence) = world.refusal(&GERMAN);
    assert_eq!(status, Status::Download);
    assert!(sentence.contains("win11x64_de.esd: ") && sentence.contains("delete it"), "{sentence}");
    assert_eq!(world.names(), [ESD]);
}

#[test]
fn a_cd_that_is_not_finished_is_removed_with_another_version() {
    let test = "a_cd_that_is_not_finished_is_removed_with_another_version";
    let Some(world) = world(test, vec![]) else { return };
    let esd = world.server_files.path().join("x.esd");
    fs::copy(&esd, world.place(ESD)).unwrap();
    // The CD cannot get its name, so it stays for the next attempt.
    fs::create_dir(world.place(CD)).unwrap();
    let part = format!("{CD}.part");
    world.refusal(&GERMAN);
    assert_eq!(world.names(), [ESD, CD, &*part, &*format!("{part}.json")].map(String::from));
    assert_eq!(forget_others(world.volume.path(), &[world.place(CD)]), [""; 0].map(PathBuf::from));
    assert_eq!(forget_others(world.volume.path(), &[]), [world.place(&part)]);
    fs::remove_dir(world.place(CD)).unwrap();
    assert_eq!(world.names(), [ESD]);
}

#[test]
fn the_address_of_an_upgrade_image_is_a_version() {
    let test = "the_address_of_an_upgrade_image_is_a_version";
    let Some(world) = world(test, vec![Fault::Reset(60)]) else { return };
    world.run(&[("VERSION", "https://files.example.test/dir/my.esd?x=1")]).unwrap();
    check(&world, "my.iso");
}

#[test]
fn a_catalog_with_lzx_is_read_and_a_damaged_one_refused() {
    let list = String::from_utf8(cab::file(LZX, "products.xml").unwrap()).unwrap();
    for (culture, number) in [("de-DE", 1), ("en-US", 4), ("fr-FR", 7), ("ko-KR", 10)] {
        let link = esd::find(&list, "Professional", culture).unwrap();
        assert_eq!(link.url, format!("https://dl.delivery.mp.microsoft.com/files/{number}.esd"));
        assert_eq!(link.length, Some(4_000_000_000 + 4097 * number));
    }
    let mut noise = Noise::new(5);
    let mut refused = 0;
    for _ in 0..20_000 {
        let mut bytes = LZX.to_vec();
        for _ in 0..=noise.below(4) {
            let at = usize::try_from(noise.below(bytes.len() as u64)).unwrap();
            bytes[at] = noise.below(256).to_le_bytes()[0];
        }
        let read = cab::file(&bytes, "products.xml");
        refused += usize::from(read.ok().is_none_or(|it| it != list.as_bytes()));
    }
    assert!(refused > 10_000, "{refused}");
}
