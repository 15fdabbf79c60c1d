//! Warnings about variables and mounts without effect, and about drivers that Windows lacks.

use std::path::Path;

use screen::keys::layout;

use crate::answer::custom::Kind;
use crate::answer::zones;
use crate::disks::below;
use crate::firmware;
use crate::media::windows::Media;
use crate::medium::is_microsofts;
use crate::pod::machine;
use crate::settings::NetworkKind;
use crate::settings::environment::ParsedEnvironment;
use crate::settings::near;
use crate::settings::translate::{Adapter, Bus};
use crate::settings::value::Value as _;
use crate::shared_folder::Shares;
use crate::source::Source;

use super::drivers;
use super::unattended::Unattended;
use super::windows::{contradictions, selects};

/// Variables of an unattended installation.
const INSTALLATION: [&str; 12] = [
    "VERSION",
    "DRIVERS",
    "EDITION",
    "INSTALLER",
    "REGION",
    "KEY",
    "COMMAND",
    "LOG",
    "AUTOLOGIN",
    "DOMAIN",
    "DOMAIN_OU",
    "WORKGROUP",
];
/// Those that a finished answer file of the user leaves without effect.
const ANSWERED: [&str; 9] = [
    "EDITION",
    "INSTALLER",
    "REGION",
    "KEY",
    "LOG",
    "AUTOLOGIN",
    "DOMAIN",
    "DOMAIN_OU",
    "WORKGROUP",
];
/// Variables of the medium's download, and that of all downloads.
const DOWNLOAD: [&str; 2] = ["MIDO", "ESD"];
const CONNECTIONS: &str = "CONNECTIONS";

/// A program that the reference image runs before its machine.
const START: &str = "/run/start.sh";

/// The warnings for a plan, one sentence each.
pub(super) fn notes(
    input: &ParsedEnvironment,
    source: &Source,
    media: Option<&Media>,
    unattended: Option<&Unattended>,
    root: &Path,
) -> Vec<String> {
    let mut notes = Vec::new();
    if let Source::Medium(medium) = source {
        notes.extend(of_medium(input, medium, media, unattended));
        let installs = media.is_some() || is_microsofts(medium);
        if drivers::is_new_disk(&input.settings, root) && installs && unattended.is_none() {
            notes.extend(by_hand(input, media, root));
        }
    }
    if let Some(unattended) = unattended.filter(|it| it.is_new) {
        let bus = unattended.controller(input).ok();
        notes.extend(bus.and_then(|bus| drivers::lack(input, &unattended.missing, bus)));
        let (bundle, remote) = (unattended.bundle.as_deref(), unattended.remote.as_ref());
        notes.extend(bus.and_then(|bus| drivers::damage(bundle, remote, bus)));
    }
    if below(root, Path::new(START)).exists() {
        notes.push(format!("{START} is not run: use an init container, or a hook of the engine"));
    }
    notes.extend(Shares::of(&input.settings, root).notes);
    let (key, volume) = (&input.settings.pod.snapshot_key, &input.settings.storage.folder);
    if key.as_ref().is_some_and(|key| key.0.starts_with(volume)) {
        notes.push(
            "SNAPSHOT_KEY_FILE is on the volume, so its memory can be read where the volume can: \
             mount the key elsewhere"
                .into(),
        );
    }
    notes.extend(unknown_zone(input, root));
    let layout = input.settings.windows.keyboard.as_ref().map(|it| it.show());
    if let Some(layout) = layout.filter(|it| it.parse::<layout::Name>().is_err()) {
        notes.push(format!(
            "KEYBOARD={layout}: viewers have no such layout: the screen uses the layout of \
             the United States"
        ));
    }
    notes
}

/// Variables that the medium contradicts, or that have no effect with it.
fn of_medium(
    input: &ParsedEnvironment,
    medium: &Path,
    media: Option<&Media>,
    unattended: Option<&Unattended>,
) -> Vec<String> {
    let contradictions = media.map(|media| contradictions(input, medium, media));
    let contradictions = contradictions.unwrap_or_default();
    let version = &input.settings.windows.version;
    let is_known = |name: &str| {
        let contradicts = contradictions.iter().any(|(other, _)| *other == name);
        contradicts || name == "VERSION" && (media.is_some() || selects(version, medium))
    };
    let shown = medium.display();
    // The medium that VERSION selects was downloaded, or is in place of the download.
    let drivers = unattended.is_some_and(|it| it.remote.is_some());
    let download = match selects(version, medium) {
        true => Vec::new(),
        false if drivers => DOWNLOAD.to_vec(),
        false => [&DOWNLOAD[..], &[CONNECTIONS]].concat(),
    };
    let (names, why) = match unattended {
        None => ([&INSTALLATION, &*download].concat(), format!("{shown} is installed by hand")),
        Some(Unattended { custom: Some((path, Kind::Finished)), .. }) => (
            [&ANSWERED, &*download].concat(),
            format!("{shown} is installed with the answers of {}", path.display()),
        ),
        Some(_) => (download, format!("{shown} is not downloaded")),
    };
    let names = names.into_iter().filter(|name| input.names.contains(name));
    let names: Vec<_> = names.filter(|name| !is_known(name)).collect();
    let has = if names.len() == 1 { "has" } else { "have" };
    let unused =
        (!names.is_empty()).then(|| format!("{} {has} no effect: {why}", names.join(", ")));
    unused.into_iter().chain(contradictions.into_iter().map(|(_, sentence)| sentence)).collect()
}

/// Drivers and settings that Windows' setup lacks when a person installs.
fn by_hand(input: &ParsedEnvironment, media: Option<&Media>, root: &Path) -> Vec<String> {
    let settings = &input.settings;
    let mut notes = Vec::new();
    let drivers = machine::further_media(root, &below(root, &settings.storage.folder));
    let bus = &settings.disk.controller;
    let driver = match bus.value {
        _ if settings.disk.disable => None,
        Bus::Scsi => Some("vioscsi"),
        Bus::Blk => Some("viostor"),
        _ => None,
    };
    let mount = "mount the ISO of virtio-win as /drivers.iso";
    let network = &settings.network;
    let knows_card = network.kind == NetworkKind::None || network.adapter.value == Adapter::E1000e;
    match driver {
        _ if !drivers.is_empty() => {}
        Some(driver) if knows_card => notes.push(format!(
            "DISK_TYPE={}: Windows has no driver for this disk: {mount} and load {driver} from \
             there, or set DISK_TYPE=nvme and keep it",
            bus.show()
        )),
        Some(driver) => notes.push(format!(
            "DISK_TYPE={}: Windows has no driver for this disk, nor for the network card: \
             {mount} and load {driver} and NetKVM from there, or set DISK_TYPE=nvme and \
             ADAPTER=e1000e and keep them",
            bus.show()
        )),
        None if knows_card => {}
        None => notes.push(format!(
            "Windows has no driver for the network card: {mount} and install NetKVM from there, \
             or set ADAPTER=e1000e and keep it"
        )),
    }
    if firmware::lacks_secure_boot(input, media) {
        let what = if media.is_some() { "Windows 11's" } else { "if this is Windows 11, its" };
        notes.push(format!("{what} setup requires Secure Boot and a TPM: set MANUAL=Y"));
    }
    notes
}

/// The warning about a TZ that names no time zone.
fn unknown_zone(input: &ParsedEnvironment, root: &Path) -> Option<String> {
    let zone = input.settings.machine.zone.as_ref()?.show();
    let name = zone.strip_prefix(':').unwrap_or(&zone);
    // A rule such as CET-1CEST has a digit.
    let is_rule = || name.contains(|letter: char| letter.is_ascii_digit());
    let is_file = || root.join("usr/share/zoneinfo").join(name.trim_start_matches('/')).is_file();
    let known: Vec<_> = zones::names().collect();
    if known.contains(&name) || is_file() || is_rule() {
        return None;
    }
    let out = match near::nearest(name, &known) {
        Some(near) => format!("did you mean {near}?"),
        None => "set a name like Europe/Berlin".to_owned(),
    };
    Some(format!("TZ={zone} is unknown: {out}"))
}

#[cfg(test)]
mod test {
    use crate::media::Opened;
    use crate::media::testutil::{Layout, install_cd, windows_11};
    use crate::media::windows::analyze;
    use crate::settings::environment::read;

    use super::*;

    #[test]
    fn settings_ignored_for_a_medium_are_reported_in_one_note() {
        let root = tempfile::tempdir().unwrap();
        let of = |words: &[(&str, &str)], source: &Source| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            notes(&read(&words).unwrap(), source, None, None, root.path())
        };
        let medium = Source::Medium("/custom.iso".into());
        assert_eq!(of(&[("RAM_SIZE", "8G")], &medium), [""; 0]);
        assert_eq!(of(&[("VERSION", "my.iso")], &medium), [""; 0]);
        let words = [("EDITION", "core"), ("VERSION", "10"), ("RAM_SIZE", "8G")];
        assert_eq!(
            of(&words, &medium),
            ["VERSION, EDITION have no effect: /custom.iso is installed by hand"]
        );
        let [ten, url] = [("VERSION", "10"), ("VERSION", "https://example.com/x.iso")];
        assert_eq!(of(&[ten], &Source::Medium("/storage/win10x64_de.iso".into())), [""; 0]);
        assert_eq!(of(&[url], &Source::Medium("/storage/x.iso".into())), [""; 0]);
        assert!(of(&[ten], &Source::Medium("/storage/x.iso".into()))[0].starts_with("VERSION has"));
        // On an installed disk, variables of the installation are not reported.
        assert_eq!(of(&words, &Source::Disk("/storage/data.img".into())), [""; 0]);
        let strange = of(&[("KEYBOARD", "zz-ZZ")], &Source::Probe);
        assert!(strange[0].starts_with("KEYBOARD=zz-ZZ: "), "{strange:?}");
    }

    #[test]
    fn unused_mounts_are_reported_with_their_path() {
        let root = tempfile::tempdir().unwrap();
        let of = |words: &[(&str, &str)]| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            let disk = Source::Disk("/storage/data.img".into());
            notes(&read(&words).unwrap(), &disk, None, None, root.path())
        };
        for name in ["shared", "run", "storage"] {
            std::fs::create_dir(root.path().join(name)).unwrap();
        }
        for name in ["custom.xml", "data"] {
            std::fs::write(root.path().join(name), "").unwrap();
        }
        assert_eq!(of(&[]), [""; 0]);
        std::fs::write(root.path().join("run/start.sh"), "").unwrap();
        let all = of(&[("NETWORK", "none")]);
        assert!(all[0].starts_with("/run/start.sh is not run: "), "{all:?}");
        assert!(all[1].starts_with("/shared is not shared: the guest has no network"), "{all:?}");
        assert_eq!((all.len(), of(&[]).len()), (2, 1));
    }

    #[test]
    fn missing_windows_setup_requirements_are_reported() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        std::fs::create_dir(path("storage")).unwrap();
        let medium = Source::Medium(path("custom.iso"));
        let of = |words: &[(&str, &str)]| {
            let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
            let mut input = read(&words).unwrap();
            let media = Opened::open(&path("custom.iso")).and_then(|image| analyze(&image));
            let media = media.unwrap();
            firmware::adjust_boot_mode(&mut input, &medium, media.as_ref(), false);
            let unattended = Unattended::of(&input, &medium, media.as_ref(), root.path()).unwrap();
            notes(&input, &medium, media.as_ref(), unattended.as_ref(), root.path())
        };
        std::fs::write(path("custom.iso"), [0; 1 << 16]).unwrap();
        assert_eq!(of(&[]), [""; 0]);
        let windows = install_cd(Layout::Bridge, &windows_11(9));
        std::fs::write(path("custom.iso"), windows).unwrap();
        let moved = "drivers that this Windows takes are missing: the new disk is DISK_TYPE=nvme, \
                     and the network card is ADAPTER=e1000e: mount virtio-win's ISO as \
                     /drivers.iso before the installation, or leave DRIVERS=N out";
        let none = ("DRIVERS", "N");
        assert_eq!(of(&[none]), [moved]);
        assert_eq!(of(&[]), [""; 0], "not known yet");
        assert_eq!(of(&[("DRIVERS", "https://example.com/v.iso")]), [""; 0]);
        assert_eq!(of(&[none, ("NETWORK", "none"), ("DISK_TYPE", "sata")]), [""; 0]);
        assert_eq!(of(&[none, ("ADAPTER", "e1000e"), ("DISK_TYPE", "sata")]), [""; 0]);
        let chosen = of(&[none, ("ADAPTER", "virtio"), ("DISK_TYPE", "sata")]);
        assert!(chosen[0].contains("no network until you install NetKVM"), "{chosen:?}");
        let unused = of(&[none, ("MIDO", "Y"), ("EDITION", "home"), ("NETWORK", "none")]);
        assert!(unused[0].starts_with("MIDO has no effect: ") && unused.len() == 2, "{unused:?}");
        // The drivers are downloaded with it.
        let connections = ("CONNECTIONS", "2");
        assert_eq!(of(&[connections]), [""; 0]);
        assert!(of(&[connections, none])[0].starts_with("CONNECTIONS has no effect: "));
        let manual = ("MANUAL", "Y");
        assert!(of(&[manual, ("DISK_TYPE", "blk")])[0].contains("load viostor"));
        let nvme = [manual, ("DISK_TYPE", "nvme")];
        assert!(of(&nvme)[0].starts_with("Windows has no driver for the network card: "));
        assert_eq!(of(&[&nvme[..], &[("NETWORK", "none")]].concat()), [""; 0]);
        assert_eq!(of(&[&nvme[..], &[("ADAPTER", "e1000e")]].concat()), [""; 0]);
        let both = of(&[manual, ("BOOT_MODE", "windows"), ("DISK_TYPE", "nvme")]);
        assert_eq!(both.len(), 1);
        std::fs::write(path("drivers.iso"), "x").unwrap();
        assert_eq!(of(&[manual]), [""; 0]);
        // The setup is past that point.
        std::fs::remove_file(path("drivers.iso")).unwrap();
        std::fs::write(path("storage/data.img"), "x").unwrap();
        assert_eq!(of(&[]), [""; 0]);
    }
}
