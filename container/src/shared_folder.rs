//! The shared folders: which ones, under which names, and the process that serves them.
//!
//! The guest reaches them by SMB at the gateway's address. The server is a process of its own
//! ([`process`]), because what the guest sends is parsed there: it has no capability, opens nothing
//! outside of the folders, and makes no connections. The pod passes it connected sockets. Another
//! process ([`keeper`]) starts it, and starts it again if it was killed.

pub mod keeper;
pub mod process;

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::Arc;

use anyhow::Context as _;
use rustix::fs::{Mode, OFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::{Deserialize, Serialize};

use crate::disks::below;
use crate::settings::{NetworkKind, Settings};

/// The port of SMB, which clients cannot choose.
pub const PORT: u16 = 445;
/// The name of the first share, as in the reference image. The others have a number.
pub const NAME: &str = "Data";
/// Longer configurations do not exist: a user, a password and three folders.
const MAX_CONFIG: usize = 64 << 10;
/// The maximum number of descriptors of a message: a configuration has one of each folder, and one
/// for connections.
const MAX_DESCRIPTORS: usize = 4;
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
    /// Others may write to the volume: a link there could lead anywhere, and is not followed.
    pub on_volume: bool,
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
            for path in paths {
                let on_volume = path.starts_with(storage);
                let real = below(root, &path);
                let found = if on_volume { fs::symlink_metadata(real) } else { fs::metadata(real) };
                if !found.is_ok_and(|it| it.is_dir()) {
                    continue;
                }
                match refusal(settings, &path, root) {
                    Some(why) => {
                        shares.notes.push(format!("{} is not shared: {why}", path.display()));
                    }
                    None => shares.add(Folder { name: name.clone(), path, on_volume }),
                }
            }
        }
        shares
    }

    /// Whether there is the share that Windows shows as a drive.
    pub fn has_first(&self) -> bool {
        self.folders.iter().any(|folder| folder.name == NAME)
    }

    fn add(&mut self, folder: Folder) {
        match self.folders.iter().find(|it| it.name == folder.name) {
            Some(first) => self.notes.push(format!(
                "{} is not shared: {} is {}",
                folder.path.display(),
                first.shown(),
                first.path.display()
            )),
            None => self.folders.push(folder),
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

fn open(path: &Path, on_volume: bool) -> io::Result<OwnedFd> {
    let follows = if on_volume { OFlags::NOFOLLOW } else { OFlags::empty() };
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC | follows;
    Ok(rustix::fs::open(path, flags, Mode::empty())?)
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
        send(&*self.0, &[0], &[stream.as_fd()])
    }

    /// A new connection, in non-blocking mode.
    pub fn connect(&self) -> io::Result<UnixStream> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_nonblocking(true)?;
        self.pass(theirs)?;
        Ok(ours)
    }
}

/// The main function of a process that [`command`] started, if this is one.
pub fn asked() -> Option<fn() -> ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let (word, None) = (words.next()?, words.next()) else { return None };
    match word.to_str()? {
        keeper::WORD => Some(keeper::main),
        process::WORD => Some(process::main),
        _ => None,
    }
}

/// The command that starts the server's processes, which end with the last [`Connector`]. `program`
/// is `transom`. The folders are opened here, once: another program may replace them later.
pub fn command(program: &Path, config: &Config) -> anyhow::Result<(Command, Connector)> {
    let mut folders = Vec::new();
    for Folder { path, on_volume, .. } in &config.folders {
        folders.push(open(path, *on_volume).with_context(|| path.display().to_string())?);
    }
    let folders: Vec<_> = folders.iter().map(AsFd::as_fd).collect();
    let (ours, theirs) = pair()?;
    let text = serde_json::to_vec(config)?;
    send(&ours, &text, &folders).context("the configuration")?;
    let mut command = Command::new(program);
    // The environment is the pod's, and has passwords.
    command.arg(keeper::WORD).env_clear().stdin(theirs).stdout(Stdio::null());
    command.stderr(Stdio::piped()).process_group(0);
    Ok((command, Connector(Arc::new(ours))))
}

fn pair() -> anyhow::Result<(OwnedFd, OwnedFd)> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    rustix::net::socketpair(AddressFamily::UNIX, kind, flags, None).context("a socket")
}

/// Sends a message with descriptors.
fn send(to: impl AsFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut rights = SendAncillaryBuffer::new(&mut room);
    if !rights.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    rustix::net::sendmsg(to, &[IoSlice::new(bytes)], &mut rights, flags)?;
    Ok(())
}

/// Receives a message with descriptors. It is empty after the end.
fn receive(from: impl AsFd, bytes: &mut [u8]) -> rustix::io::Result<(usize, Vec<OwnedFd>)> {
    let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut rights = RecvAncillaryBuffer::new(&mut room);
    let mut parts = [IoSliceMut::new(bytes)];
    let flags = RecvFlags::CMSG_CLOEXEC;
    let came =
        rustix::io::retry_on_intr(|| rustix::net::recvmsg(&from, &mut parts, &mut rights, flags))?;
    let mut descriptors = Vec::new();
    for message in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(more) = message {
            descriptors.extend(more);
        }
    }
    Ok((came.bytes, descriptors))
}

/// The configuration at the standard input, and the descriptors with it: folders first.
fn receive_config() -> anyhow::Result<(Config, Vec<OwnedFd>)> {
    let mut bytes = vec![0; MAX_CONFIG];
    let out = "it is started by the pod only";
    let (count, descriptors) = receive(rustix::stdio::stdin(), &mut bytes).context(out)?;
    Ok((serde_json::from_slice(&bytes[..count]).context(out)?, descriptors))
}

#[cfg(test)]
mod test {
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
    fn a_link_that_replaced_a_folder_of_the_volume_is_not_opened() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("shared");
        std::os::unix::fs::symlink("/etc", &path).unwrap();
        let command = |on_volume| {
            let folders = vec![Folder { name: NAME.into(), path: path.clone(), on_volume }];
            let (user, password) = ("Docker".into(), "secret".into());
            let config = Config { user, password, read_only: true, folders, debug: false };
            command(Path::new("transom"), &config).map(drop)
        };
        assert!(command(false).is_ok());
        let error = format!("{:#}", command(true).unwrap_err());
        assert!(error.contains("/shared: Not a directory"), "{error}");
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
