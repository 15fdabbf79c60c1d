//! `transom download` as a process: killed, stopped, and started again.

use std::fs;
use std::io::Read as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use container::download::sidecar::Sidecar;
use fake_microsoft::fault::Fault;
use rustix::process::{Pid, Signal, kill_process};

use crate::ADDRESS;
use crate::world::World;

fn start(world: &World) -> Child {
    start_with(world, &[])
}

fn start_with(world: &World, more: &[(&str, &str)]) -> Child {
    Command::new(env!("CARGO_BIN_EXE_transom"))
        .arg("download")
        .env_clear()
        .env("VERSION", ADDRESS)
        .env("STORAGE", world.volume.path())
        .env("HTTPS_PROXY", world.server.proxy())
        .env("SSL_CERT_FILE", &world.server.authority)
        .env("DISK_SIZE", "32G")
        .env("RAM_CHECK", "N")
        .env("DRIVERS", "N")
        .envs(more.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

fn output(child: Child) -> (Option<i32>, String) {
    let ended = child.wait_with_output().unwrap();
    let said = [ended.stdout, ended.stderr].concat();
    (ended.status.code(), String::from_utf8_lossy(&said).into_owned())
}

/// Waits until parts of the file are on the disk.
fn wait_for_parts(world: &World) -> u64 {
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(60) {
        let done = Sidecar::read(&world.place("my.iso.part.json")).map(|sidecar| sidecar.done);
        let done: u64 = done.iter().flatten().map(|(from, to)| to - from).sum();
        if done > 0 {
            return done;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("nothing was saved");
}

#[test]
fn an_upgrade_image_that_is_not_whole_stays_for_the_next_start() {
    let world = World::new(vec![Fault::PageStatus(403)]);
    let names = ["win11x64.esd.part", "win11x64.esd.part.json"];
    fs::write(world.place(names[0]), "start").unwrap();
    fs::write(world.place(names[1]), r#"{"length":9000000,"done":[]}"#).unwrap();
    let (code, said) = output(start_with(&world, &[("VERSION", "11"), ("LANGUAGE", "German")]));
    assert_ne!(code, Some(0), "{said}");
    assert!(said.contains("win11x64.esd.part is removed: nothing needs"), "{said}");
    fs::write(world.place(names[0]), "start").unwrap();
    fs::write(world.place(names[1]), r#"{"length":9000000,"done":[]}"#).unwrap();
    let (code, said) = output(start_with(&world, &[("VERSION", "11")]));
    assert_ne!(code, Some(0), "{said}");
    assert_eq!(world.names(), names, "{said}");
}

#[test]
fn a_killed_download_goes_on_where_it_was() {
    let world = World::new(vec![Fault::Slow(1_500_000)]);
    let mut child = start(&world);
    let saved = wait_for_parts(&world);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(world.names(), ["my.iso.part", "my.iso.part.json"]);
    world.server.site.set_faults(vec![]);
    world.server.site.take_requests();
    let (code, said) = output(start(&world));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("are there already"), "{said}");
    assert!(said.contains("100% at "), "{said}");
    assert!(world.is_whole("my.iso"));
    assert_eq!(world.names(), ["my.iso"]);
    let fetched: u64 = world.server.site.take_requests().iter().filter_map(|it| length(it)).sum();
    let rest = world.iso.len() as u64 - saved;
    assert!(fetched <= rest + (64 << 10), "{fetched} of {rest} bytes");
    // Now there is nothing to download.
    let (code, said) = output(start(&world));
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("nothing to download"), "{said}");
}

#[test]
fn the_drivers_come_after_the_medium() {
    let world = World::new(vec![]);
    let drivers = [("DRIVERS", "https://mirror.example.test/v.iso")];
    for both in [true, false] {
        let (code, said) = output(start_with(&world, &drivers));
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("Downloading Windows' drivers…"), "{said}");
        assert_eq!(said.contains("/my.iso…"), both, "{said}");
        assert_eq!(world.names(), ["my.iso", "virtio-win-v.iso"]);
        fs::remove_file(world.place("virtio-win-v.iso")).unwrap();
    }
    // By hand, no drivers are needed.
    let (code, said) = output(start_with(&world, &[drivers[0], ("MANUAL", "Y")]));
    assert_eq!((code, world.names()), (Some(0), vec!["my.iso".to_owned()]), "{said}");
}

#[test]
fn the_download_of_a_former_version_does_not_stay() {
    let world = World::new(vec![Fault::Reset(0); 1000]);
    world.refusal(&[("VERSION", ADDRESS)]);
    assert_eq!(world.names(), ["my.iso.part", "my.iso.part.json"]);
    world.server.site.set_faults(vec![]);
    let words = [("VERSION", "https://files.example.test/other.iso")];
    let (code, said) = output(start_with(&world, &words));
    assert_eq!((code, world.names()), (Some(0), vec!["other.iso".to_owned()]), "{said}");
    assert!(said.contains("my.iso.part is removed"), "{said}");
}

#[test]
fn wrong_drivers_are_found_before_the_medium_is_downloaded() {
    let rows = [
        ("https://mirror.example.test/v.iso#sha256=12", None, "64 hexadecimal digits"),
        ("https://mirror.example.test/v.iso", Some(Fault::Status(404)), "there is no such file"),
        // Twice at the same time, because each one tries for some seconds.
        ("http://127.0.0.1:1/v.iso", None, "127.0.0.1"),
    ];
    for (drivers, fault, words) in rows {
        let world = World::new(fault.into_iter().collect());
        let started = [ADDRESS, "11"]
            .map(|version| start_with(&world, &[("DRIVERS", drivers), ("VERSION", version)]));
        for (code, said) in started.map(output) {
            assert_eq!(code, Some(68), "{said}");
            assert!(said.contains(words) && said.contains("Windows' drivers cannot"), "{said}");
            assert!(!said.contains("Downloading"), "{said}");
        }
        assert_eq!(world.names(), [""; 0]);
    }
}

#[test]
fn a_download_goes_on_without_the_usual_drivers_unless_the_disk_needs_them() {
    let world = World::new(vec![]);
    // The server has another file under that name.
    let usual = ("DRIVERS", "");
    let (code, said) = output(start_with(&world, &[usual, ("VERSION", "11")]));
    assert_eq!((code, world.names()), (Some(0), vec!["win11x64.iso".to_owned()]), "{said}");
    assert!(said.contains("Windows' drivers cannot be downloaded: "), "{said}");
    assert!(said.contains("the new disk is DISK_TYPE=nvme"), "{said}");
    fs::remove_file(world.place("win11x64.iso")).unwrap();
    let words = [usual, ("VERSION", "11"), ("DISK_TYPE", "scsi")];
    let (code, said) = output(start_with(&world, &words));
    assert_eq!((code, world.names()), (Some(68), Vec::new()), "{said}");
    assert!(!said.contains("Downloading"), "{said}");
    // Nobody asks for them.
    world.server.site.take_requests();
    let (code, said) = output(start_with(&world, &[("VERSION", "11")]));
    assert_eq!(code, Some(0), "{said}");
    let requests = world.server.site.take_requests();
    assert!(!requests.iter().any(|it| it.contains("fedorapeople")), "{requests:?}");
}

/// The number of bytes that a request asks for.
fn length(request: &str) -> Option<u64> {
    let (start, end) = request.split_once("bytes=")?.1.split_once('-')?;
    Some(end.parse::<u64>().ok()? + 1 - start.parse::<u64>().ok()?)
}

#[test]
fn sigterm_ends_a_download_at_once_and_keeps_what_came() {
    let world = World::new(vec![Fault::Slow(4_000_000)]);
    let mut child = start(&world);
    let mut head = [0; 1];
    child.stdout.as_mut().unwrap().read_exact(&mut head).unwrap();
    std::thread::sleep(Duration::from_millis(2500));
    let stopped = Instant::now();
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    let (code, said) = output(child);
    assert_eq!(code, Some(143), "{said}");
    assert!(stopped.elapsed() < Duration::from_secs(5), "{said}");
    assert!(wait_for_parts(&world) > 0);
    assert_eq!(world.names(), ["my.iso.part", "my.iso.part.json"]);
}
