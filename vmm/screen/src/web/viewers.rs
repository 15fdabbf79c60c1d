//! VNC viewers at the front of a machine that is another process: what lets them in there, beside
//! browsers.

pub use crate::rfb::listen::{Auth, Config, Listener};
pub use crate::rfb::lobby::{Lobby, announce, carry};
pub use crate::rfb::security::Passwords;
pub use crate::rfb::{Admission, Rules, Wire};
