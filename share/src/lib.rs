//! An SMB server (2.1 to 3.1.1) of folders for one account: [`Server`], which admits connections,
//! and [`serve`] for each of them.
//!
//! Threats: the client sends anything and never reads. A connection is one thread that handles one
//! request at a time, so that it holds at most one request and one answer. Requests must be signed
//! or encrypted by the account; there is neither a guest nor SMB 1. Paths are resolved in
//! `folder.rs`.

pub mod connection;
pub mod folder;
pub mod hash;
pub mod keys;
pub mod listing;
pub mod lobby;
pub mod message;
pub mod names;
pub mod ntlm;
pub mod pipe;
pub mod serve;
pub mod server;
pub mod spnego;
pub mod status;
pub mod table;
pub mod volume;
pub mod window;
pub mod wire;

pub use connection::Connection;
pub use folder::Folder;
pub use ntlm::Account;
pub use serve::serve;
pub use server::{Config, Server, Share};
