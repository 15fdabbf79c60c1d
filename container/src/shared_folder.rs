//! The shared folders: which ones, under which names, and the process that serves them.
//!
//! The guest reaches them by SMB at the gateway's address. The server is a process of its own
//! ([`process`]), because what the guest sends is parsed there: it has no capability, opens nothing
//! outside of the folders, and makes no connections. The pod passes it connected sockets.

pub mod process;

use std::fs;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use anyhow::Context as _;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::disks::below;
use crate::settings::{NetworkKind, Settings};

/// The port of SMB, which clients cannot choose.
pub const PORT: u16 = 445;
/// The name of the first share, as in the reference image. The others have a number.
pub const NAME: &str = "Data";
/// Folders of each share, the best first. On the volume they are below its folder.
const FOLDERS: [&[Place]; 3] = [
    &[Place::Mount("shared"), Place::Volume("shared"), Place::Mount("data"), Place::Volume("data")],
    &[Place::Mount("shared2"), Place::Mount("data2")],
    &[Place::Mount("shared3"), Place::Mount("data3")],
];

#[derive(Clone, Copy)]
enum Place {
    Mount(&'static str),
    Volume(&'static str),
}

/// A folder, and the name of its share.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Folder {
    pub name: String,
    pub path: PathBuf,
}

/// The configuration of the server's process.
#[derive(Serialize, Deserialize)]
pub struct Config {
    pub user: String,
    pub password: String,
    pub read_only: bool,
    pub folders: Vec<Folder>,
    pub debug: bool,
}

/// The folders that are shared, and notes about those that are not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    pub folders: Vec<Folder>,
    pub notes: Vec<String>,
}

impl Shares {
    /// The folders below `root` that the settings share.
    pub fn of(settings: &Settings, root: &Path) -> Self {
        let mut shares = Self::default();
        if !settings.shares.on {
            return shares;
        }
        let storage = &settings.storage.folder;
        for (number, places) in (1..).zip(FOLDERS) {
            let name = if number == 1 { NAME.to_owned() } else { format!("{NAME}{number}") };
            let paths = places.iter().map(|place| match place {
                Place::Mount(name) => Path::new("/").join(name),
                Place::Volume(name) => storage.join(name),
            });
            // Others may write to the volume: a link there could lead anywhere.
            let is_folder = |path: &PathBuf| match path.starts_with(storage) {
                true => fs::symlink_metadata(below(root, path)).is_ok_and(|it| it.is_dir()),
                false => below(root, path).is_dir(),
            };
            for path in paths.filter(is_folder) {
                match refusal(settings, &path, root) {
                    Some(why) => {
                        shares.notes.push(format!("{} is not shared: {why}", path.display()));
                    }
                    None => shares.add(&name, path),
                }
            }
        }
        shares
    }

    /// Whether there is the share that Windows shows as a drive.
    pub fn has_first(&self) -> bool {
        self.folders.iter().any(|folder| folder.name == NAME)
    }

    fn add(&mut self, name: &str, path: PathBuf) {
        match self.folders.iter().find(|it| it.name == name) {
            Some(first) => self.notes.push(format!(
                "{} is not shared: {} is {}",
                path.display(),
                first.shown(),
                first.path.display()
            )),
            None => self.folders.push(Folder { name: name.to_owned(), path }),
        }
    }
}

/// Why a folder is not shared.
fn refusal(settings: &Settings, path: &Path, root: &Path) -> Option<&'static str> {
    let whole = |path: &Path| {
        let path = below(root, path);
        path.canonicalize().unwrap_or(path)
    };
    if whole(&settings.storage.folder).starts_with(whole(path)) {
        return Some("it has the machine's disks: mount a folder of its own as /shared");
    }
    match settings.network.kind {
        NetworkKind::None => Some("the guest has no network: leave NETWORK out"),
        _ if settings.network.dhcp => Some(
            "with DHCP=Y the guest is not on the pod's network: leave DHCP out, or copy files \
             through a remote desktop",
        ),
        _ => None,
    }
}

impl Folder {
    /// The address for Windows.
    pub fn shown(&self) -> String {
        format!("\\\\host.lan\\{}", self.name)
    }
}

/// Passes connections of the guest to the server's process.
#[derive(Clone, Debug)]
pub struct Connector(Arc<OwnedFd>);

impl Connector {
    /// Passes a connected stream, which must not be in non-blocking mode.
    ///
    /// # Errors
    ///
    /// If the process has ended, or has too many of them to take.
    pub fn pass(&self, stream: impl AsFd) -> io::Result<()> {
        let streams = [stream.as_fd()];
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut room);
        // The buffer has room for one.
        rights.push(SendAncillaryMessage::ScmRights(&streams));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(&*self.0, &[IoSlice::new(&[0])], &mut rights, flags)?;
        Ok(())
    }

    /// A new connection, in non-blocking mode.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        self.pass(theirs)?;
        Ok(ours)
    }
}

/// The command that starts the server's process, which ends with the last [`Connector`]. `program`
/// is `transom`.
pub fn command(program: &Path, config: &Config) -> anyhow::Result<(Command, Connector)> {
    let (ours, theirs) = rustix::net::socketpair(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )
    .context("a socket")?;
    let text = serde_json::to_vec(config)?;
    rustix::net::send(&ours, &text, SendFlags::NOSIGNAL).context("the configuration")?;
    let mut command = Command::new(program);
    // The environment is the pod's, and has passwords.
    command.arg(process::WORD).env_clear().stdin(theirs).stdout(Stdio::null());
    command.stderr(Stdio::piped()).process_group(0);
    Ok((command, Connector(Arc::new(ours))))
}

#[cfg(test)]
mod test {
    use std::fs;

    use super::*;
    use crate::settings::environment::read;

    fn shares(root: &Path, words: &[(&str, &str)]) -> (Vec<String>, Vec<String>) {
        let words = words.iter().map(|(name, text)| (name.into(), text.into())).collect();
        let shares = Shares::of(&read(&words).unwrap().settings, root);
        let shown = shares.folders.iter().map(|it| format!("{} {}", it.name, it.path.display()));
        (shown.collect(), shares.notes)
    }

    #[test]
    fn folders_have_the_names_of_the_reference_image() {
        let root = tempfile::tempdir().unwrap();
        let make = |name: &str| fs::create_dir_all(root.path().join(name)).unwrap();
        make("storage");
        assert_eq!(shares(root.path(), &[]), (vec![], vec![]));
        make("storage/data");
        make("data2");
        assert_eq!(shares(root.path(), &[]).0, ["Data /storage/data", "Data2 /data2"]);
        // A file of this name is a disk.
        fs::write(root.path().join("data"), "").unwrap();
        ["shared", "shared2", "shared3"].into_iter().for_each(make);
        let (folders, notes) = shares(root.path(), &[]);
        assert_eq!(folders, ["Data /shared", "Data2 /shared2", "Data3 /shared3"]);
        assert_eq!(notes[0], r"/storage/data is not shared: \\host.lan\Data is /shared");
        assert_eq!(notes.len(), 2);
        assert_eq!(shares(root.path(), &[("SAMBA", "N")]), (vec![], vec![]));
    }

    #[test]
    fn folders_that_cannot_be_shared_are_reported() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("data/shared")).unwrap();
        let (folders, notes) = shares(root.path(), &[("STORAGE", "/data")]);
        assert_eq!(folders, ["Data /data/shared"]);
        assert!(notes[0].starts_with("/data is not shared: it has the machine's disks"));
        for (name, value) in [("NETWORK", "none"), ("DHCP", "Y")] {
            fs::create_dir_all(root.path().join("shared")).unwrap();
            let (folders, notes) = shares(root.path(), &[(name, value)]);
            assert!(folders.is_empty() && notes[0].contains(name), "{folders:?} {notes:?}");
        }
        // Links of the volume are not followed, wherever they lead.
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("storage")).unwrap();
        fs::create_dir_all(root.path().join("etc")).unwrap();
        for target in [".", "../etc"] {
            let link = root.path().join("storage/shared");
            std::os::unix::fs::symlink(target, &link).unwrap();
            assert_eq!(shares(root.path(), &[]).0, [""; 0]);
            fs::remove_file(link).unwrap();
        }
    }
}
