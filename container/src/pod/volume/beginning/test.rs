//! A pod that is killed at any moment of an installation continues with the right step, and no byte
//! of an installed disk changes.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::*;
use crate::media::testutil::{Layout, install_cd, windows_11};
use crate::plan::Plan;
use crate::settings::Boot;
use crate::state::testutil::{Esp, disk};

fn plan(words: &[(&str, &str)], root: &Path) -> anyhow::Result<Plan> {
    let words = words.iter().chain(&[("RAM_CHECK", "N")]);
    Plan::make(&words.map(|(name, text)| (name.into(), text.into())).collect(), root)
}

fn volume(root: &Path) -> Volume {
    Volume::at(&root.join("storage"), "windows")
}

fn begin(plan: &Plan, root: &Path) -> anyhow::Result<()> {
    let next = plan.next.as_ref().unwrap();
    volume(root).begin(next, &plan.input.settings, root, &Story::new())
}

/// Every file below a folder, by its path.
fn files(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut all = BTreeMap::new();
    for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
        let path = entry.path();
        match path.is_dir() {
            true => all.extend(files(&path)),
            false => drop(all.insert(path.clone(), fs::read(path).unwrap())),
        }
    }
    all
}

/// A host with a finished installation, and with a medium of another Windows.
fn installed(root: &Path) {
    fs::create_dir(root.join("storage")).unwrap();
    let put = |name: &str, bytes: &[u8]| fs::write(root.join("storage").join(name), bytes).unwrap();
    put("data.img", &disk(Esp::Files));
    put("win11x64.iso", b"old medium");
    for name in ["mode", "boot", "mac", "uuid", "ver", "vars", "tpm", "rom", "password"] {
        put(&format!("windows.{name}"), format!("{name} of old").as_bytes());
    }
    put("windows_secure.tpm", b"TPM of old");
    put("windows_plain.vars", b"plain variables of old");
    put("windows_secure.vars.old", b"variables of old");
    put("windows.mode", b"windows_plain");
    put("windows.base", b"win11x64.iso\n");
    put("notes.txt", b"mine");
    fs::write(root.join("custom.iso"), install_cd(Layout::Bridge, &windows_11(9))).unwrap();
}

#[test]
fn a_backup_that_is_killed_after_any_change_is_completed() {
    let words = [("COMPAT", "dockur")];
    let mut cuts = 0..;
    let mut count = usize::MAX;
    while let Some(cut) = cuts.next().filter(|cut| *cut <= count) {
        let root = tempfile::tempdir().unwrap();
        let root = root.path();
        installed(root);
        let storage = root.join("storage");
        let before = files(&storage);
        let first = plan(&words, root).unwrap();
        let next = first.next.as_ref().unwrap();
        assert_eq!(next.step, Step::Replace);
        let changes = volume(root).changes(next, &first.input.settings);
        count = changes.len();
        for change in &changes[..cut] {
            volume(root).make(change).unwrap();
        }
        // At every moment, all that was installed exists once, and unchanged.
        let now = files(&storage);
        let bytes = |all: &BTreeMap<PathBuf, Vec<u8>>, text: &[u8]| {
            all.values().filter(|it| it.as_slice() == text).count()
        };
        for (path, text) in &before {
            let state = ["windows.boot", "windows.base"].iter().any(|name| path.ends_with(name));
            assert!(bytes(&now, text) == 1 || state, "{path:?} after {cut}");
        }
        // The former settings start the installation as long as its disk is there.
        let former = plan(&[("VERSION", "11")], root).map(|it| it.next.unwrap().step);
        let boots = former.is_ok_and(|step| step.boots());
        assert_eq!(boots, now.contains_key(&storage.join("data.img")), "{cut}");
        begin(&plan(&words, root).unwrap(), root).unwrap();
        let after = files(&storage);
        let kept: Vec<_> = after.keys().filter(|path| path.parent() == Some(&*storage)).collect();
        let names = ["notes.txt", "windows.base", "windows.password", "windows.ver"];
        assert_eq!(kept, names.map(|name| storage.join(name)).iter().collect::<Vec<_>>(), "{cut}");
        let backup = storage.join("backups/win11x64");
        for (path, text) in before.iter().filter(|(path, _)| !kept.contains(path)) {
            let moved = backup.join(path.file_name().unwrap());
            assert_eq!(after.get(&moved), Some(text), "{path:?} after {cut}");
        }
        assert_eq!(after.get(&backup.join("windows.base")).unwrap(), b"win11x64.iso\n");
        assert!(after[&storage.join("windows.base")].starts_with(b"windows."));
        assert_eq!(plan(&words, root).unwrap().next.unwrap().step, Step::Install);
    }
    assert!(count >= 20, "{count}");
}

/// The user took COMPAT=dockur back, or put the disk back.
#[test]
fn an_interrupted_backup_is_undone_if_its_disk_starts() {
    for put_back in [false, true] {
        let mut count = usize::MAX;
        for cut in (2..).take_while(|cut| *cut <= 40) {
            let root = tempfile::tempdir().unwrap();
            let root = root.path();
            installed(root);
            let storage = root.join("storage");
            let before = files(&storage);
            let first = plan(&[("COMPAT", "dockur")], root).unwrap();
            let changes = volume(root).changes(first.next.as_ref().unwrap(), &first.input.settings);
            count = count.min(changes.len());
            // Without the last ones, by which the backup is complete.
            for change in changes.iter().take(cut).take(count - 5) {
                volume(root).make(change).unwrap();
            }
            let disk = storage.join("data.img");
            if put_back && !disk.exists() {
                fs::rename(storage.join("backups/win11x64.part/data.img"), &disk).unwrap();
            }
            if !disk.exists() {
                continue;
            }
            let again = plan(&[("VERSION", "11")], root).unwrap();
            assert!(again.next.as_ref().unwrap().step.boots(), "{cut}");
            assert_eq!(again.input.settings.machine.boot, Boot::UefiPlain, "{cut}");
            begin(&again, root).unwrap();
            assert_eq!(files(&storage), before, "{cut}");
            assert!(storage.join("backups/win11x64").is_dir());
            assert_eq!(plan(&[], root).unwrap().next.unwrap().found.backup, None);
        }
        assert!(count >= 15, "{count}");
    }
}

/// Moments of an installation, and the next step of a pod that is killed after each.
#[test]
fn a_killed_installation_continues_with_the_right_step() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    let storage = root.join("storage");
    fs::create_dir(&storage).unwrap();
    let next = || plan(&[], root).unwrap().next.unwrap();
    let is = |step: &str| assert_eq!(next().step.name(), step, "{:?}", files(&storage).keys());
    is("install");
    fs::write(storage.join("win11x64.iso"), install_cd(Layout::Bridge, &windows_11(9))).unwrap();
    is("install");
    // Twice, since the first disk was thrown away.
    for _ in 0..2 {
        let start = plan(&[], root).unwrap();
        let changes = volume(root).changes(&next(), &start.input.settings);
        assert_eq!(changes.len(), 4);
        for change in changes {
            volume(root).make(&change).unwrap();
            is("install");
        }
        let path = storage.join("data.img");
        fs::write(&path, vec![0; 2 << 20]).unwrap();
        is("install");
        fs::write(storage.join("windows.vars"), "boot entries").unwrap();
        is("install");
        for esp in [Esp::None, Esp::Unformatted, Esp::Empty] {
            fs::write(&path, disk(esp)).unwrap();
            is("install-again");
            let again = plan(&[], root).unwrap();
            for change in volume(root).changes(&next(), &again.input.settings) {
                volume(root).make(&change).unwrap();
                is("install-again");
            }
            assert!(!storage.join("windows.vars").exists());
            assert_eq!(fs::read(&path).unwrap(), disk(esp));
        }
        // Windows can boot, and has not yet.
        fs::write(&path, disk(Esp::Files)).unwrap();
        is("boot");
        begin(&plan(&[], root).unwrap(), root).unwrap();
        is("boot");
        volume(root).mark_booted().unwrap();
        is("boot");
        fs::remove_file(storage.join("win11x64.iso")).unwrap();
        is("boot");
        assert_eq!(fs::read(&path).unwrap(), disk(Esp::Files));
        assert_eq!(fs::read(storage.join("windows.base")).unwrap(), b"win11x64.iso\n");
        let version = fs::read_to_string(storage.join("windows.ver")).unwrap();
        assert_eq!(version.trim(), env!("CARGO_PKG_VERSION"));
        fs::remove_file(&path).unwrap();
        is("install");
        fs::write(storage.join("win11x64.iso"), install_cd(Layout::Bridge, &windows_11(9)))
            .unwrap();
    }
}

#[test]
fn a_change_that_fails_loses_nothing() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    installed(root);
    // A folder cannot be made here.
    fs::write(root.join("storage/backups"), "").unwrap();
    let before = files(&root.join("storage"));
    let error = begin(&plan(&[("COMPAT", "dockur")], root).unwrap(), root).unwrap_err();
    assert!(error.to_string().contains("storage/"), "{error:#}");
    assert_eq!(files(&root.join("storage")), before);
    // Further backups of the same Windows get a number.
    fs::remove_file(root.join("storage/backups")).unwrap();
    fs::create_dir_all(root.join("storage/backups/win11x64")).unwrap();
    begin(&plan(&[("COMPAT", "dockur")], root).unwrap(), root).unwrap();
    let moved = root.join("storage/backups/win11x64.2/data.img");
    assert_eq!(fs::read(moved).unwrap(), disk(Esp::Files));
}

#[test]
fn a_disk_that_changed_since_the_plan_is_not_touched() {
    let root = tempfile::tempdir().unwrap();
    let root = root.path();
    installed(root);
    let path = root.join("storage/data.img");
    let stale = plan(&[("COMPAT", "dockur")], root).unwrap();
    fs::remove_file(root.join("storage/windows.boot")).unwrap();
    let error = begin(&stale, root).unwrap_err().to_string();
    assert!(error.contains("has changed since this start began"), "{error}");
    fs::write(&path, disk(Esp::Empty)).unwrap();
    let again = plan(&[], root).unwrap();
    assert_eq!(again.next.as_ref().unwrap().step, Step::InstallAgain);
    // The machine of another pod.
    let file = File::options().read(true).write(true).open(&path).unwrap();
    lock::exclusive(&file, &path).unwrap();
    assert!(begin(&again, root).is_err());
    drop(file);
    begin(&again, root).unwrap();
    assert_eq!(fs::read(&path).unwrap(), disk(Esp::Empty));
}

#[test]
fn clear_removes_the_files_of_the_firmware_unless_a_machine_uses_its_disk() {
    let root = tempfile::tempdir().unwrap();
    let (root, storage) = (root.path(), root.path().join("storage"));
    fs::create_dir(&storage).unwrap();
    let volume = volume(root);
    let mut settings = Settings::defaults();
    settings.machine.boot = Boot::Secure;
    let left = || {
        let mut names: Vec<_> = files(&storage).into_keys().collect();
        names.retain(|path| path.extension().is_some_and(|it| it == "vars" || it == "tpm"));
        names.len()
    };
    for (tpm, rest) in [(true, 1), (false, 2)] {
        settings.machine.tpm = Some(tpm);
        for name in ["data.img", "windows_secure.vars", "windows_secure.tpm", "windows.vars"] {
            fs::write(storage.join(name), name).unwrap();
        }
        let running = locked(&storage.join("data.img")).unwrap();
        let error = volume.clear(&settings, root).unwrap_err().to_string();
        assert!(error.contains("data.img") && error.contains("in use"), "{error}");
        assert_eq!(left(), 3);
        drop(running);
        volume.clear(&settings, root).unwrap();
        assert_eq!(left(), rest, "{:?}", files(&storage).keys());
        assert!(storage.join("windows.vars").exists(), "that of another boot mode");
        // A volume without a disk.
        fs::remove_file(storage.join("data.img")).unwrap();
        volume.clear(&settings, root).unwrap();
    }
}
