//! The machine of an environment, as `vmm` reads it.

use host::listen::Address;
use host::net::Network;

use super::*;
use crate::plan::Plan;
use crate::settings::environment::Environment;
use crate::setup_disk;

/// The plan of an environment, on a host with a disk.
fn planned(words: &[(&str, &str)]) -> anyhow::Result<Plan> {
    let root = tempfile::tempdir()?;
    for folder in ["proc", "storage"] {
        std::fs::create_dir_all(root.path().join(folder))?;
    }
    let cpus = "processor: 0\n".repeat(8);
    std::fs::write(root.path().join("proc/cpuinfo"), cpus)?;
    std::fs::write(root.path().join("proc/meminfo"), "MemAvailable: 67108864 kB\n")?;
    std::fs::write(root.path().join("storage/data.img"), "x")?;
    let environment: Environment =
        words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    Plan::make(&environment, root.path())
}

/// Configuration of the machine of an environment.
fn filled(words: &[(&str, &str)], card: Option<NetworkCard>) -> anyhow::Result<Config> {
    let plan = planned(words)?;
    let longer = Disk { longer: Some(3 << 30), ..Disk::new("/b.img".into(), Format::Qcow2) };
    let more = card.is_some().then_some(longer);
    let parts = Parts {
        firmware: Some(("/code".into(), "/vars".into())),
        smm: false,
        tpm: Some("/run/tpm.sock".into()),
        identity: Identity {
            uuid: "00112233-4455-8677-8899-aabbccddeeff".parse().ok(),
            generation: None,
        },
        disks: [Disk::new("/a,b.img".into(), Format::Raw)].into_iter().chain(more).collect(),
        rescue: Some("/start.iso".into()),
        media: vec![PathBuf::from("/a,b.iso").into()],
        setup_disk: None,
        unnamed: Unnamed::default(),
        origin: None,
        hardware: Hardware::default(),
        control: "/run/vmm.sock".into(),
        agent: "/run/agent.sock".into(),
        listeners: vec![
            listen::Config {
                address: Some(Address::Unix("/run/screen.sock".into())),
                ..listen::Config::default()
            },
            listen::Config {
                address: Some(Address::Tcp("[::]:5900".into())),
                auth: listen::Auth::None,
                ..listen::Config::default()
            },
        ],
        card,
    };
    config(&plan.input.settings, &plan.sizes, &parts)
}

/// The same as JSON, after `vmm` has read it.
fn made(words: &[(&str, &str)]) -> anyhow::Result<serde_json::Value> {
    let config = filled(words, None)?;
    let text = serde_json::to_string(&config)?;
    // Everything that is written can be read by `vmm`.
    let read = Config::from_json(&text)?;
    assert_eq!(serde_json::to_value(&read)?, serde_json::to_value(&config)?);
    Ok(serde_json::to_value(&config)?)
}

/// Compares several machines with `machines.txt`, except this process' ID and its user.
#[test]
fn a_full_machine_has_the_expected_command_line() {
    let card = || NetworkCard {
        backend: Network::Fd(vec![7, 8]),
        mac: Mac([2, 17, 34, 51, 68, 0xab]),
        mtu: Some(1400),
        pairs: 2,
    };
    let passt = || NetworkCard {
        backend: Network::Passt("/run/a,b.sock".into()),
        mac: Mac([2, 17, 34, 51, 68, 0xab]),
        mtu: None,
        pairs: 1,
    };
    let much = [
        ("SMP", "8,sockets=2,cores=2,threads=2"),
        ("RAM_SIZE", "6G"),
        ("WIDTH", "1920"),
        ("HEIGHT", "1080"),
        ("HV", "N"),
        ("RNG", "N"),
        ("HPET", "Y"),
        ("BALLOONING", "Y"),
        ("DISK_TYPE", "blk"),
        ("DISK_CACHE", "writeback"),
        ("DISK_DISCARD", "ignore"),
        ("SM_BIOS", "type=1,serial=7,product=A,,B,manufacturer=on"),
        ("ARGUMENTS", "-fw_cfg name=opt/a,string=b -mem-prealloc"),
        ("KEYBOARD", "de-DE"),
    ];
    let drives = "-drive file=/x.img,format=raw,if=virtio -hda /y.img -cdrom /z,,1.iso \
                  -drive file=/w.qcow2,format=qcow2,if=virtio,readonly=on";
    let mut told = String::new();
    for (words, card) in [
        (&[][..], None),
        (&[("DISK_TYPE", "nvme")], Some(card())),
        (&much, Some(passt())),
        (&[("DISK_TYPE", "usb"), ("DISPLAY", "none"), ("LANGUAGE", "fr")], None),
        (&[("ARGUMENTS", drives), ("VGA", "none")], None),
    ] {
        let mut config = filled(words, card).unwrap();
        config.die_with = Default::default();
        config.jail.user = None;
        told.push_str(&serde_json::to_string_pretty(&config).unwrap());
        told.push('\n');
    }
    assert_eq!(told, include_str!("../machines.txt"));
}

/// Windows Setup erases a disk by its number, which another disk would change.
#[test]
fn an_installation_sees_only_the_disk_that_it_erases() {
    let drives = "-hda /old.img -drive file=/x.img,if=virtio -cdrom /z.iso \
                  -drive if=none,id=u,file=/u.img -device usb-storage,drive=u";
    let plan = planned(&[("ARGUMENTS", drives)]).unwrap();
    let names = |setup_disk| {
        let [system, further] = ["/system.img", "/further.img"];
        let disks = [system, further].map(|it| Disk::new(it.into(), Format::Raw)).into();
        let parts = Parts { setup_disk, disks, ..Parts::default() };
        let config = config(&plan.input.settings, &plan.sizes, &parts).unwrap();
        let text = serde_json::to_string(&config).unwrap();
        let names = ["system.img", "z.iso", "further.img", "old.img", "x.img", "u.img"];
        names.map(|name| text.contains(name))
    };
    let empty = setup_disk::lay_out(Vec::new()).and_then(|layout| SetupDisk::write(&layout));
    assert_eq!(names(None), [true; 6]);
    assert_eq!(names(Some(empty.unwrap())), [true, true, false, false, false, false]);
}

#[test]
fn the_drive_of_a_cd_gets_its_patch() {
    let patch = Patch { offset: 45160, old: vec![1, 2], new: vec![3, 4] };
    let mut config = Config::default();
    for bus in [Bus::Usb, Bus::Ahci] {
        for patch in [Some(patch.clone()), None] {
            insert(&mut config, bus, &Cd { path: "/a.iso".into(), patch }).unwrap();
        }
    }
    let text = serde_json::to_string(&config).unwrap();
    let read = serde_json::to_value(Config::from_json(&text).unwrap()).unwrap();
    for (first, kind) in [(0, "usb-storage"), (2, "ahci-cdrom")] {
        assert_eq!(read["device"][first]["kind"], kind);
        assert_eq!(read["device"][first]["overlay"], "45160:0102:0304");
        assert_eq!(read["device"][first + 1]["overlay"], false);
    }
}

fn kinds(machine: &serde_json::Value) -> Vec<&str> {
    let devices = machine["device"].as_array().unwrap();
    devices.iter().map(|device| device["kind"].as_str().unwrap()).collect()
}

#[test]
fn the_default_machine_matches_the_reference_image() {
    let machine = made(&[]).unwrap();
    let input = ["xhci", "usb-tablet", "usb-keyboard"];
    assert_eq!(kinds(&machine)[..3], input);
    let ports = ["virtio-serial", "virtio-serial"];
    let disks = ["ahci-cdrom", "virtio-scsi", "ahci-cdrom"];
    let all = [&disks[..], &["virtio-rng"], &ports].concat();
    assert_eq!(kinds(&machine)[3..], all);
    assert_eq!(machine["device"][7]["to"], "socket:/run/agent.sock");
    assert_eq!(machine["device"][8]["to"], "clipboard");
    assert_eq!(machine["boot"], serde_json::json!(["ahci-cdrom", "virtio-scsi", "ahci-cdrom.2"]));
    assert_eq!((&machine["cpus"]["count"], &machine["memory"]["size"]), (&2.into(), &"4G".into()));
    assert_eq!(machine["device"][3]["path"], "/start.iso");
    assert_eq!(machine["device"][4]["path"], "/a,b.img");
    assert_eq!(machine["device"][5]["path"], "/a,b.iso");
    assert_eq!(machine["device"][3]["slot"], "1f.2");
    assert_eq!(machine["device"][5]["slot"], "1f.3");
    assert_eq!(machine["display"]["mode"], "1280x720");
    assert_eq!(machine["vnc"].as_array().unwrap().len(), 2);
    assert_eq!(machine["msr"], "ignore");
    assert_eq!(machine["smbios"]["uuid"], "00112233-4455-8677-8899-aabbccddeeff");
    assert_eq!(machine["tpm"]["path"], "/run/tpm.sock");
}

#[test]
fn a_sound_card_changes_no_slot_and_has_no_microphone() {
    let (silent, loud) = (made(&[]).unwrap(), made(&[("AUDIO", "Y")]).unwrap());
    let [silent, loud] = [&silent, &loud].map(|it| it["device"].as_array().unwrap());
    let (card, rest) = loud.split_last().unwrap();
    assert_eq!(rest, silent);
    assert_eq!(*card, serde_json::json!({ "kind": "hda" }));
}

#[test]
fn the_clipboard_can_be_left_out_and_changes_no_slot() {
    let (without, with) = (made(&[("CLIPBOARD", "N")]).unwrap(), made(&[]).unwrap());
    let [without, with] = [&without, &with].map(|it| it["device"].as_array().unwrap());
    let (port, rest) = with.split_last().unwrap();
    assert_eq!(rest, without);
    let expected =
        serde_json::json!({ "kind": "virtio-serial", "to": "clipboard", "slot": "1e.0" });
    assert_eq!(*port, expected);
}

#[test]
fn the_network_card_is_that_of_adapter_or_of_the_installation() {
    let card = || NetworkCard {
        backend: Network::Passt("/run/passt.sock".into()),
        mac: Mac([2, 17, 34, 51, 68, 0xab]),
        mtu: Some(1400),
        pairs: 1,
    };
    for (word, kind) in [("virtio", "virtio-net"), ("e1000e", "e1000e"), ("rtl8139", "e1000e")] {
        let machine = filled(&[("ADAPTER", word)], Some(card())).unwrap();
        let machine = serde_json::to_value(machine).unwrap();
        let at = kinds(&machine).iter().position(|it| *it == kind).unwrap();
        let found = &machine["device"][at];
        assert_eq!((&found["mac"], &found["mtu"]), (&"02:11:22:33:44:ab".into(), &1400.into()));
    }
    let settings = Settings::defaults();
    let hardware = Hardware { adapter: Some(Adapter::E1000e), ..Hardware::default() };
    let parts = Parts { hardware, ..Parts::default() };
    assert_eq!(parts.adapter(&settings), Adapter::E1000e);
    assert_eq!(Parts::default().adapter(&settings), Adapter::Virtio);
}

#[test]
fn the_machine_has_the_configured_devices() {
    for (words, kind) in [
        ("nvme", "nvme"),
        ("blk", "virtio-blk"),
        ("usb", "usb-storage"),
        ("auto", "nvme"),
        ("scsi", "virtio-scsi"),
        ("ide", "ahci-disk"),
        ("sata", "ahci-disk"),
    ] {
        assert_eq!(kinds(&made(&[("DISK_TYPE", words)]).unwrap())[4], kind, "{words}");
    }
    let machine = made(&[
        ("SMP", "8,sockets=2,cores=2,threads=2"),
        ("RAM_SIZE", "6G"),
        ("WIDTH", "1920"),
        ("HEIGHT", "1080"),
        ("HV", "N"),
        ("RNG", "N"),
        ("HPET", "Y"),
        ("BALLOONING", "Y"),
        ("DISK_CACHE", "writeback"),
        ("DISK_DISCARD", "ignore"),
        ("UUID", "12345678-9abc-def0-1234-56789abcdef0"),
        ("SM_BIOS", "type=1,serial=7"),
        ("ARGUMENTS", "-fw_cfg name=opt/a,string=b"),
        ("KEYBOARD", "de-DE"),
    ])
    .unwrap();
    assert_eq!(machine["cpus"]["threads"], 2);
    assert_eq!(machine["memory"]["size"], "6G");
    assert_eq!(machine["display"]["mode"], "1920x1080");
    assert_eq!(machine["hyperv"], "off");
    assert_eq!(machine["features"], serde_json::Value::Null);
    assert!(["hpet", "virtio-balloon"].iter().all(|kind| kinds(&machine).contains(kind)));
    assert!(!kinds(&machine).contains(&"virtio-rng"));
    assert_eq!(
        (&machine["device"][4]["direct"], &machine["device"][4]["discard"]),
        (&"off".into(), &false.into())
    );
    assert_eq!(machine["smbios"]["uuid"], "12345678-9abc-def0-1234-56789abcdef0");
    assert_eq!(machine["smbios"]["serial"], "7");
    assert_eq!(machine["fw-cfg"][0], "opt/a=b");
    assert_eq!(machine["keyboard"], "de");
    assert_eq!(made(&[("VGA", "none")]).unwrap()["display"], "none");
    // The reference image accepts sizes that the display has not.
    for (width, height, mode, memory) in [
        ("320", "200", "640x480", "64M"),
        ("16384", "16384", "8192x8192", "256M"),
        ("7680", "4320", "7680x4320", "128M"),
    ] {
        let display = &made(&[("WIDTH", width), ("HEIGHT", height)]).unwrap()["display"];
        assert_eq!(
            (display["mode"].as_str(), display["memory"].as_str()),
            (Some(mode), Some(memory))
        );
    }
    let machine = made(&[("ARGUMENTS", "-drive file=/x.img,if=ide")]).unwrap();
    assert!(kinds(&machine).contains(&"ahci-disk"));
    let machine = made(&[("ARGUMENTS", "-drive file=/x.img,format=raw -hda /y.img")]).unwrap();
    assert_eq!(kinds(&machine).iter().filter(|kind| **kind == "nvme").count(), 2);
}

#[test]
fn cd_drives_are_at_sata_beside_the_bridge_or_at_usb() {
    for (bus, kind) in [("usb", "usb-storage"), ("sata", "ahci-cdrom"), ("scsi", "ahci-cdrom")] {
        let machine = made(&[("MEDIA_TYPE", bus)]).unwrap();
        assert_eq!((kinds(&machine)[3], kinds(&machine)[5]), (kind, kind), "{bus}");
    }
    let many = "-cdrom /1 -cdrom /2 -cdrom /3 -cdrom /4 -cdrom /5";
    let machine = made(&[("ARGUMENTS", many)]).unwrap();
    let drives = machine["device"].as_array().unwrap().iter();
    let drives = drives.filter(|device| device["kind"] == "ahci-cdrom");
    let slots: Vec<_> = drives.map(|device| device["slot"].as_str().unwrap_or("")).collect();
    assert_eq!(slots, ["1f.2", "1f.3", "1f.4", "1f.5", "1f.6", "1f.7", ""]);
}

#[test]
fn processor_features_are_hidden_and_shown() {
    let said = |words: &[(&str, &str)]| made(words).unwrap()["features"].clone();
    let flags = "-hypervisor,kvm=off,+invtsc,hv_vendor_id=GenuineIntel";
    let hidden = said(&[("CPU_FLAGS", flags), ("VMX", "Y")]);
    let all = serde_json::json!({
        "nested": true, "without": "kvm:hypervisor", "hv-vendor": "GenuineIntel"
    });
    assert_eq!(hidden, all);
    assert_eq!(said(&[("VM", "N")])["without"], "hypervisor");
    assert_eq!(said(&[("CPU_FLAGS", "+svm")])["nested"], true);
    assert_eq!(said(&[("CPU_FLAGS", "-vmx"), ("VMX", "Y")]), serde_json::Value::Null);
    assert_eq!(said(&[("CPU_MODEL", "x86-64-v2-AES")])["level"], "x86-64-v2");
    assert_eq!(said(&[("CPU_MODEL", "x86-64-v4")])["level"], "x86-64-v4");
}

#[test]
fn a_display_of_virtio_has_at_most_the_largest_size_of_its_memory() {
    for (width, height, mode) in [
        ("320", "200", "640x480"),
        ("1920", "1080", "1920x1080"),
        ("16384", "16384", "3840x2160"),
        ("4096", "2160", "3840x2160"),
    ] {
        let words = [("VGA", "virtio"), ("WIDTH", width), ("HEIGHT", height)];
        let display = made(&words).unwrap()["display"].clone();
        assert_eq!(
            display,
            serde_json::json!({ "adapter": "virtio", "mode": mode }),
            "{width}x{height}"
        );
    }
}
