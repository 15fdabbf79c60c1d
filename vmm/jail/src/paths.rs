//! Which files may still be opened: Landlock.
//!
//! What is open stays open, with all its rights. Beyond it there are the folders of the machine's
//! media, whose neighbours can be put into its drives; folders that were named; what is read again
//! at times, as certificates are; and folders that sockets of ours are removed from at the end.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus,
    Scope,
};

/// What we know to ask for. A kernel that knows less keeps less away.
const KNOWN: ABI = ABI::V6;

/// What is done with what lies there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Use {
    /// It is read.
    Read,
    /// It is read and written, and nothing is made.
    Write,
    /// Files are removed.
    Remove,
    /// Files are read and written, made, renamed and removed.
    Own,
}

impl Use {
    fn rights(self) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        match self {
            Self::Read => read,
            // A disk that is plugged in later may be a device, whose size is asked for.
            Self::Write => read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev,
            Self::Remove => AccessFs::RemoveFile.into(),
            Self::Own => {
                let make = AccessFs::MakeReg | AccessFs::MakeDir | AccessFs::MakeSock;
                let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
                read | make | remove | AccessFs::WriteFile | AccessFs::Truncate
            }
        }
    }
}

/// Paths, each with all that is done there.
#[derive(Debug, Default)]
pub struct Paths(BTreeMap<PathBuf, Vec<Use>>);

impl Paths {
    /// A file or folder.
    pub fn add(&mut self, path: &Path, what: Use) {
        let uses = self.0.entry(path.to_owned()).or_default();
        if !uses.contains(&what) {
            uses.push(what);
        }
    }

    /// The folder that a file lies in. That of a device has all other devices, and the root folder
    /// has everything: there it is the file alone.
    pub fn add_folder_of(&mut self, path: &Path, what: Use) {
        let Ok(whole) = fs::canonicalize(path) else { return };
        let plain = fs::metadata(&whole).is_ok_and(|it| it.is_file());
        // Links lie elsewhere than what they lead to, and are read anew.
        for path in [whole.as_path(), path] {
            let folder = path.parent().filter(|it| plain && it.parent().is_some());
            match folder {
                Some(folder) => self.add(folder, what),
                None => self.add(path, what),
            }
        }
    }

    /// Opens them, while it is still possible.
    ///
    /// # Errors
    ///
    /// When Landlock refuses what it should not.
    pub(crate) fn rules(&self, files: bool) -> anyhow::Result<RulesetCreated> {
        let mut rules = Ruleset::default()
            .handle_access(AccessNet::from_all(KNOWN))?
            .scope(Scope::from_all(KNOWN))?;
        if files {
            rules = rules.handle_access(AccessFs::from_all(KNOWN))?;
        }
        let rules = rules.create().context("Landlock")?;
        if files { self.open(rules) } else { Ok(rules) }
    }

    /// The same for who has children to signal and a network to serve: files alone.
    ///
    /// # Errors
    ///
    /// When Landlock refuses what it should not.
    pub(crate) fn rules_for_files(&self) -> anyhow::Result<RulesetCreated> {
        let rules = Ruleset::default()
            .handle_access(AccessFs::from_all(KNOWN))?
            .scope(Scope::AbstractUnixSocket)?;
        self.open(rules.create().context("Landlock")?)
    }

    fn open(&self, mut rules: RulesetCreated) -> anyhow::Result<RulesetCreated> {
        for (path, uses) in &self.0 {
            // What is not there will not be opened.
            let Ok(place) = PathFd::new(path) else { continue };
            let mut rights: BitFlags<AccessFs> =
                uses.iter().fold(BitFlags::empty(), |all, one| all | one.rights());
            if !fs::metadata(path).is_ok_and(|it| it.is_dir()) {
                rights &= AccessFs::from_file(KNOWN);
            }
            if !rights.is_empty() {
                rules = rules
                    .add_rule(PathBeneath::new(place, rights))
                    .with_context(|| format!("Landlock: {}", path.display()))?;
            }
        }
        Ok(rules)
    }
}

/// What the kernel makes of it: the version of Landlock that holds, and how much of what we ask
/// for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Kept {
    /// The kernel's version.
    pub(crate) abi: i32,
    /// Whether it knows all that we ask for.
    pub(crate) whole: bool,
}

/// Closes everything else, for this thread and those that it starts.
///
/// # Errors
///
/// When this kernel has no Landlock.
pub(crate) fn close(rules: RulesetCreated) -> anyhow::Result<Kept> {
    let status = rules.restrict_self().context("Landlock")?;
    let RestrictionStatus { ruleset, landlock, .. } = status;
    match landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            let abi = kernel_abi.unwrap_or(effective_abi as i32);
            Ok(Kept { abi, whole: ruleset == RulesetStatus::FullyEnforced })
        }
        LandlockStatus::NotEnabled => {
            anyhow::bail!("Landlock is not enabled: add it to `lsm=` of the host's command line")
        }
        LandlockStatus::NotImplemented => {
            anyhow::bail!("this kernel has no Landlock, or a container engine forbids it")
        }
    }
}

#[cfg(test)]
mod test {
    use std::net::{TcpListener, TcpStream};
    use std::thread;

    use super::*;

    #[test]
    fn whatever_files_may_be_opened_nobody_connects_by_tcp() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        TcpStream::connect(to).unwrap();
        // What holds for the thread of this test would hold for the next one.
        let body = move || {
            let kept = close(Paths::default().rules(false).unwrap()).ok()?;
            (kept.abi >= 4).then(|| TcpStream::connect(to).unwrap_err().kind())
        };
        match thread::spawn(body).join().unwrap() {
            Some(kind) => assert_eq!(kind, std::io::ErrorKind::PermissionDenied),
            None => skip::not_run(
                "whatever_files_may_be_opened_nobody_connects_by_tcp",
                "this kernel has no Landlock, or one that knows no network (before 6.7)",
            ),
        }
    }

    #[test]
    fn a_file_brings_its_folder_and_a_device_only_itself() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        fs::write(&file, "").unwrap();
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let link = inner.join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let found = |path: &Path| {
            let mut paths = Paths::default();
            paths.add_folder_of(path, Use::Read);
            paths.0.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(found(&file), [folder.path()]);
        assert_eq!(found(&link), [folder.path(), &inner]);
        assert_eq!(found(Path::new("/dev/null")), [Path::new("/dev/null")]);
        assert!(found(&folder.path().join("gone")).is_empty());
    }
}
