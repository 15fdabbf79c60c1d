//! Checks the privileges for network interfaces before anything is created, so that a missing one
//! is one clear error and nothing has to be undone.

use std::fs::{self, OpenOptions};
use std::io;
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};

use crate::status::{Failure, Status};

/// linux/capability.h.
const CAP_NET_ADMIN: u32 = 12;
const TUN: &str = "/dev/net/tun";
/// Major and minor number of `TUN`.
const NUMBER: (u32, u32) = (10, 200);
const WAY_OUT: &str = "or set NETWORK=user";

/// Whether the process has CAP_NET_ADMIN.
pub(super) fn is_admin() -> bool {
    has(&fs::read_to_string("/proc/self/status").unwrap_or_default(), CAP_NET_ADMIN)
}

pub(super) fn check_tap() -> anyhow::Result<()> {
    if !is_admin() {
        let sentence =
            format!("NETWORK=nat needs a capability: add --cap-add NET_ADMIN, {WAY_OUT}");
        return Err(Failure::new(Status::Network, sentence));
    }
    if !Path::new(TUN).exists() {
        make_device();
    }
    let Err(error) = OpenOptions::new().read(true).write(true).open(TUN) else { return Ok(()) };
    let sentence = match error.kind() {
        io::ErrorKind::NotFound => format!("there is no {TUN}: add --device {TUN}, {WAY_OUT}"),
        io::ErrorKind::PermissionDenied => format!(
            "{TUN} cannot be opened: add --device {TUN} (mounting the node alone requires a \
             privileged container), {WAY_OUT}"
        ),
        _ => format!("{TUN}: {error}: load the module `tun` on the host, {WAY_OUT}"),
    };
    Err(Failure::new(Status::Network, sentence))
}

/// Whether a capability is in the effective set of `/proc/self/status`.
fn has(status: &str, capability: u32) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    set.is_some_and(|set| set >> capability & 1 == 1)
}

/// Creates the device node, as the reference image does. The caller then tries to open it.
fn make_device() {
    let folder = Path::new(TUN).parent().expect("it has one");
    let mode = Mode::from_raw_mode(0o666);
    let device = makedev(NUMBER.0, NUMBER.1);
    let made = fs::create_dir_all(folder)
        .and_then(|()| Ok(mknodat(CWD, TUN, FileType::CharacterDevice, mode, device)?));
    if let Err(error) = made {
        tracing::debug!("{TUN}: {error}");
    }
}

#[cfg(test)]
mod test {
    use super::*;

    #[test]
    fn a_capability_is_a_bit_of_the_effective_set() {
        let status = "Name:\tx\nCapPrm:\tffffffffffffffff\nCapEff:\t0000000000001000\n";
        assert!(has(status, CAP_NET_ADMIN));
        assert!(!has(status, 13));
        assert!(!has("", CAP_NET_ADMIN));
    }
}
