//! Snapshots of volumes of a machine that is off, and of one that a fake pod holds.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{
    FileExt as _, MetadataExt as _, PermissionsExt as _, chown, lchown, symlink,
};
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};

use super::create::{self, Held, Pod, Running, Wish, create};
use super::manifest::{Kind, MANIFEST};
use super::restore::{GENERATION, journal, restore};
use super::*;
use crate::status::Status;

/// Host with the volumes /storage and /storage2.
struct Host {
    root: tempfile::TempDir,
    settings: Settings,
}

impl Host {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut settings = Settings::default();
        settings.storage.folder = "/storage".into();
        settings.storage.name.0 = "data".into();
        settings.pod.app.0 = "Windows".into();
        for folder in ["storage", "storage2"] {
            fs::create_dir(root.path().join(folder)).unwrap();
        }
        let host = Self { root, settings };
        host.fill("old");
        host
    }

    fn shelf(&self) -> Shelf<'_> {
        Shelf::new(&self.settings, self.root.path())
    }

    fn write(&self, path: &str, text: &str) {
        fs::write(self.root.path().join(path), text).unwrap();
    }

    /// Gives all files of the machine this content.
    fn fill(&self, text: &str) {
        for path in ["storage/data.img", "storage2/data2.img", "storage/windows.vars"] {
            self.write(path, &format!("{text} {path}"));
        }
        self.write("storage/windows.base", text);
    }

    /// Another machine than that of `fill`: a file is there, and one is not.
    fn change(&self) {
        self.fill("new");
        self.write("storage/windows.boot", "");
        fs::remove_file(self.root.path().join("storage/windows.vars")).unwrap();
    }

    /// All files outside of the snapshots, except the VM Generation ID.
    fn files(&self) -> BTreeMap<String, String> {
        let mut all = BTreeMap::new();
        for folder in ["storage", "storage2"] {
            for entry in fs::read_dir(self.root.path().join(folder)).unwrap() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                if path.is_file() && !name.ends_with(GENERATION) {
                    all.insert(format!("{folder}/{name}"), fs::read_to_string(&path).unwrap());
                }
            }
        }
        all
    }

    fn generation(&self) -> Option<String> {
        fs::read_to_string(self.root.path().join("storage/windows.generation")).ok()
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.path().join(folder)).unwrap();
        let mut names: Vec<_> =
            entries.map(|it| it.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }
}

const SHELVES: [&str; 2] = ["storage/windows.snapshots", "storage2/windows.snapshots"];

fn name(text: &str) -> Name {
    Name::read(text).unwrap()
}

fn take(host: &Host, text: &str) -> anyhow::Result<create::Made> {
    create(host.shelf(), &name(text), Wish::default(), None)
}

#[test]
fn names_are_short_and_cannot_be_paths() {
    for text in ["a", "before-update", "2026.01_31", &"x".repeat(40)] {
        assert_eq!(Name::read(text).unwrap().as_str(), text);
    }
    for text in ["", ".", "..", ".lock", "-x", "_x", "a/b", "a b", "é", "a\n", &"x".repeat(41)] {
        Name::read(text).unwrap_err();
    }
}

#[test]
fn a_snapshot_has_all_disks_and_what_belongs_to_them() {
    let host = Host::new();
    let made = take(&host, "one").unwrap();
    assert_eq!(made.manifest.kind, Kind::Off);
    let again = take(&host, "one").unwrap_err().to_string();
    assert_eq!(again, "there is a snapshot one already: choose another name");
    assert_eq!(host.names(SHELVES[0]), [".lock", "one"]);
    assert_eq!(
        host.names("storage/windows.snapshots/one"),
        ["data.img", MANIFEST, "windows.base", "windows.vars"]
    );
    assert_eq!(host.names("storage2/windows.snapshots/one"), ["data2.img"]);
    let mode = |path: &str| fs::metadata(host.root.path().join(path)).unwrap().mode() & 0o777;
    assert_eq!(mode(SHELVES[0]), 0o700);
    assert_eq!(mode("storage/windows.snapshots/one/data.img"), 0o600);
    let before = host.files();
    host.change();
    take(&host, "two").unwrap();
    let listed = host.shelf().list().unwrap();
    assert_eq!(listed.iter().map(|it| it.name.as_str()).collect::<Vec<_>>(), ["one", "two"]);
    assert!(listed.iter().all(|it| it.manifest.is_ok()), "{listed:?}");
    restore(host.shelf(), &name("one"), false).unwrap();
    assert_eq!(host.files(), before);
    let first = host.generation().unwrap();
    let known = restore::generation(&host.shelf());
    check_since(&host.shelf(), known).unwrap();
    restore(host.shelf(), &name("one"), false).unwrap();
    assert_ne!(host.generation().unwrap(), first, "the guest must learn of each restore");
    let said = check_since(&host.shelf(), known).unwrap_err().to_string();
    assert!(said.contains("has been restored in another container"), "{said}");
    // As a machine whose disk is over it.
    let base = host.root.path().join("storage2/windows.snapshots/one/data2.img");
    let machine = File::open(&base).unwrap();
    lock::shared(&machine, &base).unwrap();
    let error = format!("{:#}", host.shelf().delete(&name("one")).unwrap_err());
    let said = "a running machine's disk is over the snapshot one: remove it first: ";
    assert!(error.starts_with(said) && error.contains("data2.img is in use by"), "{error}");
    drop(machine);
    host.shelf().delete(&name("one")).unwrap();
    host.shelf().delete(&name("one")).unwrap_err();
    assert_eq!(host.names(SHELVES[0]), [".lock", "two"]);
    assert_eq!(host.names(SHELVES[1]), ["two"]);
}

#[test]
fn disks_of_others_links_and_an_empty_volume_are_refused() {
    let host = Host::new();
    let refused = || take(&host, "one").unwrap_err().to_string();
    let disk = host.root.path().join("storage/data.img");
    let elsewhere = host.root.path().join("elsewhere");
    fs::rename(&disk, &elsewhere).unwrap();
    symlink(&elsewhere, &disk).unwrap();
    assert!(refused().contains("only files of the volume itself"), "{}", refused());
    fs::remove_file(&disk).unwrap();
    assert_eq!(refused(), "there is no disk on the volume yet");
    host.write("data.img", "mounted");
    assert!(refused().contains("a block device or a mounted image"), "{}", refused());
    assert_eq!(host.names(SHELVES[0]), [".lock"]);
}

#[test]
fn a_machine_over_a_base_has_no_disk_before_its_first_start() {
    let mut host = Host::new();
    fs::remove_file(host.root.path().join("storage/data.img")).unwrap();
    host.write("base.img", "the base");
    host.settings.storage.base = Some("/base.img".into());
    let said = take(&host, "one").unwrap_err().to_string();
    assert_eq!(said, "there is no disk on the volume yet");
}

#[test]
fn the_disk_of_other_machines_is_not_replaced() {
    let host = Host::new();
    take(&host, "one").unwrap();
    host.change();
    let mark = host.root.path().join("storage/windows.sealed");
    fs::write(&mark, "an identity").unwrap();
    let before = host.files();
    let error = restore(host.shelf(), &name("one"), false).unwrap_err();
    assert_eq!(Status::of(&error), Status::State);
    assert!(error.to_string().contains("windows.sealed to restore a snapshot"), "{error}");
    assert_eq!(host.files(), before);
    fs::remove_file(mark).unwrap();
    restore(host.shelf(), &name("one"), false).unwrap();
}

/// Root makes and restores a snapshot on the volume of a pod without rights.
#[test]
fn all_that_is_written_belongs_to_the_owner_of_the_volume() {
    let host = Host::new();
    let volume = host.root.path().join("storage");
    if lchown(&volume, Some(1234), Some(1234)).is_err() {
        return skip::not_run("the owner of snapshots", "only root can give files away");
    }
    // A restored file has the owner of the one that it replaces.
    for folder in ["storage", "storage2"].map(|name| host.root.path().join(name)) {
        for entry in fs::read_dir(folder).unwrap() {
            lchown(entry.unwrap().path(), Some(1234), Some(1234)).unwrap();
        }
    }
    let wish = Wish { pause: true, memory: true };
    create(host.shelf(), &name("one"), wish, Some(&mut FakePod::default())).unwrap();
    fs::remove_file(volume.join("data.img")).unwrap();
    // It is killed as soon as its journal is written.
    assert!(restore::test::killed(host.shelf(), &name("one"), 5));
    check_owner(&volume.join("windows.restoring"));
    for shelf in SHELVES {
        check_owner(&host.root.path().join(shelf));
    }
    recover(&host.shelf()).unwrap();
    for name in ["windows.suspended", "windows.generation", "data.img"] {
        check_owner(&volume.join(name));
    }
}

/// Checks that root has nothing here.
fn check_owner(path: &Path) {
    let found = fs::symlink_metadata(path).unwrap();
    assert_eq!((found.uid(), found.gid()), (1234, 1234), "{}", path.display());
    for entry in fs::read_dir(path).into_iter().flatten() {
        check_owner(&entry.unwrap().path());
    }
}

#[test]
fn other_commands_and_machines_are_kept_away() {
    let host = Host::new();
    take(&host, "one").unwrap();
    let lock = host.shelf().lock().unwrap();
    let said = format!("{:#}", take(&host, "two").unwrap_err());
    assert!(said.starts_with("another snapshot is being taken or restored: "), "{said}");
    drop(lock);
    let disk = host.root.path().join("storage2/data2.img");
    let used = File::options().read(true).write(true).open(&disk).unwrap();
    lock::exclusive(&used, &disk).unwrap();
    let said = format!("{:#}", take(&host, "two").unwrap_err());
    assert!(said.contains("data2.img is in use by "), "{said}");
    let said = format!("{:#}", restore(host.shelf(), &name("one"), false).unwrap_err());
    assert!(said.starts_with("stop the pod first: ") && said.contains("in use by"), "{said}");
    assert_eq!(host.names(SHELVES[1]), ["one"]);
}

#[test]
fn a_suspended_machine_is_lost_only_on_request() {
    let host = Host::new();
    take(&host, "one").unwrap();
    let folder = host.root.path().join("storage/windows.suspended");
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("machine.json"), "{}").unwrap();
    let said = restore(host.shelf(), &name("one"), false).unwrap_err().to_string();
    assert!(said.contains("--drop-suspended"), "{said}");
    assert!(host.generation().is_none() && folder.join("machine.json").exists());
    restore(host.shelf(), &name("one"), true).unwrap();
    assert!(!folder.join("machine.json").exists());
}

/// Cuts a restore after each of its changes. The next start has the old machine, or the whole
/// restored one.
#[test]
fn a_restore_that_is_killed_anywhere_is_finished_or_undone() {
    let mut counts = [0, 0];
    for cut in 0.. {
        let host = Host::new();
        take(&host, "one").unwrap();
        let restored = host.files();
        host.change();
        let changed = host.files();
        if !restore::test::killed(host.shelf(), &name("one"), cut) {
            break;
        }
        let committed = journal(&host.shelf()).unwrap().is_some();
        recover(&host.shelf()).unwrap();
        assert_eq!(host.generation().is_some(), host.files() == restored, "{cut}");
        assert!(host.files() == restored || !committed && host.files() == changed, "{cut}");
        counts[usize::from(host.files() == restored)] += 1;
        assert_eq!(host.names(SHELVES[0]), [".lock", "one"], "{cut}");
        assert_eq!(host.names(SHELVES[1]), ["one"], "{cut}");
        assert!(journal(&host.shelf()).unwrap().is_none());
        recover(&host.shelf()).unwrap();
    }
    assert!(counts[0] >= 3 && counts[1] >= 8, "{counts:?}");
}

/// As by a command in a container that has only the first volume.
#[test]
fn a_restore_is_finished_with_all_disks_or_not_at_all() {
    let mut begun = 0;
    for cut in 0.. {
        let host = Host::new();
        take(&host, "one").unwrap();
        let restored = host.files();
        host.change();
        if !restore::test::killed(host.shelf(), &name("one"), cut) {
            break;
        }
        if journal(&host.shelf()).unwrap().is_none() {
            continue;
        }
        begun += 1;
        let [second, away] = ["storage2", "away"].map(|it| host.root.path().join(it));
        fs::rename(&second, &away).unwrap();
        let error = format!("{:#}", recover(&host.shelf()).unwrap_err());
        assert!(error.contains("data2.img is not restored, and its copy is gone"), "{error}");
        assert!(journal(&host.shelf()).unwrap().is_some(), "{cut}");
        fs::rename(&away, &second).unwrap();
        recover(&host.shelf()).unwrap();
        assert_eq!(host.files(), restored, "{cut}");
    }
    assert!(begun >= 8, "{begun}");
}

/// While a restore is finished, each disk has a name at each moment: a pod that starts would
/// otherwise make a new one.
#[test]
fn disks_have_their_names_during_a_restore() {
    for cut in 0.. {
        let host = Host::new();
        take(&host, "one").unwrap();
        host.change();
        if !restore::test::killed(host.shelf(), &name("one"), cut) {
            break;
        }
        for disk in ["storage/data.img", "storage2/data2.img"] {
            let text = fs::read_to_string(host.root.path().join(disk)).unwrap();
            assert!([format!("old {disk}"), format!("new {disk}")].contains(&text), "{cut}");
        }
    }
}

#[test]
fn unfinished_snapshots_are_never_listed_and_are_removed() {
    let host = Host::new();
    take(&host, "one").unwrap();
    // A kill at the end of `create` or within `delete`: only the first volume decides.
    for folder in SHELVES {
        for begun in ["two", ".part-three"] {
            fs::create_dir(host.root.path().join(folder).join(begun)).unwrap();
        }
    }
    let first = host.root.path().join(SHELVES[0]);
    fs::rename(first.join("two"), first.join(".part-two")).unwrap();
    for broken in [STAGED, REPLACED] {
        fs::create_dir(first.join(broken)).unwrap();
    }
    let listed = |host: &Host| -> Vec<_> {
        let listed = host.shelf().list().unwrap().into_iter();
        listed.map(|it| (it.name.0, it.manifest.is_ok())).collect()
    };
    assert_eq!(listed(&host), [("one".to_owned(), true)]);
    recover(&host.shelf()).unwrap();
    assert_eq!(host.names(SHELVES[0]), [".lock", "one"]);
    assert_eq!(host.names(SHELVES[1]), ["one"]);
    // Damage is listed, and not restored.
    host.write("storage/windows.snapshots/one/data.img", "short");
    assert_eq!(listed(&host), [("one".to_owned(), false)]);
    let said = restore(host.shelf(), &name("one"), false).unwrap_err().to_string();
    assert!(said.starts_with("the snapshot one cannot be used: data.img does not have "), "{said}");
    host.shelf().delete(&name("one")).unwrap();
}

#[test]
fn links_and_foreign_names_in_a_snapshot_lead_nowhere() {
    let host = Host::new();
    take(&host, "one").unwrap();
    let folder = host.root.path().join("storage/windows.snapshots/one");
    let secret = host.root.path().join("secret");
    let length = fs::metadata(folder.join("data.img")).unwrap().len();
    fs::write(&secret, "s".repeat(usize::try_from(length).unwrap())).unwrap();
    fs::rename(folder.join("data.img"), host.root.path().join("there")).unwrap();
    symlink(&secret, folder.join("data.img")).unwrap();
    let before = host.files();
    let said = restore(host.shelf(), &name("one"), false).unwrap_err().to_string();
    assert!(said.contains("symbolic link"), "{said}");
    fs::remove_file(folder.join("data.img")).unwrap();
    fs::rename(host.root.path().join("there"), folder.join("data.img")).unwrap();
    // A manifest that would replace another file of the pod, or remove a disk.
    let manifest = Manifest::of(&folder.with_file_name(""), &name("one")).unwrap();
    for (file, absent) in [("windows.password", None), ("data.img", Some((2, "data3.img")))] {
        let mut evil = manifest.clone();
        if let Some((volume, file)) = absent {
            evil.absent.push((volume, file.to_owned()));
        } else {
            fs::copy(folder.join("windows.base"), folder.join(file)).unwrap();
            let mut entry = evil.files.iter().find(|it| it.file == "windows.base").unwrap().clone();
            entry.file = file.to_owned();
            evil.files.push(entry);
        }
        fs::write(folder.join(MANIFEST), evil.write().unwrap()).unwrap();
        restore(host.shelf(), &name("one"), false).unwrap_err();
    }
    // A shelf that is a link.
    let shelf = host.root.path().join(SHELVES[0]);
    let away = host.root.path().join("away");
    fs::rename(&shelf, &away).unwrap();
    symlink(&away, &shelf).unwrap();
    assert!(host.shelf().list().unwrap().is_empty());
    host.shelf().delete(&name("one")).unwrap_err();
    take(&host, "two").unwrap_err();
    assert!(away.join("one").join(MANIFEST).exists());
    assert_eq!(host.files(), before);
}

/// A pod that does what a test wants, and counts.
#[derive(Default)]
struct FakePod {
    disks: Vec<PathBuf>,
    frozen: bool,
    late: bool,
    held: Vec<(bool, Duration)>,
}

impl Pod for FakePod {
    fn machine(&mut self) -> anyhow::Result<Running> {
        Ok(Running { disks: self.disks.clone(), memory: 1 << 20 })
    }

    fn hold(&mut self, freeze: bool, limit: Duration) -> anyhow::Result<()> {
        self.held.push((freeze, limit));
        Ok(())
    }

    fn save(&mut self, folder: &Path, _: Duration) -> anyhow::Result<()> {
        fs::create_dir(folder)?;
        fs::write(folder.join("memory"), "its memory")?;
        Ok(fs::write(folder.join("machine.json"), "{}")?)
    }

    fn release(&mut self) -> anyhow::Result<Held> {
        ensure!(!self.late, "too late");
        Ok(Held { frozen: if self.frozen { Ok(()) } else { Err("why".into()) }, seconds: 0.1 })
    }
}

#[test]
fn a_running_machine_is_held_while_its_disks_are_copied() {
    let mut host = Host::new();
    let shelf = host.shelf();
    let pause = Wish { pause: true, memory: false };
    let disk = host.root.path().join("storage/data.img");
    let mut pod = FakePod { frozen: true, disks: vec![disk], ..FakePod::default() };
    let made = create(shelf, &name("one"), pause, Some(&mut pod)).unwrap();
    assert_eq!(made.manifest.kind, Kind::Frozen);
    assert!(pod.held[0].0, "the guest was not frozen");
    pod.frozen = false;
    let made = create(shelf, &name("two"), pause, Some(&mut pod)).unwrap();
    assert_eq!(made.manifest.kind, Kind::PowerCut);
    assert_eq!(
        show::made(&made),
        "two: as after a power cut: why. The guest stood still for 0.10 s\n"
    );
    pod.late = true;
    create(shelf, &name("three"), pause, Some(&mut pod)).unwrap_err();
    pod.disks.push("/dev/null".into());
    let said = create(shelf, &name("three"), pause, Some(&mut pod)).unwrap_err().to_string();
    assert!(said.starts_with("/dev/null: this disk of the machine is not on"), "{said}");
    assert_eq!(pod.held.len(), 3);
    host.settings.disk.ephemeral = true;
    let said = create(host.shelf(), &name("three"), pause, Some(&mut pod)).unwrap_err();
    assert!(said.to_string().ends_with("EPHEMERAL=Y throws away what its guest writes"), "{said}");
    assert_eq!(host.names(SHELVES[0]), [".lock", "one", "two"]);
    assert_eq!(host.names(SHELVES[1]), ["one", "two"]);
}

#[test]
fn memory_is_restored_as_a_suspended_machine() {
    let host = Host::new();
    let wish = Wish { pause: true, memory: true };
    let off = create(host.shelf(), &name("off"), wish, None).unwrap_err().to_string();
    assert!(off.starts_with("the machine is off, so that it has no memory"), "{off}");
    let mut pod = FakePod::default();
    let made = create(host.shelf(), &name("one"), wish, Some(&mut pod)).unwrap();
    assert_eq!((made.manifest.kind, pod.held[0].0), (Kind::Memory, false));
    // A snapshot whose memory is lost is damaged.
    let memory = host.root.path().join("storage/windows.snapshots/one/memory/memory");
    let damage = || host.shelf().list().unwrap().remove(0).manifest.unwrap_err();
    fs::write(&memory, "its").unwrap();
    assert_eq!(damage(), "memory/memory does not have 10 bytes");
    fs::remove_file(&memory).unwrap();
    assert!(damage().starts_with("memory/memory: "), "{}", damage());
    fs::write(&memory, "its memory").unwrap();
    let listed = host.shelf().list().unwrap();
    assert!(listed[0].manifest.is_ok(), "{listed:?}");
    assert!(show::table(&listed).starts_with("NAME "), "{}", show::table(&listed));
    let changed =
        |path: &str| fs::metadata(host.root.path().join(path)).unwrap().modified().unwrap();
    let before = changed("storage/data.img");
    host.change();
    for cut in 0.. {
        let ends = !restore::test::killed(host.shelf(), &name("one"), cut);
        recover(&host.shelf()).unwrap();
        if ends {
            break;
        }
    }
    let folder = host.root.path().join("storage/windows.suspended");
    assert_eq!(fs::read_to_string(folder.join("memory")).unwrap(), "its memory");
    assert_eq!(fs::read_to_string(folder.join("machine.json")).unwrap(), "{}");
    assert_eq!(changed("storage/data.img"), before, "memory would refuse the disk");
    assert_eq!(fs::metadata(&folder).unwrap().permissions().mode() & 0o777, 0o700);
}

/// A pod that was starting while a restore began has booted from its disks since.
#[test]
fn an_interrupted_restore_does_not_replace_disks_that_were_used_since() {
    let mut committed = 0;
    for cut in 0.. {
        let host = Host::new();
        take(&host, "one").unwrap();
        host.change();
        check(&host.shelf()).unwrap();
        if !restore::test::killed(host.shelf(), &name("one"), cut) {
            break;
        }
        if journal(&host.shelf()).unwrap().is_none() {
            continue;
        }
        let said = check(&host.shelf()).unwrap_err();
        assert_eq!(Status::of(&said), Status::State, "{said}");
        let refused = |why: &str| {
            let said = recover(&host.shelf()).unwrap_err();
            assert!(format!("{said:#}").contains(why), "{cut}: {said:#}");
            assert_eq!(Status::of(&said), Status::State, "{said:#}");
        };
        committed += 1;
        let disk = host.root.path().join("storage2/data2.img");
        let open = |path: &Path| File::options().read(true).write(true).open(path).unwrap();
        if committed == 1 {
            for used in [&disk, &host.root.path().join(SHELVES[1]).join(STAGED).join("data2.img")] {
                let file = open(used);
                lock::exclusive(&file, used).unwrap();
                refused("stop the pod first: ");
            }
        }
        // The time of a change is as exact as the kernel's clock tick.
        std::thread::sleep(Duration::from_millis(20));
        open(&disk).write_all_at(b"ack", 0).unwrap();
        let used = host.files();
        refused("data2.img has been changed since");
        restore(host.shelf(), &name("one"), false).unwrap_err();
        take(&host, "two").unwrap_err();
        assert_eq!(host.files(), used, "{cut}");
        // The way out.
        fs::remove_file(host.root.path().join("storage/windows.restoring")).unwrap();
        recover(&host.shelf()).unwrap();
        assert!(fs::read_to_string(&disk).unwrap().starts_with("ack"), "{cut}");
        assert_eq!(host.names(SHELVES[1]), ["one"], "{cut}");
    }
    assert!(committed > 5, "{committed}");
}

#[test]
fn links_in_place_of_the_folders_of_a_restore_lead_nowhere() {
    for folder in [STAGED, REPLACED] {
        let host = Host::new();
        take(&host, "one").unwrap();
        host.change();
        let disk = fs::read(host.root.path().join("storage/data.img")).unwrap();
        let cut = 1 + host.shelf().find(&name("one")).unwrap().files.len();
        assert!(restore::test::killed(host.shelf(), &name("one"), cut));
        let away = host.root.path().join("away");
        fs::create_dir(&away).unwrap();
        fs::write(away.join("theirs"), "").unwrap();
        if folder == STAGED {
            fs::write(away.join("data.img"), &disk).unwrap();
        }
        let before = host.names("away");
        let link = host.root.path().join(SHELVES[0]).join(folder);
        fs::rename(&link, link.with_file_name("was")).unwrap();
        symlink(&away, &link).unwrap();
        recover(&host.shelf()).ok();
        assert_eq!(host.names("away"), before, "{folder}");
        assert_eq!(fs::read(host.root.path().join("storage/data.img")).unwrap(), disk);
    }
}

/// Root without most of its rights, on a volume of another user.
#[test]
fn root_that_can_only_give_files_away_restores_them_again_and_again() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let host = Host::new();
    for folder in ["storage", "storage2"] {
        let volume = host.root.path().join(folder);
        for entry in fs::read_dir(&volume).unwrap() {
            chown(entry.unwrap().path(), Some(1000), Some(1000)).unwrap();
        }
        chown(volume, Some(1000), Some(1000)).unwrap();
    }
    let attempt = || {
        keep_rights(CapabilitySet::CHOWN | CapabilitySet::DAC_OVERRIDE);
        take(&host, "one").unwrap();
        // Kubernetes gives the group of a volume access to all folders at each start.
        keep_rights(CapabilitySet::all());
        let mode = Permissions::from_mode(0o770);
        fs::set_permissions(host.root.path().join(SHELVES[0]), mode).unwrap();
        keep_rights(CapabilitySet::CHOWN | CapabilitySet::DAC_OVERRIDE);
        for _ in 0..2 {
            restore(host.shelf(), &name("one"), false).unwrap();
        }
        let owner = |path: &str| fs::metadata(host.root.path().join(path)).unwrap().uid();
        assert_eq!(["storage/data.img", SHELVES[0]].map(owner), [1000, 1000]);
        // The plan reports a volume that the pod may not enter.
        keep_rights(CapabilitySet::empty());
        let mode = |path: &str| fs::metadata(host.root.path().join(path)).unwrap().mode() & 0o777;
        assert_eq!(mode(SHELVES[0]), 0o700);
        let moved = Shelf { root: &host.root.path().join(SHELVES[0]), ..host.shelf() };
        assert_eq!(
            fs::symlink_metadata(moved.volume(0)).unwrap_err().kind(),
            ErrorKind::PermissionDenied
        );
        recover(&moved).unwrap();
        check(&moved).unwrap();
    };
    std::thread::scope(|scope| scope.spawn(attempt).join().unwrap());
}

/// Sets the effective rights of this thread.
fn keep_rights(rights: CapabilitySet) {
    let all = capabilities(None).unwrap();
    let effective = rights & all.permitted;
    set_capabilities(None, CapabilitySets { effective, ..all }).unwrap();
}
