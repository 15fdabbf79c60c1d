//! The host's side of devices: files, sockets, terminals. Nothing here knows of the guest.

pub mod channel;
pub mod disk;
pub mod lock;
pub mod net;
pub mod stream;
pub mod swtpm;
