//! Removes media from the volume when Windows is set up: until then, an installation that was
//! interrupted may have to begin again. The reference image removes them when Windows first starts
//! from its disk.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, StatxFlags, statx};

use super::Volume;
use crate::download::drivers::Remote;
use crate::plan::Plan;
use crate::source::Source;
use crate::state::{SETUP, name};
use crate::story::Story;

impl Volume {
    /// Marks that Windows is on its disk, and not set up yet.
    pub fn begin_setup(&self, plan: &Plan) -> anyhow::Result<()> {
        let downloads =
            if plan.input.settings.media.remove { self.downloads(plan) } else { vec![] };
        let names = downloads.iter().filter_map(|path| path.file_name()?.to_str());
        self.write(SETUP, &names.map(|name| format!("{name}\n")).collect::<String>())
    }

    pub fn is_being_set_up(&self) -> bool {
        self.file(SETUP).is_file()
    }

    /// Windows is set up. Removes the mark and, with REMOVE=Y, the files that it names.
    pub fn end_setup(&self, removes: bool, story: &Story) {
        let Some(names) = self.read(SETUP) else { return };
        let is_medium = |name: &&str| {
            name.ends_with(".iso") && Path::new(name).file_name() == Some(name.as_ref())
        };
        let names = names.lines().filter(|_| removes).filter(is_medium);
        self.remove(names.map(|name| self.folder.join(name)).collect(), story);
        if let Err(error) = fs::remove_file(self.file(SETUP)) {
            tracing::warn!("{} cannot be removed: {error}", self.file(SETUP).display());
        }
    }

    /// Removes the medium and the drivers that the container downloads for this installation. The
    /// user's files stay: mounted ones, and those with other names.
    pub fn remove_media(&self, plan: &Plan, story: &Story) {
        self.remove(self.downloads(plan), story);
    }

    fn remove(&self, files: Vec<PathBuf>, story: &Story) {
        for path in files.into_iter().filter(|path| self.has(path)) {
            let shown = path.display();
            match fs::remove_file(&path) {
                Ok(()) => story.info(&format!(
                    "{shown} is removed, because Windows is installed: REMOVE=N keeps it"
                )),
                Err(error) => tracing::warn!("{shown} cannot be removed: {error}"),
            }
        }
    }

    fn downloads(&self, plan: &Plan) -> Vec<PathBuf> {
        let settings = &plan.input.settings;
        let windows = &settings.windows;
        let medium = name::of(&windows.version, windows.language.0);
        let medium = medium.map(|name| self.folder.join(name));
        let medium = medium.filter(|path| plan.source == Source::Medium(path.clone()));
        let drivers = Remote::of(settings).ok().flatten().map(|remote| remote.path(&self.folder));
        let bundle = plan.unattended.as_ref().and_then(|it| it.bundle.as_ref());
        medium.into_iter().chain(drivers.filter(|path| bundle == Some(path))).collect()
    }

    /// Whether a path leads to a file of the volume itself, and not to one that is mounted there.
    fn has(&self, path: &Path) -> bool {
        let Ok(folder) = fs::metadata(&self.folder) else { return false };
        let Ok(found) = fs::symlink_metadata(path) else { return false };
        // Files of an overlay may have other device numbers than its folders.
        let is_same =
            match (mount(&self.folder, AtFlags::empty()), mount(path, AtFlags::SYMLINK_NOFOLLOW)) {
                (Some(folder), Some(file)) => folder == file,
                _ => folder.dev() == found.dev(),
            };
        found.is_file() && is_same
    }
}

/// The number of the mount that a path is on, if the kernel tells it (Linux 5.8).
fn mount(path: &Path, flags: AtFlags) -> Option<u64> {
    let found = statx(CWD, path, flags, StatxFlags::MNT_ID).ok()?;
    let told = StatxFlags::from_bits_retain(found.stx_mask).contains(StatxFlags::MNT_ID);
    told.then_some(found.stx_mnt_id)
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;
    use crate::media::testutil::{Layout, cd, install_cd, windows_11};

    const DRIVERS: &str = "virtio-win-0.1.271.iso";
    const ISO: &str = "win11x64.iso";

    /// A host with an empty volume.
    fn host() -> (TempDir, PathBuf) {
        let root = tempfile::tempdir().unwrap();
        let storage = root.path().join("storage");
        fs::create_dir(&storage).unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), "MemAvailable: 16777216 kB\n").unwrap();
        (root, storage)
    }

    fn names(storage: &Path) -> Vec<String> {
        let names = fs::read_dir(storage).unwrap();
        let names = names.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut names: Vec<_> = names.collect();
        names.sort();
        names
    }

    /// A host with these files, and the names of those that are on the volume afterwards.
    fn left(files: &[&str], words: &[(&str, &str)]) -> Vec<String> {
        let (root, storage) = host();
        for file in files {
            let bytes = match file.contains("virtio") || file.contains("drivers") {
                true => cd(Layout::Bridge, &[]),
                false => install_cd(Layout::Bridge, &windows_11(9)),
            };
            fs::write(root.path().join(file), bytes).unwrap();
        }
        if files.contains(&"theirs.iso") {
            symlink("../theirs.iso", storage.join("win11x64.iso")).unwrap();
        }
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let plan = Plan::make(&words, root.path()).unwrap();
        Volume::at(&storage, "windows").remove_media(&plan, &Story::new());
        names(&storage)
    }

    #[test]
    fn only_files_that_are_downloaded_again_are_removed() {
        let [medium, drivers] = ["storage/win11x64.iso", "storage/virtio-win-0.1.271.iso"];
        assert_eq!(left(&[medium, drivers], &[]), [""; 0]);
        assert_eq!(left(&[medium, drivers], &[("DRIVERS", "N")]), [DRIVERS]);
        assert_eq!(left(&[medium, drivers, "drivers.iso"], &[]), [DRIVERS], "another is used");
        let older = "storage/virtio-win-0.1.266.iso";
        assert_eq!(left(&[medium, older], &[]), ["virtio-win-0.1.266.iso"]);
        assert_eq!(left(&["storage/win11x64_ko.iso"], &[("LANGUAGE", "Korean")]), [""; 0]);
        let url = "https://example.com/my.iso";
        assert_eq!(left(&["storage/my.iso"], &[("VERSION", url)]), [""; 0]);
        let mirror = ("DRIVERS", "https://example.com/v.iso");
        assert_eq!(left(&[medium, "storage/virtio-win-v.iso"], &[mirror]), [""; 0]);
    }

    #[test]
    fn a_medium_stays_until_windows_is_set_up() {
        let (root, storage) = host();
        let names = || names(&storage);
        let volume = Volume::at(&storage, "windows");
        for (words, removes, left) in [
            (&[][..], true, &["theirs"][..]),
            (&[], false, &["theirs", ISO]),
            (&[("REMOVE", "N")], true, &["theirs", ISO]),
        ] {
            fs::write(storage.join(ISO), install_cd(Layout::Bridge, &windows_11(9))).unwrap();
            fs::write(storage.join("theirs"), []).unwrap();
            let words = words.iter().map(|(name, text)| ((*name).into(), (*text).into()));
            let plan = Plan::make(&words.collect(), root.path()).unwrap();
            volume.begin_setup(&plan).unwrap();
            assert!(volume.is_being_set_up());
            assert_eq!(names(), ["theirs", ISO, "windows.setup"]);
            // Somebody may have written the list.
            let mark = volume.read(SETUP).unwrap();
            let forged = format!("../theirs.iso\n.\n\ntheirs\n{mark}\n/etc\nnone.iso\n");
            volume.write(SETUP, &forged).unwrap();
            fs::write(root.path().join("theirs.iso"), []).unwrap();
            // The user may have changed REMOVE since.
            volume.end_setup(removes, &Story::new());
            assert_eq!(names(), left);
            assert!(root.path().join("theirs.iso").exists() && !volume.is_being_set_up());
            volume.end_setup(removes, &Story::new());
        }
    }

    #[test]
    fn the_users_files_stay() {
        for (files, words, kept) in [
            (&["storage/custom.iso"][..], &[][..], &["custom.iso"][..]),
            (&["storage/boot.iso"], &[], &["boot.iso"]),
            (&["storage/My Windows.iso"], &[], &["My Windows.iso"]),
            (&["storage/my.iso"], &[("VERSION", "my.iso")], &["my.iso"]),
            (&["custom.iso", "storage/win11x64.iso"], &[], &["win11x64.iso"]),
            (&["theirs.iso"], &[], &["win11x64.iso"]),
        ] {
            assert_eq!(left(files, words), kept, "{files:?}");
        }
    }
}
