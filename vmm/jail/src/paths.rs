//! Limits the files that can still be opened, with Landlock.
//!
//! Open files stay open, with all their rights. Further access is allowed to the folders of the
//! machine's disks and media, so that other media can be inserted; to configured folders; to files
//! that are read repeatedly, such as certificates; and to folders from which sockets of this
//! process are removed at the end.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, LandlockStatus, PathBeneath, PathFd,
    RestrictionStatus, Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus,
    Scope,
};

/// The newest Landlock version that this program uses. An older kernel restricts less.
const LANDLOCK_ABI: ABI = ABI::V6;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum PathAccess {
    Read,
    /// Files are read and written, but not created.
    Write,
    Remove,
    /// Files are read, written, created, renamed and removed.
    Own,
    /// As `Own`, also between directories, and without sockets.
    Serve,
}

impl PathAccess {
    fn rights(self) -> BitFlags<AccessFs> {
        let read = AccessFs::ReadFile | AccessFs::ReadDir;
        match self {
            Self::Read => read,
            // A disk that is plugged in later may be a block device, whose size is read with an
            // ioctl.
            Self::Write => read | AccessFs::WriteFile | AccessFs::Truncate | AccessFs::IoctlDev,
            Self::Remove => AccessFs::RemoveFile.into(),
            Self::Own => {
                let make = AccessFs::MakeReg | AccessFs::MakeDir | AccessFs::MakeSock;
                let remove = AccessFs::RemoveFile | AccessFs::RemoveDir;
                read | make | remove | AccessFs::WriteFile | AccessFs::Truncate
            }
            Self::Serve => {
                (Self::Own.rights() | AccessFs::Refer) & !BitFlags::from(AccessFs::MakeSock)
            }
        }
    }
}

#[derive(Debug, Default)]
pub struct Paths(BTreeMap<PathBuf, Vec<PathAccess>>);

impl Paths {
    pub fn add(&mut self, path: &Path, what: PathAccess) {
        let uses = self.0.entry(path.to_owned()).or_default();
        if !uses.contains(&what) {
            uses.push(what);
        }
    }

    /// Adds the folder of a file. The folder of a device contains all other devices, and the root
    /// folder contains everything: in these cases, adds only the file.
    pub fn add_folder_of(&mut self, path: &Path, what: PathAccess) {
        let Ok(whole) = fs::canonicalize(path) else { return };
        let plain = fs::metadata(&whole).is_ok_and(|it| it.is_file());
        // A symbolic link is in another folder than its target, and is resolved again later.
        for path in [whole.as_path(), path] {
            let folder = path.parent().filter(|it| plain && it.parent().is_some());
            match folder {
                Some(folder) => self.add(folder, what),
                None => self.add(path, what),
            }
        }
    }

    /// Opens the paths and builds the rules. Must run while the paths can still be opened. With
    /// `files`, access to files is restricted too.
    pub(crate) fn rules(&self, files: bool) -> anyhow::Result<RulesetCreated> {
        let mut rules = Ruleset::default()
            .handle_access(AccessNet::from_all(LANDLOCK_ABI))?
            .scope(Scope::from_all(LANDLOCK_ABI))?;
        if files {
            rules = rules.handle_access(AccessFs::from_all(LANDLOCK_ABI))?;
        }
        let rules = rules.create().context("Landlock")?;
        if files { self.open(rules) } else { Ok(rules) }
    }

    /// Like `rules`, but restricts only files: for a process that signals children and serves a
    /// network.
    pub(crate) fn rules_for_files(&self) -> anyhow::Result<RulesetCreated> {
        let rules = Ruleset::default()
            .handle_access(AccessFs::from_all(LANDLOCK_ABI))?
            .scope(Scope::AbstractUnixSocket)?;
        self.open(rules.create().context("Landlock")?)
    }

    fn open(&self, mut rules: RulesetCreated) -> anyhow::Result<RulesetCreated> {
        for (path, uses) in &self.0 {
            // A file that does not exist needs no rule.
            let Ok(file) = PathFd::new(path) else { continue };
            let mut rights: BitFlags<AccessFs> =
                uses.iter().fold(BitFlags::empty(), |all, one| all | one.rights());
            if !fs::metadata(path).is_ok_and(|it| it.is_dir()) {
                rights &= AccessFs::from_file(LANDLOCK_ABI);
            }
            if !rights.is_empty() {
                rules = rules
                    .add_rule(PathBeneath::new(file, rights))
                    .with_context(|| format!("Landlock: {}", path.display()))?;
            }
        }
        Ok(rules)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Enforced {
    /// The Landlock version of the kernel.
    pub(crate) abi: i32,
    /// Whether the kernel supports all restrictions that this program uses.
    pub(crate) whole: bool,
}

/// Applies the rules to this thread and the threads that it starts. Fails if this kernel has no
/// Landlock.
pub(crate) fn restrict(rules: RulesetCreated) -> anyhow::Result<Enforced> {
    let status = rules.restrict_self().context("Landlock")?;
    let RestrictionStatus { ruleset, landlock, .. } = status;
    match landlock {
        LandlockStatus::Available { effective_abi, kernel_abi } => {
            let abi = kernel_abi.unwrap_or(effective_abi as i32);
            Ok(Enforced { abi, whole: ruleset == RulesetStatus::FullyEnforced })
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
    fn tcp_connections_are_refused_for_any_allowed_paths() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let to = listener.local_addr().unwrap();
        TcpStream::connect(to).unwrap();
        // Use another thread: the restrictions of this one would apply to the next test.
        let body = move || {
            let enforced = restrict(Paths::default().rules(false).unwrap()).ok()?;
            (enforced.abi >= 4).then(|| TcpStream::connect(to).unwrap_err().kind())
        };
        match thread::spawn(body).join().unwrap() {
            Some(kind) => assert_eq!(kind, std::io::ErrorKind::PermissionDenied),
            None => skip::not_run(
                "tcp_connections_are_refused_for_any_allowed_paths",
                "this kernel has no Landlock, or one that knows no network (before 6.7)",
            ),
        }
    }

    #[test]
    fn a_file_grants_its_folder_and_a_device_only_itself() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("disk");
        fs::write(&file, "").unwrap();
        let inner = folder.path().join("inner");
        fs::create_dir(&inner).unwrap();
        let link = inner.join("link");
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let found = |path: &Path| {
            let mut paths = Paths::default();
            paths.add_folder_of(path, PathAccess::Read);
            paths.0.into_keys().collect::<Vec<_>>()
        };
        assert_eq!(found(&file), [folder.path()]);
        assert_eq!(found(&link), [folder.path(), &inner]);
        assert_eq!(found(Path::new("/dev/null")), [Path::new("/dev/null")]);
        assert!(found(&folder.path().join("gone")).is_empty());
    }
}
