//! The table of states: what is on a volume, which variables are set, the next step here, and what
//! the reference image does by its rules.

use std::fs;
use std::path::Path;

use super::testutil::{Esp, disk};
use super::*;
use crate::media::testutil::{Layout, install_cd, windows_11};
use crate::plan::Plan;
use crate::source::Source;

/// Step of the reference image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Theirs {
    Boots,
    /// Installs on a disk without data.
    Installs,
    /// Deletes the disk, and installs.
    Erases,
    BacksUp,
}
use Theirs::{BacksUp, Boots, Erases, Installs};

struct Row {
    /// Files on the volume: `NAME`, `NAME=TEXT`; `/NAME` is outside of it.
    files: &'static [&'static str],
    words: &'static [(&'static str, &'static str)],
    /// The step, and a word of its reason, of its warning or of the refusal.
    ours: (&'static str, &'static str),
    theirs: Theirs,
}

const fn row(
    files: &'static [&'static str],
    words: &'static [(&'static str, &'static str)],
    ours: (&'static str, &'static str),
    theirs: Theirs,
) -> Row {
    Row { files, words, ours, theirs }
}

const ELEVEN: &str = "windows.base=win11x64.iso";
const ISO: &str = "win11x64.iso";
const TEN: &[(&str, &str)] = &[("VERSION", "10")];
const TEN_DOCKUR: &[(&str, &str)] = &[("VERSION", "10"), ("COMPAT", "dockur")];
const DOCKUR: &[(&str, &str)] = &[("COMPAT", "dockur")];
const MANUAL: &[(&str, &str)] = &[("MANUAL", "Y")];
const BLANK: &str = "data.img=blank";
const EMPTY: &str = "data.img=empty";
const FILES: &str = "data.img=files";
const OTHER: &str = "data.img=other";
const MARK: &str = "windows.boot";
const GOES_ON: &str = "goes on there";

#[rustfmt::skip]
const ROWS: &[Row] = &[
    // Nothing is installed.
    row(&[], &[], ("install", "nothing"), Installs),
    row(&[ISO], &[], ("install", "nothing"), Installs),
    row(&["/custom.iso"], &[], ("install", "nothing"), Installs),
    row(&["/custom.iso"], MANUAL, ("install", "nothing"), Installs),
    row(&[ISO, ELEVEN, "windows.ver=6.05"], &[], ("install", "nothing"), Installs),
    row(&[ISO, ELEVEN, BLANK], &[], ("install", "nothing"), Installs),
    row(&[ISO, ELEVEN, BLANK, MARK], &[], ("install", "data.img is blank: a new"), Installs),
    row(&[MARK], &[], ("install", "its disk is not there: a new"), Installs),
    row(&["windows.base=win10x64.iso", BLANK], &[], ("install", "nothing"), Installs),
    // Finished, and the settings ask for the same.
    row(&[FILES, MARK, ELEVEN], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, ELEVEN, ISO], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, "windows.base=WIN11X64.ISO"],
        &[("VERSION", "11")], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, "windows.base=win11x64_fr.iso"],
        &[("LANGUAGE", "fr-CA")], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, "windows.base=w.zip"],
        &[("VERSION", "https://example.com/w.zip")], ("boot", "booted before"), Boots),
    row(&[FILES, MARK], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, ELEVEN, ISO, "windows.setup"],
        &[], ("boot", "interrupted before it was set up"), Boots),
    row(&[FILES, MARK], TEN_DOCKUR, ("boot", "booted before"), Boots),
    row(&[OTHER, MARK, ELEVEN], DOCKUR, ("boot", "booted before"), Boots),
    row(&[EMPTY, MARK, ELEVEN], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, "windows.base=windows.7.iso"], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, "windows.base=windows.7.iso"], TEN_DOCKUR, ("boot", "booted before"), Boots),
    row(&["data.qcow2=other", MARK, ELEVEN], &[], ("boot", "booted before"), Boots),
    // Finished, and the settings ask for another one.
    row(&[FILES, MARK, ELEVEN], TEN, ("boot", "ask for another Windows"), BacksUp),
    row(&[FILES, MARK, ELEVEN], TEN_DOCKUR, ("replace", "backups"), BacksUp),
    row(&[FILES, MARK, ELEVEN, "/custom.iso"], &[], ("boot", "ask for another Windows"), BacksUp),
    row(&[FILES, MARK, ELEVEN, "/custom.iso"], DOCKUR, ("replace", "backups"), BacksUp),
    row(&[FILES, MARK, "windows.base=windows.7.iso", "/custom.iso"],
        &[], ("boot", "ask for another"), BacksUp),
    row(&[FILES, MARK, "windows.base=windows.7.iso", "/custom.iso"],
        DOCKUR, ("replace", "backups"), BacksUp),
    row(&[FILES, MARK, ELEVEN],
        &[("LANGUAGE", "de")], ("boot", "ask for another Windows"), BacksUp),
    // The default of VERSION asks for nothing here.
    row(&[FILES, MARK, "windows.base=win10x64.iso"], &[], ("boot", "booted before"), BacksUp),
    row(&[FILES, MARK, "windows.base=win10x64.iso"], DOCKUR, ("replace", "backups"), BacksUp),
    // Other images on the volume ask for nothing.
    row(&[FILES, MARK, ELEVEN, "tools.iso"], DOCKUR, ("boot", "booted before"), Boots),
    // A mistake in what would be installed does not stop an installed disk.
    row(&[FILES, MARK, ELEVEN, "/custom.iso/"], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, ELEVEN], &[("VERSION", "gone.iso")], ("boot", "booted before"), BacksUp),
    // Unfinished: it begins again, as nothing on the disk can be booted.
    row(&[EMPTY, ELEVEN, ISO], &[], ("install-again", "interrupted"), Erases),
    row(&[EMPTY, ELEVEN], DOCKUR, ("install-again", "interrupted"), Erases),
    row(&["data.img=unformatted", ELEVEN, ISO], &[], ("install-again", "interrupted"), Erases),
    row(&["data.img=none", ELEVEN, ISO], &[], ("install-again", "interrupted"), Erases),
    row(&[EMPTY, ELEVEN, ISO], TEN, ("install-again", "interrupted"), Erases),
    row(&[EMPTY, ELEVEN, ISO], TEN_DOCKUR, ("install-again", "interrupted"), Erases),
    row(&[EMPTY, "windows.base=windows.7.iso", "/custom.iso"],
        &[], ("install-again", "interrupted"), Erases),
    row(&[EMPTY, ELEVEN, "/custom.iso"], MANUAL, ("by-hand", "MANUAL=Y"), Erases),
    // Without a mark, but a system may be there: it is never erased. The reference erases it.
    row(&[FILES, ELEVEN], &[], ("boot", GOES_ON), Erases),
    row(&[FILES, ELEVEN, ISO], DOCKUR, ("boot", GOES_ON), Erases),
    row(&[FILES, ELEVEN, "/custom.iso"], &[], ("boot", GOES_ON), Erases),
    row(&[FILES, ELEVEN, ISO], TEN, ("boot", GOES_ON), Erases),
    row(&[FILES, ELEVEN, ISO], TEN_DOCKUR, ("replace", "backups"), Erases),
    row(&[OTHER, ELEVEN, ISO], TEN_DOCKUR, ("replace", "backups"), Erases),
    row(&[FILES, "/custom.iso"], &[], ("boot", "boot loader"), Erases),
    row(&[FILES], DOCKUR, ("boot", "boot loader"), Erases),
    row(&[FILES, "/custom.iso"], MANUAL, ("by-hand", "MANUAL=Y"), Erases),
    row(&[FILES], MANUAL, ("boot", "boot loader"), Erases),
    row(&[OTHER], &[], ("boot", "unknown data"), Erases),
    row(&[OTHER, ELEVEN, ISO], &[], ("boot", "unknown data"), Erases),
    row(&["data.qcow2=other", "/custom.iso"], &[], ("boot", "unknown data"), Erases),
    row(&[EMPTY, "/custom.iso"],
        &[], ("refuse", "does not say that an installation began"), Erases),
    row(&[EMPTY, "/custom.iso"], MANUAL, ("by-hand", "MANUAL=Y"), Erases),
    // Disks that are not on the volume cannot be moved.
    row(&["/data.img=files", MARK, ELEVEN],
        TEN_DOCKUR, ("refuse", "only a disk that is a file"), BacksUp),
    row(&["/data.img=empty", ELEVEN], &[], ("refuse", "does not say"), Erases),
    row(&["/data.img=files", ELEVEN, "/custom.iso"], &[], ("boot", GOES_ON), Erases),
    // State files with other content.
    row(&[FILES, MARK, "windows.base=../x"], &[], ("boot", "not the name of a medium"), BacksUp),
    row(&[FILES, MARK, "windows.base/"], DOCKUR, ("boot", "not a file"), Boots),
    row(&[EMPTY, "windows.base=a\tb", ISO], &[], ("refuse", "not the name of a medium"), Erases),
    row(&[EMPTY, "windows.base=", ISO], &[], ("refuse", "does not say"), Erases),
    row(&[EMPTY, "windows.boot/", ELEVEN, ISO], &[], ("install-again", "interrupted"), Erases),
    // A backup that was interrupted is finished.
    row(&[FILES, MARK, ELEVEN, "backups/win11x64.part/"],
        TEN_DOCKUR, ("replace", "backups"), BacksUp),
    row(&[MARK, ELEVEN, "backups/win11x64.part/"], &[], ("replace", "backups"), Installs),
    // Its disk is still there, or there again, and the settings do not ask for another one.
    row(&[FILES, MARK, ELEVEN, "backups/win11x64.part/"], &[], ("boot", "booted before"), Boots),
    row(&[FILES, MARK, ELEVEN, "backups/win11x64.part/"], TEN, ("boot", "ask for"), BacksUp),
    row(&[FILES, ELEVEN, ISO, "backups/win11x64.part/"], &[], ("boot", GOES_ON), Erases),
    row(&[EMPTY, ELEVEN, ISO, "backups/win11x64.part/"],
        &[], ("install-again", "interrupted"), Erases),
    row(&[ELEVEN, "backups/win11x64.part/"], TEN, ("replace", "backups"), Installs),
    row(&["backups/win11x64.2.part/"], TEN, ("replace", "backups"), Installs),
    row(&[FILES, MARK, ELEVEN, "backups/win11x64/"], &[], ("boot", "booted before"), Boots),
];

fn bytes(text: &str) -> Vec<u8> {
    match text {
        "blank" => vec![0; 1 << 20],
        "none" => disk(Esp::None),
        "unformatted" => disk(Esp::Unformatted),
        "empty" => disk(Esp::Empty),
        "files" => disk(Esp::Files),
        "other" => b"QFI\xfb other".to_vec(),
        text => text.as_bytes().to_vec(),
    }
}

/// Makes a host with these files.
fn make(files: &[&str], root: &Path) {
    fs::create_dir_all(root.join("storage")).unwrap();
    for file in files {
        let (name, text) = file.split_once('=').unwrap_or((file, ""));
        let path = match name.strip_prefix('/') {
            Some(name) => root.join(name),
            None => root.join("storage").join(name),
        };
        match name {
            name if name.ends_with('/') => fs::create_dir_all(path).unwrap(),
            name if name.ends_with(".iso") => {
                fs::write(path, install_cd(Layout::Bridge, &windows_11(9))).unwrap();
            }
            _ => fs::write(path, bytes(text)).unwrap(),
        }
    }
}

fn plan(words: &[(&str, &str)], root: &Path) -> anyhow::Result<Plan> {
    let words = words.iter().chain(&[("RAM_CHECK", "N")]);
    Plan::make(&words.map(|(name, text)| (name.into(), text.into())).collect(), root)
}

/// The reference's rules: `needsInstall`, `cleanupInstall` and `cleanupStorage`.
fn theirs(root: &Path, words: &[(&str, &str)]) -> Theirs {
    let volume = root.join("storage");
    let word = |name: &str| words.iter().find(|(it, _)| *it == name).map(|(_, text)| *text);
    let input = crate::settings::environment::read(
        &words.iter().map(|(name, text)| (name.into(), text.into())).collect(),
    );
    let windows = input.unwrap().settings.windows;
    let size = |path: &Path| path.metadata().ok().filter(|it| it.is_file()).map(|it| it.len());
    let custom = size(&root.join("custom.iso")).map(name::of_custom);
    let wanted = custom.or_else(|| name::of(&windows.version, windows.language.0));
    // A file that does not exist is not custom.
    let wanted = wanted.unwrap_or_else(|| word("VERSION").unwrap_or_default().to_owned());
    let base = fs::read_to_string(volume.join("windows.base")).unwrap_or_default();
    let base = name::of_base(base.trim()).unwrap_or_else(|| base.trim().to_owned());
    let base = if base == "download.iso" { String::new() } else { base };
    let disks = [root.join("data.img"), volume.join("data.img"), volume.join("data.qcow2")];
    let written = |path: &&PathBuf| {
        fs::read(path).is_ok_and(|it| it.iter().take(100 << 10).any(|byte| *byte != 0))
    };
    let data = disks.iter().find(written).is_some();
    let complete = data && volume.join("windows.boot").is_file();
    let changed = !base.is_empty() && !base.eq_ignore_ascii_case(&wanted);
    let gone = name::is_custom(&base) && !name::is_custom(&wanted);
    match () {
        () if complete && (!changed || gone) => Boots,
        () if !data => Installs,
        () if complete => BacksUp,
        () => Erases,
    }
}

#[test]
fn each_state_has_its_step() {
    for Row { files, words, ours: (step, why), theirs: reference } in ROWS {
        let root = tempfile::tempdir().unwrap();
        make(files, root.path());
        assert_eq!(theirs(root.path(), words), *reference, "{files:?} {words:?}");
        let (made, reason) = match plan(words, root.path()) {
            Err(error) => {
                assert_eq!(Status::of(&error), Status::State, "{files:?} {words:?}: {error:#}");
                ("refuse", format!("{error:#}"))
            }
            Ok(plan) => {
                let next = plan.next.unwrap();
                let boots = matches!(plan.source, Source::Disk(_));
                assert_eq!(boots, next.step.boots(), "{files:?}");
                (next.step.name(), next.step.reason() + &plan.warnings.join(" "))
            }
        };
        assert_eq!(made, *step, "{files:?} {words:?}: {reason}");
        assert!(reason.contains(why), "{files:?} {words:?}: {reason}");
    }
}

#[test]
fn the_disk_type_and_the_boot_mode_do_not_change_the_step() {
    for bus in ["scsi", "blk", "sata", "ide", "nvme", "usb", "virtio-scsi", "virtio-blk"] {
        for mode in ["windows", "windows_plain", "windows_secure", "uefi", "secure"] {
            let words = [("DISK_TYPE", bus), ("BOOT_MODE", mode)];
            let saved = format!("windows.mode={mode}");
            for (files, step) in [
                (&[FILES, MARK, ELEVEN, &saved][..], "boot"),
                (&[EMPTY, ELEVEN, &saved, ISO], "install-again"),
                (&[BLANK, ELEVEN, &saved, ISO], "install"),
            ] {
                let root = tempfile::tempdir().unwrap();
                make(files, root.path());
                for words in [&words[..], &words[..1]] {
                    let plan = plan(words, root.path()).unwrap();
                    assert_eq!(plan.next.unwrap().step.name(), step, "{files:?} {words:?}");
                    // A new installation keeps nothing of an interrupted one: that of Windows 11
                    // has Secure Boot.
                    let recalls = step == "boot" || words.len() == 2;
                    let secure = !recalls || mode.contains("secure");
                    let boot = plan.input.settings.machine.boot;
                    assert_eq!(boot.is_secure(), secure, "{files:?} {words:?}");
                }
            }
        }
    }
}

#[test]
fn a_link_is_not_moved_to_a_backup() {
    let root = tempfile::tempdir().unwrap();
    make(&["/far.img=files", MARK, ELEVEN], root.path());
    let link = root.path().join("storage/data.img");
    std::os::unix::fs::symlink(root.path().join("far.img"), &link).unwrap();
    let error = plan(TEN_DOCKUR, root.path()).unwrap_err();
    assert!(error.to_string().contains("can be moved to a backup"), "{error}");
    assert_eq!(plan(TEN, root.path()).unwrap().next.unwrap().step.name(), "boot");
}

#[test]
fn the_reference_continues_with_what_this_image_leaves() {
    for (medium, words) in [
        ("/custom.iso", &[][..]),
        (ISO, &[]),
        ("win10x64_de.iso", &[("VERSION", "10"), ("LANGUAGE", "German")]),
        ("x.iso", &[("VERSION", "https://example.com/x.iso")]),
        // The only medium on the volume.
        ("mine.iso", &[]),
    ] {
        let root = tempfile::tempdir().unwrap();
        make(&[medium], root.path());
        let volume = root.path().join("storage");
        let next = plan(words, root.path()).unwrap().next.unwrap();
        let place = changes::Place { volume: &volume, app: "windows", disk: "data" };
        for change in changes::before(&next, &place) {
            change.make().unwrap();
        }
        assert_eq!(theirs(root.path(), words), Installs, "{medium}");
        make(&[EMPTY], root.path());
        assert_eq!(theirs(root.path(), words), Erases, "{medium}");
        assert_eq!(plan(words, root.path()).unwrap().next.unwrap().step, Step::InstallAgain);
        make(&[FILES, MARK], root.path());
        assert_eq!(theirs(root.path(), words), Boots, "{medium}");
        let reason = Step::Boot(Why::Booted);
        assert_eq!(plan(words, root.path()).unwrap().next.unwrap().step, reason, "{medium}");
    }
}
