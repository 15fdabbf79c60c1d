//! Tests of the plan: sources, media, checks and output.

use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;

use ::host::disk::{Format, qcow2};
use tempfile::TempDir;

use super::*;
use crate::media::testutil::{Layout, install_cd, windows_11};
use crate::settings::{Boot, NetworkKind};

/// Makes the plan of a host with 16 GiB of memory and these files.
fn plan(words: &[(&str, &str)], files: &[&str]) -> anyhow::Result<Plan> {
    let root = tempfile::tempdir().unwrap();
    for folder in ["proc", "storage"] {
        fs::create_dir_all(root.path().join(folder)).unwrap();
    }
    let cpus = "processor: 0\nprocessor: 1\nprocessor: 2\nprocessor: 3\n";
    fs::write(root.path().join("proc/cpuinfo"), cpus).unwrap();
    fs::write(root.path().join("proc/meminfo"), "MemAvailable: 16777216 kB\n").unwrap();
    for file in files {
        match file.strip_suffix('/') {
            Some(folder) => fs::create_dir_all(root.path().join(folder)).unwrap(),
            None if file.to_lowercase().ends_with(".iso") => {
                fs::write(root.path().join(file), install_cd(Layout::Bridge, &windows_11(9)))
                    .unwrap();
            }
            None => fs::write(root.path().join(file), "x").unwrap(),
        }
    }
    let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    Plan::make(&environment, root.path())
}

fn end(path: &Source) -> &str {
    let (Source::Disk(path) | Source::Medium(path)) = path else { return "" };
    path.file_name().unwrap().to_str().unwrap()
}

#[test]
fn an_existing_source_is_run_and_a_missing_one_is_an_error() {
    let missing = plan(&[], &[]).unwrap();
    assert!(matches!(missing.source, Source::Download(_)) && missing.download_error().is_none());
    let missing = plan(&[("VERSION", "tiny11")], &[]).unwrap();
    let error = missing.download_error().unwrap();
    assert_eq!(Status::of(&error), Status::Download);
    assert!(error.to_string().contains("Tiny 11"), "{error}");
    assert!(error.to_string().contains("/custom.iso"), "{error}");
    for (name, value) in [("MIDO", "N"), ("HTTPS_PROXY", "x://y"), ("SSL_CERT_FILE", "/gone")] {
        let plan = plan(&[(name, value)], &[]);
        let shown = format!("{name}={value}");
        assert!(text(&plan).contains(&shown), "{}", text(&plan));
        let error = plan.unwrap().download_error().unwrap();
        assert_eq!(Status::of(&error), Status::Download);
        assert!(error.to_string().contains(&shown), "{error}");
    }

    let probe = plan(&[("VERSION", "probe")], &["custom.iso"]).unwrap();
    assert_eq!(probe.source, Source::Probe);
    assert!(probe.download_error().is_none());

    for file in ["custom.iso", "Boot.ISO", "storage/CUSTOM.iso", "storage/boot.iso"] {
        let medium = plan(&[], &[file]).unwrap().source;
        assert_eq!(end(&medium), file.trim_start_matches("storage/"));
    }
    let named = [("VERSION", "my.iso")];
    assert_eq!(end(&plan(&named, &["storage/my.iso"]).unwrap().source), "my.iso");
    assert_eq!(Status::of(&plan(&named, &[]).unwrap_err()), Status::Version);
    assert_eq!(Status::of(&plan(&[], &["custom.iso/"]).unwrap_err()), Status::Iso);
}

#[test]
fn a_download_is_found_under_its_name() {
    for (version, file) in [
        ("11", "win11x64_ko.iso"),
        ("2025", "win2025-eval_ko.iso"),
        ("https://example.com/x/My%20Win?sig=1#sha256=0", "My_Win.iso"),
        ("https://example.com/virtio-win.iso", "windows-virtio-win.iso"),
        ("https://example.com/boot.iso", "windows-boot.iso"),
    ] {
        let words = [("VERSION", version), ("LANGUAGE", "Korean"), ("CONNECTIONS", "8")];
        let before = plan(&words, &[]).unwrap();
        assert!(matches!(before.source, Source::Download(_)), "{:?}", before.source);
        let after = plan(&words, &[&format!("storage/{file}")]).unwrap();
        assert_eq!(end(&after.source), file);
        for plan in [before, after] {
            assert_eq!(plan.next.unwrap().base.as_deref(), Some(file));
            let idle = |warning: &String| warning.starts_with("CONNECTIONS");
            assert!(!plan.warnings.iter().any(idle), "{:?}", plan.warnings);
        }
    }
}

#[test]
fn a_single_medium_on_the_volume_is_used() {
    let source = |words: &[(&str, &str)], files: &[&str]| {
        let files: Vec<_> = files.iter().map(|file| format!("storage/{file}")).collect();
        plan(words, &files.iter().map(String::as_str).collect::<Vec<_>>()).map(|it| it.source)
    };
    let others = ["drivers.iso", "Start.iso", "mount.iso", "virtio-win-0.1.271.iso", ".x.iso"];
    let eleven = ("VERSION", "11");
    let is = |words: &[(&str, &str)], files: &[&str], name: &str| {
        let source = source(words, &[files, &others, &["y.iso/", "z.img"]].concat()).unwrap();
        assert_eq!(end(&source), name, "{words:?} {files:?}");
    };
    is(&[eleven], &[], "");
    is(&[eleven], &["Any thing.ISO"], "Any thing.ISO");
    is(&[eleven], &["a.iso", "win11x64.iso", "win11x64_de.iso"], "win11x64.iso");
    is(&[("LANGUAGE", "de")], &["win11x64.iso", "win11x64_de.iso"], "win11x64_de.iso");
    is(&[eleven], &["a.iso", "custom.iso"], "custom.iso");
    is(&[eleven], &["a.iso", "b.iso", "data.img"], "data.img");
    let at = [("VERSION", "https://example.com/x/w.iso?sig=1")];
    is(&at, &["w.iso", "a.iso"], "w.iso");
    is(&at, &["a.iso"], "");

    let error = source(&[], &["b.iso", "a\u{1b}.iso", "c.iso", "d.iso"]).unwrap_err();
    assert_eq!(Status::of(&error), Status::Iso);
    let sentence = error.to_string();
    assert!(sentence.contains("(a\\u{1b}.iso, b.iso, c.iso…): select one"), "{sentence}");
    let error = source(&[], &["b.iso", "a.iso"]).unwrap_err().to_string();
    assert!(error.ends_with("(a.iso, b.iso): select one, as in VERSION=a.iso"), "{error}");
}

#[test]
fn a_disk_with_windows_is_never_overwritten() {
    let installed = ["storage/data.img", "storage/windows.boot", "custom.iso"];
    assert_eq!(end(&plan(&[], &installed).unwrap().source), "data.img");
    // Without the mark a system may be there all the same. A person may install beside it.
    let unmarked = ["storage/data.qcow2", "custom.iso"];
    assert_eq!(end(&plan(&[], &unmarked).unwrap().source), "data.qcow2");
    assert_eq!(end(&plan(&[("MANUAL", "Y")], &unmarked).unwrap().source), "custom.iso");
    let alone = plan(&[], &["storage/data.qcow2"]).unwrap();
    assert_eq!(end(&alone.source), "data.qcow2");
}

#[test]
fn an_invalid_medium_is_refused_before_any_file_is_created() {
    let files = ["storage/", "custom.iso"];
    for (words, file) in [(&[][..], "custom.iso"), (&[("VERSION", "a.iso")], "storage/a.iso")] {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("storage")).unwrap();
        fs::write(root.path().join(file), "<html>").unwrap();
        let words = words.iter().chain(&[("RAM_CHECK", "N")]);
        let words = words.map(|(name, text)| (name.into(), text.into())).collect();
        let error = Plan::make(&words, root.path()).unwrap_err();
        assert_eq!(Status::of(&error), Status::Iso, "{error:#}");
        let sentence = error.to_string();
        assert!(sentence.contains("iso is not an ISO image: it is a web page"), "{sentence}");
    }
    // Rescue CDs are checked, too, and all errors are reported.
    let root = tempfile::tempdir().unwrap();
    for name in files.map(|it| it.trim_end_matches('/')).into_iter().chain(["start.iso"]) {
        match name {
            "storage" => fs::create_dir(root.path().join(name)).unwrap(),
            name => fs::write(root.path().join(name), "").unwrap(),
        }
    }
    let words = [("RAM_CHECK".into(), "N".into())].into();
    let error = Plan::make(&words, root.path()).unwrap_err();
    assert_eq!(status::sentences(&error).len(), 2, "{error:#}");
}

#[test]
fn a_version_beside_an_installed_disk_is_reported() {
    let installed = ["storage/data.img", "storage/windows.boot"];
    let plan = plan(&[("VERSION", "10")], &installed);
    assert!(text(&plan).contains("data.img, whatever VERSION says\n"), "{}", text(&plan));
}

#[test]
fn a_boot_mark_without_its_disk_is_ignored() {
    let gone = ["storage/windows.boot", "custom.iso"];
    assert_eq!(end(&plan(&[], &gone).unwrap().source), "custom.iso");
    let live = ["storage/data.img", "storage/windows.boot", "custom.iso"];
    let without = plan(&[("DISK_DISABLE", "Y")], &live).unwrap();
    assert_eq!(end(&without.source), "custom.iso");
    // The installed machine keeps all that it needs.
    let next = without.next.as_ref().unwrap();
    assert!(next.step.keeps() && next.warning().is_none() && without.unattended.is_none());
    assert_eq!(without.input.settings.machine.boot, Boot::Uefi);
    let lent = ["data.raw", "storage/windows.boot", "custom.iso"];
    assert_eq!(end(&plan(&[], &lent).unwrap().source), "data.raw");
}

#[test]
fn an_installation_of_windows_11_gets_secure_boot() {
    let mode = |words: &[(&str, &str)], files: &[&str]| {
        plan(words, files).unwrap().input.settings.machine.boot
    };
    let manual = ("MANUAL", "Y");
    assert_eq!(mode(&[manual], &["custom.iso"]), Boot::Secure);
    let words = [manual, ("BOOT_MODE", "windows")];
    assert_eq!(mode(&words, &["custom.iso"]), Boot::Uefi);
    // The medium decides, not VERSION.
    assert_eq!(mode(&[manual, ("VERSION", "10")], &["custom.iso"]), Boot::Secure);
    assert_eq!(mode(&[manual], &["storage/data.img", "storage/windows.boot"]), Boot::Uefi);
    assert_eq!(mode(&[], &["custom.iso"]), Boot::Secure);
    assert_eq!(mode(&[("COMPAT", "dockur")], &["custom.iso"]), Boot::Uefi);
    // A system that may be there is started as it was.
    assert_eq!(mode(&[], &["custom.iso", "storage/data.img"]), Boot::Uefi);
}

#[test]
fn the_plan_shows_what_is_installed() {
    let installs = |words: &[(&str, &str)], files: &[&str]| {
        let plan = plan(words, files);
        let json: Value = serde_json::from_str(&json(&plan, Path::new("/none"))).unwrap();
        let line = json["installs"].as_str().map(|it| format!("\ninstalls: {it}\n"));
        let text = text(&plan);
        assert_eq!(text.contains("installs: "), line.is_some(), "{text}");
        assert!(line.is_none_or(|line| text.contains(&line)), "{text}");
        (json["installs"].clone(), json["missing"].as_str().unwrap_or_default().to_owned())
    };
    let iso = &["custom.iso"][..];
    assert_eq!(installs(&[], iso).0, "Windows 11 Pro, unattended");
    assert_eq!(installs(&[("EDITION", "home")], iso).0, "Windows 11 Home, unattended");
    assert_eq!(
        installs(&[("VERSION", "11e")], &[]).0,
        "Windows 11 Enterprise Evaluation, unattended"
    );
    assert_eq!(installs(&[("MANUAL", "Y")], iso).0, Value::Null);
    assert_eq!(installs(&[], &["storage/data.img", "storage/windows.boot"]).0, Value::Null);
    let (_, missing) = installs(&[("DISK_TYPE", "scsi"), ("DRIVERS", "N")], iso);
    assert!(missing.starts_with("DISK_TYPE=scsi: Windows Setup needs a signed driver vioscsi"));
    assert!(missing.ends_with(", or leave DRIVERS=N or DISK_TYPE out"), "{missing}");
    // Mistakes in the user's answer file are found before anything is created.
    let error = plan(&[], &["custom.iso", "custom.xml"]).unwrap_err();
    assert!(format!("{error:#}").contains("custom.xml: "), "{error:#}");
}

#[test]
fn the_plan_shows_where_windows_and_its_drivers_come_from() {
    for (words, runs, drivers) in [
        (&[][..], "Windows 11, after a download", "virtio-win-0.1.271.iso, after a download"),
        (
            &[("EDITION", "home"), ("DRIVERS", "https://me:hush@a.example/v.iso?hush")],
            "Windows 11, after a download",
            "https://***@a.example/v.iso?***, after a download",
        ),
        (&[("DRIVERS", "N")], "Windows 11, after a download", "none"),
    ] {
        let plan = plan(words, &[]);
        let text = text(&plan);
        let lines = [format!("\nruns: {runs}\n"), format!("\ndrivers: {drivers}\n")];
        assert!(lines.iter().all(|line| text.contains(line)), "{text}");
        let json: Value = serde_json::from_str(&json(&plan, Path::new("/none"))).unwrap();
        assert_eq!((&json["source"]["is"], &json["drivers"]), (&runs.into(), &drivers.into()));
    }
}

#[test]
fn impossible_machines_are_refused_before_files_are_created() {
    for (words, status) in
        [(("UUID", "1"), Status::Usage), (("DEVICE3", "/dev/null"), Status::Missing)]
    {
        let error = plan(&[words], &["custom.iso"]).unwrap_err();
        assert_eq!(Status::of(&error), status, "{words:?}: {error:#}");
        assert!(error.to_string().starts_with(words.0), "{error:#}");
    }
}

#[test]
fn shows_changed_settings_and_no_secret() {
    let words = [
        ("PASSWORD", "hush"),
        ("KEY", "HUSHH-11111-11111-11111-11111"),
        ("CPU_CORES", "3"),
        ("RAM_SIZE", "8192M"),
        ("NETWORK", "Y"),
        ("GPU", "Y"),
        ("VERSION", "probe"),
    ];
    let plan = plan(&words, &[]);
    let shown = text(&plan);
    assert_eq!(
        shown,
        "VERSION=probe\nKEY=***\nPASSWORD=***\nCPU_CORES=3\nRAM_SIZE=8G\nmachine: 3 \
         processors, 8G of memory, no disk\nruns: the probe\nwarning: GPU has no effect: a \
         graphics card of the host cannot be passed through: leave it out\n"
    );
    let json: Value = serde_json::from_str(&json(&plan, Path::new("/none"))).unwrap();
    assert_eq!(json["settings"]["PASSWORD"], "***");
    assert_eq!(json["memory"], 8_u64 << 30);
    assert!(!format!("{json} {plan:?}").to_lowercase().contains("hush"));
}

#[test]
fn the_windows_of_a_medium_is_shown() {
    let edition = plan(&[("EDITION", "home")], &["custom.iso"]).unwrap();
    let line = "medium: Windows 11 26100.1742, x64, ko-KR: Windows 11 Home, Windows 11 Pro\n";
    assert!(text(&Ok(edition)).contains(line));
    let plan = plan(&[], &["custom.iso"]);
    let json: Value = serde_json::from_str(&json(&plan, Path::new("/none"))).unwrap();
    let medium = &json["medium"];
    assert_eq!(medium["product"], "Windows 11");
    assert_eq!((&medium["build"], &medium["language"]), (&"26100.1742".into(), &"ko-KR".into()));
    assert_eq!(medium["editions"][1]["id"], "Professional");
    assert_eq!((&medium["server"], &medium["evaluation"]), (&false.into(), &false.into()));
}

#[test]
fn json_output_includes_the_error_status() {
    let wrong = plan(&[("CPU_CORES", "x")], &[]);
    let json: Value = serde_json::from_str(&json(&wrong, Path::new("/none"))).unwrap();
    assert_eq!(json["status"], 15);
    assert!(json["error"].as_str().unwrap().starts_with("CPU_CORES=x: "));
    assert_eq!(text(&wrong), "");
}

/// The header of a snapshot with memory.
fn memory_header() -> Value {
    json!({ "format": 1, "vmm": "1", "bytes": 0, "crc32": 0, "then": "quit", "processors": 3,
        "memory": 2_u64 << 30 })
}

/// A host whose folder `base` is a base with memory.
fn host_with_memory() -> TempDir {
    let root = tempfile::tempdir().unwrap();
    let at = |name: &str| root.path().join(name);
    for folder in ["proc", "storage", "base/memory"] {
        fs::create_dir_all(at(folder)).unwrap();
    }
    fs::write(at("proc/meminfo"), "MemAvailable: 16777216 kB\n").unwrap();
    fs::write(at("base/data.img"), [7; 4096]).unwrap();
    fs::write(at("base/windows.address"), "10.9.8.7/24 10.9.8.1\n").unwrap();
    fs::write(at("base/memory/machine.json"), format!("{}\n", memory_header())).unwrap();
    root
}

fn plan_of_clone(root: &TempDir, more: &[(&str, &str)]) -> anyhow::Result<Plan> {
    let words = [&[("BASE", "/base")], more].concat();
    let environment = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
    Plan::make(&environment, root.path())
}

#[test]
fn a_clone_goes_on_once_from_the_memory_of_its_base() {
    let root = host_with_memory();
    let at = |name: &str| root.path().join(name);
    let plan = |more: &[(&str, &str)]| plan_of_clone(&root, more);
    let first = plan(&[]).unwrap();
    assert_eq!(first.cloned(), Some(&*at("base/memory")));
    let network = &first.input.settings.network;
    assert_eq!((first.sizes.processors, first.sizes.memory, first.sizes.disk), (3, 2 << 30, 4096));
    assert_eq!(network.kind, NetworkKind::User);
    assert_eq!(network.kept.map(|it| it.to_string()).as_deref(), Some("10.9.8.7/24 10.9.8.1"));
    assert!(first.warnings.iter().any(|it| it.starts_with("the machine of BASE continues with")));
    for (name, value) in [("DHCP", "Y"), ("CLEAR", "Y"), ("NETWORK", "nat")] {
        let error = plan(&[(name, value)]).unwrap_err();
        assert_eq!(Status::of(&error), Status::State, "{error}");
        let said = error.to_string();
        assert!(said.contains(&format!("{name}={value}")) && said.contains("BASE="), "{said}");
    }
    // The disk itself, without the memory.
    assert_eq!(plan(&[("BASE", "/base/data.img")]).unwrap().cloned(), None);
    // A disk that nothing was written to, one that its guest has used, and writes that are lost.
    let mut options = File::options();
    let options = options.read(true).write(true).create_new(true);
    let file = options.open(at("storage/data.qcow2")).unwrap();
    qcow2::create_over(&file, 1 << 20, Path::new("/base/data.img"), Format::Raw).unwrap();
    assert!(plan(&[]).unwrap().cloned().is_some());
    file.write_all_at(&[1], 3 << 16).unwrap();
    assert_eq!(plan(&[]).unwrap().cloned(), None);
    let error = plan(&[("EPHEMERAL", "Y")]).unwrap_err();
    assert_eq!(Status::of(&error), Status::Disk, "{error}");
    fs::remove_file(at("storage/data.qcow2")).unwrap();
    assert!(plan(&[("EPHEMERAL", "Y")]).unwrap().cloned().is_some());
    fs::remove_file(at("base/windows.address")).unwrap();
    let error = plan(&[]).unwrap_err().to_string();
    assert!(error.contains("NETWORK=user") && error.contains("IP"), "{error}");
    assert!(plan(&[("IP", "10.1.1.2")]).unwrap().cloned().is_some());
    fs::write(at("base/windows.address"), "10.9.8.7/24 10.9.8.1\n").unwrap();
    fs::write(at("base/memory/machine.json"), "{}").unwrap();
    let error = plan(&[]).unwrap_err().to_string();
    assert!(error.contains("the first line is damaged"), "{error}");
}

#[test]
fn encrypted_memory_needs_its_key_and_other_memory_has_none() {
    let root = host_with_memory();
    let at = |name: &str| root.path().join(name);
    let plan = |more: &[(&str, &str)]| plan_of_clone(&root, more);
    let with_key = [("SNAPSHOT_KEY", "/key")];
    let error = plan(&with_key).unwrap_err();
    let said = error.to_string();
    assert!(Status::of(&error) == Status::Usage && said.contains("mount the key there"), "{said}");
    fs::write(at("key"), "a long passphrase").unwrap();
    let error = plan(&with_key).unwrap_err().to_string();
    assert!(error.contains("not encrypted, so others may have changed it"), "{error}");
    let mut encrypted = memory_header();
    encrypted["format"] = json!(2);
    encrypted["encryption"] = json!({ "salt": "00", "tag": "00" });
    fs::write(at("base/memory/machine.json"), format!("{encrypted}\n")).unwrap();
    let error = plan(&[]).unwrap_err().to_string();
    assert!(error.contains("set SNAPSHOT_KEY_FILE") && error.contains("BASE="), "{error}");
    let elsewhere = plan(&with_key).unwrap();
    assert!(elsewhere.cloned().is_some());
    fs::copy(at("key"), at("storage/key")).unwrap();
    let there = plan(&[("SNAPSHOT_KEY_FILE", "/storage/key")]).unwrap();
    let warns = |plan: &Plan| plan.warnings.iter().any(|it| it.contains("is on the volume"));
    assert_eq!([warns(&elsewhere), warns(&there)], [false, true]);
}
