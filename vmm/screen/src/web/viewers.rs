//! Types for programs that serve VNC viewers for a machine in another process, beside browsers.

pub use crate::rfb::listen::{Auth, Config, Listener};
pub use crate::rfb::lobby::{Lobby, announce, copy_both_ways};
pub use crate::rfb::security::Passwords;
pub use crate::rfb::{Admission, Rules, Wire};
