//! The set-up disk of whole environments, as mtools read it, and its life in the machine.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixListener;
use std::thread;

use tempfile::TempDir;

use super::super::machine::{self, Parts};
use super::*;
use crate::disks::Disk;
use crate::media::testutil::{Layout, cd, image, install_cd, windows_11};
use crate::settings::Format;
use crate::setup_disk::testutil::{checked, copied};
use crate::status::Status;

/// Files of virtio-win, as far as tests need them.
const DRIVERS: [&str; 9] = [
    "viostor/w11/amd64/viostor.inf",
    "viostor/w11/amd64/viostor.sys",
    "viostor/w11/amd64/viostor.pdb",
    "vioscsi/w11/amd64/vioscsi.inf",
    "vioscsi/w11/ARM64/vioscsi.inf",
    "NetKVM/w11/amd64/netkvm.inf",
    "viogpudo/w11/amd64/viogpudo.inf",
    "guest-agent/qemu-ga-x86_64.msi",
    "vioscsi/2k25/amd64/vioscsi.inf",
];
/// Paths of the drivers for Windows 11 on the set-up disk.
const COPIED: [&str; 6] = [
    "$OEM$/$$/Drivers/guest-agent/qemu-ga-x86_64.msi",
    "$OEM$/$$/Drivers/viogpudo/viogpudo.inf",
    "$WinPEDriver$/NetKVM/netkvm.inf",
    "$WinPEDriver$/vioscsi/vioscsi.inf",
    "$WinPEDriver$/viostor/viostor.inf",
    "$WinPEDriver$/viostor/viostor.sys",
];
const COMPLETE: [&str; 3] = [
    "$OEM$/$$/Setup/Scripts/ErrorHandler.cmd",
    "$OEM$/$$/Setup/Scripts/RunInstall.cmd",
    "$OEM$/$$/Setup/Scripts/SetupComplete.cmd",
];
const ANSWERS: &str = "Autounattend.xml";

/// A host with an ISO of Windows, and without drivers.
struct World(TempDir);

impl World {
    fn with(editions: &[String]) -> Self {
        let world = Self(tempfile::tempdir().unwrap());
        world.add("custom.iso", &install_cd(Layout::Bridge, editions));
        world.add("proc/meminfo", b"MemAvailable: 16777216 kB\n");
        world.add("proc/cpuinfo", &b"processor: 0\n".repeat(4));
        world.add("storage/x", b"");
        world
    }

    /// Windows 11 with drivers.
    fn complete() -> Self {
        let world = Self::with(&windows_11(9));
        let content = |path: &&'static str| (*path, path.as_bytes().to_vec());
        let files: Vec<_> = DRIVERS.iter().map(content).collect();
        world.add("drivers.iso", &cd(Layout::Bridge, &files));
        world
    }

    fn add(&self, path: &str, bytes: &[u8]) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }

    fn plan(&self, words: &[(&str, &str)]) -> anyhow::Result<Plan> {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        Plan::make(&words, self.0.path())
    }

    /// The controller of the disks, and the files of the set-up disk.
    fn made(&self, words: &[(&str, &str)]) -> anyhow::Result<(Bus, BTreeMap<String, String>)> {
        let plan = self.plan(words)?;
        let bundle = plan.unattended.as_ref().and_then(|it| it.bundle.clone());
        let installation = Installation::of(&plan, bundle.as_deref())?.unwrap();
        let bus = installation.bus;
        let password = match plan.input.names.contains("PASSWORD") {
            true => plan.input.settings.account.password.clone(),
            false => Secret("Made4you".to_owned()),
        };
        let disk = installation.disk(&password, self.0.path(), &Story::new())?;
        let (_folder, image) = checked(disk);
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Ok((bus, copied(&image).into_iter().map(|(path, bytes)| (path, text(bytes))).collect()))
    }
}

fn has(text: &str, words: &[&str]) {
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn windows_11_gets_answers_drivers_and_the_users_files() {
    let world = World::complete();
    world.add("oem/Install.bat", b"echo 1\n");
    world.add("oem/more/a.txt", b"a\n");
    let words = [
        ("VERSION", "11"),
        ("LANGUAGE", "Korean"),
        ("REGION", "ko-KR"),
        ("KEYBOARD", "ko-KR"),
        ("USERNAME", "bill"),
        ("PASSWORD", "<gates>"),
        ("COMMAND", "echo 2"),
    ];
    let (bus, files) = world.made(&words).unwrap();
    let own = ["$OEM$/$1/OEM/install.bat", "$OEM$/$1/OEM/more/a.txt", ANSWERS];
    let mut wanted = [&own[..], &COMPLETE, &COPIED].concat();
    wanted.sort_unstable();
    assert_eq!(files.keys().collect::<Vec<_>>(), wanted);
    assert_eq!(bus, Bus::Scsi);
    assert_eq!(files[own[0]], "echo 1\r\necho 2\r\n");
    assert_eq!(files[own[1]], "a\r\n");
    assert_eq!(files["$WinPEDriver$/vioscsi/vioscsi.inf"], "vioscsi/w11/amd64/vioscsi.inf");
    let answers = &files[ANSWERS];
    let index = "<Key>/IMAGE/INDEX</Key><Value>2</Value>";
    let flat: String = answers.lines().map(str::trim).collect();
    has(&flat, &[index, "<Key>VK7JG-", "<UILanguage>ko-KR</UILanguage>", "<DiskID>1</DiskID>"]);
    has(&flat, &["<Username>bill</Username>", "<UseConfigurationSet>true</UseConfigurationSet>"]);
    // `transom answers` shows the same.
    let words = words.map(|(name, text)| (name.into(), text.into())).into();
    let shown = crate::plan::answers::file(&words, world.0.path(), ANSWERS, Secrets::Shown);
    assert_eq!(shown.unwrap().0, answers.as_bytes());
}

#[test]
fn the_users_answer_file_takes_the_place_of_ours() {
    let world = World::complete();
    let custom = "<unattend><settings pass=\"windowsPE\"><component \
                  name=\"Microsoft-Windows-Setup\"><DiskID>0</DiskID></component></settings>\
                  </unattend>";
    world.add("storage/custom.xml", custom.as_bytes());
    let (_, files) = world.made(&[("COMMAND", "echo 2")]).unwrap();
    let mut wanted = [&["$OEM$/$1/OEM/install.bat", ANSWERS][..], &COPIED].concat();
    wanted.sort_unstable();
    assert_eq!(files.keys().collect::<Vec<_>>(), wanted);
    has(&files[ANSWERS], &["<DiskID>1</DiskID><UseConfigurationSet>true</UseConfigurationSet>"]);
    let plan = world.plan(&[("KEY", "VK7JG-NPHTM-C97JM-9MPGT-3V66T")]).unwrap();
    assert!(!plan.unattended.as_ref().unwrap().makes_password(&plan.input));
    let unused = "KEY has no effect: ";
    assert!(plan.warnings.iter().any(|it| it.starts_with(unused)), "{:?}", plan.warnings);
    world.add("custom.xml/x", b"");
    let error = world.plan(&[]).unwrap_err().to_string();
    assert!(error.contains("custom.xml is a folder: "), "{error}");
}

#[test]
fn a_server_without_desktop_comes_from_its_evaluation_medium() {
    let edition = |index, core, kind| {
        let name = format!("Windows Server 2025 Standard Evaluation{core}");
        image(index, &name, "ServerStandardEval", kind, 9)
    };
    let world = World::with(&[edition(1, "", "Server Core"), edition(2, " (Desktop)", "Server")]);
    let (bus, files) = world.made(&[("VERSION", "2025"), ("EDITION", "core")]).unwrap();
    let mut wanted = [&[ANSWERS][..], &COMPLETE].concat();
    wanted.sort_unstable();
    assert_eq!(files.keys().collect::<Vec<_>>(), wanted);
    assert_eq!(bus, Bus::Nvme);
    let flat: String = files[ANSWERS].lines().map(str::trim).collect();
    has(&flat, &["<Key>/IMAGE/INDEX</Key><Value>1</Value>", "<DiskID>0</DiskID>"]);
    assert!(!flat.contains("<ProductKey>"), "{flat}");
}

#[test]
fn the_script_is_at_the_root_and_a_person_gets_nothing() {
    let world = World::complete();
    let (_, files) = world.made(&[("INSTALLER", "script")]).unwrap();
    assert_eq!(files.len(), COPIED.len() + COMPLETE.len() + 2);
    has(&files["transom.cmd"], &["dism.exe /Apply-Image", "/Index:2 ", "select disk 1"]);
    let manual = world.plan(&[("MANUAL", "Y")]).unwrap();
    assert!(Installation::of(&manual, None).unwrap().is_none());
}

#[test]
fn each_controller_needs_its_driver() {
    let [complete, bare] = [World::complete(), World::with(&windows_11(9))];
    for (word, with, without) in [
        ("", Bus::Scsi, Some(Bus::Nvme)),
        ("scsi", Bus::Scsi, None),
        ("blk", Bus::Blk, None),
        ("ide", Bus::Ahci, Some(Bus::Ahci)),
        ("nvme", Bus::Nvme, Some(Bus::Nvme)),
        ("auto", Bus::Auto, Some(Bus::Auto)),
    ] {
        let words = [("DISK_TYPE", word)];
        let words = if word.is_empty() { &[] } else { &words[..] };
        let (bus, files) = complete.made(words).unwrap();
        assert_eq!(bus, with, "{word}");
        let number = u32::from(matches!(bus, Bus::Scsi | Bus::Blk));
        has(&files[ANSWERS], &[&format!("<DiskID>{number}</DiskID>")]);
        match (bare.made(words), without) {
            (Ok((bus, files)), Some(wanted)) => {
                assert_eq!(bus, wanted, "{word}");
                has(&files[ANSWERS], &["<DiskID>0</DiskID>"]);
            }
            (Err(error), None) => {
                assert!(bare.plan(words).unwrap().drivers_error().is_none(), "before a download");
                let words = [words, &[("DRIVERS", "N")]].concat();
                let plan = bare.plan(&words).unwrap().drivers_error().unwrap().to_string();
                let said = error.to_string().replace("leave", "leave DRIVERS=N or");
                assert_eq!((Status::of(&error), said), (Status::Disk, plan));
                has(&error.to_string(), &[&format!("DISK_TYPE={word}: "), "/drivers.iso"]);
            }
            (made, _) => panic!("{word}: {made:?}"),
        }
    }
    // Before a download.
    let error = complete.plan(&[("DISK_TYPE", "usb")]).unwrap().drivers_error().unwrap();
    assert_eq!(Status::of(&error), Status::Disk);
    has(&error.to_string(), &["DISK_TYPE=usb: Windows Setup installs to no USB disk"]);
}

#[test]
fn an_installed_windows_keeps_its_controller_and_card() {
    let world = World::with(&windows_11(9));
    let volume = world.0.path().join("storage");
    let of = |words: &[(&str, &str)]| {
        let plan = world.plan(words).unwrap();
        let settings = &plan.input.settings;
        (settings.disk.controller.value, settings.network.adapter.value)
    };
    let keep = |words: &[(&str, &str)]| {
        let mut plan = world.plan(words).unwrap();
        plan.input.settings.storage.folder.clone_from(&volume);
        let kept = Volume::open(&plan.input.settings, &plan.source).unwrap();
        let bundle = plan.unattended.as_ref().unwrap().bundle.clone();
        let installation = Installation::of(&plan, bundle.as_deref()).unwrap().unwrap();
        installation.keep_hardware(&kept).unwrap();
    };
    keep(&[]);
    let kept = |name: &str| fs::read_to_string(volume.join(name)).ok();
    assert_eq!(kept("windows.type").unwrap(), "nvme\n");
    assert_eq!(kept("windows.adapter").unwrap(), "e1000e\n");
    // Without a disk, it is decided again.
    assert_eq!(of(&[]), (Bus::Scsi, Adapter::Virtio));
    world.add("storage/data.img", b"written");
    assert_eq!(of(&[]), (Bus::Nvme, Adapter::E1000e));
    assert_eq!(of(&[("DISK_TYPE", "blk")]), (Bus::Blk, Adapter::E1000e));
    assert_eq!(of(&[("ADAPTER", "virtio")]), (Bus::Nvme, Adapter::Virtio));
    // Without it, the next installation has all drivers.
    fs::remove_file(volume.join("data.img")).unwrap();
    world.add("drivers.iso", &fs::read(World::complete().0.path().join("drivers.iso")).unwrap());
    keep(&[]);
    assert_eq!((kept("windows.type"), kept("windows.adapter")), (None, None));
    fs::remove_file(world.0.path().join("drivers.iso")).unwrap();
    keep(&[("ADAPTER", "virtio")]);
    assert_eq!(kept("windows.adapter"), None, "the user's choice");
}

#[test]
fn the_machine_has_the_controller_of_the_installation() {
    let plan = World::with(&windows_11(9)).plan(&[]).unwrap();
    let parts = Parts {
        firmware: Some(("/code".into(), "/vars".into())),
        disks: vec![Disk::new("/a.img".into(), Format::Raw)],
        hardware: Hardware { controller: Some(Bus::Nvme), ..Hardware::default() },
        ..Parts::default()
    };
    let config = machine::config(&plan.input.settings, &plan.sizes, &parts).unwrap();
    let machine = serde_json::to_value(&config).unwrap();
    assert_eq!(machine["boot"], serde_json::json!(["nvme"]));
}

#[test]
fn drivers_are_found_where_they_are_kept() {
    let world = World::with(&windows_11(9));
    let drivers = fs::read(World::complete().0.path().join("drivers.iso")).unwrap();
    let bundle = |words: &[(&str, &str)]| {
        let found = world.plan(words).unwrap().unattended.unwrap().bundle?;
        found.strip_prefix(world.0.path()).ok().map(|path| path.display().to_string())
    };
    assert_eq!(bundle(&[]), None);
    for name in [
        "storage/virtio-win.iso",
        "storage/virtio-win-0.1.9.iso",
        "storage/Virtio-Win-0.1.266-1.iso",
        "storage/virtio-win-0.1.271.iso",
        "storage/drivers.iso",
        "drivers.iso",
    ] {
        world.add(name, &drivers);
        assert_eq!(bundle(&[]).as_deref(), Some(name));
    }
    world.add("srv/v.iso", &drivers);
    assert_eq!(bundle(&[("DRIVERS", "/srv/v.iso")]).as_deref(), Some("srv/v.iso"));
    // Before its download, nothing is known to be missing.
    let words = [("DRIVERS", "https://example.com/v.iso"), ("DISK_TYPE", "scsi")];
    let plan = world.plan(&words).unwrap();
    let unattended = plan.unattended.as_ref().unwrap();
    let remote = unattended.remote.as_ref().map(|remote| &*remote.url);
    assert_eq!((&unattended.bundle, remote), (&None, Some(words[0].1)));
    assert!(plan.drivers_error().is_none());
    world.add("storage/virtio-win-v.iso", &drivers);
    assert_eq!(bundle(&words).as_deref(), Some("storage/virtio-win-v.iso"));
    let error = world.plan(&[("DRIVERS", "/none.iso")]).unwrap_err();
    assert_eq!(Status::of(&error), Status::Missing);
    world.add("srv/v.iso", b"<html>");
    let error = format!("{:#}", world.plan(&[("DRIVERS", "/srv/v.iso")]).unwrap_err());
    assert!(error.contains("v.iso: it is not an ISO image"), "{error}");
}

fn empty() -> SetupDisk {
    setup_disk::lay_out(Vec::new()).and_then(|layout| SetupDisk::write(&layout)).unwrap()
}

#[test]
fn drivers_that_damage_data_are_avoided() {
    let world = World::with(&windows_11(9));
    let mut drivers = fs::read(World::complete().0.path().join("drivers.iso")).unwrap();
    let blk = ("DISK_TYPE", "blk");
    let warned = |words: &[(&str, &str)]| {
        let plan = world.plan(words).unwrap();
        plan.warnings.iter().any(|it| it.contains("damages the page file of Windows: take"))
    };
    let url = ("DRIVERS", "https://me:pw@example.com/virtio-win-0.1.285.iso?sig=1");
    assert!(warned(&[blk, url]) && !warned(&[url]));
    world.add("storage/virtio-win-0.1.285.iso", &drivers);
    assert!(warned(&[blk]) && !warned(&[]), "it is the only one");
    world.add("storage/virtio-win-0.1.271.iso", &drivers);
    assert!(!warned(&[blk]), "the older one is better");
    // Under another name it is known by its label.
    world.add("drivers.iso", &drivers);
    assert!(!warned(&[blk]));
    drivers[16 * 2048 + 40..][..32].copy_from_slice(b"virtio-win-0.1.285              ");
    world.add("drivers.iso", &drivers);
    assert!(warned(&[blk]) && !warned(&[("DISK_TYPE", "nvme")]));
}

#[test]
fn the_disk_comes_after_the_media_and_does_not_boot() {
    for (bus, medium, name) in
        [("ide", "ahci-cdrom", "usb-storage"), ("usb", "usb-storage", "usb-storage.2")]
    {
        let environment = [("VERSION", "probe"), ("MEDIA_TYPE", bus)];
        let environment = environment.map(|(name, text)| (name.into(), text.into())).into();
        let plan = Plan::make(&environment, Path::new("/")).unwrap();
        let parts = Parts {
            firmware: Some(("/code".into(), "/vars".into())),
            media: vec![PathBuf::from("/a.iso").into()],
            setup_disk: Some(empty()),
            ..Parts::default()
        };
        let config = machine::config(&plan.input.settings, &plan.sizes, &parts).unwrap();
        let path = parts.setup_disk.unwrap().path();
        assert_eq!(machine::name_of(&config, &path).as_deref(), Some(name));
        assert_eq!(machine::name_of(&config, Path::new("/none")), None);
        let machine = serde_json::to_value(&config).unwrap();
        assert_eq!(machine["boot"], serde_json::json!([medium]));
        let mut disks = machine["device"].as_array().unwrap().iter();
        assert!(disks.any(|it| it["kind"] == medium && it["path"] == "/a.iso"), "{machine}");
        let disk = disks.find(|it| it["kind"] == "usb-storage").unwrap();
        assert!(disk["removable"] == true && disk["readonly"] == true, "{disk}");
    }
}

/// Unplugs a disk from a machine that gives this answer. Returns the question and the bytes
/// that the disk then has.
async fn unplugged(answer: &'static str) -> (String, u64) {
    let folder = tempfile::tempdir().unwrap();
    let control = folder.path().join("vmm.sock");
    let listener = UnixListener::bind(&control).unwrap();
    let machine = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut question = String::new();
        BufReader::new(&stream).read_line(&mut question).unwrap();
        stream.write_all(answer.as_bytes()).unwrap();
        question
    });
    let disk = empty();
    let inherited = File::open(disk.path()).unwrap();
    let memory = disk.close();
    PluggedDisk { memory, name: "usb-storage.2".into(), control }.unplug().await;
    (machine.join().unwrap(), inherited.metadata().unwrap().len())
}

#[test]
fn a_disk_that_does_not_fit_into_memory_is_reported_before_it_is_made() {
    let of = |disk: u64, machine: u64, group| {
        let load = MemoryLoad { free: 8 << 30, group, ..MemoryLoad::default() };
        let story = Story::new();
        let checked = check_memory(disk << 30, machine << 30, &load, &story);
        let lines = story.lines(0).0;
        (checked.map_err(|it| it.to_string()), lines.first().map(|it| it.text.clone()))
    };
    assert_eq!(of(1, 4, None), (Ok(()), None));
    let (checked, warning) = of(2, 4, Some((6 << 30, 5 << 30)));
    assert!(checked.is_ok() && warning.unwrap().contains("takes 2G of memory until"));
    let error = of(2, 4, Some((6 << 30, 1 << 30))).0.unwrap_err();
    assert!(error.contains("and 1G are free: raise the container's memory limit"), "{error}");
}

#[tokio::test]
async fn its_memory_is_free_when_the_machine_has_released_it() {
    let (question, length) = unplugged("{\"ok\":{}}\n").await;
    assert!(question.contains("detach") && question.contains("usb-storage.2"), "{question}");
    assert_eq!(length, 0);
    let (_, length) = unplugged("{\"error\":\"no\"}\n").await;
    assert!(length > 0);
}
