//! The process that serves the shared folders. It gets its configuration and the guest's
//! connections from the pod, at its standard input.
//!
//! Threats: the guest sends anything on any number of connections. The process is in its jail
//! (`jail::server`) before the first of them. Their number is limited by `share::lobby`.

use std::fs::File;
use std::io::{self, IoSliceMut, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::process::ExitCode;
use std::thread::Builder;

use anyhow::{Context as _, bail};
use jail::server::{self, Served};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use share::{Account, Server, Share};
use tracing::level_filters::LevelFilter;

use super::Config;
use crate::status::Status;

/// The only argument of the process.
pub const WORD: &str = "serve-shared-folders";
/// The server's NetBIOS name.
const HOST: &str = "TRANSOM";
/// Longer configurations do not exist: a user, a password and three folders.
const MAX_CONFIG: usize = 64 << 10;

/// Whether this process was started to serve.
pub fn is_asked() -> bool {
    let mut words = std::env::args_os().skip(1);
    words.next().is_some_and(|word| word == WORD) && words.next().is_none()
}

/// Serves until the pod has ended.
pub fn main() -> ExitCode {
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            writeln!(io::stderr(), "{error:#}").ok();
            ExitCode::from(Status::Failed.code())
        }
    }
}

fn serve() -> anyhow::Result<()> {
    let config = config()?;
    let level = if config.debug { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr);
    log.with_ansi(false).with_target(false).without_time().init();
    let mut shares = Vec::new();
    for folder in &config.folders {
        let open = File::open(&folder.path).with_context(|| folder.path.display().to_string())?;
        shares.push(Share {
            name: folder.name.clone(),
            folder: share::Folder::new(open.into()),
            read_only: config.read_only,
        });
    }
    let account = Account::new(&config.user, &config.password);
    let server = Server::new(share::Config { host: HOST.to_owned(), account, shares });
    let served = config.folders.iter();
    let served = served.map(|it| Served { path: &it.path, read_only: config.read_only });
    for lack in server::enter(&served.collect::<Vec<_>>())? {
        tracing::warn!("{lack}");
    }
    while let Some(stream) = next()? {
        let Some(place) = server.admit(stream) else {
            tracing::warn!("wrong passwords on many connections: another one is refused");
            continue;
        };
        let (server, thread) = (server.clone(), Builder::new().name("client".into()));
        if let Err(error) = thread.spawn(move || share::serve(&server, place)) {
            tracing::warn!("a connection is refused: {error}");
        }
    }
    Ok(())
}

fn config() -> anyhow::Result<Config> {
    let mut bytes = vec![0; MAX_CONFIG];
    let input = rustix::stdio::stdin();
    let out = "it is started by the pod only";
    let (_, count) = rustix::net::recv(input, &mut bytes[..], RecvFlags::empty()).context(out)?;
    serde_json::from_slice(&bytes[..count]).context(out)
}

/// The next connection. `None` if the pod has ended.
fn next() -> anyhow::Result<Option<OwnedFd>> {
    let mut byte = [0];
    loop {
        let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = RecvAncillaryBuffer::new(&mut room);
        let mut parts = [IoSliceMut::new(&mut byte)];
        let (input, flags) = (rustix::stdio::stdin(), RecvFlags::CMSG_CLOEXEC);
        let count = match rustix::net::recvmsg(input, &mut parts, &mut rights, flags) {
            Ok(came) => came.bytes,
            Err(rustix::io::Errno::INTR) => continue,
            Err(error) => bail!("the pod's socket: {error}"),
        };
        for message in rights.drain() {
            if let RecvAncillaryMessage::ScmRights(mut streams) = message
                && let Some(stream) = streams.next()
            {
                return Ok(Some(stream));
            }
        }
        // Without a stream: no descriptor was free for it.
        if count == 0 {
            return Ok(None);
        }
    }
}
