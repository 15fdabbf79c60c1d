//! IronRDP's own server, as a judge of the desktop's page: a desktop that takes each size that its
//! client asks for, and a clipboard for text and files.
//!
//!     rdp_server ADDRESS FOLDER USER PASSWORD
//!
//! FOLDER has `cert.pem` and `key.pem`, in `out` the files that the desktop copies, and in `in`
//! those that it pastes. Each line of the input is an order:
//!
//! - `text TEXT`: copies a text;
//! - `files`: copies the files of `out`;
//! - `paste`: pastes what the client has copied.
//!
//! Each line of the output is an event: `size WIDTHxHEIGHT`, `offered text`, `offered files`,
//! `pasted TEXT`, or `pasted files`.
#![forbid(unsafe_code)]

mod clipboard;
mod display;

use std::env;
use std::io::stdin;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;

use anyhow::{Context as _, Result};
use clipboard::{Clipboard, Factory};
use display::Display;
use ironrdp_server::{Credentials, RdpServer, TlsIdentityCtx};

/// The port of remote desktops.
const RDP: u16 = 3389;

fn main() -> Result<()> {
    let usage = "usage: rdp_server ADDRESS FOLDER USER PASSWORD";
    let words: Vec<_> = env::args().skip(1).collect();
    let [address, folder, user, password] = words.try_into().ok().context(usage)?;
    let folder = PathBuf::from(folder);
    let identity =
        TlsIdentityCtx::init_from_paths(&folder.join("cert.pem"), &folder.join("key.pem"))?;
    let clipboard = Arc::new(Clipboard::new(folder));
    let mut server = RdpServer::builder()
        .with_addr(SocketAddr::new(address.parse::<IpAddr>()?, RDP))
        .with_hybrid(identity.make_acceptor()?, identity.pub_key)
        .with_no_input()
        .with_display_handler(Display::default())
        .with_cliprdr_factory(Some(Box::new(Factory(clipboard.clone()))))
        .build();
    server.set_credentials(Some(Credentials { username: user, password, domain: None }));
    // The process ends with the server, not with its input.
    thread::spawn(move || stdin().lines().map_while(Result::ok).for_each(|it| clipboard.obey(&it)));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(server.run())
}
