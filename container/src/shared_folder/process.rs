//! The process that serves the shared folders. It gets its configuration and the open folders at
//! its standard input, with the socket at which the pod passes the guest's connections.
//!
//! Threats: the guest sends anything on any number of connections. The process is in its jail
//! (`jail::server`) before the first of them. Their number is limited by `share::lobby`.

use std::io::{self, Write as _};
use std::os::fd::{AsFd, OwnedFd};
use std::process::ExitCode;
use std::thread::Builder;

use anyhow::{Context as _, bail};
use jail::server::{self, Served};
use share::{Account, Server, Share};
use tracing::level_filters::LevelFilter;

use super::{receive, receive_config};
use crate::files;
use crate::status::Status;

/// The only argument of the process.
pub const WORD: &str = "serve-shared-folders";
/// The server's NetBIOS name.
const HOST: &str = "TRANSOM";

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
    let (config, mut folders) = receive_config()?;
    let connections = folders.pop().context("no socket for connections")?;
    let level = if config.debug { LevelFilter::DEBUG } else { LevelFilter::WARN };
    let log = tracing_subscriber::fmt().with_max_level(level).with_writer(io::stderr);
    log.with_ansi(false).with_target(false).without_time().init();
    // The jail is about the open folders, whatever is at their paths now.
    let paths: Vec<_> = folders.iter().map(files::path_of).collect();
    let mut shares = Vec::new();
    for (folder, open) in config.folders.iter().zip(folders) {
        shares.push(Share {
            name: folder.name.clone(),
            folder: share::Folder::new(open),
            read_only: config.read_only,
        });
    }
    let account = Account::new(&config.user, &config.password);
    let server = Server::new(share::Config { host: HOST.to_owned(), account, shares });
    let served = paths.iter().map(|path| Served { path, read_only: config.read_only });
    for lack in server::enter(&served.collect::<Vec<_>>())? {
        tracing::warn!("{lack}");
    }
    while let Some(stream) = next(&connections)? {
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

/// The next connection. `None` if the pod has ended.
fn next(connections: impl AsFd) -> anyhow::Result<Option<OwnedFd>> {
    loop {
        match receive(&connections, &mut [0]) {
            Ok((0, _)) => return Ok(None),
            // Without a stream: no descriptor was free for it.
            Ok((_, streams)) => {
                if let Some(stream) = streams.into_iter().next() {
                    return Ok(Some(stream));
                }
            }
            Err(error) => bail!("the pod's socket: {error}"),
        }
    }
}
