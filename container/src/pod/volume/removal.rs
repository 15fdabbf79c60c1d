//! Removes media from the volume when Windows starts from its disk, as the reference image does.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::Volume;
use crate::download::drivers::Remote;
use crate::plan::Plan;
use crate::source::Source;
use crate::state::name;
use crate::story::Story;

impl Volume {
    /// Removes the medium and the drivers that the container downloads for this installation. The
    /// user's files stay: mounted ones, and those with other names.
    pub fn remove_media(&self, plan: &Plan, story: &Story) {
        for path in self.downloads(plan).into_iter().filter(|path| self.has(path)) {
            let shown = path.display();
            match fs::remove_file(&path) {
                Ok(()) => story.info(&format!(
                    "{shown} is removed, because Windows is on its disk: REMOVE=N keeps it"
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
        fs::symlink_metadata(path).is_ok_and(|it| it.is_file() && it.dev() == folder.dev())
    }
}

#[cfg(test)]
mod test {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::media::testutil::{Layout, cd, install_cd, windows_11};

    const DRIVERS: &str = "virtio-win-0.1.271.iso";

    /// A host with these files, and the names of those that are on the volume afterwards.
    fn left(files: &[&str], words: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let storage = root.path().join("storage");
        fs::create_dir(&storage).unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/meminfo"), "MemAvailable: 16777216 kB\n").unwrap();
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
        let mut names: Vec<_> = fs::read_dir(&storage)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
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
