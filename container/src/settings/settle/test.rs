//! Tests of sizes: shares of the host, limits, and settings that exclude one another.

use super::super::environment::read;
use super::*;

/// A host with eight processors, 16 GiB of free memory, and 100 GiB of free space.
fn host() -> Host {
    let free_space = Some(100 * GIB);
    let further_space = [free_space, free_space, free_space, None, None];
    let [free, memory] = [16 * GIB; 2];
    let disk = None;
    Host { processors: 8, quota: None, free, memory, zfs: false, free_space, disk, further_space }
}

fn settled(words: &[(&str, &str)], host: &Host) -> anyhow::Result<(Sizes, Vec<String>)> {
    let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    settle(&read(&environment).unwrap(), host)
}

fn sizes(words: &[(&str, &str)], host: &Host) -> Sizes {
    settled(words, host).unwrap().0
}

fn refusal(words: &[(&str, &str)], host: &Host) -> (Status, String) {
    let error = settled(words, host).unwrap_err();
    (Status::of(&error), format!("{error:#}"))
}

#[test]
fn empty_settings_give_the_reference_machine() {
    let (sizes, notes) = settled(&[], &host()).unwrap();
    let more = [Some(64 * GIB), Some(64 * GIB), Some(64 * GIB), None, None];
    assert_eq!(sizes, Sizes { processors: 2, memory: 4 * GIB, disk: 64 * GIB, more });
    assert_eq!(notes, [""; 0]);
}

#[test]
fn shares_are_relative_to_the_host() {
    let half = [("CPU_CORES", "half"), ("RAM_SIZE", "Half"), ("DISK_SIZE", "HALF")];
    let more = [Some(50 * GIB), Some(50 * GIB), Some(50 * GIB), None, None];
    let wanted = Sizes { processors: 4, memory: 8 * GIB, disk: 50 * GIB, more };
    assert_eq!(sizes(&half, &host()), wanted);
    let max = [("CPU_CORES", "max"), ("RAM_SIZE", "max"), ("DISK_SIZE", "max")];
    let memory = 16 * GIB - 1536 * MIB;
    let more = [Some(99 * GIB), Some(99 * GIB), Some(99 * GIB), None, None];
    let wanted = Sizes { processors: 8, memory, disk: 99 * GIB, more };
    assert_eq!(sizes(&max, &host()), wanted);
    // An existing disk keeps its size and needs no space.
    for (disk, size) in [(64 * GIB, "max"), (64 * GIB, "16G"), (8 * GIB, "half")] {
        let full = Host { free_space: Some(10 * GIB), disk: Some(disk), ..host() };
        let (sizes, notes) = settled(&[("DISK_SIZE", size)], &full).unwrap();
        assert_eq!((sizes.disk, notes.len()), (disk, usize::from(size == "16G")), "{notes:?}");
    }
    let second = sizes(&[("DISK2_SIZE", "10"), ("DISK3_SIZE", "max")], &host());
    assert_eq!(
        second.more.map(|it| it.map(|it| it / GIB)).to_vec(),
        [Some(10), Some(99), Some(64), None, None]
    );
}

#[test]
fn max_memory_reserves_less_on_small_hosts() {
    let all = |memory| all_of(&Host { free: memory, memory, ..host() });
    assert_eq!(all(16 * GIB), 16 * GIB - 1536 * MIB);
    assert_eq!(all(4 * GIB), 4 * GIB - 512 * MIB);
    assert_eq!(all(600 * MIB), 300 * MIB);
    assert_eq!(all(0), 0);
}

#[test]
fn bare_numbers_have_the_usual_unit() {
    for (text, bytes) in [
        ("8", 8 * GIB),
        ("129", 14848 * MIB),
        ("4096", 4 * GIB),
        ("2.5g", 2560 * MIB),
        ("8 GB", 8 * GIB),
        ("3GiB", 3 * GIB),
    ] {
        assert_eq!(sizes(&[("RAM_SIZE", text)], &host()).memory, bytes, "{text}");
    }
    assert_eq!(sizes(&[("DISK_SIZE", "200")], &host()).disk, 200 * GIB);
    assert_eq!(sizes(&[("DISK_SIZE", "1T")], &host()).disk, 1024 * GIB);
}

#[test]
fn memory_is_reduced_to_what_is_free() {
    let (less, notes) = settled(&[("RAM_SIZE", "32G")], &host()).unwrap();
    assert_eq!(less.memory, 16 * GIB - 1536 * MIB);
    assert!(notes[0].contains("RAM_SIZE=32G: only 16G are free"), "{notes:?}");
    let unchecked = [("RAM_SIZE", "32G"), ("RAM_CHECK", "N")];
    let (all, notes) = settled(&unchecked, &host()).unwrap();
    assert_eq!((all.memory, notes.len()), (32 * GIB, 1));
    let zfs = Host { zfs: true, ..host() };
    assert_eq!(sizes(&[("RAM_SIZE", "32G")], &zfs).memory, 32 * GIB);
    let (near, notes) = settled(&[("RAM_SIZE", "15G")], &host()).unwrap();
    assert_eq!(near.memory, 15 * GIB);
    assert!(notes[0].contains("little is left"), "{notes:?}");
}

#[test]
fn a_pod_with_a_limit_reserves_nothing_for_the_host() {
    let of = |words: &[(&str, &str)], memory: u64| settled(words, &Host { memory, ..host() });
    let (sizes, notes) = of(&[("RAM_SIZE", "4G")], 5 * GIB - 200 * MIB).unwrap();
    assert_eq!((sizes.memory, notes), (4 * GIB, Vec::new()));
    assert_eq!(of(&[("RAM_SIZE", "max")], 8 * GIB).unwrap().0.memory, 8 * GIB - 512 * MIB);
    // Without a lower limit of the control group, the host's own memory is the limit.
    assert_eq!(of(&[("RAM_SIZE", "max")], 15 * GIB).unwrap().0.memory, 16 * GIB - 1536 * MIB);
    let (less, notes) = of(&[("RAM_SIZE", "5G")], 5 * GIB).unwrap();
    assert_eq!((less.memory, notes.len()), (5 * GIB - 512 * MIB, 1));
    let (all, notes) = of(&[("RAM_SIZE", "5G"), ("RAM_CHECK", "N")], 5 * GIB).unwrap();
    assert_eq!(all.memory, 5 * GIB);
    assert!(notes[0].contains("limit leaves 5G: raise it"), "{notes:?}");
}

#[test]
fn too_little_memory_is_an_error_with_the_minimum() {
    let (status, sentence) = refusal(&[("RAM_SIZE", "1G")], &host());
    assert_eq!(status, Status::Memory);
    assert!(sentence.contains("Windows 11 Pro needs at least 2G"), "{sentence}");
    let small = Host { memory: 2 * GIB, ..host() };
    assert_eq!(refusal(&[], &small).0, Status::Memory);
    let lowered = [("RAM_SIZE", "1G"), ("RAM_MINIMUM", "1G")];
    assert_eq!(sizes(&lowered, &host()).memory, GIB);
    assert_eq!(sizes(&[("RAM_SIZE", "1G"), ("VERSION", "2012")], &host()).memory, GIB);
    assert_eq!(refusal(&[("RAM_SIZE", "0")], &host()).0, Status::Memory);

    assert_eq!(refusal(&[("DISK_SIZE", "16G")], &host()).0, Status::Disk);
    assert_eq!(sizes(&[("DISK_SIZE", "16G"), ("VERSION", "10")], &host()).disk, 16 * GIB);
    let lowered = [("DISK_SIZE", "9G"), ("DISK_MINIMUM", "9G")];
    assert_eq!(sizes(&lowered, &host()).disk, 9 * GIB);
    let full = Host { free_space: Some(GIB / 2), ..host() };
    assert_eq!(refusal(&[("DISK_SIZE", "max")], &full).0, Status::Disk);
    assert_eq!(sizes(&[("DISK_SIZE", "1G"), ("DISK_DISABLE", "Y")], &host()).disk, 0);
}

#[test]
fn processors_are_limited_to_those_of_the_pod() {
    let (all, notes) = settled(&[("CPU_CORES", "64")], &host()).unwrap();
    assert_eq!((all.processors, notes.len()), (8, 1));
    let limited = Host { quota: Some(3), ..host() };
    assert_eq!(sizes(&[("CPU_CORES", "max")], &limited).processors, 3);
    assert_eq!(sizes(&[("CPU_CORES", "half")], &limited).processors, 1);
    let (four, notes) = settled(&[("CPU_CORES", "4")], &limited).unwrap();
    assert_eq!(four.processors, 4);
    assert!(notes[0].contains("set CPU_CORES=3"), "{notes:?}");
    assert_eq!(sizes(&[("CPU_CORES", "0")], &host()).processors, 1);
    assert_eq!(sizes(&[("SMP", "6,sockets=2"), ("CPU_CORES", "1")], &host()).processors, 6);
    let (sixteen, notes) = settled(&[("SMP", "16")], &host()).unwrap();
    assert_eq!((sixteen.processors, notes.len()), (16, 1));
}

#[test]
fn a_domain_needs_an_account_and_excludes_a_workgroup() {
    for user in ["me", "me@CORP.example.com", "Administrator"] {
        sizes(&[("USERNAME", user), ("PASSWORD", "x"), ("DOMAIN", "corp.example.com")], &host());
    }
    for words in [
        &[("DOMAIN", "corp"), ("USERNAME", "me@other"), ("PASSWORD", "x")][..],
        &[("DOMAIN", "corp"), ("USERNAME", "@corp"), ("PASSWORD", "x")],
        &[("DOMAIN", "corp"), ("USERNAME", "me@corp@corp"), ("PASSWORD", "x")],
        &[("DOMAIN", "corp"), ("USERNAME", "docker"), ("PASSWORD", "x")],
        &[("DOMAIN", "corp")],
        &[("DOMAIN", "corp"), ("USERNAME", "me"), ("PASSWORD", "admin")],
        &[("DOMAIN_OU", "OU=x")],
        &[("DOMAIN", "corp"), ("WORKGROUP", "x")],
        &[("USERNAME", "me@corp")],
        &[("USERNAME", "Administrator")],
        &[("USERNAME", "a name of more than twenty letters")],
    ] {
        assert_eq!(refusal(words, &host()).0, Status::Usage, "{words:?}");
    }
}

#[test]
fn ports_and_networks_do_not_collide() {
    let ports = [("VNC_PORT", "8006")];
    assert!(refusal(&ports, &host()).1.contains("both 8006"));
    sizes(&[("VNC_PORT", "8006"), ("WEB", "N")], &host());
    let status = refusal(&[("DHCP", "Y"), ("NETWORK", "user")], &host()).0;
    assert_eq!(status, Status::Unsupported);
    let dhcp = [("DHCP", "Y"), ("HOST_PORTS", "22"), ("IP", "172.30.0.9")];
    let notes = settled(&dhcp, &host()).unwrap().1;
    assert_eq!(notes.len(), 2, "{notes:?}");
    assert!(notes[1].starts_with("HOST_PORTS has no effect"), "{notes:?}");
    for edge in ["172.30.0.0", "172.30.0.255"] {
        assert_eq!(refusal(&[("IP", edge)], &host()).0, Status::Network);
    }
    sizes(&[("IP", "172.30.0.255"), ("MASK", "255.255.0.0")], &host());
}

#[test]
fn all_sizes_that_are_too_small_are_reported_together() {
    let words = [("RAM_SIZE", "1G"), ("DISK_SIZE", "1G"), ("DOMAIN_OU", "OU=x")];
    let error = settled(&words, &host()).unwrap_err();
    let sentences = status::sentences(&error);
    let starts = ["DOMAIN_OU ", "RAM_SIZE=1G: ", "DISK_SIZE=1G: "];
    assert!(sentences.iter().zip(starts).all(|(it, start)| it.starts_with(start)));
    assert_eq!((Status::of(&error), sentences.len()), (Status::Usage, 3));
}

#[test]
fn the_probe_has_low_minimum_sizes() {
    let small = Host { memory: GIB, free_space: None, ..host() };
    let probe = [("VERSION", "probe"), ("RAM_SIZE", "64M"), ("DISK_SIZE", "max")];
    let sizes = sizes(&probe, &small);
    assert_eq!((sizes.memory, sizes.disk), (64 * MIB, 0));
}
