//! A server at a port of the loopback, with one share.

use std::fs;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::thread;

use share::{Account, Config, Folder, Server, Share, serve};

/// The name and password of the account, as Samba's programs take them.
pub(crate) const ACCOUNT: &str = "docker%secret";

/// Shares a folder as `Data`, and returns the port.
pub(crate) fn start(root: &Path, read_only: bool) -> anyhow::Result<u16> {
    let open: OwnedFd = fs::File::open(root)?.into();
    let server = Server::new(Config {
        host: "TRANSOM".to_owned(),
        account: Account::new("docker", "secret"),
        shares: vec![Share { name: "Data".to_owned(), folder: Folder::new(open), read_only }],
    });
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let Ok(stream) = stream else { return };
            stream.set_nodelay(true).ok();
            if let Some(place) = server.admit(stream.into()) {
                let server = server.clone();
                thread::spawn(move || serve(&server, place));
            }
        }
    });
    Ok(port)
}
