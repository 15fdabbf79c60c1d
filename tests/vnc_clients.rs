//! Viewers that nobody here wrote, at the screen of a machine: what they show is what is on its
//! display, what is done at them arrives in the guest, and who makes mistakes is told so.
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
use vmm::kvm::Situation;

/// Words of the probe: all colours, and a page of text.
const PATTERN: &str = "draw=yes";
const PAGE: &str = "";

/// The least peak signal-to-noise ratio at the ten levels of quality, in decibels: of colours that
/// change everywhere, and of text, which is sent as it is.
const JPEG: [(&str, [f64; 10]); 2] = [
    (PATTERN, [30.0, 30.5, 32.0, 34.5, 35.0, 35.5, 45.5, 46.0, 47.0, 50.5]),
    (PAGE, [f64::INFINITY; 10]),
];

/// For `localhost`, signed by itself.
const CERTIFICATE: &str = include_str!("vnc_clients/certificate.pem");
const KEY: &str = include_str!("vnc_clients/key.pem");

/// Whether a test can run here; says so if not. `reason` is why, where `others` is false.
fn can(test: &str, reason: &str, others: impl FnOnce() -> bool) -> bool {
    let here = Situation::of_this_host() != Situation::None;
    let all = here && others();
    if !all {
        not_run(test, if here { reason } else { "there is no usable /dev/kvm" });
    }
    all
}

/// Writes a file for a machine or a client; its path.
fn text_file(folder: &Path, name: &str, text: &str) -> Result<String> {
    let path = folder.join(name);
    fs::write(&path, text).with_context(|| path.display().to_string())?;
    Ok(path.display().to_string())
}
