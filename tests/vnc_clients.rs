//! Third-party viewers at the screen of a machine: they show the display, their input arrives in
//! the guest, and users' mistakes are reported.
#![forbid(unsafe_code)]

#[path = "vnc_clients/eye.rs"]
mod eye;
#[path = "vnc_clients/gvnc.rs"]
mod gvnc;
#[path = "vnc_clients/hands.rs"]
mod hands;
#[path = "vnc_clients/libvnc.rs"]
mod libvnc;
#[path = "vnc_clients/machine.rs"]
mod machine;
#[path = "vnc_clients/novnc.rs"]
mod novnc;
#[path = "vnc_clients/picture.rs"]
mod picture;
#[path = "vnc_clients/strangers.rs"]
mod strangers;
#[path = "vnc_clients/tigervnc.rs"]
mod tigervnc;
#[path = "vnc_clients/vncdo.rs"]
mod vncdo;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use transom_tests::program::not_run;
use vmm::kvm::KvmSupport;

/// Command lines of the probe: a picture of all colors, and a page of text.
const PATTERN: &str = "draw=yes";
const PAGE: &str = "";

/// The minimum peak signal-to-noise ratio in decibels at the ten quality levels: of a picture that
/// changes everywhere, and of text, which is sent without loss.
const JPEG: [(&str, [f64; 10]); 2] = [
    (PATTERN, [30.0, 30.5, 32.0, 34.5, 35.0, 35.5, 45.5, 46.0, 47.0, 50.5]),
    (PAGE, [f64::INFINITY; 10]),
];

/// A self-signed certificate for `localhost`.
const CERTIFICATE: &str = include_str!("vnc_clients/certificate.pem");
const KEY: &str = include_str!("vnc_clients/key.pem");

/// Whether a test can run on this host. Reports it as skipped otherwise, for `reason` if `others`
/// is false.
fn can(test: &str, reason: &str, others: impl FnOnce() -> bool) -> bool {
    let here = KvmSupport::of_this_host() != KvmSupport::None;
    let all = here && others();
    if !all {
        not_run(test, if here { reason } else { "there is no usable /dev/kvm" });
    }
    all
}

/// Writes a file for a machine or a client, and returns its path.
fn text_file(folder: &Path, name: &str, text: &str) -> Result<String> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    Ok(path.display().to_string())
}
